"""Data-parallel gradients as optax transformations, used inside shard_map on one rank's shards.

    optimizer = optax.chain(compensated_psum("data", config), clip_by_global_norm(1.0), optax.adamw(3e-4))
    optimizer = skip_nonfinite(optimizer)
    specs = partition_specs(optimizer, params, param_specs, mesh)       of its state, for shard_map and placement

    params = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)        in the step, before the gradient

What the ranks owe lives in the optimizer's state, and so in the train state and in every checkpoint of it. Gradients
are summed into the same parameters step after step, one stream for ever: its errors are carried, never settled.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from echo_jax import axes
from echo_jax.axes import AxisName
from echo_jax.collectives import echo_psum
from echo_jax.config import EchoConfig
from echo_jax.state import check_config, check_dtype, init_state

# Leaves are joined until a sum has this many values: 16 MB of float32, more than latency hides, and one copy of it.
BUCKET_ELEMENTS = 1 << 22
# A matrix has more; vectors, which need precision more than the wire needs them small, have fewer unless stacked.
SMALL_ELEMENTS = 4096


class CompensatedPsumState(NamedTuple):
    """Attributes:
    residuals: an EchoState for every coded sum, in the order of the leaves; None in place of each without feedback.
    """

    residuals: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Sum:
    """Leaves, by their index, that are summed in one call: one leaf as it is, or several as one vector."""

    leaves: tuple[int, ...]
    exact: bool


def compensated_psum(
    axis_name: AxisName,
    config: EchoConfig,
    *,
    mean: bool = True,
    small_elements: int = SMALL_ELEMENTS,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> optax.GradientTransformation:
    """Gradients of one rank -> their mean (or sum) over the ranks of an axis, coded and compensated.

    Leaves of fewer than `small_elements` values (scales, biases) are joined into one exact sum for each dtype and each
    set of mesh axes that they vary over. Larger ones are joined in order, up to `bucket_elements` values; a leaf that
    has more is summed by itself. `config` then decides on each of these sums, as on any other: 'auto' leaves those
    below its `min_elements` exact. Exact sums are in the gradients' dtypes.

    `init` and `update` run inside shard_map, or vmap(axis_name=...). With check_vma=True a gradient must vary over the
    axis: JAX sums that of a parameter which does not, so cast parameters to varying before differentiating. Without
    it types cannot tell; JAX does not sum there. Gradients must not be scaled for the loss: a residual that was kept at
    one scale is wrong at another.

    Args:
      axis_name: the data-parallel axis, or tuple of axes.
      config: of the coded sums.
      mean: whether the sum is divided by the number of ranks.
      small_elements: values of one rank's part of a leaf, below which it stays exact.
      bucket_elements: how many values leaves are joined to.

    Raises (from `init` or `update`):
      TypeError: a leaf that is not float16, bfloat16 or float32. ValueError: an unknown axis; a gradient that is summed
        already; gradients of other shapes than the parameters that the state was made for.
    """
    check_config(config)
    for name, value in (("small_elements", small_elements), ("bucket_elements", bucket_elements)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}")

    def init(params: Any) -> CompensatedPsumState:
        leaves = _checked_leaves(params, "params")
        axes.axis_size(axis_name)
        parts = [_joined([leaves[i] for i in s.leaves]) for s in plan(leaves) if not s.exact]
        return CompensatedPsumState(tuple(init_state(part, axis_name, config) for part in parts))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, CompensatedPsumState]:
        del params
        leaves, ranks = _checked_leaves(updates, "updates"), axes.axis_size(axis_name)
        _check_not_summed(updates, axis_name)
        sums = plan(leaves)
        coded = [s for s in sums if not s.exact]
        if len(coded) != len(state.residuals):
            raise ValueError(
                f"updates must be like the params that the state was made for: those had {len(state.residuals)} coded "
                f"sums, these have {len(coded)}"
            )
        residuals, remaining = [], iter(state.residuals)
        results: list[Any] = [None] * len(leaves)
        for number, s in enumerate(sums):
            part = _joined([leaves[i] for i in s.leaves])
            if s.exact:
                total = lax.psum(_varying(part, axis_name), axis_name)
            else:
                total, residual = echo_psum(part, axis_name, next(remaining), config, name=f"gradients_{number}")
                residuals.append(residual)
            total = total / ranks if mean else total
            for index, piece in zip(s.leaves, _split(total, [leaves[i] for i in s.leaves]), strict=True):
                results[index] = piece
        return jax.tree.unflatten(jax.tree.structure(updates), results), CompensatedPsumState(tuple(residuals))

    def plan(leaves: list[jax.Array]) -> list[_Sum]:
        """Alike for parameters and their gradients, and on every rank."""
        names = axes.axis_names(axis_name)
        exact: dict[Any, list[int]] = {}
        coded: dict[Any, list[list[int]]] = {}
        for index, leaf in enumerate(leaves):
            kind = (leaf.dtype.name, frozenset(axes.varying_axes(leaf)) - set(names))
            if config.algorithm == "exact" or leaf.size < small_elements:
                exact.setdefault(kind, []).append(index)
                continue
            buckets = coded.setdefault(kind, [[]])
            if buckets[-1] and sum(leaves[i].size for i in buckets[-1]) + leaf.size > bucket_elements:
                buckets.append([])
            buckets[-1].append(index)
        sums = [_Sum(tuple(bucket), False) for buckets in coded.values() for bucket in buckets]
        return sums + [_Sum(tuple(bucket), True) for bucket in exact.values()]

    return optax.GradientTransformation(init, update)


class ClipByGlobalNormState(NamedTuple):
    """Attributes:
    norm: float32[], the norm before it was clipped.
    """

    norm: jax.Array


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` for parameters that are split over mesh axes: one norm, and one clip, on all ranks.

    Squares are summed over the axes that each leaf varies over, in float32: after the sum over the data axis these are
    the axes that it is split over. Needs shard_map with check_vma=True, whose types say so, or no shard_map at all.

    Raises ValueError inside shard_map with check_vma=False.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, found {max_norm}")

    def init(params: Any) -> ClipByGlobalNormState:
        del params
        return ClipByGlobalNormState(jnp.zeros((), jnp.float32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, ClipByGlobalNormState]:
        del state, params
        norm = jnp.sqrt(_sum_over_shards(updates, lambda leaf: jnp.sum(leaf.astype(jnp.float32) ** 2)))
        scale = jnp.minimum(1.0, max_norm / norm)
        return jax.tree.map(lambda u: u * scale.astype(u.dtype), updates), ClipByGlobalNormState(norm)

    return optax.GradientTransformation(init, update)


class SkipNonfiniteState(NamedTuple):
    """Attributes:
    inner: state of the wrapped transformation.
    skipped: int32[], steps that were skipped so far.
    """

    inner: Any
    skipped: jax.Array


def skip_nonfinite(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Skip a step whose update holds a NaN or an infinity, alike on all ranks, and leave all of `inner`'s state.

    Unlike `optax.apply_if_finite` it decides on what comes out of `inner`, that is on the summed gradient, over all
    shards; and as nothing is inside a cond, `inner` may hold collectives. Residuals are rolled back with the rest: the
    skipped gradients leave no trace. Wrap the whole chain. Needs check_vma=True, as `clip_by_global_norm`.
    """

    def init(params: Any) -> SkipNonfiniteState:
        return SkipNonfiniteState(inner.init(params), jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, SkipNonfiniteState]:
        updates, new = inner.update(updates, state.inner, params)
        bad = _sum_over_shards(updates, lambda leaf: jnp.sum(~jnp.isfinite(leaf), dtype=jnp.float32)) > 0
        updates = jax.tree.map(lambda u: jnp.where(bad, jnp.zeros_like(u), u), updates)
        kept = jax.tree.map(lambda old, new: jnp.where(bad, old, new), state.inner, new)
        return updates, SkipNonfiniteState(kept, state.skipped + bad)

    return optax.GradientTransformation(init, update)


