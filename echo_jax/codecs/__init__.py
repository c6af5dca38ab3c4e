"""The codes: what a group of values looks like on the wire. One table, one entry a code.

The stages know a code only by the interface of `Codec`: `rotate` and `rotate_back` lead into and out of the domain in
which it rounds, `encode` and `decode` between float32 groups and bytes, `error_bound` says how far apart the two may
be. docs/wire-format.md specifies the bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from echo_jax.codecs import rotation
from echo_jax.codecs.integer import LINE, IntegerGrid


class Grid(Protocol):
    """Levels, scales and their bytes; shapes as in `Codec`."""

    @property
    def error_bound(self) -> float:
        """c such that |v - decode(encode(v))| <= c * max|v| of the group, float32 rounding apart."""
        ...

    def bits(self, group_size: int) -> float:
        """Bits a value of a group of `group_size`, its share of the scales counted, padding not."""
        ...

    def nbytes(self, groups: int, group_size: int) -> int:
        """Bytes of a chunk of `groups` groups, a multiple of 16."""
        ...

    def encode(self, v: jax.Array) -> jax.Array:
        """float32[..., G, g] -> uint8[..., nbytes / 16, 16]. A group with a NaN or an infinity must decode to NaN."""
        ...

    def decode(self, wire: jax.Array, groups: int, group_size: int) -> tuple[jax.Array, jax.Array]:
        """uint8[..., nbytes / 16, 16] -> (codes float32[..., G, g], scales float32[..., G, 1 or g])."""
        ...


@dataclasses.dataclass(frozen=True)
class Codec:
    """A code. Values are float32 groups, shape [..., G, g]: G groups of g values, g a power of two from 32; bytes are
    lines of 16, uint8[..., nbytes / 16, 16].

    Attributes:
      grid: what values are rounded to; None sends the values themselves, in the dtype of x.
      rotated: whether groups are rotated (Hadamard) before they are encoded; residuals then stay rotated too.
    """

    grid: Grid | None
    rotated: bool = False

    @property
    def rotation(self) -> str:
        """Name of the domain in which errors are kept: states of one domain can be shared."""
        return "hadamard" if self.rotated else "none"

    def error_bound(self, dtype: jax.typing.DTypeLike) -> float:
        """c such that |v - decode(encode(v))| <= c * max|v| of the group, for x of `dtype`; float32 rounding apart."""
        if self.grid is not None:
            return self.grid.error_bound
        return float(jnp.finfo(dtype).eps) / 2

    def bits(self, group_size: int, dtype: jax.typing.DTypeLike) -> float:
        """Bits a value of an x of `dtype`: its code and its share of the scales; padding not counted."""
        if self.grid is not None:
            return self.grid.bits(group_size)
        return 8.0 * np.dtype(dtype).itemsize

    def nbytes(self, groups: int, group_size: int, dtype: jax.typing.DTypeLike) -> int:
        """Bytes of a chunk of `groups` groups of an x of `dtype`."""
        if self.grid is not None:
            return self.grid.nbytes(groups, group_size)
        return groups * group_size * np.dtype(dtype).itemsize

    def encode(self, v: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """float32[..., G, g] -> uint8[..., nbytes / 16, 16]."""
        if self.grid is not None:
            return self.grid.encode(v)
        return lax.bitcast_convert_type(v.astype(dtype), jnp.uint8).reshape(*v.shape[:-2], -1, LINE)

    def decode(
        self, wire: jax.Array, groups: int, group_size: int, dtype: jax.typing.DTypeLike
    ) -> tuple[jax.Array, jax.Array]:
        """uint8[..., nbytes / 16, 16] -> (codes float32[..., G, g], scales float32[..., G, 1 or g]); value = product.

        Scales that differ within a group have its shape; only codes that do not rotate can have them.
        """
        if self.grid is not None:
            return self.grid.decode(wire, groups, group_size)
        grouped = wire.reshape(*wire.shape[:-2], groups, group_size, np.dtype(dtype).itemsize)
        values = lax.bitcast_convert_type(grouped, dtype).astype(jnp.float32)
        return values, jnp.ones((*values.shape[:-1], 1), jnp.float32)

    def rotate(self, x: jax.Array) -> jax.Array:
        """float32[..., g] -> float32[..., g]: into the domain in which this code rounds."""
        return rotation.rotate(x) if self.rotated else x

    def rotate_back(self, z: jax.Array) -> jax.Array:
        """Inverse of `rotate`."""
        return rotation.rotate_back(z) if self.rotated else z


CODECS: dict[str, Codec] = {
    "hadamard_int3": Codec(IntegerGrid(low=-4, high=3), rotated=True),
    "hadamard_int4": Codec(IntegerGrid(low=-8, high=7), rotated=True),
    "hadamard_int4.5": Codec(IntegerGrid(low=-11, high=10, codes_per_word=2), rotated=True),
    "hadamard_int5": Codec(IntegerGrid(low=-16, high=15), rotated=True),
    "hadamard_int6": Codec(IntegerGrid(low=-32, high=31), rotated=True),
    "int4": Codec(IntegerGrid(low=-7, high=7, clip=0)),
    "int8": Codec(IntegerGrid(low=-127, high=127, clip=0)),
    "none": Codec(None),
}
