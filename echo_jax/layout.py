"""How a call's values are cut into chunks, one a rank, and groups, one a scale."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from echo_jax.axes import AxisName
from echo_jax.codecs import CODECS
from echo_jax.config import EchoConfig

# A row that only smaller groups divide is grouped without regard to rows: scales would cost more than they give.
SMALLEST_ROW_GROUP = 32


@dataclasses.dataclass(frozen=True)
class Layout:
    """Geometry of one rank's x for one call: static, hashable, and equal for states that may be shared.

    x, of any shape, is seen as n chunks of G groups of g values, float32[n, G, g]; rank j reduces chunk j.

    Attributes:
      axis_name: the axis (or axes) that is summed over.
      ranks: n, its size.
      shape: x's shape on one rank.
      group_size: g.
      scheme: 'columns': no group crosses a row (the last axis), and rank j owns columns [j*d/n, (j+1)*d/n) of every
        row, so that a row's result depends on that row alone. 'rows': no group crosses a row; the groups of all rows
        in order are dealt to ranks in equal runs. 'flat': x is one long row; groups cross rows.
      rotation: domain in which errors are kept, 'hadamard' or 'none'.
      residual: format in which they are kept (`echo_jax.residuals`).
    """

    axis_name: AxisName
    ranks: int
    shape: tuple[int, ...]
    group_size: int
    scheme: str
    rotation: str
    residual: str

    @classmethod
    def of(cls, shape: tuple[int, ...], axis_name: AxisName, ranks: int, config: EchoConfig) -> Layout:
        """The layout that `config` gives to an x of `shape` on each of `ranks` ranks."""
        if isinstance(axis_name, tuple) and len(axis_name) == 1:
            (axis_name,) = axis_name  # the same axis, by another spelling
        row = shape[-1] if shape else 1
        group = math.gcd(row, config.group_size)
        if group < SMALLEST_ROW_GROUP:
            scheme, group = "flat", config.group_size
        elif row % (ranks * group) == 0:
            scheme = "columns"
        else:
            scheme = "rows"
        rotation = CODECS[config.codec].rotation
        return cls(axis_name, ranks, tuple(shape), group, scheme, rotation, config.residual)

    @property
    def size(self) -> int:
        """Values of x on one rank, padding not counted."""
        return math.prod(self.shape)

    @property
    def groups(self) -> int:
        """G: groups in one rank's chunk."""
        return -(-self.size // (self.group_size * self.ranks))

    @property
    def chunks_shape(self) -> tuple[int, int, int]:
        return self.ranks, self.groups, self.group_size

    def row_groups(self, rows: jax.Array) -> jax.Array:
        """int[...] rows of x -> int[..., d/g]: their groups in order, as indices into chunks[n*G, g].

        ValueError where groups cross rows.
        """
        if self.scheme == "flat":
            raise ValueError(
                f"rows need a layout whose groups do not cross rows; found scheme 'flat' for x of shape {self.shape}"
            )
        groups_a_row = self.shape[-1] // self.group_size
        if self.scheme == "rows":
            return rows[..., None] * groups_a_row + jnp.arange(groups_a_row)
        run = groups_a_row // self.ranks  # of one row in one chunk
        chunk, within = jnp.divmod(jnp.arange(groups_a_row), run)
        return chunk * self.groups + rows[..., None] * run + within

    def to_chunks(self, x: jax.Array) -> jax.Array:
        """dtype[*shape] -> dtype[n, G, g], padded with zeros."""
        if self.scheme == "columns":
            by_row = x.reshape(-1, self.ranks, self.shape[-1] // self.ranks)
            return by_row.swapaxes(0, 1).reshape(self.chunks_shape)
        flat = x.reshape(-1)
        return jnp.pad(flat, (0, math.prod(self.chunks_shape) - self.size)).reshape(self.chunks_shape)

    def from_chunks(self, chunks: jax.Array) -> jax.Array:
        """dtype[n, G, g] -> dtype[*shape]; inverse of `to_chunks`."""
        if self.scheme == "columns":
            by_row = chunks.reshape(self.ranks, -1, self.shape[-1] // self.ranks)
            return by_row.swapaxes(0, 1).reshape(self.shape)
        return chunks.reshape(-1)[: self.size].reshape(self.shape)
