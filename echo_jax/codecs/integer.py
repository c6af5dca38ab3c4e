"""Integer grids: one scale a group, values rounded to whole steps, codes packed into bytes.

A group of g float32 values becomes g codes and one bfloat16 scale (the 8 exponent bits of float32, so that no group's
magnitude can overflow or vanish). A chunk of G groups is one run of bytes: the planes of its codes (`packing.py`), one
after the other, then all scales; each plane and the scales are padded to whole lines of 16 bytes, the widest
transaction of a GPU's memory.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from echo_jax.codecs import packing

# Half a unit in the last place of a bfloat16 significand (8 bits): the relative error of a stored scale.
SCALE_ROUNDING = 2.0**-8
_SMALLEST_NORMAL = 2.0**-126
LINE = 16


@dataclasses.dataclass(frozen=True)
class IntegerGrid:
    """Codes from `low` to `high`, `codes_per_word` of them written as the digits of one word.

    The step is the smallest for which no value of the group lies more than `clip` steps beyond the last code of its
    side. Up to half a step that costs nothing, as rounding may be as far off. Where one side is longer (low ==
    -high - 1), the step is negative if the group's largest magnitude is positive, so that this value meets it.

    A number of levels that is no power of two wastes less in a word of several codes: two of 22 levels have 484 values,
    and take 9 bits.
    """

    low: int
    high: int
    clip: float = 0.5
    codes_per_word: int = 1

    @property
    def levels(self) -> int:
        return self.high - self.low + 1

    @property
    def word_bits(self) -> int:
        return (self.levels**self.codes_per_word - 1).bit_length()

    def bits(self, group_size: int) -> float:
        """Bits a value: its code and its share of the scale."""
        return self.word_bits / self.codes_per_word + 16 / group_size

    @property
    def error_bound(self) -> float:
        """c such that |v - decode(encode(v))| <= c * max|v| in each group (docs/theory.md derives it)."""
        return max(self.clip - self.low * SCALE_ROUNDING, 0.5 * (1 + SCALE_ROUNDING)) / (self.high + self.clip)

    def nbytes(self, groups: int, group_size: int) -> int:
        """Bytes of a chunk of `groups` groups: a multiple of 16."""
        return sum(_whole_lines(groups * size) for size in (*self._plane_bytes(group_size), 2))

    def encode(self, v: jax.Array) -> jax.Array:
        """float32[..., G, g] -> uint8[..., nbytes / 16, 16]. A group with a NaN or an infinity gets a NaN scale."""
        codes, scale = self.round(v)
        planes = packing.pack(self._to_words(codes), self.word_bits)
        scale_bits = (lax.bitcast_convert_type(scale[..., 0], jnp.uint32) >> 16).astype(jnp.uint16)
        scale_bytes = lax.bitcast_convert_type(scale_bits, jnp.uint8)
        return jnp.concatenate([_to_lines(part) for part in (*planes, scale_bytes)], axis=-2)

    def decode(self, wire: jax.Array, groups: int, group_size: int) -> tuple[jax.Array, jax.Array]:
        """uint8[..., nbytes / 16, 16] -> whole numbers in float32[..., G, g] and scales float32[..., G, 1]."""
        parts, start = [], 0
        for size in (*self._plane_bytes(group_size), 2):
            stop = start + _whole_lines(groups * size) // LINE
            flat = wire[..., start:stop, :].reshape(*wire.shape[:-2], -1)
            parts.append(flat[..., : groups * size].reshape(*wire.shape[:-2], groups, size))
            start = stop
        *planes, scale_bytes = parts
        codes = self._from_words(packing.unpack(planes, self.word_bits))
        scale_bits = lax.bitcast_convert_type(scale_bytes, jnp.uint16).astype(jnp.uint32) << 16
        scale = lax.bitcast_convert_type(scale_bits, jnp.float32)
        return codes.astype(jnp.float32) + self.low, scale[..., None]

    def round(self, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """float32[..., g] -> (codes counted from 0, int32[..., g]; scales float32[..., 1], bfloat16 numbers).

        A value is meant as (code + low) * scale.
        """
        scale = self._scale(v)
        inverse = jnp.where(scale == 0, 0.0, 1.0 / scale)
        # Counted from 0, so that truncation rounds: every backend can do it without a floor instruction.
        shifted = v * inverse + (0.5 - self.low)
        return jnp.clip(shifted, 0.0, float(self.levels) - 0.5).astype(jnp.int32), scale

    def _scale(self, v: jax.Array) -> jax.Array:
        """float32[..., G, g] -> float32[..., G, 1], already rounded to bfloat16."""
        largest, smallest = v.max(-1, keepdims=True), v.min(-1, keepdims=True)
        magnitude = jnp.maximum(largest, -smallest)
        if self.low == -self.high:
            scale = magnitude / (self.high + self.clip)
        else:
            other = jnp.minimum(largest, -smallest)  # largest magnitude on the other side; negative if there is none
            step = jnp.maximum(magnitude / (self.clip - self.low), other / (self.clip + self.high))
            scale = jnp.where(largest > -smallest, -step, step)
        scale = jnp.where(magnitude < self.high * _SMALLEST_NORMAL * 2, 0.0, scale)  # its inverse would overflow
        # Looked for by itself: XLA's CPU backend may lose a NaN in a maximum over an axis.
        scale = jnp.where(jnp.isfinite(v).all(-1, keepdims=True), scale, jnp.nan)
        # Not a cast to bfloat16 and back, which XLA may remove; the residual must see the scale that is sent.
        return lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7)

    def _plane_bytes(self, group_size: int) -> list[int]:
        """Bytes of a group in each plane."""
        words = group_size // self.codes_per_word
        return [words * width // 8 for width in packing.piece_widths(self.word_bits)]

    def _to_words(self, codes: jax.Array) -> jax.Array:
        """int32[..., g] -> int32[..., g / codes_per_word]: the group's first part is the most significant digit."""
        digits = jnp.split(codes, self.codes_per_word, axis=-1)
        return functools.reduce(lambda word, digit: word * self.levels + digit, digits)

    def _from_words(self, words: jax.Array) -> jax.Array:
        digits = []
        for _ in range(self.codes_per_word - 1):
            words, digit = words // self.levels, words % self.levels
            digits.append(digit)
        return jnp.concatenate([words, *reversed(digits)], axis=-1)


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _to_lines(part: jax.Array) -> jax.Array:
    """uint8[..., G, k] -> uint8[..., lines, 16], padded with zeros.

    In lines, not in one run: XLA does not vectorise a fusion whose result is flattened (5x slower on a CPU).
    """
    nbytes = part.shape[-2] * part.shape[-1]
    if nbytes % LINE:
        part = part.reshape(*part.shape[:-2], nbytes)
        part = jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, -nbytes % LINE)])
        return part.reshape(*part.shape[:-1], -1, LINE)
    return part.reshape(*part.shape[:-2], -1, LINE)
