"""Promise 6: the derivative of echo_psum is that of lax.psum, in every mode, taken inside and outside shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MODES, assert_same_bits, mesh_of, on_ranks, partials
from jax import lax
from jax.sharding import PartitionSpec as P

import echo_jax
from echo_jax import EchoConfig

RANKS = 4


def echo_sum(config):
    return lambda x: echo_jax.echo_psum(x, "tp", echo_jax.init_state(x, "tp", config), config)[0]


def lax_sum(x):
    return lax.psum(x, "tp")


def _loss(psum, w, x):
    """One rank's loss: two sums in a row, a factor that differs between ranks after the first, all of it curved."""
    y = psum(jnp.sin(w * x))
    z = psum(jnp.cos(w * y))
    return (z * y * jnp.arange(1.0, 1 + y.shape[-1])).sum()


def _gradients(psum, mode, where, w, x):
    """Gradients with respect to both arguments, [ranks, ...]; `where` says on which side of the ranks' program."""

    def loss(w, x):
        return _loss(psum, w, x)

    if where == "inside":
        return on_ranks(jax.grad(loss, argnums=(0, 1)), RANKS, mode)(w, x)
    losses = on_ranks(loss, RANKS, mode)
    # Weighted, so that ranks are told apart.
    return jax.jit(jax.grad(lambda w, x: (losses(w, x) * jnp.arange(1.0, 1 + RANKS)).sum(), argnums=(0, 1)))(w, x)


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("mode", [pytest.param(MODES[0], marks=pytest.mark.quick), *MODES[1:]])
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_with_the_code_none_gradients_are_those_of_lax_psum(algorithm, mode, where):
    w, x = partials(0, (RANKS, 3, 33)), partials(1, (RANKS, 3, 33))
    config = EchoConfig("none", algorithm=algorithm)
    found = _gradients(echo_sum(config), mode, where, w, x)
    wanted = _gradients(lax_sum, mode, where, w, x)
    for a, b in zip(found, wanted, strict=True):
        # Sums of 4 float32 values in another order, 2**-24 each, in a chain of about 10 such steps.
        np.testing.assert_allclose(a, b, rtol=0, atol=40 * 2.0**-24 * np.abs(b).max())
        assert np.abs(b).max() > 1


@pytest.mark.quick
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", [EchoConfig(algorithm="two_shot"), EchoConfig()], ids=["4 bits", "exact"])
def test_the_derivative_of_a_linear_program_has_the_bits_of_lax_psums(config, mode, where):
    """Whole numbers, so that the order of sums does not matter: the trap is a factor of 4, the number of ranks."""
    w = np.ones((RANKS, 2, 64), np.float32)

    def gradient(psum):
        def loss(w):
            y = psum(3.0 * w)
            return (psum(2.0 * y * (1.0 + lax.axis_index("tp"))) if mode == "check_vma" else 2.0 * y).sum()

        if where == "inside":
            return on_ranks(jax.grad(loss), RANKS, mode)(w)
        losses = on_ranks(loss, RANKS, mode)
        return jax.jit(jax.grad(lambda w: losses(w).sum()))(w)

    wanted = gradient(lax_sum)
    assert np.asarray(wanted).all()
    assert_same_bits(gradient(echo_sum(config)), wanted)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_through_a_program_whose_result_is_declared_equal_on_all_ranks(check_vma):
    w = partials(2, (RANKS, 64))

    def gradient(psum):
        sums = jax.shard_map(
            lambda w: (psum(w[0]) ** 2).sum(),
            mesh=mesh_of(tp=RANKS),
            in_specs=P("tp"),
            out_specs=P(),
            check_vma=check_vma,
        )
        return jax.jit(jax.grad(sums))(w)

    found, wanted = gradient(echo_sum(EchoConfig("none", algorithm="two_shot"))), gradient(lax_sum)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=10 * 2.0**-24 * np.abs(wanted).max())


