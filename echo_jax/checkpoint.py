"""Saving and restoring what a stream owes, with orbax, beside a training loop's own tree.

    manager.save(step, args=ocp.args.Composite(params=ocp.args.StandardSave(params), **save_args(streams, config)))
    streams = restore(manager, step, like=init_streams(x, "model", config, mesh=mesh, spec=spec))

A checkpoint gets two items: `echo`, the residuals as float arrays by path, and `echo_metadata`, JSON that says how to
read them. `restore` compares the metadata before it reads an array. What a residual means depends on its layout and on
the mesh, and these must be equal; codec, algorithm, `min_elements` and ECHO_JAX_ALGORITHM may change from run to run,
as they may from call to call. So may the format of the residuals: those saved in another are converted, rounded once
to the new one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

import echo_jax
from echo_jax import axes, residuals
from echo_jax.config import EchoConfig
from echo_jax.gradients import Streams
from echo_jax.layout import Layout
from echo_jax.state import EchoState, check_config, is_state

ARRAYS_ITEM = "echo"
METADATA_ITEM = "echo_metadata"

_SCALE = ".scale"  # after the path of a state: its scales, where its format has any

# Raised when the JSON of `metadata` changes so that an older release would misread it.
FORMAT_VERSION = 1
# Raised when a residual changes its meaning under an equal layout: another order of chunks, groups or rotation.
WIRE_VERSION = 1


def save_args(state: Any, config: Any) -> dict[str, ocp.args.CheckpointArgs]:
    """The items that save a state: to be splatted into `ocp.args.Composite`, beside the caller's own.

    Args:
      state: an EchoState, Streams, None or any pytree of them, of global arrays (outside jit and shard_map). Donating
        it to the next step is safe as soon as `CheckpointManager.save` returns, asynchronous or not.
      config: the EchoConfig of its calls, or a pytree prefix of state with EchoConfigs, such as
        Streams(forward_config, backward_config).

    Returns:
      {'echo': StandardSave of the residuals, 'echo_metadata': JsonSave of `metadata`}; no 'echo' if there is no array.

    Raises:
      TypeError, ValueError: as `metadata`.
    """
    described = metadata(state, config)
    items: dict[str, ocp.args.CheckpointArgs] = {METADATA_ITEM: ocp.args.JsonSave(described)}
    arrays = _arrays(_states(state, "state"))
    if arrays:  # orbax refuses an empty tree
        items[ARRAYS_ITEM] = ocp.args.StandardSave(arrays)
    return items


def restore(manager: ocp.CheckpointManager, step: int, like: Any) -> Any:
    """The state that `save_args` saved at `step`, bit for bit (in an equal format), once its metadata is known to fit.

    Args:
      manager: a CheckpointManager of the checkpoint's directory, made without item_names or with 'echo' and
        'echo_metadata' among them.
      step: the step to restore.
      like: what `init_state` or `init_streams` gives here: a state of arrays, or of ShapeDtypeStructs with shardings.
        Its arrays are not read.

    Returns:
      The saved state, in the structure of `like` and with its shardings and formats.

    Raises:
      ValueError: the checkpoint has no echo items, was written by a newer release, or does not fit `like`: states
        missing or left over, another layout, number of ranks, global shape or order of mesh axes, each difference
        named; or an item cannot be read. A flipped bit within an array may go unnoticed: orbax has no
        checksums of them (train.py's checkpoints do, see models/checkpoints.py).
      FileNotFoundError: there is no such step.
    """
    states = _states(like, "like")
    found = _restore_item(manager, step, METADATA_ITEM, ocp.args.JsonRestore())
    _check_versions(found, step)
    _check_scales(found.get("loss_scales", {}), _loss_scales(like), step)
    if not isinstance(found.get("states"), dict):
        raise ValueError(f"step {step} has no usable {METADATA_ITEM!r}: it lacks 'states', found {sorted(found)}")
    _check_fits(found["states"], {path: _describe(leaf) for path, leaf in states.items()}, step)
    saved = {path: _as_saved(leaf, found["states"][path]["layout"]["residual"]) for path, leaf in states.items()}
    targets = _arrays(saved)
    arrays = _restore_item(manager, step, ARRAYS_ITEM, ocp.args.StandardRestore(targets)) if targets else {}

    def restored(path: Any, leaf: EchoState) -> EchoState:
        name = _name(path)
        state = EchoState(arrays[name], saved[name].layout, arrays.get(name + _SCALE))
        return state if leaf.layout == state.layout else _converted(state, leaf)

    return jax.tree_util.tree_map_with_path(restored, like, is_leaf=is_state)


def metadata(state: Any, config: Any) -> dict[str, Any]:
    """What a checkpoint says about a state, as JSON can hold it. Arguments as for `save_args`.

    Returns:
      'format_version', 'wire_version': ints; 'library_version': str;
      'configs': the fields of every config, by its path;
      'states': for every EchoState, by its path, 'algorithm' (what its calls run here: never 'auto'), 'layout' (the
        fields of `Layout`, the number of ranks among them) and 'array' (global 'shape', 'dtype' and 'sharded_over':
        the mesh axes of the leading axis and their sizes, major first; None if its sharding does not tell);
      'loss_scales': that of every Streams, by its path.

    Raises:
      TypeError: a leaf of state is not an EchoState, or of config not an EchoConfig. ValueError: config is not a prefix
        of state, or does not give a state the layout that it has, so that no call could have been given both.
    """
    _states(state, "state")
    configs, structure = jax.tree_util.tree_flatten_with_path(config)
    for _, leaf_config in configs:
        check_config(leaf_config)
    try:
        parts = structure.flatten_up_to(state)
    except ValueError as error:
        found = jax.tree.structure(state, is_leaf=is_state)
        raise ValueError(
            f"config must be an EchoConfig or a pytree prefix of state with EchoConfigs, found {structure} for {found}"
        ) from error
    states: dict[str, Any] = {}
    for (prefix, leaf_config), part in zip(configs, parts, strict=True):
        for path, leaf in jax.tree_util.tree_leaves_with_path(part, is_leaf=is_state):
            name = _name((*prefix, *path))
            _check_config_gives(leaf_config, leaf.layout, name)
            algorithm = leaf_config.resolve(leaf.layout.size, leaf.layout.ranks)
            states[name] = {"algorithm": algorithm, **_describe(leaf)}
    return {
        "format_version": FORMAT_VERSION,
        "wire_version": WIRE_VERSION,
        "library_version": echo_jax.__version__,
        "configs": {_name(path): dataclasses.asdict(leaf_config) for path, leaf_config in configs},
        "states": states,
        "loss_scales": _loss_scales(state),
    }


def _name(path: Any) -> str:
    return "state" + jax.tree_util.keystr(path)


def _states(state: Any, argument: str) -> dict[str, EchoState]:
    """Every EchoState of a pytree by its path; None has no entry."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_state)
    for path, leaf in leaves:
        if not is_state(leaf):
            where = argument + jax.tree_util.keystr(path)
            raise TypeError(f"{where} must be an EchoState or None, found {type(leaf).__name__}")
    return {_name(path): leaf for path, leaf in leaves}


def _arrays(states: dict[str, EchoState]) -> dict[str, Any]:
    """All arrays of states, by path."""
    arrays = {path: state.residual for path, state in states.items()}
    return arrays | {path + _SCALE: state.scale for path, state in states.items() if state.scale is not None}


def _as_saved(like: EchoState, residual: str) -> EchoState:
    """ShapeDtypeStructs, sharded as those of `like`, of a state that is kept in another format."""
    if residual not in residuals.FORMATS:
        raise ValueError(f"the residual format of a checkpoint must be one of {residuals.FORMATS}, found {residual!r}")
    layout = dataclasses.replace(like.layout, residual=residual)
    sharding = getattr(like.residual, "sharding", None)
    structs = residuals.array_shapes(tuple(like.residual.shape), residual)
    codes, scale = (
        None if of is None else jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=sharding) for of in structs
    )
    return EchoState(codes, layout, scale)  # pyright: ignore[reportArgumentType]


