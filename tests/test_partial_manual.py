"""Promise 8: inside a jit that shards over other axes, a sum over 'tp' moves nothing over those axes.

Cutting an x into groups flattens it; where x is sharded over an axis that shard_map does not manage, the compiler would
gather it first. So a second shard_map takes those axes over for the call.
"""

import jax
import numpy as np
import pytest
from helpers import mesh_of
from hlo import collectives
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import echo_jax
from echo_jax import EchoConfig

CONFIG = EchoConfig(algorithm="two_shot")
# Devices of one row share their data coordinate: what stays within a row is over 'tp' only.
SAME_DATA = tuple(tuple(range(4 * row, 4 * row + 4)) for row in range(2))

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
explicit_gathers = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="JAX 0.10 gathers every explicitly sharded operand of a partly manual shard_map, for lax.psum too",
)


def _partials(mesh):
    """float32[tp, rows, columns], sharded over both axes."""
    x = np.random.default_rng(0).normal(size=(4, 8, 512)).astype(np.float32)
    return x, jax.device_put(x, NamedSharding(mesh, P("tp", "data")))


def _two_sums(x):
    """x [1, rows, columns] of one rank of 'tp' -> y of two calls added up, and what is owed."""
    state = echo_jax.init_state(x[0], "tp", CONFIG)
    first, state = echo_jax.echo_psum(x[0], "tp", state, CONFIG)
    second, state = echo_jax.echo_psum(x[0], "tp", state, CONFIG)
    return first + second, state


def _nested(f):
    """f with axis 'data' manual too: x's rows are cut over it, a state's leading axis varies over it."""
    return jax.shard_map(f, axis_names={"data"}, in_specs=P(None, "data"), out_specs=(P("data"), P("data")))


def _wanted(x):
    """The same sums with every axis manual from the start, and where each row's y and state then are."""
    both = jax.shard_map(
        _two_sums, mesh=mesh_of(data=2, tp=4), in_specs=P("tp", "data"), out_specs=(P("data"), P(("tp", "data")))
    )
    return jax.jit(both)(x)


@pytest.mark.quick
@pytest.mark.parametrize("axis_type", [AUTO, pytest.param(EXPLICIT, marks=explicit_gathers)], ids=["auto", "explicit"])
def test_a_nested_shard_map_sums_over_tp_and_moves_nothing_over_data(axis_type):
    mesh = mesh_of(axis_type, data=2, tp=4)
    x, placed = _partials(mesh)
    with jax.set_mesh(mesh):
        sums = jax.jit(jax.shard_map(_nested(_two_sums), axis_names={"tp"}, in_specs=P("tp"), out_specs=(P(), P("tp"))))
        sent = collectives(sums.lower(placed).compile())
        y, state = sums(placed)
    assert [c.groups for c in sent] == [SAME_DATA] * 4
    assert [c.dtypes for c in sent] == [{"u8"}] * 4
    wanted, wanted_state = _wanted(x)
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(state.residual, wanted_state.residual)


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_a_shard_map_over_all_axes_inside_a_sharded_jit_moves_nothing_over_data(axis_type):
    mesh = mesh_of(axis_type, data=2, tp=4)
    x, placed = _partials(mesh)

    def program(x):
        y, state = jax.shard_map(_two_sums, in_specs=P("tp", "data"), out_specs=(P("data"), P(("data", "tp"))))(x * 2)
        return y / 2, state

    with jax.set_mesh(mesh):
        sent = collectives(jax.jit(program).lower(placed).compile())
        y, _ = jax.jit(program)(placed)
    assert [(c.groups, c.dtypes) for c in sent] == [(SAME_DATA, {"u8"})] * 4
    np.testing.assert_array_equal(y, _wanted(x)[0])


def test_a_state_carried_through_a_partly_manual_program_stays_where_it_is():
    """One call a program, state in and out: the leading axis is cut over 'tp' first, as the outer shard_map is."""
    mesh = mesh_of(data=2, tp=4)
    x, placed = _partials(mesh)

    def call(x, state):
        return echo_jax.echo_psum(x[0], "tp", state, CONFIG)

    def outer(x, state):
        inner = jax.shard_map(
            call, axis_names={"data"}, in_specs=(P(None, "data"), P("data")), out_specs=(P("data"), P("data"))
        )
        return inner(x, state)

    start = echo_jax.init_state(jax.ShapeDtypeStruct((8, 512), np.float32), "tp", CONFIG, mesh=mesh, spec=P("data"))
    start = jax.device_put(start, NamedSharding(mesh, P(("tp", "data"))))
    with jax.set_mesh(mesh):
        step = jax.jit(jax.shard_map(outer, axis_names={"tp"}, in_specs=(P("tp"), P("tp")), out_specs=(P(), P("tp"))))
        sent = collectives(step.lower(placed, start).compile())
        first, state = step(placed, start)
        second, state = step(placed, state)
    assert [(c.groups, c.dtypes) for c in sent] == [(SAME_DATA, {"u8"})] * 2
    wanted, wanted_state = _wanted(x)
    np.testing.assert_array_equal(first + second, wanted)
    np.testing.assert_array_equal(state.residual, wanted_state.residual)


def test_without_a_nested_shard_map_the_compiler_does_move_values_over_data():
    """Why the others nest; when this fails, a compiler has learned it and the advice in the docs can go."""
    mesh = mesh_of(data=2, tp=4)
    _, placed = _partials(mesh)
    with jax.set_mesh(mesh):
        sums = jax.jit(jax.shard_map(_two_sums, axis_names={"tp"}, in_specs=P("tp"), out_specs=(P(), P("tp"))))
        sent = collectives(sums.lower(placed).compile())
    assert any(c.groups != SAME_DATA for c in sent)


def test_lax_psum_in_the_same_place_sends_float32_and_this_check_sees_it():
    mesh = mesh_of(data=2, tp=4)
    _, placed = _partials(mesh)
    with jax.set_mesh(mesh):
        sums = jax.shard_map(lambda x: lax.psum(x[0], "tp"), axis_names={"tp"}, in_specs=P("tp"), out_specs=P())
        (sent,) = collectives(jax.jit(sums).lower(placed).compile())
    assert (sent.op, sent.dtypes, sent.groups, sent.nbytes) == ("all-reduce", {"f32"}, SAME_DATA, 4 * 4 * 512)
