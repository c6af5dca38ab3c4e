"""The Flax layers against what they are the parallel form of, and the same calls in a module of flax.linen."""

import dataclasses
import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import mesh_of, on_ranks
from jax import lax
from jax.sharding import PartitionSpec as P

import echo_jax
from echo_jax import EchoConfig, wire
from echo_jax.nn import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbed,
    local_heads,
    vocab_parallel_cross_entropy,
)

NONE = EchoConfig(codec="none", algorithm="two_shot", group_size=32)
RNG = np.random.default_rng(0)


class MLP(nnx.Module):
    """down(tanh(up(x))), with the pair of sums around it."""

    def __init__(self, config, rngs):
        self.config = config
        self.up = ColumnParallelLinear(64, 96, axis_name="tp", dtype=jnp.float32, rngs=rngs)
        self.down = RowParallelLinear(96, 64, axis_name="tp", config=config, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x, streams):
        x, backward = echo_jax.echo_psum_grad(x, "tp", streams.backward, self.config)
        y, forward = self.down(jnp.tanh(self.up(x)), streams.forward)
        return y, echo_jax.Streams(forward, backward)


class LinenMLP(flax.linen.Module):
    """The same in flax.linen: parameters have the local shapes that shard_map gives, the calls are the same."""

    config: EchoConfig
    hidden: int

    @flax.linen.compact
    def __call__(self, x, streams):
        init = flax.linen.initializers.normal(0.02)
        up = self.param("up", init, (x.shape[-1], self.hidden))
        down = self.param("down", init, (self.hidden, x.shape[-1]))
        x, backward = echo_jax.echo_psum_grad(x, "tp", streams.backward, self.config)
        y, forward = echo_jax.echo_psum(jnp.tanh(x @ up) @ down, "tp", streams.forward, self.config)
        return y, echo_jax.Streams(forward, backward)


def loss_and_grads(apply, config, ranks, x, kernels):
    """Two layers deep, so that the second call of a stream sees the first one's error."""

    def step(up, down, x):
        streams = echo_jax.init_streams(x, "tp", config)

        def loss_fn(kernels, streams, x):
            for _ in range(2):
                y, streams = apply(kernels, x, streams)
                x = x + y
            return jnp.sum(x**2), streams

        loss, grads, _ = echo_jax.value_and_grad(loss_fn)((up, down), streams, x)
        return loss, grads

    specs = (P(None, "tp"), P("tp", None))
    run = jax.shard_map(step, mesh=mesh_of(tp=ranks), in_specs=(*specs, P()), out_specs=(P(), specs))
    return jax.tree.map(np.asarray, jax.jit(run)(*kernels, x))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_column_and_row_parallel_layers_are_one_devices_network_in_nnx_and_in_linen(kind):
    ranks = 4
    x = RNG.normal(size=(5, 64)).astype(np.float32)
    kernels = RNG.normal(size=(64, 96)).astype(np.float32) / 8, RNG.normal(size=(96, 64)).astype(np.float32) / 8

    def apply_nnx(kernels, x, streams):
        graph = nnx.split(nnx.eval_shape(lambda: MLP(NONE, nnx.Rngs(0))))[0]
        return nnx.merge(graph, {"up": {"kernel": kernels[0]}, "down": {"kernel": kernels[1]}})(x, streams)

    def apply_linen(kernels, x, streams):
        module = LinenMLP(NONE, hidden=96 // ranks)
        return module.apply({"params": {"up": kernels[0], "down": kernels[1]}}, x, streams)

    loss, grads = loss_and_grads({"nnx": apply_nnx, "linen": apply_linen}[kind], NONE, ranks, x, kernels)

    def reference(kernels):
        y = x
        for _ in range(2):
            y = y + jnp.tanh(y @ kernels[0]) @ kernels[1]
        return jnp.sum(y**2)

    wanted_loss, wanted = jax.value_and_grad(reference)(tuple(map(jnp.asarray, kernels)))
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    for found, want in zip(grads, wanted, strict=True):
        assert np.linalg.norm(found - want) < 1e-5 * np.linalg.norm(want)  # a few hundred float32 roundings


def test_parameters_say_how_they_are_split():
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(nnx.eval_shape(lambda: MLP(NONE, nnx.Rngs(0))))))
    assert specs == {"up": {"kernel": P(None, "tp")}, "down": {"kernel": P("tp", None)}}


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_an_embedding_is_a_lookup_and_its_tied_head_the_transposed_product(ranks):
    table = RNG.normal(size=(48, 16)).astype(np.float32)
    tokens = RNG.integers(0, 48, (2, 7))

    def run(table, tokens):
        embed = VocabParallelEmbed(48, 16, axis_name="tp", dtype=jnp.float32, rngs=nnx.Rngs(0))
        embed.embedding = nnx.Param(table)
        rows, _ = embed(tokens)
        return rows, embed.attend(lax.pcast(rows, "tp", to="varying"))

    run = jax.shard_map(run, mesh=mesh_of(tp=ranks), in_specs=(P("tp"), P()), out_specs=(P(), P(None, None, "tp")))
    rows, logits = jax.jit(run)(table, tokens)
    np.testing.assert_array_equal(rows, table[tokens])
    np.testing.assert_allclose(logits, table[tokens] @ table.T, rtol=1e-5, atol=1e-5)


