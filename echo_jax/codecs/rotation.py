"""The Hadamard rotation: spreads a large value over its whole group, so that one scale fits all of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@functools.cache
def hadamard_matrix(size: int) -> np.ndarray:
    """The Sylvester matrix H of `size` (a power of two): entries +1 and -1, symmetric, H @ H = size * I."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def rotate(x: jax.Array) -> jax.Array:
    """float32[..., g] -> z = (x / g) @ H, so that x = z @ H. The factor is a power of two: exact, and |z| <= max|x|.

    In units of an orthonormal rotation z is smaller by sqrt(g); nothing but `residual_stats` needs to know.
    """
    size = x.shape[-1]
    return _times_hadamard(x * (1.0 / size))


def rotate_back(z: jax.Array) -> jax.Array:
    """float32[..., g] -> z @ H: exact for whole numbers below 2**24 / g, in any order of summation."""
    return _times_hadamard(z)


def _times_hadamard(x: jax.Array) -> jax.Array:
    # HIGHEST: a GPU would otherwise round float32 to TF32, and the residual would never see that error.
    return jnp.matmul(x, hadamard_matrix(x.shape[-1]), precision=lax.Precision.HIGHEST)
