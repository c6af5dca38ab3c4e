"""The compensated sum and its conjugate, and what settles their debts.

A call is three local stages (`stages.py`) and two collectives of one uint8 buffer each. The law it keeps, whatever the
code: with E_r what rank r owes before and E_r' after,  sum_r x_r + sum_r E_r = y + sum_r E_r'.

Every public function takes an array or a pytree of arrays; a pytree makes one call a leaf. `name` labels the call in
profiles (`jax.named_scope`), in `echo_jax.wire` reports and in errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from echo_jax import axes, probe, residuals, stages
from echo_jax.axes import AxisName
from echo_jax.codecs import CODECS
from echo_jax.config import EchoConfig
from echo_jax.layout import Layout
from echo_jax.state import EchoState, check_config, check_dtype, check_shape, is_state, pair_leaves

# The name that results carry for `jax.checkpoint`: see `remat_policy`.
SUM_NAME = "echo_jax_sum"

remat_policy = jax.checkpoint_policies.save_only_these_names(SUM_NAME)
"""`jax.checkpoint` policy for a block with compensated sums: keep their results, recompute the rest.

Recomputing a sum would send it again, and would need the state that it started from: in a scan over layers, a residual
a layer. With this policy a scanned block keeps its input and one activation for every sum that its backward pass needs.
"""


def echo_psum(
    x: Any, axis_name: AxisName, state: Any, config: EchoConfig, *, name: str | None = None
) -> tuple[Any, Any]:
    """Compensated `lax.psum`: the sum of x and of what is owed over the axis, and what is owed after it.

    Works inside shard_map (check_vma=True or False) and vmap(axis_name=...). An x that does not vary over the axis is
    cast first, as lax.psum does. Its derivative is that of lax.psum, exact and uncompressed; the state is a constant
    to it. Forward-mode differentiation raises a TypeError.

    Exact calls (one rank, algorithm 'exact', 'auto' below `min_elements`) sum in x's dtype, pay what is owed, rounding
    x plus the debt once to x's dtype, and leave the state at zero; if nothing is owed the bits are lax.psum's own.

    Args:
      x: this rank's partial sums, float16, bfloat16 or float32, of any shape; or a pytree of them.
      axis_name: mesh axis, or tuple of axes, to sum over.
      state: from `init_state` or an earlier call; None if `config.feedback` is False.
      config: static. Its layout must be the state's; codec and algorithm may differ from call to call.
      name: label of the call.

    Returns:
      (y, state): y in x's shape and dtype, equal to the last bit on all ranks. A group that holds a NaN or an infinity
      comes out NaN on every rank (with codec 'none', and in exact calls, only the values that lax.psum would have
      spoiled); the errors that it would have left are dropped, so that the state stays finite.

    Raises:
      TypeError: x or config of the wrong type. ValueError: unknown axis, state of another layout or structure.
    """

    config = probe.probed(config, name or "echo_psum")

    def call(x: jax.Array, state: EchoState | None, layout: Layout) -> tuple[jax.Array, EchoState | None]:
        x = _varying_over_axis(x, axis_name)
        if axes.is_vmapped(axis_name):
            y, state = _compensated_sum(*lax.stop_gradient((x, state)), layout, config)
            y = _with_derivative_of(lax.psum(x, axis_name), y)
        else:
            y, state = _echo_psum(x, state, layout, config)  # pyright: ignore[reportGeneralTypeIssues]
        return checkpoint_name(y, SUM_NAME), state

    return _for_each_leaf(call, x, axis_name, state, config, name or "echo_psum")


def echo_psum_grad(
    x: Any, axis_name: AxisName, state: Any, config: EchoConfig, *, name: str | None = None
) -> tuple[Any, Any]:
    """The conjugate of `echo_psum`: identity forward, compensated sum of the cotangents backward.

    Put it where a value that is equal on all ranks enters computations that differ between ranks, once for all of
    them. Needs shard_map with check_vma=True: elsewhere lax.psum's transpose sums too, and gradients would be counted
    twice.

    The state passes through unchanged; its *cotangent* carries the residual: what arrives as the cotangent of the
    returned state is what the backward stream owes so far, and the cotangent of the given state is what it owes after
    this sum. Differentiate with `echo_jax.value_and_grad`, which starts and reads it; plain jax.grad starts from zero.

    Args:
      x: float16, bfloat16 or float32, not varying over the axis; or a pytree of them.
      axis_name, config, name: as in `echo_psum`.
      state: the backward stream's state, of the layout of x's cotangent, that is of x.

    Returns:
      (x, state): x cast to vary over the axis, as `lax.pcast(x, axis_name, to="varying")`.

    Raises:
      ValueError: no check_vma=True; x varies over the axis already; and as `echo_psum`.
    """

    config = probe.probed(config, name or "echo_psum_grad")

    def call(x: jax.Array, state: EchoState | None, layout: Layout) -> tuple[jax.Array, EchoState | None]:
        return _echo_psum_grad(x, state, layout, config)

    _check_conjugate(x, axis_name, name or "echo_psum_grad")
    return _for_each_leaf(call, x, axis_name, state, config, name or "echo_psum_grad")


def flush(
    y: Any,
    axis_name: AxisName,
    state: Any,
    config: EchoConfig,
    *,
    rows: jax.Array | None = None,
    exact: bool = True,
    name: str | None = None,
) -> tuple[Any, Any]:
    """Settle a stream: y plus everything that is still owed, summed exactly in y's dtype (16 bits or more).

    y then is the exact sum of all partials of the stream, to the rounding of the residual's and y's dtypes. Works
    wherever `echo_psum` does. The debt is a constant to differentiation.

    With exact=False the debt is sent as `config` says, as the sum of one more call that adds nothing: at a code's bits,
    and all but that call's own rounding errors is paid (of a debt coded in 4 bits, a tenth stays owed).

    Args:
      y: the stream's running value, to which its sums were added; of the shape of the state's x.
      axis_name, state, config, name: as in `echo_psum`. With a state of None nothing is owed and y is returned.
      rows: settle these rows of x alone, and send no more than them: int[...], different indices into the rows (all
        axes of x but the last, flattened), equal on all ranks. y is then [..., d] of one array, those rows of the
        running value. Negative indices, or those past the end, are not checked.
      exact: whether the sum is exact; rows of their own always are.

    Returns:
      (y, state): the state is zero; with `rows`, zero in those rows, and the others go on owing; with exact=False, what
      is still owed.

    Raises:
      As `echo_psum`. ValueError: rows of a layout of scheme 'flat', whose groups cross rows; rows with exact=False.
    """
    if rows is not None:
        if not exact:
            raise ValueError(f"{name or 'flush'}: exact must be True with rows, found {exact!r}")
        return _flush_rows(y, axis_name, state, config, jnp.asarray(rows), name or "flush")

    config = probe.probed(config, name or "flush")

    def call(y: jax.Array, state: EchoState | None, layout: Layout) -> tuple[jax.Array, EchoState | None]:
        if state is None:
            return y, None
        return _add_debt(y, lax.stop_gradient(state), layout, config, exact)

    return _for_each_leaf(call, y, axis_name, state, config, name or "flush")


def flush_grad(
    x: Any, axis_name: AxisName, state: Any, config: EchoConfig, *, exact: bool = True, name: str | None = None
) -> tuple[Any, Any]:
    """The conjugate of `flush`: identity forward; backward it adds what the backward stream still owes.

    Place it where the backward stream ends, below the first layer: x's cotangent there is the stream's running value.
    The state's cotangent comes back zero, or, with exact=False, with what is still owed. Needs check_vma=True, as
    `echo_psum_grad`.

    Args:
      x: the value whose cotangent is settled, not varying over the axis.
      axis_name, state, config, name: as in `echo_psum_grad`.
      exact: as in `flush`.

    Returns:
      (x, state), unchanged.
    """

    config = probe.probed(config, name or "flush_grad")

    def call(x: jax.Array, state: EchoState | None, layout: Layout) -> tuple[jax.Array, EchoState | None]:
        if state is None:
            return x, None
        return _flush_grad(x, state, layout, config, exact)

    _check_conjugate(x, axis_name, name or "flush_grad")
    return _for_each_leaf(call, x, axis_name, state, config, name or "flush_grad")


# --- one leaf --------------------------------------------------------------------------------------------------------


def _for_each_leaf(call: Any, x: Any, axis_name: AxisName, state: Any, config: EchoConfig, name: str) -> Any:
    """Check all arguments before anything is sent, then run `call(leaf, state, layout)` on every leaf."""
    with _labelled_errors(name):
        _check_given(state, config)
        leaves = pair_leaves(x, state)
        for path, leaf, _ in leaves:
            check_dtype(leaf, path)
        ranks = axes.axis_size(axis_name)
        layouts = [Layout.of(leaf.shape, axis_name, ranks, config) for _, leaf, _ in leaves]
        for (path, leaf, leaf_state), layout in zip(leaves, layouts, strict=True):
            if leaf_state is not None:
                _check_layout(leaf, path, leaf_state, layout)
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(f"x{jax.tree_util.keystr(path)} must be an array, found a ShapeDtypeStruct")
    results = []
    for (_, leaf, leaf_state), layout in zip(leaves, layouts, strict=True):
        with jax.named_scope(f"{name}/{layout.scheme}{layout.group_size}"):
            results.append(call(*_match_axes(jnp.asarray(leaf), leaf_state, axis_name), layout))
    structure = jax.tree.structure(x)
    y = jax.tree.unflatten(structure, [leaf for leaf, _ in results])
    return y, None if state is None else jax.tree.unflatten(structure, [leaf_state for _, leaf_state in results])


def _check_given(state: Any, config: EchoConfig) -> None:
    check_config(config)
    if config.feedback != (state is not None):
        wanted = "the state from init_state" if config.feedback else "None"
        raise ValueError(f"state must be {wanted} with feedback={config.feedback}, found {type(state).__name__}")


@contextlib.contextmanager
def _labelled_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        error.args = (f"{name}: {error.args[0]}", *error.args[1:])
        raise


def _match_axes(x: jax.Array, state: EchoState | None, axis_name: AxisName) -> tuple[jax.Array, EchoState | None]:
    """x and its state, cast to vary over the same mesh axes, the summed ones apart: a call keeps the types of both."""
    if state is None:
        return x, None
    others = axes.varying_axes(state.residual) - set(axes.axis_names(axis_name))
    x = axes.cast_varying(x, tuple(sorted(others, key=str)))
    return x, jax.tree.map(lambda array: axes.match_varying(_varying_over_axis(array, axis_name), x), state)


def _check_layout(x: Any, path: Any, state: EchoState, layout: Layout) -> None:
    argument = "x" + jax.tree_util.keystr(path)
    check_shape(x, state.layout, argument)
    if state.layout != layout:
        fields = vars(layout)
        differing = {
            key: (vars(state.layout)[key], fields[key]) for key in fields if vars(state.layout)[key] != fields[key]
        }
        found = ", ".join(f"{key} {old!r} where the call has {new!r}" for key, (old, new) in differing.items())
        raise ValueError(f"state must have the layout that config gives to {argument}; found {found}")
    wanted = residuals.array_shapes((1, *layout.chunks_shape), layout.residual)
    for field, array, like in zip(("residual", "scale"), (state.residual, state.scale), wanted, strict=True):
        if (array is None) != (like is None):
            raise ValueError(f"state.{field} must be {like} as its layout says, found {array}")
        if array is None or like is None:
            continue
        if array.dtype != like.dtype:
            # As after a cast of a whole train state: what is owed may have been rounded away.
            raise ValueError(f"state.{field} must be {like.dtype} as its layout says, found {array.dtype}")
        if tuple(array.shape) != like.shape:
            raise ValueError(
                f"state.{field} must be {like.shape} on each rank (one entry of its leading axis a rank: shard it over "
                f"{layout.axis_name!r}), found {tuple(array.shape)}"
            )


def _check_conjugate(x: Any, axis_name: AxisName, name: str) -> None:
    with _labelled_errors(name):
        axes.axis_size(axis_name)
        if not axes.types_say_varying(axis_name):
            raise ValueError(
                f"needs shard_map with check_vma=True over {axis_name!r}: without it the transpose of lax.psum sums "
                "again and gradients are counted twice"
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            check_dtype(leaf, path)
            already = axes.varying_axes(leaf) & set(axes.axis_names(axis_name))
            if already:
                raise ValueError(
                    f"x{jax.tree_util.keystr(path)} must not vary over {axis_name!r}, found a value that varies over "
                    f"{sorted(already, key=str)}: its cotangents must not be summed"
                )


@probe.measured
def _compensated_sum(
    x: jax.Array, state: EchoState | None, layout: Layout, config: EchoConfig
) -> tuple[jax.Array, EchoState | None]:
    """Sum x over the axis as `config` says. x varies over the axis where types track that."""
    codec, axis_name = CODECS[config.codec], layout.axis_name
    owed = None if state is None else state.errors()[0]
    algorithm = config.resolve(layout.size, layout.ranks)
    if algorithm == "exact":
        return _exact_sum(x, state, layout, config)

    with jax.named_scope("encode"):
        sent = stages.encode(layout.to_chunks(x), owed, codec)
    if algorithm == "one_shot":
        with jax.named_scope("all_gather"):
            wire = axes.all_gather(sent.wire, axis_name)
        with jax.named_scope("decode"):
            chunks = stages.decode_and_sum(wire, layout.groups, layout.group_size, codec, x.dtype)
        error = sent.error
    else:
        rank = lax.axis_index(axis_name)
        own = lax.dynamic_index_in_dim(sent.values, rank, keepdims=False)
        with jax.named_scope("all_to_all"):
            received = lax.all_to_all(sent.wire, axis_name, 0, 0, tiled=True)
        with jax.named_scope("reduce"):
            reduced = stages.reduce(received, own, rank, codec, x.dtype)
        with jax.named_scope("all_gather"):
            wire = axes.all_gather(reduced.wire, axis_name)
        with jax.named_scope("decode"):
            chunks = stages.decode(wire, layout.groups, layout.group_size, codec, x.dtype)
        is_own = jnp.arange(layout.ranks)[:, None, None] == rank
        error = jnp.where(is_own, reduced.error, sent.error)
    chunks = chunks.astype(x.dtype)
    if x.dtype == jnp.float16:
        # A sum that overflows float16 is lost in that cast. Its debts are as large, and would spoil the next sums.
        error = jnp.where(jnp.isfinite(chunks).all(-1, keepdims=True), error, 0.0)
    y = layout.from_chunks(chunks)
    return y, None if state is None else state.with_errors(error[None])


def _exact_sum(
    x: jax.Array, state: EchoState | None, layout: Layout, config: EchoConfig
) -> tuple[jax.Array, EchoState | None]:
    if state is None:
        return lax.psum(x, layout.axis_name), None
    owed = _owed(state, layout, config)
    # Where nothing is owed x's own bits are sent: adding zero would turn -0 into 0.
    x = jnp.where(owed == 0, x, (x.astype(jnp.float32) + owed).astype(x.dtype))
    return lax.psum(x, layout.axis_name), state.settled()


def _add_debt(
    y: jax.Array, state: EchoState, layout: Layout, config: EchoConfig, exact: bool
) -> tuple[jax.Array, EchoState | None]:
    if not exact:
        debt, rest = _compensated_sum(_varying_over_axis(jnp.zeros_like(y), layout.axis_name), state, layout, config)
        return _plus_debt(y, debt), rest
    debt = lax.psum(_owed(state, layout, config).astype(y.dtype), layout.axis_name)
    return _plus_debt(y, debt), state.settled()


def _plus_debt(y: jax.Array, debt: jax.Array) -> jax.Array:
    # Where nothing is owed y keeps its bits: adding zero would turn -0 into 0.
    return jnp.where(debt == 0, y, (y.astype(jnp.float32) + debt.astype(jnp.float32)).astype(y.dtype))


def _flush_rows(
    y: Any, axis_name: AxisName, state: Any, config: EchoConfig, rows: jax.Array, name: str
) -> tuple[jax.Array, EchoState | None]:
    with _labelled_errors(name):
        _check_given(state, config)
        check_dtype(y, argument="y")
        ranks = axes.axis_size(axis_name)
        if state is None:
            return y, None
        if not is_state(state):
            raise TypeError(f"state must be the EchoState of one array, found {type(state).__name__}")
        layout = Layout.of(state.layout.shape, axis_name, ranks, config)
        _check_layout(jax.ShapeDtypeStruct(layout.shape, y.dtype), (), state, layout)
        if not jnp.issubdtype(rows.dtype, jnp.integer):
            raise TypeError(f"rows must be integers, found {rows.dtype}")
        if y.shape != (*rows.shape, layout.shape[-1]):
            raise ValueError(f"y must be rows of x, {(*rows.shape, layout.shape[-1])}; found {tuple(y.shape)}")
        groups = layout.row_groups(rows)
    y, state = _match_axes(y, lax.stop_gradient(state), axis_name)
    with jax.named_scope(f"{name}/{layout.scheme}{layout.group_size}"):
        errors = state.errors().reshape(-1, layout.group_size)  # its leading axis is 1 on each rank
        owed = stages.owed(errors[groups], CODECS[config.codec]).reshape(y.shape)
        # Zeros of every format have all bits zero; the other codes keep theirs.
        residual = state.residual.reshape(-1, layout.group_size)
        rest = dataclasses.replace(state, residual=residual.at[groups].set(0).reshape(state.residual.shape))
        return _plus_debt(y, lax.psum(owed.astype(y.dtype), axis_name)), rest


def _owed(state: EchoState, layout: Layout, config: EchoConfig) -> jax.Array:
    """float32[*shape]: what this rank owes, in x's domain."""
    return layout.from_chunks(stages.owed(state.errors()[0], CODECS[config.codec]))


