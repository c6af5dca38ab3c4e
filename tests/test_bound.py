"""Promise 3: what is owed stays below a bound for ever, and a stream's error does not grow with its depth.

The bound, per group and in the codec's domain. Let c be the codec's `error_bound`, enlarged by the rounding of a stored
residual, and M_r the largest value of rank r's group ever seen. A send error obeys |e| <= c (M + |e|), so

    |e_r| <= k M_r                                     k = c / (1 - c)

and the sum that rank j owns is of its own x + f and of what others sent, at most (1 + c) (M_r + |e_r|) each, so

    |f_j| <= k (M_j + (1 + c) / (1 - c) * sum of M_r over other ranks).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import on_ranks
from jax import lax

import echo_jax
from echo_jax import EchoConfig, residuals
from echo_jax.codecs import CODECS

RANKS, SHAPE = 4, (3, 256)
# Float32 arithmetic beside the bound's real numbers: about 16 roundings a call of 2**-24 each.
FLOAT32 = 1 + 2.0**-20


def _adversary(key: jax.Array, residual: jax.Array) -> jax.Array:
    """float32[n, 3, g] in the codec's domain, at most 1: what a rank adds next, knowing what it owes.

    One group of noise, one of spikes, and one that pushes what is owed further out, while another value of the group
    sets the scale each time.
    """
    noise = jax.random.uniform(key, residual.shape, minval=-1.0, maxval=1.0)
    largest = jax.random.randint(key, residual.shape[:-1], 0, residual.shape[-1])
    is_largest = jnp.arange(residual.shape[-1]) == largest[..., None]
    push = jnp.where(is_largest, jnp.sign(residual), 0.5 * noise + 0.1 * jnp.sign(residual))
    return jnp.stack([noise[:, 0], jnp.sign(noise[:, 1]) * noise[:, 1] ** 8, push[:, 2]], axis=1)


def _worst_ratios(config: EchoConfig, calls: int) -> np.ndarray:
    """[ranks, 3]: for every rank and kind of group, the largest residual over its bound in `calls` calls."""
    codec = CODECS[config.codec]
    c = codec.error_bound("float32") * (1 + residuals.rounding(config.residual)) * FLOAT32

    def stream(key):
        rank = lax.axis_index("tp")
        state = echo_jax.init_state(jax.ShapeDtypeStruct(SHAPE, jnp.float32), "tp", config)
        layout = state.layout

        def call(carry, key):
            state, largest, worst = carry
            z = _adversary(jax.random.fold_in(key, rank), state.errors()[0])
            x = layout.from_chunks(codec.rotate_back(z))
            _, state = echo_jax.echo_psum(x, "tp", state, config)
            seen = jnp.abs(codec.rotate(layout.to_chunks(x))).max(-1, keepdims=True)
            largest = jnp.maximum(largest, seen)
            bound = c / (1 - c) * largest
            if config.algorithm == "two_shot":
                others = lax.psum(largest, "tp") - largest
                owned = c / (1 - c) * (largest + (1 + c) / (1 - c) * others)
                bound = jnp.where(jnp.arange(RANKS)[:, None, None] == rank, owned, bound)
            ratio = (jnp.abs(state.errors()[0]) / bound).max((0, 2))
            return (state, largest, jnp.maximum(worst, ratio)), None

        start = state, jnp.zeros((RANKS, 3, 1)), jnp.zeros(3)
        (_, _, worst), _ = lax.scan(call, start, jax.random.split(key, calls))
        return worst

    return np.asarray(on_ranks(stream, RANKS, "vmap")(jnp.stack([jax.random.key(0)] * RANKS)))


def _check_bound(codec: str, algorithm: str, residual: str, calls: int) -> None:
    worst = _worst_ratios(EchoConfig(codec, 64, algorithm=algorithm, residual=residual), calls)
    assert worst.max() <= 1
    assert (worst.max(0) > 0.8).all(), f"a bound that nothing comes near says little: {worst.max(0)}"


CODED = tuple(name for name, codec in CODECS.items() if codec.grid is not None)


@pytest.mark.parametrize(
    ("codec", "algorithm", "residual", "calls"),
    [
        pytest.param("hadamard_int4", "two_shot", "bfloat16", 10_000, marks=pytest.mark.quick),
        ("hadamard_int4", "one_shot", "float32", 10_000),
        *((codec, "two_shot", "int8", 2_000) for codec in CODED),
        ("int4", "one_shot", "bfloat16", 2_000),
    ],
)
def test_what_is_owed_stays_below_its_bound_over_ten_thousand_calls(codec, algorithm, residual, calls):
    """Ten thousand of the default code; the worst is reached long before, so others are shorter (all of them: soak)."""
    _check_bound(codec, algorithm, residual, calls)


@pytest.mark.soak
@pytest.mark.parametrize("residual", residuals.FORMATS)
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
@pytest.mark.parametrize("codec", CODED)
def test_what_is_owed_stays_below_its_bound_over_a_million_calls(codec, algorithm, residual):
    _check_bound(codec, algorithm, residual, 1_000_000)


@pytest.mark.parametrize("residual", residuals.FORMATS)
@pytest.mark.parametrize("codec", CODECS)
def test_over_ten_thousand_calls_the_mean_of_what_is_lost_and_of_what_is_rounded_is_zero(codec, residual):
    """No bias, neither of the codes nor of kept residuals: both means are within 4 standard errors of zero.

    Rounded: a call's y less what it should have delivered. Lost: what the call neither delivered nor owes.
    """
    config = EchoConfig(codec, 32, algorithm="two_shot", residual=residual)
    calls, shape = 10_000, (2, 64)

    def stream(key):
        rank = lax.axis_index("tp")
        state = echo_jax.init_state(jax.ShapeDtypeStruct(shape, jnp.float32), "tp", config)

        def call(carry, key):
            state, sums = carry
            x = jax.random.normal(jax.random.fold_in(key, rank), shape)
            y, after = echo_jax.echo_psum(x, "tp", state, config)
            due = lax.psum(CODECS[codec].rotate(state.layout.to_chunks(x)) + state.errors()[0], "tp")
            delivered = CODECS[codec].rotate(state.layout.to_chunks(y))
            rounded = delivered - due
            lost = rounded + lax.psum(after.errors()[0], "tp")
            found = jnp.stack([rounded.mean(), lost.mean(), (rounded**2).mean(), (lost**2).mean()])
            return (after, sums + found), None

        (_, sums), _ = lax.scan(call, (state, jnp.zeros(4)), jax.random.split(key, calls))
        return sums / calls

    rounded, lost, *squares = np.asarray(on_ranks(stream, 2, "vmap")(jnp.stack([jax.random.key(3)] * 2)))[0]
    for mean, square in zip((rounded, lost), squares, strict=True):
        # Errors of one call and the next are anticorrelated where they are fed back: independent ones have the larger
        # standard error. 2**-30 is of float32's own roundings, which the mean of `lost` has where nothing is lost.
        assert abs(mean) <= 4 * np.sqrt(square / (calls * np.prod(shape))) + 2.0**-30


@functools.cache
def _stream_errors(config: EchoConfig) -> np.ndarray:
    """[5 seeds, 512]: rms error of the running value after each layer, for sums of equal size from every layer."""

    def stream(key):
        x = jax.ShapeDtypeStruct((8, 256), jnp.float32)

        def layer(carry, key):
            value, exact, state = carry
            x = jax.random.normal(jax.random.fold_in(key, lax.axis_index("tp")), (8, 256))
            y, state = echo_jax.echo_psum(x, "tp", state, config)
            value, exact = value + y, exact + lax.psum(x, "tp")
            return (value, exact, state), jnp.sqrt(((value - exact) ** 2).mean())

        start = jnp.zeros((8, 256)), jnp.zeros((8, 256)), echo_jax.init_state(x, "tp", config)
        return lax.scan(layer, start, jax.random.split(key, 512))[1]

    keys = jax.random.split(jax.random.key(0), 5)
    seeds = jax.vmap(jax.vmap(stream, in_axes=None, out_axes=None, axis_name="tp", axis_size=RANKS))
    return np.asarray(jax.jit(seeds)(keys))


@pytest.mark.parametrize("codec", ["hadamard_int4", "int4"])
def test_the_error_of_512_layers_is_at_most_a_tenth_above_that_of_8(codec):
    errors = np.median(_stream_errors(EchoConfig(codec, algorithm="two_shot")), axis=0)
    assert errors[511] <= 1.1 * errors[7]


def test_without_feedback_the_error_grows_with_depth():
    """Independent errors add up to sqrt(512 / 8) = 8 times as much; half of that would be growth enough."""
    errors = np.median(_stream_errors(EchoConfig(algorithm="two_shot", feedback=False)), axis=0)
    assert errors[511] >= 4 * errors[7]
    fed_back = np.median(_stream_errors(EchoConfig(algorithm="two_shot")), axis=0)
    assert errors[511] >= 10 * fed_back[511]
