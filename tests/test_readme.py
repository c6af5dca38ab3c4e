"""The README's example runs as shown and prints what the README says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d\.\d+", text)]


def printed_by(code: str) -> list[float]:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return numbers(
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
    )


@pytest.mark.quick
def test_the_example_prints_what_the_readme_says():
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    said, said_without = (numbers(re.search(p, readme)[1]) for p in (r"It prints `(.*?)`", r"both are (\S+)\.\n"))
    # The last digit may differ between versions of XLA.
    assert printed_by(example) == pytest.approx(said, rel=0.02)
    assert printed_by(example.replace("EchoConfig()", "EchoConfig(feedback=False)")) == pytest.approx(
        2 * said_without, rel=0.02
    )
