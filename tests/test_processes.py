"""A run of several processes is the run of one: the same bits, one end, and no peer that waits for ever."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_same_bits
from training import (
    PATIENCE,
    ROOT,
    Ended,
    Lab,
    assert_same_end,
    comparable,
    ended_together,
    event_rows,
    metric_rows,
    published,
    result_of,
    run,
    run_together,
    saved_arrays,
    saved_steps,
    started_together,
    tuning,
    uninterrupted,
    wait_for_rows,
)

from models import processes
from models.processes import ProcessArgs

WITHIN = 60  # seconds, in which the end of one process must end the others


def flags(lab: Lab, workdir: Path) -> list[str]:
    return lab.flags(workdir, "carry")


@pytest.fixture
def alone(lab: Lab) -> Path:
    """The run of one process, with result.json."""
    return uninterrupted(lab, "carry")


# --- one run ----------------------------------------------------------------------------------------------------------


def test_two_processes_stopped_and_gone_on_with_alone_end_with_the_bits_of_one(lab: Lab, tmp_path: Path, alone: Path):
    """A signal to process 1 stops both before the same step, and a checkpoint belongs to no number of processes."""
    stopped = run_together(lab, flags(lab, tmp_path), 2, {1: "SIGTERM Metrics.write 6 after"})
    assert [ended.code for ended in stopped] == [128 + signal.SIGTERM] * 2, stopped[0].stderr + stopped[1].stderr
    step = saved_steps(tmp_path)[-1]
    assert step < 12 and f"stopped by SIGTERM at step {step}" in stopped[0].stdout
    rows = metric_rows(tmp_path)
    assert max(row[0] for row in rows) == step and len(rows) == len({row[:2] for row in rows})

    last = run(lab, flags(lab, tmp_path))
    assert last.code == 0, last.stderr
    assert_same_end(tmp_path, alone)
    assert event_rows(tmp_path) == sorted((step, name) for step, name, _ in metric_rows(tmp_path))
    assert any(np.any(leaf) for leaf in saved_arrays(tmp_path)["echo"].values())


@pytest.mark.soak
def test_four_processes_train_with_the_bits_of_one(lab: Lab, tmp_path: Path, alone: Path):
    assert_reported(run_together(lab, flags(lab, tmp_path), 4), alone)
    assert_same_end(tmp_path, alone)


def assert_reported(ended: list[Ended], alone: Path) -> None:
    """The first process reports what one alone does, and the others nothing."""
    first, *others = ended
    assert first.code == 0, first.stderr
    found, wanted = first.result, result_of(alone)
    del wanted["exact"]
    assert found.pop("tokens_per_s") > 0 and wanted.pop("tokens_per_s") > 0
    assert found == wanted
    for other in others:
        assert (other.code, "{" in other.stdout) == (0, False), other.stderr


@pytest.mark.soak
def test_two_processes_tune_a_model_and_write_the_one_that_one_process_writes(lab: Lab, tmp_path: Path):
    folders = [tmp_path / "one", tmp_path / "two"]
    commands = [[*lab.flags(folder, "settle"), *tuning(lab), "--lora-rank", "4", "--steps", "3"] for folder in folders]
    for ended in (run(lab, commands[0]), *run_together(lab, commands[1], 2)):
        assert ended.code == 0, ended.stderr
    one, two = ({path.name: path.read_bytes() for path in (folder / "model").iterdir()} for folder in folders)
    assert one == two
    assert any(name.endswith(".safetensors") for name in one)


@pytest.mark.quick
def test_text_is_generated_by_two_processes_as_by_one(lab: Lab):
    command = ["-m", "models.generate", "--model", str(published(lab)), "--prompt", "to be or", "--max-tokens", "8"]
    command = [*command, *["--tp", "2", "--min-elements", "0", "--temperature", "1"]]
    environment = lab.environment(XLA_FLAGS="")
    single = subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert single.returncode == 0, single.stderr
    with started_together([command] * 2, [environment] * 2) as started:
        first, *others = ended_together(started)
    assert first.code == 0, first.stderr
    assert first.stdout.splitlines()[-1] == single.stdout.splitlines()[-1] != ""
    assert not any(single.stdout.splitlines()[-1] in other.stdout for other in others)


# --- processes that are not alike ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "environment", "messages"),
    [
        (
            ["--seed", "1", "--codec", "int8"],
            {"ECHO_JAX_ALGORITHM": "exact"},
            [
                "seed: 0 (process 0), 1 (process 1)",
                "codec: hadamard_int4 (process 0), int8 (process 1)",
                "ECHO_JAX_ALGORITHM:  (process 0), exact (process 1)",
            ],
        ),
        (["--data", "OTHER"], {}, ["data: "]),
    ],
    ids=["flags and environment", "text"],
)
def test_processes_that_are_started_unlike_are_all_refused_naming_the_differences(
    lab: Lab, tmp_path: Path, more: list[str], environment: dict[str, str], messages: list[str]
):
    workdir = tmp_path / "run"
    same = flags(lab, workdir)
    if "OTHER" in more:  # the same path on two hosts with another content
        names = [tmp_path / f"{i}" for i in range(2)]
        for i, folder in enumerate(names):
            folder.mkdir()
            (folder / "text.txt").write_text(lab.text.read_text() + str(i))
        commands = [[*same, "--data", "text.txt"]] * 2
        with started_together(
            [["-c", f"import os, runpy, sys; os.chdir({str(folder)!r}); sys.path.insert(0, {str(ROOT)!r}); "
              f"sys.argv[0] = 'train.py'; runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')", *command]
             for folder, command in zip(names, commands, strict=True)],
            [lab.environment()] * 2,
        ) as started:  # fmt: skip
            ended = ended_together(started)
    else:
        commands = [["train.py", *same], ["train.py", *same, *more]]
        with started_together(commands, [lab.environment(), lab.environment(**environment)]) as started:
            ended = ended_together(started)
    for process in ended:
        assert process.code != 0
        assert "all processes must be started alike; these differ:" in process.stderr
        for message in messages:
            assert message in process.stderr
    assert not (workdir / "checkpoints").exists()


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch):
    peers = [{"jax": "0.10.2", "seed": "0"}, {"jax": "0.12.0", "seed": "0"}]
    monkeypatch.setattr(processes, "exchange", lambda mine: [mine, json.dumps(peers[1])])
    with pytest.raises(ValueError, match=r"differ:\n  jax: 0.10.2 \(process 0\), 0.12.0 \(process 1\)$"):
        processes.check_alike(peers[0])


def in_children(code: str, cases: list[str], environment: dict[str, str] | None = None) -> list[str]:
    """What `code` prints or raises for each case, `case` in it, in a child of one process, which imports JAX once."""
    script = f"""
