"""What the benchmark of training found: the names of its rows, targets met or missed, and the picture.

python benchmarks/training_summary.py    # prints the targets of results/ as a Markdown table
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from models_summary import markdown_table
from rich.console import Console

from linformer_kit.bench.peers import FULL, LINFORMER, OURS
from linformer_kit.bench.run import fail
from linformer_kit.bench.targets import Target, publish, ratio
from linformer_kit.csv_tables import Table, line
from linformer_kit.plots import style
from linformer_kit.plots.style import Look

RESULTS = Path(__file__).resolve().parent.parent / "results"
TARGETS, PICTURE = "training_targets.csv", "training.png"

# what the rows of training.csv are called: parts, models, tokenizers, phases
TRAINING, PREPARATION = "training", "preparation"
DYNAMIC, LINEAR = f"{OURS} dynamic", f"{OURS} linear"
# attention weights that are not dropped need not be stored: fused attention does the rest in one step
DYNAMIC_FUSED, FULL_FUSED = f"{DYNAMIC}, no attention dropout", f"{FULL}, no attention dropout"
BPE, BYTES = "bpe", "bytes"
STEP, FORWARD, BACKWARD, OPTIMIZER, REST = "step", "forward", "backward", "clipping and optimizer", "the rest"
EVERYTHING, READING, LEARNING, TOKENIZING = "everything", "reading", "training the tokenizer", "tokenizing"
PROCESSOR = "everything, processor time"

LOOKS = {
    DYNAMIC: Look(style.VERMILION, "o"),
    LINEAR: Look(style.ORANGE, "v"),
    DYNAMIC_FUSED: Look(style.VERMILION, "o", ":"),
    LINFORMER: Look(style.BLUE, "s"),
    FULL: Look(style.GREY, "D"),
    FULL_FUSED: Look(style.GREY, "D", ":"),
}
# ours, and what it is compared with
PAIRS = ((DYNAMIC, FULL), (DYNAMIC_FUSED, FULL_FUSED), (LINEAR, LINFORMER), (DYNAMIC, LINFORMER))
MOST_OVERHEAD, LEAST_MEGABYTES_PER_SECOND = 0.05, 1.0


def speeds(table: Table, lengths: tuple[int, ...]) -> list[Target]:
    """Tokens per second of ours beside those of others."""
    return [
        Target(
            f"tokens per second beside {other}",
            f"training {ours}, N={length:,}",
            True,
            None,
            "×",
            ratio(
                *(table.number("rate", part=TRAINING, name=name, length=length, phase=STEP) for name in (ours, other))
            ),
        )
        for ours, other in PAIRS
        for length in lengths
    ]


def overheads(table: Table, lengths: tuple[int, ...]) -> list[Target]:
    """How much of a step the loop around the model takes."""
    what = "share of a step outside forward, backward, clipping and optimizer"
    shares = {
        length: table.number("share", part=TRAINING, name=DYNAMIC, length=length, phase=REST) for length in lengths
    }
    return [
        Target(what, f"training, N={length:,}", False, MOST_OVERHEAD, "%", share) for length, share in shares.items()
    ]


def preparations(table: Table) -> list[Target]:
    """Text per second and core."""
    found = []
    for name, phase, wanted in (
        (BPE, EVERYTHING, LEAST_MEGABYTES_PER_SECOND),
        (BYTES, EVERYTHING, LEAST_MEGABYTES_PER_SECOND),
        (BPE, LEARNING, None),
        (BPE, TOKENIZING, None),
        (BYTES, TOKENIZING, None),
    ):
        rates = [float(row["rate"]) for row in table.rows(part=PREPARATION, name=name, phase=phase)]
        found.append(
            Target("text prepared on one core", f"{name}, {phase}", True, wanted, " MB/s", rates[0] if rates else None)
        )
    return found


def draw(table: Table) -> Figure:
    """Tokens per second over length: level where cost is linear."""
    figure, (axes,) = style.new_figure(1, 1, height=4.8)
    lines = {name: line(table, "rate", part=TRAINING, name=name, phase=STEP) for name in LOOKS}
    style.cost_lines(axes, "Training: tokens per second", lines, LOOKS, "rate")
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    style.shared_legend(figure, axes, columns=2)
    return figure


def summarise(benchmark: Any, machine: dict, console: Console) -> None:
    """The picture, the table of targets, and the same as CSV."""
    sweep, table = benchmark.sweep, benchmark.table
    figure = draw(table)
    note = f"the shipped configuration imdb, {sweep.tokens:,} tokens per step, float32; {machine['cpu']}, "
    style.footnote(figure, note + f"threads={machine['threads']}, torch {machine['torch']}")
    style.save(figure, benchmark.folder / PICTURE)
    found = [*speeds(table, sweep.lengths), *overheads(table, sweep.lengths), *preparations(table)]
    publish(found, benchmark.folder / TARGETS, console)


def main(results: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS) -> None:
    """Print the targets, and what was measured, as a Markdown table."""
    if not (results / TARGETS).exists():
        fail(f"there is no {TARGETS} in {results}; run benchmarks/training.py first")
    print(markdown_table(results / TARGETS), end="")


if __name__ == "__main__":
    typer.run(main)
