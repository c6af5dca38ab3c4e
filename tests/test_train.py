"""train.py as its users run it: processes that are stopped, killed and started again with the same command."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from helpers import ROUNDING, assert_same_bits, mesh_of
from training import (
    PATIENCE,
    STEPS,
    Lab,
    assert_same_end,
    comparable,
    event_rows,
    killed_after,
    metric_rows,
    published,
    result_of,
    run,
    saved_arrays,
    saved_steps,
    started,
    tuning,
    uninterrupted,
    wait_for_rows,
)

import train
from echo_jax import wire
from models import tokenizer, transformer, weights
from models.weights import Model

# Carried errors are the harder ones to save: a run that settles has none between steps.
ENDS = [pytest.param("settle", marks=pytest.mark.soak), "carry"]


# --- runs that several tests look at ----------------------------------------------------------------------------------


# (signals and when; exit code; steps of the whole checkpoints afterwards, None where one may still be being written)
STOPS = {
    "settle": [
        ("SIGINT Metrics.write 1 before", 128 + signal.SIGINT, [1]),  # the first step, as soon as it is compiled
        ("SIGTERM evaluate 1 before", 128 + signal.SIGTERM, [1, 4, 5]),  # step 5: saved, its evaluation is still to do
        ("SIGINT,SIGINT,SIGTERM Checkpoints.save 1 before", 128 + signal.SIGINT, [4, 5, 8]),  # more change nothing
        ("SIGKILL Metrics.write 4 before", -signal.SIGKILL, [4, 5, 8]),  # step 11, lost with 9 and 10
        ("SIGTERM evaluate 2 before", 128 + signal.SIGTERM, [5, 8, 12]),  # all steps done; 1 is step 10's
    ],
    "carry": [
        ("SIGTERM evaluate 1 before", 128 + signal.SIGTERM, [4, 5]),  # step 5: saved, its evaluation is still to do
        ("SIGKILL Metrics.write 6 before", -signal.SIGKILL, None),  # step 10, lost with 9; 8 is whole or not there
        ("SIGINT,SIGINT,SIGTERM evaluate 2 before", 128 + signal.SIGINT, [5, 8, 12]),  # all done; more change nothing
    ],
}


def interrupted(lab: Lab, end: str) -> Path:
    """A run stopped as STOPS says, always started again with the same command, and result.json."""

    def make(folder: Path) -> None:
        flags = lab.flags(folder, end)
        for sends, code, steps in STOPS[end]:
            ended = run(lab, flags, sends)
            assert ended.code == code, ended.stderr
            assert steps is None or saved_steps(folder) == steps, sends
        ended = run(lab, flags)
        assert ended.code == 0, ended.stderr
        (folder / "result.json").write_text(ended.stdout.splitlines()[-1])

    return lab.once(f"interrupted-{end}", make)


# --- stopping and going on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ENDS)
def test_a_run_stopped_by_sigterm_sigint_and_sigkill_ends_with_the_bits_of_one_never_stopped(lab: Lab, end: str):
    stopped, reference = interrupted(lab, end), uninterrupted(lab, end)
    assert_same_end(stopped, reference)
    arrays = saved_arrays(reference)
    residuals = arrays["echo"]
    streams = {f"state.{direction}{part}" for direction in ("forward", "backward") for part in ("", ".scale")}
    assert set(residuals) == streams
    assert {"params", "optimizer", "step"} == set(arrays["state"])
    for residual in residuals.values():  # owed at the end, or else carrying it could not be told from dropping it
        assert np.any(residual) == (end == "carry")


@pytest.mark.parametrize("end", ENDS)
def test_no_row_of_the_metrics_is_lost_or_doubled(lab: Lab, end: str):
    workdir = interrupted(lab, end)
    rows = [(step, name) for step, name, _ in metric_rows(workdir)]
    assert len(rows) == len(set(rows))
    assert [step for step, name in rows if name == "loss"] == list(range(1, STEPS + 1))
    assert sorted(step for step, name in rows if name == "val_loss") == [5, 10, 12]
    assert event_rows(workdir) == sorted(rows)


def test_a_stopped_run_reports_what_one_never_stopped_reports(lab: Lab):
    stopped, reference = result_of(interrupted(lab, "carry")), result_of(uninterrupted(lab, "carry"))
    del stopped["tokens_per_s"], reference["tokens_per_s"], reference["exact"]
    assert stopped == reference


def test_the_last_line_is_one_json_object_and_echo_sends_far_fewer_bits(lab: Lab):
    echo = result_of(uninterrupted(lab, "carry"))
    exact = echo.pop("exact")
    keys = ["loss", "val_loss", "steps", "tokens_per_s", "bits_effective", "bytes_sent", "bytes_16bit"]
    keys += ["dp_bytes_a_step", "held_by_a_rank"]
    assert list(echo) == list(exact) == keys
    assert echo["bits_effective"] < 8
    assert exact["bits_effective"] == pytest.approx(16, rel=0.05)  # the loss's own small sums are float32
    assert exact["bytes_sent"] == exact["bytes_16bit"] == echo["bytes_16bit"] > 2 * echo["bytes_sent"]
    assert echo["steps"] == exact["steps"] == STEPS
    assert echo["tokens_per_s"] > 0 and exact["tokens_per_s"] > 0
    assert echo["loss"] != exact["loss"]  # sums were 4-bit ones


def test_a_finished_run_trains_nothing_and_prints_the_same_again(lab: Lab, tmp_path: Path):
    reference = uninterrupted(lab, "carry")
    workdir = tmp_path / "finished"
    shutil.copytree(reference, workdir)
    ended = run(lab, lab.flags(workdir, "carry"))
    assert ended.code == 0, ended.stderr
    wanted = {**result_of(reference), "tokens_per_s": 0.0}
    del wanted["exact"]
    assert ended.result == wanted
    assert (workdir / "metrics.csv").read_text() == (reference / "metrics.csv").read_text()
    assert saved_steps(workdir) == saved_steps(reference)


@pytest.mark.usefixtures("handlers_restored", "compiled_fast")
def test_one_rank_sends_nothing_and_has_no_bits_a_value(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train.main(arguments(lab, tmp_path / "run", mesh="data=1,model=1", eval_batches=1))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["bytes_sent"], result["bits_effective"]) == (0, None)


@pytest.mark.quick
def test_a_signal_from_outside_saves_the_step_it_finds(lab: Lab, tmp_path: Path):
    workdir = tmp_path / "run"
    flags = [*lab.flags(workdir, "settle"), "--steps", "100000", "--save-every", "100000"]
    with started(["train.py", *flags], lab.environment()) as process:
        wait_for_rows(workdir, process, 10)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    (step,) = saved_steps(workdir)
    assert f"stopped by SIGTERM at step {step}" in stdout
    assert max(row[0] for row in metric_rows(workdir)) == step == saved_arrays(workdir)["state"]["step"]


def test_a_checkpoint_goes_on_with_exact_sums_and_with_echo_again(lab: Lab, tmp_path: Path):
    workdir = tmp_path / "run"
    flags = lab.flags(workdir, "carry")
    killed_after(uninterrupted(lab, "carry"), 4, workdir)
    assert all(np.any(residual) for residual in saved_arrays(workdir)["echo"].values())

    exact = run(lab, flags, "SIGTERM Checkpoints.save 1 after", ECHO_JAX_ALGORITHM="exact")  # step 8
    assert exact.code == 128 + signal.SIGTERM, exact.stderr
    assert exact.stderr.count("ECHO_JAX_ALGORITHM=exact") == 1
    assert not any(np.any(residual) for residual in saved_arrays(workdir)["echo"].values())  # what was owed is paid

    last = run(lab, flags)
    assert last.code == 0, last.stderr
    assert all(np.any(residual) for residual in saved_arrays(workdir)["echo"].values())
    losses = {step: value for step, name, value in metric_rows(workdir) if name == "loss"}
    echo = {step: value for step, name, value in metric_rows(uninterrupted(lab, "carry")) if name == "loss"}
    assert list(losses) == list(echo) == list(range(1, STEPS + 1))
    assert all(losses[step] == echo[step] for step in range(1, 5))
    assert losses[12] == pytest.approx(echo[12], rel=0.05)
    sent = result_of(uninterrupted(lab, "carry"))["bytes_sent"]
    exact_share = last.result["bytes_16bit"] / 3  # four of the twelve steps
    assert last.result["bytes_sent"] == pytest.approx(sent * 2 / 3 + exact_share, rel=0.02)


MOMENTS = [
    f"{function} {call} {moment}"
    for function, calls in {
        "replace_file": (1, 2),  # args.json, metrics.csv
        "Program.init": (1,),
        "count_collectives": (1,),
        "Metrics.write": (1, 4, 5, 6, 13, 15),  # 6 is the evaluation of step 5; 13 that of step 10; 15 the last
        "SummaryWriter.add_scalar": (8,),  # between rows and events
        "evaluate": (1, 3),
        "Checkpoints.save": (1, 2, 3),
        "Checkpoints.close": (1,),
    }.items()
    for call in calls
    for moment in ("before", "after")
]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_changes_nothing(lab: Lab, tmp_path: Path, moment: str, name: str):
    workdir = tmp_path / "run"
    flags = lab.flags(workdir, "carry")
    first = run(lab, flags, f"{name} {moment}")
    over = name == "SIGTERM" and moment in ("evaluate 3 after", "Metrics.write 15 before", "Metrics.write 15 after")
    over |= name == "SIGTERM" and moment.startswith("Checkpoints.close")
    code = -signal.SIGKILL if name == "SIGKILL" else 0 if over else 128 + signal.SIGTERM
    assert first.code == code, first.stderr
    last = run(lab, flags)
    assert last.code == 0, last.stderr
    assert_same_end(workdir, uninterrupted(lab, "carry"))
    assert event_rows(workdir) == sorted((step, name) for step, name, _ in metric_rows(workdir))


@pytest.mark.soak
@pytest.mark.parametrize(("save_every", "eval_every"), [(1, 1), (5, 5), (3, 2)])
def test_when_a_run_saves_and_evaluates_changes_no_parameter(
    lab: Lab, tmp_path: Path, save_every: int, eval_every: int
):
    flags = [*lab.flags(tmp_path / "run", "carry"), "--save-every", str(save_every), "--eval-every", str(eval_every)]
    for sends in ("SIGKILL evaluate 1 before", "SIGKILL evaluate 2 after", "SIGINT Metrics.write 2 after"):
        assert run(lab, flags, sends).code != 0
    last = run(lab, flags)
    assert last.code == 0, last.stderr
    assert_same_bits(saved_arrays(tmp_path / "run"), saved_arrays(uninterrupted(lab, "carry")))
    evaluated = [step for step, name, _ in metric_rows(tmp_path / "run") if name == "val_loss"]
    assert evaluated == sorted({*range(eval_every, STEPS, eval_every), STEPS})


@pytest.mark.soak
def test_processes_that_compile_anew_have_the_same_bits(lab: Lab, tmp_path: Path):
    flags = lab.flags(tmp_path / "run", "carry")
    for sends in ("SIGTERM Metrics.write 5 after", None):
        run(lab, flags, sends, JAX_ENABLE_COMPILATION_CACHE="false")
    assert_same_end(tmp_path / "run", uninterrupted(lab, "carry"))


@pytest.mark.soak
def test_a_comparison_stopped_in_its_second_run_goes_on_there(lab: Lab, tmp_path: Path):
    flags = [*lab.flags(tmp_path / "run", "settle"), "--compare"]
    stopped = run(lab, flags, "SIGTERM Checkpoints.save 4 before")
    assert stopped.code == 128 + signal.SIGTERM, stopped.stderr
    found, wanted = run(lab, flags).result, result_of(uninterrupted(lab, "settle"))
    for result in (found, wanted, found["exact"], wanted["exact"]):
        del result["tokens_per_s"]
    assert found == wanted
    for run_of in ("", "exact"):
        assert_same_end(tmp_path / "run" / run_of, uninterrupted(lab, "settle") / run_of)


@pytest.mark.soak
@pytest.mark.parametrize("end", ENDS)
def test_a_run_killed_at_twenty_random_moments_ends_with_the_same_bits(lab: Lab, tmp_path: Path, end: str):
    more = ["--steps", "300", "--save-every", "3", "--eval-every", "7"]
    reference, workdir = tmp_path / "reference", tmp_path / "run"
    assert run(lab, [*lab.flags(reference, end), *more]).code == 0
    random_moment, killed = random.Random(0), 0
    while killed < 20:
        with started(["train.py", *lab.flags(workdir, end), *more], lab.environment()) as process:
            if random_moment.random() < 0.8:  # while it trains, else at any time from the first import on
                rows = len(metric_rows(workdir)) if (workdir / "metrics.csv").exists() else 0
                wait_for_rows(workdir, process, max(rows - 30, 0) + 40)
            time.sleep(random_moment.uniform(0, 0.3))
            process.send_signal(random_moment.choice([signal.SIGTERM, signal.SIGINT, signal.SIGKILL]))
            stdout, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode != 0, f"over before it was killed 20 times: {stdout}"
        killed += 1
    last = run(lab, [*lab.flags(workdir, end), *more])
    assert last.code == 0, last.stderr
    assert_same_bits(saved_arrays(workdir), saved_arrays(reference))
    assert comparable(metric_rows(workdir)) == comparable(metric_rows(reference))
    assert event_rows(workdir) == sorted((step, name) for step, name, _ in metric_rows(workdir))


# --- published checkpoints --------------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load(folder: Path) -> Model:
    return weights.load(folder, mesh_of(data=1, model=1))


@pytest.mark.parametrize("stop", [pytest.param("SIGTERM", marks=pytest.mark.soak), "SIGKILL"])
def test_a_low_rank_run_that_was_stopped_ends_with_the_bits_of_one_never_stopped(lab: Lab, tmp_path: Path, stop: str):
    reference, stopped = tmp_path / "reference", tmp_path / "stopped"
    before = files_of(published(lab))

    def tune(workdir: Path, code: int, sends: str | None = None) -> None:
        ended = run(lab, [*lab.flags(workdir, "settle"), *tuning(lab), "--lora-rank", "2"], sends)
        assert ended.code == code, ended.stderr

    tune(reference, 0)
    if stop == "SIGTERM":
        tune(stopped, 128 + signal.SIGTERM, "SIGTERM Checkpoints.save 1 after")  # step 4
        assert not (stopped / "model").exists()
    else:
        killed_after(reference, 4, stopped)
        shutil.rmtree(stopped / "model")
    (stopped / "model.unfinished" / "model.partial").mkdir(parents=True)  # of a run killed while it wrote the model
    tune(stopped, 0)
    assert_same_end(stopped, reference)
    assert files_of(stopped / "model") == files_of(reference / "model")
    train.export(stopped / "model", load(published(lab)), published(lab))  # again, with another
    assert files_of(stopped / "model") == files_of(reference / "model")

    # The base: neither written nor saved in checkpoints, and in the result with the update that was trained.
    assert files_of(published(lab)) == before
    adapters = saved_arrays(stopped)["state"]["params"]
    names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(adapters)}
    assert names == {"lora_a", "lora_b"}
    base, tuned = load(published(lab)).params, load(stopped / "model").params
    np.testing.assert_array_equal(tuned["embed"]["embedding"], base["embed"]["embedding"])
    kernel, found = (np.float32(params["blocks"]["mlp"]["up_proj"]["kernel"]) for params in (base, tuned))
    update = adapters["blocks"]["mlp"]["up_proj"]["lora_a"] @ adapters["blocks"]["mlp"]["up_proj"]["lora_b"]
    assert np.any(found != kernel)
    np.testing.assert_allclose(found, kernel + 8 * update, rtol=1.01 * ROUNDING["bfloat16"])


@pytest.mark.usefixtures("handlers_restored", "compiled_fast")
def test_a_checkpoint_is_trained_whole_in_float32(lab: Lab, tmp_path: Path):
    train.main(
        arguments(
            lab,
            tmp_path,
            model=published(lab),
            mesh="data=2,model=2",
            steps=STEPS,
            learning_rate=1e-3,
            comm="exact",
            eval_batches=1,
            log_every=1,
        )
    )
    losses = [value for _, name, value in metric_rows(tmp_path) if name == "loss"]
    assert losses[-1] < losses[0]
    tuned = load(tmp_path / "model")
    assert_same_bits(tuned.params, saved_arrays(tmp_path)["state"]["params"])
    assert {leaf.dtype for leaf in jax.tree.leaves(tuned.params)} == {jnp.dtype(jnp.float32)}
    assert tokenizer.load(tmp_path / "model").special_tokens == {"eos_token": "<end>"}


def test_a_checkpoint_is_tuned_with_smaller_steps_than_a_preset_is_trained_with():
    rates = [
        train.preset_of(train.Args(**flags)).learning_rate
        for flags in (
            {},
            {"model": Path("model")},
            {"model": Path("model"), "lora_rank": 8},
            {"model": Path("model"), "learning_rate": 1e-6},
        )
    ]
    assert rates == [train.PRESETS["tiny"].learning_rate, train.FINE_TUNING_RATE, train.LORA_RATE, 1e-6]


@pytest.mark.usefixtures("handlers_restored")
def test_tokens_that_a_checkpoint_does_not_have_are_refused(lab: Lab, tmp_path: Path):
    np.full(10_000, 12, np.uint16).tofile(tmp_path / "text.bin")
    args = arguments(lab, tmp_path / "run", data=tmp_path / "text.bin", model=published(lab))
    with pytest.raises(ValueError, match=r"data must have tokens below 12 for .*model, found 12"):
        train.main(args)
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_go_on_with_another_learning_rate(lab: Lab, tmp_path: Path):
    train.claim_workdir(tmp_path, arguments(lab, tmp_path, learning_rate=1e-3))
    train.claim_workdir(tmp_path, arguments(lab, tmp_path, learning_rate=1e-3))
    with pytest.raises(ValueError, match=r"learning_rate 0.001 \(here 0.004\)"):
        train.claim_workdir(tmp_path, arguments(lab, tmp_path))


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def handlers_restored() -> Iterator[None]:
    """train.main, called here and not in a process of its own, takes the signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def arguments(lab: Lab, workdir: Path, **replaced: Any) -> train.Args:
    good: dict[str, Any] = {"data": lab.text, "workdir": workdir, "batch": 4, "sequence": 32, "steps": 1}
    return train.Args(**{**good, **replaced})


