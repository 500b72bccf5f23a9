"""What the benchmark of the Keras layers found: the names of its rows, targets met or missed, and the picture.

python benchmarks/keras_layers_summary.py    # prints the targets of results/ as a Markdown table
"""

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure
from models_summary import markdown_table
from rich.console import Console

from linformer_kit.bench.run import fail
from linformer_kit.bench.targets import Target, publish, ratio
from linformer_kit.csv_tables import Table, line
from linformer_kit.plots import style
from linformer_kit.plots.style import Look, Points

RESULTS = Path(__file__).resolve().parent.parent / "results"
TARGETS, PICTURE = "keras_targets.csv", "keras.png"

# what the rows of keras.csv are called: backends and their titles, modes, layers
BACKENDS = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow"}
PREDICT, TRAIN = "predict", "training step"
MODES = (PREDICT, TRAIN)
FULL, OURS = "MultiHeadAttention", "LinearMultiHeadAttention"

LOOKS_OF_OURS = (Look(style.VERMILION, "o"), Look(style.BLUE, "s"))
FULL_LOOK = Look(style.GREY, "D")
# where, and how many times as fast as MultiHeadAttention
TARGET_LENGTH, TARGET_K, LEAST_SPEEDUP = 4096, 64, 5.0


def our_name(projected_length: int) -> str:
    """The name of our layer with K rows."""
    return f"{OURS} K={projected_length}"


def speedups(table: Table, lengths: tuple[int, ...], projected_lengths: tuple[int, ...]) -> list[Target]:
    """Time of MultiHeadAttention over that of our layer; what there is a target for comes first."""

    def speedup(mode: str, backend: str, length: int, projected_length: int) -> Target:
        full, ours = (
            table.number("seconds_median", backend=backend, mode=mode, length=length, name=name)
            for name in (FULL, our_name(projected_length))
        )
        is_wanted = (length, projected_length) == (TARGET_LENGTH, TARGET_K)
        where = f"{BACKENDS[backend]}, N={length:,}, K={projected_length}"
        return Target(
            f"{mode}, speed beside {FULL}", where, True, LEAST_SPEEDUP if is_wanted else None, "×", ratio(full, ours)
        )

    found = [speedup(*point) for point in product(MODES, BACKENDS, lengths, projected_lengths)]
    return sorted(found, key=lambda target: target.wanted is None)


def draw(benchmark: Any) -> Figure:
    """Time of an example over length, both modes on each backend, all panels on one scale."""
    sweep, table = benchmark.sweep, benchmark.table
    looks = {FULL: FULL_LOOK}
    looks |= dict(zip(map(our_name, sweep.projected_lengths), LOOKS_OF_OURS, strict=True))

    def seconds_per_example(**wanted: str) -> Points:
        return [
            (length, seconds / sweep.batch(int(length))) for length, seconds in line(table, "seconds_median", **wanted)
        ]

    figure, panels = style.new_figure(len(MODES), len(BACKENDS), height=3.2)
    for axes, (mode, backend) in zip(panels, product(MODES, BACKENDS), strict=True):
        lines = {name: seconds_per_example(backend=backend, mode=mode, name=name) for name in looks}
        style.cost_lines(axes, f"{BACKENDS[backend]}: {mode}", lines, looks, "time")
    drawn = [axes for axes in panels if axes.lines]
    if drawn:  # a run that was stopped early flatten_keys panels empty
        lowest, highest = (choose(axes.get_ylim()[end] for axes in drawn) for end, choose in ((0, min), (1, max)))
        for axes in drawn:
            axes.set_ylim(lowest, highest)
        style.shared_legend(figure, drawn[0])
    return figure


def summarise(benchmark: Any, machine: dict, console: Console) -> None:
    """The picture, the table of targets, and the same as CSV."""
    sweep = benchmark.sweep
    figure = draw(benchmark)
    versions = ", ".join(f"{name} {machine[name]}" for name in ("keras", *BACKENDS))
    note = f"time of one example, in batches of {sweep.tokens:,} tokens; width {sweep.width}, {sweep.heads} heads, float32\n"
    style.footnote(figure, f"{note}{machine['cpu']}, threads={machine['threads']}, {versions}")
    style.save(figure, benchmark.folder / PICTURE)
    publish(speedups(benchmark.table, sweep.lengths, sweep.projected_lengths), benchmark.folder / TARGETS, console)


def main(results: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS) -> None:
    """Print the targets, and what was measured, as a Markdown table."""
    if not (results / TARGETS).exists():
        fail(f"there is no {TARGETS} in {results}; run benchmarks/keras_layers.py first")
    print(markdown_table(results / TARGETS), end="")


if __name__ == "__main__":
    typer.run(main)
