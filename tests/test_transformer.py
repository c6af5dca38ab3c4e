"""The transformer: exact sums give one device's model at any number of ranks; only what is promised is sent."""

import dataclasses
import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

import echo_jax
from echo_jax import EchoConfig, Streams, wire
from echo_jax.nn import EXACT
from models import transformer
from models.transformer import Communication, TransformerConfig

QWEN3 = TransformerConfig(
    vocab_size=96, d_model=128, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=24, d_ff=160, dtype=jnp.float32
)
LLAMA = dataclasses.replace(QWEN3, qk_norm=False, tie_embeddings=False, rope_theta=1e4, num_kv_heads=8, head_dim=16)
pytestmark = pytest.mark.usefixtures("compiled_fast")
ECHO = EchoConfig(group_size=32, algorithm="two_shot")
WINDOWS = np.random.default_rng(0).integers(0, 96, (4, 33)).astype(np.int32)


def with_sums(config, forward, backward=None, **settings):
    return dataclasses.replace(config, comm=Communication("model", forward, backward or forward, **settings))


def training_step(config, data, model, batch=WINDOWS.shape[0], sequence=WINDOWS.shape[1] - 1):
    """(jitted function of (params, streams, windows) -> (loss, grads, streams, stats), params, streams)."""
    mesh = mesh_of(data=data, model=model)
    param_specs, stream_specs = transformer.param_specs(config, model), P(("data", "model"))

    def step(params, streams, windows):
        params = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        loss_fn = functools.partial(transformer.mean_loss, config)
        (loss, stats), grads, streams = echo_jax.value_and_grad(loss_fn, has_aux=True)(params, streams, windows)
        return *lax.pmean((loss, grads), "data"), streams, stats

    specs = (param_specs, stream_specs, P("data"))
    out_specs = (P(), param_specs, stream_specs, P())
    compiled = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out_specs))
    params = transformer.init_params(config, jax.random.key(1), mesh)
    return compiled, params, transformer.init_streams(config, batch, sequence, mesh, P("data"))


@functools.cache
def one_device(config):
    step, params, streams = training_step(config, 1, 1)
    return jax.tree.map(np.asarray, step(params, streams, WINDOWS)[:2])


def relative_error(found, wanted):
    """Norm of the difference over the norm, the largest of any parameter."""
    errors = jax.tree.map(lambda a, b: np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b), found, wanted)
    return max(jax.tree.leaves(errors))


@pytest.mark.parametrize("family", [QWEN3, LLAMA], ids=["qwen3", "llama"])
@pytest.mark.parametrize(("data", "model"), [pytest.param(1, 2, marks=pytest.mark.soak), (2, 4), (1, 8)])
def test_exact_sums_give_one_devices_loss_and_gradients(family, data, model):
    """At 8 ranks Qwen3's two key/value heads are fewer than the ranks, and whole on each of them."""
    config = with_sums(family, EXACT)
    step, params, streams = training_step(config, data, model)
    loss, grads, _, _ = step(params, streams, WINDOWS)
    wanted_loss, wanted_grads = one_device(config)
    # float32 sums in another order: some hundred roundings of 2**-24 one after the other.
    assert abs(loss / wanted_loss - 1) < 1e-6
    assert relative_error(grads, wanted_grads) < 1e-5


@pytest.mark.quick
def test_the_codec_none_gives_one_devices_gradients_through_both_streams():
    config = with_sums(QWEN3, dataclasses.replace(ECHO, codec="none"))
    step, params, streams = training_step(config, 2, 4)
    loss, grads, streams, _ = step(params, streams, WINDOWS)
    wanted_loss, wanted_grads = one_device(with_sums(QWEN3, EXACT))
    assert abs(loss / wanted_loss - 1) < 1e-6
    assert relative_error(grads, wanted_grads) < 1e-5


@pytest.mark.parametrize("backward_sum", ["norm_output", "residual_stream"])
def test_feedback_brings_the_gradient_closer_to_the_exact_one(backward_sum):
    _, wanted = one_device(with_sums(QWEN3, EXACT))
    errors = {}
    for name, config in (("fed back", ECHO), ("plain", dataclasses.replace(ECHO, feedback=False))):
        step, params, streams = training_step(with_sums(QWEN3, config, backward_sum=backward_sum), 2, 4)
        _, grads, _, stats = step(params, streams, WINDOWS)
        errors[name] = relative_error(grads["blocks"]["attention"]["v_proj"], wanted["blocks"]["attention"]["v_proj"])
        if config.feedback:
            assert 0 < stats["relative_rms"] < 1
    assert errors["fed back"] < errors["plain"] < 0.5


def test_without_settling_both_streams_go_on_owing():
    step, params, streams = training_step(with_sums(QWEN3, ECHO, settle=False), 1, 4)
    _, _, carried, _ = step(params, streams, WINDOWS)
    assert all(np.asarray(leaf.residual).any() for leaf in (carried.forward, carried.backward))
    first = step(params, streams, WINDOWS)[0]
    assert first != step(params, carried, WINDOWS)[0], "what is carried in takes part in the next step"


