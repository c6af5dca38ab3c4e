"""A published model's tokenizer: text to token ids and back, its chat template, and the tokens that end a reply."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from models.gguf_file import read_fields

_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """What `load` found.

    `stop_ids` end a reply. `bos_id` is what `encode` puts before a text, None if nothing. `special_tokens` are the
    strings that the chat template may name: `bos_token` and `eos_token`, where the checkpoint has them.
    """

    encoder: tokenizers.Tokenizer
    stop_ids: frozenset[int]
    bos_id: int | None
    chat_template: str | None
    special_tokens: Mapping[str, str]

    def encode(self, text: str) -> list[int]:
        """Ids of a raw text, with what the checkpoint puts around one, such as Llama 3's `<|begin_of_text|>`."""
        return self._ids(text, True)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation up to where the model's reply starts.

        Args:
          messages: of `role` and `content`. A special token spelled out in a content becomes that token, as it does in
            transformers: a user who writes `<|im_end|>` ends their own turn.

        Raises:
          ValueError: there is no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("the checkpoint must have a chat template for messages, found none: encode a raw text")
        try:
            # Templates tell "no tools" by None, not by a name that is undefined.
            text = _compiled(self.chat_template).render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **self.special_tokens
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise ValueError(f"the chat template failed on these messages: {error}") from error
        return self._ids(text, False)  # the template has written the special tokens

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.encoder.decode(ids, skip_special_tokens=True)

    def stream(self) -> Stream:
        """A decoder for ids that come one at a time."""
        return Stream(self.encoder)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        text.encode()  # a lone surrogate is a ValueError that says so; the library says that text must be str
        return self.encoder.encode(text, add_special_tokens=add_special_tokens).ids


class Stream:
    """Text of a reply while its tokens come: everything that `push` and then `flush` return is `decode` of all ids.

    That holds for byte-level BPE, and for byte fallback (Llama 2) while its bytes are UTF-8. The library's own
    DecodeStream raises where they are not, and cannot flush.
    """

    def __init__(self, encoder: tokenizers.Tokenizer):
        self._encoder = encoder
        # Ids since the last text but one: a decoder may treat the first token of a text in its own way. So many of them
        # have been returned, as this text.
        self._ids: list[int] = []
        self._returned, self._known = 0, ""

    def push(self, token: int) -> str:
        """Take one id; return the text that is now certain, which never ends inside a character."""
        self._ids.append(token)
        text = self._decode()
        if len(text) <= len(self._known) or text.endswith("\ufffd"):
            return ""
        new = text[len(self._known) :]
        self._ids = self._ids[self._returned :]
        self._returned, self._known = len(self._ids), self._decode()
        return new

    def flush(self) -> str:
        """After the last id: return what was held back."""
        return self._decode()[len(self._known) :]

    def _decode(self) -> str:
        return self._encoder.decode(self._ids, skip_special_tokens=True)


def copy_files(source: Path, folder: Path) -> None:
    """Put the tokenizer of a checkpoint, a folder or a .gguf file, into a folder of `models.weights.save`."""
    source, folder = Path(source), Path(folder)
    if source.is_dir():
        for file in (source / name for name in _FILES):
            if file.exists():
                shutil.copyfile(file, folder / file.name)
        return
    words = load(source)
    words.encoder.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": words.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **words.special_tokens}, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(words.stop_ids)}))


def load_encoder(file: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json alone. Raises FileNotFoundError or ValueError, naming the file."""
    if not file.is_file():
        raise FileNotFoundError(f"tokenizer must be an existing tokenizer.json, found {file}")
    try:
        encoder = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"tokenizer must be a tokenizer.json, found {file}: {error}") from error
    encoder.no_truncation()  # the file may ask for both, meant for single sentences
    encoder.no_padding()
    return encoder


def load(path: Path) -> Tokenizer:
    """Read a checkpoint's tokenizer.

    Args:
      path: a folder in Hugging Face layout, or a `.gguf` file with a byte-level BPE tokenizer.

    Raises:
      ValueError, FileNotFoundError: naming the file and what is wrong with it.
    """
    path = Path(path)
    if path.is_dir():
        return _from_folder(path)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    raise FileNotFoundError(f"path must be a checkpoint's folder or a .gguf file, found {path}")


# --- Hugging Face layout ----------------------------------------------------------------------------------------------


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"path must be a folder with a tokenizer.json, found no {file}")
    encoder = load_encoder(file)
    file = folder / "tokenizer_config.json"
    settings = _json(file)
    special_tokens = {}
    for name in ("bos_token", "eos_token"):
        found = settings.get(name)
        token = found.get("content") if isinstance(found, dict) else found
        if token is None:
            continue
        if not isinstance(token, str) or encoder.token_to_id(token) is None:
            raise ValueError(f"{file}: {name} must be a token of tokenizer.json, found {found!r}")
        special_tokens[name] = token

    stop_ids = _stop_ids(folder, encoder)
    if (eos_id := encoder.token_to_id(special_tokens.get("eos_token", ""))) is not None:
        stop_ids.add(eos_id)
    return _tokenizer(encoder, stop_ids, _chat_template(folder, settings), special_tokens)


def _stop_ids(folder: Path, encoder: tokenizers.Tokenizer) -> set[int]:
    """`eos_token_id` of the first file that has one."""
    for file in (folder / "generation_config.json", folder / "config.json"):
        found = _json(file).get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        vocabulary = set(encoder.get_vocab().values())
        if not all(type(i) is int and i in vocabulary for i in ids):
            raise ValueError(f"{file}: eos_token_id must be ids of tokenizer.json, found {found!r}")
        return set(ids)
    return set()


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _text(file)
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = named[0].get("template") if named else found
    if found is not None and not isinstance(found, str):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be text, or a list of name and template with a "
            f"default, found {found!r:.200}"
        )
    return found


def _json(file: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} must be JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object, found {found!r:.200}")
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be UTF-8 text: {error}") from error


# --- GGUF -------------------------------------------------------------------------------------------------------------


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that Llama 3 and Qwen 2 share but for how many digits stay together."""
    words = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# By `tokenizer.ggml.pre`: a wrong one gives other ids without any error, so there is none for unknown names. Not even
# for `default`, which says that the converter did not know the model.
_PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}

