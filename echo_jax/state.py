"""The error state: what each rank still owes to the sums of a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from echo_jax import axes, residuals
from echo_jax.axes import AxisName
from echo_jax.config import EchoConfig
from echo_jax.layout import Layout

FLOAT_DTYPES = ("float16", "bfloat16", "float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EchoState:
    """What one rank owes to a stream of compensated sums: a pytree of float arrays, and how to read them.

    Attributes:
      residual: [1, n, G, g] on each rank (`Layout`), in the codec's domain and in the format `layout.residual`: to be
        read by `errors`, and never to be added to anything. Chunks of other ranks hold the send errors of this one; the
        rank's own chunk, which never travels and so has no send error, holds the error of the sum that it owns. Outside
        shard_map the leading axis counts the ranks: it is sharded over the summed axis and every other mesh axis that x
        varies over.
      layout: static.
      scale: of the format 'int8', bfloat16[1, n, G]; else None.
    """

    residual: jax.Array
    layout: Layout = dataclasses.field(metadata={"static": True})
    scale: jax.Array | None = None

    def errors(self) -> jax.Array:
        """float32[1, n, G, g]: what is owed, in the codec's domain."""
        return residuals.load(self.residual, self.scale)

    def with_errors(self, errors: jax.Array) -> EchoState:
        """The state that owes these, float32[1, n, G, g], to the rounding of the format; as varying as this one."""
        residual, scale = residuals.store(errors, self.layout.residual)
        return self._varying_as_before(residual, scale)

    def settled(self) -> EchoState:
        """The state that owes nothing."""
        return self._varying_as_before(*jax.tree.map(jnp.zeros_like, (self.residual, self.scale)))

    def _varying_as_before(self, residual: jax.Array, scale: jax.Array | None) -> EchoState:
        # So that a state can be the carry of a scan.
        match = lambda array: axes.match_varying(array, self.residual)  # noqa: E731
        return EchoState(match(residual), self.layout, None if scale is None else match(scale))


def is_state(node: Any) -> bool:
    return isinstance(node, EchoState)


def init_state(
    x: Any,
    axis_name: AxisName,
    config: EchoConfig,
    *,
    mesh: Mesh | None = None,
    spec: Any = None,
) -> Any:
    """Nothing owed yet: a zero state for sums of arrays like x.

    Inside shard_map or vmap(axis_name=...), x is what one rank will sum. With check_vma=True the state varies over
    axis_name and every axis that x varies over; a ShapeDtypeStruct that does not say (`manual_axis_type`) is taken to
    vary over all manual axes. Outside, `mesh` and `spec` (x's PartitionSpec, or a pytree prefix of them; axis_name need
    not occur in it, as partial sums look replicated) give the global state, placed on the mesh. Its leading axis is
    sharded over the axes in mesh order, such as P(("data", "model")); where shard_maps are nested, the outer one's axes
    must come first, and the state has to be placed so before the first call.

    Args:
      x: a float16, bfloat16 or float32 array, a ShapeDtypeStruct, or a pytree of them.
      axis_name: the mesh axis, or tuple of axes, that will be summed over.
      config: its codec, group_size and residual determine the state's layout.

    Returns:
      An EchoState for every leaf of x, in x's structure; None if `config.feedback` is False.

    Raises:
      TypeError: x is not of those dtypes. ValueError: unknown axis; mesh without spec.
    """
    check_config(config)
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        check_dtype(leaf, path)
    if mesh is not None:
        if not isinstance(mesh, Mesh):
            raise TypeError(f"mesh must be a jax.sharding.Mesh, found {type(mesh).__name__}")
        if spec is None:
            raise ValueError("spec must be x's PartitionSpec when mesh is given, found None")
        for part in jax.tree.leaves(spec, is_leaf=_is_spec):
            if not _is_spec(part):
                raise TypeError(f"spec must be x's PartitionSpec, or a pytree prefix of them; found {part!r}")
        return _init_global(x, axis_name, config, mesh, spec)
    if spec is not None:
        raise ValueError(f"spec goes with mesh, outside shard_map; found spec={spec!r} without a mesh")
    ranks = axes.axis_size(axis_name)
    if not config.feedback:
        return None

    def init_leaf(leaf: Any) -> EchoState:
        layout = Layout.of(leaf.shape, axis_name, ranks, config)
        varying = _state_axes(leaf, axis_name)
        return _zeros((1, *layout.chunks_shape), layout, lambda of: axes.zeros_varying(of.shape, of.dtype, varying))

    return jax.tree.map(init_leaf, x)


def _zeros(shape: tuple[int, ...], layout: Layout, make: Callable[[jax.ShapeDtypeStruct], jax.Array]) -> EchoState:
    residual, scale = residuals.array_shapes(shape, layout.residual)
    return EchoState(make(residual), layout, None if scale is None else make(scale))


