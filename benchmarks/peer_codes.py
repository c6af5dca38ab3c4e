"""Codes that others have published for collectives, weights or activations, to be compared with this library's.

They are `Codec`s, so that a whole model can run on them, under names of their own:

    python -m benchmarks.quality --configs mxfp4-32-plain nvfp4-32-settled block_fp8-64-plain

The library does not know them: `PEERS` is not part of `echo_jax.codecs.CODECS`, and only the command above adds it, in
its own process. Levels and scales are those that were published, rounding is to nearest, ties to even; the order of the
bytes is this library's (codes, then scales, in whole lines of 16 bytes), as it changes no value and no count. Nor is
their speed what their own kernels reach: here they are plain JAX.

Groups: a code whose block is fixed (32 values for QuickReduce and MX, 16 for NVFP4) keeps it whatever the group of the
configuration, a power of two from 32, is: that group is then only what a NaN spoils. The others scale each group of the
configuration. DeepSeek's is 128; rows of 576 values, SmolLM2's, only allow 64 or 32, at 8.5 or 9 bits, not 8.25.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from echo_jax.codecs import Codec, packing
from echo_jax.codecs.integer import LINE

_SMALLEST_NORMAL = 2.0**-126  # of float32: below it, XLA may flush to zero
_FP16_SMALLEST, _FP16_LARGEST = 2.0**-24, 65504.0


# --- numbers: what a value divided by its scale is rounded to --------------------------------------------------------


class Numbers(Protocol):
    """Levels, numbered from 0 to 2**bits - 1."""

    @property
    def bits(self) -> int: ...

    def to_words(self, x: jax.Array) -> jax.Array:
        """float32[...], finite -> int32[...]: the nearest level's number; saturates."""
        ...

    def from_words(self, words: jax.Array) -> jax.Array:
        """int32[...] -> float32[...]."""
        ...


@dataclasses.dataclass(frozen=True)
class Integers:
    """Whole numbers from -2**(bits - 1) to 2**(bits - 1) - 1."""

    bits: int

    def to_words(self, x: jax.Array) -> jax.Array:
        half = 2 ** (self.bits - 1)
        return (jnp.clip(jnp.round(x), -half, half - 1) + half).astype(jnp.int32)

    def from_words(self, words: jax.Array) -> jax.Array:
        return words.astype(jnp.float32) - 2 ** (self.bits - 1)


