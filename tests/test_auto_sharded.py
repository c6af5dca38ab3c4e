"""An auto-sharded program converted to coded sums: examples/auto_sharded.py against examples/auto_sharded_exact.py.

Promises 7 and 8 in a whole training step: over `tensor` only codes travel within the layers, and over the other mesh
axes everything that travelled before and nothing else.
"""

import collections
import contextlib
import difflib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import hlo
import jax
import numpy as np
import pytest

from echo_jax import EchoConfig
from examples import auto_sharded, auto_sharded_exact

EXAMPLES = Path(__file__).parent.parent / "examples"
CONFIG = auto_sharded.Config()
# Values of one activation [B, S, D] on one device: the batch is split over data and fsdp.
ACTIVATION = CONFIG.batch // 4 * CONFIG.sequence * CONFIG.width
STEPS = 20


class Program:
    """A compiled training step of one of the two programs."""

    def __init__(self, module: Any, **settings: Any):
        self.config, self._mesh, self._rules = module.Config(**settings), module.make_mesh(), module.RULES
        windows = jax.ShapeDtypeStruct((self.config.batch, self.config.sequence + 1), np.int32)
        with self._context():
            self._init, step = module.make_functions(self.config, self._mesh)
            self.state = jax.eval_shape(self._init, jax.random.key(0))
            # Optimized machine code would change nothing of what is measured here but the time to make it.
            quickly = {"xla_backend_optimization_level": 0}
            self.step = step.lower(self.state, windows).compile(compiler_options=quickly)

    def init(self) -> Any:
        with self._context():
            return self._init(jax.random.key(0))

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        with jax.set_mesh(self._mesh), nn.logical_axis_rules(self._rules):  # pyright: ignore[reportPrivateImportUsage]
            yield


@pytest.fixture(scope="module")
def exact() -> Program:
    return Program(auto_sharded_exact)


@pytest.fixture(scope="module")
def coded() -> Program:
    return Program(auto_sharded)


def sent_by(program: Program) -> list[tuple[bool, hlo.Collective]]:
    """All collectives of a step, and whether each lies in a loop (over the layers)."""
    computations, callees, called_by_loops = {}, {}, []
    name = ""
    for line in program.step.as_text().splitlines():
        if line.endswith("{") and (header := re.match(r"(?:ENTRY )?%?([\w.-]+) ", line)):
            name = header[1]
            computations[name], callees[name] = [], []
        elif name:
            computations[name].append(line)
            callees[name] += re.findall(r"(?:to_apply|calls|body|condition)=%?([\w.-]+)", line)
            called_by_loops += re.findall(r"body=%?([\w.-]+)", line)
    in_loops: set[str] = set()
    while called_by_loops:
        name = called_by_loops.pop()
        if name not in in_loops:
            in_loops.add(name)
            called_by_loops += callees[name]
    found = []
    for name, lines in computations.items():
        text = SimpleNamespace(as_text=lambda lines=lines: "\n".join(lines))
        found += [(name in in_loops, collective) for collective in hlo.collectives(text)]
    return found


def over_tensor(collective: hlo.Collective) -> bool:
    """Whether devices take part together that differ in their place along tensor, the last mesh axis, of size 2."""
    return any(len({device % 2 for device in group}) > 1 for group in collective.groups)


def is_large(collective: hlo.Collective) -> bool:
    """Whether it is of floats, more than 1 % of an activation's, in all of its arrays together."""
    assert not collective.dtypes - {"f32", "u8"}
    return "f32" in collective.dtypes and collective.nbytes > 0.01 * 4 * ACTIVATION


def test_the_conversion_adds_and_removes_at_most_forty_lines():
    before, after = (
        (EXAMPLES / name).read_text().splitlines() for name in ("auto_sharded_exact.py", "auto_sharded.py")
    )
    difference = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]  # after the two names
    changed = [line for line in difference if line[0] in "+-"]
    assert any(line.startswith("+") and "echo_psum" in line for line in changed)
    assert len(changed) <= 40  # empty lines and comments are counted too


def test_the_original_leaves_its_collectives_to_xla():
    source = (EXAMPLES / "auto_sharded_exact.py").read_text()
    assert not re.search(r"jax\.shard_map|psum\(|echo_jax\.", source)


