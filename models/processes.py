"""One program in several processes: joined by JAX's distributed runtime, in agreement, and stopped together.

Every process runs the same program and calls the functions here in the same order. Alone, all of them return at once.
What processes tell each other here goes through the runtime's key-value store and not through device collectives,
which processes that disagree may not even have in common.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax

# The store's client has no public name; orbax takes it from here too.
from jax._src import distributed
from jax.experimental import multihost_utils

import echo_jax

HEARTBEAT_TIMEOUT_S = 30  # a peer that is silent for so long is lost, and the others end
JOIN_TIMEOUT_S = 120
AGREE_TIMEOUT_S = 600  # of a slow peer: it may be reading a large checkpoint

_calls = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessArgs:
    """Flags of a command that can run in several processes."""

    coordinator: str | None = None
    """HOST:PORT of process 0, if there are several. Slurm, Open MPI and Kubernetes tell it and the next two."""
    num_processes: int | None = None
    """How many processes run this command, all with the same flags but the next."""
    process_id: int | None = None
    """Which of them this is, from 0."""


def join(args: ProcessArgs) -> None:
    """Connect the processes of a run, if the flags or the environment say that there are several.

    To be called before any array is made.

    Raises ValueError if some flags are missing, or they make no sense.
    """
    given = {name: getattr(args, name) for name in ("coordinator", "num_processes", "process_id")}
    found = {**_open_mpi(), **{name: value for name, value in given.items() if value is not None}}
    if not found and not _runs_in_cluster():
        return
    number, index = found.get("num_processes"), found.get("process_id")
    if number is not None and number < 1:
        raise ValueError(f"num_processes must be at least 1, found {number}")
    if index is not None and (index < 0 or (number is not None and index >= number)):
        raise ValueError(f"process_id must be from 0 to num_processes - 1 = {(number or 1) - 1}, found {index}")
    coordinator = found.get("coordinator")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise ValueError(f"coordinator must look like HOST:PORT, found {coordinator!r}")
    try:
        jax.distributed.initialize(
            coordinator,
            number,
            index,
            initialization_timeout=JOIN_TIMEOUT_S,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
            shutdown_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        )
    except ValueError as error:
        missing = ", ".join(name for name in given if name not in found)
        raise ValueError(
            f"coordinator, num_processes and process_id must all be given where no scheduler does; missing: {missing}"
        ) from error


def count() -> int:
    return distributed.global_state.num_processes if jax.distributed.is_initialized() else 1


def index() -> int:
    """Of this process; process 0 writes what there is one of."""
    return distributed.global_state.process_id if jax.distributed.is_initialized() else 0


def exchange(value: str) -> list[str]:
    """What each process gave, in their order; the same list on all of them."""
    if count() == 1:
        return [value]
    client = distributed.global_state.client
    assert client is not None
    call = f"echo_jax/{next(_calls)}"
    client.key_value_set(f"{call}/{index()}", value)
    return [client.blocking_key_value_get(f"{call}/{i}", AGREE_TIMEOUT_S * 1000) for i in range(count())]


def from_first(value: str) -> str:
    """Process 0's value, on all of them."""
    return exchange(value if index() == 0 else "")[0]


def check_alike(values: Mapping[str, Any]) -> None:
    """ValueError, alike on all processes, that names what differs among their values and in which processes."""
    given = [json.loads(text) for text in exchange(json.dumps({k: str(v) for k, v in values.items()}))]
    differences = []
    for name in dict.fromkeys(itertools.chain(*given)):
        if len({of_process.get(name) for of_process in given}) > 1:
            found = ", ".join(f"{of_process.get(name)} (process {i})" for i, of_process in enumerate(given))
            differences.append(f"{name}: {found}")
    if differences:
        raise ValueError("\n  ".join(["all processes must be started alike; these differ:", *differences]))


def check_started_alike(args: ProcessArgs) -> None:
    """`check_alike` of whatever makes another program: flags, versions, environment."""
    flags = {name: value for name, value in vars(args).items() if name != "process_id"}
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    versions = {name: importlib.metadata.version(name) for name in packages}
    environment = {name: os.environ.get(name, "") for name in ("ECHO_JAX_ALGORITHM", "JAX_PLATFORMS", "XLA_FLAGS")}
    check_alike({**flags, **versions, "echo_jax": echo_jax.__version__, **environment})


@contextlib.contextmanager
def first_alone() -> Iterator[bool]:
    """A block whose work process 0 does, as what it yields says; all wait for it, and an error in it is everyone's."""
    problem, error = "", None
    try:
        yield index() == 0
    except Exception as raised:
        if count() == 1:
            raise
        problem, error = f"{type(raised).__name__}: {raised}", raised
    problem = from_first(problem)
    if error is not None:
        raise error
    if problem:
        raise RuntimeError(f"process 0 failed with {problem}")


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """A block in which an error ends the process at once, if it is one of several, so that the others notice.

    An orderly end would wait for peers that are themselves waiting for this one.
    """
    try:
        yield
    except Exception:
        if count() == 1:
            raise
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        if index() == 0:
            time.sleep(2)  # the end of process 0 aborts the others, who may be about to say what went wrong
        os._exit(1)


class StopSignal:
    """SIGTERM or SIGINT, remembered so that the loop can save before it stops. More of them change nothing.

    With several processes a signal to any of them stops all of them before the same step: JAX's preemption service,
    which has caught SIGTERM since `join`, agrees on it.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        if count() == 1:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._handle)
        else:
            signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))

    def _handle(self, number: int, _frame: Any) -> None:
        self.received = self.received or signal.Signals(number)

    def before(self, step: int) -> bool:
        """Whether to stop before this step. To be asked before every step, on every process."""
        if count() > 1 and self.received is None and multihost_utils.reached_preemption_sync_point(step):
            self.received = signal.SIGTERM
        return self.received is not None


def _open_mpi() -> dict[str, Any]:
    """Number and index of processes under Open MPI, whose newer releases do not tell JAX the coordinator."""
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) == 1:
        return {}
    names = {"num_processes": "OMPI_COMM_WORLD_SIZE", "process_id": "OMPI_COMM_WORLD_RANK"}
    return {name: int(os.environ[variable]) for name, variable in names.items()}


def _runs_in_cluster() -> bool:
    """Whether variables of a scheduler, or JAX's own, say that this is one of several processes."""
    slurm = "SLURM_STEP_NODELIST" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1
    kubernetes = "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ
    return slurm or kubernetes or "JAX_COORDINATOR_ADDRESS" in os.environ