# A GGUF file names one end of a reply, where its model may know several; these are the others' usual names.
_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>"})


def _from_gguf(path: Path) -> Tokenizer:
    found = read_fields(path, "tokenizer.", arrays=True)
    import gguf  # slow to import, and only needed here

    _one_of(found, "tokenizer.ggml.model", ("gpt2",), path)  # byte-level BPE; others need their own scores
    pre = _one_of(found, "tokenizer.ggml.pre", tuple(_PRE_TOKENIZERS), path)
    tokens = _listed(found, "tokenizer.ggml.tokens", str, path)
    types = _listed(found, "tokenizer.ggml.token_type", int, path)
    merges = _listed(found, "tokenizer.ggml.merges", str, path)
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise ValueError(
            f"{path}: tokenizer.ggml.tokens must differ and have a token_type each, found {len(tokens)} tokens, "
            f"{len(set(tokens))} different, and {len(types)} types"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        pairs = [(first, second) for first, second in (merge.split(" ") for merge in merges)]
        # Llama 3's merges do not lead to every token: a word that is a token is taken whole.
        bpe = models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: tokenizer.ggml.merges must each join two of its tokens: {error}") from error

    encoder = tokenizers.Tokenizer(bpe)
    encoder.pre_tokenizer = _PRE_TOKENIZERS[pre]
    encoder.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        encoder.normalizer = normalizers.NFC()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    added = [token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.USER_DEFINED]
    encoder.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in control])
    encoder.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added])

    named = {}
    for name in ("bos", "eos", "eot", "eom"):
        index = _typed(found, f"tokenizer.ggml.{name}_token_id", int, path)
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            raise ValueError(
                f"{path}: tokenizer.ggml.{name}_token_id must be one of {len(tokens)} tokens, found {index}"
            )
        named[name] = index
    special_tokens = {f"{name}_token": tokens[named[name]] for name in ("bos", "eos") if name in named}
    add_bos = _typed(found, "tokenizer.ggml.add_bos_token", bool, path)
    if add_bos is None:
        add_bos = pre == "llama-bpe"  # as llama.cpp has it
    if add_bos:
        if "bos" not in named:
            raise ValueError(f"{path}: tokenizer.ggml.bos_token_id must be there to put before a text, found none")
        bos = {"id": "bos", "ids": [named["bos"]], "tokens": [special_tokens["bos_token"]]}
        encoder.post_processor = processors.TemplateProcessing(single=["bos", "$A"], special_tokens=[bos])
    stop_ids = {named[name] for name in ("eos", "eot", "eom") if name in named}
    stop_ids.update(vocabulary[token] for token in _ENDS.intersection(control))
    return _tokenizer(encoder, stop_ids, _typed(found, "tokenizer.chat_template", str, path), special_tokens)


def _one_of(found: dict[str, Any], name: str, allowed: tuple[str, ...], path: Path) -> str:
    value = found.get(name)
    if value not in allowed:
        raise ValueError(f"{path}: {name} must be one of {', '.join(allowed)}, found {value!r:.200}")
    return value


def _listed(found: dict[str, Any], name: str, kind: type, path: Path) -> list[Any]:
    value = found.get(name)
    if not isinstance(value, list) or not all(type(entry) is kind for entry in value):
        raise ValueError(f"{path}: {name} must be a list of {kind.__name__}, found {value!r:.200}")
    return value


def _typed(found: dict[str, Any], name: str, kind: type, file: Path) -> Any:
    """The value of a name; None if there is none."""
    value = found.get(name)
    if value is not None and type(value) is not kind:
        raise ValueError(f"{file}: {name} must be {kind.__name__}, found {value!r:.200}")
    return value


def _tokenizer(
    encoder: tokenizers.Tokenizer, stop_ids: set[int], chat_template: str | None, special_tokens: Mapping[str, str]
) -> Tokenizer:
    bos_id = encoder.token_to_id(special_tokens.get("bos_token", ""))
    if encoder.encode("").ids[:1] != [bos_id]:
        bos_id = None
    return Tokenizer(encoder, frozenset(stop_ids), bos_id, chat_template, special_tokens)


# --- chat template ----------------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the model's own turns, for training on them; here only what it encloses matters."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    """A template with the names and settings that transformers gives it: templates are written for those.

    It came with the checkpoint, from someone else: it runs in Jinja's sandbox.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which would reach the model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
