"""Flax NNX layers whose communication is compensated: the tensor-parallel halves of a transformer block.

Modules are built with global shapes and are called, inside shard_map with check_vma=True, with the shards that their
parameters' `out_sharding` metadata names (`nnx.get_partition_spec`). Dimensions: D features in, F features out, V
vocabulary, n ranks along `axis_name`; `...` are batch and sequence. A block reads

    x, backward = echo_psum_grad(norm(h), axis, streams.backward, config)     one backward sum a block input
    q, k, v = q_proj(x), k_proj(x), v_proj(x)                                 column-parallel: no communication
    y, forward = o_proj(attention(q, k, v), streams.forward)                  row-parallel: one forward sum
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from echo_jax.axes import AxisName, axis_names, axis_size, cast_varying
from echo_jax.collectives import echo_psum
from echo_jax.config import EchoConfig

EXACT = EchoConfig(algorithm="exact", feedback=False)
_NORMAL = nnx.initializers.normal(0.02)
_ZEROS = nnx.initializers.zeros


class ColumnParallelLinear(nnx.Module):
    """y[..., F/n] = x[..., D] @ kernel[D, F/n], split over output features. No communication.

    x must vary over `axis_name` (the output of `echo_psum_grad`), so that its gradient is summed there once for all
    layers that read it.

    Args:
      in_features, out_features: D and F, global.
      axis_name: mesh axis that F is split over; None keeps the kernel whole on every rank.
      dtype: of the computation and of y; parameters are kept in `param_dtype`.
      lora_rank: r; above 0 the kernel has a low-rank update, lora_scale * lora_a[D, r] @ lora_b[r, F/n], that starts
        at zero (LoRA, arXiv:2106.09685). lora_a is whole on every rank: its gradient is a `lax.psum` of D*r values in
        `dtype`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis_name: str | None,
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = _NORMAL,
        lora_rank: int = 0,
        lora_scale: float = 1.0,
        rngs: nnx.Rngs,
    ):
        self.dtype, self.lora_scale = dtype, lora_scale
        self.kernel = _sharded_param(kernel_init, rngs, (in_features, out_features), param_dtype, (None, axis_name))
        if lora_rank:
            self.lora_a = _sharded_param(_NORMAL, rngs, (in_features, lora_rank), param_dtype, (None, None))
            self.lora_b = _sharded_param(_ZEROS, rngs, (lora_rank, out_features), param_dtype, (None, axis_name))

    def __call__(self, x: jax.Array, outputs: jax.Array | None = None) -> jax.Array:
        """x[..., D] -> y[..., F/n]; with outputs, int[k], only those features of this rank's: y[..., k]."""
        take = (lambda kernel: kernel) if outputs is None else (lambda kernel: jnp.take(kernel, outputs, axis=1))
        x = x.astype(self.dtype)
        y = jnp.matmul(x, take(self.kernel[...]).astype(self.dtype))
        if not hasattr(self, "lora_a"):
            return y
        return y + _low_rank(x, self.lora_a[...], take(self.lora_b[...]), self.lora_scale, self.dtype)


class RowParallelLinear(nnx.Module):
    """y[..., F] = sum over ranks of x[..., D/n] @ kernel[D/n, F], split over input features: one compensated sum.

    Takes and returns the forward stream's state (`Streams.forward`; None with feedback=False).

    Args:
      in_features, out_features: D and F, global.
      axis_name: mesh axis that D is split over.
      config: of the sum.
      name: label of the sum.
      dtype: of the computation, of what is summed and of y.
      lora_rank, lora_scale: as in `ColumnParallelLinear`, with lora_a[D/n, r] split and lora_b[r, F] whole; the update
        is part of what is summed.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis_name: str,
        config: EchoConfig,
        name: str | None = None,
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = _NORMAL,
        lora_rank: int = 0,
        lora_scale: float = 1.0,
        rngs: nnx.Rngs,
    ):
        self.axis_name, self.config, self.name, self.dtype = axis_name, config, name, dtype
        self.lora_scale = lora_scale
        self.kernel = _sharded_param(kernel_init, rngs, (in_features, out_features), param_dtype, (axis_name, None))
        if lora_rank:
            self.lora_a = _sharded_param(_NORMAL, rngs, (in_features, lora_rank), param_dtype, (axis_name, None))
            self.lora_b = _sharded_param(_ZEROS, rngs, (lora_rank, out_features), param_dtype, (None, None))

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        x = x.astype(self.dtype)
        partial = jnp.matmul(x, self.kernel[...].astype(self.dtype))
        if hasattr(self, "lora_a"):
            partial = partial + _low_rank(x, self.lora_a[...], self.lora_b[...], self.lora_scale, self.dtype)
        return echo_psum(partial, self.axis_name, state, self.config, name=self.name)


class VocabParallelEmbed(nnx.Module):
    """Embedding table[V, D], split over the vocabulary.

    A token's row lives on one rank, so the sum that brings it to all of them adds zeros: exact in any dtype, and exact
    by default (`config`). Where the rows are what the layers' sums are added to, this sum is the first call of their
    stream: with feedback, `__call__` takes and returns the stream's state, and what coding the rows leaves is fed to
    the first layer.

    Args:
      num_embeddings, features: V and D, global; n must divide V.
      axis_name: mesh axis that V is split over.
      config: of the sum.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        axis_name: str,
        config: EchoConfig = EXACT,
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.float32,
        embedding_init: nnx.Initializer = _NORMAL,
        rngs: nnx.Rngs,
    ):
        self.axis_name, self.config, self.dtype = axis_name, config, dtype
        shape = (num_embeddings, features)
        self.embedding = _sharded_param(embedding_init, rngs, shape, param_dtype, (axis_name, None))

    def __call__(self, tokens: jax.Array, state: Any = None) -> tuple[jax.Array, Any]:
        """int[...] -> (dtype[..., D], equal on all ranks; the stream's state, None with feedback=False)."""
        table = self.embedding[...]
        local, mine = _local_index(tokens, table.shape[0], self.axis_name)
        rows = jnp.where(mine[..., None], table[local].astype(self.dtype), 0)
        return echo_psum(rows, self.axis_name, state, self.config, name="embed")

    def attend(self, x: jax.Array) -> jax.Array:
        """dtype[..., D] that varies over the axis -> this rank's logits, dtype[..., V/n]: the tied output head."""
        return jnp.matmul(x.astype(self.dtype), self.embedding[...].astype(self.dtype).T)