def _state_axes(x: Any, axis_name: AxisName) -> tuple[Any, ...]:
    """Axes that the state of x varies over, in mesh order; none where types do not track it."""
    if not axes.types_say_varying(axis_name):
        return ()
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if isinstance(x, jax.ShapeDtypeStruct):
        varying = manual if x.manual_axis_type is None else x.manual_axis_type.varying
    else:
        varying = axes.varying_axes(x)
    return tuple(name for name in manual if name in varying or name in axes.axis_names(axis_name))


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _init_global(x: Any, axis_name: AxisName, config: EchoConfig, mesh: Mesh, spec: Any) -> Any:
    names = axes.axis_names(axis_name)
    unknown = [name for name in names if name not in mesh.shape]
    if unknown:
        raise ValueError(f"axis_name must name axes of the mesh, found {axis_name!r}; allowed: {tuple(mesh.shape)}")
    if not config.feedback:
        return None
    ranks = int(np.prod([mesh.shape[name] for name in names]))

    def init_leaf(leaf_spec: PartitionSpec, leaf: Any) -> EchoState:
        local_shape = NamedSharding(mesh, leaf_spec).shard_shape(tuple(leaf.shape))
        layout = Layout.of(local_shape, axis_name, ranks, config)
        used = set(names)
        for entry in leaf_spec:
            used.update(entry if isinstance(entry, tuple) else (entry,))
        state_axes = tuple(name for name in mesh.axis_names if name in used)
        copies = int(np.prod([mesh.shape[name] for name in state_axes]))
        sharding = NamedSharding(mesh, PartitionSpec(state_axes))
        return _zeros(
            (copies, *layout.chunks_shape),
            layout,
            lambda of: jax.jit(lambda: jnp.zeros(of.shape, of.dtype), out_shardings=sharding)(),
        )

    return jax.tree.map(
        lambda leaf_spec, part: jax.tree.map(lambda leaf: init_leaf(leaf_spec, leaf), part), spec, x, is_leaf=_is_spec
    )


def residual_stats(y: Any, state: Any) -> dict[str, jax.Array]:
    """How much is owed, beside the running value of the stream: cheap enough to log at every step.

    One all-gather of four numbers, over the summed axis and every other axis that the state varies over.

    Args:
      y: the running value (or the last sum), an array or pytree as given to echo_psum.
      state: its EchoState, or the pytree of them.

    Returns:
      float32 scalars, equal on all ranks: 'relative_rms', rms of the residuals over rms of y (0 when nothing is owed);
      'largest', the largest residual, in y's units (under an orthonormal rotation if the codec rotates);
      'nonfinite_groups', groups of y that hold a NaN or an infinity, counted on every rank that has its own y.
    """
    leaves = [(leaf, leaf_state) for _, leaf, leaf_state in pair_leaves(y, state, "y") if leaf_state is not None]
    if not leaves:
        raise ValueError("state must be an EchoState, or a pytree of them, found None")
    sums, largest = [], []
    for leaf, leaf_state in leaves:
        layout = leaf_state.layout
        check_dtype(leaf, argument="y")
        check_shape(leaf, layout, "y")
        unit = layout.group_size**0.5 if layout.rotation == "hadamard" else 1.0
        error = jnp.abs(leaf_state.errors()) * unit
        groups = layout.to_chunks(leaf.astype(jnp.float32))
        finite = jnp.isfinite(groups)
        parts = (error**2).sum(), (jnp.where(finite, groups, 0.0) ** 2).sum(), (~finite.all(-1)).sum()
        sums.append(jnp.stack([axes.match_varying(jnp.float32(part), error) for part in parts]))
        largest.append(error.max(initial=0.0))
    local = jnp.append(sum(sums), jnp.stack(largest).max())
    layout = leaves[0][1].layout
    everywhere = axes.all_gather(local, tuple(sorted(axes.varying_axes(local), key=str)) or layout.axis_name)
    owed, total, nonfinite = everywhere[:, :3].sum(0)
    ratio = jnp.where(total > 0, jnp.sqrt(owed / jnp.where(total > 0, total, 1.0)), jnp.inf)
    return {
        "relative_rms": jnp.where(owed > 0, ratio, 0.0),
        "largest": everywhere[:, 3].max(),
        "nonfinite_groups": nonfinite / layout.ranks,
    }


# --- checks, shared by every public call ---------------------------------------------------------------------------


def check_config(config: Any) -> None:
    if not isinstance(config, EchoConfig):
        raise TypeError(f"config must be an EchoConfig, found {type(config).__name__}")


def check_dtype(x: Any, path: Any = (), argument: str = "x") -> None:
    """TypeError unless x is an array (or a ShapeDtypeStruct) of a dtype that can be summed."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or str(dtype) not in FLOAT_DTYPES:
        where = argument + jax.tree_util.keystr(path)
        found = type(x).__name__ if dtype is None else str(dtype)
        raise TypeError(f"{where} must be an array of dtype {', '.join(FLOAT_DTYPES)}; found {found}")


def pair_leaves(x: Any, state: Any, argument: str = "x") -> list[tuple[Any, Any, EchoState | None]]:
    """[(path, leaf of x, its state)]; ValueError if the structures differ. A state of None goes with every leaf."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(x)
    if state is None:
        return [(path, leaf, None) for path, leaf in leaves]
    states, state_structure = jax.tree.flatten(state, is_leaf=is_state)
    foreign = next((type(s).__name__ for s in states if not is_state(s)), None)
    if foreign is not None:
        raise TypeError(f"state must be an EchoState, or a pytree of them like {argument}; found {foreign}")
    if structure != state_structure:
        raise ValueError(f"{argument} must have the structure of the state {state_structure}, found {structure}")
    return [(path, leaf, leaf_state) for (path, leaf), leaf_state in zip(leaves, states, strict=True)]


def check_shape(x: Any, layout: Layout, argument: str) -> None:
    if tuple(x.shape) != layout.shape:
        raise ValueError(f"{argument} must have the shape of the state, {layout.shape}; found {tuple(x.shape)}")