# --- differentiation: one custom_vjp around each whole call ----------------------------------------------------------
# (A uint8 buffer that crosses an autodiff boundary has no cotangent, and silently stops every gradient.)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _echo_psum(x, state, layout, config):
    return _compensated_sum(x, state, layout, config)


def _echo_psum_fwd(x, state, layout, config):
    # Itself, not _compensated_sum: a derivative of this rule must meet the rule again, not the codes.
    return _echo_psum(x, state, layout, config), None


def _echo_psum_bwd(layout, config, _, cotangents):
    del config
    y_bar, state_bar = cotangents
    x_like = _varying_over_axis(jnp.zeros_like(y_bar), layout.axis_name)
    # Taken from lax.psum itself: what its transpose is depends on check_vma, and so must ours.
    transpose = jax.linear_transpose(lambda x: lax.psum(x, layout.axis_name), x_like)
    return *transpose(y_bar), jax.tree.map(jnp.zeros_like, state_bar)


@jax.custom_vjp
def _with_derivative_of(z, y):
    """y, differentiated as if it were z: the rule for vmap, whose axis a rule run outside it cannot name.

    Compiled, z itself is dead code; uncompiled, nothing is sent under vmap anyway.
    """
    del z
    return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _echo_psum_grad(x, state, layout, config):
    del config
    return _varying_over_axis(x, layout.axis_name), state


