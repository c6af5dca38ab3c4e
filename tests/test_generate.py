"""Generation: a cache and any number of ranks change nothing, every rank chooses alike, nothing is carried over."""

import dataclasses
import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_equal_on_ranks, mesh_of, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import echo_jax
from echo_jax import EchoConfig, wire
from echo_jax.nn import EXACT
from models import generate, transformer, weights
from models.generate import Generator, Sampling, choose
from models.transformer import Communication, RopeScaling, TransformerConfig

QWEN3 = TransformerConfig(
    vocab_size=96, d_model=192, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=24, d_ff=96, dtype=jnp.float32
)
LLAMA = dataclasses.replace(
    QWEN3, qk_norm=False, tie_embeddings=False, rope_theta=1e4, num_kv_heads=6, rope_scaling=RopeScaling(8.0, 1, 4, 16)
)
pytestmark = pytest.mark.usefixtures("compiled_fast")
ECHO = EchoConfig(group_size=32, algorithm="two_shot")
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 96, length).tolist() for length in (7, 70, 1, 33)]


def with_sums(config, forward, settle=True):
    return dataclasses.replace(config, comm=Communication("model", forward, EXACT, settle=settle))


@functools.cache
def model_of(config, ranks):
    # Layers that outweigh the embedding: what attention sees decides the text, not the last token alone.
    params = transformer.init_params(config, jax.random.key(1), mesh_of(model=ranks))
    for name, layer in (("attention", "o_proj"), ("mlp", "down_proj")):
        params["blocks"][name][layer]["kernel"] *= 20
    return weights.Model(config, params, {})


@functools.cache
def generator_of(config, ranks, sampling=None):
    return Generator(model_of(config, ranks), mesh_of(model=ranks), sampling)


def texts(generator, prompts, count, **settings):
    """list of int for each prompt."""
    rows = list(generator(prompts, count, **settings))
    return [[row[i] for row in rows if row[i] is not None] for i in range(len(prompts))]


@functools.cache
def whole_model(config, ranks):
    """The compiled model without a cache: int32[B, S] -> float32[B, S, V]."""
    params = model_of(config, ranks).params

    def one_rank(params, tokens):
        h = jax.ShapeDtypeStruct((*tokens.shape, config.d_model), config.dtype)
        streams = echo_jax.init_streams(h, "model", config.comm.forward, EXACT)
        return transformer.apply(config, params, tokens, streams)[0]

    in_specs = transformer.param_specs(config, ranks), P()
    mesh = mesh_of(model=ranks)
    program = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=in_specs, out_specs=P(None, None, "model")))
    return lambda tokens: np.asarray(program(params, jnp.asarray(tokens, jnp.int32)))


@functools.cache
def greedy_without_a_cache(config, prompt, count):
    """One device, the whole text again for every token; padded to one length, so that it is compiled once."""
    tokens = np.zeros((1, 80), np.int32)
    tokens[0, : len(prompt)] = prompt
    for position in range(len(prompt), len(prompt) + count):
        tokens[0, position] = whole_model(config, 1)(tokens)[0, position - 1].argmax()
    return tokens[0, len(prompt) : len(prompt) + count].tolist()


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        pytest.param(QWEN3, 1, id="qwen3-1", marks=pytest.mark.soak),
        pytest.param(QWEN3, 3, id="qwen3-3"),
        pytest.param(QWEN3, 6, id="qwen3-6"),
        pytest.param(LLAMA, 1, id="llama-1", marks=pytest.mark.soak),
        pytest.param(LLAMA, 3, id="llama-3"),
        pytest.param(LLAMA, 6, id="llama-6", marks=pytest.mark.soak),
    ],
)
def test_a_batch_of_prompts_gets_the_texts_that_each_gets_alone_without_a_cache_on_one_device(family, ranks):
    """Two key/value heads are fewer than three and six ranks, and whole on each of them."""
    config = with_sums(family, EXACT)
    found = texts(generator_of(config, ranks), PROMPTS, 5)
    assert found == [greedy_without_a_cache(config, tuple(prompt), 5) for prompt in PROMPTS]
    assert len({tuple(text) for text in found}) == len(PROMPTS), "texts that do not depend on the prompt test nothing"