def test_a_layer_sends_each_sum_once_and_rematerialisation_repeats_none():
    step, params, streams = training_step(with_sums(QWEN3, ECHO), 2, 4)
    found = wire.over_axis(wire.collectives(step, params, streams, WINDOWS), "model")
    times = {}
    for c in found:
        if c.dtype == "uint8":
            names = ("embed", "attention_out", "attention_in", "mlp_out", "mlp_in", "head_in", "flush_grad", "flush")
            name = next(n for n in names if n in c.name)
            times[name, c.kind] = times.get((name, c.kind), 0) + c.times
    layers = QWEN3.num_layers
    for kind in ("all_to_all", "all_gather"):
        for name, wanted in (("attention_out", layers), ("mlp_out", layers), ("attention_in", layers),
                             ("mlp_in", layers), ("embed", 1), ("head_in", 1), ("flush", 1),
                             ("flush_grad", 1)):  # fmt: skip
            assert times.pop((name, kind)) == wanted
    assert not times


def test_a_compiled_step_has_no_full_size_float_collective_but_the_data_parallel_sum():
    batch, sequence = 8, 64
    config = with_sums(dataclasses.replace(QWEN3, dtype=jnp.bfloat16), ECHO)
    step, params, streams = training_step(config, 2, 4, batch, sequence)
    windows = jnp.zeros((batch, sequence + 1), jnp.int32)
    compiled = step.lower(params, streams, windows).compile()
    activation_bytes = batch // 2 * sequence * config.d_model * 2  # XLA's CPU compiler sums bfloat16 in float32: more
    over_model = [c for c in hlo.collectives(compiled) if len(c.groups[0]) == 4]
    large = [c for c in over_model if c.dtypes != {"u8"} and c.nbytes >= activation_bytes]
    assert not large
    # Two collectives a sum. In the layers' loops: two sums forward, two backward; around them the embedding's, the two
    # flushes' and that of the head's input.
    assert len([c for c in over_model if c.dtypes == {"u8"}]) == 2 * (2 + 2 + 4)


def test_full_rematerialisation_would_repeat_collectives(monkeypatch):
    """What the model's policy is there for: without it the first sum of a layer is sent again in the backward pass."""
    monkeypatch.setattr(echo_jax, "remat_policy", jax.checkpoint_policies.nothing_saveable)
    step, params, streams = training_step(with_sums(QWEN3, ECHO), 2, 4)
    found = wire.collectives(step, params, streams, WINDOWS)
    assert sum(c.times for c in found if "attention_out" in c.name and c.kind == "all_to_all") == 2 * QWEN3.num_layers


def test_the_remat_policy_keeps_one_activation_a_layer_more_than_full_rematerialisation_of_exact_sums(monkeypatch):
    # Compiled, not run. float32, as XLA's CPU compiler keeps some bfloat16 values in float32; activations large beside
    # the weights, whose gradients are temporaries too.
    batch, sequence, fewer, more = 16, 256, 4, 8
    windows = jax.ShapeDtypeStruct((batch, sequence + 1), jnp.int32)

    def growth(config):
        """Temporary bytes that a layer adds."""
        temporaries = []
        for layers in (fewer, more):
            step, params, streams = training_step(dataclasses.replace(config, num_layers=layers), 1, 2, batch, sequence)
            temporaries.append(step.lower(params, streams, windows).compile().memory_analysis().temp_size_in_bytes)
        return (temporaries[1] - temporaries[0]) / (more - fewer)

    activation = batch * sequence * QWEN3.d_model * 4
    echo = growth(with_sums(QWEN3, ECHO))
    monkeypatch.setattr(echo_jax, "remat_policy", jax.checkpoint_policies.nothing_saveable)
    assert echo <= growth(with_sums(QWEN3, EXACT)) + activation


def test_streams_of_another_batch_are_refused():
    step, params, _ = training_step(with_sums(QWEN3, ECHO), 2, 4)
    streams = transformer.init_streams(with_sums(QWEN3, ECHO), 8, 32, mesh_of(data=2, model=4), P("data"))
    with pytest.raises(ValueError, match="shape of the state"):
        step(params, streams, WINDOWS)


@pytest.mark.parametrize(("field", "value", "ranks"), [("num_heads", 6, 4), ("d_ff", 162, 4), ("vocab_size", 97, 4)])
def test_shapes_that_do_not_divide_are_refused_by_name(field, value, ranks):
    config = dataclasses.replace(QWEN3, **{field: value})
    with pytest.raises(ValueError, match=field):
        transformer.init_params(config, jax.random.key(0), mesh_of(model=ranks))


def test_parameters_are_the_same_for_every_number_of_ranks():
    config = with_sums(QWEN3, EXACT)
    one, eight = (transformer.init_params(config, jax.random.key(3), mesh_of(data=1, model=n)) for n in (1, 8))
    jax.tree.map(np.testing.assert_array_equal, one, eight)


def test_a_forward_stream_may_be_compressed_and_the_backward_one_exact():
    step, params, streams = training_step(with_sums(QWEN3, ECHO, EXACT), 1, 4)
    assert streams.backward is None
    _, grads, streams, _ = step(params, streams, WINDOWS)
    assert isinstance(streams, Streams) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