import os, sys
from jax._src import distributed
from models import processes
{code}
for number, case in enumerate({cases!r}):
    if os.fork() == 0:
        try:
            join(case)
        except BaseException as error:
            print(number, type(error).__name__, error, flush=True)
        os._exit(0)
    os.wait()
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    found = dict(line.split(" ", 1) for line in ended.stdout.splitlines())
    return [found.get(str(number), "") for number in range(len(cases))]


def test_flags_that_make_no_sense_are_refused():
    cases = {
        ProcessArgs(coordinator="localhost:1"): "must all be given where no scheduler does; missing: num_processes",
        ProcessArgs(num_processes=2, process_id=0): "missing: coordinator",
        ProcessArgs(coordinator="localhost", num_processes=2, process_id=0): "must look like HOST:PORT",
        ProcessArgs(coordinator="localhost:1", num_processes=2, process_id=2): "process_id must be from 0 to",
        ProcessArgs(coordinator="localhost:1", num_processes=0, process_id=0): "num_processes must be at least 1",
    }
    join = "join = lambda args: processes.join(eval(args, vars(processes)))"
    found = in_children(join, [repr(args) for args in cases])
    for error, message in zip(found, cases.values(), strict=True):
        assert error.startswith("ValueError") and message in error


def test_schedulers_are_recognized():
    """Up to where JAX would connect."""
    slurm = {"SLURM_JOB_ID": "4097", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "node[03-06]", "SLURM_PROCID": "2"}
    open_mpi = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "OMPI_COMM_WORLD_SIZE": "3"}
    cases = [
        ({}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, None),  # a shell of salloc, not a step
        ({"SLURM_JOB_ID": "4096", "SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "a"}, None),
        ({**slurm, "SLURM_LOCALID": "0"}, ("node03:61441", "4", "2")),
        ({**open_mpi, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, ("10.96.0.1:", "3", "1")),
    ]
    join = """
class Stop(Exception): pass
def client(address, index, **_): raise Stop(address, distributed.global_state.num_processes, index)
distributed._jax = type("", (), {"get_distributed_runtime_client": staticmethod(client)})
def join(variables):
    os.environ.update(eval(variables))
    try: processes.join(processes.ProcessArgs())
    except Stop as stop: print(number, *stop.args, flush=True)
"""
    schedulers = ("SLURM_", "OMPI_", "KUBERNETES_", "JAX_COORD")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(schedulers)}
    found = in_children(join, [repr(variables) for variables, _ in cases], clean)
    for line, (_, wanted) in zip(found, cases, strict=True):
        if wanted is None:
            assert not line
        else:
            address, *numbers = line.split()
            assert address.startswith(wanted[0])
            assert tuple(numbers) == wanted[1:]


# --- a peer that is lost ----------------------------------------------------------------------------------------------


def lose(lab: Lab, workdir: Path, victim: int, number: signal.Signals, rows: int) -> float:
    """Seconds that the others live after a signal to one of two processes, sent when there are so many rows."""
    with started_together([["train.py", *flags(lab, workdir)]] * 2, [lab.environment()] * 2) as started:
        wait_for_rows(workdir, started[0], rows)
        os.kill(started[victim].pid, number)
        began = time.monotonic()
        other = started[1 - victim]
        try:
            other.wait(WITHIN)
        except subprocess.TimeoutExpired:
            pytest.fail(f"process {1 - victim} still waits for its peer after {WITHIN} s")
        finally:
            waited = time.monotonic() - began
            started[victim].kill()
        assert other.returncode != 0
    return waited


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_killed_process_ends_the_other_and_the_run_goes_on_to_the_same_bits(
    lab: Lab, tmp_path: Path, alone: Path, victim: int
):
    lose(lab, tmp_path, victim, signal.SIGKILL, 30)
    ended = run_together(lab, flags(lab, tmp_path), 2)
    assert_reported(ended, alone)
    assert_same_end(tmp_path, alone)


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_hangs_ends_the_other(lab: Lab, tmp_path: Path, victim: int):
    lose(lab, tmp_path, victim, signal.SIGSTOP, 30)


@pytest.mark.soak
@pytest.mark.parametrize("function", ["Checkpoints.save", "Checkpoints.restore"])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_killed_at_a_save_or_a_restore_loses_nothing(
    lab: Lab, tmp_path: Path, alone: Path, function: str, moment: str, victim: int
):
    if function == "Checkpoints.restore":
        run_together(lab, flags(lab, tmp_path), 2, {0: "SIGTERM Metrics.write 6 after"})
    ended = run_together(lab, flags(lab, tmp_path), 2, {victim: f"SIGKILL {function} 1 {moment}"})
    assert ended[victim].code == -signal.SIGKILL
    assert ended[1 - victim].code != 0
    ended = run_together(lab, flags(lab, tmp_path), 2)
    assert [process.code for process in ended] == [0, 0], ended[0].stderr
    assert_same_end(tmp_path, alone)


@pytest.mark.soak
def test_a_run_of_two_processes_one_killed_at_twenty_random_moments_ends_with_the_same_bits(lab: Lab, tmp_path: Path):
    """While it starts, reads a checkpoint, compiles, trains, saves: and every checkpoint that is there is good."""
    more = ["--steps", "150", "--save-every", "3", "--eval-every", "20"]
    reference, workdir = tmp_path / "reference", tmp_path / "run"
    assert run(lab, [*lab.flags(reference, "carry"), *more]).code == 0
    moment, ends = random.Random(0), []
    while len(ends) < 20:
        command = ["train.py", *lab.flags(workdir, "carry"), *more]
        with started_together([command] * 2, [lab.environment()] * 2) as started:
            joined = moment.random() < 0.7
            if joined:
                rows = len(metric_rows(workdir)) if (workdir / "metrics.csv").exists() else 0
                wait_for_rows(workdir, started[0], max(rows - 30, 0) + 40)
                time.sleep(moment.uniform(0, 1))
            else:
                time.sleep(moment.uniform(0, 15))
            victim = moment.randrange(2)
            assert started[victim].poll() is None, "over before it was killed 20 times"
            started[victim].kill()
            began = time.monotonic()
            other = ended_together(started)[1 - victim]
            assert other.code != 0
            # Until all have joined, the others wait for a process that may still be starting.
            seconds, limit = time.monotonic() - began, WITHIN if joined else processes.JOIN_TIMEOUT_S + WITHIN
            assert seconds < limit
            ends.append(
                (victim, joined, seconds, saved_steps(workdir)[-1:] if (workdir / "checkpoints").exists() else [])
            )
    last = run_together(lab, [*lab.flags(workdir, "carry"), *more], 2)
    assert last[0].code == 0, last[0].stderr
    print("killed, while training, seconds until the other had ended, newest checkpoint:", *ends, sep="\n  ")
    assert_same_bits(saved_arrays(workdir), saved_arrays(reference))
    assert comparable(metric_rows(workdir)) == comparable(metric_rows(reference))


# --- the launcher -----------------------------------------------------------------------------------------------------

NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--mount", "true"]
can_make_namespaces = pytest.mark.skipif(
    sys.platform != "linux"
    or any(shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None for tool in ("ip", "tc", "unshare"))
    or subprocess.run(NAMESPACES, capture_output=True).returncode != 0,
    reason="needs iproute2 and the right to make namespaces",
)

SHOW = """
import socket, subprocess, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
name, number = socket.gethostname(), flags["--process-id"]
link = subprocess.run(["tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True).stdout.split()
print(name, socket.gethostbyname(name), socket.gethostbyname("host0"), number, link[link.index("rate") + 1])
sys.exit(3 * (name == "host2"))
"""


def launched(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.cluster", *arguments]


@can_make_namespaces
def test_the_launcher_gives_every_process_a_host_and_a_link_of_its_own_and_returns_its_failure(tmp_path: Path):
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    before = subprocess.run(["ip", "link"], capture_output=True, text=True).stdout
    ended = subprocess.run(
        launched(["--processes", "3", "--rate", "30mbit", "--", str(script)]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout.split() == ["host0", "10.77.0.1", "10.77.0.1", "0", "30Mbit"]
    for number in (1, 2):
        line = f"[host{number}] host{number} 10.77.0.{number + 1} 10.77.0.1 {number} 30Mbit"
        assert line in ended.stderr.splitlines()
    assert "[host2] ended with status 3" in ended.stderr
    assert subprocess.run(["ip", "link"], capture_output=True, text=True).stdout == before


@can_make_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_launcher_leaves_nothing_behind_however_it_ends(tmp_path: Path, number: signal.Signals):
    mark = f"{tmp_path}/sleep.py"
    Path(mark).write_text("import time\nprint('up', flush=True)\ntime.sleep(100)\n")
    with subprocess.Popen(
        launched(["--processes", "2", "--", mark]), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "up\n"
        launcher.send_signal(number)
        launcher.wait(60)
        assert launcher.returncode != 0
    deadline = time.monotonic() + 30
    while running(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(mark)


def running(mark: str) -> list[str]:
    """Command lines of this machine's processes that name a file."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in line:
            found.append(line)
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0", "--", "x"], "processes must be from 1 to 250, found 0"),
        (["--rate", "fast", "--", "x"], "rate must look like 200mbit or 1gbit, found 'fast'"),
    ],
)
def test_the_launcher_refuses_what_it_cannot_do(arguments: list[str], message: str):
    ended = subprocess.run(launched(arguments), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert message in ended.stderr
