"""Processes that run train.py as its users do, and what they leave; shared by the tests of training."""

from __future__ import annotations

import concurrent.futures
import contextlib
import csv
import dataclasses
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tokenizers
from helpers import assert_same_bits, mesh_of
from tensorboardX.proto.event_pb2 import Event

from models import transformer, weights
from models.transformer import TransformerConfig
from models.weights import Model

ROOT = Path(__file__).parents[1]
TESTS = Path(__file__).parent

STEPS, SAVE_EVERY, EVAL_EVERY = 12, 4, 5
PATIENCE = 300  # seconds for one process; it takes about 8, and 30 where it compiles on a busy machine


# --- processes and what they leave -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Lab:
    """A folder that all tests of a session share, in whichever worker they run, with one text and one compile cache."""

    folder: Path

    @property
    def text(self) -> Path:
        return self.folder / "text" / "text.txt"

    def flags(self, workdir: Path, end: str) -> list[str]:
        """Small activations, so min_elements 0: the sums would all be exact. Cadences that fall on different steps.

        Every kind of sum is coded, and runs of one process and of two have the same program, compiled once.
        """
        flags = "--mesh data=2,model=2 --dp-comm echo "
        flags += f"--end {end} --steps {STEPS} --save-every {SAVE_EVERY} --eval-every {EVAL_EVERY} --eval-batches 2"
        flags += " --log-every 1 --batch 4 --sequence 32 --min-elements 0"
        return [*flags.split(), "--data", str(self.text), "--workdir", str(workdir)]

    def environment(self, **more: str) -> dict[str, str]:
        ours = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            # A fifth off what a run takes here; and no number of devices, as train.py makes them.
            "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        }
        return {**os.environ, **ours, **more}

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """The folder that `make` fills, made by the first test and the first worker that asks for it."""
        folder = self.folder / name
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                unfinished = self.folder / f"{name}.unfinished"
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                make(unfinished)
                unfinished.rename(folder)
        return folder


@dataclasses.dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        """What the last line says."""
        return json.loads(self.stdout.splitlines()[-1])


@contextlib.contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


def run(lab: Lab, flags: list[str], sends: str | None = None, **environment: str) -> Ended:
    """Run to the end. `sends` are the first arguments of signalled.py: which signals, and when."""
    script = ["train.py"] if sends is None else [str(TESTS / "signalled.py"), *sends.split()]
    with started([*script, *flags], lab.environment(**environment)) as process:
        stdout, stderr = process.communicate(timeout=PATIENCE)
        return Ended(process.returncode, stdout, stderr)


def saved_steps(workdir: Path) -> list[int]:
    """Steps of the whole checkpoints."""
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def saved_arrays(workdir: Path) -> dict[str, Any]:
    """All arrays of the newest checkpoint: 'state' (parameters, optimizer, step), 'echo' (residuals; none if exact).

    As numpy arrays: the devices that saved them may not be here.
    """
    folder, found = workdir / "checkpoints" / str(saved_steps(workdir)[-1]), {}
    for name in ("state", "echo"):
        if (folder / name).exists():
            with ocp.StandardCheckpointer() as checkpointer:
                saved = checkpointer.metadata(folder / name).item_metadata.tree
                found[name] = checkpointer.restore(
                    folder / name, jax.tree.map(lambda a: np.empty(a.shape, a.dtype), saved)
                )
    return found


def metric_rows(workdir: Path) -> list[tuple[int, str, float]]:
    with (workdir / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), row["name"], float(row["value"])) for row in csv.DictReader(file)]


def comparable(rows: list[tuple[int, str, float]]) -> list[tuple[int, str, float]]:
    """What does not depend on the machine, in an order that does not depend on when evaluations were caught up."""
    return sorted(row for row in rows if row[1] != "tokens_per_s")


