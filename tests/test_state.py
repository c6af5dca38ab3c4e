"""The state as a value: made outside and inside, shared, donated, carried, for pytrees and for several axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    MODES,
    assert_conserved,
    assert_same_bits,
    compiled_psum,
    mesh_of,
    on_ranks,
    owed,
    partials,
    residual_slack,
    zero_state,
)
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import echo_jax
from echo_jax import EchoConfig, EchoState

CONFIG = EchoConfig(algorithm="two_shot")
X = jax.ShapeDtypeStruct((6, 256), jnp.float32)


# --- where a state is made -------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_a_state_made_inside_is_zero_and_has_a_leading_axis_of_one(mode):
    def make(x):
        state = echo_jax.init_state(x, "tp", CONFIG)
        assert state.residual.shape == (1, 4, state.layout.groups, 128)
        from_shape = echo_jax.init_state(jax.ShapeDtypeStruct(x.shape, x.dtype), "tp", CONFIG)
        assert from_shape.layout == state.layout
        return state, from_shape

    x = partials(0, (4, 6, 512))
    for state in on_ranks(make, 4, mode)(x):
        assert_same_bits(state, zero_state(x, CONFIG))
        assert state.layout == zero_state(x, CONFIG).layout


@pytest.mark.parametrize(
    ("spec", "axis_name", "copies", "axes"),
    [
        (P("data"), "tp", 8, ("data", "tp")),
        (P(), "tp", 4, ("tp",)),
        (P(None, "data"), "tp", 8, ("data", "tp")),
        (P(), ("data", "tp"), 8, ("data", "tp")),
    ],
)
def test_a_state_made_outside_fits_the_state_made_inside(spec, axis_name, copies, axes):
    mesh = mesh_of(data=2, tp=4)
    outside = echo_jax.init_state(X, axis_name, CONFIG, mesh=mesh, spec=spec)
    assert outside.residual.shape[0] == copies
    assert outside.residual.sharding.is_equivalent_to(NamedSharding(mesh, P(axes)), 4)

    def call(x, state):
        if axis_name == "tp":
            x = lax.pcast(x, "tp", to="varying")
        made = echo_jax.init_state(x, axis_name, CONFIG)
        assert made.layout == state.layout and made.residual.shape == state.residual.shape
        assert jax.typeof(made.residual) == jax.typeof(state.residual)
        return echo_jax.echo_psum(x, axis_name, state, CONFIG)

    y_spec = spec if axis_name == "tp" else P()
    sums = jax.shard_map(call, mesh=mesh, in_specs=(spec, P(axes)), out_specs=(y_spec, P(axes)))
    _, state = jax.jit(sums)(np.ones((6, 256), np.float32), outside)
    assert state.residual.shape == outside.residual.shape


def test_a_pytree_of_states_made_outside_takes_a_spec_or_a_prefix_of_specs():
    mesh = mesh_of(data=2, tp=4)
    x = {"a": X, "b": {"c": jax.ShapeDtypeStruct((8,), jnp.bfloat16), "d": X}}
    states = echo_jax.init_state(x, "tp", CONFIG, mesh=mesh, spec={"a": P("data"), "b": P()})
    assert states["a"].residual.shape[0] == 8 and states["a"].layout.shape == (3, 256)
    assert states["b"]["c"].residual.shape[0] == 4 and states["b"]["d"].layout.shape == (6, 256)
    assert echo_jax.init_state(x, "tp", EchoConfig(feedback=False), mesh=mesh, spec=P()) is None


# --- sharing ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_configs_whose_states_have_the_same_layout_share_a_state():
    """Codec, algorithm and gate may differ; what says how to read the residual may not (tests/test_input.py)."""
    x = partials(1, (4, 3, 256))
    rotated = [CONFIG, EchoConfig(algorithm="one_shot"), EchoConfig(algorithm="exact"), EchoConfig(min_elements=10**9)]
    straight = [EchoConfig(codec, algorithm="two_shot") for codec in ("int4", "int8", "none")]
    for configs in (rotated, straight):
        state = zero_state(x, configs[0])
        for config in configs:
            before, (y, state) = state, compiled_psum(config, 4, "vmap")(x, state)
            assert_conserved(x, before, y, state, exact=config.resolve(x[0].size, 4) == "exact")


# --- carrying --------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_a_state_is_the_carry_of_a_scan_and_gives_what_calls_in_a_row_give(mode):
    xs = partials(2, (3, 5, 2, 96))

    def scanned(xs):
        def layer(state, x):
            y, state = echo_jax.echo_psum(x, "tp", state, CONFIG)
            return state, y

        state, ys = lax.scan(layer, echo_jax.init_state(xs[0], "tp", CONFIG), xs)
        return ys, state

    ys, state = on_ranks(scanned, 3, mode)(xs)
    by_hand = zero_state(xs[:, 0], CONFIG)
    for step in range(5):
        y, by_hand = compiled_psum(CONFIG, 3, mode)(xs[:, step], by_hand)
        # In a loop the compiler may join multiplications and additions that it does not join outside: rarely, a value
        # between two codes falls to the other one. So not the bits, but the law.
        np.testing.assert_allclose(ys[:, step], y, rtol=0, atol=0.5)
    total = np.float64(ys)[0].sum(0) + owed(state).sum(0)
    # bfloat16 residuals: 2**-8 of what is owed, at most about 0.3, on 3 ranks in 5 calls.
    np.testing.assert_allclose(total, np.float64(xs).sum((0, 1)), rtol=0, atol=15 * 0.3 * 2.0**-8)


@pytest.mark.quick
def test_a_donated_state_gives_the_same_bits_and_its_buffer_away():
    x = partials(3, (4, 6, 256))
    mesh = mesh_of(tp=4)

    def call(x, state):
        return echo_jax.echo_psum(x[0], "tp", state, CONFIG)

    sums = jax.shard_map(call, mesh=mesh, in_specs=P("tp"), out_specs=(P(), P("tp")))
    kept, donating = jax.jit(sums), jax.jit(sums, donate_argnums=1)
    kept_state = donated_state = echo_jax.init_state(X, "tp", CONFIG, mesh=mesh, spec=P())
    donated_state = jax.tree.map(jnp.copy, donated_state)
    for _ in range(3):
        y, kept_state = kept(x, kept_state)
        given = donated_state
        z, donated_state = donating(x, given)
        assert_same_bits((z, donated_state), (y, kept_state))
        assert given.residual.is_deleted()
    assert "input_output_alias" in donating.lower(x, donated_state).compile().as_text()


def test_a_call_keeps_the_types_of_x_and_state_when_x_varies_over_other_axes_too():
    mesh = mesh_of(data=2, tp=4)

    def layers(x):
        state = echo_jax.init_state(x, "tp", CONFIG)

        def layer(carry, _):
            h, state = carry
            y, state = echo_jax.echo_psum(lax.pcast(h, "tp", to="varying") * 0.1, "tp", state, CONFIG)
            return (h + y, state), None

        (h, state), _ = lax.scan(layer, (x, state), length=4)
        return echo_jax.flush(h, "tp", state, CONFIG)

    sums = jax.shard_map(layers, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P(("data", "tp"))))
    x = partials(4, (8, 256))
    h, state = jax.jit(sums)(x)
    assert state.residual.shape[0] == 8 and not np.asarray(state.residual).any()
    # Each layer adds 4 ranks' tenths of what it is given, errors included; settled, they are those of 3 layers' inputs.
    np.testing.assert_allclose(h, x * 1.4**4, rtol=0, atol=0.5)


# --- pytrees, several axes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [pytest.param(MODES[0], marks=pytest.mark.quick), MODES[2]])
def test_a_pytree_is_one_call_a_leaf(mode):
    x = {
        "a": partials(5, (3, 4, 64)),
        "b": [partials(6, (3, 7), dtype="bfloat16"), partials(7, (3,))],
        "empty": (),
    }

    def call(x):
        y, state = echo_jax.echo_psum(x, "tp", echo_jax.init_state(x, "tp", CONFIG), CONFIG)
        return y, state, echo_jax.flush(y, "tp", state, CONFIG)[0], echo_jax.residual_stats(y, state)

    y, state, settled, stats = on_ranks(call, 3, mode)(x)
    assert jax.tree.structure(y) == jax.tree.structure(x) == jax.tree.structure(settled)
    assert set(stats) == {"relative_rms", "largest", "nonfinite_groups"}

    def alone(x):
        return echo_jax.echo_psum(x, "tp", echo_jax.init_state(x, "tp", CONFIG), CONFIG)

    for leaf, found, found_state in zip(jax.tree.leaves(x), jax.tree.leaves(y), [state["a"], *state["b"]], strict=True):
        wanted, wanted_state = on_ranks(alone, 3, mode)(leaf)
        assert_same_bits(found, wanted)
        assert isinstance(found_state, EchoState) and found_state.layout == wanted_state.layout
        assert_conserved(leaf, zero_state(leaf, CONFIG), found, found_state)


def test_no_leaves_are_no_calls():
    assert on_ranks(lambda _: echo_jax.echo_psum({}, "tp", {}, CONFIG), 2)(np.zeros(2)) == ({}, {})


@pytest.mark.quick
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot", "exact"])
def test_a_tuple_of_axes_is_summed_over_as_one(algorithm, check_vma):
    """Over 2 x 4 ranks, in the order in which the axes are named: as one axis of 8."""
    config = EchoConfig(algorithm=algorithm)
    mesh, both = mesh_of(data=2, tp=4), ("data", "tp")

    def calls(axis_name, x):
        y, state = echo_jax.echo_psum(x, axis_name, echo_jax.init_state(x, axis_name, config), config)
        again, state = echo_jax.echo_psum(x, axis_name, state, config)
        return y, again, state

    x = partials(8, (8, 3, 512))
    out_specs = (P(), P(), P(both))
    sums = jax.shard_map(
        lambda x: calls(both, x[0]), mesh=mesh, in_specs=P(both), out_specs=out_specs, check_vma=check_vma
    )
    y, again, state = jax.jit(sums)(x)
    wanted, wanted_again, _ = on_ranks(functools.partial(calls, "tp"), 8)(x)
    # What 16 partials of two calls make, told apart from what is owed.
    stacked = jax.tree.map(lambda array: np.asarray(array)[:, None], state)
    state = EchoState(stacked.residual, zero_state(x, config).layout, stacked.scale)
    delivered = np.float64(y) + np.float64(again) + owed(state).sum(0)
    allowed = 1e-4 + 2 * residual_slack(state).sum(0).max()  # 1e-4: float32, values up to 8, rotations of 64 values
    np.testing.assert_allclose(delivered, 2 * np.float64(x).sum(0), rtol=0, atol=allowed)
    if algorithm == "exact":  # lax.psum's own order of 8 float32 additions
        np.testing.assert_allclose(y, wanted[0], rtol=0, atol=8 * 8 * 2.0**-24)
    else:
        # Other programs may round v differently in its last bit: then a value between two codes takes the other one.
        assert np.mean(np.asarray(y) != wanted[0]) < 0.001
        assert np.mean(np.asarray(again) != wanted_again[0]) < 0.001


# --- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("codec", "mode"), [("hadamard_int4", "check_vma"), ("int4", "no_check_vma"), ("hadamard_int4", "vmap")]
)
def test_residual_stats_say_how_much_is_owed(codec, mode):
    config = EchoConfig(codec, algorithm="two_shot", residual="float32")

    def call(x):
        y, state = echo_jax.echo_psum(x, "tp", echo_jax.init_state(x, "tp", config), config)
        settled, zero = echo_jax.flush(y, "tp", state, config)
        return y, state, echo_jax.residual_stats(y, state), echo_jax.residual_stats(settled, zero)

    x = partials(9, (4, 6, 256))
    y, state, stats, nothing = on_ranks(call, 4, mode)(x)
    debts, sums = owed(state), np.float64(y)[0]
    # Every rank has its own debt and the same y: both are summed over all ranks.
    wanted = np.sqrt((debts**2).sum() / (4 * (sums**2).sum()))
    np.testing.assert_allclose(stats["relative_rms"], np.full(4, wanted), rtol=1e-5)  # float32 sums of 6,144 values
    unit = np.sqrt(state.layout.group_size) if codec == "hadamard_int4" else 1.0
    np.testing.assert_allclose(stats["largest"], np.full(4, np.abs(state.residual).max() * unit), rtol=1e-6)
    assert not np.asarray(stats["nonfinite_groups"]).any()
    assert not np.asarray(nothing["relative_rms"]).any() and not np.asarray(nothing["largest"]).any()
