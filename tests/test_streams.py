"""Both directions of a training step: what the backward stream owes travels in the state's cotangent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_equal_on_ranks, assert_same_bits, on_ranks, owed, partials, residual_slack, zero_state
from jax import lax

import echo_jax
from echo_jax import EchoConfig, Streams

RANKS, LAYERS, TOKENS, D, F = 4, 6, 3, 128, 16


def _weights(seed=0):
    """[ranks, layers, d, f] and [ranks, layers, f, d]: column- and row-parallel weights of each layer."""
    up = partials(seed, (RANKS, LAYERS, D, F), scale=0.4)
    return up, partials(seed + 1, (RANKS, LAYERS, F, D), scale=0.4)


H0, TARGET = partials(20, (TOKENS, D)), partials(21, (TOKENS, D))


def _loss(config, settle, weights, streams, taps, h0):
    """A residual network of tanh layers in a scan, with both streams. Also gives every layer's input.

    taps, zeros [layers, tokens, d], are added to each layer's input: their gradients are the gradients there.
    """

    def layer(carry, parameters):
        h, streams = carry
        (up, down), tap = parameters
        given = h = h + tap
        x, backward = echo_jax.echo_psum_grad(h, "tp", streams.backward, config)
        y, forward = echo_jax.echo_psum(jnp.tanh(x @ up) @ down, "tp", streams.forward, config)
        return (h + y, Streams(forward, backward)), given

    backward = streams.backward
    if settle:
        h0, backward = echo_jax.flush_grad(h0, "tp", backward, config)
    layer = jax.checkpoint(layer, policy=echo_jax.remat_policy)
    (h, streams), inputs = lax.scan(layer, (h0, Streams(streams.forward, backward)), (weights, taps))
    forward = streams.forward
    if settle:
        h, forward = echo_jax.flush(h, "tp", forward, config)
    return 0.5 * ((h - TARGET) ** 2).sum(), (Streams(forward, streams.backward), (inputs, h))


@functools.cache
def _step(config, settle=True):
    """weights, streams -> (loss, (inputs, last h)), gradients of (weights, taps, h0), streams; all [ranks, ...]."""

    def one_rank(weights, streams):
        loss = functools.partial(_loss, config, settle)
        step = echo_jax.value_and_grad(loss, argnums=(0, 2, 3), has_aux=True)
        return step(weights, streams, jnp.zeros((LAYERS, TOKENS, D)), jnp.asarray(H0))

    return on_ranks(one_rank, RANKS)


def _exact(weights):
    """The same with lax.psum and casts: loss and gradients of (weights, h0)."""

    def loss(weights, h0):
        def layer(h, parameters):
            up, down = parameters
            x = lax.pcast(h, "tp", to="varying")
            return h + lax.psum(jnp.tanh(x @ up) @ down, "tp"), None

        h, _ = lax.scan(layer, h0, weights)
        return 0.5 * ((h - TARGET) ** 2).sum()

    return on_ranks(lambda w: jax.value_and_grad(loss, argnums=(0, 1))(w, jnp.asarray(H0)), RANKS)(weights)


def _zero_streams(config):
    zero = zero_state(np.zeros((RANKS, TOKENS, D), np.float32), config)
    return Streams(zero, zero)


@pytest.mark.quick
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot", "exact"])
def test_with_the_code_none_a_step_has_the_gradients_of_lax_psum(algorithm):
    config = EchoConfig("none", algorithm=algorithm, residual="float32")
    weights = _weights()
    (loss, _), (of_weights, _, of_h0), _ = _step(config)(weights, _zero_streams(config))
    wanted_loss, wanted = _exact(weights)
    # Float32 sums in another order through 6 layers and back: about 100 roundings of 2**-24.
    np.testing.assert_allclose(loss, wanted_loss, rtol=100 * 2.0**-24)
    for a, b in zip(jax.tree.leaves((of_weights, of_h0)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=100 * 2.0**-24 * np.abs(b).max())


def _partial_gradients(weights, inputs, taps):
    """float64[layers, tokens, d]: the exact sums over ranks of what each layer's backward pass gave to be summed.

    taps[l] is the gradient at layer l's input; above the last layer it is that of the loss, taps[layers].
    """
    up, down = (np.float64(w) for w in weights)
    result = []
    for layer in range(LAYERS):
        x, above = np.float64(inputs[layer]), np.float64(taps[layer + 1])
        z = np.tanh(x @ up[:, layer])  # [ranks, tokens, f]
        partial = ((above @ down[:, layer].swapaxes(1, 2)) * (1 - z**2)) @ up[:, layer].swapaxes(1, 2)
        result.append(partial.sum(0))
    return np.stack(result)


@pytest.mark.parametrize("settle", [pytest.param(True, marks=pytest.mark.quick), False], ids=["settled", "carried"])
@pytest.mark.parametrize(("codec", "residual"), [("hadamard_int4", "float32"), ("int4", "float32"), ("int4", "int8")])
def test_the_backward_stream_loses_nothing(codec, residual, settle):
    """Gradient at the bottom + what is owed at the end = that at the top + all partials + what was carried in.

    The forward stream alike, for the values. Through a scan, a rematerialised block and the cotangent of a state, 8-bit
    residuals keep their bits too: what is lost is the rounding of each call, some hundredths of what is owed.
    """
    config = EchoConfig(codec, algorithm="two_shot", residual=residual)
    weights, streams = _weights(), _zero_streams(config)
    for _ in range(2):  # the second step starts with what the first one left, if it was not settled
        before = streams
        (_, (inputs, last)), (_, taps, of_h0), streams = _step(config, settle)(weights, before)
        inputs, last, taps, of_h0 = inputs[0], np.asarray(last)[0], np.asarray(taps)[0], np.asarray(of_h0)[0]
        top = np.float64(last) - TARGET
        sums = _partial_gradients(weights, inputs, [*taps, top])
        lost = of_h0 + owed(streams.backward).sum(0) - top - sums.sum(0) - owed(before.backward).sum(0)
        # 6 calls of values up to about 10, each with the float32 roundings of 2 rotations: 6 * 128 * 2**-24 * 10.
        allowed = 6 * 128 * 2.0**-24 * max(10.0, np.abs(taps).max())
        if residual == "int8":
            owing = _step(config, False)(weights, before)[2]
            allowed += LAYERS * 2 * max(residual_slack(s).sum(0).max() for s in (owing.forward, owing.backward))
            assert allowed < 0.1 * np.abs(owed(owing.backward).sum(0)).max()
        assert np.abs(lost).max() <= allowed
        # What each layer added is not what was due, by far: the code has 4 bits.
        assert np.abs(taps[0] - taps[1] - sums[0]).max() > 10 * allowed

        up, down = (np.float64(w) for w in weights)
        added = sum((np.tanh(np.float64(inputs[i]) @ up[:, i]) @ down[:, i]).sum(0) for i in range(LAYERS))
        lost = last + owed(streams.forward).sum(0) - H0 - added - owed(before.forward).sum(0)
        assert np.abs(lost).max() <= allowed

        for stream in (streams.forward, streams.backward):
            assert np.asarray(stream.residual).any() != settle
        assert_equal_on_ranks(of_h0[None])


def test_what_was_carried_in_is_the_seed_of_the_backward_stream_and_a_plain_grad_starts_from_zero():
    config = EchoConfig(algorithm="two_shot")
    weights, zero = _weights(), _zero_streams(config)
    _, from_zero, carried = _step(config, False)(weights, zero)
    assert np.asarray(carried.backward.residual).any()
    seeded = Streams(zero.forward, carried.backward)
    _, from_carried, _ = _step(config, False)(weights, seeded)
    assert (np.asarray(from_zero[1]) != np.asarray(from_carried[1])).any()

    def plain(weights, streams):
        taps = jnp.zeros((LAYERS, TOKENS, D))
        return jax.grad(lambda t: _loss(config, False, weights, streams, t, jnp.asarray(H0))[0])(taps)

    assert_same_bits(on_ranks(plain, RANKS)(weights, seeded), from_zero[1])


def test_the_gradient_is_equal_on_all_ranks():
    config = EchoConfig(algorithm="two_shot")
    _, (_, taps, of_h0), _ = _step(config)(_weights(), _zero_streams(config))
    assert_equal_on_ranks((taps, of_h0))


def test_a_settled_gradient_is_nearer_than_one_without_feedback():
    weights = _weights()
    _, (_, wanted) = _exact(weights)
    errors = []
    for config in (EchoConfig(algorithm="two_shot"), EchoConfig(algorithm="two_shot", feedback=False)):
        streams = _zero_streams(config) if config.feedback else Streams(None, None)
        _, (_, _, of_h0), after = _step(config)(weights, streams)
        assert config.feedback or after == Streams(None, None)
        errors.append(np.sqrt(((np.asarray(of_h0)[0] - np.asarray(wanted)[0]) ** 2).mean()))
    assert errors[0] < 0.7 * errors[1]


# --- value_and_grad --------------------------------------------------------------------------------------------------


def _small_loss(weights, streams, x):
    y, forward = echo_jax.echo_psum(weights * x, "tp", streams.forward, EchoConfig())
    return (y**2).sum(), Streams(forward, streams.backward)


def _small(f):
    config = EchoConfig()

    def one_rank(w):
        return f(w, echo_jax.init_streams(jnp.asarray(H0), "tp", config), jnp.asarray(H0))

    return on_ranks(one_rank, RANKS)(partials(0, (RANKS, 1, D)))


def test_value_and_grad_gives_one_gradient_for_a_position_and_a_tuple_for_a_tuple():
    value, gradient, streams = _small(echo_jax.value_and_grad(_small_loss))
    assert value.shape == (RANKS,) and gradient.shape == (RANKS, 1, D) and isinstance(streams, Streams)
    _, pair, _ = _small(echo_jax.value_and_grad(_small_loss, argnums=(0, 2)))
    assert [g.shape for g in pair] == [(RANKS, 1, D), (RANKS, TOKENS, D)]
    _, second, _ = _small(echo_jax.value_and_grad(_small_loss, argnums=2))
    assert_same_bits(second, pair[1])
    assert_same_bits(gradient, pair[0])


@pytest.mark.parametrize("argnums", [1, (0, 1), -1, True, "0"])
def test_value_and_grad_refuses_to_differentiate_the_streams(argnums):
    with pytest.raises(TypeError, match="argnums must be positions from 0 other than 1"):
        echo_jax.value_and_grad(_small_loss, argnums=argnums)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda w, s, x: (w.sum(), None), "must return echo_jax.Streams beside the loss, found NoneType"),
        (lambda w, s, x: (w.sum(), Streams(s.forward, None)), "must return streams of the structure"),
        (lambda w, s, x: (w, s), r"must return a float scalar as its loss, found float32\[1, 128\]"),
    ],
)
def test_value_and_grad_names_what_a_loss_returned_instead(loss, message):
    with pytest.raises(TypeError, match=message):
        _small(echo_jax.value_and_grad(loss))


def test_value_and_grad_needs_streams_as_the_second_argument():
    with pytest.raises(TypeError, match="streams, the second argument, must be echo_jax.Streams, found float"):
        echo_jax.value_and_grad(_small_loss)(1.0, 2.0)
    with pytest.raises(TypeError, match="found nothing"):
        echo_jax.value_and_grad(_small_loss)(1.0)


def test_the_two_directions_may_have_configs_of_their_own():
    backward = EchoConfig("int8", 32, residual="float32")

    def one_rank(w):
        streams = echo_jax.init_streams(w, "tp", EchoConfig(), backward)
        assert streams.forward.layout.rotation == "hadamard" and streams.forward.layout.group_size == 128
        assert streams.backward.layout.rotation == "none" and streams.backward.layout.group_size == 32
        return streams

    streams = on_ranks(one_rank, RANKS)(np.zeros((RANKS, TOKENS, D), np.float32))
    assert streams.forward.residual.dtype == jnp.float8_e4m3fn and streams.backward.residual.dtype == jnp.float32
