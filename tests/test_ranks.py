"""Promise 2: the result is equal to the last bit on all ranks, also when the ranks are spread over other processes."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import numpy as np
import processes
import pytest
from helpers import (
    DTYPES,
    MODES,
    assert_equal_on_ranks,
    assert_same_bits,
    compiled_psum,
    mesh_of,
    on_ranks,
    partials,
    zero_state,
)
from hypothesis import strategies as st

import echo_jax
from echo_jax import EchoConfig

TWO_SHOT, ONE_SHOT = EchoConfig(algorithm="two_shot"), EchoConfig(algorithm="one_shot")


@pytest.mark.parametrize(
    ("ranks", "mode"),
    [(2, "check_vma"), (3, "vmap"), (4, "no_check_vma"), (5, "check_vma"), (8, "check_vma"), (8, "no_check_vma")],
)
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_the_result_is_equal_to_the_last_bit_on_all_ranks(algorithm, mode, ranks):
    dtype = DTYPES[ranks % 3]
    config = EchoConfig(algorithm=algorithm)
    x = partials(ranks, (ranks, 3, 77), "heavy-tailed", dtype=dtype)
    y, state = compiled_psum(config, ranks, mode)(x, zero_state(x, config))
    assert_equal_on_ranks(y)
    y, _ = compiled_psum(config, ranks, mode)(x, state)
    assert_equal_on_ranks(y)


@hypothesis.settings(max_examples=40, derandomize=True, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1), log_scale=st.floats(-30, 30), bad=st.sampled_from((0.0, np.nan, np.inf))
)
def test_the_result_is_equal_on_all_ranks_for_any_values(seed, log_scale, bad):
    x = partials(seed, (8, 300), "heavy-tailed", 10.0**log_scale)
    x[seed % 8, seed % 300] += bad
    y, _ = compiled_psum(TWO_SHOT, 8, "no_check_vma")(x, zero_state(x, TWO_SHOT))
    assert_equal_on_ranks(y)


@pytest.mark.parametrize("config", [TWO_SHOT, ONE_SHOT], ids=["two_shot", "one_shot"])
def test_the_result_is_the_same_whatever_the_mode(config):
    """Sums are in rank order, codes are whole numbers. Only encoding may differ between compiled programs, in the last
    bit of what is coded: then a value between two codes takes the other one."""
    x = partials(7, (4, 6, 100))
    results = [compiled_psum(config, 4, mode)(x, zero_state(x, config)) for mode in MODES]
    for other in results[1:]:
        assert np.mean(np.asarray(other[0]) != np.asarray(results[0][0])) < 0.001


def test_a_settled_value_is_equal_on_all_ranks():
    def call(x, state):
        y, state = echo_jax.echo_psum(x, "tp", state, TWO_SHOT)
        return echo_jax.flush(y, "tp", state, TWO_SHOT)

    x = partials(8, (5, 200), dtype="bfloat16")
    settled, _ = on_ranks(call, 5)(x, zero_state(x, TWO_SHOT))
    assert_equal_on_ranks(settled)


@pytest.mark.quick
def test_the_result_has_the_same_bits_in_one_process_and_in_two(tmp_path):
    alone = processes.sums(mesh_of(tp=4))
    for results in _run_processes("sums", 2, tmp_path):
        assert set(results) == set(alone)
        for call, y in results.items():
            assert y.shape[0] == 2
            assert_same_bits([y[0], y[1]], [alone[call][0], alone[call][0]])


@pytest.mark.parametrize(
    ("count", "calls"), [(3, 30), *(pytest.param(n, 1000, marks=pytest.mark.soak) for n in (2, 3, 4, 6))]
)
def test_results_of_random_sizes_are_equal_in_all_processes(tmp_path, count, calls):
    first, *others = _run_processes("calls", count, tmp_path, str(calls), patience=180 + calls)
    assert len(set(first["digests"])) > 0.9 * calls  # some sums of a few values may be zero
    for other in others:
        np.testing.assert_array_equal(other["digests"], first["digests"])
    sizes = first["elements"]
    print(f"{count} processes, {calls} calls of {sizes.min()} to {sizes.max()} values: equal in all processes")


def _run_processes(
    what: str, count: int, folder: Path, *more: str, patience: float = 60
) -> list[dict[str, np.ndarray]]:
    """What each of `count` real processes got. Ends within `patience` seconds, whatever happens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    outs = [folder / f"{index}.npz" for index in range(count)]
    commands = [
        [sys.executable, processes.__file__, what, str(count), str(i), port, str(out), *more]
        for i, out in enumerate(outs)
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    workers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for command in commands
    ]
    deadline = time.monotonic() + patience
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=max(1.0, deadline - time.monotonic()))
            assert worker.returncode == 0, errors.decode()[-2000:]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    return [dict(np.load(out)) for out in outs]
