"""Training loss when gradients are summed over data ranks exactly, in plain 4 bits, and in compensated 4 bits.

    python -m benchmarks.data_parallel --seeds 0 1 2 --out docs/results/data_parallel

Each run is train.py's tiny preset with every parameter whole on every rank and exact sums otherwise, so that nothing
but the gradients' sum differs. The runs are kept in --workdir; a benchmark that was stopped goes on from where it was.

Columns: validation loss at the end; the training loss's mean over the last hundred steps; bytes that a rank sends over
the data axis in a step; bytes that a rank holds between steps, of which the last are what it owes to the sums.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import jax
import matplotlib
import tyro

import train
from models.processes import StopSignal

matplotlib.use("agg")
import matplotlib.pyplot as plt

SUMS = ("exact", "plain", "echo")
COLOURS = {"exact": "black", "plain": "tab:red", "echo": "tab:blue"}
HEADER = ("seed", "sum", "val_loss", "train_loss", "MB a step", "parameters", "optimizer", "owed")


@dataclasses.dataclass(frozen=True)
class Args:
    """Train with each kind of gradient sum and compare the losses."""

    seeds: tuple[int, ...] = (0, 1, 2)
    ranks: int = 8
    """Of the data axis; they must divide the preset's batch of 16."""
    steps: int = 300
    workdir: Path = Path("runs/data-parallel")
    out: Path | None = None
    """Folder for curves.png, table.md and results.json; by default nothing is written."""


def main(args: Args) -> None:
    stop = StopSignal()
    rows: list[dict[str, Any]] = []
    curves: dict[tuple[int, str], dict[str, list[tuple[int, float]]]] = {}
    print(_line(HEADER), flush=True)
    for seed in args.seeds:
        for dp_comm in SUMS:
            run = train.Args(
                comm="exact",
                dp_comm=dp_comm,
                mesh=f"data={args.ranks},model=1",
                steps=args.steps,
                seed=seed,
                workdir=args.workdir / f"{args.ranks}-{args.steps}-{dp_comm}-{seed}",
                log_every=1,
                eval_every=50,
            )
            result = train.train(run, train.make_mesh(run.mesh), stop)
            assert run.workdir is not None
            curves[seed, dp_comm] = curve = read_metrics(run.workdir / "metrics.csv")
            rows.append(
                {
                    "seed": seed,
                    "sum": dp_comm,
                    "val_loss": result["val_loss"],
                    "train_loss": statistics.mean(loss for _, loss in curve["loss"][-100:]),
                    "dp_bytes_a_step": result["dp_bytes_a_step"],
                    "held_by_a_rank": result["held_by_a_rank"],
                }
            )
            print(_line(_cells(rows[-1])), flush=True)
    summary = {
        name: {
            key: statistics.mean(100 * (row[key] / exact[key] - 1) for row, exact in _against_exact(rows, name))
            for key in ("val_loss", "train_loss")
        }
        for name in SUMS[1:]
    }
    for name, change in summary.items():
        print(f"{name}: validation loss {change['val_loss']:+.2f} %, training loss {change['train_loss']:+.2f} %")
    machine = {"machine": platform.processor() or platform.machine(), "devices": len(jax.devices())}
    result = {"rows": rows, "change_in_percent": summary, "jax": jax.__version__, "steps": args.steps, **machine}
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
        table = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
        table += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
        (args.out / "table.md").write_text("\n".join(table) + "\n")
        draw(curves, args.out / "curves.png")
    print(json.dumps(result))


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by name."""
    found: dict[str, list[tuple[int, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["name"], []).append((int(row["step"]), float(row["value"])))
    return {name: sorted(values) for name, values in found.items()}


def draw(curves: dict[tuple[int, str], dict[str, list[tuple[int, float]]]], path: Path) -> None:
    seeds = sorted({seed for seed, _ in curves})
    figure, axes = plt.subplots(1, len(seeds), figsize=(4.5 * len(seeds), 3.6), sharey=True, squeeze=False)
    for axis, seed in zip(axes[0], seeds, strict=True):
        for name in SUMS:
            curve = curves[seed, name]
            axis.plot(*zip(*curve["loss"], strict=True), color=COLOURS[name], linewidth=0.6, alpha=0.6)
            axis.plot(*zip(*curve["val_loss"], strict=True), "o-", color=COLOURS[name], markersize=3, label=name)
        axis.set(title=f"seed {seed}", xlabel="step", yscale="log")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("loss (nats a byte); dots: validation")
    axes[0, 0].legend(title="gradient sum")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _against_exact(rows: list[dict[str, Any]], name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    exact = {row["seed"]: row for row in rows if row["sum"] == "exact"}
    return [(row, exact[row["seed"]]) for row in rows if row["sum"] == name]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    held = row["held_by_a_rank"]
    sizes = (f"{held[name] / 1e6:.2f} MB" for name in ("parameters", "optimizer", "gradients_owe"))
    sent = f"{row['dp_bytes_a_step'] / 1e6:.2f}"
    return (str(row["seed"]), row["sum"], f"{row['val_loss']:.4f}", f"{row['train_loss']:.4f}", sent, *sizes)


def _line(cells: tuple[str, ...]) -> str:
    return " ".join(f"{cell:>10}" for cell in cells)


if __name__ == "__main__":
    main(tyro.cli(Args))
