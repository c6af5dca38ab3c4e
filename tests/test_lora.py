"""Low-rank updates: one device's gradients at any number of ranks, a base that stays, and the same model merged."""

import dataclasses
import functools
import math
from pathlib import Path

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROUNDING, mesh_of
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import echo_jax
import train
from echo_jax import EchoConfig, wire
from echo_jax.nn import EXACT
from models import lora, transformer, weights
from models.transformer import Communication, TransformerConfig
from models.weights import Model

QWEN3 = TransformerConfig(
    vocab_size=64, d_model=64, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=16, d_ff=96, lora_rank=4,
    dtype=jnp.float32, comm=Communication("model", EXACT, EXACT),
)  # fmt: skip
LLAMA = dataclasses.replace(QWEN3, qk_norm=False, tie_embeddings=False, rope_theta=1e4, num_kv_heads=4)
FAMILIES = pytest.mark.parametrize("family", [QWEN3, LLAMA], ids=["qwen3", "llama"])
pytestmark = pytest.mark.usefixtures("compiled_fast")
ECHO = EchoConfig(group_size=32, algorithm="two_shot")
WINDOWS = np.random.default_rng(0).integers(0, QWEN3.vocab_size, (4, 17)).astype(np.int32)


def with_sums(config, sums):
    return dataclasses.replace(config, comm=Communication("model", sums, sums))


def without_updates(config):
    return dataclasses.replace(config, lora_rank=0)


@functools.cache
def parameters(config):
    """Random ones, and no lora_b of zero, which would make the gradient of lora_a zero."""
    rng = np.random.default_rng(1)

    def draw(path, like):
        mean = 1 if path[-1].key == "scale" else 0
        return rng.normal(mean, 0.05, like.shape).astype(like.dtype)

    return jax.tree_util.tree_map_with_path(draw, transformer.abstract_params(config, 1))


def placed(params, config, mesh):
    specs = transformer.param_specs(config, mesh.shape["model"])
    return jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), params, specs)


def gradients(config, data, model):
    """(loss, gradients of the adapters) on a mesh."""
    mesh = mesh_of(data=data, model=model)
    adapter_specs, base_specs = lora.split(transformer.param_specs(config, model))

    def step(adapters, base, streams, windows):
        adapters = jax.tree.map(lambda a: lax.pcast(a, "data", to="varying"), adapters)
        loss_fn = lambda a, streams: transformer.mean_loss(config, lora.join(a, base), streams, windows)  # noqa: E731
        (loss, _), grads, _ = echo_jax.value_and_grad(loss_fn, has_aux=True)(adapters, streams)
        return lax.pmean((loss, grads), "data")

    in_specs = (adapter_specs, base_specs, P(("data", "model")), P("data"))
    on_mesh = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(P(), adapter_specs))
    streams = transformer.init_streams(config, len(WINDOWS), WINDOWS.shape[1] - 1, mesh, P("data"))
    params = placed(parameters(dataclasses.replace(config, comm=QWEN3.comm)), config, mesh)
    return jax.tree.map(np.asarray, jax.jit(on_mesh)(*lora.split(params), streams, WINDOWS))


one_device = functools.cache(lambda config: gradients(config, 1, 1))


def assert_gradients_of_one_device(config, data, model):
    loss, grads = gradients(config, data, model)
    wanted_loss, wanted_grads = one_device(dataclasses.replace(config, comm=QWEN3.comm))
    error = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b)  # noqa: E731
    # float32 sums in another order.
    assert abs(loss / wanted_loss - 1) < 1e-6
    assert max(jax.tree.leaves(jax.tree.map(error, grads, wanted_grads))) < 1e-5


def logits(config, params, model):
    mesh = mesh_of(data=1, model=model)
    streams = transformer.init_streams(config, len(WINDOWS), WINDOWS.shape[1], mesh, P("data"))
    return np.asarray(compiled_apply(config, model)(placed(params, config, mesh), WINDOWS, streams))


@functools.cache
def compiled_apply(config, model):
    mesh, specs = mesh_of(data=1, model=model), transformer.param_specs(config, model)
    one_rank = lambda *args: transformer.apply(config, *args)[0]  # noqa: E731
    in_specs, out_specs = (specs, P("data"), P(("data", "model"))), P("data", None, "model")
    return jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


# --- gradients -------------------------------------------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize(("data", "model"), [(1, 2), (2, 4), (1, 8)])
def test_exact_sums_give_one_devices_gradients_of_the_adapters(family, data, model):
    """Qwen3's key/value heads are fewer than 4 ranks, and Llama's fewer than 8."""
    assert_gradients_of_one_device(family, data, model)


@pytest.mark.quick
def test_the_codec_none_gives_one_devices_gradients_of_the_adapters_through_both_streams():
    assert_gradients_of_one_device(with_sums(QWEN3, dataclasses.replace(ECHO, codec="none")), 2, 4)


