"""Sums over a mesh of ranks that may be spread over processes; as a script, one of those processes.

python processes.py sums PROCESSES INDEX PORT OUT                  two calls of each algorithm on 4 ranks
python processes.py calls PROCESSES INDEX PORT OUT CALLS           many calls of random sizes on a rank a process
"""

import hashlib
import itertools
import os
import sys
from typing import Any

if __name__ == "__main__":
    ranks_here = 4 // int(sys.argv[2]) if sys.argv[1] == "sums" else 1
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={ranks_here}"

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import echo_jax
from echo_jax import EchoConfig

SIZES = 24  # different ones at most, as each is compiled


def sums(mesh: Mesh) -> dict[str, np.ndarray]:
    """Two calls of each algorithm: every local device's own copy of the results."""
    values = np.random.default_rng(0).normal(size=(4, 6, 512)).astype(np.float32)
    x = _on_ranks(values, mesh)

    def calls(x):
        results = {}
        for algorithm in ("two_shot", "one_shot"):
            config = EchoConfig(algorithm=algorithm)
            first, state = echo_jax.echo_psum(x[0], "tp", echo_jax.init_state(x[0], "tp", config), config)
            second, _ = echo_jax.echo_psum(x[0], "tp", state, config)
            results |= {f"{algorithm} first": first, f"{algorithm} second": second}
        return results

    results = jax.jit(jax.shard_map(calls, mesh=mesh, in_specs=P("tp"), out_specs=P()))(x)
    return {name: np.stack([np.asarray(s.data) for s in y.addressable_shards]) for name, y in results.items()}


def calls(mesh: Mesh, number: int) -> dict[str, np.ndarray]:
    """'digests', of this process's y of every call, and 'elements' of each.

    Calls go round streams of random shapes, dtypes and configs, each with its own state; values of all magnitudes.
    """
    rng = np.random.default_rng(number)
    streams = [_Stream(mesh, rng) for _ in range(min(SIZES, number // 4))]
    digests, elements = [], []
    for call, stream in zip(range(number), itertools.cycle(streams), strict=False):
        y = stream.call(call)
        digests.append(hashlib.sha256(y.tobytes()).hexdigest())
        elements.append(y.size)
    return {"digests": np.array(digests), "elements": np.array(elements)}


class _Stream:
    def __init__(self, mesh: Mesh, rng: np.random.Generator):
        self._mesh = mesh
        columns = int(2 ** rng.uniform(0, 12))
        self._shape = (int(2 ** rng.uniform(0, 9 - np.log2(columns) / 2)), columns)
        self._dtype = rng.choice(["float32", "bfloat16", "float16"])
        config = EchoConfig(
            codec=rng.choice(["hadamard_int4", "int4", "int8"]),
            group_size=int(rng.choice([32, 128, 1024])),
            algorithm=rng.choice(["two_shot", "one_shot"]),
        )
        like = jax.ShapeDtypeStruct(self._shape, self._dtype)
        self._state: Any = echo_jax.init_state(like, "tp", config, mesh=mesh, spec=P())
        sum_ranks = lambda x, state: echo_jax.echo_psum(x[0], "tp", state, config)  # noqa: E731
        specs = {"in_specs": (P("tp"), P("tp")), "out_specs": (P(), P("tp"))}
        self._sum = jax.jit(jax.shard_map(sum_ranks, mesh=mesh, **specs))

    def call(self, seed: int) -> np.ndarray:
        """This process's copy of the next sum."""
        rng = np.random.default_rng(seed)
        values = rng.normal(size=(self._mesh.size, *self._shape)) * 10.0 ** rng.uniform(-4, 2)
        y, self._state = self._sum(_on_ranks(values.astype(self._dtype), self._mesh), self._state)
        return np.asarray(y.addressable_shards[0].data)


def _on_ranks(values: np.ndarray, mesh: Mesh) -> jax.Array:
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("tp")), lambda where: values[where])


if __name__ == "__main__":
    what, (count, index, port), out = sys.argv[1], map(int, sys.argv[2:5]), sys.argv[5]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", count, index, initialization_timeout=40, heartbeat_timeout_seconds=40
    )
    everyone = jax.make_mesh((len(jax.devices()),), ("tp",), (AxisType.Auto,))
    np.savez(out, **(sums(everyone) if what == "sums" else calls(everyone, int(sys.argv[6]))))
