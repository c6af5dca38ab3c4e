"""Settling some rows alone: they get the bits of settling all, only they are sent, the others go on owing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MODES, assert_equal_on_ranks, assert_same_bits, on_ranks, owed, partials
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_jax
from echo_jax import EchoConfig, wire

# (x's shape, ranks, scheme): columns, rows with and without padding.
SHAPES = [((2, 5, 192), 3, "columns"), ((7, 96), 2, "rows"), ((6, 96), 4, "rows"), ((64,), 2, "columns")]
CONFIG = EchoConfig(group_size=32, algorithm="two_shot")


@functools.cache
def _flushed(config, ranks, mode, some):
    """(x, rows) -> a running value after two sums, all of it settled, its rows settled, both states."""

    def one_rank(x, rows):
        state = echo_jax.init_state(x, "tp", config)
        y, state = echo_jax.echo_psum(x, "tp", state, config)
        z, state = echo_jax.echo_psum(x * 0.7, "tp", state, config)
        h = y + z
        settled, _ = echo_jax.flush(h, "tp", state, config)
        picked = h.reshape(-1, h.shape[-1])[rows]
        some_rows, rest = echo_jax.flush(picked, "tp", state, config, rows=rows if some else None)
        return settled, some_rows, state, rest

    return on_ranks(one_rank, ranks, mode)


def _run(shape, ranks, rows, config=CONFIG, mode="check_vma", dtype="float32"):
    x = partials(0, (ranks, *shape), dtype=dtype)
    rows = np.broadcast_to(np.asarray(rows, np.int32), (ranks, *np.shape(rows)))
    return _flushed(config, ranks, mode, True)(x, rows)


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("shape", "ranks", "scheme"), SHAPES, ids=str)
def test_rows_get_the_bits_of_settling_everything(shape, ranks, scheme, mode):
    count = int(np.prod(shape[:-1]))
    rows = [count - 1, 0] if count > 1 else [0]
    settled, some, state, _ = _run(shape, ranks, rows, mode=mode)
    assert state.layout.scheme == scheme
    assert_same_bits(some, np.asarray(settled).reshape(ranks, count, -1)[:, rows])
    assert_equal_on_ranks(some)


@given(rows=st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True), codec=st.sampled_from(["int4", "none"]))
@settings(deadline=None, max_examples=30)
def test_only_those_rows_are_paid_and_the_others_go_on_owing(rows, codec):
    _, _, before, after = _run((2, 5, 192), 3, rows, EchoConfig(codec=codec, group_size=32, algorithm="two_shot"))
    debt, rest = (owed(state).reshape(3, 10, 192) for state in (before, after))
    assert not rest[:, rows].any()
    others = [row for row in range(10) if row not in rows]
    np.testing.assert_array_equal(rest[:, others], debt[:, others])


def test_indices_of_any_shape_give_rows_of_that_shape():
    settled, some, _, _ = _run((2, 5, 192), 3, [[4], [9]])
    assert some.shape == (3, 2, 1, 192)
    assert_same_bits(some[:, :, 0], np.asarray(settled)[:, :, 4])


def test_bfloat16_rows_stay_bfloat16():
    _, some, _, _ = _run((2, 5, 192), 3, [3], dtype="bfloat16")
    assert some.dtype == jnp.bfloat16


def test_only_the_rows_are_sent():
    def one_rank(x, rows):
        state = echo_jax.init_state(x, "tp", CONFIG)
        return echo_jax.flush(x[:1], "tp", state, CONFIG, rows=rows)[0]

    program = on_ranks(one_rank, 3)
    sent = wire.collectives(program, np.zeros((3, 40, 192), np.float32), np.zeros((3, 1), np.int32))
    assert [(c.kind, c.shape, c.dtype) for c in sent] == [("all_reduce", (1, 192), "float32")]


def test_without_feedback_nothing_is_owed_and_rows_come_back_as_they_are():
    plain = EchoConfig(feedback=False)
    y = partials(3, (2, 1, 96))
    program = on_ranks(lambda y, rows: echo_jax.flush(y, "tp", None, plain, rows=rows)[0], 2)
    assert_same_bits(program(y, np.zeros((2, 1), np.int32)), y)


@pytest.mark.parametrize(
    ("shape", "y_shape", "rows", "error", "message"),
    [
        ((4, 50), (1, 50), [0], ValueError, "flush: rows need a layout whose groups do not cross rows; found .*flat"),
        ((4, 96), (2, 96), [0], ValueError, r"flush: y must be rows of x, \(1, 96\); found \(2, 96\)"),
        ((4, 96), (1, 96), [0.0], TypeError, "flush: rows must be integers, found float32"),
    ],
)
def test_wrong_rows_are_refused(shape, y_shape, rows, error, message):
    def one_rank(x, y, rows):
        return echo_jax.flush(y, "tp", echo_jax.init_state(x, "tp", CONFIG), CONFIG, rows=rows)

    rows = np.asarray(rows, np.float32 if isinstance(rows[0], float) else np.int32)
    with pytest.raises(error, match=message):
        on_ranks(one_rank, 2)(
            np.zeros((2, *shape), np.float32), np.zeros((2, *y_shape), np.float32), np.stack([rows] * 2)
        )


def test_rows_without_a_state_are_refused_with_feedback():
    with pytest.raises(ValueError, match="flush: state must be the state from init_state with feedback=True"):
        on_ranks(lambda y: echo_jax.flush(y, "tp", None, CONFIG, rows=jnp.zeros(1, jnp.int32)), 2)(np.zeros((2, 1, 96)))


def test_rows_of_a_pytree_are_refused():
    def one_rank(x):
        state = echo_jax.init_state({"a": x}, "tp", CONFIG)
        return echo_jax.flush(x, "tp", state, CONFIG, rows=jnp.zeros(1, jnp.int32))

    with pytest.raises(TypeError, match="flush: state must be the EchoState of one array, found dict"):
        on_ranks(one_rank, 2)(np.zeros((2, 1, 96), np.float32))


def test_a_gradient_passes_the_settled_rows_as_if_nothing_were_owed():
    def one_rank(x):
        state = echo_jax.init_state(x, "tp", CONFIG)
        y, state = echo_jax.echo_psum(x, "tp", state, CONFIG)
        loss = lambda y: echo_jax.flush(y[1:2], "tp", state, CONFIG, rows=jnp.array([1]))[0].sum()  # noqa: E731
        return jax.grad(loss)(y)

    grad = np.asarray(on_ranks(one_rank, 2)(partials(1, (2, 3, 96))))
    assert (grad[:, 1] == 1).all() and not grad[:, [0, 2]].any()