def event_rows(workdir: Path) -> list[tuple[int, str]]:
    """(step, name) of the TensorBoard events."""
    paths = (workdir / "tensorboard").iterdir()
    return sorted((event.step, value.tag) for path in paths for event in events(path) for value in event.summary.value)


def events(path: Path) -> Iterator[Event]:
    """The records of a TFRecord file: length, its checksum, content, checksum."""
    content, at = path.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        yield Event.FromString(content[at + 12 : at + 12 + length])
        at += length + 16


def assert_same_end(workdir: Path, reference: Path) -> None:
    assert saved_steps(workdir)[-1] == STEPS
    assert_same_bits(saved_arrays(workdir), saved_arrays(reference))
    assert comparable(metric_rows(workdir)) == comparable(metric_rows(reference))


def wait_for_rows(workdir: Path, process: subprocess.Popen[str], rows: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if (workdir / "metrics.csv").exists() and len(metric_rows(workdir)) >= rows:
            return
        time.sleep(0.02)
    process.kill()
    pytest.fail(f"no {rows} rows of metrics: {process.communicate(timeout=30)[1]}")


def uninterrupted(lab: Lab, end: str) -> Path:
    """A run that nothing stopped, followed by its --compare run, and result.json."""

    def make(folder: Path) -> None:
        ended = run(lab, [*lab.flags(folder, end), "--compare"])
        assert ended.code == 0, ended.stderr
        (folder / "result.json").write_text(ended.stdout.splitlines()[-1])

    return lab.once(f"uninterrupted-{end}", make)


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def killed_after(reference: Path, step: int, workdir: Path) -> None:
    """A folder as a kill leaves it: `reference` without the checkpoints after a step, whose metrics are there."""
    shutil.copytree(reference, workdir)
    for later in saved_steps(workdir):
        if later > step:
            shutil.rmtree(workdir / "checkpoints" / str(later))


def published(lab: Lab) -> Path:
    """A small random checkpoint in the Hugging Face layout, in bfloat16, whose tokens are the text's words."""

    def make(folder: Path) -> None:
        words = ["to", "be", "or", "not", "that", "is", "the", "question", "?", "<end>"]
        encoder = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "?"))
        encoder.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        config = TransformerConfig(
            vocab_size=12, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=96,
            param_dtype=jnp.bfloat16,
        )  # fmt: skip
        params = transformer.init_params(config, jax.random.key(0), mesh_of(data=1, model=1))
        weights.save(folder / "model", Model(config, params, {}))
        encoder.save(str(folder / "model" / "tokenizer.json"))
        (folder / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))

    return lab.once("published", make) / "model"


def tuning(lab: Lab) -> list[str]:
    return ["--model", str(published(lab))]


# --- runs of several processes ----------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


@contextlib.contextmanager
def started_together(
    commands: list[list[str]], environments: list[dict[str, str]]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Python processes of one run, on a free port of this machine."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    [
                        *command,
                        *f"--coordinator localhost:{port} --num-processes {len(commands)} --process-id {i}".split(),
                    ],
                    environment,
                )
            )
            for i, (command, environment) in enumerate(zip(commands, environments, strict=True))
        ]


def ended_together(processes: list[subprocess.Popen[str]]) -> list[Ended]:
    """What each printed, read at the same time, so that none waits for a full pipe."""
    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        outputs = list(pool.map(lambda process: process.communicate(timeout=PATIENCE), processes))
    return [Ended(p.returncode, out, err) for p, (out, err) in zip(processes, outputs, strict=True)]


def run_together(lab: Lab, flags: list[str], number: int, sends: dict[int, str] | None = None) -> list[Ended]:
    """train.py in several processes, to the end. `sends`: of some of them, the first arguments of signalled.py."""
    scripts = [["train.py"] if i not in (sends or {}) else [str(TESTS / "signalled.py"), *sends[i].split()]
               for i in range(number)]  # fmt: skip
    with started_together([[*s, *flags] for s in scripts], [lab.environment()] * number) as processes:
        return ended_together(processes)
