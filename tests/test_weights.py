"""Checkpoints: every bit comes back, each device reads its own part, a wrong file is named before it does harm."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, mesh_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from safetensors.numpy import load_file, save_file

from models import transformer, weights
from models.transformer import RopeScaling, TransformerConfig
from models.weights import Model

QWEN3 = TransformerConfig(
    vocab_size=48, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=64, tie_embeddings=False
)
LLAMA = dataclasses.replace(
    QWEN3, qk_norm=False, tie_embeddings=True, rope_theta=5e5, rope_scaling=RopeScaling(8.0), norm_eps=1e-5
)
INDEX = "model.safetensors.index.json"
Q8_0 = gguf.GGMLQuantizationType.Q8_0
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


# --- checkpoints -----------------------------------------------------------------------------------------------------


@functools.cache
def model_of(config: TransformerConfig, dtype: Any = jnp.float32, ranks: int = 1) -> Model:
    """Of random bits, infinities and subnormal numbers among them. No NaN: XLA's CPU compiler changes a payload."""
    rng = np.random.default_rng(0)
    specs = transformer.param_specs(config, ranks)

    def random(leaf: Any, spec: Any) -> jax.Array:
        bits = rng.integers(0, 256, (*leaf.shape, jnp.dtype(dtype).itemsize), dtype=np.uint8)
        values = bits.view(dtype)[..., 0]
        return jax.device_put(
            np.where(np.isnan(values), np.zeros((), dtype), values), NamedSharding(mesh_of(model=ranks), spec)
        )

    params = jax.tree.map(random, transformer.abstract_params(config, ranks), specs)
    return Model(dataclasses.replace(config, param_dtype=jnp.dtype(dtype)), params, {"max_position_embeddings": 64})


def load(path: Path, ranks: int = 1, **settings: Any) -> Model:
    return weights.load(path, mesh_of(model=ranks), **settings)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder to be left as it is."""

    @functools.cache
    def write(config: TransformerConfig, max_file_bytes: int = 10**9) -> Path:
        path = tmp_path_factory.mktemp("written") / "model"
        weights.save(path, model_of(config), max_file_bytes=max_file_bytes)
        return path

    return write


@pytest.fixture
def folder(written: Callable[..., Path], tmp_path: Path) -> Path:
    """One file, to be spoilt."""
    return shutil.copytree(written(QWEN3), tmp_path / "model")


@pytest.fixture
def files(written: Callable[..., Path], tmp_path: Path) -> Path:
    """Several files and an index, to be spoilt."""
    return shutil.copytree(written(QWEN3, 20_000), tmp_path / "files")


def change(path: Path, changes: dict[str, Any]) -> None:
    """Of a JSON file; ... leaves a field out."""
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not ...}))


def change_tensors(file: Path, changes: dict[str, np.ndarray | None]) -> None:
    found = load_file(file) | changes
    save_file({name: value for name, value in found.items() if value is not None}, file)


def gguf_fields(config: TransformerConfig) -> dict[str, Any]:
    family = "qwen3" if config.qk_norm else "llama"
    fields = {
        "block_count": config.num_layers,
        "context_length": 64,
        "embedding_length": config.d_model,
        "feed_forward_length": config.d_ff,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": config.rope_theta,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
    }
    names = {f"{family}.{name}": value for name, value in fields.items()}
    return {"general.architecture": family, **names, "tokenizer.ggml.bos_token_id": 0}


def gguf_tensors(config: TransformerConfig, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Published tensors as llama.cpp's converter writes them."""
    names = {**weights._GGUF_MODEL_NAMES, **weights._GGUF_LAYER_NAMES}
    found = {}
    for name, values in tensors.items():
        if not config.qk_norm and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = values.reshape(-1, 2, config.head_dim // 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        found[f"blk.{layer[1]}.{names[layer[2]]}" if layer else names[name]] = values
    if config.rope_scaling is not None:
        frequency = config.rope_theta ** (-np.arange(config.head_dim // 2) / (config.head_dim // 2))
        found["rope_freqs.weight"] = np.float32(frequency / config.rope_scaling(frequency))
    return found


def write_gguf(path: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray], **settings: Any) -> Path:
    writer = gguf.GGUFWriter(path, "", **settings)
    writer.kv_data = [{}]  # without the architecture, which is one of the fields
    for name, value in fields.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif value is not ...:
            writer.add_array(name, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=Q8_0 if values.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def written_tensors(written: Callable[..., Path]) -> Callable[..., dict[str, np.ndarray]]:
    return lambda config: gguf_tensors(config, load_file(written(config) / "model.safetensors"))


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("config", [QWEN3, LLAMA], ids=["qwen3", "llama"])
def test_what_is_saved_is_loaded_bit_for_bit_at_any_number_of_ranks(
    tmp_path: Path, config: TransformerConfig, dtype: str
):
    model = model_of(config, dtype, 2)
    weights.save(tmp_path / "model", model)
    assert [file.name for file in sorted((tmp_path / "model").iterdir())] == ["config.json", "model.safetensors"]
    for ranks in (1, 4):
        found = load(tmp_path / "model", ranks)
        assert found.config == dataclasses.replace(model.config, dtype=jnp.bfloat16)
        assert_same_bits(found.params, model.params)
        specs = transformer.param_specs(config, ranks)
        jax.tree.map(lambda leaf, spec: leaf.sharding.spec == spec or pytest.fail(spec), found.params, specs)


@pytest.mark.quick
@pytest.mark.parametrize("config", [QWEN3, LLAMA], ids=["qwen3", "llama"])
def test_both_layouts_give_the_same_parameters(
    tmp_path: Path, written: Callable[..., Path], written_tensors: Any, config: TransformerConfig
):
    path = write_gguf(tmp_path / "model.gguf", gguf_fields(config), written_tensors(config))
    for ranks in (1, 4):
        wanted, found = load(written(config), ranks), load(path, ranks)
        assert_same_bits(found.params, wanted.params)
        assert found.config == wanted.config
    assert found.published == {"max_position_embeddings": 64, "bos_token_id": 0}


def test_quantised_rows_are_cut_between_ranks_inside_a_block(tmp_path: Path, written_tensors: Any):
    rng = np.random.default_rng(0)
    coded = {name: rng.normal(size=values.shape).astype(np.float32) for name, values in written_tensors(QWEN3).items()}
    coded |= {name: gguf.quants.quantize(values, Q8_0) for name, values in coded.items() if values.ndim == 2}
    meant = {name: v if v.dtype == np.float32 else gguf.quants.dequantize(v, Q8_0) for name, v in coded.items()}
    fields = gguf_fields(QWEN3)
    wanted = load(write_gguf(tmp_path / "meant.gguf", fields, meant))
    for ranks in (1, 4):  # a quarter of 64 columns is half a block
        assert_same_bits(load(write_gguf(tmp_path / "coded.gguf", fields, coded), ranks).params, wanted.params)


def test_tensors_keep_their_dtype_and_layers_that_differ_get_one_that_holds_both(folder: Path):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    half = {name: np.ones(value.shape, np.float16) for name, value in tensors.items() if "layers.0" in name}
    bfloat16 = {name: np.ones(value.shape, jnp.bfloat16) for name, value in tensors.items() if "norm" in name}
    change_tensors(file, half | bfloat16)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, load(folder).params)
    assert dtypes["embed"]["embedding"] == "float32"
    assert dtypes["final_norm"]["scale"] == "bfloat16"
    assert dtypes["blocks"]["attention"]["q_norm"]["scale"] == "bfloat16"
    assert dtypes["blocks"]["attention"]["q_proj"]["kernel"] == "float32"

    model = load(folder, param_dtype=jnp.bfloat16)
    assert model.config.param_dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.bfloat16)}


