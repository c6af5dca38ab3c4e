"""A call's local stages in plain JAX: the meaning that every other backend is held to.

Shapes: n ranks, G groups a chunk, g values a group, B lines of 16 bytes a chunk. `values` and what is owed are
float32[n, G, g] in the codec's domain. Every stage is a pure function of one rank's data; the collectives between them
are in `collectives.py`.

    encode    x, owing             ->  wire uint8[n, B, 16], the values that were meant, what rounding left behind
    reduce    n wire chunks, own   ->  wire uint8[B, 16] of the sum, what rounding left behind
    decode    n wire chunks        ->  the sum, back in x's domain
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from echo_jax.codecs import Codec


class Encoded(NamedTuple):
    """What `encode` and `reduce` give.

    Attributes:
      wire: uint8[..., B, 16].
      values: float32[..., G, g], what the wire should have said.
      error: float32[..., G, g], values minus what it says; 0 where a value is not finite.
    """

    wire: jax.Array
    values: jax.Array
    error: jax.Array


def encode(x: jax.Array, owing: jax.Array | None, codec: Codec) -> Encoded:
    """Code one rank's partial sums.

    Args:
      x: float[n, G, g], chunked partial sums in the dtype of the call.
      owing: float32[n, G, g] in the codec's domain: what this rank still owes; None for nothing.
    """
    values = codec.rotate(x.astype(jnp.float32))
    if owing is not None:
        values = values + owing
    return _round_values(values, codec, x.dtype)


def reduce(wire: jax.Array, own: jax.Array, rank: jax.Array, codec: Codec, dtype: jax.typing.DTypeLike) -> Encoded:
    """Sum one chunk over all ranks, in float32 and in rank order, and code the sum.

    Args:
      wire: uint8[n, B, 16]: the chunk as every rank sent it.
      own: float32[G, g]: the same chunk of this rank, not rounded; it stands in for wire[rank].
      rank: int32[]: this rank.
      dtype: dtype of the call's x.
    """
    ranks, (groups, group_size) = wire.shape[0], own.shape
    codes, scales = codec.decode(wire, groups, group_size, dtype)
    is_own = jnp.arange(ranks)[:, None, None] == rank
    total = _sum_in_rank_order(jnp.where(is_own, own, codes * scales))
    return _round_values(total, codec, dtype)


def decode(wire: jax.Array, groups: int, group_size: int, codec: Codec, dtype: jax.typing.DTypeLike) -> jax.Array:
    """uint8[..., B, 16] -> float32[..., G, g] in x's domain.

    Codes are whole numbers, so rotating them back before they are scaled is exact: every rank and every backend gets
    the same bits.
    """
    codes, scales = codec.decode(wire, groups, group_size, dtype)
    return codec.rotate_back(codes) * scales


def decode_and_sum(
    wire: jax.Array, groups: int, group_size: int, codec: Codec, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """uint8[n, ..., B, 16] -> float32[..., G, g]: what every rank sent, summed in rank order, in x's domain."""
    return _sum_in_rank_order(decode(wire, groups, group_size, codec, dtype))


def owed(owing: jax.Array, codec: Codec) -> jax.Array:
    """float32[n, G, g] in the codec's domain -> float32[n, G, g] in x's domain."""
    return codec.rotate_back(owing)


def _round_values(values: jax.Array, codec: Codec, dtype: jax.typing.DTypeLike) -> Encoded:
    groups, group_size = values.shape[-2:]
    wire = codec.encode(values, dtype)
    # From the bytes that are sent, so that nothing a compiler does to the encoder can escape the residual.
    codes, scales = codec.decode(wire, groups, group_size, dtype)
    error = values - codes * scales
    return Encoded(wire, values, jnp.where(jnp.isfinite(error), error, 0.0))


def _sum_in_rank_order(parts: jax.Array) -> jax.Array:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
