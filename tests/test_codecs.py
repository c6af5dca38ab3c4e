"""The codes by themselves, and promise 10: any magnitude keeps its relative error."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import KINDS, ROUNDING, compiled_psum, on_ranks, partials, zero_state
from hypothesis import strategies as st

from echo_jax import EchoConfig, echo_psum
from echo_jax.codecs import CODECS
from echo_jax.codecs.rotation import hadamard_matrix, rotate, rotate_back

RANKS, GROUP = 3, 64
GRIDS = tuple(name for name, codec in CODECS.items() if codec.grid is not None)
scales = st.floats(-30, 30).map(lambda e: 10.0**e)
seeds = st.integers(0, 2**32 - 1)


@functools.cache
def _round_trip(codec, dtype="float32"):
    """float32[groups, g] -> (values after a round trip, codes, scales)."""

    def run(v):
        wire = CODECS[codec].encode(v, dtype)
        codes, scale = CODECS[codec].decode(wire, *v.shape, dtype)
        return codes * scale, codes, scale

    return jax.jit(run)


@pytest.mark.quick
@pytest.mark.parametrize("codec", GRIDS)
@hypothesis.settings(max_examples=60, derandomize=True, deadline=None)
@hypothesis.given(seed=seeds, kind=st.sampled_from(KINDS), scale=scales)
def test_a_round_trip_is_off_by_at_most_the_stated_bound(codec, seed, kind, scale):
    v = partials(seed, (16, GROUP), kind, scale)
    rounded, codes, _ = _round_trip(codec)(v)
    largest = np.abs(np.float64(v)).max(-1, keepdims=True)
    bound = CODECS[codec].error_bound("float32")
    # Beside the bound: float32 arithmetic, about 4 roundings of 2**-24.
    assert (np.abs(np.float64(v) - np.float64(rounded)) <= (bound + 4 * 2.0**-24) * largest).all()
    grid = CODECS[codec].grid
    assert np.asarray(codes).min() >= grid.low and np.asarray(codes).max() <= grid.high


@pytest.mark.parametrize("codec", GRIDS)
def test_the_stated_bound_holds_for_values_that_an_adversary_picks(codec):
    """On the borders of codes, beside one huge value, all equal, of alternating signs, subnormal, negative zeros."""
    grid = CODECS[codec].grid
    half_steps = np.arange(GROUP) % (2 * grid.levels) / 2 + grid.low - 0.5
    rows = [half_steps * scale for scale in (1, -1, 1 / 3, 1.00390625, 1e-20, 3e30)]
    rows += [np.full(GROUP, value) for value in (1, -1, 1e-38, 1e-45, 3e38, -0.0, 1 / 3)]
    rows += [
        np.where(np.arange(GROUP) % 2, a, b) for a, b in ((1, -1), (-1, 1), (1, -0.99), (1e-42, -1e-42), (0, -0.0))
    ]
    rows += [np.where(np.arange(GROUP) == 9, huge, 1.0) for huge in (1e4, -1e4, 1e30, -1e30, 8.5, -8.5)]
    v = np.stack(rows).astype(np.float32)
    rounded = np.asarray(_round_trip(codec)(v)[0])
    largest = np.abs(np.float64(v)).max(-1, keepdims=True)
    sent = largest[:, 0] >= 2.0**-125 * grid.high  # below, a group is sent as zeros
    error = np.abs(np.float64(v) - np.float64(rounded))
    assert (error <= (grid.error_bound + 4 * 2.0**-24) * largest)[sent].all()
    assert not rounded[~sent].any() and (~sent).sum() >= 4
    assert np.isfinite(rounded).all()


@pytest.mark.parametrize("codec", GRIDS)
def test_what_a_code_says_is_rounded_to_itself(codec):
    """Under its own scale, any scale: decoding and rounding again changes no code."""
    grid = CODECS[codec].grid
    whole = np.arange(grid.low, grid.high + 1, dtype=np.float32)
    scale = np.float32(jnp.asarray(np.geomspace(1e-30, 1e30, 4001), jnp.bfloat16))[:, None]
    again = jax.jit(lambda v, scale: jnp.trunc(v * (1.0 / scale) + (0.5 - grid.low)) + grid.low)(whole * scale, scale)
    np.testing.assert_array_equal(again, np.broadcast_to(whole, again.shape))


@pytest.mark.parametrize("codec", ["int4", "int8"])
def test_codes_whose_largest_value_sets_the_scale_send_what_they_said_unchanged(codec):
    """The others do not: they clip the largest by up to half a step, so that what they said asks for a finer step."""
    once = np.asarray(_round_trip(codec)(partials(4, (200, GROUP), "heavy-tailed"))[0])
    np.testing.assert_array_equal(_round_trip(codec)(once)[0], once)


@pytest.mark.parametrize("codec", GRIDS)
def test_the_stated_bound_is_reached_within_a_tenth(codec):
    """A bound that nothing comes near would let a worse code pass the tests that lean on it."""
    v = partials(0, (2000, GROUP))
    top = np.linspace(1, 2, len(v), dtype=np.float32)  # all positions between two bfloat16 scales
    v[:, 0], v[:, 1] = top, -top
    rounded, _, _ = _round_trip(codec)(v)
    reached = (np.abs(v - rounded) / np.abs(v).max(-1, keepdims=True)).max()
    assert reached > 0.9 * CODECS[codec].error_bound("float32")


def test_the_full_range_code_uses_both_ends_of_its_range():
    codes = np.asarray(_round_trip("hadamard_int4")(partials(1, (500, GROUP)))[1])
    assert codes.min() == -8 and codes.max() == 7
    # The largest magnitude of a group meets the longer side, whatever its sign.
    v = np.zeros((2, GROUP), np.float32)
    v[0, 3], v[1, 3] = 8.5, -8.5
    rounded, codes, scale = _round_trip("hadamard_int4")(v)
    np.testing.assert_array_equal(np.asarray(codes)[:, 3], [-8, -8])
    np.testing.assert_array_equal(np.sign(scale)[:, 0], [-1, 1])
    np.testing.assert_array_equal(np.asarray(rounded)[:, 3], [8, -8])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_code_none_rounds_to_the_dtype_of_x_and_no_further(dtype):
    v = partials(2, (4, GROUP))
    rounded, _, _ = _round_trip("none", dtype)(v)
    np.testing.assert_array_equal(rounded, v.astype(dtype).astype(np.float32))
    assert (np.abs(v - rounded) <= CODECS["none"].error_bound(dtype) * np.abs(v).max(-1, keepdims=True)).all()
    assert CODECS["none"].error_bound(dtype) == ROUNDING[dtype]


@pytest.mark.quick
@pytest.mark.parametrize("codec", GRIDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_with_a_nonfinite_value_decodes_to_nan_and_its_neighbours_do_not_notice(codec, bad):
    """In more than one shape: XLA's CPU backend loses a NaN in a maximum over the last axis of this one."""
    v = partials(3, (4, 48, GROUP))

    def run(v):
        codes, scale = CODECS[codec].decode(CODECS[codec].encode(v, "float32"), *v.shape[-2:], "float32")
        return codes * scale

    compiled = jax.jit(run)
    clean = np.asarray(compiled(v))
    for row in (0, 1, 47):
        dirty = v.copy()
        dirty[1, row, 8] = bad
        rounded = np.array(compiled(dirty))
        assert np.isnan(rounded[1, row]).all()
        rounded[1, row] = clean[1, row]
        np.testing.assert_array_equal(rounded, clean)


