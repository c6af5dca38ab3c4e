"""train.py as a process that gets a signal at an exact moment, from itself.

python signalled.py SIGNALS FUNCTION CALL MOMENT FLAGS...

SIGNALS, such as SIGTERM or SIGTERM,SIGINT, are sent at the CALL-th call (from 1) of FUNCTION, a dotted name in train.py
such as Metrics.write: MOMENT is 'before' or 'after' the call.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import tyro

import train


def send_at(numbers: list[signal.Signals], function: str, call: int, moment: str) -> None:
    *path, name = function.split(".")
    owner: Any = functools.reduce(getattr, path, train)
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    @functools.wraps(original)
    def signalled(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        now = calls == call
        if now and moment == "before":
            send(numbers)
        result = original(*args, **kwargs)
        if now and moment == "after":
            send(numbers)
        return result

    setattr(owner, name, signalled)


def send(numbers: list[signal.Signals]) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    names, function, call, moment, *flags = sys.argv[1:]
    assert moment in ("before", "after")
    send_at([signal.Signals[name] for name in names.split(",")], function, int(call), moment)
    train.main(tyro.cli(train.Args, args=flags))
