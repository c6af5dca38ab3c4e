"""Packing: unsigned whole numbers of any width into planes of bytes.

A word of w bits is cut into pieces of 8, 4, 2 and 1 bits, widest first and from its lowest bit on (9 = 8 + 1, 6 = 4 +
2), and every width gets a plane of its own, so that no piece crosses a byte. A plane of pieces of p bits is *planar*
within a group: of the 8 / p pieces that share a byte, the first is of the group's first p/8 of words, the next of its
second, and so on. Nothing is shuffled, whole registers are shifted and joined.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def piece_widths(word_bits: int) -> tuple[int, ...]:
    """Widths of the pieces of a word, from its lowest bits on: 9 -> (8, 1), 6 -> (4, 2), 4 -> (4,)."""
    widths = []
    for width in (8, 4, 2, 1):
        while word_bits >= width:
            widths.append(width)
            word_bits -= width
    return tuple(widths)


def pack(words: jax.Array, word_bits: int) -> list[jax.Array]:
    """int32[..., m], words below 2**word_bits, m a multiple of 8 -> planes, uint8[..., m * width / 8] each."""
    planes, shift = [], 0
    for width in piece_widths(word_bits):
        piece = (words >> shift) & ((1 << width) - 1)
        parts = jnp.split(piece, 8 // width, axis=-1)
        joined = functools.reduce(jnp.bitwise_or, (part << (n * width) for n, part in enumerate(parts)))
        planes.append(joined.astype(jnp.uint8))
        shift += width
    return planes


def unpack(planes: list[jax.Array], word_bits: int) -> jax.Array:
    """Inverse of `pack`: planes, uint8[..., m * width / 8] each -> int32[..., m]."""
    pieces, shift = [], 0
    for plane, width in zip(planes, piece_widths(word_bits), strict=True):
        parts = [(plane >> (n * width)) & ((1 << width) - 1) for n in range(8 // width)]
        pieces.append(jnp.concatenate(parts, axis=-1).astype(jnp.int32) << shift)
        shift += width
    return functools.reduce(jnp.bitwise_or, pieces)