def _converted(state: EchoState, like: EchoState) -> EchoState:
    """The same debts in the format, and with the shardings, of `like`."""
    convert = lambda state: EchoState(state.residual, like.layout).with_errors(state.errors())  # noqa: E731
    shardings = jax.tree.map(lambda array: array.sharding, like)
    return jax.jit(convert, out_shardings=shardings)(state)


def _loss_scales(state: Any) -> dict[str, Any]:
    is_streams = lambda node: isinstance(node, Streams)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_streams)
    return {_name(path): leaf.loss_scale for path, leaf in leaves if is_streams(leaf)}


def _check_scales(found: dict[str, Any], here: dict[str, Any], step: int) -> None:
    """ValueError for streams that would be carried over a change of the loss scale; new ones (None) take any."""
    for path, scale in here.items():
        if scale is not None and found.get(path, 1.0) != scale:
            raise ValueError(
                f"the checkpoint of step {step} does not fit this program: {path} was saved at loss_scale "
                f"{found.get(path, 1.0)}, and it is {scale} here"
            )


def _describe(state: EchoState) -> dict[str, dict[str, Any]]:
    """The parts of a state's metadata that a restore must find equal, in JSON's own types."""
    layout = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(state.layout).items()}
    layout["axis_name"] = [str(name) for name in axes.axis_names(state.layout.axis_name)]
    array = {
        "shape": list(state.residual.shape),
        "dtype": str(state.residual.dtype),
        "sharded_over": _sharded_over(state.residual),
    }
    return {"layout": layout, "array": array}