@pytest.mark.quick
@pytest.mark.usefixtures("handlers_restored")
@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"mesh": "data=2"}, "mesh must look like 'data=2,model=4', found 'data=2'"),
        ({"mesh": "data=2,model=four"}, "mesh must look like"),
        ({"mesh": "data=0,model=4"}, "mesh must look like"),
        ({"mesh": "data=1,model=2,data=1"}, "mesh must look like"),
        ({"mesh": "data=1,model=3"}, "mesh must have a model axis that divides the model, found 3: num_heads"),
        ({"mesh": "data=8,model=1"}, "mesh must have a data axis that divides the batch of 4, found 8"),
        ({"steps": 0}, "steps must be at least 1, found 0"),
        ({"batch": -4}, "batch must be at least 1, found -4"),
        ({"sequence": 0}, "sequence must be at least 1, found 0"),
        ({"eval_every": 0}, "eval_every must be at least 1, found 0"),
        ({"save_every": 0}, "save_every must be at least 1, found 0"),
        ({"compare": True, "comm": "exact"}, "compare must be left out with --comm exact"),
        ({"learning_rate": 0.0}, "learning_rate must be between 0 and 1, found 0.0"),
        ({"lora_rank": 8}, "lora_rank must be 0, or with --model at least 1, found 8"),
        ({"lora_rank": -1, "model": Path("model")}, "lora_rank must be 0, or with --model at least 1, found -1"),
        ({"tokenizer": Path("t.json"), "model": Path("model")}, "tokenizer must be left out with --model"),
        ({"codec": "int3"}, "codec must be one of"),
        ({"min_elements": -1}, "min_elements must be at least 0, found -1"),
        ({"sequence": 100_000}, "data must hold at least 4 windows of 100001 tokens"),
        ({"sequence": 2_000}, "data must hold at least 4 windows of 2001 tokens"),  # enough, but not for validation
    ],
    ids=str,
)
def test_wrong_flags_are_named_before_the_workdir_is_claimed(
    lab: Lab, tmp_path: Path, replaced: dict[str, Any], message: str
):
    with pytest.raises(ValueError) as raised:
        train.main(arguments(lab, tmp_path / "run", **replaced))
    assert message in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("handlers_restored")