def _echo_psum_grad_fwd(x, state, layout, config):
    # Written out: a call of _echo_psum_grad would stay one in a rematerialised block, and keep its state alive.
    del config
    return (_varying_over_axis(x, layout.axis_name), state), None


def _echo_psum_grad_bwd(layout, config, _, cotangents):
    x_bar, residual = cotangents
    return _echo_psum(x_bar, residual, layout, config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _flush_grad(x, state, layout, config, exact):
    del layout, config, exact
    return x, state


def _flush_grad_fwd(x, state, layout, config, exact):
    del layout, config, exact
    return (x, state), None


def _flush_grad_bwd(layout, config, exact, _, cotangents):
    x_bar, residual = cotangents
    return _add_debt(x_bar, residual, layout, config, exact)


_with_derivative_of.defvjp(
    lambda z, y: (_with_derivative_of(z, y), None), lambda _, y_bar: (y_bar, jnp.zeros_like(y_bar))
)
_echo_psum.defvjp(_echo_psum_fwd, _echo_psum_bwd)
_echo_psum_grad.defvjp(_echo_psum_grad_fwd, _echo_psum_grad_bwd)
_flush_grad.defvjp(_flush_grad_fwd, _flush_grad_bwd)


def _varying_over_axis(x: jax.Array, axis_name: AxisName) -> jax.Array:
    return axes.cast_varying(x, axes.axis_names(axis_name)) if axes.types_say_varying(axis_name) else x