def test_small_files_hold_every_tensor_once_and_give_the_same_bits(tmp_path: Path):
    model, limit = model_of(QWEN3, "bfloat16"), 10_000
    weights.save(tmp_path / "one", model)
    weights.save(tmp_path / "several", model, max_file_bytes=limit)
    files = sorted((tmp_path / "several").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, 1 + len(files))
    ]
    held = [load_file(file) for file in files]
    assert len(files) > 3 and all(sum(t.nbytes for t in file.values()) <= limit for file in held)
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    assert Counter(name for file in held for name in file) == Counter(tensors.keys())

    index = json.loads((tmp_path / "several" / INDEX).read_text())
    assert index["weight_map"] == {name: file.name for file, names in zip(files, held, strict=True) for name in names}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert_same_bits(load(tmp_path / "several").params, model.params)

    weights.save(tmp_path / "tensor each", model, max_file_bytes=1)
    assert len(list((tmp_path / "tensor each").glob("*.safetensors"))) == len(tensors)


def test_a_saved_config_keeps_what_the_library_has_no_use_for(folder: Path, tmp_path: Path):
    rope = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    rope["original_max_position_embeddings"] = 8192
    older = {"rope_parameters": ..., "rope_theta": 10_000, "rope_scaling": rope, "dtype": ..., "torch_dtype": "float32"}
    for number, changes in enumerate(({}, older)):
        change(folder / "config.json", changes | {"eos_token_id": [1, 2], "transformers_version": "4.40"})
        model = load(folder, param_dtype=jnp.bfloat16)
        weights.save(tmp_path / str(number), model)
        before, after = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / str(number)))
        dtypes = {name: "bfloat16" for name in ("dtype", "torch_dtype") if name in before} | {"dtype": "bfloat16"}
        assert after == before | dtypes
        assert load(tmp_path / str(number)).config == model.config


def test_with_both_one_file_and_an_index_the_one_file_counts(folder: Path):
    (folder / INDEX).write_text("{")
    (folder / "consolidated.safetensors").write_bytes(b"of another kind")
    load(folder)


