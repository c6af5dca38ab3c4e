"""Error-compensated 4-bit all-reduce for JAX.

    state = echo_jax.init_state(x, "tp", config)
    y, state = echo_jax.echo_psum(x, "tp", state, config)       # like lax.psum(x, "tp"), at a quarter of the bits

Everything here is used inside `jax.shard_map`; see `echo_psum` for the sum, `echo_psum_grad` for its conjugate,
`value_and_grad` for training, `compensated_psum` for data-parallel gradients in an optax chain, `echo_jax.nn` for Flax
layers and `echo_jax.checkpoint` for saving what is owed.
"""

from echo_jax.collectives import echo_psum, echo_psum_grad, flush, flush_grad, remat_policy
from echo_jax.config import EchoConfig
from echo_jax.gradients import Streams, init_streams, value_and_grad
from echo_jax.optim import clip_by_global_norm, compensated_psum, partition_specs, skip_nonfinite
from echo_jax.state import EchoState, init_state, residual_stats

__version__ = "0.1.0"

__all__ = [
    "EchoConfig",
    "EchoState",
    "Streams",
    "clip_by_global_norm",
    "compensated_psum",
    "echo_psum",
    "echo_psum_grad",
    "flush",
    "flush_grad",
    "init_state",
    "init_streams",
    "partition_specs",
    "remat_policy",
    "residual_stats",
    "skip_nonfinite",
    "value_and_grad",
]