@pytest.mark.quick
def test_the_base_has_no_gradient_and_no_optimizer_state():
    mesh, config = mesh_of(data=2, model=4), with_sums(QWEN3, ECHO)
    program = train.Program(config, train.make_optimizer(train.PRESETS["tiny"], train.Args()), mesh, 4, 16, carry=False)
    params, base = jax.eval_shape(lambda: lora.split(transformer.init_params(config, jax.random.key(0), mesh)))
    state, streams = jax.eval_shape(program.init, params)
    windows = jax.ShapeDtypeStruct((4, 17), jnp.int32)
    new_state, *_ = jax.eval_shape(program.train_step, state, streams, base, windows)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)

    adapters = len(jax.tree.leaves(params))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    of_layers = [path for path, leaf in leaves if leaf.ndim]
    assert len(of_layers) == 3 * adapters  # with Adam's two moments
    assert all(path[-1].key in ("lora_a", "lora_b") for path in of_layers)
    # What is summed over data ranks: one rank's part of each adapter's gradient, and a few numbers.
    summed = wire.over_axis(wire.collectives(program.train_step, state, streams, base, windows), "data")
    shards = jax.tree.map(
        lambda p, spec: NamedSharding(mesh, spec).shard_shape(p.shape), params, program.state_specs["params"]
    )
    values = sum(math.prod(shape) for shape in jax.tree.leaves(shards, is_leaf=lambda node: isinstance(node, tuple)))
    assert values <= sum(c.times * math.prod(c.shape) for c in summed) < values + 10

    # Nor is what the backward stream owes settled for the embedding: it is compiled away, and not counted.
    sent, _, _ = train.count_collectives(program, train.Args(), state, streams, base)
    compiled = hlo.collectives(program.train_step.lower(state, streams, base, windows).compile())
    for found in (sent, compiled):
        assert any("flush" in c.name for c in found) and not any("flush_grad" in c.name for c in found)


# --- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@FAMILIES
def test_splitting_and_joining_gives_the_same_parameters(family):
    params = transformer.abstract_params(family, 4)
    adapters, base = lora.split(params)
    assert len(jax.tree.leaves(adapters)) == 2 * 7
    assert jax.tree.structure(base) == jax.tree.structure(transformer.abstract_params(without_updates(family), 4))
    assert lora.join(adapters, base) == params
    assert lora.split(base) == ({}, base) and lora.join({}, base) == base


def test_fresh_adapters_are_those_of_the_layers_for_every_number_of_ranks():
    key = jax.random.key(1)
    of_one, _ = lora.split(transformer.init_params(QWEN3, key, mesh_of(data=1, model=1)))
    of_eight = lora.init(QWEN3, key, mesh_of(data=1, model=8))
    jax.tree.map(np.testing.assert_array_equal, of_one, of_eight)
    up_proj = of_one["blocks"]["mlp"]["up_proj"]
    assert np.any(up_proj["lora_a"]) and not np.any(up_proj["lora_b"])
    specs, _ = lora.split(transformer.param_specs(QWEN3, 8))
    for leaf, spec in zip(jax.tree.leaves(of_eight), jax.tree.leaves(specs), strict=True):
        assert leaf.dtype == jnp.float32 and leaf.sharding.spec == spec
    with pytest.raises(ValueError, match="lora_rank above 0, found 0"):
        lora.init(without_updates(QWEN3), key, mesh_of(data=1, model=1))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_lora_b_of_zero_leaves_every_logit_as_it_is(dtype):
    config = with_sums(dataclasses.replace(QWEN3, dtype=dtype), ECHO)
    adapters, base = lora.split(parameters(QWEN3))
    zeroed = jax.tree_util.tree_map_with_path(lambda path, a: a if path[-1].key == "lora_a" else 0 * a, adapters)
    wanted = logits(without_updates(config), base, 4)
    np.testing.assert_array_equal(logits(config, lora.join(zeroed, base), 4), wanted)


@FAMILIES
def test_merged_updates_give_the_same_logits_and_can_be_saved_and_loaded(family, tmp_path: Path):
    mesh = mesh_of(data=2, model=4)
    model = Model(family, placed(parameters(family), family, mesh), {})
    with pytest.raises(ValueError, match="models.lora.merge"):
        weights.save(tmp_path / "model", model)
    merged = lora.merge(model)
    assert merged.config == without_updates(family)
    assert lora.merge(merged) == merged  # nothing is left to merge
    wanted = logits(family, parameters(family), 4)
    np.testing.assert_allclose(logits(merged.config, merged.params, 4), wanted, atol=1e-5)
    assert np.abs(logits(merged.config, lora.split(parameters(family))[1], 4) - wanted).max() > 0.1

    weights.save(tmp_path / "model", merged)
    loaded = weights.load(tmp_path / "model", mesh, comm=family.comm, dtype=jnp.float32)
    assert loaded.config == merged.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, merged.params)


@pytest.mark.quick
def test_merging_adds_in_float32_and_keeps_each_kernels_dtype_and_sharding():
    mesh = mesh_of(data=2, model=4)
    adapters, base = lora.split(parameters(QWEN3))
    base = jax.tree.map(lambda a: a.astype(jnp.bfloat16), base)
    given = Model(QWEN3, placed(lora.join(adapters, base), QWEN3, mesh), {})
    merged = lora.merge(given).params
    for found, before in zip(jax.tree.leaves(merged), jax.tree.leaves(lora.split(given.params)[1]), strict=True):
        assert found.dtype == jnp.bfloat16 and found.sharding.is_equivalent_to(before.sharding, found.ndim)
    for part, projection in (("attention", "k_proj"), ("mlp", "down_proj")):
        kernel, a, b = (
            np.asarray(given.params["blocks"][part][projection][name], np.float32)
            for name in ("kernel", "lora_a", "lora_b")
        )
        wanted = kernel + QWEN3.lora_alpha / QWEN3.lora_rank * (a @ b)
        found = np.asarray(merged["blocks"][part][projection]["kernel"], np.float32)
        assert np.all(np.abs(found - wanted) <= ROUNDING["bfloat16"] * np.abs(wanted) + 1e-6)
