"""Promise 12: where ranks own columns, a row's result and residual depend on that row alone."""

import hypothesis
import numpy as np
import pytest
from helpers import compiled_psum, kept_errors, partials, zero_state
from hypothesis import strategies as st

from echo_jax import EchoConfig
from echo_jax.layout import Layout

RANKS, GROUP, COLUMNS = 4, 64, 512
CONFIGS = [
    EchoConfig(codec, GROUP, algorithm=algorithm)
    for codec, algorithm in [
        ("hadamard_int4", "two_shot"),
        ("hadamard_int4", "one_shot"),
        ("int8", "two_shot"),
        ("none", "one_shot"),
    ]
]
each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.codec} {c.algorithm}")


def _residual_by_row(state):
    """[ranks, rows, values]: what every rank owes for each row."""
    residual = kept_errors(state)  # [ranks, n, G, g]: with columns owned, G runs over rows first
    rows = state.layout.shape[-2]
    by_row = residual.reshape(len(residual), RANKS, rows, -1).swapaxes(1, 2)
    return by_row.reshape(len(residual), rows, -1)


def _two_calls(config, x):
    """y of the second of two calls, one rank's copy, and what is owed for each row."""
    call = compiled_psum(config, RANKS, "vmap")
    _, state = call(x, zero_state(x, config))
    y, state = call(x, state)
    assert state.layout.scheme == "columns"
    return np.asarray(y)[0], _residual_by_row(state)


@pytest.mark.quick
@each_config
@hypothesis.settings(max_examples=15, derandomize=True, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), order=st.permutations(range(6)))
def test_permuting_or_replacing_other_rows_leaves_a_row_bit_identical(config, seed, order):
    x = partials(seed, (RANKS, 6, COLUMNS), "heavy-tailed")
    y, owing = _two_calls(config, x)
    permuted, owing_permuted = _two_calls(config, x[:, order])
    np.testing.assert_array_equal(permuted, y[order])
    np.testing.assert_array_equal(owing_permuted, owing[:, order])

    replaced = partials(seed + 1, x.shape, scale=1e6)
    replaced[:, 2] = x[:, 2]
    other, owing_other = _two_calls(config, replaced)
    np.testing.assert_array_equal(other[2], y[2])
    np.testing.assert_array_equal(owing_other[:, 2], owing[:, 2])
    assert (other[1] != y[1]).any()


@each_config
def test_adding_or_removing_rows_leaves_the_others_bit_identical(config):
    """Other numbers of rows are other compiled programs, whose matrix products may be cut otherwise."""
    x = partials(3, (RANKS, 33, COLUMNS))
    y, owing = _two_calls(config, x)
    for rows in (1, 7):
        fewer, owing_fewer = _two_calls(config, x[:, :rows])
        np.testing.assert_array_equal(fewer, y[:rows])
        np.testing.assert_array_equal(owing_fewer, owing[:, :rows])


@each_config
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_stays_in_its_row(config, bad):
    x = partials(4, (RANKS, 6, COLUMNS))
    y, owing = _two_calls(config, x)
    x[1, 3, 200] = bad
    with_bad, owing_bad = _two_calls(config, x)
    others = np.arange(6) != 3
    np.testing.assert_array_equal(with_bad[others], y[others])
    np.testing.assert_array_equal(owing_bad[:, others], owing[:, others])
    assert not np.isfinite(with_bad[3]).all()


def test_leading_axes_are_rows_too():
    config = CONFIGS[0]
    x = partials(5, (RANKS, 6, COLUMNS))
    y, _ = _two_calls(config, x)
    call = compiled_psum(config, RANKS, "vmap")
    cube = x.reshape(RANKS, 2, 3, COLUMNS)
    _, state = call(cube, zero_state(cube, config))
    again, _ = call(cube, state)
    np.testing.assert_array_equal(np.asarray(again)[0].reshape(6, COLUMNS), y)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("shape", "group_size", "ranks", "scheme", "group"),
    [
        ((6, 512), 128, 4, "columns", 128),
        ((6, 512), 128, 8, "rows", 128),  # 64 columns a rank are half a group
        ((6, 512), 64, 8, "columns", 64),
        ((6, 512), 128, 3, "rows", 128),
        ((6, 96), 128, 3, "columns", 32),  # 32 is the largest power of two that divides 96
        ((6, 2, 160), 128, 5, "columns", 32),
        ((6, 48), 128, 2, "flat", 128),  # 16 divides 48, but is below 32
        ((7,), 128, 2, "flat", 128),
        ((), 32, 2, "flat", 32),
    ],
)
def test_no_group_crosses_a_row_unless_only_small_groups_divide_it(shape, group_size, ranks, scheme, group):
    layout = Layout.of(shape, "tp", ranks, EchoConfig(group_size=group_size))
    assert (layout.scheme, layout.group_size) == (scheme, group)
    # Each value is in one place, and in columns rank j has columns [j d / n, (j + 1) d / n) of every row.
    x = np.arange(layout.size, dtype=np.float32).reshape(shape) + 1
    chunks = np.asarray(layout.to_chunks(x))
    assert chunks.shape == layout.chunks_shape == (ranks, layout.groups, group)
    np.testing.assert_array_equal(layout.from_chunks(chunks), x)
    assert sorted(chunks[chunks > 0]) == sorted(x.reshape(-1))
    if scheme == "columns":
        width = shape[-1] // ranks
        for rank in range(ranks):
            np.testing.assert_array_equal(
                chunks[rank].reshape(-1), x[..., rank * width : (rank + 1) * width].reshape(-1)
            )
    if scheme != "flat":
        rows = (chunks - 1) // shape[-1]
        assert (rows.max(-1) == rows.min(-1))[chunks.min(-1) > 0].all()
