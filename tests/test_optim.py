"""Data-parallel gradients in an optax chain: nothing is lost, the state is the optimizer's, all ranks step alike."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import MODES, assert_equal_on_ranks, assert_same_bits, mesh_of, on_ranks, owed, partials
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import echo_jax
from echo_jax import EchoConfig, wire
from echo_jax.state import is_state

CONFIG = EchoConfig(group_size=32, algorithm="two_shot")
SMALL = 256
EXACT = EchoConfig(algorithm="exact", feedback=False)
SHAPES = {"a": (16, 64), "b": (10,), "c": (7, 50), "d": (3, 5), "e": (40, 32)}
LARGE = ("a", "c", "e")


def gradients(seed, ranks, scale=1.0):
    """[ranks, ...] gradients of every leaf."""
    return {name: partials(seed + n, (ranks, *shape), scale=scale) for n, (name, shape) in enumerate(SHAPES.items())}


@functools.cache
def compiled(config, ranks, mode="check_vma", **settings):
    """(init of [ranks, ...] params, update of [ranks, ...] gradients and state)."""
    transformation = echo_jax.compensated_psum("tp", config, small_elements=SMALL, **settings)
    init = on_ranks(transformation.init, ranks, mode)
    return init, on_ranks(lambda grads, state: transformation.update(grads, state), ranks, mode)


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mean", [True, False])
def test_exact_sums_have_the_bits_of_lax_psum(mode, mean):
    grads = gradients(0, 4)
    init, update = compiled(EXACT, 4, mode, mean=mean)
    found, state = update(grads, init(grads))
    assert state.residuals == ()
    total = on_ranks(lambda g: lax.psum(g, "tp"), 4, mode)(grads)
    assert_same_bits(found, jax.tree.map(lambda t: t / np.float32(4), total) if mean else total)


@given(seed=st.integers(0, 1000), ranks=st.sampled_from([2, 3, 5]), bucket=st.sampled_from([1, 1500, 10**6]))
@settings(deadline=None, max_examples=12)
def test_over_any_steps_what_was_given_is_what_came_out_and_what_is_owed(seed, ranks, bucket):
    init, update = compiled(CONFIG, ranks, mean=False, bucket_elements=bucket)
    state = init(gradients(0, ranks))
    assert len(state.residuals) == {1: 3, 1500: 2, 10**6: 1}[bucket]
    given, came = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for step in range(4):
        grads = gradients(seed + 10 * step, ranks, scale=2.0**step)
        sums, state = update(grads, state)
        assert_equal_on_ranks(sums)
        for name in SHAPES:
            given[name] += grads[name].astype(np.float64).sum(0)
            came[name] += np.asarray(sums[name], np.float64)[0]
    debt = np.concatenate([owed(residual).sum(0).reshape(-1) for residual in state.residuals])
    missing = np.concatenate([(given[name] - came[name]).reshape(-1) for name in LARGE])
    np.testing.assert_allclose(missing, debt, atol=8 * 0.02)  # residuals are bfloat16
    for name in set(SHAPES) - set(LARGE):
        np.testing.assert_allclose(came[name], given[name], atol=1e-5)


def test_fed_back_updates_follow_the_exact_ones_and_plain_ones_drift():
    ranks, steps = 4, 60
    errors = {}
    for name, config in (("fed back", CONFIG), ("plain", dataclasses.replace(CONFIG, feedback=False))):
        init, update = compiled(config, ranks)
        grads = gradients(3, ranks)
        state, total = init(grads), 0.0
        for _ in range(steps):  # the same gradient every step: the worst case, as its error is the same too
            updates, state = update(grads, state)
            total = total + np.asarray(updates["a"], np.float64)[0]
        errors[name] = np.abs(total - steps * grads["a"].astype(np.float64).mean(0)).max()
    assert errors["plain"] > 20 * errors["fed back"]


def test_small_leaves_are_one_exact_sum_and_large_ones_are_coded_in_buckets():
    init, update = compiled(CONFIG, 4, bucket_elements=1500)
    grads = gradients(0, 4)
    found = wire.collectives(update, grads, init(grads))
    assert [c.kind for c in found if c.dtype == "uint8"] == ["all_to_all", "all_gather"] * 2
    assert [(c.kind, c.shape) for c in found if c.dtype != "uint8"] == [("all_reduce", (25,))]


def test_a_sum_below_the_gate_of_auto_stays_exact_and_owes_nothing():
    auto = EchoConfig(group_size=32, min_elements=1500)
    init, update = compiled(auto, 4, bucket_elements=1500)
    grads = gradients(0, 4)
    found = wire.collectives(update, grads, init(grads))
    assert sorted(c.shape for c in found if c.dtype == "float32") == [(25,), (40, 32), (1374,)]
    mean = on_ranks(lambda g: jax.tree.map(lambda leaf: lax.psum(leaf, "tp") / 4, g), 4)(grads)
    assert_same_bits(update(grads, init(grads))[0], mean)


def test_leaves_of_another_dtype_are_summed_apart_and_keep_it():
    grads = gradients(0, 2)
    grads["e"], grads["d"] = (grads[name].astype(jnp.bfloat16) for name in ("e", "d"))
    init, update = compiled(CONFIG, 2)
    state = init(grads)
    updates, after = update(grads, state)
    assert jax.tree.map(lambda u: u.dtype, updates) == jax.tree.map(lambda g: g.dtype, grads)
    assert len(state.residuals) == 2 and jax.tree.structure(after) == jax.tree.structure(state)


def test_a_gradient_that_jax_has_summed_is_refused():
    transformation = echo_jax.compensated_psum("tp", CONFIG, small_elements=SMALL)

    def step(grads):
        state = transformation.init(grads)
        return transformation.update({**grads, "b": lax.psum(grads["b"], "tp")}, state)[0]

    with pytest.raises(ValueError, match=r"updates\['b'\] must vary over 'tp', found a gradient .* JAX has summed it"):
        on_ranks(step, 2)(gradients(0, 2))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda g: {**g, "a": g["a"][:, :1]}, ValueError, "updates must be like the params .* had 1 coded sums"),
        (
            lambda g: {**g, "a": g["a"].reshape(2, 64, 16)},
            ValueError,
            "gradients_0: x must have the shape of the state",
        ),
        (lambda g: {**g, "b": g["b"].astype(np.int32)}, TypeError, r"updates\['b'\] must be an array of dtype float16"),
    ],
)
def test_gradients_unlike_the_parameters_are_refused(change, error, message):
    transformation = echo_jax.compensated_psum("tp", CONFIG, small_elements=1000)
    params = {name: leaf for name, leaf in gradients(0, 2).items() if name != "e"}
    step = on_ranks(lambda p, g: transformation.update(g, transformation.init(p))[0], 2)
    with pytest.raises(error, match=message):
        step(params, change(params))


def test_wrong_arguments_are_refused_where_they_are_given():
    with pytest.raises(TypeError, match="config must be an EchoConfig, found dict"):
        echo_jax.compensated_psum("tp", {})
    with pytest.raises(ValueError, match="bucket_elements must be at least 1, found 0"):
        echo_jax.compensated_psum("tp", CONFIG, bucket_elements=0)
    with pytest.raises(ValueError, match="small_elements must be at least 1, found -1"):
        echo_jax.compensated_psum("tp", CONFIG, small_elements=-1)
    with pytest.raises(ValueError, match="max_norm must be above 0, found 0"):
        echo_jax.clip_by_global_norm(0.0)
    with pytest.raises(ValueError, match="axis_name must name axes of the surrounding program, found 'dp'"):
        on_ranks(echo_jax.compensated_psum("dp", CONFIG).init, 2)(gradients(0, 2))


# --- a whole step on a data x model mesh -----------------------------------------------------------------------------

D, F, BATCH = 32, 48, 8
PARAM_SPECS = {"up": P(None, "model"), "down": P("model", None), "scale": P()}


def initial_params():
    rng = np.random.default_rng(0)
    up, down = (rng.normal(size=shape).astype(np.float32) / 6 for shape in ((D, F), (F, D)))
    return {"up": up, "down": down, "scale": np.ones(D, np.float32)}


def batch(step):
    x = np.random.default_rng(100 + step).normal(size=(BATCH, D)).astype(np.float32)
    return x, np.roll(x, 1, axis=1)


def loss_fn(params, x, y, model_axis=True):
    h = jnp.tanh((x * params["scale"]) @ params["up"]) @ params["down"]
    h = lax.psum(h, "model") if model_axis else h
    return ((h - y) ** 2).sum(-1).mean()


class Program:
    """init() -> (params, state); step(params, state, batch, loss scale, poison) -> (params, state)."""

    def __init__(self, optimizer, data, model):
        mesh = mesh_of(data=data, model=model)
        self.specs = echo_jax.partition_specs(optimizer, initial_params(), PARAM_SPECS, mesh)

        def step(params, state, x, y, scale, poison):
            varying = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
            grads = jax.grad(lambda p: scale * loss_fn(p, x, y))(varying)
            bad = jnp.where(lax.axis_index("data") == poison, jnp.nan, 0.0)
            grads = {**grads, "up": grads["up"] / scale + bad, **{k: grads[k] / scale for k in ("down", "scale")}}
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        specs = (PARAM_SPECS, self.specs)
        init = jax.shard_map(optimizer.init, mesh=mesh, in_specs=(PARAM_SPECS,), out_specs=self.specs)
        self._init, self._mesh = jax.jit(init), mesh
        self.step = jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("data"), P("data"), P(), P()), out_specs=specs)
        )

    def init(self):
        shardings = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), PARAM_SPECS)
        params = jax.device_put(initial_params(), shardings)
        return params, self._init(params)

    def run(self, steps, params, state, scale=lambda step: 1.0, poison=lambda step: -1):
        for step in steps:
            params, state = self.step(params, state, *batch(step), np.float32(scale(step)), poison(step))
        return params, state


def chain(config, max_norm=0.5):
    data_sum = echo_jax.compensated_psum("data", config, small_elements=SMALL)
    return echo_jax.skip_nonfinite(optax.chain(data_sum, echo_jax.clip_by_global_norm(max_norm), optax.adam(1e-2)))


@functools.cache
def program(config, data, model):
    return Program(chain(config), data, model)


def test_exact_sums_give_one_devices_steps_clipped_by_one_norm():
    found = program(EXACT, 4, 2)
    params, state = found.run(range(5), *found.init())
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    wanted = initial_params()
    wanted_state, norm = optimizer.init(wanted), 0.0
    for step in range(5):
        grads = jax.grad(loss_fn)(wanted, *batch(step), model_axis=False)
        norm = optax.tree.norm(grads)
        updates, wanted_state = optimizer.update(grads, wanted_state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), params, wanted)
    assert norm > 0.5, "nothing to clip tests nothing"
    np.testing.assert_allclose(state.inner[1].norm, norm, rtol=1e-5)


def test_the_state_lies_where_its_parts_vary():
    specs = program(CONFIG, 4, 2).specs
    (large,) = specs.inner[0].residuals  # up and down, both split over model, are one bucket; the scale is small
    assert specs.skipped == P() and specs.inner[2][0].mu == PARAM_SPECS and specs.inner[2][0].count == P()
    assert large.residual == P(("data", "model"))


def test_what_is_owed_is_in_the_optimizers_checkpoint_and_a_run_goes_on_as_if_never_stopped(tmp_path):
    run = program(CONFIG, 4, 2)
    params, state = run.run(range(3), *run.init())
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave({"params": params, "optimizer": state}))
        manager.wait_until_finished()
        like = jax.tree.map(
            ocp.utils.to_shape_dtype_struct, dict(zip(("params", "optimizer"), run.init(), strict=True))
        )
        restored = manager.restore(3, args=ocp.args.StandardRestore(like))
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(restored["optimizer"].inner[0].residuals))
    wanted = run.run(range(3, 6), params, state)
    assert_same_bits(run.run(range(3, 6), restored["params"], restored["optimizer"]), wanted)


@pytest.mark.parametrize("config", [CONFIG, EXACT], ids=["echo", "exact"])
def test_a_nan_in_one_ranks_gradient_skips_the_step_on_all_and_leaves_no_trace(config):
    run = program(config, 4, 2)
    params, state = run.run(range(2), *run.init())
    skipped = run.run([2], params, state, poison=lambda step: 3)
    assert int(skipped[1].skipped) == 1
    assert_same_bits((skipped[0], skipped[1].inner), (params, state.inner))
    assert_same_bits(run.run([3], *skipped)[0], run.run([3], params, state)[0])


def test_a_loss_scale_that_changes_every_step_changes_no_bit():
    run = program(CONFIG, 4, 2)
    wanted = run.run(range(6), *run.init())
    scales = 2.0 ** np.random.default_rng(0).integers(-4, 5, 6)
    assert_same_bits(run.run(range(6), *run.init(), scale=lambda step: scales[step]), wanted)


def test_types_that_do_not_say_what_is_split_are_refused():
    for transformation in (echo_jax.clip_by_global_norm(1.0), echo_jax.skip_nonfinite(optax.identity())):
        step = lambda g, t=transformation: t.update(g, t.init(g))[0]  # noqa: E731
        with pytest.raises(ValueError, match="needs shard_map with check_vma=True"):
            on_ranks(step, 2, "no_check_vma")(gradients(0, 2))


def test_without_a_mesh_they_are_what_optax_has():
    grads = {name: leaf[0] for name, leaf in gradients(0, 1).items()}
    ours, theirs = echo_jax.clip_by_global_norm(0.1), optax.clip_by_global_norm(0.1)
    found, wanted = (t.update(grads, t.init(grads))[0] for t in (ours, theirs))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, wanted)
    assert not any(is_state(leaf) for leaf in jax.tree.leaves(ours.init(grads), is_leaf=is_state))