def test_frequencies_that_old_checkpoints_hold_are_passed_over(folder: Path):
    buffer = np.ones(8, np.float32)
    change_tensors(folder / "model.safetensors", {"model.layers.0.self_attn.rotary_emb.inv_freq": buffer})
    load(folder)


def test_a_tied_models_head_is_its_embedding(written: Callable[..., Path], tmp_path: Path):
    folder = shutil.copytree(written(LLAMA), tmp_path / "model")
    file = folder / "model.safetensors"
    head = load_file(file)["model.embed_tokens.weight"]
    change_tensors(file, {"lm_head.weight": head})
    assert_same_bits(load(folder, 2).params, load(written(LLAMA)).params)

    head[-1, 0] = 0.5
    change_tensors(file, {"lm_head.weight": head})
    with pytest.raises(ValueError, match=f"{file}: tensor lm_head.weight must equal model.embed_tokens.weight, as the"):
        load(folder, 2)
    change_tensors(file, {"lm_head.weight": head[:-1]})
    with pytest.raises(ValueError, match=r"tensor lm_head.weight must have the shape \(48, 32\) .* found \(47, 32\)"):
        load(folder, 2)


# --- what is read, and the memory that it takes ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["folder", "gguf"])
def test_every_value_is_read_once_in_slices_of_a_devices_size(
    tmp_path: Path, written: Callable[..., Path], written_tensors: Any, monkeypatch: pytest.MonkeyPatch, layout: str
):
    path, source = written(LLAMA), weights._Folder
    if layout == "gguf":
        source = weights._Gguf
        path = write_gguf(tmp_path / "model.gguf", gguf_fields(LLAMA), written_tensors(LLAMA))
    read, sizes = source.read, {}

    def spied(self: Any, name: str, index: Any) -> np.ndarray:
        tensor = read(self, name, index)
        sizes.setdefault(name, []).append(tensor.size)
        return tensor

    monkeypatch.setattr(source, "read", spied)
    model = weights.load(path, mesh_of(data=2, model=4))  # each slice is on two devices
    for leaf in weights._leaves(model.config, 4):
        parts = 4 if "model" in leaf.spec else 1
        for name in leaf.names:
            assert sizes.pop(name) == [np.prod(leaf.tensor_shape) // parts] * parts
            # At 4 ranks the 2 key/value heads are whole on each.
            assert (parts == 1) == any(part in name for part in ("norm", "k_proj", "v_proj"))
    assert not sizes


MEMORY = """
import json, sys, threading, time
import jax
from pathlib import Path
from models import weights

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

mesh = jax.make_mesh((int(sys.argv[2]),), ("model",), (jax.sharding.AxisType.Auto,))
jax.jit(lambda: jax.numpy.zeros(8))().block_until_ready()
base = peak = resident()
ended = False

def watch():
    global peak
    while not ended:
        peak = max(peak, resident())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
model = weights.load(Path(sys.argv[1]), mesh)
jax.block_until_ready(model.params)
jax.device_put(0).block_until_ready()  # lets go of what the last call was given
ended = True
thread.join()
print(json.dumps([peak - base, resident() - base, sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_takes_the_weights_and_one_tensor(tmp_path: Path):
    """The largest tensor is the head, which is read last and transposed: the worst that can come."""
    config = dataclasses.replace(
        QWEN3, vocab_size=40_960, d_model=1024, num_layers=10, num_heads=16, num_kv_heads=8, head_dim=64, d_ff=3072
    )
    params = jax.tree.map(lambda a: jnp.ones(a.shape, jnp.bfloat16), transformer.abstract_params(config, 1))
    weights.save(tmp_path / "model", Model(config, params, {}), max_file_bytes=100_000_000)
    del params
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    largest = 40_960 * 1024 * 2
    kept = 96 * 2**20  # glibc keeps up to 64 MiB of what was freed; and some thirty small compiled programs
    for ranks in (1, 2):
        environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks}"}
        command = [sys.executable, "-c", MEMORY, str(tmp_path / "model"), str(ranks)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        peak, after, nbytes = json.loads(done.stdout)
        print(f"{ranks=}: weights {nbytes:,}, largest tensor {largest:,}, peak {peak:,}, afterwards {after:,}")
        assert nbytes - kept < after < nbytes + kept, "the measure itself"
        assert peak < after + largest + 2**24
    shutil.rmtree(tmp_path / "model")


REPOSITORY = Path(__file__).parents[1]
TWO_PROCESSES = """
import json, sys
import jax
from pathlib import Path
from models import weights

index, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
settings = {"initialization_timeout": 40, "heartbeat_timeout_seconds": 40}
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, **settings)
sizes, read = {}, weights._Folder.read

def spied(self, name, where):
    tensor = read(self, name, where)
    sizes[name] = sizes.get(name, 0) + tensor.size
    return tensor

