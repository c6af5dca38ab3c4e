"""Which call costs how much quality: `echo_jax.wire.probe`, and the two hooks by which calls take part in it.

The hooks act at trace time and only while a probe traces. Its runs are values of a user context of JAX, which is part
of the key of every cache of traces, so that a jitted function is traced anew for each run, and afterwards is as it was.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from echo_jax import axes, stages
from echo_jax.codecs import CODECS
from echo_jax.config import EchoConfig
from echo_jax.layout import Layout
from echo_jax.state import EchoState, is_state

RANKINGS = ("gain", "error", "stream")


@dataclasses.dataclass(frozen=True)
class ProbedCall:
    """All calls of one name, in one run of the function. All figures are ratios, without a unit.

    `error` and `stream` are relative to the typical magnitude of what a call has to send (its partials and what is
    owed, summed exactly): the median of its values that are not 0. A few huge values neither hide the error of the
    others, as they would in an rms, nor are they hidden. Both are infinite where a call met a NaN or an infinity, and
    NaN where no call of that name ran.

    Attributes:
      name: the label.
      calls: how often one rank ran it: a scan's iterations, a pytree's leaves and, in a rematerialised block, a
        recomputed call count each.
      error: rms of y less the exact sum of the same partials. With feedback it also holds what y pays of earlier calls'
        errors. NaN for a `flush`, which has no partials.
      worst_error: the largest of a single call's; `error` is the root mean square over them.
      stream: rms of what the stream lacks after the call: still owed with feedback, lost without (then of this call
        alone, and equal to `error`). It is the error of this call itself, as it starts from all that was owed before.
      worst_stream: as `worst_error`.
      output_error: relative rms error of the function's output if these calls alone are exact. They pay in full what
        the stream owes.
      gain: by how much that is less than the output error as configured. Negative if it is more.
    """

    name: str
    calls: int
    error: float
    worst_error: float
    stream: float
    worst_stream: float
    output_error: float
    gain: float


@dataclasses.dataclass(frozen=True)
class ProbeReport:
    """What `probe` found. `str` of it is a table, with each call's place in the three rankings.

    Attributes:
      calls: one entry a name, the largest gain first.
      output_error: as configured: rms of the output less that of the all-exact run, over the rms of the latter. 0 to
        infinity, without a unit.
    """

    calls: tuple[ProbedCall, ...]
    output_error: float

    def ranked(self, by: str) -> list[ProbedCall]:
        """The calls, worst first, by 'gain', 'error' or 'stream'; those with a NaN last."""
        if by not in RANKINGS:
            raise ValueError(f"by must be one of {RANKINGS}, found {by!r}")
        return sorted(self.calls, key=lambda call: (math.isnan(getattr(call, by)), -getattr(call, by)))

    def __str__(self) -> str:
        ranks = {by: {call.name: place for place, call in enumerate(self.ranked(by), 1)} for by in RANKINGS}

        def ranked(call: ProbedCall, by: str) -> str:
            return "-" if math.isnan(getattr(call, by)) else f"{getattr(call, by):.4g} #{ranks[by][call.name]}"

        rows = [("name", "calls", "error", "worst", "stream", "worst", "output if exact", "gain")]
        for call in self.calls:
            error = ranked(call, "error"), "-" if math.isnan(call.worst_error) else f"{call.worst_error:.4g}"
            stream = ranked(call, "stream"), "-" if math.isnan(call.worst_stream) else f"{call.worst_stream:.4g}"
            rows.append((call.name, str(call.calls), *error, *stream, f"{call.output_error:.4g}", ranked(call, "gain")))
        count = str(sum(call.calls for call in self.calls))
        rows.append(("as configured", count, "", "", "", "", f"{self.output_error:.4g}", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)


def probe(fn: Callable[..., Any], *args: Any) -> ProbeReport:
    """Where to look when quality drops: every named call's error, and what making it exact would change.

    Runs fn as configured, with every call exact, and once a name with the calls of that name exact and the others as
    configured: names + 2 compilations and runs. The run as configured also sums every call's partials and debts
    exactly, in float32, and takes a median of them; two outputs are kept at a time. Calls in the backward pass of a
    gradient that fn takes are measured too. A call that is exact as configured (one rank, few values) is left out.

    Print the report for a table with each call's place in the three rankings; docs/codes.md has one of a real model.

    Args:
      fn: a function of arrays, jitted or not (donated arguments are kept), that sums inside shard_map, scans, gradients
        and `jax.checkpoint` included; it must give the same output for the same arguments. Its float arrays are
        compared, all together; the `EchoState`s among them are not. Return what matters, such as logits.
      args: its arguments.

    Raises:
      ValueError: fn has no coded call, or no float array in its output.
    """
    configured = _Run()
    program, shapes = _trace(fn, args, configured)
    if not configured.labels:
        raise ValueError(
            "fn must have compensated sums that are coded, found "
            + ("only exact ones (one rank, algorithm, min_elements)" if configured.seen else "none")
        )
    if not _floats(shapes):
        raise ValueError(f"fn must return float arrays, EchoStates apart; found {shapes}")
    with _active(configured):
        output = _floats(program(*args))
    jax.block_until_ready(output)
    jax.effects_barrier()  # the last figures may come after the output

    exact = _output(fn, args, _Run(configured.labels))
    output_error = _relative_rms(output, exact)
    del output
    calls = []
    for label in configured.labels:
        alone = _relative_rms(_output(fn, args, _Run([label])), exact)
        gain = 0.0 if alone == output_error else output_error - alone  # both may be infinite
        calls.append(ProbedCall(label, *configured.figures(label), alone, gain))
    report = ProbeReport(tuple(calls), output_error)
    return dataclasses.replace(report, calls=tuple(report.ranked("gain")))


class _Run:
    """One run: which calls it makes exact, and what is known of the others. Equal to itself only, as traces hold it."""

    def __init__(self, exact: Collection[str] = ()) -> None:
        self.exact = frozenset(exact)
        self.measures = not exact
        self.seen = False
        self.labels: dict[str, None] = {}  # of coded calls, in the order in which they are traced
        self._records: list[tuple[str, tuple[int, ...], float, float]] = []

    def record(self, label: str, ranks: Any, error: Any, stream: Any) -> None:
        # A rank of a vmap's axis comes as its own call too.
        self._records.append((label, tuple(int(rank) for rank in ranks), float(error), float(stream)))

    def figures(self, label: str) -> tuple[int, float, float, float, float]:
        """(calls, error, worst error, stream, worst stream) of `ProbedCall`."""
        records = [record[1:] for record in self._records if record[0] == label]
        if not records:
            return 0, math.nan, math.nan, math.nan, math.nan
        ranks = {rank for rank, _, _ in records}
        pooled = []
        for values in (np.array([r[1] for r in records]), np.array([r[2] for r in records])):
            pooled += [float(np.sqrt(np.mean(values**2))), float(np.max(values))]
        return len(records) // len(ranks), pooled[0], pooled[1], pooled[2], pooled[3]


_active = jax.make_user_context(None)


def _trace(fn: Callable[..., Any], args: tuple[Any, ...], run: _Run) -> tuple[Any, Any]:
    # A function of its own for each run, so that its compiled program goes when it is done.
    program = jax.jit(lambda *args: fn(*args))
    with _active(run):
        return program, program.eval_shape(*args)


def _output(fn: Callable[..., Any], args: tuple[Any, ...], run: _Run) -> list[jax.Array]:
    program, _ = _trace(fn, args, run)
    with _active(run):
        return _floats(program(*args))


def _floats(output: Any) -> list[Any]:
    leaves = jax.tree.leaves(output, is_leaf=is_state)
    return [leaf for leaf in leaves if not is_state(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)]


def _relative_rms(found: list[jax.Array], exact: list[jax.Array]) -> float:
    """Of found less exact, over that of exact; infinite where one is not finite and the other is not the same."""
    error, size = (float(part) for part in _norms(found, exact))
    if error == 0:
        return 0.0
    return math.inf if math.isnan(error) or size == 0 else error / size


@jax.jit
def _norms(found: list[jax.Array], exact: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    error = size = jnp.float32(0)
    for a, b in zip(found, exact, strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
        error += (jnp.where(same, 0, a - b) ** 2).sum()
        size += (jnp.where(jnp.isfinite(b), b, 0) ** 2).sum()
    return jnp.sqrt(error), jnp.sqrt(size)


# --- the hooks -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Probed(EchoConfig):
    """A call's config while it is probed. It carries the label into backward rules, which are traced elsewhere."""

    label: str = ""
    run: _Run = dataclasses.field(default_factory=_Run)

    def resolve(self, elements: int, ranks: int) -> str:
        return "exact" if self.label in self.run.exact else super().resolve(elements, ranks)