@pytest.mark.parametrize("settle", [True, False], ids=["settled", "dropped"])
@pytest.mark.parametrize("d_model", [192, 80], ids=["columns", "flat"])
def test_a_prefill_gives_the_last_logits_of_the_whole_model_settled_or_not(settle, d_model, monkeypatch):
    """With exact flushes on both sides: of a few rows it is one anyway."""
    exactly = functools.partial(lambda flush, *args, exact=True, **kwargs: flush(*args, **kwargs), echo_jax.flush)
    monkeypatch.setattr(echo_jax, "flush", exactly)
    config = with_sums(dataclasses.replace(QWEN3, d_model=d_model), ECHO, settle)
    tokens = np.array([PROMPTS[3], PROMPTS[1][:33]], np.int32)
    wanted = whole_model.__wrapped__(config, 3)(tokens)[:, -1]
    last = jnp.full(2, 32)

    def one_rank(params, tokens):
        return transformer.prefill(config, params, tokens, last, 40)[0]

    specs = transformer.param_specs(config, 3)
    program = jax.shard_map(one_rank, mesh=mesh_of(model=3), in_specs=(specs, P()), out_specs=P(None, "model"))
    found = np.asarray(jax.jit(program)(model_of(config, 3).params, tokens))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_a_prefill_settles_the_last_positions_alone_and_decoding_its_only_one_in_the_code():
    generator = generator_of(with_sums(QWEN3, ECHO), 3)
    tokens, last, key = np.zeros((2, 64), np.int32), np.array([3, 9]), jax.random.key(0)
    params = generator.model.params
    prefill = functools.partial(generator._prefill, length=128)
    found = wire.collectives(prefill, params, tokens, last, key)
    assert [c.shape for c in found if "flush" in c.name] == [(2, 1, QWEN3.d_model)]
    cache = jax.eval_shape(prefill, params, tokens, last, key)[1]
    found = wire.collectives(generator._decode, params, cache, last, last, key)
    assert [(c.kind, c.dtype) for c in found if "flush" in c.name] == [("all_to_all", "uint8"), ("all_gather", "uint8")]
    assert sum(c.times for c in found if c.dtype == "uint8") == 2 * (1 + 2 * QWEN3.num_layers + 1)


def test_sums_below_the_gate_stay_exact_and_have_nothing_to_settle():
    config = with_sums(QWEN3, EchoConfig(group_size=32, min_elements=64 * QWEN3.d_model + 1))
    generator = generator_of(config, 3)
    args = generator.model.params, np.zeros((1, 64), np.int32), np.zeros(1, np.int32), jax.random.key(0)
    found = wire.collectives(functools.partial(generator._prefill, length=64), *args)
    assert not [c for c in found if c.dtype == "uint8" or "flush" in c.name]
    exact = generator_of(with_sums(QWEN3, EXACT), 3)
    assert texts(generator, PROMPTS[:1], 4) == texts(exact, PROMPTS[:1], 4)


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(Sampling(), id="greedy", marks=pytest.mark.soak), pytest.param(Sampling(1.5, 0.9), id="sampled")],
)
def test_nothing_is_carried_from_one_request_or_another_shape_to_the_next(sampling):
    generator = generator_of(with_sums(QWEN3, ECHO), 3, sampling)
    first = texts(generator, PROMPTS[:2], 6, seed=3)
    texts(generator, PROMPTS[2:], 3, seed=1)
    assert texts(generator, PROMPTS[:2], 6, seed=3) == first


