"""What a program sends: its collectives, counted from the traced program itself, and their bytes; and, by `probe`,
what each of its compensated sums costs in quality.

Nothing here is an estimate of what the library means to send; `collectives` walks the jaxpr that will be compiled.
Bytes are those that one rank sends under the bandwidth-optimal algorithm of each collective (ring), as nccl-tests
counts them: an all-reduce of V bytes over n ranks sends 2 (n-1)/n V.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from echo_jax.axes import AxisName, axis_names
from echo_jax.probe import ProbedCall, ProbeReport, probe

__all__ = [
    "Collective",
    "ProbeReport",
    "ProbedCall",
    "bits_effective",
    "collectives",
    "over_axis",
    "probe",
    "report",
]

# Bytes that one of n ranks sends for each byte of the operand.
_SENT_PER_BYTE: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "all_to_all": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "permute": lambda n: 1,
}
_KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_to_all": "all_to_all",
    "reduce_scatter": "reduce_scatter",
    "ppermute": "permute",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: 'all_reduce', 'all_gather', 'all_to_all', 'reduce_scatter' or 'permute'.
      axes: mesh axes that it runs over.
      ranks: product of their sizes.
      shape, dtype: of the operand on one rank.
      times: how often one run of the program executes it (scan lengths multiplied).
      name: the `jax.named_scope`s around it. A compensated sum's are its label, its grouping and its stage, such as
        'mlp_out/columns128/all_to_all'.
    """

    kind: str
    axes: tuple[Hashable, ...]
    ranks: int
    shape: tuple[int, ...]
    dtype: str
    times: int
    name: str = dataclasses.field(compare=False)

    @property
    def values_sent(self) -> float:
        """Values of the operand's dtype that one rank sends, all times together."""
        return math.prod(self.shape) * self.times * _SENT_PER_BYTE[self.kind](self.ranks)

    @property
    def bytes_sent(self) -> float:
        return self.values_sent * np.dtype(self.dtype).itemsize


def collectives(fn: Callable[..., Any], *args: Any) -> list[Collective]:
    """All collectives that `fn(*args)` runs over manual mesh axes (shard_map), in program order.

    Args:
      fn: a function of arrays; jitted or not. Collectives that a compiler adds for automatic axes are not seen.
      args: arrays or ShapeDtypeStructs.

    A collective whose result is never used is counted too, although a compiler would drop it.

    Raises:
      ValueError: a collective in a while loop, whose trip count is unknown; branches of a cond that send different
        things; a collective over groups of an axis, or of a kind that is not known here.
    """
    return list(_walk(jax.make_jaxpr(fn)(*args).jaxpr, {}, 1, ""))


def over_axis(found: Iterable[Collective], axis_name: AxisName) -> list[Collective]:
    """Those that run over `axis_name` (or any axis of the tuple), alone or with others."""
    wanted = set(axis_names(axis_name))
    return [c for c in found if wanted & set(c.axes)]


def bits_effective(bytes_sent: float, of_16bit: Iterable[Collective]) -> float:
    """All bits that a program sends, over the values that the same program with `lax.psum` sends; NaN if it sends none.

    Args:
      bytes_sent: of all the program's collectives over the axis, settling and embedding included.
      of_16bit: those of the program with `lax.psum`.
    """
    values = sum(c.values_sent for c in of_16bit)
    return 8 * bytes_sent / values if values else math.nan


def report(fn: Callable[..., Any], *args: Any) -> str:
    """A table of `collectives(fn, *args)`: name, kind, operand, times and bytes that one rank sends in a run."""
    found = collectives(fn, *args)
    rows = [("name", "kind", "axes", "operand", "times", "bytes sent")]
    for c in found:
        operand = f"{c.dtype}[{','.join(map(str, c.shape))}]"
        rows.append((c.name, c.kind, ",".join(map(str, c.axes)), operand, str(c.times), f"{c.bytes_sent:,.0f}"))
    rows.append(("all", "", "", "", str(sum(c.times for c in found)), f"{sum(c.bytes_sent for c in found):,.0f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _walk(jaxpr: Any, sizes: Mapping[Hashable, int], times: int, scope: str) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        name = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))  # an inner jaxpr's names start anew
        kind = _KINDS.get(eqn.primitive.name)
        if kind is not None:
            names = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
            names = axis_names(names)
            if not all(name in sizes for name in names):
                continue  # vmap's axes are not wires
            if eqn.params.get("axis_index_groups") is not None:
                raise ValueError(f"fn has a collective over groups of an axis, which is not counted: {eqn}")
            ranks = math.prod(sizes[name] for name in names)
            for operand in eqn.invars:
                aval = operand.aval
                yield Collective(kind, names, ranks, tuple(aval.shape), str(aval.dtype), times, name)
        elif eqn.primitive.name == "cond":
            branches = [list(_walk(b.jaxpr, sizes, times, name)) for b in eqn.params["branches"]]
            if any(branch != branches[0] for branch in branches):
                raise ValueError(f"fn has a cond whose branches differ in what they send: {branches}")
            yield from branches[0]
        else:
            inner = dict(sizes)
            if eqn.primitive.name == "shard_map":
                inner.update(eqn.params["mesh"].shape)
            length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            elsewhere = eqn.params.get("axis_name", ())
            if eqn.primitive.name != "axis_index" and set(axis_names(elsewhere)) & set(sizes):
                raise ValueError(f"fn has a collective of an unknown kind, {eqn.primitive.name!r}: {eqn}")
            for sub in _sub_jaxprs(eqn):
                found = list(_walk(sub, inner, times * length, name))
                if found and eqn.primitive.name == "while":
                    raise ValueError(f"fn has a collective in a while loop, of unknown trip count: {found[0]}")
                yield from found


def _sub_jaxprs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns"):
                yield item
            elif hasattr(item, "jaxpr") and hasattr(item.jaxpr, "eqns"):
                yield item.jaxpr
