"""A decoder-only transformer of the Qwen3 and Llama families, tensor-parallel over one mesh axis.

Everything here runs inside shard_map with check_vma=True, on one rank's shards. Dimensions, as suffixes and in shapes:

    B  batch (local to a data rank)    D  d_model          H  query heads       F  d_ff
    S  sequence                        V  vocabulary       K  key/value heads   C  head_dim      L  layers
    T  positions that a cache has room for

All communication of a step over the tensor-parallel axis, in order of the forward pass (sums in brackets are of the
backward pass, which runs the other way):

    embed           echo_psum, the first call of the forward stream
    [flush_grad]    what the backward stream still owes
    each layer      [echo_psum_grad], echo_psum after attention; [echo_psum_grad], echo_psum after the MLP
    flush           what the forward stream still owes
    head            [echo_psum_grad], then the loss's own small exact sums

Each is a sum of B*S*D values in its stream's code, the embedding and the two flushes too: exact, those would add an
eighth to the bits of a model of 30 layers, and to its quality next to nothing. Without feedback the embedding's sum is
exact, as nothing would make up for its error.

`prefill` and `decode` run the forward pass alone. Their stream starts from zero in each call, so that nothing is owed
from one request, or from one token, to another; and as only the last position of a prompt is read, only its debt is
settled, exactly.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import echo_jax
from echo_jax import EchoConfig, Streams
from echo_jax.nn import (
    EXACT,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbed,
    local_heads,
    vocab_parallel_cross_entropy,
)

Params = Any  # a nested dict of arrays, in the structure of `Transformer`'s state
Stats = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Communication:
    """How a model's sums over the tensor-parallel axis are carried out.

    Attributes:
      axis_name: the mesh axis.
      forward, backward: configs of the two streams.
      backward_sum: where gradients are summed: 'norm_output', as Megatron does, or 'residual_stream', before the norm,
        where the backward stream telescopes exactly (but trained worse, see docs/theory.md).
      settle: whether each stream pays what it owes where it ends; what comes back is the rounding of that payment, to
        be dropped. Without, the caller carries or drops the streams.
    """

    axis_name: str = "model"
    forward: EchoConfig = EchoConfig()
    backward: EchoConfig = EchoConfig()
    backward_sum: str = "norm_output"
    settle: bool = True

    def __post_init__(self) -> None:
        if self.backward_sum not in ("norm_output", "residual_stream"):
            raise ValueError(f"backward_sum must be 'norm_output' or 'residual_stream', found {self.backward_sum!r}")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of rotary wavelengths, `rope_type` 'llama3' in a published config.

    Wavelengths of fewer than original_context / high positions stay, those of more than original_context / low grow
    `factor` times, and between the two the frequency is interpolated.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    original_context: int = 8192

    def __call__(self, frequency: np.ndarray) -> np.ndarray:
        turns = self.original_context * frequency / (2 * np.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Shapes and numerics. `qk_norm` tells Qwen3 from Llama.

    `lora_rank` above 0 adds a low-rank update, scaled by lora_alpha / lora_rank, to every projection of the layers
    (LoRA, arXiv:2106.09685); see `models/lora.py`.

    Raises ValueError where heads do not divide.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    qk_norm: bool = True
    tie_embeddings: bool = True
    dtype: Any = jnp.bfloat16
    param_dtype: Any = jnp.float32
    lora_rank: int = 0
    lora_alpha: float = 16.0
    comm: Communication = Communication()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads={self.num_kv_heads}, found {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, found {self.head_dim}")
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank must be 0, for no low-rank updates, or more; found {self.lora_rank}")

    @property
    def linear_settings(self) -> dict[str, Any]:
        """What all projections of the layers share."""
        lora = {"lora_rank": self.lora_rank, "lora_scale": self.lora_alpha / max(self.lora_rank, 1)}
        return {"dtype": self.dtype, "param_dtype": self.param_dtype, **lora}

    def check_ranks(self, ranks: int) -> None:
        """ValueError unless the model can be split over this many tensor-parallel ranks."""
        for field in ("num_heads", "d_ff", "vocab_size"):
            if getattr(self, field) % ranks:
                raise ValueError(f"{field} must be a multiple of the {ranks} ranks, found {getattr(self, field)}")

    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(self, 1)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of all layers, dtype[L, B, T, K, C], split over heads: on each rank those its queries read."""

    k_LBTKC: jax.Array
    v_LBTKC: jax.Array

    def write(self, at: CacheIndex, k_BSKC: jax.Array, v_BSKC: jax.Array) -> Cache:
        return Cache(_write(self.k_LBTKC, at, k_BSKC), _write(self.v_LBTKC, at, v_BSKC))