def test_wrong_data_is_named(lab: Lab, tmp_path: Path):
    def error_of(data: Path) -> str:
        with pytest.raises((ValueError, FileNotFoundError)) as raised:
            train.main(arguments(lab, tmp_path / "run", data=data))
        return str(raised.value)

    assert f"data must be an existing file or folder, found {tmp_path / 'none'}" in error_of(tmp_path / "none")
    assert "data must be an existing file" in error_of(tmp_path / "none.bin")
    (tmp_path / "latin").write_bytes("Größe".encode("latin-1"))
    assert f"data must be UTF-8 text, found {tmp_path / 'latin'}" in error_of(tmp_path / "latin")
    (tmp_path / "odd.bin").write_bytes(b"12345")
    assert f"data must hold uint16 tokens, found {tmp_path / 'odd.bin'} of 5 bytes" in error_of(tmp_path / "odd.bin")


@pytest.mark.usefixtures("handlers_restored")
def test_the_workdir_of_another_run_is_refused_and_left_as_it_was(lab: Lab):
    workdir = uninterrupted(lab, "carry")
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    with pytest.raises(ValueError, match=r"workdir .* holds a run with .*seed 0 \(here 1\)"):
        train.main(tyro.cli(train.Args, args=[*lab.flags(workdir, "carry"), "--seed", "1"]))
    assert {path: path.stat().st_mtime_ns for path in workdir.rglob("*")} == before


