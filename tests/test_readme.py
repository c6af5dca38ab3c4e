"""The README's example runs as shown and prints what the README says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.quick
def test_the_example_prints_what_the_readme_says():
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    wanted = {True: re.search(r"It prints `(.*?)`", readme)[1], False: re.search(r"both are (\S+?)\.\n", readme)[1]}
    for feedback, text in wanted.items():
        code = example if feedback else example.replace("EchoConfig()", "EchoConfig(feedback=False)")
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        printed = re.findall(r"\d\.\d+", done.stdout)
        if feedback:
            # The last digit may differ between versions of XLA.
            for found, want in zip(printed, re.findall(r"\d\.\d+", text), strict=True):
                assert abs(float(found) - float(want)) <= 0.02 * float(want), done.stdout
        else:
            assert all(abs(float(found) - float(text)) <= 0.02 * float(text) for found in printed), done.stdout
