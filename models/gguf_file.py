"""GGUF files of llama.cpp's, opened by the gguf package."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np


def open_gguf(path: Path) -> Any:
    """The file's `gguf.GGUFReader`: fields and tensors, mapped, not read.

    Raises:
      FileNotFoundError, ValueError: naming the file; it is missing, or not a whole GGUF file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"path must be a checkpoint's folder or a .gguf file, found {path}")
    stat = path.stat()
    try:
        return _open(path.resolve(), stat.st_mtime_ns, stat.st_size)
    except Exception as error:  # the package raises whatever a wrong byte leads to
        raise ValueError(f"{path} is not a whole GGUF file: {error!r}") from error


def read_fields(path: Path, prefix: str = "", *, arrays: bool = False) -> dict[str, Any]:
    """Fields whose names start with `prefix`: numbers, texts, and lists of them, or None for those without `arrays`.

    Raises as `open_gguf`.
    """
    fields = {name: field for name, field in open_gguf(path).fields.items() if name.startswith(prefix)}
    try:
        is_array = lambda field: field.types[:1] == [9]  # noqa: E731 (gguf.GGUFValueType.ARRAY)
        return {name: None if is_array(field) and not arrays else field.contents() for name, field in fields.items()}
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a whole GGUF file: {error}") from error


@functools.lru_cache(maxsize=1)  # seconds of work for a large vocabulary; weights and tokenizer both need it
def _open(path: Path, _modified: int, _size: int) -> Any:
    import gguf  # slow to import, and needed for these files only

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            # The package's own gives an empty array past the end, and would make one for each element of an array
            # that a wrong count makes endless.
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError(f"it ends before byte {int(offset)}")
            return super()._get(offset, dtype, count, override_order)

    return Reader(path)
