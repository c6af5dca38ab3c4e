"""Published checkpoints give the logits and the text of transformers, at every number of ranks and in both layouts."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, mesh_of
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from echo_jax import Streams
from echo_jax.nn import EXACT
from models import tokenizer, transformer, weights
from models.generate import Generator
from models.transformer import Communication, RopeScaling, TransformerConfig
from models.weights import Model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

COMM = Communication("model", EXACT, EXACT)
RNG = np.random.default_rng(0)
# float32 sums in another order leave some 1e-6; a wrong pairing, scale or epsilon far more.
TOLERANCE = 1e-4

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "qwen3 tied": transformers.Qwen3Config(
        vocab_size=132,
        hidden_size=40,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=10,
        intermediate_size=84,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    ),
    "qwen3 untied": transformers.Qwen3Config(
        vocab_size=70,
        hidden_size=36,
        num_hidden_layers=2,
        num_attention_heads=10,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=50,
        rope_parameters={"rope_type": "default", "rope_theta": 5e3},
        tie_word_embeddings=False,
    ),
    "llama tied": transformers.LlamaConfig(
        vocab_size=105,
        hidden_size=45,
        num_hidden_layers=3,
        num_attention_heads=15,
        num_key_value_heads=5,
        head_dim=6,
        intermediate_size=75,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
    ),
    "llama untied, scaled": transformers.LlamaConfig(
        vocab_size=88,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=104,
        rope_parameters=LLAMA3_ROPE,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
}


# --- both sides ------------------------------------------------------------------------------------------------------


@functools.cache
def random_model(name: str) -> Any:
    """With no parameter as it is initialised: a norm's scale of 1 would hide that it is left out."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15)
    return model.eval()


def tokens_of(vocab_size: int, length: int = 150) -> np.ndarray:
    """Longer than LLAMA3_ROPE's context."""
    return np.random.default_rng(1).integers(0, vocab_size, (2, length)).astype(np.int32)


@functools.cache
def wanted_logits(name: str) -> np.ndarray:
    return their_logits(random_model(name), tokens_of(CONFIGS[name].vocab_size))


def their_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.float().numpy()


def our_logits(model: Model, ranks: int, tokens: np.ndarray) -> np.ndarray:
    config, specs = model.config, transformer.param_specs(model.config, ranks)

    def one_rank(params: Any, tokens: jax.Array) -> jax.Array:
        return transformer.apply(config, params, tokens, Streams(None, None))[0]

    run = jax.shard_map(one_rank, mesh=mesh_of(model=ranks), in_specs=(specs, P()), out_specs=P(None, None, "model"))
    return np.asarray(jax.jit(run)(model.params, tokens))


def load(path: Path, ranks: int = 1) -> Model:
    return weights.load(path, mesh_of(model=ranks), comm=COMM, dtype=jnp.float32)


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference over largest magnitude."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name of a config -> folder that transformers has written, in float32."""

    @functools.cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp("saved")
        random_model(name).save_pretrained(path)
        return path

    return folder


# --- random models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(("qwen3 tied", ranks) for ranks in (1, 3, 4, 6)),  # 4 key/value heads: whole on 3 and 6 ranks
        ("qwen3 untied", 5),
        *(("llama tied", ranks) for ranks in (1, 3, 5)),
        *(("llama untied, scaled", ranks) for ranks in (1, 2, 4, 8)),
    ],
)
def test_random_checkpoints_give_transformers_logits_at_every_number_of_ranks(folders: Any, name: str, ranks: int):
    found = our_logits(load(folders(name), ranks), ranks, tokens_of(CONFIGS[name].vocab_size))
    assert difference(found, wanted_logits(name)) < TOLERANCE


