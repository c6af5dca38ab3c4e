"""Promise 1: what a call does not deliver it still owes. sum x + sum e = y + sum e', for every code and algorithm."""

import dataclasses

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    DTYPES,
    KINDS,
    MODES,
    RANKS,
    ROUNDING,
    assert_conserved,
    assert_equal_on_ranks,
    compiled_psum,
    conservation_error,
    on_ranks,
    owed,
    partials,
    residual_slack,
    zero_state,
)
from hypothesis import strategies as st
from jax import lax

import echo_jax
from echo_jax import EchoConfig, residuals
from echo_jax.codecs import CODECS

# One value, odd, not a multiple of anything, a scalar, columns owned by ranks 1, 2 and 4, rows of whole groups, flat.
SHAPES = ((1,), (), (7,), (3, 5, 11), (2, 128), (3, 96), (300,), (5, 33))

dtypes = st.sampled_from(DTYPES)
formats = st.sampled_from(residuals.FORMATS)
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot", "exact"])
@pytest.mark.parametrize("codec", CODECS)
# Shrinking would compile another program for every attempt.
@hypothesis.settings(max_examples=3, derandomize=True, deadline=None, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_no_value_is_lost_whatever_the_code(codec, algorithm, data):
    ranks, mode, dtype = data.draw(st.sampled_from(RANKS)), data.draw(st.sampled_from(MODES)), data.draw(dtypes)
    config = EchoConfig(
        codec, data.draw(st.sampled_from((32, 64, 128))), algorithm=algorithm, residual=data.draw(formats)
    )
    shape, kind = (ranks, *data.draw(st.sampled_from(SHAPES))), data.draw(st.sampled_from(KINDS))
    scale = 10.0 ** data.draw(st.integers(-3, 3) if dtype == "float16" else st.integers(-20, 20))
    call = compiled_psum(config, ranks, mode)

    x = partials(data.draw(seeds), shape, kind, scale, dtype)
    state = zero_state(x, config)
    for step in range(3):
        before, (y, state) = state, call(x, state)
        assert y.shape == x.shape and y.dtype == x.dtype and state.layout == before.layout
        assert_conserved(x, before, y, state, exact=algorithm == "exact" or ranks == 1)
        x = partials(step, shape, "normal", scale, dtype)


@pytest.mark.quick
@pytest.mark.parametrize("codec", ["hadamard_int4", "hadamard_int4.5", "int8"])
@pytest.mark.parametrize("residual", residuals.FORMATS)
@hypothesis.settings(max_examples=30, derandomize=True, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(KINDS), log_scale=st.floats(-20, 20), other=st.floats(-20, 20)
)
def test_no_value_is_lost_whatever_the_values(codec, residual, seed, kind, log_scale, other):
    """Each example is two calls of very different scales: the second may be far smaller than what the first left."""
    config = EchoConfig(codec, algorithm="two_shot", residual=residual)
    call = compiled_psum(config, 3, "vmap")
    x = partials(seed, (3, 2, 200), kind, 10.0**log_scale)
    before = zero_state(x, config)
    y, after = call(x, before)
    assert_conserved(x, before, y, after)
    x = partials(seed + 1, (3, 2, 200), "normal", 10.0**other)
    y, last = call(x, after)
    assert_conserved(x, after, y, last)


def test_with_float32_residuals_nothing_but_float32_rounding_is_lost():
    """The allowance in numbers: a code of 4 bits is off by percents, conservation by less than 1e-6 of the largest.

    Measured 1.2e-7; 2**-20 leaves room for another order of summation, and is far below bfloat16 (2e-3) or TF32 (5e-4).
    """
    config = EchoConfig(algorithm="two_shot", residual="float32")
    x = partials(0, (4, 8, 512))
    before = zero_state(x, config)
    y, after = compiled_psum(config, 4)(x, before)
    error, _ = conservation_error(x, before, y, after)
    assert error.max() <= 2.0**-20 * np.abs(x).max()
    assert np.abs(x.sum(0) - np.asarray(y[0])).max() > 0.01 * np.abs(x).max()


@pytest.mark.quick
@pytest.mark.parametrize("residual", residuals.FORMATS)
def test_calls_of_any_algorithm_can_follow_each_other_in_one_stream_and_nothing_is_lost(residual):
    """Over a run of calls the law telescopes: the sum of all y and what is owed at the end is the sum of all x."""
    calls = [
        EchoConfig("int4", algorithm="two_shot", residual=residual),
        EchoConfig("int4", algorithm="one_shot", residual=residual),
        EchoConfig("int8", algorithm="two_shot", residual=residual),
        EchoConfig("int4", algorithm="exact", residual=residual),
        EchoConfig("none", algorithm="one_shot", residual=residual),
        EchoConfig("int4", algorithm="two_shot", residual=residual),
    ]

    def stream(xs, state):
        ys = []
        for x, config in zip(xs, calls, strict=True):
            y, state = echo_jax.echo_psum(x, "tp", state, config)
            ys.append((y, state))
        return ys

    xs = np.stack([partials(seed, (4, 3, 70)) for seed in range(len(calls))], 1)
    before = zero_state(xs[:, 0], calls[0])
    total, slack = np.zeros((3, 70)), np.zeros((3, 70))
    for step, (y, after) in enumerate(on_ranks(stream, 4)(xs, before)):
        assert_conserved(xs[:, step], before, y, after, exact=calls[step].algorithm == "exact")
        if calls[step].algorithm == "exact":
            assert not np.asarray(after.residual).any()
        before, total, slack = after, total + np.float64(y[0]), slack + residual_slack(after).sum(0)
    # The calls' own allowances add up: values up to 4, 6 calls, about 16 float32 roundings each.
    lost = np.abs(np.float64(xs).sum((0, 1)) - total - owed(after).sum(0))
    assert (lost <= slack + 4 * 6 * 16 * 2.0**-24).all()


@pytest.mark.parametrize("codec", ["hadamard_int4", "int4"])
def test_over_two_hundred_calls_the_law_telescopes(codec):
    config = EchoConfig(codec, algorithm="two_shot", residual="float32")

    def stream(xs, state):
        def layer(carry, x):
            total, state = carry
            y, state = echo_jax.echo_psum(x, "tp", state, config)
            return (total + y, state), None

        (total, state), _ = lax.scan(layer, (jnp.zeros(xs.shape[1:]), state), xs)
        settled, empty = echo_jax.flush(total, "tp", state, config)
        return total, state, settled, empty

    xs = partials(0, (3, 200, 384))
    total, state, settled, empty = on_ranks(stream, 3, "no_check_vma")(xs, zero_state(xs[:, 0], config))
    wanted = np.float64(xs).sum((0, 1))
    # 200 float32 additions to a running value below 8, and 200 calls of about 1e-7 of values below 1 x 3 ranks.
    allowed = 200 * (8 * 2.0**-24 + 3e-7)
    np.testing.assert_allclose(np.float64(total[0]) + owed(state).sum(0), wanted, rtol=0, atol=allowed)
    np.testing.assert_allclose(np.float64(settled[0]), wanted, rtol=0, atol=allowed)
    assert np.abs(np.float64(total[0]) - wanted).max() > 10 * allowed
    assert not np.asarray(empty.residual).any()


@pytest.mark.quick
@pytest.mark.parametrize(("dtype", "mode"), list(zip(DTYPES, MODES, strict=True)))
def test_a_flush_delivers_all_that_is_owed_and_leaves_nothing(mode, dtype):
    config = EchoConfig(algorithm="two_shot", residual="float32")

    def two_calls(x, state):
        y, owing = echo_jax.echo_psum(x, "tp", state, config)
        return y, owing, echo_jax.flush(y, "tp", owing, config)

    x = partials(1, (5, 3, 43), dtype=dtype)
    y, owing, (settled, empty) = on_ranks(two_calls, 5, mode)(x, zero_state(x, config))
    debt = owed(owing)
    # The debts are rounded to y's dtype, summed in it in 4 additions, added to y and rounded once more; y itself was
    # rounded when it was cast. Nothing is larger than the sum of all magnitudes.
    allowed = ROUNDING[dtype] * (8 * np.abs(debt).sum(0) + 2 * np.abs(np.float64(y[0]))) + 1e-6
    wanted = np.float64(x).sum(0)
    assert (np.abs(np.float64(settled[0]) - wanted) <= allowed).all()
    assert settled.dtype == x.dtype and not np.asarray(empty.residual).any()
    assert np.abs(np.float64(y[0]) - wanted).max() > 2 * allowed.max()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("mode", ["check_vma", "vmap"])
def test_a_coded_flush_delivers_what_it_takes_from_the_state_and_leaves_its_own_rounding_errors(codec, mode):
    config = EchoConfig(codec, group_size=64, algorithm="two_shot", residual="float32")

    def two_calls(x, state):
        y, owing = echo_jax.echo_psum(x, "tp", state, config)
        debt, _ = echo_jax.echo_psum(jnp.zeros_like(x), "tp", owing, config)
        settled, rest = echo_jax.flush(y, "tp", owing, config, exact=False)
        return y, owing, settled, rest, debt

    x = partials(1, (5, 3, 640))
    y, owing, settled, rest, debt = on_ranks(two_calls, 5, mode)(x, zero_state(x, config))
    assert_equal_on_ranks(settled)
    assert_conserved(np.zeros_like(x), owing, debt, rest)
    np.testing.assert_array_equal(settled, y + debt)
    before, after = (np.sqrt((owed(state) ** 2).mean()) for state in (owing, rest))
    # A debt is spread over its range as evenly as partials are, or more: coding it leaves no larger a share of it.
    assert after <= 2 * CODECS[codec].error_bound(x.dtype) * before


def test_without_feedback_nothing_is_kept_and_a_flush_changes_nothing():
    config = EchoConfig(feedback=False, algorithm="two_shot")

    def call(x):
        y, state = echo_jax.echo_psum(x, "tp", echo_jax.init_state(x, "tp", config), config)
        assert state is None
        return y, echo_jax.flush(y, "tp", None, config)[0]

    x = partials(2, (2, 256))
    y, flushed = on_ranks(call, 2)(x)
    with_feedback = dataclasses.replace(config, feedback=True)
    first, _ = compiled_psum(with_feedback, 2)(x, zero_state(x, with_feedback))
    np.testing.assert_array_equal(y, first)
    np.testing.assert_array_equal(y, flushed)
