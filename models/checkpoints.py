"""A training run's checkpoints: whole or not there, and checked to the last byte before they are read.

Beside what orbax writes, every checkpoint holds a list of its files, with their sizes and checksums, that is written
before the checkpoint is given its final name. So one that is there is complete, and damage is found before any array is
read, alike on all processes, each of which checks a share of the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from tqdm import tqdm

from echo_jax import Streams, checkpoint
from models import processes

FILES = "files.json"
KEPT = 3


class Checkpoints:
    """The checkpoints in a folder, one folder a step, the newest few kept; saved in the background.

    Args:
      folder: is made if it does not exist.
      configs: EchoConfigs of the streams that are saved.
      fall_back: whether damaged checkpoints that are newer than the newest good one are moved to `folder`-damaged;
        without, they are an error.

    Raises ValueError if a checkpoint is damaged, naming the file and what is wrong with it.
    """

    def __init__(self, folder: Path, configs: Streams, *, fall_back: bool = False):
        self.folder, self._configs, self._saving = folder.absolute(), configs, 0
        self.newest = self._newest_good(fall_back)
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEPT,
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._list_files),
            ),
        )

    def save(self, step: int, state: Any, streams: Streams, progress: dict[str, Any]) -> None:
        """Begin to save; what it is given may be donated as soon as this returns.

        Raises OSError if this checkpoint, or the one before, cannot be written.
        """
        self._finish()
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            progress=ocp.args.JsonSave({"arrays": _describe(state), **progress}),
            **checkpoint.save_args(streams, self._configs),
        )
        self._saving = step
        with self._naming_step():
            self._manager.save(step, args=args)

    def restore(self, state: Any, streams: Streams) -> tuple[Any, Streams, dict[str, Any]]:
        """(state, streams, progress) of the newest checkpoint, in the places of those given.

        Raises ValueError if it holds other arrays than those given: it is another model's.
        """
        step = self.newest
        if step is None:
            raise ValueError(f"there is no checkpoint in {self.folder}")
        progress = self._manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))["progress"]
        found, wanted = progress.pop("arrays"), _describe(state)
        differing = [
            f"{name} is {found.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} here"
            for name in {**found, **wanted}
            if found.get(name) != wanted.get(name)
        ]
        if differing:
            more = f"\n  and {len(differing) - 8} more" if len(differing) > 8 else ""
            raise ValueError(
                "\n  ".join([f"the checkpoint of step {step} in {self.folder} is another model's:", *differing[:8]])
                + more
            )
        streams = checkpoint.restore(self._manager, step, streams)
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))
        return restored["state"], streams, progress

    def close(self) -> None:
        """Wait until the last checkpoint is whole. Raises OSError if it cannot be written."""
        self._finish()
        self._manager.close()

    def _finish(self) -> None:
        with self._naming_step():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _naming_step(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise OSError(
                f"the checkpoint of step {self._saving} cannot be written to {self.folder}, where older ones are as "
                f"they were: {error}"
            ) from error

    # --- the list of files ----------------------------------------------------------------------------------------

    def _list_files(self) -> None:
        """Called on process 0 when all files of a checkpoint are written, before it is moved to its final name."""
        (unfinished,) = self.folder.glob(f"{self._saving}.orbax-checkpoint-tmp*")
        files = {str(path.relative_to(unfinished)): _fingerprint(path) for path in _files(unfinished)}
        (unfinished / FILES).write_text(json.dumps(files, indent=0))

    def _newest_good(self, fall_back: bool) -> int | None:
        listed = sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdigit())
        steps = json.loads(processes.from_first(json.dumps(listed)))
        for step in reversed(steps):
            problem = next(filter(None, processes.exchange(self._problem(step))), None)
            if problem is None:
                return step
            message = f"the checkpoint of step {step} in {self.folder} is damaged: {problem}"
            if not fall_back:
                older = ", ".join(map(str, steps[: steps.index(step)])) or "none"
                raise ValueError(
                    f"{message}. Older ones: {older}. --fall-back moves it aside and goes on from the newest good one"
                )
            with processes.first_alone() as writes:
                if writes:
                    self._set_aside(step)
                    tqdm.write(message)
        return None

    def _problem(self, step: int) -> str:
        """What is wrong with this process's share of the files; '' if nothing is."""
        folder = self.folder / str(step)
        try:
            listed = json.loads((folder / FILES).read_text())
            if not isinstance(listed, dict) or not listed:
                raise ValueError("it does not list files")
            names = sorted(listed)[processes.index() :: processes.count()]
            expected = {name: listed[name] for name in names}
        except (OSError, ValueError) as error:
            return f"{FILES} cannot be read ({type(error).__name__}: {error})"
        for name, wanted in expected.items():
            try:
                found = _fingerprint(folder / name)
            except (OSError, ValueError) as error:
                return f"{name} cannot be read ({error})"
            if found != wanted:
                return f"{name} has {found['bytes']} bytes of checksum {found['sha256']:.12}, expected {wanted!s:.100}"
        return ""

    def _set_aside(self, step: int) -> None:
        aside = self.folder.with_name(f"{self.folder.name}-damaged")
        aside.mkdir(exist_ok=True)
        names = (f"{step}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
        (self.folder / str(step)).rename(next(aside / name for name in names if not (aside / name).exists()))


def _describe(tree: Any) -> dict[str, str]:
    """Each array's dtype and shape by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _files(folder: Path) -> Iterator[Path]:
    """All but those at the top: orbax's notes on the checkpoint as a whole, which it is still to complete."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent != folder)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