def test_padding_changes_no_text():
    """A row's rounding depends on that row alone where ranks x group divide it: 192 = 3 x 2 x 32."""
    generator = generator_of(with_sums(QWEN3, ECHO), 3)
    short, long = PROMPTS[0], PROMPTS[1]
    assert texts(generator, [short, long], 6)[0] == texts(generator, [short], 6)[0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8), Sampling(1.3, 0.7)], ids=str)
def test_every_rank_chooses_the_same_tokens(sampling):
    logits = np.random.default_rng(5).normal(size=(3, 40, 32)).astype(np.float32)  # [ranks, B, V/n]
    logits[:, :5] = 0  # ties everywhere
    positions = np.tile(np.arange(40, dtype=np.int32), (3, 1))
    run = on_ranks(lambda logits, positions: choose(logits, jax.random.key(1), positions, sampling, "tp"), 3)
    tokens = run(logits, positions)
    assert_equal_on_ranks(tokens)
    assert tokens.dtype == jnp.int32
    if sampling.temperature == 0:
        np.testing.assert_array_equal(np.asarray(tokens)[0], logits.swapaxes(0, 1).reshape(40, -1).argmax(-1))


@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.3, 1.7]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)
@settings(deadline=None)
def test_only_the_likeliest_tokens_that_reach_top_p_are_drawn(seed, temperature, top_p):
    rng = np.random.default_rng(seed)
    logits = np.repeat(rng.normal(size=(2, 1, 12)) * 3, 64, axis=1).astype(np.float32)
    tokens = _draw(logits, seed, Sampling(temperature, top_p))
    scaled = logits.swapaxes(0, 1).reshape(64, -1)[0].astype(np.float64) / temperature
    probability = np.exp(scaled - scaled.max())
    probability /= probability.sum()
    likelier = np.array([probability[probability > p].sum() for p in probability])
    assert (likelier[tokens] < top_p + 1e-6).all()


def test_tokens_are_drawn_as_often_as_their_probability_says():
    probability = np.array([0.5, 0.25, 0.15, 0.1])
    logits = np.broadcast_to(np.log(probability).reshape(2, 1, 2), (2, 20_000, 2)).astype(np.float32)
    for sampling, wanted in (
        (Sampling(1.0), probability),
        (Sampling(1.0, 0.8), np.array([0.5, 0.25, 0.15, 0]) / 0.9),
        (Sampling(0.5), probability**2 / (probability**2).sum()),
    ):
        found = np.bincount(_draw(logits, 7, sampling), minlength=4) / 20_000
        np.testing.assert_allclose(found, wanted, atol=4 * 0.5 / 20_000**0.5)  # four standard deviations at most


@functools.cache
def _chooser(sampling):
    return on_ranks(lambda logits, positions, key: choose(logits, key, positions, sampling, "tp"), 2)


def _draw(logits, seed, sampling):
    positions = np.tile(np.arange(logits.shape[1], dtype=np.int32), (2, 1))
    return np.asarray(_chooser(sampling)(logits, positions, jnp.stack([jax.random.key(seed)] * 2)))[0]


def test_another_seed_draws_another_text_and_rows_of_one_prompt_differ():
    generator = generator_of(with_sums(QWEN3, EXACT), 3, Sampling(2.0))
    first = texts(generator, [PROMPTS[0]] * 2, 12, seed=0)
    assert first[0] != first[1]
    assert texts(generator, [PROMPTS[0]] * 2, 12, seed=1) != first


def test_a_row_ends_with_its_stop_token_and_the_others_go_on():
    generator = generator_of(with_sums(QWEN3, EXACT), 1)
    free = texts(generator, PROMPTS, 6)
    stop = free[0][2]
    found = texts(generator, PROMPTS, 6, stop_ids=[stop])
    for text, wanted in zip(found, free, strict=True):
        assert text == (wanted[: wanted.index(stop) + 1] if stop in wanted else wanted)
    assert len(list(generator(PROMPTS[:1], 6, stop_ids=[stop]))) == free[0].index(stop) + 1, "no step after the last"