def test_the_scaled_frequencies_matter_here(folders: Any):
    name = "llama untied, scaled"
    model = load(folders(name))
    plain = dataclasses.replace(model, config=dataclasses.replace(model.config, rope_scaling=None))
    found = our_logits(plain, 1, tokens_of(CONFIGS[name].vocab_size))
    assert difference(found, wanted_logits(name)) > 100 * TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_in_the_form_of_transformers_4_says_the_same(folders: Any, tmp_path: Path, name: str):
    published = json.loads((folders(name) / "config.json").read_text())
    rope = published.pop("rope_parameters")
    published["rope_theta"] = rope.pop("rope_theta")
    published["rope_scaling"] = rope if rope["rope_type"] == "llama3" else None
    published["torch_dtype"] = published.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(published))
    (tmp_path / "model.safetensors").symlink_to(folders(name) / "model.safetensors")
    model, wanted = load(tmp_path), load(folders(name))
    assert model.config == wanted.config
    assert_same_bits(model.params, wanted.params)

    weights.save(tmp_path / "again", model)  # in the same form, which transformers reads
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert saved["torch_dtype"] == "float32" and "rope_parameters" not in saved
    assert transformers.AutoConfig.from_pretrained(tmp_path / "again").rope_parameters == rope | {
        "rope_theta": published["rope_theta"]
    }


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3 tied", "float32"),
        ("qwen3 tied", "float16"),
        ("qwen3 tied", "bfloat16"),
        ("llama untied, scaled", "bfloat16"),
    ],
)
def test_a_checkpoint_in_several_files_is_loaded_and_saved_bit_for_bit(tmp_path: Path, name: str, dtype: str):
    theirs = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    theirs.load_state_dict(random_model(name).state_dict())
    theirs.to(getattr(torch, dtype)).save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    model = load(tmp_path / "theirs", 4)
    weights.save(tmp_path / "ours", model)

    original = {}
    for file in (tmp_path / "theirs").glob("*.safetensors"):
        original |= load_file(file)
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    assert saved.keys() == original.keys()
    for tensor, wanted in original.items():
        assert_same_bits(saved[tensor], wanted)

    tokens = tokens_of(CONFIGS[name].vocab_size)
    logits = []
    for folder in ("theirs", "ours"):
        reread = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        logits.append(their_logits(reread, tokens))
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == dtype
    np.testing.assert_array_equal(*logits)
    assert difference(our_logits(model, 4, tokens), logits[0]) < TOLERANCE


