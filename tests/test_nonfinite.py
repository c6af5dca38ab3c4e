"""Promise 9: a NaN or an infinity comes out, on every rank and in its group only, and does not stay in the state."""

import numpy as np
import pytest
from helpers import DTYPES, assert_conserved, assert_equal_on_ranks, compiled_psum, on_ranks, partials, zero_state

import echo_jax
from echo_jax import EchoConfig

RANKS, SHAPE, GROUP = 4, (3, 256), 32
BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def _with_bad(x, bad, rank=2):
    """A bad value on one rank, at row 1, column 70: in the third group of 32, columns 64 to 95."""
    x = x.copy()
    x[rank, 1, 70] = bad
    return x


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("codec", ["hadamard_int4", "int4", "int8"])
@pytest.mark.parametrize("algorithm", [pytest.param("two_shot", marks=pytest.mark.quick), "one_shot"])
def test_a_nonfinite_value_makes_its_group_nan_on_every_rank_and_the_next_call_is_finite_and_loses_nothing(
    algorithm, codec, bad
):
    config = EchoConfig(codec, GROUP, algorithm=algorithm, residual="float32")
    call = compiled_psum(config, RANKS, "vmap")
    x = partials(0, (RANKS, *SHAPE))
    _, state = call(x, zero_state(x, config))
    for rank in range(RANKS):  # in two_shot, rank 1 is the owner of columns 64 to 127
        y, after = call(_with_bad(x, bad, rank), state)
        assert_equal_on_ranks(y)
        wanted = np.zeros(SHAPE, bool)
        wanted[1, 64:96] = True
        np.testing.assert_array_equal(np.isnan(y[0]), wanted)
        assert np.isfinite(np.asarray(y)[0][~wanted]).all()
        assert np.isfinite(after.residual).all()

        again, last = call(x, after)
        assert np.isfinite(again).all()
        assert_conserved(x, after, again, last)


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["check_vma", "no_check_vma"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nonfinite_value_comes_out_of_every_dtype_on_every_device(dtype, mode):
    config = EchoConfig(group_size=GROUP, algorithm="two_shot")
    x = partials(1, (RANKS, *SHAPE), dtype=dtype)
    y, state = compiled_psum(config, RANKS, mode)(_with_bad(x, np.nan), zero_state(x, config))
    assert_equal_on_ranks(y)
    assert np.isnan(np.float32(y)).sum() == RANKS * GROUP
    assert np.isfinite(np.float32(state.residual)).all()


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_the_code_none_passes_a_nonfinite_value_on_as_lax_psum_does(bad):
    config = EchoConfig("none", algorithm="two_shot")
    x = _with_bad(partials(2, (RANKS, *SHAPE)), bad)
    y, state = compiled_psum(config, RANKS, "vmap")(x, zero_state(x, config))
    np.testing.assert_array_equal(np.asarray(y)[0, 1, 70], np.float32(bad))
    assert np.isfinite(y).sum() == RANKS * (np.prod(SHAPE) - 1)
    assert np.isfinite(np.float32(state.residual)).all()


def test_an_exact_call_and_a_flush_pass_a_nonfinite_value_on_and_keep_a_finite_state():
    exact, coded = EchoConfig(algorithm="exact"), EchoConfig(algorithm="two_shot")

    def calls(x, bad):
        _, state = echo_jax.echo_psum(x, "tp", echo_jax.init_state(x, "tp", coded), coded)
        y, after = echo_jax.echo_psum(bad, "tp", state, exact)
        return y, after.residual, *echo_jax.flush(bad, "tp", state, coded)

    x = partials(3, (RANKS, *SHAPE))
    y, residual, flushed, state = on_ranks(calls, RANKS, "vmap")(x, _with_bad(x, np.inf))
    assert np.isinf(np.asarray(y)[:, 1, 70]).all() and np.isfinite(y).sum() == RANKS * (np.prod(SHAPE) - 1)
    assert np.isinf(np.asarray(flushed)[2, 1, 70])
    assert not np.asarray(residual).any() and not np.asarray(state.residual).any()


def test_infinities_of_both_signs_and_sums_that_overflow_are_not_finite_either():
    """What is finite on every rank may still overflow in the sum; it must not come out as a plausible number."""
    config = EchoConfig("int8", GROUP, algorithm="two_shot")
    x = partials(4, (RANKS, *SHAPE))
    x[0, 0, 0], x[1, 0, 0] = np.inf, -np.inf
    x[:, 2, 40] = 3e38
    y, state = compiled_psum(config, RANKS, "vmap")(x, zero_state(x, config))
    wanted = np.zeros(SHAPE, bool)
    wanted[0, :32] = wanted[2, 32:64] = True
    np.testing.assert_array_equal(~np.isfinite(np.asarray(y)[0]), wanted)
    assert np.isfinite(np.float32(state.residual)).all()


def test_residual_stats_count_the_groups_that_are_not_finite():
    config = EchoConfig(group_size=GROUP, algorithm="two_shot")

    def call(x):
        y, state = echo_jax.echo_psum(x, "tp", echo_jax.init_state(x, "tp", config), config)
        return echo_jax.residual_stats(y, state)

    clean = partials(5, (RANKS, *SHAPE))
    stats = on_ranks(call, RANKS)(_with_bad(clean, np.nan))
    np.testing.assert_array_equal(stats["nonfinite_groups"], np.ones(RANKS))
    assert np.isfinite(stats["relative_rms"]).all() and np.isfinite(stats["largest"]).all()
    assert not np.asarray(on_ranks(call, RANKS)(clean)["nonfinite_groups"]).any()


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_a_sum_that_overflows_float16_leaves_no_debt_that_would_spoil_the_next_ones(algorithm):
    config = EchoConfig(group_size=GROUP, algorithm=algorithm)
    x = partials(5, (RANKS, *SHAPE), dtype="float16")
    large = np.sign(x) * np.float16(65000)
    call = compiled_psum(config, RANKS, "check_vma")
    y, state = call(large, zero_state(x, config))
    assert not np.isfinite(y).all()
    finite_groups = np.isfinite(y[0]).reshape(SHAPE[0], -1, GROUP).all(-1)
    again, _ = call(x, state)
    again = np.float32(again[0]).reshape(SHAPE[0], -1, GROUP)[~finite_groups]
    wanted = np.float32(x).sum(0).reshape(SHAPE[0], -1, GROUP)[~finite_groups]
    # Both roundings of a fresh call: at most 0.0708 of a group's largest rotated value each, on every rank.
    assert np.abs(again - wanted).max() < 0.0708 * GROUP**0.5 * 2 * np.abs(np.float32(x)).sum(0).max()
