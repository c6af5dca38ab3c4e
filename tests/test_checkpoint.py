"""What is owed survives a stop: saved and restored with orbax, and refused where it would be misread."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import echo_jax
from echo_jax import EchoConfig, EchoState, Streams, checkpoint, init_state, init_streams, residuals

X = jax.ShapeDtypeStruct((8, 256), jnp.float32)  # batch sharded over 'data': (4, 256) on each rank
SPEC = P("data")
CONFIG = EchoConfig(group_size=64, min_elements=0)


def make_mesh(data: int = 2, model: int = 4, names: tuple[str, str] = ("data", "model")) -> jax.sharding.Mesh:
    sizes = {"data": data, "model": model}
    shape = tuple(sizes[name] for name in names)
    return jax.make_mesh(shape, names, devices=jax.devices()[: data * model])


def zero_state(config=CONFIG, x=X, mesh=None):
    return init_state(x, "model", config, mesh=mesh or make_mesh(), spec=SPEC)


def random_bits(state, seed=0):
    """The state with arbitrary bits for residuals: NaNs with payloads, infinities, negative zeros, subnormals."""
    rng = np.random.default_rng(seed)

    def fill(residual):
        dtype = np.dtype(residual.dtype)
        bits = rng.integers(0, 2 ** (8 * dtype.itemsize), residual.shape, np.uint64)
        return jax.device_put(bits.astype(f"uint{8 * dtype.itemsize}").view(dtype), residual.sharding)

    return jax.tree.map(fill, state)


def debts(config):
    """A state that owes whole multiples of 1/8 up to 4."""
    like = zero_state(config)
    errors = np.random.default_rng(5).integers(-32, 33, like.residual.shape) / 8
    shardings = jax.tree.map(lambda array: array.sharding, like)
    return jax.jit(lambda state, errors: state.with_errors(errors), out_shardings=shardings)(like, jnp.float32(errors))


def abstract(state):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)


def save(directory, state, config=CONFIG, step=0, **items):
    with ocp.CheckpointManager(directory) as manager:
        manager.save(step, args=ocp.args.Composite(**items, **checkpoint.save_args(state, config)))
    return directory


def restore(directory, like, step=0):
    with ocp.CheckpointManager(directory) as manager:
        return checkpoint.restore(manager, step, like)


def assert_same_bits(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(*(np.asarray(v).view(f"uint{8 * v.dtype.itemsize}") for v in (a, b)))


# --- going on --------------------------------------------------------------------------------------------------------


def make_train_step(mesh, config, backward_config):
    """A jitted, donated step of a two-layer network, batch over 'data' and hidden units over 'model'."""

    def loss_fn(params, streams, x):
        h, forward, backward = x, streams.forward, streams.backward
        for w_in, w_out in params:
            z, backward = echo_jax.echo_psum_grad(h, "model", backward, backward_config)
            y, forward = echo_jax.echo_psum(jnp.tanh(z @ w_in) @ w_out, "model", forward, config)
            h = h + y
        return jax.lax.pmean((h**2).mean(), "data"), Streams(forward, backward)

    param_specs, stream_specs = P(None, "model"), P(("data", "model"))
    specs = ([(param_specs, P("model"))] * 2, stream_specs)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(*specs, P("data")), out_specs=(*specs, P()))
    def train_step(params, streams, x):
        loss, grads, streams = echo_jax.value_and_grad(loss_fn)(params, streams, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), streams, loss

    rng = np.random.default_rng(0)
    place = lambda a, spec: jax.device_put(jnp.asarray(a, jnp.float32), NamedSharding(mesh, spec))  # noqa: E731
    params = [
        (place(rng.normal(size=(256, 64)) / 16, param_specs), place(rng.normal(size=(64, 256)) / 8, P("model")))
        for _ in range(2)
    ]
    batches = [place(rng.normal(size=X.shape), P("data")) for _ in range(5)]
    return train_step, params, batches


def test_a_training_run_restored_from_an_asynchronous_save_goes_on_as_if_it_had_never_stopped(tmp_path):
    mesh = make_mesh()
    backward_config = dataclasses.replace(CONFIG, residual="float32", codec="int4")
    configs = Streams(CONFIG, backward_config)
    train_step, params, batches = make_train_step(mesh, CONFIG, backward_config)
    fresh = lambda: init_streams(X, "model", CONFIG, backward_config, mesh=mesh, spec=SPEC)  # noqa: E731
    like_params = abstract(params)
    streams, losses = fresh(), []

    with ocp.CheckpointManager(
        tmp_path, options=ocp.CheckpointManagerOptions(enable_async_checkpointing=True)
    ) as manager:
        for step, x in enumerate(batches):
            params, streams, loss = train_step(params, streams, x)
            losses.append(loss)
            if step == 2:
                items = checkpoint.save_args(streams, configs)
                states = items["echo_metadata"].item["states"]
                assert all(s["array"]["sharded_over"] == [["data", 2], ["model", 4]] for s in states.values())
                # Both trees are donated to the next step while the save is still writing.
                manager.save(step, args=ocp.args.Composite(params=ocp.args.StandardSave(params), **items))

    with ocp.CheckpointManager(tmp_path) as manager:
        step = manager.latest_step()
        restored = manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(like_params)))
        again, streams_again = restored["params"], checkpoint.restore(manager, step, fresh())
    assert all(jnp.abs(residual).max() > 0 for residual in jax.tree.leaves(streams_again))
    for x, loss in zip(batches[step + 1 :], losses[step + 1 :], strict=True):
        again, streams_again, loss_again = train_step(again, streams_again, x)
        assert loss_again == loss
    assert_same_bits((again, streams_again), (params, streams))


def test_a_checkpoint_goes_on_from_compensated_to_exact_and_back(tmp_path, monkeypatch):
    mesh, float32_config = make_mesh(), dataclasses.replace(CONFIG, residual="float32")
    parts = np.random.default_rng(0).normal(size=(3, 4, *X.shape)).astype(np.float32)  # call, rank of 'model', x

    def call(x, state):
        # A new function each time: the override is read while tracing.
        summed = lambda x, state: echo_jax.echo_psum(x[0], "model", state, float32_config)  # noqa: E731
        x_spec, state_spec = P("model", "data"), P(("data", "model"))
        specs = {"in_specs": (x_spec, state_spec), "out_specs": (P("data"), state_spec)}
        return jax.jit(jax.shard_map(summed, mesh=mesh, **specs))(jax.device_put(x, NamedSharding(mesh, x_spec)), state)

    state, total = zero_state(float32_config, mesh=mesh), 0.0
    for step, override in enumerate((None, "exact", None)):
        monkeypatch.setattr("echo_jax.config.ALGORITHM_OVERRIDE", override)
        y, state = call(parts[step], state)
        total = total + y
        save(tmp_path, state, float32_config, step)
        state = restore(tmp_path, zero_state(float32_config, mesh=mesh), step)
        if override == "exact":
            assert not state.residual.any()
            np.testing.assert_allclose(total, parts[: step + 1].sum((0, 1)), atol=1e-5)
    assert state.residual.any()


@pytest.mark.quick
@pytest.mark.parametrize("residual", residuals.FORMATS)
def test_restored_residuals_have_the_bits_that_were_saved_and_the_shardings_of_like(tmp_path, residual):
    like = zero_state(dataclasses.replace(CONFIG, residual=residual))
    state = random_bits(like)
    save(tmp_path, state, dataclasses.replace(CONFIG, residual=residual))
    for target in (like, abstract(like)):
        restored = restore(tmp_path, target)
        assert_same_bits(restored, state)
        assert restored.residual.sharding == like.residual.sharding


@pytest.mark.parametrize("saved_as", residuals.FORMATS)
@pytest.mark.parametrize("wanted", residuals.FORMATS)
def test_a_state_kept_in_another_format_is_converted_and_rounded_once(tmp_path, saved_as, wanted):
    state = debts(dataclasses.replace(CONFIG, residual=saved_as))
    save(tmp_path, state, dataclasses.replace(CONFIG, residual=saved_as))
    like = zero_state(dataclasses.replace(CONFIG, residual=wanted))
    found = restore(tmp_path, like)
    assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), found) == jax.tree.map(
        lambda a: (a.shape, a.dtype, a.sharding), like
    )
    errors, before = np.asarray(found.errors()), np.asarray(state.errors())
    np.testing.assert_allclose(errors, before, rtol=0, atol=residuals.rounding(wanted) * np.abs(before).max())
    assert np.abs(before).max() > 0.1


def test_a_checkpoint_of_the_release_before_is_read(tmp_path):
    """tests/golden/checkpoint-1: written before residuals had a format of 8 bits; kept in bfloat16."""
    wanted = debts(dataclasses.replace(CONFIG, residual="bfloat16"))
    shutil.copytree(Path(__file__).parent / "golden/checkpoint-1", tmp_path / "old")
    found = restore(tmp_path / "old", zero_state(dataclasses.replace(CONFIG, residual="bfloat16")))
    assert_same_bits(found, wanted)
    converted = restore(tmp_path / "old", zero_state(dataclasses.replace(CONFIG, residual="int8")))
    np.testing.assert_allclose(converted.errors(), wanted.errors(), rtol=0, atol=4.1 / 251)


def test_a_pytree_of_states_comes_back_in_its_structure_each_with_its_own_config(tmp_path):
    int8 = dataclasses.replace(CONFIG, codec="int8", residual="float32")
    like = Streams({"blocks": [zero_state(), (zero_state(int8), None)], "a/b.c": zero_state()}, zero_state(int8))
    configs = Streams({"blocks": [CONFIG, int8], "a/b.c": CONFIG}, int8)
    state = random_bits(like)
    save(tmp_path, state, configs)
    assert_same_bits(restore(tmp_path, like), state)


def test_a_state_made_under_vmap_is_saved_and_restored(tmp_path):
    like = jax.vmap(lambda x: init_state(x, "r", CONFIG), axis_name="r")(jnp.zeros((4, 3, 50)))
    state = random_bits(like)
    save(tmp_path, state)
    assert_same_bits(restore(tmp_path, like), state)


@pytest.mark.parametrize("none", [None, Streams(None, None), {"a": None, "b": ()}])
def test_where_nothing_is_fed_back_only_metadata_is_saved(tmp_path, none):
    save(tmp_path, none, dataclasses.replace(CONFIG, feedback=False))
    with ocp.CheckpointManager(tmp_path) as manager:
        assert set(manager.metadata(0).item_handlers) == {"echo_metadata"}
        assert checkpoint.restore(manager, 0, none) == none


def test_a_stream_fed_back_in_one_direction_only_is_restored(tmp_path):
    like = Streams(zero_state(), None)
    state = random_bits(like)
    save(tmp_path, state, Streams(CONFIG, dataclasses.replace(CONFIG, feedback=False)))
    assert_same_bits(restore(tmp_path, like), state)


def test_a_manager_with_item_names_restores_too(tmp_path):
    state = random_bits(zero_state())
    with ocp.CheckpointManager(tmp_path, item_names=("params", "echo", "echo_metadata")) as manager:
        params = ocp.args.StandardSave({"w": jnp.ones(3)})
        manager.save(0, args=ocp.args.Composite(params=params, **checkpoint.save_args(state, CONFIG)))
        manager.wait_until_finished()
        assert_same_bits(checkpoint.restore(manager, 0, zero_state()), state)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a state for X under CONFIG on data=2, model=4, beside params."""
    directory = tmp_path_factory.mktemp("saved")
    return save(directory, random_bits(zero_state()), params=ocp.args.StandardSave({"w": jnp.ones(3)}))


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "one_shot"},
        {"algorithm": "exact"},
        {"algorithm": "auto", "min_elements": 1 << 20},
    ],
    ids=str,
)
def test_another_algorithm_or_gate_is_not_refused(saved, changes):
    assert_same_bits(restore(saved, zero_state(dataclasses.replace(CONFIG, **changes))), random_bits(zero_state()))


