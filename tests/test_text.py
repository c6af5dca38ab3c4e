"""Texts become tokens and batches: every format, the same batches every time, an iterator that goes on where it was."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors, trainers

from models import text
from models.tokenizer import Tokenizer

TEXT = "To be, or not to be: that is the question. Größe, 質, 🙂.\n" * 40


def tokens_of(corpus: text.Corpus) -> np.ndarray:
    return np.concatenate([corpus.train, corpus.validation])


def take(tokens: np.ndarray, count: int, seed: int | None, batch: int = 3, length: int = 16) -> list[np.ndarray]:
    return list(itertools.islice(iter(text.batches(tokens, batch, length, seed)), count))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A small byte-pair tokenizer, trained here."""
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    encoder.train_from_iterator([TEXT], trainer)
    encoder.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


# --- formats ----------------------------------------------------------------------------------------------------------


def test_a_file_gives_its_utf8_bytes_and_its_end_is_for_validation(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    corpus = text.load_corpus(tmp_path / "a.txt", None)
    assert tokens_of(corpus).tobytes() == TEXT.encode()
    assert len(corpus.validation) == int(0.05 * len(TEXT.encode()))
    assert corpus.vocab_size == 256


def test_a_folder_gives_its_files_in_order_of_their_names(tmp_path: Path):
    (tmp_path / "b" / "deeper").mkdir(parents=True)
    for name, content in {"c.txt": "third", "a.txt": "first", "b/deeper/z": "second"}.items():
        (tmp_path / name).write_text(content)
    assert tokens_of(text.load_corpus(tmp_path, None)).tobytes() == b"first\n\nsecond\n\nthird"


def test_a_bin_file_gives_the_tokens_that_were_written(tmp_path: Path):
    tokens = np.random.default_rng(0).integers(0, 50_257, 2_000).astype(np.uint16)
    tokens[7] = 50_256
    tokens.tofile(tmp_path / "train.bin")  # as nanoGPT's prepare.py does
    corpus = text.load_corpus(tmp_path / "train.bin", None)
    np.testing.assert_array_equal(tokens_of(corpus), tokens)
    assert corpus.vocab_size == 50_304  # as nanoGPT rounds it: 128 divides it
    np.testing.assert_array_equal(take(corpus.train, 1, None)[0][1], tokens[16:33])


def test_a_tokenizer_gives_tokens_that_decode_to_the_text(tmp_path: Path, tokenizer: Path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    corpus = text.load_corpus(tmp_path / "a.txt", tokenizer)
    decoder = tokenizers.Tokenizer.from_file(str(tokenizer))
    decoder.decoder = tokenizers.decoders.ByteLevel()
    tokens = tokens_of(corpus)
    assert decoder.decode(tokens.tolist()) == TEXT
    assert len(tokens) < len(TEXT.encode()) / 2
    assert tokens.max() < decoder.get_vocab_size() <= corpus.vocab_size == 384


def test_a_tokenizer_that_would_truncate_or_pad_gives_the_whole_text(tmp_path: Path, tokenizer: Path):
    for name, content in {"a.txt": TEXT, "b.txt": "short"}.items():
        (tmp_path / "texts" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_text(content, encoding="utf-8")
    wanted = tokens_of(text.load_corpus(tmp_path / "texts", tokenizer))
    encoder = tokenizers.Tokenizer.from_file(str(tokenizer))
    encoder.enable_truncation(16)
    encoder.enable_padding(length=64)
    encoder.save(str(tokenizer))
    np.testing.assert_array_equal(tokens_of(text.load_corpus(tmp_path / "texts", tokenizer)), wanted)


def test_a_models_tokenizer_ends_every_text_with_its_end_of_text_token_once(tmp_path: Path):
    (tmp_path / "texts").mkdir()
    for name, content in {"a.txt": "to be", "b.txt": "or not", "c.txt": ""}.items():
        (tmp_path / "texts" / name).write_text(content)
    words = {word: i for i, word in enumerate(["<begin>", "<end>", "to", "be", "or", "not"])}
    encoder = tokenizers.Tokenizer(models.WordLevel(words, "or"))
    encoder.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(word, words[word]) for word in ("<begin>", "<end>")]
    for template, wanted in (
        (None, [2, 3, 1, 4, 5, 1, 1]),
        ("<begin> $A", [0, 2, 3, 1, 0, 4, 5, 1, 0, 1]),
        ("<begin> $A <end>", [0, 2, 3, 1, 0, 4, 5, 1, 0, 1]),
    ):
        if template is not None:
            encoder.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
        tokenizer = Tokenizer(encoder, frozenset(), None, None, {"eos_token": "<end>"})
        corpus = text.load_corpus(tmp_path / "texts", tokenizer)
        assert tokens_of(corpus).tolist() == wanted
        assert corpus.largest == 5
    tokenizer = Tokenizer(encoder, frozenset(), None, None, {})
    assert tokens_of(text.load_corpus(tmp_path / "texts", tokenizer)).tolist() == wanted


def test_a_bin_file_is_of_the_models_tokens(tmp_path: Path, tokenizer: Path):
    np.arange(1_000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    words = Tokenizer(tokenizers.Tokenizer.from_file(str(tokenizer)), frozenset(), None, None, {})
    corpus = text.load_corpus(tmp_path / "train.bin", words)
    np.testing.assert_array_equal(tokens_of(corpus), np.arange(1_000))
    assert corpus.largest == 999


def test_a_vocabulary_with_gaps_has_room_for_its_largest_token(tmp_path: Path):
    vocabulary = {"to": 0, "be": 900, "[UNK]": 5}
    encoder = tokenizers.Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    encoder.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("to be or not to be")
    corpus = text.load_corpus(tmp_path / "a.txt", tmp_path / "tokenizer.json")
    assert tokens_of(corpus).tolist() == [0, 900, 5, 5, 0, 900]
    assert corpus.vocab_size == 1024


def test_without_data_there_are_the_speeches(monkeypatch: pytest.MonkeyPatch):
    corpus = text.load_corpus(None, None)
    assert 10e6 < len(tokens_of(corpus)) < 15e6
    assert "Congress" in corpus.train[:20_000].tobytes().decode(errors="replace")
    for tokens in (corpus.train, text.load_corpus(None, None).train):
        assert tokens[:1_000].tobytes() == corpus.train[:1_000].tobytes()


# --- batches ----------------------------------------------------------------------------------------------------------

TOKENS = np.arange(1_000, dtype=np.uint16)


@pytest.mark.quick
def test_windows_overlap_by_one_token_and_come_in_order_without_a_seed():
    first, second = take(TOKENS, 2, None)
    assert first.shape == (3, 17) and first.dtype == np.int32
    np.testing.assert_array_equal(first, [np.arange(at, at + 17) for at in (0, 16, 32)])
    np.testing.assert_array_equal(second[0], np.arange(48, 65))


def test_a_pass_has_every_window_once_and_the_next_has_another_order():
    windows = (len(TOKENS) - 1) // 16
    starts = np.concatenate([batch[:, 0] for batch in take(TOKENS, 2 * windows, 0, batch=1)])
    first, second = starts[:windows], starts[windows:]
    assert sorted(first) == sorted(second) == list(range(0, 16 * windows, 16))
    assert list(first) != list(second)


def test_a_seed_gives_the_same_batches_again_and_another_seed_others():
    same, again, other = (np.stack(take(TOKENS, 50, seed)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(same, again)
    assert np.any(same != other)


@pytest.mark.quick
@pytest.mark.parametrize("taken", [0, 1, 19, 20, 21, 50])
def test_an_iterator_goes_on_from_a_state_that_went_through_json(taken: int):
    iterator = iter(text.batches(TOKENS, 3, 16, 3))
    for _ in range(taken):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    wanted = [next(iterator) for _ in range(30)]
    other = iter(text.batches(TOKENS, 3, 16, 3))
    next(other)
    other.set_state(state)
    np.testing.assert_array_equal([next(other) for _ in range(30)], wanted)


# --- wrong input ------------------------------------------------------------------------------------------------------


def test_wrong_files_are_named_with_what_is_wrong(tmp_path: Path, tokenizer: Path):
    def error_of(data: Path, tokenizer: Path | None = None) -> str:
        with pytest.raises((ValueError, FileNotFoundError)) as raised:
            text.load_corpus(data, tokenizer)
        return str(raised.value)

    folder = tmp_path / "texts"
    folder.mkdir()
    assert f"data must hold text, found none in {folder}" in error_of(folder)
    (folder / "empty.txt").write_text("")
    assert f"data must hold text, found none in {folder}" in error_of(folder)
    (folder / "latin.txt").write_bytes(b"Gr\xf6\xdfe")
    assert f"data must be UTF-8 text, found {folder / 'latin.txt'}" in error_of(folder)
    (tmp_path / "empty.bin").write_bytes(b"")
    assert f"found {tmp_path / 'empty.bin'} of 0 bytes" in error_of(tmp_path / "empty.bin")
    assert "tokenizer must be left out with a token file" in error_of(tmp_path / "empty.bin", tokenizer)
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    assert "tokenizer must be an existing" in error_of(tmp_path / "a.txt", tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{}")
    message = error_of(tmp_path / "a.txt", tmp_path / "broken.json")
    assert f"tokenizer must be a tokenizer.json, found {tmp_path / 'broken.json'}" in message


@pytest.mark.parametrize("tokens", [0, 1, 16, 48])
def test_too_few_tokens_for_a_batch_is_an_error_that_says_how_many_there_are(tokens: int):
    with pytest.raises(
        ValueError,
        match=rf"data must hold at least 3 windows of 17 tokens .* \({tokens} tokens; 5% of .* for validation\)",
    ):
        text.batches(TOKENS[:tokens], 3, 16, None)
    assert len(take(TOKENS[:49], 1, None)) == 1
