"""The quality benchmark: its figures are what their definitions say, of the library's own calls."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from helpers import mesh_of
from jax.sharding import PartitionSpec as P
from tokenizers import decoders, models, pre_tokenizers

from benchmarks import quality
from models import transformer, weights
from models.transformer import TransformerConfig

ROOT = Path(quality.__file__).parents[1]
CONFIG = TransformerConfig(
    vocab_size=264, d_model=192, num_layers=4, num_heads=6, num_kv_heads=2, head_dim=16, d_ff=96, dtype=jnp.float32
)
KEYS = {"config", "bits", "kl_mean", "kl_median", "kl_p99", "ppl", "flips", "error", "text", "phase"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random model whose tokens are bytes, in the Hugging Face layout."""
    folder = tmp_path_factory.mktemp("quality") / "model"
    params = transformer.init_params(CONFIG, jax.random.key(0), mesh_of(model=1))
    for name, layer in (("attention", "o_proj"), ("mlp", "down_proj")):
        params["blocks"][name][layer]["kernel"] *= 20
    weights.save(folder, weights.Model(CONFIG, params, {}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = tokenizers.Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.save(str(folder / "tokenizer.json"))
    return folder


def test_figures_are_what_their_definitions_say():
    rng = np.random.default_rng(0)
    logits, exact = rng.normal(size=(2, 3, 1, 50, 8)).astype(np.float32) * 3  # [ranks, B, S, V/n]
    labels = rng.integers(0, 24, (1, 50)).astype(np.int32)
    ranks = P("model")
    one_rank = lambda logits, exact: quality.compare(logits[0], exact[0], jnp.asarray(labels))  # noqa: E731
    run = jax.shard_map(one_rank, mesh=mesh_of(model=3), in_specs=(ranks, ranks), out_specs=P())
    found = {key: np.asarray(value)[0] for key, value in jax.jit(run)(logits, exact).items()}

    q, p = (a[:, 0].transpose(1, 0, 2).reshape(50, 24).astype(np.float64) for a in (logits, exact))
    log_q, log_p = (a - np.log(np.exp(a).sum(-1, keepdims=True)) for a in (q, p))
    np.testing.assert_allclose(found["kl"], (np.exp(log_p) * (log_p - log_q)).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(found["loss"], -log_q[np.arange(50), labels[0]], rtol=1e-5)
    np.testing.assert_array_equal(found["flip"], q.argmax(-1) != p.argmax(-1))


def test_the_command_prints_a_table_writes_its_files_and_ends_with_a_json_list(
    checkpoint, tmp_path, capsys, monkeypatch
):
    text = tmp_path / "text.txt"
    text.write_text("What is added up must be rounded; what is rounded must be paid. " * 4, encoding="utf-8")
    configs = (
        "exact",
        "int8-32-plain",
        "hadamard_int4-32-plain",
        "hadamard_int4-32-dropped",
        "hadamard_int4-32-settled",
    )
    args = quality.Args(configs, checkpoint, (str(text),), tokens=128, tp=3, decode=8, out=tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["quality", "--tokens", "128"])
    quality.main(args)

    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(lines[-1])
    assert len(rows) == 2 * len(configs) and all(rows[0].keys() >= KEYS for row in rows)
    for phase in ("prefill", "decode"):
        of = {row["config"].removeprefix("hadamard_int4-32-"): row for row in rows if row["phase"] == phase}
        assert of["exact"]["kl_mean"] == of["exact"]["flips"] == 0 and of["exact"]["bits"] == pytest.approx(16, abs=0.1)
        # Four layers: what is dropped is a fourth of all roundings.
        assert 0 < of["settled"]["kl_mean"] < of["dropped"]["kl_mean"] < of["plain"]["kl_mean"]
    prefill = {row["config"]: row for row in rows if row["phase"] == "prefill"}
    # The embedding's sum and eight others of 4.5 bits each, and the flush; of nine sums of 16 bits. Without feedback
    # the embedding is exact.
    assert prefill["hadamard_int4-32-plain"]["bits"] == pytest.approx((8 * 4.5 + 16) / 9, rel=0.01)
    assert prefill["hadamard_int4-32-dropped"]["bits"] == pytest.approx(4.5, rel=0.01)
    assert prefill["hadamard_int4-32-settled"]["bits"] == pytest.approx(10 * 4.5 / 9, rel=0.01)
    assert len(prefill["exact"]["error_by_depth"]) == CONFIG.num_layers

    assert json.loads((tmp_path / "out/quality.json").read_text()) == rows
    page = (tmp_path / "out/quality.md").read_text()
    assert "python -m benchmarks.quality --tokens 128" in page and page.count("\n| ") == len(rows) + 2
    assert (tmp_path / "out/quality.png").read_bytes().startswith(b"\x89PNG")


def test_the_exact_model_alone_has_no_picture(checkpoint, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Nothing to compare. " * 4, encoding="utf-8")
    quality.main(quality.Args(("exact",), checkpoint, (str(text),), tokens=32, tp=1, out=tmp_path / "out"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])[0]["kl_mean"] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["quality.json", "quality.md"]


def test_decoding_the_exact_model_token_by_token_gives_the_logits_of_all_positions_at_once(checkpoint):
    mesh = mesh_of(model=3)
    model = weights.load(checkpoint, mesh, dtype=jnp.float32)
    tokens = np.frombuffer(b"One token after the other, or all of them together: it is the same text.", np.uint8)
    benchmark = quality.Benchmark(model, mesh, "text", tokens.astype(np.int32), decode=20)
    whole, decoded = np.asarray(benchmark._exact[0])[:, -20:], np.asarray(benchmark._exact_decode)
    np.testing.assert_allclose(decoded, whole, rtol=1e-4, atol=1e-4 * np.abs(whole).max())


@pytest.mark.parametrize("name", ["", "int4", "int4-32", "int5-32-plain", "int4-x-plain", "int4-32-carried", "Exact"])
def test_a_configuration_that_has_no_meaning_is_refused_with_what_is_allowed(name):
    with pytest.raises(ValueError, match="configs must be 'exact' or CODEC-GROUP-END .*hadamard_int4.*settled; found"):
        quality.communication(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 1}, "tokens must be 2 or more"),
        ({"tokens": 8, "decode": 8}, "decode less than it; found 8 and 8"),
        ({"text": ("nowhere.txt",)}, "text must be 'speech', 'code' or an existing file, found 'nowhere.txt'"),
        ({"text": ("short",)}, "text must have more than 64 tokens, found 5"),
        ({"text": ("latin",)}, "text must be UTF-8, found 'latin'"),
        ({"text": ()}, "text must hold at least one, found none"),
        ({"configs": ()}, "configs must hold at least one, found none"),
        ({"tp": 0}, "tp must be at least 1, found 0"),
    ],
)
def test_arguments_that_cannot_be_measured_are_refused(checkpoint, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("short")
    Path("latin").write_bytes("größer".encode("latin-1"))
    args = quality.Args(("exact",), checkpoint, ("short",), tokens=64, tp=1)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        quality.main(dataclasses.replace(args, **changes))


def test_the_readme_has_the_stored_figures():
    rows = json.loads((ROOT / "docs/results/smollm2/quality.json").read_text(encoding="utf-8"))
    stored = {
        (row["config"], f"{row['bits']:.2f}", f"{row['kl_mean']:.4f}")
        for row in rows
        if row["text"] == "speech" and row["phase"] == "prefill"
    }
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## On a real model")[1].split("\n## ")[0]
    quoted = re.findall(r"^\| (?:\*\*)?`(\S+)`(?:\*\*)? \| ([\d.]+) \| ([\d.]+) \|", section, re.MULTILINE)
    assert len(quoted) >= 10 and set(quoted) <= stored