def _sharded_over(residual: Any) -> list[list[Any]] | None:
    """Which rank an entry of the leading axis belongs to: [[mesh axis, size], ...], axes of size 1 left out.

    Meshes of equal size whose axes come in another order give equal shapes, but deal the entries to other ranks.
    """
    sharding = getattr(residual, "sharding", None)
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) == 0:
        return None
    entry = sharding.spec[0]
    names = entry if isinstance(entry, tuple) else (entry,)
    if any(name not in sharding.mesh.shape for name in names):
        return None
    sizes = [[str(name), sharding.mesh.shape[name]] for name in names if sharding.mesh.shape[name] > 1]
    return sizes if math.prod(size for _, size in sizes) == residual.shape[0] else None


def _restore_item(manager: ocp.CheckpointManager, step: int, item: str, args: ocp.args.CheckpointArgs) -> Any:
    try:
        return manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
    except Exception as error:
        if step not in manager.all_steps():
            raise
        try:
            there = sorted(manager.metadata(step).item_handlers or ())
        except Exception:  # damaged too
            there = [item]
        if item in there:
            raise ValueError(
                f"item {item!r} of the checkpoint of step {step} in {manager.directory} cannot be read, as if an array "
                f"or a file of it were missing or damaged: {type(error).__name__}: {error!s:.200}"
            ) from error
        raise ValueError(
            f"the checkpoint of step {step} in {manager.directory} must have what echo_jax.checkpoint.save_args saves; "
            f"item {item!r} is missing, there are {there}"
        ) from error


def _check_versions(found: Any, step: int) -> None:
    for key, known in (("format_version", FORMAT_VERSION), ("wire_version", WIRE_VERSION)):
        version = found.get(key) if isinstance(found, dict) else None
        if not isinstance(version, int):
            raise ValueError(f"{METADATA_ITEM} of step {step} must have {key!r}, an int; found {version!r}")
        if version > known:
            raise ValueError(
                f"the checkpoint of step {step} has {key} {version} (from echo_jax {found.get('library_version')}); "
                f"echo_jax {echo_jax.__version__} reads versions up to {known}"
            )


def _check_fits(found: dict[str, Any], wanted: dict[str, Any], step: int) -> None:
    """ValueError that names everything in which the checkpoint's states and those wanted here differ."""
    differences = [f"{path}: in the checkpoint, but None or absent here" for path in found if path not in wanted]
    differences += [
        f"{path}: wanted here, but None or absent in the checkpoint" for path in wanted if path not in found
    ]
    other_ranks = False
    for path in (path for path in wanted if path in found):
        converts = found[path]["layout"].get("residual") != wanted[path]["layout"]["residual"]
        for part in ("layout", "array"):
            saved, here = found[path][part], wanted[path][part]
            for key in (key for key in here if saved.get(key) != here[key]):
                if key == "residual" or (key == "dtype" and converts):
                    continue
                if key == "sharded_over" and None in (saved[key], here[key]):
                    continue
                differences.append(f"{path}: {part} {key} {saved.get(key)!r} in the checkpoint, {here[key]!r} here")
                other_ranks |= key == "ranks"
    if other_ranks:
        differences.append(
            "What is owed cannot be moved to another number of ranks yet: restore it on the mesh that saved it, or "
            "go on with the zeros of init_state, which forgets it."
        )
    if differences:
        raise ValueError("\n  ".join([f"the checkpoint of step {step} does not fit this program:", *differences]))


def _check_config_gives(config: EchoConfig, layout: Layout, name: str) -> None:
    """ValueError unless a call with this config could have been given a state of this layout."""
    expected = Layout.of(layout.shape, layout.axis_name, layout.ranks, config)
    if not config.feedback or expected != layout:
        raise ValueError(f"config must be the one that {name} is used with, found {config} for a state of {layout}")
