"""What JAX knows about a mesh axis at a point of the program: its size, and whether types say who varies over it.

A value inside `shard_map` with `check_vma=True` carries in its type the set of axes that it varies over. Inside
`check_vma=False` and `vmap(axis_name=...)` types say nothing, and the sum's own result looks like its input.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

AxisName = Hashable | tuple[Hashable, ...]


def axis_names(axis_name: AxisName) -> tuple[Hashable, ...]:
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def axis_size(axis_name: AxisName) -> int:
    """Ranks along the axis (or axes). ValueError if it is unknown here."""
    names = axis_names(axis_name)
    if not names or any(isinstance(name, int | list | set | dict) for name in names) or len(set(names)) < len(names):
        raise ValueError(f"axis_name must be the name of an axis, or a tuple of different ones; found {axis_name!r}")
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        known = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        where = f"manual axes here: {known}" if known else "this is not inside shard_map or vmap(axis_name=...)"
        raise ValueError(
            f"axis_name must name axes of the surrounding program, found {axis_name!r}; {where}"
        ) from error


def types_say_varying(axis_name: AxisName) -> bool:
    """Whether the surrounding program tracks what varies over the axis (shard_map with check_vma=True)."""
    return all(name in varying_axes(lax.axis_index(name)) for name in axis_names(axis_name))


def is_vmapped(axis_name: AxisName) -> bool:
    """Whether the axis is that of a vmap(axis_name=...), not of a mesh: for a tuple, whether any of them is."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return any(name not in manual for name in axis_names(axis_name))


def varying_axes(x: Any) -> frozenset[Hashable]:
    """Axes that x's type says it varies over: nothing outside check_vma=True."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def cast_varying(x: jax.Array, axes: frozenset[Hashable] | tuple[Hashable, ...]) -> jax.Array:
    """x, cast to vary over `axes` too. Only for axes whose variation types track."""
    missing = tuple(name for name in axes if name not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def match_varying(x: jax.Array, like: jax.Array) -> jax.Array:
    """x, cast to vary over every axis that `like` varies over."""
    return cast_varying(x, tuple(sorted(varying_axes(like), key=str)))


def all_gather(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """[n, ...]: every rank's x, known to be equal on all ranks where types track that."""
    if types_say_varying(axis_name):
        return lax.all_gather(cast_varying(x, axis_names(axis_name)), axis_name, to="invarying")
    return lax.all_gather(x, axis_name)


def zeros_varying(shape: tuple[int, ...], dtype: Any, axes: tuple[Hashable, ...]) -> jax.Array:
    """Zeros that vary over `axes`."""
    return cast_varying(jnp.zeros(shape, dtype), axes)