def test_another_code_with_the_same_layout_is_not_refused(tmp_path):
    int4 = dataclasses.replace(CONFIG, codec="int4")
    state = random_bits(zero_state(int4))
    save(tmp_path, state, int4)
    for codec in ("int8", "none"):
        assert_same_bits(restore(tmp_path, zero_state(dataclasses.replace(CONFIG, codec=codec))), state)


def resized(*shape):
    return lambda: zero_state(x=jax.ShapeDtypeStruct(shape, jnp.float32))


REFUSED = {
    "rotation": (lambda: zero_state(dataclasses.replace(CONFIG, codec="int4")), "rotation 'hadamard' .* 'none' here"),
    "group size": (lambda: zero_state(dataclasses.replace(CONFIG, group_size=32)), "group_size 64 .* 32 here"),
    "scheme": (resized(8, 64), "(?s)shape .4, 256. .* .4, 64. here.*scheme 'columns' .* 'rows' here"),
    "equal sizes": (resized(16, 128), "layout shape .4, 256. in the checkpoint, .8, 128. here"),
    "ranks": (lambda: zero_state(mesh=make_mesh(4, 2)), "(?s)ranks 4 in .*, 2 here.*cannot be moved to another number"),
    "global shape": (
        lambda: zero_state(x=jax.ShapeDtypeStruct((4, 256), jnp.float32), mesh=make_mesh(1, 4)),
        "array shape .8, 4, 4, 64. in the checkpoint, .4, 4, 4, 64. here",
    ),
    "order of mesh axes": (
        lambda: zero_state(mesh=make_mesh(2, 4, ("model", "data"))),
        r"sharded_over \[\['data', 2\], \['model', 4\]\] in the checkpoint, \[\['model', 4\], \['data', 2\]\] here",
    ),
    "dtype": (
        lambda: jax.tree.map(lambda a: a.astype(jnp.float16), zero_state()),
        "array dtype 'float8_e4m3fn' in the checkpoint, 'float16' here",
    ),
    "extra states": (
        lambda: None,
        "state: in the checkpoint, but None or absent here",
    ),
    "other structure": (
        lambda: Streams(zero_state(), None),
        "(?s)state: in the checkpoint, .*state.forward: wanted here, but None or absent in the checkpoint",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_restore_that_would_be_misread_is_refused_naming_what_differs(saved, what):
    like, message = REFUSED[what]
    with pytest.raises(ValueError, match="step 0 does not fit") as error:
        restore(saved, like())
    error.match(message)


def test_a_state_is_not_made_up_where_the_checkpoint_has_none(tmp_path):
    save(tmp_path, Streams(zero_state(), None), CONFIG)
    with pytest.raises(ValueError, match=r"state\.backward: wanted here, but None or absent in the checkpoint"):
        restore(tmp_path, Streams(zero_state(), zero_state()))


@pytest.mark.parametrize("key", ["format_version", "wire_version"])
def test_a_checkpoint_of_a_newer_release_is_refused(tmp_path, key):
    items = checkpoint.save_args(None, CONFIG)
    newer = {**items["echo_metadata"].item, key: 2, "library_version": "9.8.7"}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(echo_metadata=ocp.args.JsonSave(newer)))
    with pytest.raises(ValueError, match=rf"{key} 2 \(from echo_jax 9\.8\.7\); .* reads versions up to 1"):
        restore(tmp_path, None)


def test_metadata_of_something_else_is_refused(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(echo_metadata=ocp.args.JsonSave({"a": 1})))
    with pytest.raises(ValueError, match="must have 'format_version', an int; found None"):
        restore(tmp_path, None)


@pytest.mark.parametrize("kind", ["named items", "one item", "metadata only"])
def test_a_checkpoint_without_the_echo_items_is_refused_naming_what_is_there(tmp_path, kind):
    params = ocp.args.StandardSave({"w": jnp.ones(3)})
    missing, there = "echo_metadata", "params"
    if kind == "named items":
        args = ocp.args.Composite(params=params)
    elif kind == "one item":
        args, there = params, "default"
    else:
        args = ocp.args.Composite(echo_metadata=checkpoint.save_args(zero_state(), CONFIG)["echo_metadata"])
        missing, there = "echo", "echo_metadata"
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=args)
    with pytest.raises(ValueError, match=rf"item '{missing}' is missing, there are \['{there}'\]"):
        restore(tmp_path, zero_state())