def test_the_cache_is_donated_and_lengths_within_a_multiple_compile_nothing_new():
    generator = Generator(model_of(with_sums(QWEN3, EXACT), 2), mesh_of(model=2))
    for prompt, count in itertools.product(([1, 2], [3] * 40), (3, 20)):
        list(generator([prompt], count))
    assert generator._prefill._cache_size() == generator._decode._cache_size() == 1
    args = generator.model.params, np.zeros((1, 64), np.int32), np.zeros(1, np.int32), jax.random.key(0)
    tokens, cache = generator._prefill(*args, length=128)
    compiled = generator._decode.lower(args[0], cache, tokens, args[2], args[3]).compile()
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) // 2  # on each of two devices
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes
    list(generator([[1]], 2))
    generator._decode(args[0], cache, tokens, args[2], args[3])
    assert cache.k_LBTKC.is_deleted()


@pytest.mark.parametrize(
    ("prompts", "count", "message"),
    [
        ([], 1, "prompts must hold at least one prompt"),
        ([[1], []], 1, r"prompts\[1\] must hold at least one token"),
        ([[1], [96]], 1, r"prompts\[1\] must hold tokens from 0 to 95, found 96 to 96"),
        ([[-1]], 1, "found -1 to -1"),
        ([[1]], 0, "max_tokens must be at least 1, found 0"),
        (
            [[1] * 50],
            51,
            r"prompts\[0\] has 50 tokens; with max_tokens=51 that is more than the model's context of 100",
        ),
    ],
)
def test_requests_that_no_model_can_answer_are_refused(prompts, count, message):
    model = dataclasses.replace(model_of(with_sums(QWEN3, EXACT), 1), published={"max_position_embeddings": 100})
    with pytest.raises(ValueError, match=message):
        Generator(model, mesh_of(model=1))(prompts, count)


@pytest.mark.parametrize("prompt", ["abc", [1.5], [True], [[1], [2]]])
def test_tokens_that_are_no_integers_are_refused(prompt):
    with pytest.raises(TypeError, match=r"prompts\[0\] must be a sequence of integers, found "):
        generator_of(with_sums(QWEN3, EXACT), 1)([prompt], 1)


def test_an_array_is_a_prompt_too():
    generator = generator_of(with_sums(QWEN3, EXACT), 1)
    assert texts(generator, [np.array(PROMPTS[0])], 3) == texts(generator, [PROMPTS[0]], 3)


def test_a_mesh_of_another_axis_is_named():
    model = model_of(with_sums(QWEN3, EXACT), 1)
    with pytest.raises(ValueError, match=r"mesh must have the one axis 'model', the model's; found \('tp',\)"):
        Generator(model, mesh_of(tp=1))


@pytest.mark.parametrize(
    ("temperature", "top_p", "message"),
    [
        (-1.0, 1.0, "temperature must be 0, or from 1e-06 on and finite; found -1"),
        (float("nan"), 1.0, "temperature must be 0, or from 1e-06 on and finite; found nan"),
        (1e-45, 1.0, "temperature must be 0, or from 1e-06 on and finite; found 1e-45"),
        (1.0, 0.0, "top_p must be above 0 and at most 1, found 0"),
        (1.0, 1.1, "top_p must be above 0 and at most 1, found 1.1"),
    ],
)
def test_sampling_names_what_is_wrong(temperature, top_p, message):
    with pytest.raises(ValueError, match=message):
        Sampling(temperature, top_p)


def test_the_command_streams_the_reply_and_reports_its_speed():
    try:
        weights.smollm2()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "models.generate", "--prompt", "What is the capital of France?", "--tp", "3"]
    # Coded from the first sum on, prompt and replies.
    command += ["--min-elements", "0", "--max-tokens", "24", "--comm", "echo"]
    environment = {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=Path(generate.__file__).parents[1], timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "time to first token" in done.stderr and "tokens/s" in done.stderr
    assert "Sums of the prefill: two_shot, of decoding: two_shot" in done.stderr