def test_a_coded_embedding_is_a_call_of_the_stream_it_starts():
    """What coding the rows leaves is owed: rows plus debt are the table's own."""
    table = RNG.normal(size=(48, 64)).astype(np.float32)
    tokens = RNG.integers(0, 48, (2, 7))
    config = EchoConfig(group_size=32, algorithm="two_shot", residual="float32")

    def run(table, tokens):
        embed = VocabParallelEmbed(48, 64, axis_name="tp", config=config, dtype=jnp.float32, rngs=nnx.Rngs(0))
        embed.embedding = nnx.Param(table)
        rows, state = embed(tokens, echo_jax.init_state(jnp.zeros((2, 7, 64)), "tp", config))
        return rows, echo_jax.flush(rows, "tp", state, config)[0]

    run = jax.shard_map(run, mesh=mesh_of(tp=3), in_specs=(P("tp"), P()), out_specs=(P(), P()))
    rows, settled = jax.jit(run)(table, tokens)
    assert 0.01 < np.abs(rows - table[tokens]).max() < 0.5
    np.testing.assert_allclose(settled, table[tokens], rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("magnitude", [1.0, 1e4])
def test_cross_entropy_over_a_split_vocabulary_is_that_of_the_whole_one_with_its_gradient(ranks, magnitude):
    logits = (RNG.normal(size=(3, 4, 40)) * magnitude).astype(np.float32)
    labels = RNG.integers(0, 40, (3, 4))

    def run(logits, labels):
        loss_fn = lambda logits: vocab_parallel_cross_entropy(logits, labels, "tp")  # noqa: E731
        losses, transpose = jax.vjp(loss_fn, logits)
        return losses, transpose(jnp.ones_like(losses))[0]

    split = P(None, None, "tp")
    run = jax.shard_map(run, mesh=mesh_of(tp=ranks), in_specs=(split, P()), out_specs=(P(), split))
    losses, gradient = jax.jit(run)(logits, labels)
    wanted = lambda logits: -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]  # noqa: E731
    wanted_losses, transpose = jax.vjp(wanted, jnp.asarray(logits))
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, transpose(jnp.ones((3, 4)))[0], rtol=1e-5, atol=1e-6)


def test_a_label_outside_the_vocabulary_is_nan_on_every_rank():
    run = lambda logits, labels: vocab_parallel_cross_entropy(logits, labels, "tp")  # noqa: E731
    losses = on_ranks(run, 4)(np.zeros((4, 3, 8), np.float32), np.tile([0, 32, -1], (4, 1)))
    np.testing.assert_array_equal(np.isnan(losses), np.tile([False, True, True], (4, 1)))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "wanted"),
    [
        (8, 8, 4, None),  # split
        (9, 3, 3, None),
        (16, 2, 8, [[0], [0], [0], [0], [1], [1], [1], [1]]),  # whole, one each
        (12, 4, 6, [[0, 0], [0, 1], [1, 1], [2, 2], [2, 3], [3, 3]]),  # whole, a rank's queries read two of them
        (6, 3, 2, [[0, 0, 1], [1, 2, 2]]),
    ],
)
def test_every_rank_takes_the_key_value_heads_that_its_queries_read(heads, kv_heads, ranks, wanted):
    def run(x):
        count, index = local_heads(heads, kv_heads, "tp")
        assert count == (kv_heads // ranks if wanted is None else len(wanted[0]))
        return x if index is None else index

    found = on_ranks(run, ranks)(np.zeros((ranks, 1), np.int32))
    if wanted is not None:
        np.testing.assert_array_equal(found, wanted)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="num_heads must be a multiple"):
        on_ranks(functools.partial(lambda x: local_heads(9, 3, "tp") and x), 2)(np.zeros((2, 1)))


def test_a_row_parallel_layer_names_its_sum():
    config = dataclasses.replace(NONE, feedback=False)
    layer = RowParallelLinear(64, 64, axis_name="tp", config=config, name="mlp_out", rngs=nnx.Rngs(0))
    run = jax.shard_map(lambda x: layer(x, None)[0], mesh=mesh_of(tp=2), in_specs=P(), out_specs=P())
    found = wire.collectives(run, jnp.zeros((4, 64), jnp.bfloat16))
    assert [c.name for c in found] == ["mlp_out/columns32/all_to_all", "mlp_out/columns32/all_gather"]
