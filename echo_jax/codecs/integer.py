"""Integer grids: one scale a group, values rounded to whole steps, codes packed into bytes.

A group of g float32 values becomes g codes of 4 or 8 bits and one bfloat16 scale (the 8 exponent bits of float32, so
that no group's magnitude can overflow or vanish). A chunk of G groups is one run of bytes: all codes, then all scales,
padded to whole lines of 16 bytes, the widest transaction of a GPU's memory.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

# Half a unit in the last place of a bfloat16 significand (8 bits): the relative error of a stored scale.
SCALE_ROUNDING = 2.0**-8
_SMALLEST_NORMAL = 2.0**-126
LINE = 16


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
        """Bytes of a chunk of `groups` groups: a multiple of 16."""
        return groups * group_size * self.bits // 8 + -(-2 * groups // LINE) * LINE

    def encode(self, v: jax.Array) -> jax.Array:
        """float32[..., G, g] -> uint8[..., nbytes / 16, 16]. A group with a NaN or an infinity gets a NaN scale."""
        scale = self._scale(v)
        inverse = jnp.where(scale == 0, 0.0, 1.0 / scale)
        # Shifted to start at 0, so that truncation rounds: every backend can do it without a floor instruction.
        shifted = v * inverse + (0.5 - self.low)
        top = float(self.high - self.low) + 0.5
        codes = self._pack(jnp.clip(shifted, 0.0, top).astype(jnp.int32)).astype(jnp.uint8)
        scale_bits = (lax.bitcast_convert_type(scale, jnp.uint32) >> 16).astype(jnp.uint16)
        scale_bytes = lax.bitcast_convert_type(scale_bits, jnp.uint8).reshape(*v.shape[:-2], -1)
        padding = -scale_bytes.shape[-1] % LINE
        scale_bytes = jnp.pad(scale_bytes, [(0, 0)] * (scale_bytes.ndim - 1) + [(0, padding)])
        # In lines, not in one run: XLA does not vectorise a fusion whose result is flattened (5x slower on a CPU).
        return jnp.concatenate([part.reshape(*v.shape[:-2], -1, LINE) for part in (codes, scale_bytes)], axis=-2)

    def decode(self, wire: jax.Array, groups: int, group_size: int) -> tuple[jax.Array, jax.Array]:
        """uint8[..., nbytes / 16, 16] -> whole numbers in float32[..., G, g] and scales float32[..., G, 1]."""
        batch, split = wire.shape[:-2], groups * group_size * self.bits // 8 // LINE
        codes = self._unpack(wire[..., :split, :].reshape(*batch, groups, -1))
        scale_bytes = wire[..., split:, :].reshape(*batch, -1)[..., : 2 * groups].reshape(*batch, groups, 2)
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
        scale = jnp.where(magnitude < self.high * _SMALLEST_NORMAL * 2, 0.0, scale)  # its inverse would overflow
        # Looked for by itself: XLA's CPU backend may lose a NaN in a maximum over an axis.
        scale = jnp.where(jnp.isfinite(v).all(-1, keepdims=True), scale, jnp.nan)
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