def partition_specs(optimizer: optax.GradientTransformation, params: Any, param_specs: Any, mesh: Mesh) -> Any:
    """PartitionSpecs of an optimizer's state, from its `init` traced inside shard_map.

    Parts of the state that are like the parameters, such as Adam's moments, lie as these do; what the ranks owe lies
    over the axes that it varies over; everything else is whole on every rank.

    Args:
      params: arrays or ShapeDtypeStructs, global.
      param_specs: a PartitionSpec for every leaf of params.
      mesh: over which shard_map will run, with check_vma=True.

    Returns:
      A pytree like the state, for shard_map's specs; `jax.shard_map(optimizer.init, in_specs=(param_specs,),
      out_specs=partition_specs(...))` makes the state.
    """
    structure = jax.tree.structure(params)
    types: list[Any] = []
    found: list[Any] = []

    def init(params: Any) -> None:
        found.append(jax.tree.map(jax.typeof, optimizer.init(params)))
        types.append(jax.tree.map(jax.typeof, params))

    jax.eval_shape(jax.shard_map(init, mesh=mesh, in_specs=(param_specs,), out_specs=None), params)
    shapes = [leaf.shape for leaf in jax.tree.leaves(types[0])]

    def is_like_params(node: Any) -> bool:
        return jax.tree.structure(node) == structure and [leaf.shape for leaf in jax.tree.leaves(node)] == shapes

    def spec(node: Any) -> Any:
        if is_like_params(node):
            return param_specs
        varying = tuple(name for name in mesh.axis_names if name in node.manual_axis_type.varying)
        return PartitionSpec(varying) if varying else PartitionSpec()

    return jax.tree.map(spec, found[0], is_leaf=is_like_params)


