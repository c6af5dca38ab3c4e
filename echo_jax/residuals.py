"""The formats in which errors are kept between calls.

'float32' and 'bfloat16' are casts. 'int8' is a code of 8 bits with a scale a group: whole numbers k from -126 to 126
and a bfloat16 scale, largest magnitude / 126. A residual has to be a float, or it could not travel as a cotangent, so k
is kept as the bits of a float8_e4m3fn: |k| in its lower seven bits, the sign in the eighth. None of these 253 patterns
is a NaN or a negative zero, so that whatever adds a zero to one, as automatic differentiation may, gives the same bits
back; nothing else may be computed from them but by `load`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from echo_jax.codecs.integer import IntegerGrid

FORMATS = ("int8", "bfloat16", "float32")

_GRID = IntegerGrid(low=-126, high=126, clip=0)
_SIGN = 128


def array_shapes(shape: tuple[int, ...], residual: str) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct | None]:
    """Of the arrays that keep float32[..., g] in a format: (codes [..., g], scales [...] or None)."""
    if residual == "int8":
        return jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), jax.ShapeDtypeStruct(shape[:-1], jnp.bfloat16)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(residual)), None


def store(errors: jax.Array, residual: str) -> tuple[jax.Array, jax.Array | None]:
    """float32[..., g], finite -> (codes [..., g], scales [...] or None)."""
    if residual != "int8":
        return errors.astype(residual), None
    codes, scale = _GRID.round(errors)
    codes = codes + _GRID.low
    bits = jnp.where(codes < 0, _SIGN - codes, codes).astype(jnp.uint8)
    return lax.bitcast_convert_type(bits, jnp.float8_e4m3fn), scale[..., 0].astype(jnp.bfloat16)


def load(codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Inverse of `store`, to its rounding: float32[..., g]."""
    if scale is None:
        return codes.astype(jnp.float32)
    bits = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.int32)
    whole = jnp.where(bits < _SIGN, bits, _SIGN - bits)
    return whole.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]


def rounding(residual: str) -> float:
    """rho such that a kept error is off by at most rho times the largest magnitude of its group."""
    return _GRID.error_bound if residual == "int8" else float(jnp.finfo(residual).eps) / 2