@pytest.mark.parametrize("size", [16, 32, 128, 1024])
def test_the_rotation_is_undone_exactly_for_whole_numbers_and_to_rounding_for_others(size):
    matrix = hadamard_matrix(size)
    np.testing.assert_array_equal(matrix @ matrix, size * np.eye(size))
    np.testing.assert_array_equal(matrix, matrix.T)
    codes = np.random.default_rng(0).integers(-8, 8, (50, size)).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(rotate_back)(codes), codes.astype(np.int64) @ matrix.astype(np.int64))
    np.testing.assert_array_equal(jax.jit(rotate)(jax.jit(rotate_back)(codes)), codes)
    x = partials(1, (50, size))
    z = np.asarray(jax.jit(rotate)(x))
    assert np.abs(z).max() <= np.abs(x).max()
    # Each of the two sums of `size` terms rounds like a random walk: sqrt(size) * 2**-24 each, 4 standard deviations.
    np.testing.assert_allclose(rotate_back(z), x, rtol=0, atol=8 * size**0.5 * 2.0**-24 * np.abs(x).max())


@pytest.mark.quick
@pytest.mark.parametrize("codec", ["hadamard_int4", "none"])
def test_the_rotation_of_values_asks_for_full_float32_precision(codec):
    """A GPU would otherwise round them to TF32, where the residual cannot see it."""
    text = (
        jax.jit(lambda x: CODECS[codec].rotate_back(CODECS[codec].rotate(x))).lower(np.zeros((4, 64), "f4")).as_text()
    )
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == (2 if codec == "hadamard_int4" else 0)
    assert all("HIGHEST" in line for line in products)


# --- promise 10: magnitudes, through a whole call --------------------------------------------------------------------


def _relative_error(codec, x):
    """[groups]: largest error of each group of a call's result over its largest sum of magnitudes."""
    config = EchoConfig(codec, GROUP, algorithm="two_shot")
    y, state = compiled_psum(config, RANKS, "vmap")(x, zero_state(x, config))
    y, exact = np.float64(y)[0].reshape(-1, GROUP), np.float64(x).sum(0).reshape(-1, GROUP)
    total = np.abs(np.float64(x)).reshape(RANKS, -1, GROUP).max(-1).sum(0)
    return np.abs(y - exact).max(-1) / total, y, state


