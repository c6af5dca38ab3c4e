"""Reading collectives out of a compiled program's text."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np

_OPS = "all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute|collective-broadcast|ragged-all-to-all"
_LINE = re.compile(rf"= (?P<type>.*?) (?P<op>{_OPS})(?:-start)?\((?P<rest>.*)")
_ARRAY = re.compile(r"\b(?P<dtype>pred|[suf]\d+\w*|bf16|c64|c128)\[(?P<shape>[\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective: its operation, its result's dtypes and bytes, the devices that take part together, its name."""

    op: str
    dtypes: frozenset[str]
    nbytes: int
    groups: tuple[tuple[int, ...], ...]
    name: str


def collectives(compiled: Any) -> list[Collective]:
    """All collectives of a compiled function, whatever the backend made of them."""
    return [_read(match) for match in map(_LINE.search, compiled.as_text().splitlines()) if match]


def _read(match: re.Match[str]) -> Collective:
    arrays = [(m["dtype"], m["shape"]) for m in _ARRAY.finditer(match["type"])]
    nbytes = sum(math.prod(map(int, filter(None, shape.split(",")))) * _itemsize(dtype) for dtype, shape in arrays)
    name = re.search(r'op_name="([^"]*)"', match["rest"])
    dtypes = frozenset(dtype for dtype, _ in arrays)
    return Collective(match["op"], dtypes, nbytes, _groups(match["rest"]), name[1] if name else "")


def _itemsize(dtype: str) -> int:
    return 1 if dtype == "pred" else int(re.sub(r"\D*(\d+).*", r"\1", dtype)) // 8


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """All the forms in which XLA writes who takes part with whom."""
    if pairs := re.search(r"source_target_pairs=\{(.*?\})\}", text):
        return _listed(pairs[1])
    if listed := re.search(r"replica_groups=\{(.*?\})\}", text):
        return _listed(listed[1])
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, source = _ints(iota[1]), _ints(iota[2])
        devices = np.arange(math.prod(source)).reshape(source)
        devices = devices.transpose(_ints(iota[3])) if iota[3] else devices
        return tuple(map(tuple, devices.reshape(shape).tolist()))
    if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        used = re.findall(r"'(\w+)'", named[2])
        order = [list(sizes).index(name) for name in sizes if name not in used] + [list(sizes).index(n) for n in used]
        devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())).transpose(order)
        return tuple(map(tuple, devices.reshape(-1, math.prod(sizes[name] for name in used)).tolist()))
    raise AssertionError(f"a collective without groups: {text}")


def _listed(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_ints(group) for group in re.findall(r"\{([\d,]*)\}", text))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)