@dataclasses.dataclass(frozen=True)
class CacheIndex:
    """Where tokens go in a cache: their layer, and each row's position for one token (None: from position 0 on)."""

    layer: jax.Array
    positions_B: jax.Array | None


def _write(cache_LBTKC: jax.Array, at: CacheIndex, new_BSKC: jax.Array) -> jax.Array:
    new_BSKC = new_BSKC.astype(cache_LBTKC.dtype)
    if at.positions_B is None:
        zero = jnp.zeros_like(at.layer)
        return lax.dynamic_update_slice(cache_LBTKC, new_BSKC[None], (at.layer, zero, zero, zero, zero))
    rows_B = jnp.arange(len(at.positions_B))
    return cache_LBTKC.at[at.layer, rows_B, at.positions_B].set(new_BSKC[:, 0])


class Attention(nnx.Module):
    """Grouped-query attention with rotary embeddings. Column-parallel in, row-parallel out."""

    def __init__(self, config: TransformerConfig, ranks: int, *, rngs: nnx.Rngs):
        self.config = config
        axis, width = config.comm.axis_name, config.head_dim
        kv_axis = axis if config.num_kv_heads % ranks == 0 else None  # too few to split: whole on every rank
        dtypes = {**config.linear_settings, "rngs": rngs}
        self.q_proj = ColumnParallelLinear(config.d_model, config.num_heads * width, axis_name=axis, **dtypes)
        self.k_proj = ColumnParallelLinear(config.d_model, config.num_kv_heads * width, axis_name=kv_axis, **dtypes)
        self.v_proj = ColumnParallelLinear(config.d_model, config.num_kv_heads * width, axis_name=kv_axis, **dtypes)
        self.o_proj = RowParallelLinear(
            config.num_heads * width,
            config.d_model,
            axis_name=axis,
            config=config.comm.forward,
            name="attention_out",
            kernel_init=_output_init(config),
            **dtypes,
        )
        if config.qk_norm:
            self.q_norm, self.k_norm = (_rms_norm(width, config, rngs) for _ in range(2))

    def __call__(
        self, x_BSD: jax.Array, state: Any, cache: Cache | None = None, at: CacheIndex | None = None
    ) -> tuple[jax.Array, Any, Cache | None]:
        """Without a cache, or without `at.positions_B`, tokens stand at positions 0 to S-1 and see one another."""
        config = self.config
        q_BSHC = _split_heads(self.q_proj(x_BSD), config.head_dim)
        _, kv_index = local_heads(config.num_heads, config.num_kv_heads, config.comm.axis_name)
        outputs = None
        if kv_index is not None:
            outputs = (kv_index[:, None] * config.head_dim + jnp.arange(config.head_dim)).reshape(-1)
        k_BSKC, v_BSKC = (_split_heads(proj(x_BSD, outputs), config.head_dim) for proj in (self.k_proj, self.v_proj))
        if config.qk_norm:
            q_BSHC, k_BSKC = self.q_norm(q_BSHC), self.k_norm(k_BSKC)
        first = 0 if at is None or at.positions_B is None else at.positions_B[:, None]
        positions = first + jnp.arange(x_BSD.shape[1])
        q_BSHC, k_BSKC = (rotary(a, positions, config.rope_theta, config.rope_scaling) for a in (q_BSHC, k_BSKC))

        settings: dict[str, Any] = {"is_causal": True}
        if cache is not None and at is not None:
            cache = cache.write(at, k_BSKC, v_BSKC)
            if at.positions_B is not None:
                k_BSKC, v_BSKC = cache.k_LBTKC[at.layer], cache.v_LBTKC[at.layer]
                seen_BT = jnp.arange(k_BSKC.shape[1]) <= at.positions_B[:, None]
                settings = {"mask": seen_BT[:, None, None, :]}
        out_BSHC = jax.nn.dot_product_attention(q_BSHC, k_BSKC, v_BSKC, **settings)
        y_BSD, state = self.o_proj(out_BSHC.reshape(*x_BSD.shape[:2], -1), state)
        return y_BSD, state, cache