def probed(config: EchoConfig, label: str) -> EchoConfig:
    """The config to trace a call with: the same one, unless a probe is tracing."""
    run = _active.value
    if run is None or not isinstance(config, EchoConfig):  # what else it may be, the call itself refuses
        return config
    run.seen = True
    return _Probed(**vars(config), label=label, run=run)


Sum = Callable[[jax.Array, EchoState | None, Layout, EchoConfig], tuple[jax.Array, EchoState | None]]


def measured(compensated_sum: Sum) -> Sum:
    """The same sum, which a probe's run as configured measures."""

    @functools.wraps(compensated_sum)
    def run(
        x: jax.Array, state: EchoState | None, layout: Layout, config: EchoConfig
    ) -> tuple[jax.Array, EchoState | None]:
        y, after = compensated_sum(x, state, layout, config)
        if isinstance(config, _Probed) and config.run.measures:
            _measure(x, state, y, layout, config)
        return y, after

    return run


def _measure(x: jax.Array, state: EchoState | None, y: jax.Array, layout: Layout, config: _Probed) -> None:
    if config.resolve(layout.size, layout.ranks) == "exact":
        return
    config.run.labels[config.label] = None
    exact = asked = lax.psum(x.astype(jnp.float32), layout.axis_name)
    if state is not None:
        owed = layout.from_chunks(stages.owed(state.errors()[0], CODECS[config.codec]))
        asked = exact + lax.psum(owed, layout.axis_name)
    y = y.astype(jnp.float32)
    typical = jnp.nan_to_num(jnp.nanmedian(jnp.where(asked == 0, jnp.nan, jnp.abs(asked))))

    def relative_rms(error: jax.Array) -> jax.Array:
        # NaN, of values that are not finite, and 0/0 apart from each other.
        relative = jnp.sqrt(jnp.mean(jnp.where(error == 0, 0, error / typical) ** 2))
        return jnp.where(jnp.isnan(relative), jnp.inf, relative)

    error = jnp.where((exact == 0).all(), jnp.nan, relative_rms(y - exact))
    manual = jax.sharding.get_abstract_mesh().manual_axes
    ranks = [lax.axis_index(name) for name in dict.fromkeys((*manual, *axes.axis_names(layout.axis_name)))]
    jax.debug.callback(functools.partial(config.run.record, config.label), ranks, error, relative_rms(asked - y))
