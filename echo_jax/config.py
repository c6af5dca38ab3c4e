"""What a compensated sum sends, what it feeds back, and when it stays exact."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

from echo_jax import residuals
from echo_jax.codecs import CODECS

ALGORITHMS = ("auto", "two_shot", "one_shot", "exact")
BACKENDS = ("auto", "xla")

# Below this many values a call is bound by latency, not by bytes: one token of a 64k-wide activation, or eight tokens
# of an 8k-wide one. A placeholder between the two regimes until it is measured per link; see docs/theory.md.
MIN_ELEMENTS = 65_536

_logger = logging.getLogger("echo_jax")


def _algorithm_override() -> str | None:
    """The algorithm forced by the environment, read once, when the library is imported."""
    value = os.environ.get("ECHO_JAX_ALGORITHM")
    if not value:
        return None
    if value != "exact":
        raise ValueError(f"ECHO_JAX_ALGORITHM must be 'exact' or unset, found {value!r}")
    _logger.warning("ECHO_JAX_ALGORITHM=exact: every echo_jax sum is exact, whatever its config says")
    return value


ALGORITHM_OVERRIDE = _algorithm_override()


@dataclasses.dataclass(frozen=True)
class EchoConfig:
    """How one compensated sum, or one stream of them, is carried out. Frozen and hashable: it can be a static argument.

    Attributes:
      codec: the code on the wire, a key of `echo_jax.codecs.CODECS`: 'hadamard_int3', 'hadamard_int4',
        'hadamard_int4.5', 'hadamard_int5', 'hadamard_int6', 'int4', 'int8', or 'none' (values in x's own dtype, summed
        in float32). docs/codes.md says what each does to a model.
      group_size: values that share a scale, at most: a power of two from 32 to 1024. The group that a call uses is the
        largest power of two up to it that divides the last axis (`echo_jax.layout.Layout`).
      feedback: whether rounding errors are kept and added to the next call. Without it the state is None.
      algorithm: 'two_shot' (all-to-all of codes, float32 sum, all-gather of codes: two roundings a value at most),
        'one_shot' (all-gather of codes, float32 sum: one rounding), 'exact' (`lax.psum` of x plus what is owed) or
        'auto' (exact below `min_elements`, else two_shot). One rank is always exact.
      min_elements: an 'auto' call on fewer values than this stays exact.
      residual: how errors are kept (`echo_jax.residuals`): 'int8', with a scale a group, 'bfloat16' or 'float32'.
      backend: implementation of the local stages: 'xla', or 'auto', which is 'xla' today.

    Raises:
      ValueError, TypeError: naming the field, what was found and what is allowed.
    """

    codec: str = "hadamard_int4"
    group_size: int = 128
    feedback: bool = True
    algorithm: str = "auto"
    min_elements: int = MIN_ELEMENTS
    residual: str = "int8"
    backend: str = "auto"

    def __post_init__(self) -> None:
        _check_choice("codec", self.codec, tuple(CODECS))
        _check_choice("algorithm", self.algorithm, ALGORITHMS)
        _check_choice("residual", self.residual, residuals.FORMATS)
        if self.backend in ("pallas", "pallas_interpret"):
            raise ValueError(f"backend={self.backend!r} has no kernels in this release; allowed: {BACKENDS}")
        _check_choice("backend", self.backend, BACKENDS)
        if not isinstance(self.feedback, bool):
            raise TypeError(f"feedback must be a bool, found {self.feedback!r}")
        _check_int("group_size", self.group_size)
        if self.group_size not in (32, 64, 128, 256, 512, 1024):
            raise ValueError(f"group_size must be a power of two from 32 to 1024, found {self.group_size}")
        _check_int("min_elements", self.min_elements)
        if self.min_elements < 0:
            raise ValueError(f"min_elements must be at least 0, found {self.min_elements}")

    def resolve(self, elements: int, ranks: int) -> str:
        """The algorithm that a call on `elements` values over `ranks` ranks runs: never 'auto'."""
        if ranks == 1 or elements == 0:
            return "exact"
        if ALGORITHM_OVERRIDE is not None:
            return ALGORITHM_OVERRIDE
        if self.algorithm == "auto":
            return "exact" if elements < self.min_elements else "two_shot"
        return self.algorithm


def _check_choice(field: str, found: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(found, str) or found not in allowed:
        raise ValueError(f"{field} must be one of {allowed}, found {found!r}")


def _check_int(field: str, found: Any) -> None:
    if isinstance(found, bool) or not isinstance(found, int):
        raise TypeError(f"{field} must be an int, found {found!r}")
