"""The devices that a command runs on."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.extend
from tqdm import tqdm


def take_devices(needed: int) -> list[Any]:
    """The first `needed` devices; virtual CPU devices if the machine has too few, which it says.

    To be called before any array is made: those of other devices are lost then.
    """
    if len(jax.devices()) < needed:
        found = f"{len(jax.devices())} {jax.default_backend()} device(s)"
        jax.extend.backend.clear_backends()
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", needed)
        tqdm.write(f"found {found}, {needed} are needed: running on {needed} virtual CPU devices", file=sys.stderr)
    return jax.devices()[:needed]