weights._Folder.read = spied
model = weights.load(folder / "model", jax.make_mesh((4,), ("model",), (jax.sharding.AxisType.Auto,)))
weights.save(folder / "saved", model, max_file_bytes=20_000)
print(json.dumps(sizes))
"""


def test_of_two_processes_each_reads_its_devices_part_and_one_writes(written: Callable[..., Path], tmp_path: Path):
    shutil.copytree(written(QWEN3), tmp_path / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(index), port, str(tmp_path)],
            env=environment,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]
    try:
        for worker in workers:
            out, errors = worker.communicate(timeout=60)
            assert worker.returncode == 0, errors.decode()[-2000:]
            read = json.loads(out.splitlines()[-1])  # after what gloo says
            for leaf in weights._leaves(QWEN3, 4):
                size = int(np.prod(leaf.tensor_shape))
                assert {read[name] for name in leaf.names} == {size // 2 if "model" in leaf.spec else size}
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    assert_same_bits(load(tmp_path / "saved").params, load(tmp_path / "model").params)


# --- wrong folders ---------------------------------------------------------------------------------------------------


def test_a_path_that_is_no_checkpoint_is_named(tmp_path: Path):
    (tmp_path / "weights.bin").write_bytes(b"")
    for path in (tmp_path / "none", tmp_path / "none.gguf", tmp_path / "weights.bin"):
        with pytest.raises(
            FileNotFoundError, match=f"path must be a checkpoint's folder or a .gguf file, found {path}"
        ):
            load(path)
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} must hold config.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"\xff", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b'{"vocab_size": ' + b"1" * 5000 + b"}", "must be JSON"),
        (b"[]", "must hold a JSON object, found list"),
        (b"null", "must hold a JSON object, found NoneType"),
    ],
)
def test_a_file_that_is_no_json_object_is_named(files: Path, content: bytes, message: str):
    for name in (INDEX, "config.json"):
        before = (files / name).read_bytes()
        (files / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{files / name} {message}"):
            load(files)
        (files / name).write_bytes(before)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, r"architectures must be one of .*; found \['MistralForCausalLM'\]"),
        ({"architectures": ...}, "architectures must be one of Qwen3ForCausalLM, LlamaForCausalLM; found None"),
        ({"architectures": []}, r"architectures must be one of .*; found \[\]"),
        ({"architectures": [[]]}, r"architectures must be one of .*; found \[\[\]\]"),
        ({"architectures": 5}, "architectures must be one of .*; found 5"),
        ({"model_type": "mistral"}, "model_type must be 'qwen3', found 'mistral'"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config must be None, found .*gptq",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be None, found .*fp8"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', found 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be False, found True"),
        ({"mlp_bias": True}, "mlp_bias must be False, found True"),
        ({"use_sliding_window": True}, "use_sliding_window must be False, found True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must all be 'full_attention', found"),
        ({"layer_types": 5}, "layer_types must all be 'full_attention', found 5"),
        ({"vocab_size": ...}, "vocab_size must be a positive int, found None"),
        ({"vocab_size": "48"}, "vocab_size must be a positive int, found '48'"),
        ({"vocab_size": True}, "vocab_size must be a positive int, found True"),
        ({"vocab_size": 48.0}, "vocab_size must be a positive int, found 48.0"),
        ({"vocab_size": 10**30}, "vocab_size must be a positive int, found 10000"),
        ({"hidden_size": None}, "hidden_size must be a positive int, found None"),
        ({"hidden_size": -32}, "hidden_size must be a positive int, found -32"),
        ({"intermediate_size": []}, r"intermediate_size must be a positive int, found \[\]"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive int, found 0"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive int, found 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive int, found 0"),
        ({"num_attention_heads": 5}, "num_heads must be a multiple of num_kv_heads=2, found 5"),
        ({"head_dim": 15}, "head_dim must be even for rotary embeddings, found 15"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a positive float, found '1e-6'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive float, found nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, found 'no'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default' or 'llama3', found 'yarn'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type must be 'default' or 'llama3', found 'linear'",
        ),
        ({"rope_scaling": {"type": "dynamic"}, "rope_parameters": {"rope_type": "default"}}, "found 'dynamic'"),
        ({"rope_scaling": {"rope_type": []}}, r"rope_type must be 'default' or 'llama3', found \[\]"),
        ({"rope_scaling": [1]}, r"rope_parameters must be one object for all layers, found \[1\]"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters must be one object for all"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a positive float, found 0"),
        ({"rope_theta": "1e4"}, "rope_theta must be a positive float, found '1e4'"),
        ({"rope_theta": float("inf")}, "rope_theta must be a positive float, found inf"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive float, found 10000"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0, found 0.5"),
        ({"rope_scaling": LLAMA3}, "original_max_position_embeddings must be a positive int, found None"),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64, "factor": 0}},
            "factor must be a positive float, found 0",
        ),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64, "low_freq_factor": 4.0}},
            "low_freq_factor must be below high_freq_factor, found 4.0",
        ),
    ],
)
def test_a_setting_that_the_model_does_not_have_is_named(folder: Path, changes: dict[str, Any], message: str):
    change(folder / "config.json", changes)
    with pytest.raises(ValueError, match=message) as raised:
        load(folder)
    assert str(folder / "config.json") in str(raised.value)


# Published shapes: hidden size, layers, heads, key/value heads, feed-forward size, tied; and parameters in all.
@pytest.mark.parametrize(
    ("shape", "params"),
    [
        ((1024, 28, 16, 8, 3072, True), 596_049_920),
        ((2048, 28, 16, 8, 6144, True), 1_720_574_976),
        ((2560, 36, 32, 8, 9728, True), 4_022_468_096),
        ((4096, 36, 32, 8, 12_288, False), 8_190_735_360),
        ((5120, 40, 40, 8, 17_408, False), 14_768_307_200),
        ((5120, 64, 64, 8, 25_600, False), 32_762_123_264),
    ],
    ids=["0.6B", "1.7B", "4B", "8B", "14B", "32B"],
)
def test_every_dense_qwen3_has_its_number_of_parameters_and_divides_over_eight_ranks(
    tmp_path: Path, shape: tuple[Any, ...], params: int
):
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    config = dict(zip((*names, "tie_word_embeddings"), shape, strict=True)) | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128,
        "rope_theta": 1_000_000, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, _ = weights.read_config(tmp_path / "config.json")
    found.check_ranks(8)
    assert found.num_params() == params


def test_a_mesh_without_the_models_axis_is_named_and_a_path_may_be_text(folder: Path):
    with pytest.raises(ValueError, match=r"mesh must have the axis 'model' of comm, found \('tp',\)"):
        weights.load(folder, mesh_of(tp=2))
    assert_same_bits(weights.load(str(folder), mesh_of(model=1)).params, load(folder).params)  # type: ignore[arg-type]


def test_layers_beyond_the_file_are_refused_before_anything_is_made_for_them(folder: Path):
    change(folder / "config.json", {"num_hidden_layers": 2**31 - 1})
    with pytest.raises(ValueError, match=f"{folder} has 25 tensors, too few for 2147483647 layers"):
        load(folder)
    change(folder / "config.json", {"num_hidden_layers": 3})
    with pytest.raises(ValueError, match=f"{folder} lacks the tensor model.layers.2.* \\(11 are missing\\)"):
        load(folder)


@pytest.mark.parametrize(("ranks", "field"), [(8, "num_heads"), (3, "num_heads")])
def test_a_model_that_the_mesh_does_not_divide_is_named(written: Callable[..., Path], ranks: int, field: str):
    with pytest.raises(ValueError, match=f"{written(QWEN3)} does not divide over the mesh: {field} must be a multiple"):
        load(written(QWEN3), ranks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q_PROJ: None}, f"lacks the tensor {Q_PROJ} \\(1 are missing\\)"),
        ({"lm_head.weight": None}, r"lacks the tensor lm_head.weight \(1 are missing\)"),
        (
            {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)},
            r"has the tensor model.layers.0.self_attn.q_proj.bias, which the model has no place for \(1 are too many\)",
        ),
        ({"model.layers.2.mlp.up_proj.weight": np.zeros((64, 32), np.float32)}, "has the tensor model.layers.2.mlp"),
        (
            {Q_PROJ: np.zeros((32, 64), np.float32)},
            rf": tensor {Q_PROJ} must have the shape \(64, 32\) by the model's config, found \(32, 64\)",
        ),
        ({Q_PROJ: np.zeros((64, 32, 1), np.float32)}, r"must have the shape \(64, 32\) .* found \(64, 32, 1\)"),
        ({Q_PROJ: np.zeros((), np.float32)}, r"must have the shape \(64, 32\) .* found \(\)"),
        ({Q_PROJ: np.zeros((64, 32), np.int8)}, f": tensor {Q_PROJ} must be of dtype F32, F16, BF16; found I8"),
        ({Q_PROJ: np.zeros((64, 32), np.float64)}, f": tensor {Q_PROJ} must be of dtype F32, F16, BF16; found F64"),
        ({Q_PROJ: np.zeros((64, 32), jnp.float8_e4m3fn)}, "must be of dtype F32, F16, BF16; found F8_E4M3"),
    ],
)
def test_a_tensor_that_the_model_does_not_have_is_named(
    folder: Path, changes: dict[str, np.ndarray | None], message: str
):
    change_tensors(folder / "model.safetensors", changes)
    with pytest.raises(ValueError, match=message) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


def test_a_folder_without_weights_is_named(folder: Path):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(FileNotFoundError, match=f"{folder} must hold model.safetensors or {INDEX}"):
        load(folder)


@pytest.mark.parametrize("name", ["none.safetensors", "../model.safetensors", "", ".", "config.json", 5, [], None])
def test_an_index_that_names_no_file_beside_it_is_named(folder: Path, files: Path, name: Any):
    (files.parent / "model.safetensors").symlink_to(folder / "model.safetensors")
    weight_map = json.loads((files / INDEX).read_text())["weight_map"]
    change(files / INDEX, {"weight_map": weight_map | {Q_PROJ: name}})
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"{files / INDEX} names {name!r}, which is not a safetensor")
    ):
        load(files)
    change(files / INDEX, {"weight_map": weight_map | {Q_PROJ: str(files.parent / "model.safetensors")}})
    with pytest.raises(FileNotFoundError, match=f"{files / INDEX} names .*, which is not a safetensors file beside it"):
        load(files)


def test_an_index_that_disagrees_with_its_files_is_named(files: Path):
    index = files / INDEX
    weight_map = json.loads(index.read_text())["weight_map"]
    for wrong in (..., {}, [], None, "x"):
        change(index, {"weight_map": wrong})
        with pytest.raises(ValueError, match=f"{index}: weight_map must be an object of tensor names and files"):
            load(files)
    other = next(file for file in weight_map.values() if file != weight_map[Q_PROJ])
    change(index, {"weight_map": weight_map | {Q_PROJ: other}})
    with pytest.raises(ValueError, match=f"{files / other} lacks the tensor {Q_PROJ}, which the index says it has"):
        load(files)
    change(index, {"weight_map": weight_map | {"x": other}})
    with pytest.raises(ValueError, match=f"{files / other} lacks the tensor x, which the index says it has"):
        load(files)
    change(index, {"weight_map": weight_map})
    change_tensors(files / other, {Q_PROJ: np.zeros((64, 32), np.float32)})
    with pytest.raises(ValueError, match=f"has the tensor {Q_PROJ}, and so has {files}"):
        load(files)


def header_size(file: Path) -> int:
    """All that stands before the tensors."""
    if file.suffix == ".gguf":
        return int(gguf.GGUFReader(file).data_offset)
    return 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]


def cuts(file: Path) -> list[int]:
    """Lengths to cut a file to: every one up to the end of its header, and some of the rest."""
    size, header = file.stat().st_size, header_size(file)
    return [*range(header + 1), *range(header, size, 4999), size - 1]


def test_a_safetensors_file_cut_anywhere_is_named(folder: Path):
    file = folder / "model.safetensors"
    whole, lengths = file.read_bytes(), cuts(file)
    for kept in lengths:
        file.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=f"{file} is not a whole safetensors file"):
            load(folder)
    file.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match=f"{file} is not a whole safetensors file"):
        load(folder)


# --- wrong GGUF files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture must be one of qwen3, llama; found 'gemma3'"),
        ({"general.architecture": ...}, "general.architecture must be one of qwen3, llama; found None"),
        ({"general.architecture": 5}, "general.architecture must be one of qwen3, llama; found 5"),
        ({"llama.block_count": ...}, "llama.block_count must be a positive int, found None"),
        ({"llama.block_count": 0}, "llama.block_count must be a positive int, found 0"),
        ({"llama.context_length": ...}, "llama.context_length must be a positive int, found None"),
        ({"llama.embedding_length": "32"}, "llama.embedding_length must be a positive int, found '32'"),
        (
            {"llama.feed_forward_length": [64, 64]},
            "feed_forward_length must be a positive int, found None",
        ),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count must be a positive int, found 0"),
        ({"llama.attention.head_count": 4.0}, "llama.attention.head_count must be a positive int, found 4.0"),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv must be a positive int, found None"),
        ({"llama.attention.head_count": 5}, "num_heads must be a multiple of num_kv_heads=2, found 5"),
        ({"llama.attention.key_length": 8}, "llama.attention.value_length must be 8, found 16"),
        ({"llama.attention.sliding_window": 32}, "llama.attention.sliding_window must be 0, found 32"),
        (
            {"llama.attention.layer_norm_rms_epsilon": ...},
            "layer_norm_rms_epsilon must be a positive float, found None",
        ),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon must be a positive float, found 0.0"),
        ({"llama.rope.freq_base": float("inf")}, "llama.rope.freq_base must be a positive float, found inf"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count must be 16, found 8"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type must be 'none', found 'yarn'"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.type must be 'none', found 'linear'"),
        ({"llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor must be 1.0, found 4.0"),
        ({"llama.rope.scale_linear": 4.0}, "llama.rope.scale_linear must be 1.0, found 4.0"),
        ({"llama.block_count": 2**31 - 1}, "has 20 tensors, too few for 2147483647 layers"),
        ({"llama.block_count": 3}, r"lacks the tensor blk.2.attn_norm.weight \(9 are missing\)"),
        ({"llama.embedding_length": 64}, r"must have the shape \(32, 64\) by the model's config, found \(32, 32\)"),
    ],
)
def test_a_wrong_field_of_a_gguf_file_is_named(
    tmp_path: Path, written_tensors: Any, changes: dict[str, Any], message: str
):
    path = write_gguf(tmp_path / "model.gguf", gguf_fields(LLAMA) | changes, written_tensors(LLAMA))
    with pytest.raises(ValueError, match=message) as raised:
        load(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_embd.weight": None}, "must have the tensor token_embd.weight, a matrix"),
        ({"token_embd.weight": np.zeros(32, np.float32)}, "must have the tensor token_embd.weight, a matrix"),
        ({"token_embd.weight": np.zeros((48, 64), np.float32)}, r"token_embd.weight must have the shape \(48, 32\)"),
        ({"output_norm.weight": None}, r"lacks the tensor output_norm.weight \(1 are missing\)"),
        ({"blk.1.attn_q.weight": None}, r"lacks the tensor blk.1.attn_q.weight \(1 are missing\)"),
        (
            {"blk.1.attn_q.bias": np.zeros(64, np.float32)},
            "has the tensor blk.1.attn_q.bias, which the model has no pl",
        ),
        ({"blk.2.attn_q.weight": np.zeros((64, 32), np.float32)}, "has the tensor blk.2.attn_q.weight, which the mod"),
        ({"blk.01.attn_q.weight": np.zeros((64, 32), np.float32)}, "has the tensor blk.01.attn_q.weight, which the m"),
        (
            {"blk.0.ffn_up.weight": np.zeros((32, 64), np.float32)},
            r"tensor blk.0.ffn_up.weight must have the shape \(64, 32\) by the model's config, found \(32, 64\)",
        ),
        (
            {"blk.0.ffn_up.weight": np.zeros((64, 32), np.int8)},
            "tensor blk.0.ffn_up.weight: Dequantization for I8 is no",
        ),
        ({"blk.0.ffn_up.weight": np.zeros((64, 32), np.float64)}, "tensor blk.0.ffn_up.weight: Dequantization for F64"),
        (
            {"rope_freqs.weight": np.ones(7, np.float32)},
            "tensor rope_freqs.weight must be the scaling of Llama 3.1, is",
        ),
        ({"rope_freqs.weight": np.zeros(8, np.float32)}, "tensor rope_freqs.weight must be the scaling of Llama 3.1"),
        ({"rope_freqs.weight": np.full(8, np.inf, np.float32)}, "tensor rope_freqs.weight must be the scaling of Llam"),
        ({"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}, "rope_freqs.weight must be the scaling of Llama 3"),
    ],
)
def test_a_wrong_tensor_of_a_gguf_file_is_named(
    tmp_path: Path, written_tensors: Any, changes: dict[str, Any], message: str
):
    tensors = {name: value for name, value in (written_tensors(LLAMA) | changes).items() if value is not None}
    path = write_gguf(tmp_path / "model.gguf", gguf_fields(LLAMA), tensors)
    with pytest.raises(ValueError, match=message) as raised:
        load(path)
    assert str(path) in str(raised.value)


def test_a_gguf_file_cut_anywhere_is_named(tmp_path: Path, written_tensors: Any):
    path = write_gguf(tmp_path / "model.gguf", gguf_fields(LLAMA), written_tensors(LLAMA))
    whole, lengths = path.read_bytes(), cuts(path)
    for kept in lengths:
        path.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=f"{path} is not a whole GGUF file"):
            load(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(
        ValueError, match=f"{path} is not a whole GGUF file: .* after its last tensor.* byte {len(whole)}"
    ):
        load(path)


@pytest.mark.parametrize(
    ("tensor", "part", "value", "message"),
    [
        (3, 5, 0, "tensor .* expected at"),  # its offset: over the first one
        (3, 5, 2**20, "it ends before byte"),
        (-1, 4, gguf.GGMLQuantizationType.F16, "goes on after its last tensor"),  # its type: of half the size
        (3, 4, 1000, r"1000\)? is not a valid GGMLQuantizationType"),
        (3, 2, 2**32 - 1, "it ends before byte"),  # its number of dimensions
    ],
)
def test_gguf_tensors_that_overlap_or_leave_gaps_are_named(
    tmp_path: Path, written_tensors: Any, tensor: int, part: int, value: int, message: str
):
    path = write_gguf(tmp_path / "model.gguf", gguf_fields(QWEN3), dict(sorted(written_tensors(QWEN3).items())))
    reader = gguf.GGUFReader(path, "r+")
    reader.tensors[tensor].field.parts[part][0] = value
    reader.data.flush()
    with pytest.raises(ValueError, match=f"{path} is not a whole GGUF file: .*{message}"):
        load(path)


def test_a_gguf_file_of_the_other_order_of_bytes_is_named(tmp_path: Path, written_tensors: Any):
    tensors = {name: values.byteswap() for name, values in written_tensors(LLAMA).items()}
    other = gguf.GGUFEndian.BIG if sys.byteorder == "little" else gguf.GGUFEndian.LITTLE
    path = write_gguf(tmp_path / "model.gguf", gguf_fields(LLAMA), tensors, endianess=other)
    with pytest.raises(ValueError, match=f"{path} must be in this machine's order of bytes"):
        load(path)


@pytest.mark.parametrize("count", [2**20, 2**40, 2**63, 2**64 - 1])
def test_a_gguf_array_longer_than_the_file_is_refused_before_memory_is_full(tmp_path: Path, count: int):
    path = write_gguf(tmp_path / "model.gguf", {"x": [1, 2, 3]}, {"y": np.zeros(8, np.float32)})
    whole = path.read_bytes()
    assert whole.count(struct.pack("<Q", 3)) == 1
    path.write_bytes(whole.replace(struct.pack("<Q", 3), struct.pack("<Q", count)))
    with pytest.raises(ValueError, match=f"{path} is not a whole GGUF file"):
        load(path)


# --- any wrong bit ---------------------------------------------------------------------------------------------------


def assert_a_flipped_bit_is_an_error_or_harmless(path: Path, file: Path, bit: int, wanted: Model) -> None:
    """Nothing but the documented errors, and no other values: a bit that no parameter depends on may be any."""
    whole = file.read_bytes()
    file.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
    try:
        found = load(path)
    except (ValueError, FileNotFoundError) as error:
        assert str(path) in str(error)
    else:
        assert_same_bits(found.params, wanted.params)
    finally:
        file.write_bytes(whole)


fuzz = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(data=st.data())
def test_a_bit_flipped_in_a_folders_headers_index_or_config_is_an_error_or_changes_no_weight(
    files: Path, data: st.DataObject
):
    file = data.draw(st.sampled_from(sorted(files.iterdir())))
    size = header_size(file) if file.suffix == ".safetensors" else file.stat().st_size
    bit = data.draw(st.integers(0, 8 * size - 1))
    assert_a_flipped_bit_is_an_error_or_harmless(files, file, bit, model_of(QWEN3))


@fuzz
@given(data=st.data())
def test_a_bit_flipped_in_a_gguf_header_is_an_error_or_changes_no_weight(
    tmp_path: Path, written_tensors: Any, data: st.DataObject
):
    path = tmp_path / "model.gguf"
    if not path.exists():
        write_gguf(path, gguf_fields(LLAMA), written_tensors(LLAMA))
    bit = data.draw(st.integers(0, 8 * header_size(path) - 1))
    assert_a_flipped_bit_is_an_error_or_harmless(path, path, bit, model_of(LLAMA))


@fuzz
@given(garbage=st.binary(max_size=300), start=st.sampled_from((b"", b"GGUF\3\0\0\0", b"GGUF\3\0\0\0" + bytes(16))))
@example(garbage=b"", start=b"")
def test_garbage_is_an_error(folder: Path, garbage: bytes, start: bytes):
    for file in (folder / "model.gguf", folder / "model.safetensors", folder / "config.json"):
        before = file.read_bytes() if file.exists() else None
        file.write_bytes(start + garbage)
        with pytest.raises(ValueError, match=str(file)):
            load(file if file.suffix == ".gguf" else folder)
        if before is not None:
            file.write_bytes(before)


# --- saving ----------------------------------------------------------------------------------------------------------


def test_nothing_is_saved_over_something(tmp_path: Path):
    model = model_of(QWEN3)
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(
            FileExistsError, match=f"path must be a folder that is empty or does not exist, found {path}"
        ):
            weights.save(path, model)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_updates_that_are_not_merged_are_not_saved(tmp_path: Path):
    config = dataclasses.replace(QWEN3, lora_rank=2)
    with pytest.raises(ValueError, match=r"must have its low-rank updates merged \(models.lora.merge\)"):
        weights.save(tmp_path / "model", Model(config, model_of(config).params, {}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("exists", [False, True])
def test_a_save_that_fails_half_way_leaves_nothing_at_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
):
    path = tmp_path / "model"
    if exists:
        path.mkdir()
    written = []

    def full(tensors: Any, file: Path, **settings: Any) -> None:
        if written:
            raise OSError("no space left on device")
        written.append(file)
        save_file(tensors, file, **settings)

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        weights.save(path, model_of(QWEN3), max_file_bytes=20_000)
    assert written[0].exists(), "beside it, to be looked at"
    assert list(path.iterdir()) == [] if exists else not path.exists()
    monkeypatch.undo()
    with pytest.raises(FileExistsError, match=str(tmp_path / "model.partial")):
        weights.save(path, model_of(QWEN3))
    shutil.rmtree(tmp_path / "model.partial")
    weights.save(path, model_of(QWEN3))


def test_empty_folders_are_saved_to_however_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    weights.save(tmp_path / "link", model_of(QWEN3))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    weights.save(Path("."), model_of(QWEN3))
    weights.save(tmp_path / "new" / "parents", model_of(QWEN3))
    for name in ("empty", "here", "new/parents"):
        load(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "here", "link", "new"]


def test_all_files_are_as_readable_as_the_umask_says(tmp_path: Path):
    before = os.umask(0o027)
    try:
        weights.save(tmp_path / "model", model_of(QWEN3), max_file_bytes=20_000)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "model").iterdir()} == {0o640}
