"""Tests run on eight virtual CPU devices, in every process that pytest starts."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from training import Lab

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.pop("ECHO_JAX_ALGORITHM", None)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> "Lab":
    from training import Lab  # it imports JAX, which reads the environment above

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "train"  # one for all workers
    folder.mkdir(exist_ok=True)
    lab = Lab(folder)

    def write(text: Path) -> None:
        words = random.Random(0).choices(["to", "be", "or", "not", "that", "is", "the", "question"], k=20_000)
        (text / "text.txt").write_text(" ".join(words))

    lab.once("text", write)
    return lab


@pytest.fixture(scope="module")
def compiled_fast() -> Iterator[None]:
    """For tests that compile much and compute little: machine code is not optimized, which takes a third of the time.

    What XLA fuses, sends and allocates stays as it is.
    """
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
