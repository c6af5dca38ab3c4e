"""What the tests share: a function of one rank run on n ranks, and the terms of the conservation law in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from echo_jax import EchoConfig, EchoState, echo_psum, residuals
from echo_jax.axes import varying_axes
from echo_jax.codecs.rotation import hadamard_matrix
from echo_jax.layout import Layout

MODES = ("check_vma", "no_check_vma", "vmap")
DTYPES = ("float16", "bfloat16", "float32")
RANKS = (1, 2, 3, 4, 5, 8)

# Half a unit in the last place, relative: what rounding once to a dtype may change.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


@functools.cache
def mesh_of(axis_type: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    """A mesh over the first virtual devices, axes in the order given: mesh_of(data=2, tp=4)."""
    devices = jax.devices()[: math.prod(sizes.values())]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (axis_type,) * len(sizes), devices=devices)


def on_ranks(f: Callable[..., Any], ranks: int, mode: str = "check_vma") -> Callable[..., Any]:
    """f, a function of one rank's arrays on axis 'tp', as a compiled function of arrays [ranks, ...] of all ranks.

    What f returns comes out as [ranks, ...] too: every rank's own copy, also of what types call equal on all of them.
    """
    if mode == "vmap":
        return jax.jit(jax.vmap(f, axis_name="tp", axis_size=ranks))

    def stack(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if mode == "check_vma" and "tp" not in varying_axes(leaf):
            leaf = lax.pcast(leaf, "tp", to="varying")
        return leaf[None]

    def one_rank(*args: Any) -> Any:
        return jax.tree.map(stack, f(*jax.tree.map(lambda leaf: leaf[0], args)))

    tp = PartitionSpec("tp")
    mesh = mesh_of(tp=ranks)
    check_vma = mode == "check_vma"
    return jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=tp, out_specs=tp, check_vma=check_vma))


def bits(x: Any) -> np.ndarray:
    """The bytes of an array, so that NaN equals NaN and -0 differs from 0."""
    x = np.asarray(x)
    return x.reshape(-1).view(np.uint8) if x.size else np.zeros(0, np.uint8)


def assert_same_bits(found: Any, wanted: Any) -> None:
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


def assert_equal_on_ranks(stacked: Any) -> None:
    """[ranks, ...]: every rank has rank 0's bits."""
    for leaf in jax.tree.leaves(stacked):
        leaf = np.asarray(leaf)
        for copy in leaf[1:]:
            np.testing.assert_array_equal(bits(copy), bits(leaf[0]))


def owed(state: EchoState) -> np.ndarray:
    """float64[ranks, *shape]: what every rank owes, in x's domain, from a state stacked by `on_ranks`."""
    return np.stack([_back(one, state.layout) for one in kept_errors(state)])


def kept_errors(state: EchoState) -> np.ndarray:
    """float64[ranks, n, G, g]: the same in the codec's domain."""
    return np.asarray(state.errors(), np.float64)[:, 0]


def residual_slack(state: EchoState) -> np.ndarray:
    """float64[ranks, *shape]: by how much `owed` may be off because residuals are stored in their dtype.

    A stored residual is off by `residuals.rounding`: of itself, or, in 8 bits, of the largest of its group. Rotating
    back sums the g of a group, with any sign.
    """
    error = np.abs(kept_errors(state))
    if state.layout.residual == "int8":
        # In terms of what is kept: the largest code may stand for a magnitude that the scale's rounding cut off.
        error = np.broadcast_to(error.max(-1, keepdims=True), error.shape) * 1.01
    error = residuals.rounding(state.layout.residual) * error
    if state.layout.rotation == "hadamard":
        error = np.broadcast_to(error.sum(-1, keepdims=True), error.shape)
    return np.stack([state.layout.from_chunks(one) for one in error])


def group_maxima(x: np.ndarray, layout: Layout) -> np.ndarray:
    """float64[ranks, *shape]: each value's |x| replaced by the largest of its group."""
    chunks = np.stack([np.asarray(layout.to_chunks(jnp.abs(jnp.float32(one)))) for one in np.float32(x)])
    largest = np.broadcast_to(chunks.max(-1, keepdims=True), chunks.shape).astype(np.float64)
    return np.stack([layout.from_chunks(one) for one in largest])


