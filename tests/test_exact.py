"""Promise 5: exact calls have lax.psum's own bits when nothing is owed, and pay what is owed otherwise."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import DTYPES, MODES, ROUNDING, assert_same_bits, compiled_psum, on_ranks, owed, partials, zero_state
from jax import lax

import echo_jax
from echo_jax import EchoConfig

EXACT = EchoConfig(algorithm="exact")


@pytest.fixture
def awkward():
    """[4, 257] with -0, NaN, infinities and values that cancel."""
    x = partials(0, (4, 257), "heavy-tailed")
    x[:, 0] = -0.0
    x[1, 1], x[2, 2], x[3, 3] = np.nan, np.inf, -np.inf
    x[1, 4] = -x[0, 4]
    return x


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exact_call_that_owes_nothing_has_the_bits_of_lax_psum(dtype, mode, awkward):
    x = awkward.astype(dtype)
    wanted = on_ranks(lambda x: lax.psum(x, "tp"), 4, mode)(x)
    y, state = compiled_psum(EXACT, 4, mode)(x, zero_state(x, EXACT))
    assert_same_bits(y, wanted)
    assert_same_bits(state.residual, zero_state(x, EXACT).residual)


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_has_the_bits_of_lax_psum_whatever_the_algorithm(mode, awkward):
    x = awkward[:1]
    for algorithm in ("two_shot", "one_shot", "auto"):
        config = EchoConfig(algorithm=algorithm, min_elements=0)
        y, state = compiled_psum(config, 1, mode)(x, zero_state(x, config))
        assert_same_bits(y, x)
        assert not np.asarray(state.residual).any()


def test_sizes_under_the_gate_have_the_bits_of_lax_psum_and_the_gate_itself_does_not(awkward):
    wanted = on_ranks(lambda x: lax.psum(x, "tp"), 4)(awkward)
    under, at = EchoConfig(min_elements=258), EchoConfig(min_elements=257)
    assert_same_bits(compiled_psum(under, 4)(awkward, zero_state(awkward, under))[0], wanted)
    y, _ = compiled_psum(at, 4)(awkward, zero_state(awkward, at))
    assert (np.asarray(y) != np.asarray(wanted)).any()
    assert at.resolve(257, 4) == "two_shot" and under.resolve(257, 4) == "exact"


def test_an_empty_array_is_summed_to_an_empty_array():
    x = np.zeros((3, 0, 5), np.float32)
    y, _ = on_ranks(lambda x: echo_jax.echo_psum(x, "tp", None, EchoConfig(feedback=False)), 3)(x)
    assert y.shape == (3, 0, 5)


@pytest.mark.quick
@pytest.mark.parametrize(("dtype", "mode"), list(zip(DTYPES, MODES, strict=True)))
def test_an_exact_call_pays_what_is_owed(dtype, mode):
    two_shot = EchoConfig(algorithm="two_shot", residual="float32")
    exact = EchoConfig(algorithm="exact", residual="float32")
    x = partials(1, (3, 200), dtype=dtype)
    _, owing = compiled_psum(two_shot, 3, mode)(x, zero_state(x, two_shot))
    y, state = compiled_psum(exact, 3, mode)(x, owing)
    debt = owed(owing)
    wanted = np.float64(x).sum(0) + debt.sum(0)
    # x + debt is rounded to x's dtype on each of 3 ranks, and so is every one of 2 additions.
    allowed = 5 * ROUNDING[dtype] * (np.abs(np.float64(x)) + np.abs(debt)).sum(0)
    assert (np.abs(np.float64(y[0]) - wanted) <= allowed).all()
    assert np.abs(debt.sum(0)).max() > 2 * allowed.max()
    assert not np.asarray(state.residual).any()


# --- the off switch --------------------------------------------------------------------------------------------------

OVERRIDDEN = """
import conftest
import numpy as np, jax
from jax import lax
import echo_jax
from helpers import assert_same_bits, compiled_psum, on_ranks, owed, partials, zero_state
config = echo_jax.EchoConfig(algorithm="two_shot", residual="float32")
assert config.resolve(10**9, 4) == "exact"
x = partials(0, (4, 300))
y, state = compiled_psum(config, 4)(x, zero_state(x, config))
assert_same_bits(y, on_ranks(lambda x: lax.psum(x, "tp"), 4)(x))
# A state from a run before the switch: its debt is paid.
owing = zero_state(x, config)
owing.residual[:] = 0.01 * partials(1, owing.residual.shape)
y, state = compiled_psum(config, 4)(x, owing)
np.testing.assert_allclose(y[0], np.float64(x).sum(0) + owed(owing).sum(0), rtol=0, atol=1e-5)
assert not np.asarray(state.residual).any()
"""


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent)])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_echo_jax_algorithm_exact_in_the_environment_overrides_every_config_and_says_so_once():
    # conftest clears the variable for the tests' own sake: set it again after that.
    code = OVERRIDDEN.replace("import conftest\n", "import conftest, os\nos.environ['ECHO_JAX_ALGORITHM'] = 'exact'\n")
    done = _python(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ECHO_JAX_ALGORITHM=exact") == 1


def test_any_other_value_in_the_environment_is_refused_at_import():
    done = _python("import echo_jax", ECHO_JAX_ALGORITHM="two_shot")
    assert done.returncode != 0
    assert "ECHO_JAX_ALGORITHM must be 'exact' or unset, found 'two_shot'" in done.stderr


def test_without_the_override_a_config_means_what_it_says(caplog):
    with caplog.at_level(logging.WARNING):
        assert EchoConfig(algorithm="two_shot").resolve(10, 4) == "two_shot"
    assert not caplog.records
