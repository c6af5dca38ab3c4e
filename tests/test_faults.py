"""Disks that fill up, files that rot, folders of others: an error that says so, and nothing good is lost."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from training import PATIENCE, ROOT, Lab, assert_same_end, run, saved_arrays, saved_steps, uninterrupted

import echo_jax
from echo_jax import EchoConfig, Streams
from models.checkpoints import FILES, Checkpoints

CONFIG = EchoConfig(group_size=32)
CONFIGS = Streams(CONFIG, CONFIG)
STEPS = (4, 8, 12)


def contents(step: int, width: int = 64) -> tuple[Any, Streams]:
    """(state, streams) of random numbers, split over a mesh."""
    mesh, rng = mesh_of(data=2, model=4), np.random.default_rng(step)

    def array(shape: tuple[int, ...], spec: P) -> jax.Array:
        return jax.device_put(rng.normal(size=shape).astype(np.float32), NamedSharding(mesh, spec))

    state = {
        "params": {"kernel": array((width, width), P(None, "model")), "scale": array((width,), P())},
        "step": jax.device_put(jnp.int32(step), NamedSharding(mesh, P())),
    }
    streams = echo_jax.init_streams(
        jax.ShapeDtypeStruct((8, width), jnp.float32), "model", CONFIG, mesh=mesh, spec=P("data")
    )
    return state, jax.tree.map(lambda r: array(r.shape, r.sharding.spec).astype(r.dtype), streams)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of three steps."""
    folder = tmp_path_factory.mktemp("good") / "checkpoints"
    checkpoints = Checkpoints(folder, CONFIGS)
    assert checkpoints.newest is None
    for step in STEPS:
        checkpoints.save(step, *contents(step), {"data": step})
    checkpoints.close()
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run" / "checkpoints"))


def restored(folder: Path, *, fall_back: bool = False, width: int = 64) -> tuple[int | None, Any]:
    """(step, (state, streams, progress)) of the newest checkpoint."""
    checkpoints = Checkpoints(folder, CONFIGS, fall_back=fall_back)
    found = checkpoints.restore(*contents(0, width)) if checkpoints.newest is not None else None
    checkpoints.close()
    return checkpoints.newest, found


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


DAMAGES = [flip, truncate, remove]


# --- damaged checkpoints ----------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_good_checkpoint_comes_back_to_the_bit(folder: Path):
    step, (state, streams, progress) = restored(folder)
    assert (step, progress) == (12, {"data": 12})
    assert_same_bits((state, streams), contents(12))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_found_and_the_file_named(good: Path, tmp_path: Path, damage: Callable[..., None]):
    """And where it is of no consequence, as in orbax's notes on the whole, what is read is what was saved."""
    rng = random.Random(0)
    names = sorted(path.relative_to(good / "12") for path in (good / "12").rglob("*") if path.is_file())
    assert len(names) > 10
    for name in names:
        if (good / "12" / name).stat().st_size == 0 and damage is not remove:
            continue
        folder = Path(shutil.copytree(good, tmp_path / "damaged"))
        damage(folder / "12" / name, rng)
        if name.parent == Path() and name.name != FILES:
            assert_same_bits(restored(folder)[1][:2], contents(12))
        else:
            with pytest.raises(ValueError, match="the checkpoint of step 12 in .* is damaged: ") as error:
                restored(folder)
            assert name.name == FILES or str(name) in str(error.value)
            assert "Older ones: 4, 8" in str(error.value)
            assert sorted(path.name for path in folder.iterdir()) == ["12", "4", "8"]
        shutil.rmtree(folder)


@pytest.mark.quick
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_good_one_is_used_where_asked_for_and_the_others_are_kept_aside(
    folder: Path, damage: Callable[..., None]
):
    rng = random.Random(1)
    for step in (8, 12):
        damage(max((folder / str(step)).rglob("*"), key=lambda path: path.stat().st_size * path.is_file()), rng)
    older = {path: path.read_bytes() for path in (folder / "4").rglob("*") if path.is_file()}
    step, (state, streams, progress) = restored(folder, fall_back=True)
    assert (step, progress) == (4, {"data": 4})
    assert_same_bits((state, streams), contents(4))
    assert {path: path.read_bytes() for path in older} == older
    aside = folder.with_name("checkpoints-damaged")
    assert sorted(path.name for path in aside.iterdir()) == ["12", "8"]

    again = Checkpoints(folder, CONFIGS)  # the run goes on, and comes to these steps again
    for step in (8, 12):
        again.save(step, *contents(step), {"data": step})
    again.close()
    assert restored(folder)[0] == 12
    flip(folder / "12" / "echo" / "manifest.ocdbt", rng)
    assert restored(folder, fall_back=True)[0] == 8
    assert sorted(path.name for path in aside.iterdir()) == ["12", "12-2", "8"]