def _back(residual: np.ndarray, layout: Layout) -> np.ndarray:
    if layout.rotation == "hadamard":
        residual = residual @ hadamard_matrix(layout.group_size).astype(np.float64)
    return layout.from_chunks(residual)


# --- one call, compiled once for each kind of call ---------------------------------------------------------------


@functools.cache
def compiled_psum(config: EchoConfig, ranks: int, mode: str = "check_vma") -> Callable[..., Any]:
    """(x[ranks, ...], state) -> (y[ranks, ...], state) by echo_psum."""
    return on_ranks(lambda x, state: echo_psum(x, "tp", state, config), ranks, mode)


def zero_state(x: np.ndarray, config: EchoConfig) -> EchoState:
    """What `init_state` gives, stacked: for partials x[ranks, ...]."""
    layout = Layout.of(x.shape[1:], "tp", len(x), config)
    shapes = residuals.array_shapes((len(x), 1, *layout.chunks_shape), layout.residual)
    residual, scale = (None if of is None else np.zeros(of.shape, of.dtype) for of in shapes)
    return EchoState(residual, layout, scale)


KINDS = ("normal", "heavy-tailed", "one spike", "constant", "zero")


def partials(
    seed: int, shape: tuple[int, ...], kind: str = "normal", scale: float = 1.0, dtype: str = "float32"
) -> Any:
    """[ranks, ...] partial sums of a given kind, largest magnitude about `scale`."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    if kind == "heavy-tailed":
        x = x**5
    elif kind == "one spike":
        x = x * 1e-3
        x.reshape(-1)[rng.integers(x.size)] = 1
    elif kind == "constant":
        x = np.ones(shape)
    elif kind == "zero":
        x = np.zeros(shape)
    x = x * (scale / max(np.abs(x).max(), 1e-30))
    return np.asarray(x, np.dtype(jnp.dtype(dtype)))


def conservation_error(
    x: np.ndarray, before: EchoState, y: Any, after: EchoState, exact: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(|lhs - rhs|, what rounding allows) of sum x + sum e = y + sum e', float64[*shape].

    All terms are summed in float64. Allowed, beside the cast of y to its dtype and of residuals to theirs:
    * float32 roundings of 2**-24 of the values they act on, M = sum over ranks of the group's largest |x| + |e|:
      about 4 in a rank's arithmetic and one for every rank in the sum.
    * A rotation adds g terms, so a coefficient takes g/2 roundings of 2**-24 M at worst; they come back as a sum of g
      coefficients, whose errors are of random sign and smaller by sqrt(g) in all but the worst case: g roundings.
    * An exact call rounds x + e, and every partial sum of lax.psum, to x's dtype.
    """
    layout, ranks, dtype = after.layout, len(x), np.asarray(y).dtype.name
    x64, y64 = np.asarray(x, np.float64), np.asarray(y, np.float64)[0]
    debt = owed(before)
    magnitude = group_maxima(x64, layout).sum(0) + group_maxima(debt, layout).sum(0)
    roundings = 4 + ranks + (layout.group_size if layout.rotation == "hadamard" else 0)
    allowed = 2.0**-24 * roundings * magnitude + residual_slack(after).sum(0)
    allowed += ROUNDING[dtype] * np.abs(y64) + float(jnp.finfo(dtype).smallest_subnormal)
    if exact:
        allowed += 2 * ranks * ROUNDING[dtype] * (np.abs(x64) + np.abs(debt)).sum(0)
    return np.abs(x64.sum(0) + debt.sum(0) - y64 - owed(after).sum(0)), allowed


def assert_conserved(x: np.ndarray, before: EchoState, y: Any, after: EchoState, exact: bool = False) -> None:
    error, allowed = conservation_error(x, before, y, after, exact)
    assert (error <= allowed).all(), f"lost {error.max():.3g} where {allowed.flat[error.argmax()]:.3g} is rounding"
