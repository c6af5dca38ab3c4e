"""A scaled loss gives the gradients of an unscaled one, and a stream is never carried over a change of the scale."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import mesh_of, partials
from jax import lax
from jax.sharding import PartitionSpec as P

import echo_jax
from echo_jax import EchoConfig, Streams, checkpoint

RANKS = 4
CONFIG = EchoConfig(algorithm="two_shot", residual="float32")
H, W = partials(0, (8, 128)), partials(1, (RANKS, 128, 64))


def step(h, w, streams, scale):
    """Gradient of h, summed over ranks that each use it in their own way: the sum is coded and its error carried."""

    def loss_fn(h, streams):
        cast, backward = echo_jax.echo_psum_grad(h, "tp", streams.backward, CONFIG)
        return lax.psum(((cast @ w) ** 2).mean(), "tp"), Streams(streams.forward, backward)

    return echo_jax.value_and_grad(loss_fn, loss_scale=scale)(h, streams)


def on_mesh(run, *out_specs):
    """run(h, w of one rank, scales) on all ranks."""
    sharded = jax.shard_map(
        lambda h, w, scales: run(h, w[0], scales),
        mesh=mesh_of(tp=RANKS),
        in_specs=(P(), P("tp"), P()),
        out_specs=out_specs,
    )
    return lambda *scales: jax.jit(sharded)(H, W, np.array(scales, np.float32))


def carried(scale):
    """(losses, gradients, residual) of three steps at one scale."""

    def run(h, w, _):
        streams = echo_jax.init_streams(h, "tp", CONFIG, loss_scale=scale)
        losses, gradients = [], []
        for _ in range(3):
            loss, grads, streams = step(h, w, streams, scale)
            losses.append(loss)
            gradients.append(grads)
        return jnp.stack(losses), jnp.stack(gradients), streams.backward.residual

    return [np.asarray(found) for found in on_mesh(run, P(), P(), P("tp"))()]


@pytest.mark.quick
@pytest.mark.parametrize("scale", [2.0**12, 2.0**-3])
def test_a_power_of_two_changes_no_bit_of_loss_or_gradients_and_scales_what_is_owed(scale):
    losses, gradients, residual = carried(scale)
    wanted = carried(1.0)
    np.testing.assert_array_equal(losses, wanted[0])
    np.testing.assert_array_equal(gradients, wanted[1])
    np.testing.assert_array_equal(residual, wanted[2] * scale)
    assert (gradients[1] != gradients[0]).any()  # what was carried had an effect


def test_a_scale_that_is_no_power_of_two_gives_the_gradients_to_rounding():
    # Codes may fall on other steps: 4 partials and their sum, by 1/14 of a group's largest value each; carried on.
    gradients, wanted = carried(1000.0)[1], carried(1.0)[1]
    np.testing.assert_allclose(gradients, wanted, rtol=0, atol=0.2 * np.abs(wanted).max())


def test_new_streams_take_a_traced_scale_in_every_step():
    def run(h, w, scales):
        def one(_, scale):
            streams = echo_jax.init_streams(h, "tp", CONFIG, loss_scale=None)
            _, grads, streams = step(h, w, streams, scale)
            return None, grads

        return (lax.scan(one, None, scales)[1],)

    with_scales = np.asarray(on_mesh(run, P())(1, 2.0**10, 2.0**-4))[0]
    for gradient in with_scales:
        np.testing.assert_array_equal(gradient, carried(1.0)[1][0])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (1.0, 2.0, "streams must be of loss_scale=2.0; found those of loss_scale=1.0"),
        (2.0, 1.0, "streams must be of loss_scale=1.0; found those of loss_scale=2.0"),
        ("traced", 1.0, "of loss_scale=1.0; found those of a traced loss_scale"),
        (1.0, "traced", "anew in every step; found those of loss_scale=1.0"),
        ("traced", "traced", "anew in every step; found those of a traced loss_scale"),
    ],
)
def test_carrying_a_stream_over_a_change_of_scale_is_refused(first, second, message):
    def run(h, w, scales):
        streams = echo_jax.init_streams(h, "tp", CONFIG, loss_scale=None)
        for scale in (first, second):
            _, grads, streams = step(h, w, streams, scales[0] if scale == "traced" else scale)
        return grads

    with pytest.raises(ValueError, match=message):
        on_mesh(run, P())(4.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_scales_nothing_is_refused(scale):
    with pytest.raises(ValueError, match="loss_scale must be above 0 and finite"):
        echo_jax.value_and_grad(lambda h, streams: (h.sum(), streams), loss_scale=scale)


def test_a_checkpoint_is_not_restored_at_another_scale(tmp_path):
    mesh = mesh_of(tp=RANKS)

    def streams(scale):
        return echo_jax.init_streams(H, "tp", CONFIG, mesh=mesh, spec=P(), loss_scale=scale)

    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(**checkpoint.save_args(streams(8.0), CONFIG)))
        manager.wait_until_finished()
        assert checkpoint.restore(manager, 0, streams(8.0)).loss_scale == 8.0
        with pytest.raises(ValueError, match="state was saved at loss_scale 8.0, and it is 1.0 here"):
            checkpoint.restore(manager, 0, streams(1.0))
