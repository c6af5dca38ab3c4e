"""The devices that a command runs on."""

from __future__ import annotations

import collections
import sys
from typing import Any

import jax
import jax.extend
from tqdm import tqdm

from models import processes


def take_devices(needed: int) -> list[Any]:
    """The first `needed` devices; virtual CPU devices if the machine has too few, which it says.

    With several processes, `needed` must be all devices of all of them, an equal number in each; CPU devices are made.
    To be called before any array is made: those of other devices are lost then.

    Raises ValueError if several processes do not have these devices.
    """
    if (number := processes.count()) > 1:
        if needed % number:
            raise ValueError(f"the number of devices must be a multiple of the {number} processes, found {needed}")
        jax.config.update("jax_num_cpu_devices", needed // number)
        owners = collections.Counter(device.process_index for device in jax.devices())
        if set(owners.values()) != {needed // number}:
            raise ValueError(
                f"the {number} processes must have {needed} devices, no more, found {dict(owners)} (by process)"
            )
        return jax.devices()
    if len(jax.devices()) < needed:
        found = f"{len(jax.devices())} {jax.default_backend()} device(s)"
        jax.extend.backend.clear_backends()
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", needed)
        tqdm.write(f"found {found}, {needed} are needed: running on {needed} virtual CPU devices", file=sys.stderr)
    return jax.devices()[:needed]