def _checked_leaves(tree: Any, argument: str) -> list[jax.Array]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        check_dtype(leaf, path, argument)
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _check_not_summed(updates: Any, axis_name: AxisName) -> None:
    if not axes.types_say_varying(axis_name):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        missing = set(axes.axis_names(axis_name)) - axes.varying_axes(leaf)
        if missing:
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} must vary over {axis_name!r}, found a gradient that is equal on "
                f"all its ranks: JAX has summed it. Cast the parameters before differentiating: "
                f"lax.pcast(p, {axis_name!r}, to='varying')"
            )


def _varying(x: jax.Array, axis_name: AxisName) -> jax.Array:
    return axes.cast_varying(x, axes.axis_names(axis_name)) if axes.types_say_varying(axis_name) else x


def _joined(leaves: list[jax.Array]) -> jax.Array:
    return leaves[0] if len(leaves) == 1 else jnp.concatenate([leaf.reshape(-1) for leaf in leaves])


def _split(total: jax.Array, like: list[jax.Array]) -> list[jax.Array]:
    if len(like) == 1:
        return [total]
    ends = [sum(leaf.size for leaf in like[: n + 1]) for n in range(len(like))]
    return [total[end - leaf.size : end].reshape(leaf.shape) for end, leaf in zip(ends, like, strict=True)]


def _sum_over_shards(tree: Any, measure: Any) -> jax.Array:
    """float32[]: the sum of measure(leaf) over all leaves and all their shards, equal on all ranks."""
    manual = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if manual and not axes.types_say_varying(manual):
        raise ValueError(
            f"needs shard_map with check_vma=True over {manual}: without it types do not say which leaves are split"
        )
    by_axes: dict[frozenset[Any], list[jax.Array]] = {}
    for leaf in jax.tree.leaves(tree):
        by_axes.setdefault(axes.varying_axes(leaf), []).append(measure(leaf))
    total = jnp.zeros((), jnp.float32)
    for names, parts in sorted(by_axes.items(), key=lambda item: sorted(map(str, item[0]))):
        part = sum(parts)
        total = total + (lax.psum(part, tuple(sorted(names, key=str))) if names else part)
    return total