def test_where_no_checkpoint_is_good_a_run_begins_anew(folder: Path):
    for step in STEPS:
        (folder / str(step) / FILES).write_text("{}" if step == 12 else "[]")
    with pytest.raises(ValueError, match="damaged"):
        restored(folder)
    assert restored(folder, fall_back=True) == (None, None)


def test_what_a_killed_save_left_is_not_taken_for_a_checkpoint(folder: Path):
    shutil.copytree(folder / "12", folder / "16.orbax-checkpoint-tmp")
    assert restored(folder)[0] == 12
    assert not (folder / "16.orbax-checkpoint-tmp").exists()


def test_a_checkpoint_of_another_model_is_refused_naming_what_differs(folder: Path):
    with pytest.raises(ValueError, match="step 12 in .* is another model's") as error:
        restored(folder, width=128)
    assert "['params']['kernel'] is float32[64, 64] in the checkpoint, float32[128, 128] here" in str(error.value)
    assert len(saved_steps(folder.parent)) == 3


# --- whole runs -------------------------------------------------------------------------------------------------------


def mounted(lab: Lab, flags: list[str], size: str, script: str) -> subprocess.CompletedProcess[str]:
    """A shell script in a namespace where $DIR is a file system of a given size; TRAIN runs train.py."""
    train = " ".join([sys.executable, "train.py", *flags])
    mount = f'mount -t tmpfs -o size={size} tmpfs "$DIR" && '
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount + script.replace("TRAIN", train)]
    return subprocess.run(
        command, cwd=ROOT, env=lab.environment(DIR=flags[-1]), capture_output=True, text=True, timeout=PATIENCE
    )


can_mount = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"], capture_output=True).returncode != 0,
    reason="needs the right to make namespaces",
)


@can_mount
def test_a_full_disk_ends_the_run_with_an_error_and_older_checkpoints_are_as_they_were(lab: Lab, tmp_path: Path):
    """The disk has room for two checkpoints. With more room the run goes on."""
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    ended = mounted(lab, lab.flags(disk, "carry"), "18m", f'TRAIN; code=$?; cp -r "$DIR" {kept}; exit $code')
    assert ended.returncode == 1, ended.stdout
    assert "OSError: the checkpoint of step" in ended.stderr and "cannot be written to" in ended.stderr
    (*_, step) = saved_steps(kept)
    assert step < 12
    assert saved_arrays(kept)["state"]["step"] == step
    last = run(lab, lab.flags(kept, "carry"))
    assert last.code == 0, last.stderr
    assert f"going on from step {step}" in last.stdout


@can_mount
def test_a_folder_that_cannot_be_written_is_an_error_that_says_so(lab: Lab, tmp_path: Path):
    script = 'mount -o remount,ro "$DIR" && TRAIN'
    ended = mounted(lab, lab.flags(tmp_path, "carry"), "9m", script)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "Read-only file system" in last and str(tmp_path) in last


def test_a_run_with_a_damaged_checkpoint_goes_on_where_asked_to_with_the_bits_of_one_that_was_not(
    lab: Lab, tmp_path: Path
):
    workdir = Path(shutil.copytree(uninterrupted(lab, "carry"), tmp_path / "run"))
    flags = lab.flags(workdir, "carry")
    truncate(next((workdir / "checkpoints" / "12" / "state" / "d").iterdir()), random.Random(0))
    refused = run(lab, flags)
    assert refused.code == 1
    assert "ValueError: the checkpoint of step 12 in" in refused.stderr and "is damaged" in refused.stderr
    ended = run(lab, [*flags, "--fall-back"])
    assert ended.code == 0, ended.stderr
    assert "going on from step 8" in ended.stdout
    assert (workdir / "checkpoints-damaged" / "12").is_dir()
    assert_same_end(workdir, uninterrupted(lab, "carry"))
