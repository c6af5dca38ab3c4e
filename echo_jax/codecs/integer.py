"""Integer grids: one scale a group, values rounded to whole steps, codes packed into bytes.

A group of g float32 values becomes g codes of 4 or 8 bits and one bfloat16 scale (the 8 exponent bits of float32, so
that no group's magnitude can overflow or vanish). A chunk of G groups is one run of bytes: all codes, then all scales.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

# Half a unit in the last place of a bfloat16 significand (8 bits): the relative error of a stored scale.
SCALE_ROUNDING = 2.0**-8
_SMALLEST_NORMAL = 2.0**-126


@dataclasses.dataclass(frozen=True)
class IntegerGrid:
    """Codes from `low` to `high`, each `bits` wide.

    With `low == -high` the step is max|v| / high and positive. With `low == -high - 1` the grid is used to its full
    range: the step is the smallest that clips nothing by more than half a step, and it is negative where the group's
    largest magnitude is positive, so that this value meets the longer side.
    """

    bits: int
    low: int
    high: int

    @property
    def error_bound(self) -> float:
        """c such that |v - decode(encode(v))| <= c * max|v| in each group (docs/theory.md derives it)."""
        if self.low == -self.high:
            return 0.5 * (1 + SCALE_ROUNDING) / self.high
        return (0.5 - self.low * SCALE_ROUNDING) / (self.high + 0.5)

    def nbytes(self, groups: int, group_size: int) -> int:
        """Bytes of a chunk of `groups` groups."""
        return groups * (group_size * self.bits // 8 + 2)

    def encode(self, v: jax.Array) -> jax.Array:
        """float32[..., G, g] -> uint8[..., nbytes(G, g)]. A group with a NaN or an infinity gets a NaN scale."""
        scale = self._scale(v)
        inverse = jnp.where(scale == 0, 0.0, 1.0 / scale)
        # Shifted to start at 0, so that truncation rounds: every backend can do it without a floor instruction.
        shifted = v * inverse + (0.5 - self.low)
        top = float(self.high - self.low) + 0.5
        codes = jnp.clip(shifted, 0.0, top).astype(jnp.uint8)
        scale_bits = (lax.bitcast_convert_type(scale, jnp.uint32) >> 16).astype(jnp.uint16)
        parts = [self._pack(codes), lax.bitcast_convert_type(scale_bits, jnp.uint8)]
        return jnp.concatenate([p.reshape(*v.shape[:-2], -1) for p in parts], axis=-1)

    def decode(self, wire: jax.Array, groups: int, group_size: int) -> tuple[jax.Array, jax.Array]:
        """uint8[..., nbytes] -> whole numbers in float32[..., G, g] and scales float32[..., G, 1]; value = product."""
        split = groups * group_size * self.bits // 8
        codes = self._unpack(wire[..., :split].reshape(*wire.shape[:-1], groups, -1))
        scale_bytes = wire[..., split:].reshape(*wire.shape[:-1], groups, 2)
        scale_bits = lax.bitcast_convert_type(scale_bytes, jnp.uint16).astype(jnp.uint32) << 16
        scale = lax.bitcast_convert_type(scale_bits, jnp.float32)
        return codes.astype(jnp.float32) + self.low, scale[..., None]

    def _scale(self, v: jax.Array) -> jax.Array:
        """float32[..., G, g] -> float32[..., G, 1], already rounded to bfloat16."""
        largest, smallest = v.max(-1, keepdims=True), v.min(-1, keepdims=True)
        magnitude = jnp.maximum(largest, -smallest)
        if self.low == -self.high:
            scale = magnitude / self.high
        else:
            other = jnp.minimum(largest, -smallest)  # largest magnitude on the other side; negative if there is none
            step = jnp.maximum(magnitude / (0.5 - self.low), other / (0.5 + self.high))
            scale = jnp.where(largest > -smallest, -step, step)
        scale = jnp.where(jnp.isfinite(magnitude), scale, jnp.nan)
        scale = jnp.where(magnitude < self.high * _SMALLEST_NORMAL * 2, 0.0, scale)  # its inverse would overflow
        # Not a cast to bfloat16 and back, which XLA may remove; the residual must see the scale that is sent.
        return lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7)

    def _pack(self, codes: jax.Array) -> jax.Array:
        """Nibbles are packed planar: the first half of a group in the low ones, the second half in the high ones."""
        if self.bits == 8:
            return codes
        half = codes.shape[-1] // 2
        return codes[..., :half] | (codes[..., half:] << 4)

    def _unpack(self, packed: jax.Array) -> jax.Array:
        if self.bits == 8:
            return packed
        return jnp.concatenate([packed & 15, packed >> 4], axis=-1)