@pytest.mark.quick
@pytest.mark.parametrize("codec", GRIDS)
@hypothesis.settings(max_examples=30, derandomize=True, deadline=None)
@hypothesis.given(seed=seeds, exponents=st.lists(st.floats(-30, 30), min_size=12, max_size=12))
def test_groups_of_any_magnitude_beside_each_other_keep_their_relative_error(codec, seed, exponents):
    x = partials(seed, (RANKS, 12, GROUP))
    x /= np.abs(x).max(-1, keepdims=True)
    at_one, _, _ = _relative_error(codec, x)
    x *= np.float32(10.0) ** np.float32(exponents)[:, None]
    error, _, _ = _relative_error(codec, x)
    # Two roundings (c, and c of sums of magnitudes that are up to 1 + c times as large); a rotated error may meet
    # itself in one value, at worst as a sum of g: but in units in which values are sqrt(g) smaller, 4 standard
    # deviations of a uniform error (1 / sqrt 3) are a safe largest of 64 values.
    c = CODECS[codec].error_bound("float32")
    limit = c * (2 + c)
    if CODECS[codec].rotated:
        limit *= 4 / 3**0.5 * 2
    assert (error <= limit).all()
    # And as large as at magnitude 1, or so: only the place between two bfloat16 scales differs.
    assert np.median(error) <= 2 * np.median(at_one)


@pytest.mark.quick
@pytest.mark.parametrize("codec", GRIDS)
def test_scaling_by_a_power_of_two_scales_result_and_residual_and_changes_no_other_bit(codec):
    config = EchoConfig(codec, GROUP, algorithm="two_shot", residual="float32")
    call = compiled_psum(config, RANKS, "vmap")
    x = partials(6, (RANKS, 6, GROUP))
    y, state = call(x, zero_state(x, config))
    for exponent in (-60, -20, 20, 100):
        factor = np.float32(2.0**exponent)
        scaled, scaled_state = call(x * factor, zero_state(x, config))
        np.testing.assert_array_equal(scaled, np.asarray(y) * factor)
        np.testing.assert_array_equal(scaled_state.residual, np.asarray(state.residual) * factor)


@pytest.mark.parametrize("mode", ["check_vma", "vmap"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_group_of_zeros_stays_exactly_zero_and_owes_nothing(codec, mode):
    config = EchoConfig(codec, GROUP, algorithm="two_shot")
    x = partials(7, (RANKS, 6, GROUP), scale=1e6)
    x[:, 2] = 0
    y, state = compiled_psum(config, RANKS, mode)(x, zero_state(x, config))
    assert not np.asarray(y)[:, 2].any() and np.asarray(y)[:, 1].any()
    # Rows of one group, three ranks: chunk 1 is rows 2 and 3.
    assert not np.float32(state.residual)[:, 0, 1, 0].any()


@pytest.mark.quick
@pytest.mark.parametrize("codec", GRIDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("largest", [333_824.0, 1e9, 1e30])
def test_large_activations_do_not_overflow_where_the_result_s_dtype_holds_them(dtype, largest, codec):
    """333,824 is an activation of a real model after its all-reduce: five times what float16 can hold."""
    x = partials(8, (RANKS, 6, GROUP), scale=largest / RANKS)
    x[:, 0, 0] = largest / RANKS
    config = EchoConfig(codec, GROUP, algorithm="two_shot")
    y, state = compiled_psum(config, RANKS, "vmap")(x.astype(dtype), zero_state(x, config))
    assert np.isfinite(np.float32(y)).all() and np.isfinite(np.float32(state.residual)).all()
    np.testing.assert_allclose(np.float64(y)[0, 0, 0], largest, rtol=0.25)


def test_small_values_do_not_vanish_beside_large_rows():
    x = partials(9, (RANKS, 6, GROUP))
    x[:, 3] *= 1e-25
    error, y, _ = _relative_error("hadamard_int4", x)
    assert np.abs(y[3]).max() > 1e-26 and error[3] < 0.5


def test_the_sum_is_accumulated_in_float32_for_every_dtype():
    """8 ranks of bfloat16 values, 256 and seven times 1: in bfloat16 sums 256 + 1 would stay 256."""
    config = EchoConfig("none", GROUP, algorithm="two_shot", feedback=False)
    x = np.ones((8, 1024), jnp.bfloat16)
    x[0] = 256
    y = on_ranks(lambda x: echo_psum(x, "tp", None, config)[0], 8, "vmap")(x)
    # 263 lies between 262 and 264, the nearest values of bfloat16.
    assert set(np.float32(y).reshape(-1)) <= {262.0, 264.0}