def test_an_x_that_is_equal_on_all_ranks_has_the_gradient_of_lax_psum():
    x = partials(3, (64,))

    def gradient(psum):
        def loss(w):
            return (psum(jnp.asarray(x) * w) * jnp.arange(64.0)).sum()

        return on_ranks(lambda _: jax.grad(loss)(2.0), RANKS)(np.zeros((RANKS, 1), np.float32))

    wanted = np.asarray(gradient(lax_sum))
    np.testing.assert_allclose(gradient(echo_sum(EchoConfig(algorithm="two_shot"))), wanted, rtol=1e-6)
    np.testing.assert_allclose(wanted, RANKS * (x * np.arange(64)).sum(), rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_owed_is_a_constant_to_differentiation(mode):
    config = EchoConfig(algorithm="two_shot", residual="float32")

    def loss(state, x):
        y, state = echo_jax.echo_psum(x, "tp", state, config)
        y, state = echo_jax.flush(y, "tp", state, config)
        return (y**2).sum()

    def gradient(x):
        return jax.grad(loss)(echo_jax.init_state(x, "tp", config), x)

    assert not np.asarray(on_ranks(gradient, RANKS, mode)(partials(4, (RANKS, 64))).residual).any()


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_forward_mode_is_refused(mode):
    config = EchoConfig(algorithm="two_shot")
    x = partials(5, (RANKS, 64))
    with pytest.raises(TypeError, match="forward-mode"):
        on_ranks(lambda x: jax.jvp(echo_sum(config), (x,), (x,)), RANKS, mode)(x)


# --- the conjugate ---------------------------------------------------------------------------------------------------


def _conjugate_gradient(cast, w, config=None):
    """Gradient with respect to an x that is equal on all ranks and that every rank uses in its own way."""
    x = partials(6, w.shape[1:])

    def one_rank(w):
        def loss(x):
            return lax.psum(jnp.sin(cast(x, config) * w).sum(), "tp")

        return jax.grad(loss)(jnp.asarray(x))

    return on_ranks(one_rank, len(w))(w)


def _echo_cast(x, config):
    return echo_jax.echo_psum_grad(x, "tp", echo_jax.init_state(x, "tp", config), config)[0]


@pytest.mark.quick
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_with_the_code_none_the_conjugate_has_the_gradient_of_a_cast(ranks):
    w = partials(7, (ranks, 5, 40))
    wanted = np.asarray(_conjugate_gradient(lambda x, _: lax.pcast(x, "tp", to="varying"), w))
    found = _conjugate_gradient(_echo_cast, w, EchoConfig("none", algorithm="two_shot"))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=8 * 2.0**-24)
    coded = np.asarray(_conjugate_gradient(_echo_cast, w, EchoConfig("int8", algorithm="two_shot")))
    # int8: two roundings, of 4 values of at most 1 and of their sum, by 1/254 each.
    np.testing.assert_allclose(coded, wanted, rtol=0, atol=8.1 / 254)
    assert ranks == 1 or (coded != wanted).any()


def test_the_conjugate_is_the_identity_forward():
    def one_rank(w):
        x = jnp.asarray(partials(8, (3, 40)))
        config = EchoConfig(algorithm="two_shot")
        state = echo_jax.init_state(x, "tp", config)
        cast, after = echo_jax.echo_psum_grad(x, "tp", state, config)
        settled, last = echo_jax.flush_grad(x, "tp", after, config)
        assert "tp" in jax.typeof(cast).manual_axis_type.varying
        assert "tp" not in jax.typeof(settled).manual_axis_type.varying
        return cast, settled, last.residual

    cast, settled, residual = on_ranks(one_rank, 3)(np.zeros((3, 1)))
    for rank in range(3):
        np.testing.assert_array_equal(cast[rank], partials(8, (3, 40)))
        np.testing.assert_array_equal(settled[rank], partials(8, (3, 40)))
    assert not np.asarray(residual).any()


def _curvature(psum, mode, x):
    """[ranks, ...]: the derivative of a squared derivative, which passes through each sum twice."""

    def inner(x):
        return (psum(x) ** 3).sum()

    return on_ranks(jax.grad(lambda x: (jax.grad(inner)(x) ** 2).sum()), RANKS, mode)(x)


@pytest.mark.parametrize("mode", [pytest.param(MODES[0], marks=pytest.mark.quick), *MODES[1:]])
@pytest.mark.parametrize("config", [EchoConfig("none", algorithm="two_shot"), EchoConfig(algorithm="exact")])
def test_second_derivatives_are_those_of_lax_psum(config, mode):
    x = partials(2, (RANKS, 5))
    found, wanted = _curvature(echo_sum(config), mode, x), _curvature(lax_sum, mode, x)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=40 * 2.0**-24 * np.abs(wanted).max())
    assert np.abs(wanted).max() > 1


def test_second_derivatives_of_the_conjugate_are_those_of_a_cast():
    config = EchoConfig("none", algorithm="two_shot")

    def through_echo(x):
        return echo_jax.echo_psum_grad(x, "tp", echo_jax.init_state(x, "tp", config), config)[0]

    def curvature(cast):
        def inner(x):
            return lax.psum((cast(x) ** 3).sum() * (1 + lax.axis_index("tp")), "tp")

        def outer(x):
            return (jax.grad(inner)(x) ** 2).sum()

        mesh = mesh_of(tp=RANKS)
        return jax.jit(jax.shard_map(jax.grad(outer), mesh=mesh, in_specs=P(), out_specs=P()))(partials(3, (5,)))

    wanted = curvature(lambda x: lax.pcast(x, "tp", to="varying"))
    np.testing.assert_allclose(curvature(through_echo), wanted, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_forward_mode_over_a_gradient_is_refused_too(mode):
    config = EchoConfig(algorithm="two_shot")
    x = partials(4, (RANKS, 5))
    gradient = jax.grad(lambda x: (echo_sum(config)(x) ** 2).sum())
    with pytest.raises(TypeError, match="forward-mode"):
        on_ranks(lambda x: jax.jvp(gradient, (x,), (x,))[1], RANKS, mode)(x)