def vocab_parallel_cross_entropy(logits: jax.Array, labels: jax.Array, axis_name: AxisName) -> jax.Array:
    """Cross-entropy of logits that are split over the vocabulary. No rank ever holds a full row of logits.

    Two small exact collectives: a maximum, and a sum of two float32 numbers a label.

    Args:
      logits: float[..., V/n], this rank's part, varying over the axis.
      labels: int[...], from 0 to V-1, equal on all ranks of the axis.

    Returns:
      float32[...], nats, equal on all ranks of the axis. NaN for a label outside the vocabulary.
    """
    logits = logits.astype(jnp.float32)
    largest = lax.pmax(lax.stop_gradient(logits.max(-1)), axis_name)
    logits = logits - largest[..., None]
    local, mine = _local_index(labels, logits.shape[-1], axis_name)
    picked = jnp.take_along_axis(logits, local[..., None], axis=-1)[..., 0]
    sums = jnp.stack([jnp.exp(logits).sum(-1), jnp.where(mine, picked, 0.0), mine.astype(jnp.float32)])
    total, label_logit, found = lax.psum(sums, axis_name)
    return jnp.where(found > 0, jnp.log(total) - label_logit, jnp.nan)


def _local_index(index: jax.Array, local_size: int, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """A global index into a split axis -> (local index, clipped to it; whether this rank holds it)."""
    local = cast_varying(index, axis_names(axis_name)) - lax.axis_index(axis_name) * local_size
    mine = (local >= 0) & (local < local_size)
    return jnp.clip(local, 0, local_size - 1), mine


def _low_rank(x: jax.Array, a: jax.Array, b: jax.Array, scale: float, dtype: Any) -> jax.Array:
    return jnp.matmul(jnp.matmul(x, a.astype(dtype)), b.astype(dtype)) * jnp.asarray(scale, dtype)


def _sharded_param(init: Any, rngs: nnx.Rngs, shape: Any, dtype: Any, sharding: Any) -> nnx.Param:
    # Not sharded eagerly: parameters are placed by whoever builds the module, who knows the mesh.
    return nnx.Param(init(rngs.params(), shape, dtype), out_sharding=sharding, eager_sharding=False)


def local_heads(num_heads: int, num_kv_heads: int, axis_name: AxisName) -> tuple[int, jax.Array | None]:
    """Which key/value heads this rank's query heads read, when query heads are split over the axis in order.

    Returns:
      (number of local key/value heads, int32[number]: their global indices). The indices are None where the ranks
      divide the key/value heads, which then are split as the query heads are; else every rank holds them all and
      takes these.
    """
    ranks = axis_size(axis_name)
    if num_heads % num_kv_heads or num_heads % ranks:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads ({num_kv_heads}) and of the ranks along {axis_name!r} "
            f"({ranks}), found {num_heads}"
        )
    if num_kv_heads % ranks == 0:
        return num_kv_heads // ranks, None
    queries, group = num_heads // ranks, num_heads // num_kv_heads
    kv = 1 if group % queries == 0 else queries  # one head for all local queries, or one each
    first = lax.axis_index(axis_name) * queries
    return kv, (first + jnp.arange(kv) * (queries // kv)) // group