@pytest.mark.parametrize(
    "config",
    [
        TransformerConfig(72, 48, 2, 6, 2, 10, 66, rope_theta=3e5, norm_eps=1e-4, tie_embeddings=False),
        TransformerConfig(72, 48, 2, 6, 3, 10, 66, qk_norm=False, rope_scaling=RopeScaling(4.0, 1.5, 5.0, 32)),
    ],
    ids=["qwen3", "llama"],
)
def test_our_random_parameters_give_the_same_logits_in_transformers(tmp_path: Path, config: TransformerConfig):
    config = dataclasses.replace(config, comm=COMM, dtype=jnp.float32)
    params = transformer.init_params(config, jax.random.key(0), mesh_of(model=1))
    noisy = lambda a: jax.device_put(a + 0.15 * RNG.normal(size=a.shape).astype(np.float32), a.sharding)  # noqa: E731
    model = Model(config, jax.tree.map(noisy, params), {})
    weights.save(tmp_path / "ours", model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    tokens = tokens_of(config.vocab_size)
    assert difference(our_logits(model, 1, tokens), their_logits(theirs, tokens)) < TOLERANCE


# --- GGUF files ------------------------------------------------------------------------------------------------------

GGUF_CONFIGS = {
    "qwen3": transformers.Qwen3Config(
        vocab_size=60,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    ),
    "llama": transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        intermediate_size=96,
        rope_parameters=LLAMA3_ROPE | {"factor": 32.0, "original_max_position_embeddings": 8192},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
    "llama of large blocks": transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
    ),
}
# By turns, over the matrices of a model.
GGUF_TYPES = {
    "qwen3": ("Q8_0", "Q4_0", "F16", "BF16", "Q5_1", "F32"),
    "llama": ("Q4_1", "Q8_0", "BF16", "F32", "Q5_0"),
    "llama of large blocks": ("Q4_K", "Q6_K", "IQ4_XS", "Q2_K", "Q8_0"),
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def quantized(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """As bytes; for a type that the package only reads, any bytes, with scales that give values of that size."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = RNG.integers(0, 256, (values.size // block, size), dtype=np.uint8)
        scale = 1.0
        for _ in range(2):
            for start in {"Q4_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,), "Q2_K": (80, 82)}[kind.name]:
                blocks[:, start : start + 2] = np.array([scale], np.float16).view(np.uint8)
            data = blocks.reshape(len(values), -1)
            scale = values.std() / gguf.quants.dequantize(data, kind).std()
        return data


def frequency_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """As llama.cpp's converter reckons them."""
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        smooth = (context / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1 if wavelength < context / high else factor if wavelength > context / low else between)
    return np.array(divisors, np.float32)


def write_gguf(path: Path, name: str) -> Any:
    """A GGUF file as llama.cpp's converter writes it, and a transformers model of what its numbers mean."""
    config = GGUF_CONFIGS[name]
    family = config.model_type
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", frequency_divisors(config.rope_parameters, config.head_dim))
    state = model.state_dict()
    for number, (tensor, parameter) in enumerate(model.named_parameters()):
        values = RNG.normal(0, 0.1, tuple(parameter.shape)).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32
        if values.ndim == 1:
            values += 1
        else:
            kinds = GGUF_TYPES[name]
            kind = gguf.GGMLQuantizationType[kinds[number % len(kinds)]]
        data = quantized(values, kind)
        meant = gguf.quants.dequantize(data, kind)
        if family == "llama" and ("q_proj" in tensor or "k_proj" in tensor):
            # The file pairs neighbours; transformers pairs the halves of a head.
            halves = meant.reshape(-1, config.head_dim // 2, 2, meant.shape[-1])
            meant = np.concatenate([halves[:, :, 0], halves[:, :, 1]], axis=1).reshape(meant.shape)
        state[tensor] = torch.from_numpy(np.array(meant))
        place = tensor.removesuffix(".weight")
        if place.startswith("model.layers."):
            _, _, layer, place = place.split(".", 3)
            written = f"blk.{layer}.{GGUF_NAMES[place]}.weight"
        else:
            written = f"{GGUF_NAMES[place]}.weight"
        writer.add_tensor(written, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("name", GGUF_CONFIGS)
def test_a_gguf_file_gives_the_logits_of_the_numbers_that_it_means(tmp_path: Path, name: str):
    path = tmp_path / "model.gguf"
    theirs = write_gguf(path, name)
    tokens = tokens_of(GGUF_CONFIGS[name].vocab_size)
    wanted = their_logits(theirs, tokens)
    for ranks in (1, 2):  # half of a row of 96 values is one block of 32 and a half
        assert difference(our_logits(load(path, ranks), ranks, tokens), wanted) < TOLERANCE
    config = load(path).config
    assert config.norm_eps == GGUF_CONFIGS[name].rms_norm_eps
    assert config.rope_scaling == (RopeScaling(32.0) if name == "llama" else None)


# --- a published model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smol_file() -> Path:
    try:
        return weights.smollm2()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smol(smol_file: Path) -> Any:
    """As `from_pretrained(gguf_file=...)` reads it, which asks for the package accelerate without a use for it here."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):  # for the names of its tensors
        names = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=30))
    read = load_gguf_checkpoint(str(smol_file), return_tensors=True, model_to_load=names)
    config = transformers.AutoConfig.for_model(**read["config"])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read["tensors"] | {"lm_head.weight": read["tensors"]["model.embed_tokens.weight"]})
    return model.eval()


@pytest.fixture(scope="module")
def chat(smol_file: Path, smol: Any) -> tuple[list[int], np.ndarray, list[int]]:
    """Tokens of a question, transformers' logits of them, and the tokens that it goes on with."""
    messages = [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}]
    prompt = tokenizer.load(smol_file).encode_chat(messages)
    tokens = np.array([prompt], np.int32)
    with torch.no_grad():
        text = smol.generate(torch.from_numpy(tokens).long(), max_new_tokens=24, do_sample=False)[0].tolist()
    return prompt, their_logits(smol, tokens), text[len(prompt) :]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_published_model_gives_transformers_logits_and_text(
    smol_file: Path, chat: tuple[list[int], np.ndarray, list[int]], ranks: int
):
    prompt, logits, text = chat
    mesh = mesh_of(model=ranks)
    model = weights.load(smol_file, mesh, comm=COMM, dtype=jnp.float32, param_dtype=jnp.float32)
    assert difference(our_logits(model, ranks, np.array([prompt], np.int32)), logits) < TOLERANCE
    assert [row[0] for row in Generator(model, mesh)([prompt], 24)] == text
    assert len(text) == 24, "it does not end before"
