"""How fast each code encodes and decodes on one CPU core, beside a copy of the same values.

    python -m benchmarks.codec_speed
    python -m benchmarks.codec_speed --codes hadamard_int4 mxfp4 --rows 8192

What is timed is what a call runs on each rank: `stages.encode` of float32[1, rows * 4096 / g, g] with a bfloat16
residual, keeping the bytes and the new residual, and `stages.decode` of those bytes. The copy is XLA's own of the same
float32 array; like the codes' results it is written to newly allocated memory. All of it runs on one core: the process
is bound to the first that it may use (Linux), before XLA counts them. In every round the copy and all codes run one
after the other, so that a busy machine slows all of them; figures are medians over rounds, and times a copy are medians
of each round's own ratio.

Columns: bits a value on the wire; millions of values a second that are encoded and decoded; the time of each in copies.
The last line is the same as one JSON object. The codes of others are those of `peer_codes.py`, plain JAX like this
library's but not tuned: of NVFP4's scale, XLA computes both roundings again for every value.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.peer_codes import PEERS
from echo_jax import stages
from echo_jax.codecs import CODECS, Codec

COLUMNS = 4096
CODES = {**CODECS, **PEERS}
HEADER = ("code", "bits", "encode M/s", "decode M/s", "encode, copies", "decode, copies")


@dataclasses.dataclass(frozen=True)
class Args:
    """Measure the codes' speed on one CPU core."""

    codes: tuple[str, ...] = tuple(CODES)
    rows: int = 2048
    """Of 4096 float32 values each; the default is 34 MB."""
    group_size: int = 128
    rounds: int = 9


def main(args: Args) -> None:
    if not args.codes or not set(args.codes) <= set(CODES):
        raise ValueError(f"codes must be some of {', '.join(CODES)}; found {args.codes}")
    if args.rows < 1 or args.rounds < 1:
        raise ValueError(f"rows and rounds must be at least 1, found {args.rows} and {args.rounds}")
    if args.group_size not in (32, 64, 128, 256, 512, 1024):
        raise ValueError(f"group_size must be a power of two from 32 to 1024, found {args.group_size}")
    bind_to_one_core()
    jax.config.update("jax_platforms", "cpu")

    rng = np.random.default_rng(0)
    shape = (1, args.rows * COLUMNS // args.group_size, args.group_size)
    x = jnp.asarray(rng.standard_normal(shape, np.float32))
    residual = jnp.asarray(rng.standard_normal(shape, np.float32) * 0.05, jnp.bfloat16)
    runs = {("copy", "copy"): _compiled(jnp.copy, x)}
    for name in args.codes:
        encode, decode = _stages(CODES[name], shape)
        wire, _ = jax.jit(encode)(x, residual)
        runs[name, "encode"] = _compiled(encode, x, residual)
        runs[name, "decode"] = _compiled(decode, wire)

    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(args.rounds):
        for key, run in runs.items():
            began = time.perf_counter()
            run()
            seconds[key].append(time.perf_counter() - began)

    copies = seconds.pop(("copy", "copy"))
    rows = []
    for name in args.codes:
        row: dict[str, Any] = {"code": name, "bits": CODES[name].bits(args.group_size, x.dtype)}
        for stage in ("encode", "decode"):
            times = seconds[name, stage]
            row[f"{stage}_values_per_s"] = x.size / statistics.median(times)
            row[f"{stage}_copies"] = statistics.median(t / copy for t, copy in zip(times, copies, strict=True))
        rows.append(row)
    copy_values_per_s = x.size / statistics.median(copies)

    print(f"{args.rows} x {COLUMNS} float32, groups of {args.group_size}, one core, {args.rounds} rounds")
    print(_line(HEADER))
    print(_line(("copy", "32.00", f"{copy_values_per_s / 1e6:.0f}", "", "1.00", "")))
    for row in rows:
        print(_line(_cells(row)))
    print(
        json.dumps(
            {
                "jax": jax.__version__,
                "rows": args.rows,
                "columns": COLUMNS,
                "group_size": args.group_size,
                "rounds": args.rounds,
                "copy_values_per_s": copy_values_per_s,
                "codes": rows,
            }
        )
    )


def bind_to_one_core() -> None:
    """Before the first array: XLA's threads are started with it, as many as there are cores to run on."""
    if not hasattr(os, "sched_setaffinity"):
        raise OSError("codec_speed binds its process to one core, which this system has no call for; it needs Linux")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _stages(codec: Codec, shape: tuple[int, int, int]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(x, residual) -> (wire, residual), and wire -> sum, of one rank's chunk."""

    def encode(x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        encoded = stages.encode(x, residual, codec)
        return encoded.wire, encoded.error.astype(residual.dtype)

    def decode(wire: jax.Array) -> jax.Array:
        return stages.decode(wire, *shape[1:], codec, jnp.float32)

    return encode, decode


def _compiled(f: Callable[..., Any], *args: jax.Array) -> Callable[[], Any]:
    """f(*args), compiled and run once; it returns when all results are there."""
    compiled = jax.jit(f).lower(*args).compile()

    def run() -> None:
        jax.block_until_ready(compiled(*args))

    run()
    return run


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["code"],
        f"{row['bits']:.2f}",
        f"{row['encode_values_per_s'] / 1e6:.0f}",
        f"{row['decode_values_per_s'] / 1e6:.0f}",
        f"{row['encode_copies']:.2f}",
        f"{row['decode_copies']:.2f}",
    )


def _line(cells: tuple[str, ...]) -> str:
    widths = (16, 6, 12, 12, 15, 15)
    return " ".join(
        cell.rjust(width) if n else cell.ljust(width) for n, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )


if __name__ == "__main__":
    main(tyro.cli(Args))