@dataclasses.dataclass(frozen=True)
class Floats:
    """The finite numbers of a small floating-point type."""

    dtype: Any

    @property
    def bits(self) -> int:
        return jnp.finfo(self.dtype).bits

    @property
    def largest(self) -> float:
        return float(jnp.finfo(self.dtype).max)

    def to_words(self, x: jax.Array) -> jax.Array:
        rounded = jnp.clip(x, -self.largest, self.largest).astype(self.dtype)
        return lax.bitcast_convert_type(rounded, self._unsigned).astype(jnp.int32)

    def from_words(self, words: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(words.astype(self._unsigned), self.dtype).astype(jnp.float32)

    @property
    def _unsigned(self) -> Any:
        return {4: jnp.uint4, 8: jnp.uint8}[self.bits]


E2M1 = Floats(jnp.float4_e2m1fn)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
E4M3 = Floats(jnp.float8_e4m3fn)  # three bits after the point; normal from 2**-6, up to 448


# --- scales: one a block, as written and as read ---------------------------------------------------------------------


class Scale(Protocol):
    """How a block's scale is chosen and stored: as one or more runs of numbers, each of a dtype."""

    @property
    def dtypes(self) -> tuple[Any, ...]: ...

    def counts(self, blocks: int) -> tuple[int, ...]:
        """Numbers in each run, for a chunk of `blocks` blocks. The first run has one a block."""
        ...

    def write(self, v: jax.Array, finite: jax.Array) -> tuple[jax.Array, ...]:
        """(float32[..., N, b], all finite; bool[..., N]) -> dtype[..., count] each; NaN where not `finite`."""
        ...

    def read(self, *runs: jax.Array) -> jax.Array:
        """dtype[..., count] each -> float32[..., N]."""
        ...

    def inverse(self, scale: jax.Array) -> jax.Array:
        """float32[..., N], as read -> float32[..., N]: what values are multiplied by before they are rounded."""
        ...


@dataclasses.dataclass(frozen=True)
class MaxScale:
    """max|v| of the block over `largest`, in a floating-point type with the exponents of float32."""

    largest: float
    dtype: Any

    @property
    def dtypes(self) -> tuple[Any, ...]:
        return (self.dtype,)

    def counts(self, blocks: int) -> tuple[int, ...]:
        return (blocks,)

    def write(self, v: jax.Array, finite: jax.Array) -> tuple[jax.Array, ...]:
        scale = _flushed(jnp.abs(v).max(-1) / self.largest)
        return (jnp.where(finite, scale, jnp.nan).astype(self.dtype),)

    def read(self, *runs: jax.Array) -> jax.Array:
        return runs[0].astype(jnp.float32)

    def inverse(self, scale: jax.Array) -> jax.Array:
        return jnp.where(scale == 0, 0.0, 1.0 / scale)


class QuickReduceScale:
    """The value of largest magnitude over -8, in fp16: this value meets -8, whatever its sign.

    As in the kernel, scales saturate where fp16 would overflow, and so does the reciprocal that values are multiplied
    by, after the smallest fp16 number was added to the scale to keep it from zero. Products are float32 here, fp16
    there.
    """

    dtypes = (jnp.float16,)

    def counts(self, blocks: int) -> tuple[int, ...]:
        return (blocks,)

    def write(self, v: jax.Array, finite: jax.Array) -> tuple[jax.Array, ...]:
        largest, smallest = v.max(-1), v.min(-1)
        extreme = jnp.where(largest > -smallest, largest, smallest)
        scale = jnp.clip(extreme, -_FP16_LARGEST, _FP16_LARGEST) / -8
        return (jnp.where(finite, scale, jnp.nan).astype(jnp.float16),)

    def read(self, *runs: jax.Array) -> jax.Array:
        return runs[0].astype(jnp.float32)

    def inverse(self, scale: jax.Array) -> jax.Array:
        return jnp.clip(1.0 / (scale + _FP16_SMALLEST), -_FP16_LARGEST, _FP16_LARGEST)


class PowerOfTwoScale:
    """E8M0: 2 to the power of floor(log2 max|v|) - 2, where 2 is the exponent of E2M1's largest number, 6 = 1.5 * 2**2.

    A byte is a float32's exponent field, 255 is NaN. The byte 0, 2**-127, is not used: it is no normal float32.
    """

    dtypes = (jnp.uint8,)

    def counts(self, blocks: int) -> tuple[int, ...]:
        return (blocks,)

    def write(self, v: jax.Array, finite: jax.Array) -> tuple[jax.Array, ...]:
        field = lax.bitcast_convert_type(jnp.abs(v).max(-1), jnp.int32) >> 23
        return (jnp.where(finite, jnp.clip(field - 2, 1, 254), 255).astype(jnp.uint8),)

    def read(self, *runs: jax.Array) -> jax.Array:
        field = runs[0].astype(jnp.int32)
        return jnp.where(field == 255, jnp.nan, lax.bitcast_convert_type(field << 23, jnp.float32))

    def inverse(self, scale: jax.Array) -> jax.Array:
        return 1.0 / scale


class TwoLevelScale:
    """max|v| of the block over 6 as an E4M3 number times a float32 of the whole *chunk*, its max|v| over 6 * 448.

    Published with one float32 a tensor; a chunk is what one rank sends another, and the most that shares bytes here.
    """

    dtypes = (E4M3.dtype, jnp.float32)

    def counts(self, blocks: int) -> tuple[int, ...]:
        return blocks, 1

    def write(self, v: jax.Array, finite: jax.Array) -> tuple[jax.Array, ...]:
        magnitude = jnp.abs(v).max(-1)
        of_chunk = _flushed(magnitude.max(-1, keepdims=True) / (E2M1.largest * E4M3.largest))
        of_block = jnp.where(of_chunk == 0, 0.0, magnitude / E2M1.largest / of_chunk)
        of_block = jnp.where(finite, jnp.minimum(of_block, E4M3.largest), jnp.nan)
        return of_block.astype(E4M3.dtype), of_chunk

    def read(self, *runs: jax.Array) -> jax.Array:
        of_block, of_chunk = runs
        return _flushed(of_block.astype(jnp.float32) * of_chunk)

    def inverse(self, scale: jax.Array) -> jax.Array:
        return jnp.where(scale == 0, 0.0, 1.0 / scale)


def _flushed(scale: jax.Array) -> jax.Array:
    """0 for scales, at least 0, whose inverse would overflow; NaN stays."""
    return jnp.where(scale < _SMALLEST_NORMAL, 0.0, scale)


# --- the grid --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BlockGrid:
    """A `Grid`: values over their block's scale, rounded to `numbers`.

    Attributes:
      numbers: the levels.
      scale: the rule and the format of the scales.
      error_bound: c as in `Grid`, in the range of magnitudes that the entry in `PEERS` states.
      block: values that share a scale; None for those of the configuration's group.
    """

    numbers: Numbers
    scale: Scale
    error_bound: float
    block: int | None = None

    def bits(self, group_size: int) -> float:
        """Bits a value: its code and its share of the block's scale; what a whole chunk shares is not counted."""
        return self.numbers.bits + 8 * jnp.dtype(self.scale.dtypes[0]).itemsize / (self.block or group_size)

    def nbytes(self, groups: int, group_size: int) -> int:
        return LINE * sum(_lines_of(size) for size in self._sizes(groups, group_size))

    def encode(self, v: jax.Array) -> jax.Array:
        """As in `Grid`."""
        finite = jnp.isfinite(v).all(-1, keepdims=True)
        shape = (*v.shape[:-2], -1, self.block or v.shape[-1])
        blocks = jnp.where(finite, v, 0.0).reshape(shape)
        runs = self.scale.write(blocks, jnp.broadcast_to(finite, v.shape).reshape(shape)[..., 0])
        # Values are divided by the scale that is sent. Without the barrier XLA may skip its rounding, as it takes a
        # narrowing followed by a widening for nothing.
        runs = lax.optimization_barrier(runs)
        scale = self.scale.read(*runs)
        inverse = jnp.where(jnp.isnan(scale), 0.0, self.scale.inverse(scale))
        words = self.numbers.to_words(blocks * inverse[..., None])
        (plane,) = packing.pack(words, self.numbers.bits)
        return jnp.concatenate([_to_lines(plane), *(_to_lines(run[..., None]) for run in runs)], axis=-2)

    def decode(self, wire: jax.Array, groups: int, group_size: int) -> tuple[jax.Array, jax.Array]:
        """As in `Grid`; scales have the shape of the codes."""
        leading, block, shape = wire.shape[:-2], self.block or group_size, (*wire.shape[:-2], groups, group_size)
        parts, start = [], 0
        for size in self._sizes(groups, group_size):
            stop = start + _lines_of(size)
            parts.append(wire[..., start:stop, :].reshape(*leading, -1)[..., :size])
            start = stop
        plane, *runs = parts
        words = packing.unpack([plane.reshape(*leading, -1, block * self.numbers.bits // 8)], self.numbers.bits)
        scale = self.scale.read(*(_of_dtype(run, d) for run, d in zip(runs, self.scale.dtypes, strict=True)))
        scale = jnp.broadcast_to(scale[..., None], words.shape)
        return self.numbers.from_words(words).reshape(shape), scale.reshape(shape)

    def _sizes(self, groups: int, group_size: int) -> tuple[int, ...]:
        """Bytes of the codes, and of each run of scales."""
        values = groups * group_size
        counts = self.scale.counts(values // (self.block or group_size))
        runs = (n * jnp.dtype(dtype).itemsize for n, dtype in zip(counts, self.scale.dtypes, strict=True))
        return values * self.numbers.bits // 8, *runs


def _lines_of(nbytes: int) -> int:
    return -(-nbytes // LINE)


def _to_lines(part: jax.Array) -> jax.Array:
    """dtype[..., N, k] -> uint8[..., lines, 16], padded with zeros."""
    part = lax.bitcast_convert_type(part, jnp.uint8).reshape(*part.shape[:-2], -1)
    padding = [(0, 0)] * (part.ndim - 1) + [(0, -part.shape[-1] % LINE)]
    return jnp.pad(part, padding).reshape(*part.shape[:-1], -1, LINE)


def _of_dtype(part: jax.Array, dtype: Any) -> jax.Array:
    """uint8[..., N * itemsize] -> dtype[..., N]."""
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(part.reshape(*part.shape[:-1], -1, size) if size > 1 else part, dtype)


# --- the table -------------------------------------------------------------------------------------------------------

# m is the largest magnitude of a group, s the scale before it is stored and s' as stored; u is half a unit in the last
# place, relative, of the format of the scale. Every bound is a multiple of m, float32 arithmetic apart. Where blocks
# are smaller than the group, each is off by at most c times its own largest magnitude, and so by at most c * m.
PEERS: dict[str, Codec] = {
    # AMD QuickReduce, CodecQ4 of csrc/quickreduce in vLLM: integers -8 ... 7, one fp16 scale for 32 values; 4.5 bits.
    # s = -(value of largest magnitude) / 8, so one side reaches -8 and a value of the other side may be clipped at 7:
    # m - 7 s' <= 8 s - 7 (1 - u) s. All else is off by half a step and, for epsilon, 2**-7 of one. c = (1 + 7 u) / 8,
    # u = 2**-11, nearly twice that of the same 16 levels in IntegerGrid, which shares the clipping out.
    # Holds for 2**-11 <= m <= 65504 only. Above, fp16 is at its end: values saturate, at 65504 at most. Below, the
    # scale is subnormal; and from 8 / 65504 = 1.2e-4 down its reciprocal saturates, codes get ever smaller, and what
    # is decoded falls with the square of m: at m = 1e-5 it is an eighth of m.
    "quickreduce_q4": Codec(
        BlockGrid(Integers(4), QuickReduceScale(), error_bound=(1 + 7 * 2.0**-11) / 8, block=32),
    ),
    # DeepSeek-V3 (technical report, 3.3.2; act_quant of its inference code): E4M3, s = m / 448 in float32 for 128
    # values; 8 + 32 / g bits. Between 256 and 448 levels are 32 apart: c = 16 / 448, and less for smaller values.
    "block_fp8": Codec(
        BlockGrid(E4M3, MaxScale(E4M3.largest, jnp.float32), error_bound=16 / 448),
    ),
    # OCP Microscaling Formats (MX) specification 1.0, MXFP4 and its conversion in 6.3: E2M1, a power of two for 32
    # values; 4.25 bits. m / s is in [4, 8). From 5 to 8 the error is that of 4 or 6: at most 1 of 5, or, saturated, 2
    # of 8: c = 1/4, approached just below a power of two. Holds for m >= 2**-124.
    "mxfp4": Codec(
        BlockGrid(E2M1, PowerOfTwoScale(), error_bound=1 / 4, block=32),
    ),
    # NVIDIA NVFP4 ("Pretraining Large Language Models with NVFP4", appendix on quantization): E2M1, an E4M3 scale for
    # 16 values, a float32 for the tensor, here for a chunk; 4.5 bits, and 16 bytes a chunk. A normal E4M3 scale is off
    # by at most u / (1 + u) = 1/17 of itself, u = 2**-4. Rounded up, levels 4 and 6 lie 2 s' <= 2 (18/17) m / 6 apart:
    # half of that is c = 3/17. Rounded down, m saturates, off by m / 17.
    # Holds for m >= 1/28672 of the chunk's largest magnitude, where the E4M3 scale is normal (448 / 2**-6). A block
    # below that in a group above it is off by no more: its s' is at most that of m's block, as rounding keeps order,
    # and it saturates by at most 1/16 of the smallest normal scale, m / 16. Groups far below are sent as zeros: one
    # large row takes the bits of all others, and a row's result depends on the whole chunk.
    "nvfp4": Codec(
        BlockGrid(E2M1, TwoLevelScale(), error_bound=3 / 17, block=16),
    ),
    # E2M1 with this library's scales, for what the levels alone do: s = m / 6 in bfloat16, u = 2**-8; 4 + 16 / g bits.
    # As before, 2 s' / 2 <= (1 + u) m / 6. Holds for m >= 6 * 2**-126.
    "fp4_e2m1": Codec(
        BlockGrid(E2M1, MaxScale(E2M1.largest, jnp.bfloat16), error_bound=(1 + 2.0**-8) / 6),
    ),
}