# --- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "model"), [*((preset, 4) for preset in train.PRESETS), ("qwen3-8b", 8)])
def test_every_preset_traces_on_eight_devices(preset: str, model: int):
    args = train.Args(preset=preset, mesh=f"data={8 // model},model={model}")  # type: ignore[arg-type]
    chosen = train.preset_of(args)
    vocab_size = chosen.model.vocab_size or 256
    config = dataclasses.replace(chosen.model, vocab_size=vocab_size, comm=train.communication(args, "echo"))
    mesh = train.make_mesh(args.mesh)
    program = train.Program(config, train.make_optimizer(chosen, args), mesh, chosen.batch, chosen.sequence)
    state, streams = jax.eval_shape(lambda: program.init(transformer.init_params(config, jax.random.key(0), mesh)))
    windows = jax.ShapeDtypeStruct((chosen.batch, chosen.sequence + 1), jnp.int32)
    new_state, new_streams, row = jax.eval_shape(program.train_step, state, streams, {}, windows)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), new_state) == jax.tree.map(lambda a: (a.shape, a.dtype), state)
    assert jax.tree.structure(new_streams) == jax.tree.structure(streams)
    assert row["loss"].shape == ()
    sent, of_16bit, _ = train.count_collectives(program, args, state, streams, {})
    assert 4.125 < wire.bits_effective(sum(c.bytes_sent for c in sent), of_16bit) < 8