class MLP(nnx.Module):
    """SwiGLU. Column-parallel in, row-parallel out."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        axis = config.comm.axis_name
        dtypes = {**config.linear_settings, "rngs": rngs}
        self.gate_proj = ColumnParallelLinear(config.d_model, config.d_ff, axis_name=axis, **dtypes)
        self.up_proj = ColumnParallelLinear(config.d_model, config.d_ff, axis_name=axis, **dtypes)
        self.down_proj = RowParallelLinear(
            config.d_ff,
            config.d_model,
            axis_name=axis,
            config=config.comm.forward,
            name="mlp_out",
            kernel_init=_output_init(config),
            **dtypes,
        )

    def __call__(self, x_BSD: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD), state)


class Block(nnx.Module):
    """h + attention(norm(h)), then h + mlp(norm(h)); the residual stream h_BSD is equal on all ranks."""

    def __init__(self, config: TransformerConfig, ranks: int, *, rngs: nnx.Rngs):
        self.comm = config.comm
        self.attention_norm = _rms_norm(config.d_model, config, rngs)
        self.attention = Attention(config, ranks, rngs=rngs)
        self.mlp_norm = _rms_norm(config.d_model, config, rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self, h_BSD: jax.Array, streams: Streams, cache: Cache | None = None, at: CacheIndex | None = None
    ) -> tuple[jax.Array, Streams, Cache | None]:
        forward, backward = streams.forward, streams.backward
        x_BSD, backward = block_input(self.attention_norm, h_BSD, backward, self.comm, "attention_in")
        y_BSD, forward, cache = self.attention(x_BSD, forward, cache, at)
        h_BSD = h_BSD + y_BSD
        x_BSD, backward = block_input(self.mlp_norm, h_BSD, backward, self.comm, "mlp_in")
        y_BSD, forward = self.mlp(x_BSD, forward)
        return h_BSD + y_BSD, Streams(forward, backward), cache


class Transformer(nnx.Module):
    """Tokens to logits. Built with global shapes; called, inside shard_map, on one rank's shards."""

    def __init__(self, config: TransformerConfig, ranks: int, *, rngs: nnx.Rngs):
        self.config = config
        axis = config.comm.axis_name
        dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}
        embed = config.comm.forward if config.comm.forward.feedback else EXACT
        self.embed = VocabParallelEmbed(config.vocab_size, config.d_model, axis_name=axis, config=embed, **dtypes)
        make_block = lambda key: Block(config, ranks, rngs=nnx.Rngs(key))  # noqa: E731
        keys = jax.random.split(rngs.params(), config.num_layers)
        self.blocks = nnx.vmap(make_block, transform_metadata={nnx.PARTITION_NAME: None})(keys)  # [L, ...] each
        self.final_norm = _rms_norm(config.d_model, config, rngs)
        if not config.tie_embeddings:
            self.head = ColumnParallelLinear(config.d_model, config.vocab_size, axis_name=axis, **dtypes)

    def __call__(
        self, tokens_BS: jax.Array, streams: Streams, *, keep_hidden: bool = False
    ) -> tuple[jax.Array, Streams, Stats]:
        """int32[B, S] -> (this rank's logits[B, S, V/n], streams, stats).

        Stats are `residual_stats` above the last layer, where the forward stream has a state; and, if asked for,
        'hidden', the residual stream above every layer, [L, B, S, D].
        """
        comm = self.config.comm
        h_BSD, forward = self.embed(tokens_BS, streams.forward)
        backward = streams.backward
        if comm.settle:
            h_BSD, backward = echo_jax.flush_grad(h_BSD, comm.axis_name, backward, comm.backward, exact=False)
        streams = Streams(forward, backward)

        graph, params = nnx.split(self.blocks)

        def layer(carry: tuple[jax.Array, Streams], params: Any) -> tuple[tuple[jax.Array, Streams], Any]:
            h_BSD, streams, _ = nnx.merge(graph, params)(*carry)
            return (h_BSD, streams), h_BSD if keep_hidden else None

        layer = jax.checkpoint(layer, policy=echo_jax.remat_policy, prevent_cse=False)
        (h_BSD, streams), hidden = lax.scan(layer, (h_BSD, streams), params)

        forward = streams.forward
        stats = {} if forward is None else echo_jax.residual_stats(*lax.stop_gradient((h_BSD, forward)))
        if keep_hidden:
            stats["hidden"] = hidden
        if comm.settle:
            h_BSD, forward = echo_jax.flush(h_BSD, comm.axis_name, forward, comm.forward, exact=False)
        logits, backward = self._head(h_BSD, streams.backward)
        return logits, Streams(forward, backward), stats

    def extend(
        self, tokens_BS: jax.Array, last_B: jax.Array, cache: Cache, positions_B: jax.Array | None
    ) -> tuple[jax.Array, Cache]:
        """The forward pass of `prefill` (no positions) and `decode`: logits[B, V/n] after token last_B of each row."""
        comm = self.config.comm
        h_BSD = jax.ShapeDtypeStruct((*tokens_BS.shape, self.config.d_model), self.config.dtype)
        h_BSD, forward = self.embed(tokens_BS, echo_jax.init_state(h_BSD, comm.axis_name, comm.forward))
        graph, params = nnx.split(self.blocks)

        # The whole cache is carried and written in place; as an input and an output of the scan it would be copied.
        def layer(carry: Any, layer: Any) -> tuple[Any, None]:
            h_BSD, streams, cache = carry
            index, params = layer
            return nnx.merge(graph, params)(h_BSD, streams, cache, CacheIndex(index, positions_B)), None

        layers = jnp.arange(self.config.num_layers), params
        (h_BSD, streams, cache), _ = lax.scan(layer, (h_BSD, Streams(forward, None), cache), layers)

        h_B1D, forward = h_BSD[jnp.arange(len(last_B)), last_B][:, None], streams.forward
        if comm.settle and forward is not None:
            if forward.layout.scheme == "flat" or h_BSD.shape[1] == 1:  # groups across rows, or no row but the last
                h_BSD, _ = echo_jax.flush(h_BSD, comm.axis_name, forward, comm.forward, exact=False)
                h_B1D = h_BSD[jnp.arange(len(last_B)), last_B][:, None]
            else:
                rows_B1 = (jnp.arange(len(last_B)) * h_BSD.shape[1] + last_B)[:, None]
                h_B1D, _ = echo_jax.flush(h_B1D, comm.axis_name, forward, comm.forward, rows=rows_B1)
        logits, _ = self._head(h_B1D, None)
        return logits[:, 0], cache

    def _head(self, h_BSD: jax.Array, backward: Any) -> tuple[jax.Array, Any]:
        x_BSD, backward = block_input(self.final_norm, h_BSD, backward, self.config.comm, "head_in")
        return self.embed.attend(x_BSD) if self.config.tie_embeddings else self.head(x_BSD), backward


