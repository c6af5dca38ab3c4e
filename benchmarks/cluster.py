"""A cluster of processes on one machine: each in a network namespace of its own, joined by links of a given rate.

    python -m benchmarks.cluster --processes 4 --rate 200mbit -- train.py --preset tiny
    python -m benchmarks.cluster --processes 3 -- -m models.generate --prompt "Why is the sky blue?" --tp 3

What follows `--` is given to Python in every process, with --coordinator, --num-processes and --process-id added. The
first process's output is shown as it is, the others' errors with their host's name before every line.

The hosts hang on one bridge. Both ends of every link pass `--rate` through a token bucket, so that a host sends and
receives so much at most, at the same time. Everything lives in namespaces that only this command's processes are in:
when it ends, killed or not, the kernel removes processes, links and mounts, and nothing of the machine was changed.
Needs Linux with iproute2 and util-linux, and root or the right to make user namespaces.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import tyro

PORT = 9876
BURST = "64kb"  # of the token bucket: a few packets of 64 kB segments
QUEUE = "50ms"  # how long a packet may wait in it before it is dropped
PATIENCE_S = 60  # for the others, once a process has ended with an error
_INSIDE = "ECHO_JAX_CLUSTER_INSIDE"


@dataclasses.dataclass(frozen=True)
class Args:
    """Run a command in several processes, each in a network namespace of its own."""

    command: Annotated[list[str], tyro.conf.Positional]
    """Arguments of Python, after `--`."""
    processes: int = 4
    rate: str | None = None
    """Of every host's link in each direction, as tc writes it, such as 200mbit; by default it is not limited."""


def main(args: Args) -> int:
    if not 1 <= args.processes <= 250:
        raise ValueError(f"processes must be from 1 to 250, found {args.processes}")
    if args.rate is not None and not re.fullmatch(r"[1-9][0-9.]*([kmgt]?i?bit|[kmgt]?i?bps)", args.rate, re.IGNORECASE):
        raise ValueError(f"rate must look like 200mbit or 1gbit, found {args.rate!r}")
    if missing := [
        tool for tool in ("ip", "tc", "unshare", "nsenter", "setpriv") if shutil.which(tool, path=_path()) is None
    ]:
        raise FileNotFoundError(f"{', '.join(missing)} must be installed (packages iproute2 and util-linux)")
    if os.environ.get(_INSIDE) != "1":
        return _inside_namespaces()
    hosts = [f"host{number}" for number in range(args.processes)]
    with tempfile.TemporaryDirectory() as folder:
        _make_network(hosts, args.rate, Path(folder))
        return _run(hosts, args.command)


def _inside_namespaces() -> int:
    """This command again, as the first process of new namespaces: when it dies, all that are in them die."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    # The death of this process ends unshare, and the death of unshare the first process of the namespaces.
    unshare = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "unshare",
        *user,
        "--net",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    command = [*unshare, sys.executable, "-m", "benchmarks.cluster", *sys.argv[1:]]
    with subprocess.Popen(command, env={**os.environ, _INSIDE: "1", "PATH": _path()}, process_group=0) as inner:
        for number in (signal.SIGINT, signal.SIGTERM):
            # unshare passes nothing on; its child's id is known to the kernel alone, so the whole group gets it.
            signal.signal(number, lambda number, _: os.killpg(inner.pid, number))
        return inner.wait()


def _make_network(hosts: list[str], rate: str | None, folder: Path) -> None:
    """A bridge, and for every host a namespace with a link to it; names in /etc/hosts, as gloo looks up its own."""
    _do("mount -t tmpfs tmpfs /run")  # for ip's names of namespaces; this mount namespace's alone
    names = folder / "hosts"
    lines = [f"{_address(number)} {host}" for number, host in enumerate(hosts)]
    names.write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *lines, ""]))
    _do(f"mount --bind {names} /etc/hosts")
    _do("ip link add bridge type bridge")
    _do("ip link set bridge up")
    for number, host in enumerate(hosts):
        _do(f"ip netns add {host}")
        _do(f"ip link add link{number} type veth peer name eth0 netns {host}")
        _do(f"ip link set link{number} master bridge up")
        _do(f"ip -netns {host} address add {_address(number)}/24 dev eth0")
        for device in ("lo", "eth0"):
            _do(f"ip -netns {host} link set {device} up")
        if rate is not None:
            bucket = f"root tbf rate {rate} burst {BURST} latency {QUEUE}"
            _do(f"tc qdisc add dev link{number} {bucket}")  # what the host receives
            _do(f"tc -netns {host} qdisc add dev eth0 {bucket}")  # what it sends


def _run(hosts: list[str], command: list[str]) -> int:
    """Start the processes, pass signals on, and end them all if one fails. Returns the first failure's status, or 0."""
    processes: list[subprocess.Popen[str]] = []
    readers = []
    for number, host in enumerate(hosts):
        flags = ["--coordinator", f"{hosts[0]}:{PORT}", "--num-processes", str(len(hosts)), "--process-id", str(number)]
        enter = ["nsenter", f"--net=/run/netns/{host}", "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
        pipe = None if number == 0 else subprocess.PIPE
        process = subprocess.Popen(
            [*enter, host, sys.executable, *command, *flags], stdout=pipe, stderr=pipe, text=True, process_group=0
        )
        processes.append(process)
        for stream in filter(None, (process.stdout, process.stderr)):
            readers.append(threading.Thread(target=_show, args=(host, stream), daemon=True))
            readers[-1].start()

    def pass_on(number: int, _frame: Any) -> None:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    status, deadline = 0, None
    running = True
    while running:
        running = any(process.poll() is None for process in processes)
        for host, process in zip(hosts, processes, strict=True):
            if process.poll() and not status:
                status, deadline = process.returncode, time.monotonic() + PATIENCE_S
                print(f"[{host}] ended with {_status(process.returncode)}", file=sys.stderr)
        if deadline is not None and time.monotonic() > deadline:
            print(f"killing what has not ended {PATIENCE_S} s later", file=sys.stderr)
            pass_on(signal.SIGKILL, None)
            deadline = None
        time.sleep(0.05)
    for reader in readers:
        reader.join(5)
    return 128 - status if status < 0 else status


def _show(host: str, stream: Any) -> None:
    for line in stream:
        print(f"[{host}] {line}", end="", file=sys.stderr, flush=True)


def _status(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"status {code}"


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command!r} must be possible here, found {done.stderr.strip() or done.returncode!r}")


def _path() -> str:
    """With the folders of system commands, which not everyone's PATH has."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
