"""One training step of train.py: parts that add up to a batch, and gradients that are not numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits
from jax import lax

import echo_jax
import train
from models import transformer
from models.transformer import TransformerConfig

pytestmark = pytest.mark.usefixtures("compiled_fast")
BATCH, SEQUENCE = 8, 16
POISON = 255  # as the first token of a rank's first window


def program(args: train.Args, optimizer: optax.GradientTransformation | None = None) -> train.Program:
    comm = train.communication(args, args.comm)
    config = TransformerConfig(
        vocab_size=256,
        d_model=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        d_ff=128,
        comm=comm,
        dtype=jnp.float32,
    )
    optimizer = optimizer or train.make_optimizer(train.PRESETS["tiny"], args)
    mesh = train.make_mesh(args.mesh)
    carry = args.end == "carry"
    return train.Program(config, optimizer, mesh, BATCH, SEQUENCE, accumulate=args.accumulate, carry=carry)


def begin(step: train.Program) -> Any:
    return step.init(transformer.init_params(step.config, jax.random.key(0), step.mesh))


def windows(step: train.Program, seed: int, *, poisoned: bool = False) -> jax.Array:
    """A batch; in a poisoned one, data rank 1's first token says so."""
    tokens = np.random.default_rng(seed).integers(0, POISON, (BATCH, SEQUENCE + 1)).astype(np.int32)
    if poisoned:
        tokens[BATCH // step.mesh.shape["data"], 0] = POISON
    return step.place(tokens)


def test_parts_of_a_batch_add_up_to_its_gradient():
    """With exact sums, and an optimizer that is linear in the gradient."""
    optimizer = optax.chain(
        echo_jax.compensated_psum("data", train.EXACT), echo_jax.clip_by_global_norm(1e9), optax.sgd(1.0)
    )
    results = []
    for parts in (1, 4):
        step = program(train.Args(comm="exact", mesh="data=2,model=1", accumulate=parts), optimizer)
        state, streams = begin(step)
        state, _, row = step.train_step(state, streams, {}, windows(step, 0))
        results.append((state["params"], row["loss"], row["gradient_norm"]))
    for found, wanted in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_an_accumulated_batch_is_summed_over_the_data_axis_once():
    sent = {}
    for parts in (1, 4):
        args = train.Args(mesh="data=2,model=2", accumulate=parts, dp_comm="echo", min_elements=0)
        step = program(args)
        state, streams = begin(step)
        over_model, of_16bit, over_data = train.count_collectives(step, args, state, streams, {})
        sent[parts] = [sum(c.bytes_sent for c in found) for found in (over_model, of_16bit, over_data)]
    assert sent[4][2] == pytest.approx(sent[1][2], rel=0.01)  # a few numbers of the log are gathered for each part
    assert sent[4][1] == pytest.approx(sent[1][1], rel=0.01)  # as many activations, in smaller sums


def test_parts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="accumulate must divide the 4 windows of a data rank, found 3"):
        program(train.Args(mesh="data=2,model=2", accumulate=3))


@pytest.mark.parametrize(("end", "bad"), [pytest.param("settle", np.nan, marks=pytest.mark.soak), ("carry", np.inf)])
def test_a_step_whose_gradient_is_not_finite_on_one_rank_is_skipped_on_all_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, end: str, bad: float
):
    mean_loss = transformer.mean_loss

    def poisoned(config: Any, params: Any, streams: Any, windows_BS1: jax.Array) -> Any:
        loss, rest = mean_loss(config, params, streams, windows_BS1)
        here = (windows_BS1[0, 0] == POISON) & (lax.axis_index("data") == 1)
        return loss * jnp.where(here, bad, 1.0), rest

    monkeypatch.setattr(transformer, "mean_loss", poisoned)
    args = train.Args(
        mesh="data=2,model=2", dp_comm="echo", skip_nonfinite=True, min_elements=0, end=end  # type: ignore[arg-type]
    )  # fmt: skip
    step = program(args)
    good, streams = begin(step)
    for seed in range(2):
        good, streams, _ = step.train_step(good, streams, {}, windows(step, seed))
    before, streams_before = jax.tree.map(np.asarray, (good, streams))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(echo_states(before["optimizer"])))

    state, streams, row = step.train_step(good, streams, {}, windows(step, 2, poisoned=True))
    assert not np.isfinite(row["loss"]) and row["skipped_steps"] == 1
    for kept in (state, before):
        assert kept["step"] == (3 if kept is state else 2)
    assert_same_bits(state["params"], before["params"])
    assert_same_bits(state["optimizer"].inner, before["optimizer"].inner)
    skipped = [np.asarray(shard.data) for shard in state["optimizer"].skipped.addressable_shards]
    assert skipped == [1] * 4
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(streams))

    # Gone on with as if the step had not been; the streams of activations are another matter where they are carried.
    state, _, row = step.train_step(state, streams if end == "settle" else streams_before, {}, windows(step, 3))
    assert np.isfinite(row["loss"]) and row["skipped_steps"] == 1
    other = jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), (before, streams_before), (state, streams))
    wanted, _, _ = step.train_step(*other, {}, windows(step, 3))
    assert_same_bits(state["params"], wanted["params"])
    assert_same_bits(state["optimizer"].inner, wanted["optimizer"].inner)


def echo_states(tree: Any) -> list[Any]:
    is_state = lambda node: isinstance(node, echo_jax.EchoState)  # noqa: E731
    return [node for node in jax.tree.leaves(tree, is_leaf=is_state) if is_state(node)]


def test_without_the_flag_nothing_is_skipped():
    step = program(train.Args(mesh="data=2,model=2"))
    assert optax.tree.get(begin(step)[0]["optimizer"], "skipped") is None