def block_input(
    norm: nnx.RMSNorm, h_BSD: jax.Array, backward: Any, comm: Communication, name: str
) -> tuple[jax.Array, Any]:
    """norm(h), varying over the axis, with one sum of its gradient over the ranks that use it."""
    if comm.backward_sum == "residual_stream":
        h_BSD, backward = echo_jax.echo_psum_grad(h_BSD, comm.axis_name, backward, comm.backward, name=name)
        return norm(h_BSD), backward
    return echo_jax.echo_psum_grad(norm(h_BSD), comm.axis_name, backward, comm.backward, name=name)


def rotary(x_BSHC: jax.Array, positions: jax.Array, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Rotary position embedding (RoFormer, arXiv:2104.09864), halves paired as Qwen3 and Llama pair them.

    positions: int32[S], or int32[B, S] where rows differ.
    """
    half = x_BSHC.shape[-1] // 2
    frequency = theta ** (-np.arange(half) / half)
    if scaling is not None:
        frequency = scaling(frequency)
    angle_S1C = positions[..., None, None].astype(jnp.float32) * frequency.astype(np.float32)
    cos, sin = jnp.cos(angle_S1C), jnp.sin(angle_S1C)
    first, second = jnp.split(x_BSHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BSHC.dtype)


def _split_heads(x: jax.Array, head_dim: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, head_dim)


def _rms_norm(features: int, config: TransformerConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(features, epsilon=config.norm_eps, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)


def _output_init(config: TransformerConfig) -> nnx.Initializer:
    """Smaller by sqrt(2L), so that the residual stream's variance does not grow with depth (GPT-2)."""
    return nnx.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5)


# --- parameters and streams on a mesh ------------------------------------------------------------------------------


def abstract_params(config: TransformerConfig, ranks: int) -> Params:
    """Shapes and dtypes of the parameters."""
    return nnx.to_pure_dict(nnx.split(_abstract_model(config, ranks))[1])


