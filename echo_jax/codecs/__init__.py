"""The codes: what a group of values looks like on the wire. One table, one entry a code.

The stages know a code only by this interface: `rotate` and `rotate_back` lead into and out of the domain in which it
rounds, `encode` and `decode` between float32 groups and bytes, `error_bound` says how far apart the two may be.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from echo_jax.codecs import rotation
from echo_jax.codecs.integer import LINE, IntegerGrid


@dataclasses.dataclass(frozen=True)
class Codec:
    """A code. Values are float32 groups, shape [..., G, g]: G groups of g values, g a power of two from 32; bytes are
    lines of 16, uint8[..., nbytes / 16, 16].

    Attributes:
      grid: the integers that values are rounded to; None sends the values themselves, in the dtype of x.
      rotated: whether groups are rotated (Hadamard) before they are encoded; residuals then stay rotated too.
    """

    grid: IntegerGrid | None
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
        """uint8[..., nbytes / 16, 16] -> (codes float32[..., G, g], scales float32[..., G, 1]); value = product."""
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
    "hadamard_int4": Codec(IntegerGrid(bits=4, low=-8, high=7), rotated=True),
    "int4": Codec(IntegerGrid(bits=4, low=-7, high=7)),
    "int8": Codec(IntegerGrid(bits=8, low=-127, high=127)),
    "none": Codec(None),
}
