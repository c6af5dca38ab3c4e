"""Which call costs how much quality: each figure held to programs written out, and the ranking to a planted fault."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of, partials
from jax import lax
from jax.sharding import PartitionSpec as P

import echo_jax
from echo_jax import EchoConfig, wire
from echo_jax.probe import RANKINGS

RANKS, SHAPE = 2, (4, 128)
SPLIT, WHOLE = P("tp"), P()
NAMES = ("first", "second", "third")
CODED = EchoConfig(algorithm="two_shot", group_size=32)
EXACT = EchoConfig(algorithm="exact", group_size=32)


def on_mesh(f, in_specs=SPLIT, out_specs=WHOLE, check_vma=True):
    return jax.shard_map(f, mesh=mesh_of(tp=RANKS), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def model(configs):
    """f(x[ranks, calls, *shape]): three named sums in streams of their own, squashed, so that no huge value is all."""

    def one_rank(x):
        h = jnp.zeros(SHAPE)
        for name, config, part in zip(NAMES, configs, x[0], strict=True):
            y, _ = echo_jax.echo_psum(part, "tp", echo_jax.init_state(part, "tp", config), config, name=name)
            h = h + jnp.tanh(y)
        return h

    return jax.jit(on_mesh(one_rank))


def rms(x):
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def close(found, wanted):
    assert found == pytest.approx(wanted, rel=1e-3)


@pytest.fixture(scope="module")
def x():
    return jnp.asarray(partials(0, (RANKS, len(NAMES), *SHAPE)))


@pytest.mark.parametrize(
    ("spiked", "config"),
    [
        ("second", CODED),
        ("first", EchoConfig(algorithm="two_shot", group_size=32, codec="int4", feedback=False)),
        ("third", EchoConfig(algorithm="one_shot", group_size=32, codec="int8", residual="int8")),
    ],
    ids=lambda of: of if isinstance(of, str) else of.codec,
)
def test_a_call_whose_groups_hold_one_value_10000_times_the_rest_comes_first_by_every_ranking(x, spiked, config):
    huge = x.at[:, NAMES.index(spiked), :, ::32].mul(10_000)
    report = wire.probe(model([config] * 3), huge)
    assert [report.ranked(by)[0].name for by in RANKINGS] == [spiked] * 3
    assert report.calls[0].name == spiked


@pytest.fixture(scope="module")
def probed(x):
    """(program, its trace and output before a probe, the report): it donates its argument."""
    f = jax.jit(model([CODED] * 3).__wrapped__, donate_argnums=0)
    before = str(f.trace(x).jaxpr), np.asarray(f(x.copy()))
    return f, before, wire.probe(f, x)


def test_every_figure_is_that_of_the_program_written_out(x, probed):
    _, (_, output), report = probed
    exact = jax.jit(on_mesh(lambda x: sum(jnp.tanh(lax.psum(part, "tp")) for part in x[0])))(x)
    close(report.output_error, rms(output - exact) / rms(exact))
    assert sorted(call.name for call in report.calls) == sorted(NAMES)
    first_sum = one_call(CODED)
    for call in report.calls:
        close(call.gain, report.output_error - call.output_error)
        part = x[:, NAMES.index(call.name)]
        y, _ = first_sum(part)
        close(call.error, rms(y - part.sum(0)) / np.median(np.abs(part.sum(0))))
        # The call starts a stream: nothing is paid yet.
        assert call.calls == 1 and call.error == call.worst_error == pytest.approx(call.stream) == call.worst_stream
    configs = [EXACT if name == report.calls[0].name else CODED for name in NAMES]
    close(report.calls[0].output_error, rms(model(configs)(x) - exact) / rms(exact))


def test_a_program_is_the_same_after_a_probe_as_before_and_its_donated_arguments_are_kept(x, probed):
    f, (trace, output), _ = probed
    assert not x.is_deleted() and "callback" not in trace
    assert str(f.trace(x).jaxpr) == str(model([CODED] * 3).trace(x).jaxpr) == trace
    np.testing.assert_array_equal(f(x.copy()), output)


def test_the_table_has_every_call_and_its_places(probed):
    _, _, report = probed
    lines = str(report).splitlines()
    assert lines[0].split() == ["name", "calls", "error", "worst", "stream", "worst", "output", "if", "exact", "gain"]
    assert [line.split()[0] for line in lines[1:-1]] == [call.name for call in report.calls]
    assert lines[1].endswith("#1") and lines[-1].split() == ["as", "configured", "3", f"{report.output_error:.4g}"]


def one_call(config):
    def one_rank(x):
        return echo_jax.echo_psum(x[0], "tp", echo_jax.init_state(x[0], "tp", config), config)

    return jax.jit(on_mesh(one_rank, out_specs=(WHOLE, SPLIT)))


def scanned(x, check_vma=True, remat=False, backward=False):
    """A residual stream of four layers in a scan: two sums a layer, and the settling of what they owe."""

    def one_rank(x):
        def layer(carry, x):
            h, state = carry
            for name in ("attention_out", "mlp_out"):
                y, state = echo_jax.echo_psum(x * (1 + jnp.tanh(h)), "tp", state, CODED, name=name)
                h = h + y
            return (h, state), None

        if remat:
            layer = jax.checkpoint(layer, policy=echo_jax.remat_policy)
        carry = jnp.zeros(SHAPE), echo_jax.init_state(x[0, 0], "tp", CODED)
        (h, state), _ = lax.scan(layer, carry, x[0])
        return echo_jax.flush(h, "tp", state, CODED, exact=False)

    f = on_mesh(one_rank, out_specs=(WHOLE, SPLIT), check_vma=check_vma)
    return jax.grad(lambda x: (f(x)[0] ** 2).mean())(x) if backward else f(x)


def test_a_scan_s_iterations_are_one_entry_with_their_mean_and_their_worst():
    x = jnp.asarray(partials(1, (RANKS, 4, *SHAPE)))
    x = x.at[:, 2, :, ::32].mul(100)
    report = wire.probe(functools.partial(scanned, check_vma=False), x)
    calls = {call.name: call for call in report.calls}
    assert {name: call.calls for name, call in calls.items()} == {"attention_out": 4, "mlp_out": 4, "flush": 1}
    for name in ("attention_out", "mlp_out"):
        assert calls[name].worst_error > 1.5 * calls[name].error > 0
    assert math.isnan(calls["flush"].error) and 0 < calls["flush"].stream < 1
    assert report.ranked("error")[-1].name == "flush"
    assert 0 < report.output_error < 1


def test_the_calls_of_a_rematerialised_scan_under_a_gradient_are_measured():
    x = jnp.asarray(partials(1, (RANKS, 4, *SHAPE)))
    report = wire.probe(functools.partial(scanned, remat=True, backward=True), x)
    assert {call.name for call in report.calls} == {"attention_out", "mlp_out", "flush"}
    assert all(call.stream > 0 for call in report.calls) and 0 < report.output_error < 1


def test_backward_sums_are_measured(x):
    def one_rank(w, x):
        def loss(w, state):
            w, state = echo_jax.echo_psum_grad(w, "tp", state, CODED, name="block_in")
            return (jnp.tanh(w * x[0]) ** 2).sum()

        return jax.grad(loss)(w, echo_jax.init_state(w, "tp", CODED))

    (call,) = wire.probe(on_mesh(one_rank, in_specs=(WHOLE, SPLIT)), x[0, 0], x[:, 1]).calls
    assert call.name == "block_in" and call.calls == 1
    assert call.output_error == 0 and call.gain > 0.01 and call.error > 0.01


def test_calls_that_are_exact_anyway_are_left_out_and_what_is_not_finite_is_infinitely_wrong(x):
    report = wire.probe(model([CODED, EXACT, CODED]), x.at[0, 2, 0, 0].set(jnp.inf))
    assert [call.name for call in report.calls] == ["third", "first"]
    spoiled = report.calls[0]
    assert report.output_error == spoiled.gain == spoiled.error == math.inf and spoiled.output_error < 1


def test_what_cannot_be_probed_is_refused(x):
    with pytest.raises(ValueError, match="coded, found none"):
        wire.probe(on_mesh(lambda x: lax.psum(x, "tp")), x)
    with pytest.raises(ValueError, match="found only exact ones"):
        wire.probe(model([EXACT] * 3), x)
    with pytest.raises(ValueError, match="must return float arrays"):
        wire.probe(lambda x: (model([CODED] * 3)(x) > 0, one_call(CODED)(x[:, 0])[1]), x)
    with pytest.raises(ValueError, match="by must be one of"):
        wire.ProbeReport((), 0.0).ranked("output_error")