def param_specs(config: TransformerConfig, ranks: int) -> Params:
    """PartitionSpec of every parameter, as shard_map and NamedSharding want them."""
    return nnx.to_pure_dict(nnx.get_partition_spec(nnx.split(_abstract_model(config, ranks))[1]))


def init_params(config: TransformerConfig, key: jax.Array, mesh: Mesh) -> Params:
    """Random parameters, placed on the mesh. The same values for every number of ranks."""
    ranks = mesh.shape[config.comm.axis_name]
    config.check_ranks(ranks)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(config, ranks))

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.split(Transformer(config, ranks, rngs=nnx.Rngs(key)))[1])

    return jax.jit(init, out_shardings=shardings)(key)


def init_streams(config: TransformerConfig, batch: int, sequence: int, mesh: Mesh, spec: PartitionSpec) -> Streams:
    """Zero streams for a global batch of int32[batch, sequence] tokens, sharded as `spec` says."""
    h_BSD = jax.ShapeDtypeStruct((batch, sequence, config.d_model), config.dtype)
    comm = config.comm
    return echo_jax.init_streams(h_BSD, comm.axis_name, comm.forward, comm.backward, mesh=mesh, spec=spec)


def apply(
    config: TransformerConfig, params: Params, tokens_BS: jax.Array, streams: Streams, *, keep_hidden: bool = False
) -> tuple[jax.Array, Streams, Stats]:
    """`Transformer` on one rank's shards of the parameters, inside shard_map."""
    return _merge(config, params)(tokens_BS, streams, keep_hidden=keep_hidden)


def prefill(
    config: TransformerConfig, params: Params, tokens_BS: jax.Array, last_B: jax.Array, length: int
) -> tuple[jax.Array, Cache]:
    """Read prompts, inside shard_map over the tensor-parallel axis.

    Args:
      tokens_BS: int32, padded at the end to one length; what a row is padded with changes nothing before it.
      last_B: int32, the index of each row's last token.
      length: T, positions that the cache has room for, S and what will be decoded.

    Returns:
      (logits[B, V/n] after the last tokens, cache).
    """
    config = _forward_only(config, tokens_BS.size)
    axis = config.comm.axis_name
    kv_heads, _ = local_heads(config.num_heads, config.num_kv_heads, axis)
    shape = (config.num_layers, len(tokens_BS), length, kv_heads, config.head_dim)
    empty_LBTKC = lax.pcast(jnp.zeros(shape, config.dtype), axis, to="varying")
    return _merge(config, params).extend(tokens_BS, last_B, Cache(empty_LBTKC, empty_LBTKC), None)


def decode(
    config: TransformerConfig, params: Params, tokens_B: jax.Array, positions_B: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """One token further: (logits[B, V/n] after tokens_B, which stand at positions_B; the cache with them written)."""
    config = _forward_only(config, tokens_B.size)
    return _merge(config, params).extend(tokens_B[:, None], jnp.zeros_like(tokens_B), cache, positions_B)


def _forward_only(config: TransformerConfig, tokens: int) -> TransformerConfig:
    """No backward stream; and no forward one where its sums, of this many tokens, stay exact anyway."""
    comm = config.comm
    algorithm = comm.forward.resolve(tokens * config.d_model, lax.axis_size(comm.axis_name))
    forward = EXACT if algorithm == "exact" else comm.forward
    return dataclasses.replace(config, comm=dataclasses.replace(comm, forward=forward, backward=EXACT))


def mean_loss(
    config: TransformerConfig, params: Params, streams: Streams, window_BS1: jax.Array
) -> tuple[jax.Array, tuple[Streams, Stats]]:
    """(cross-entropy float32[] in nats a token, (streams, stats)) of one rank's int32[B, S + 1] windows."""
    logits, streams, stats = apply(config, params, window_BS1[:, :-1], streams)
    losses_BS = vocab_parallel_cross_entropy(logits, window_BS1[:, 1:], config.comm.axis_name)
    return losses_BS.mean(), (streams, stats)


def _merge(config: TransformerConfig, params: Params) -> Transformer:
    """The model with this rank's shards of the parameters."""
    return nnx.merge(nnx.split(_abstract_model(config, lax.axis_size(config.comm.axis_name)))[0], params)


@functools.lru_cache(maxsize=32)
def _abstract_model(config: TransformerConfig, ranks: int) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(config, ranks, rngs=nnx.Rngs(0)))
