"""Sums over a mesh of 4 ranks that may be spread over processes; as a script, one of those processes.

python processes.py PROCESSES INDEX PORT OUT
"""

import os
import sys

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // int(sys.argv[1])}"

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import echo_jax


def sums(mesh: Mesh) -> dict[str, np.ndarray]:
    """Two calls of each algorithm: every local device's own copy of the results."""
    values = np.random.default_rng(0).normal(size=(4, 6, 512)).astype(np.float32)
    x = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("tp")), lambda where: values[where])

    def calls(x):
        results = {}
        for algorithm in ("two_shot", "one_shot"):
            config = echo_jax.EchoConfig(algorithm=algorithm)
            first, state = echo_jax.echo_psum(x[0], "tp", echo_jax.init_state(x[0], "tp", config), config)
            second, _ = echo_jax.echo_psum(x[0], "tp", state, config)
            results |= {f"{algorithm} first": first, f"{algorithm} second": second}
        return results

    results = jax.jit(jax.shard_map(calls, mesh=mesh, in_specs=P("tp"), out_specs=P()))(x)
    return {name: np.stack([np.asarray(s.data) for s in y.addressable_shards]) for name, y in results.items()}


if __name__ == "__main__":
    processes, index, port, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", processes, index, initialization_timeout=40, heartbeat_timeout_seconds=40
    )
    np.savez(out, **sums(jax.make_mesh((4,), ("tp",), (AxisType.Auto,))))