def test_a_missing_residual_is_an_error_that_says_where(tmp_path):
    """Its metadata is there, as if the array's file had been lost."""
    streams = Streams(zero_state(), zero_state())
    items = checkpoint.save_args(streams, CONFIG)
    arrays = items["echo"].item
    items["echo"] = ocp.args.StandardSave({"state.forward": arrays["state.forward"]})
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(**items))
    with pytest.raises(ValueError, match="item 'echo' of the checkpoint of step 0 in .* cannot be read"):
        restore(tmp_path, streams)


@pytest.mark.parametrize("item", ["echo", "echo_metadata"])
def test_a_truncated_item_is_an_error_that_says_which(tmp_path, saved, item):
    folder = shutil.copytree(saved, tmp_path / "copy")
    for path in (folder / "0" / item).rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"item '{item}' of the checkpoint of step 0 in .* cannot be read"):
        restore(folder, zero_state())


def test_a_step_that_is_not_there_is_a_file_not_found(saved):
    with pytest.raises(FileNotFoundError):
        restore(saved, zero_state(), step=7)


# --- metadata --------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_metadata_is_json_and_says_what_a_reader_must_know(monkeypatch):
    state = Streams(zero_state(), {"h": zero_state(dataclasses.replace(CONFIG, residual="float32"))})
    auto = dataclasses.replace(CONFIG, residual="float32", min_elements=1 << 20)
    found = checkpoint.metadata(state, Streams(CONFIG, auto))
    assert json.loads(json.dumps(found)) == found
    assert (found["format_version"], found["wire_version"]) == (1, 1)
    assert found["library_version"] == echo_jax.__version__
    assert {path: EchoConfig(**fields) for path, fields in found["configs"].items()} == {
        "state.forward": CONFIG,
        "state.backward": auto,
    }
    assert {path: entry["algorithm"] for path, entry in found["states"].items()} == {
        "state.forward": "two_shot",
        "state.backward['h']": "exact",
    }
    assert found["states"]["state.forward"]["layout"] == {
        "axis_name": ["model"],
        "ranks": 4,
        "shape": [4, 256],
        "group_size": 64,
        "scheme": "columns",
        "rotation": "hadamard",
        "residual": "int8",
    }
    assert found["states"]["state.forward"]["array"] == {
        "shape": [8, 4, 4, 64],
        "dtype": "float8_e4m3fn",
        "sharded_over": [["data", 2], ["model", 4]],
    }
    monkeypatch.setattr("echo_jax.config.ALGORITHM_OVERRIDE", "exact")
    assert checkpoint.metadata(state.forward, CONFIG)["states"]["state"]["algorithm"] == "exact"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("state", "config", "error", "message"),
    [
        (lambda: {"w": jnp.ones(3)}, CONFIG, TypeError, r"state\['w'\] must be an EchoState or None, found .*Array"),
        (zero_state, "int4", TypeError, "config must be an EchoConfig, found str"),
        (zero_state, Streams(CONFIG, CONFIG), ValueError, "config must be an EchoConfig or a pytree prefix of state"),
        (zero_state, EchoConfig(codec="int4"), ValueError, r"config must be the one that state is used with, found"),
        (
            lambda: Streams(zero_state(), None),
            dataclasses.replace(CONFIG, feedback=False),
            ValueError,
            r"config must be the one that state\.forward is used with, found .*feedback=False",
        ),
    ],
)
def test_a_state_that_is_none_or_a_config_that_is_not_its_own_is_not_saved(state, config, error, message):
    with pytest.raises(error, match=message):
        checkpoint.save_args(state(), config)


@pytest.mark.parametrize("names", [("data", "model"), ("model", "data")])
def test_axes_of_size_one_do_not_matter(tmp_path, names):
    wide = zero_state(x=jax.ShapeDtypeStruct((4, 256), jnp.float32), mesh=make_mesh(1, 4, names))
    narrow = init_state(
        jax.ShapeDtypeStruct((4, 256), jnp.float32),
        "model",
        CONFIG,
        mesh=jax.make_mesh((4,), ("model",), devices=jax.devices()[:4]),
        spec=P(),
    )
    state = random_bits(wide)
    save(tmp_path, state)
    restored = restore(tmp_path, narrow)
    assert isinstance(restored, EchoState)
    assert_same_bits(restored, state)