def test_within_the_layers_only_codes_travel_over_tensor(exact, coded):
    sent = [collective for in_loop, collective in sent_by(coded) if in_loop and over_tensor(collective)]
    # Two sums of activations and two of their gradients, of two collectives each; none is repeated by nn.remat.
    assert collections.Counter(collective.op for collective in sent) == {"all-to-all": 4, "all-gather": 4}
    bits = 4 + 16 / CONFIG.comm.group_size
    for collective in sent:
        assert collective.dtypes == {"u8"}
        assert collective.nbytes == ACTIVATION * bits / 8
        assert re.search(r"/echo_psum(_grad)?/columns64/", collective.name)
    # The original's are seen by the same check.
    originals = [collective for in_loop, collective in sent_by(exact) if in_loop and over_tensor(collective)]
    assert originals and all(is_large(collective) for collective in originals)


def test_outside_of_the_layers_the_embedding_and_the_flushes_alone_are_large_floats(coded):
    sent = [collective for in_loop, collective in sent_by(coded) if not in_loop and over_tensor(collective)]
    large = [collective for collective in sent if is_large(collective)]
    kinds = [("jvp(Decoder)/embed/dot_general",), ("/flush/",), ("/flush_grad/",)]
    named = [[kind for (kind,) in kinds if kind in collective.name] for collective in large]
    assert sorted(named) == sorted([kind] for (kind,) in kinds)
    for collective in large:  # nothing is joined to them but what is small itself
        assert collective.op == "all-reduce"
        assert collective.nbytes <= 1.01 * 4 * ACTIVATION
    # The gradient of the head's input, and the loss.
    assert sorted(collective.op for collective in sent if "u8" in collective.dtypes) == ["all-gather", "all-to-all"]
    assert all("/echo_psum_grad/" in collective.name for collective in sent if "u8" in collective.dtypes)


def test_over_the_other_axes_travels_what_travelled_before(exact, coded):
    def others(program: Program) -> collections.Counter[Any]:
        return collections.Counter(
            (in_loop, collective.op, collective.dtypes, collective.nbytes, tuple(sorted(collective.groups)))
            for in_loop, collective in sent_by(program)
            if not over_tensor(collective)
        )

    before, after = others(exact), others(coded)
    assert sum(count for (_, op, *_), count in before.items() if op == "all-gather") >= 14  # weights, over fsdp
    assert after == before


def test_exact_sums_give_the_loss_and_gradients_of_the_original(exact):
    settings = EchoConfig(algorithm="exact", group_size=64)
    converted = Program(auto_sharded, comm=settings)
    assert jax.tree.structure(converted.state) == jax.tree.structure(exact.state)
    windows = next(auto_sharded_exact.batches(exact.config))
    results = []
    for program in (exact, converted):
        (_, moments), loss = program.step(exact.init(), windows)
        results.append((float(loss), moments[0].mu))  # Adam's first moment after one step: the gradient times 0.1
    (loss, grads), (found_loss, found_grads) = results
    assert found_loss == pytest.approx(loss, rel=1e-6)
    for (path, wanted), found in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(found_grads), strict=True):
        wanted, found = np.asarray(wanted), np.asarray(found)
        largest = np.abs(wanted).max()
        assert largest > 0, path
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * largest, err_msg=jax.tree_util.keystr(path))


def test_run_as_a_script_it_trains_as_the_original_does(exact):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, str(EXAMPLES / "auto_sharded.py"), "--steps", str(STEPS)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    found = [float(loss) for loss in re.findall(r"loss (\S+)", run.stdout)]

    state, wanted = exact.init(), []
    for _, windows in zip(range(STEPS), auto_sharded_exact.batches(exact.config), strict=False):
        state, loss = exact.step(state, windows)
        wanted.append(float(loss))
    assert len(found) == STEPS
    assert found[0] == pytest.approx(wanted[0], rel=2e-3)  # the same parameters, one forward pass
    assert np.mean(found[-5:]) < 0.65 * found[0]
    assert np.mean(found[-5:]) == pytest.approx(np.mean(wanted[-5:]), rel=0.01)
