"""Low-rank updates (LoRA, arXiv:2106.09685) of a transformer whose other parameters, the base, stay as they are.

    adapters, base = split(params)          params = join(adapters, base)
    adapters = init(config, key, mesh)      for the base of a published checkpoint
    merge(model)                            the same model without updates, for `weights.save`

Each is a function of the nested dict that `models.transformer` keeps parameters in. Adapters are its leaves lora_a and
lora_b, in the dicts that they have there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from models import transformer
from models.transformer import Params, TransformerConfig
from models.weights import Model


def split(params: Params) -> tuple[Params, Params]:
    """(adapters, base) of parameters, or of a tree of the same structure, such as their specs."""
    adapters: Params = {}
    base: Params = {}
    for key, value in params.items():
        if not isinstance(value, dict):
            (adapters if key in ("lora_a", "lora_b") else base)[key] = value
            continue
        for part, found in zip((adapters, base), split(value), strict=True):
            if found:
                part[key] = found
    return adapters, base


def join(adapters: Params, base: Params) -> Params:
    """Inverse of `split`."""
    joined = dict(base)
    for key, value in adapters.items():
        joined[key] = join(value, base.get(key, {})) if isinstance(value, dict) else value
    return joined


def init(config: TransformerConfig, key: jax.Array, mesh: Mesh) -> Params:
    """Fresh adapters of a config with a lora_rank: float32, on the mesh, the same values for every number of ranks.

    lora_b is zero, so that the model is what its base is. lora_a is normal with the deviation of the layers, 0.02: near
    the 1/sqrt(3 D) of the authors' code, which is 0.024 for D = 576 features and 0.009 for 4,096.
    """
    if not config.lora_rank:
        raise ValueError("config must have a lora_rank above 0, found 0")
    config = dataclasses.replace(config, param_dtype=jnp.float32)
    specs = split(transformer.param_specs(config, mesh.shape[config.comm.axis_name]))[0]
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    # The compiler drops the base, which nobody reads.
    return jax.jit(lambda key: split(transformer.init_params(config, key, mesh))[0], out_shardings=shardings)(key)


def merge(model: Model) -> Model:
    """The model with its updates added to the kernels, in float32; each kernel keeps its dtype and its sharding.

    In a kernel of 16 bits an update of less than half a unit in the last place is lost.
    """
    scale = model.config.linear_settings["lora_scale"]

    def merged(params: Params) -> Params:
        if "lora_a" in params:
            adapters, base = split(params)
            kernel = base["kernel"]
            compiled = jax.jit(_update, static_argnums=3, out_shardings=kernel.sharding)
            return {**base, "kernel": compiled(kernel, adapters["lora_a"], adapters["lora_b"], scale)}
        return {key: merged(value) if isinstance(value, dict) else value for key, value in params.items()}

    return dataclasses.replace(
        model, config=dataclasses.replace(model.config, lora_rank=0), params=merged(model.params)
    )


def _update(kernel_LDF: jax.Array, a_LDR: jax.Array, b_LRF: jax.Array, scale: float) -> jax.Array:
    def layer(of_layer: Any) -> jax.Array:
        kernel, a, b = (array.astype(jnp.float32) for array in of_layer)
        return (kernel + scale * jnp.matmul(a, b, precision=lax.Precision.HIGHEST)).astype(kernel_LDF.dtype)

    return lax.map(layer, (kernel_LDF, a_LDR, b_LRF))  # one layer's float32 at a time
