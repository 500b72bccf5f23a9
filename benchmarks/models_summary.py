"""What the benchmark of the models found: targets met or missed, pictures, and the table of the documents.

python benchmarks/models_summary.py                            # prints the targets of results/ as a Markdown table
python benchmarks/models_summary.py --into docs/benchmarks.md  # writes it there, between <!-- models: start --> and … end
"""

import csv
import re
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.figure import Figure
from models_sweep import CAUSAL, CAUSAL_FULL, GO_ON, SHORTENED, UNSHORTENED, Benchmark
from rich.console import Console

from linformer_kit.bench.measure import MODES, Mode
from linformer_kit.bench.peer_models import (
    BERT,
    BIG_BIRD,
    FNET,
    LONGFORMER,
    MODERN_BERT,
    NONE_EAGER,
    NONE_SDPA,
    NYSTROMFORMER,
    PEER_ENCODERS,
    linear_name,
)
from linformer_kit.bench.run import fail
from linformer_kit.bench.targets import HEADINGS, Target, publish, ratio
from linformer_kit.csv_tables import line
from linformer_kit.files import write_atomically
from linformer_kit.plots import style
from linformer_kit.plots.style import Look

RESULTS = Path(__file__).resolve().parent.parent / "results"
TARGETS = "models_targets.csv"
K = 128  # of our encoder in the comparison with all others
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# "time saved" in Table 3 of the paper, at LENGTHS, by K
SAVED_IN_PAPER = {128: (1.5, 1.7, 2.6, 3.4, 5.5, 8.6), 256: (1.3, 1.6, 2.4, 3.2, 5.0, 7.8)}
# what is compared by its attention: our own other K are no competition, and FNet has none
RIVALS = (NONE_SDPA, NONE_EAGER, *(name for name in PEER_ENCODERS if name != FNET))

LOOKS = {
    linear_name(64): Look(style.ORANGE, "v"),
    linear_name(128): Look(style.VERMILION, "o"),
    linear_name(256): Look(style.PURPLE, "^"),
    NONE_SDPA: Look(style.GREY, "D"),
    NONE_EAGER: Look(style.GREY, "x", "--"),
    BERT: Look(style.BLACK, "s"),
    MODERN_BERT: Look(style.BLACK, "*", "--"),
    LONGFORMER: Look(style.BLUE, "P"),
    BIG_BIRD: Look(style.SKY, "X"),
    NYSTROMFORMER: Look(style.GREEN, "h"),
    FNET: Look(style.GREEN, "+", ":"),
}


def seconds(benchmark: Benchmark, model: str, length: int, mode: Mode) -> float | None:
    return benchmark.encoders.number("seconds_median", model=model, length=length, mode=mode)


def next_fastest(benchmark: Benchmark, length: int, mode: Mode) -> str | None:
    """The fastest attention-based encoder besides ours with projection."""
    times = {name: time for name in RIVALS if (time := seconds(benchmark, name, length, mode))}
    return min(times, key=lambda name: times[name], default=None)


def fastest(benchmark: Benchmark) -> list[Target]:
    """How far ahead of all other attention-based encoders ours is."""
    found = []
    for mode, length in product(MODES, LENGTHS[1:]):
        rival = next_fastest(benchmark, length, mode)
        measured = (
            None
            if rival is None
            else ratio(*(seconds(benchmark, name, length, mode) for name in (rival, linear_name(K))))
        )
        where = f"{mode}, N={length:,}, K={K}" + (f", next: {rival}" if rival else "")
        wanted = 1.5 if length >= 4096 else 1.0
        found.append(Target("faster than the next attention-based model", where, True, wanted, "×", measured))
    return found


def time_saved(benchmark: Benchmark) -> list[Target]:
    """Table 3 of the paper, which compares with unfused attention."""
    found = []
    for rows, cells in SAVED_IN_PAPER.items():
        for length, wanted in zip(LENGTHS, cells, strict=True):
            names = (NONE_EAGER, linear_name(rows))
            measured = ratio(*(seconds(benchmark, name, length, "forward") for name in names))
            where = f"forward, N={length:,}, K={rows}"
            found.append(
                Target("faster than unfused attention (the paper's Table 3)", where, True, wanted, "×", measured)
            )
    return found


def share_of_saving(benchmark: Benchmark) -> list[Target]:
    """How much of the multiply-adds that projection saves is time saved, beside fused attention."""
    found = []
    for rows, length in product(SAVED_IN_PAPER, LENGTHS):
        names = (NONE_SDPA, linear_name(rows))
        times = ratio(*(seconds(benchmark, name, length, "forward") for name in names))
        numbers = (
            benchmark.encoders.number("multiply_adds", model=name, length=length, mode="forward") for name in names
        )
        what = "faster than fused attention ÷ fewer multiply-adds"
        found.append(Target(what, f"forward, N={length:,}, K={rows}", True, 0.9, "%", ratio(times, ratio(*numbers))))
    return found


def generation(benchmark: Benchmark) -> list[Target]:
    """What shorter caches are worth at the greatest length."""
    sweep, found = benchmark.sweep, []
    for what, where, length, names in (
        ("full attention", f"prompt of {max(sweep.prompts):,}", max(sweep.prompts), (CAUSAL, CAUSAL_FULL)),
        ("an unshortened source", f"source of {sweep.source:,}", sweep.source, (SHORTENED, UNSHORTENED)),
    ):
        rates, sizes = (
            [benchmark.generation.number(column, model=name, length=length, phase=GO_ON) for name in names]
            for column in ("tokens_per_second", "cache_bytes")
        )
        where = f"{sweep.new_tokens} tokens, {where}"
        found.append(Target(f"tokens per second beside {what}", where, True, None, "×", ratio(*rates)))
        found.append(Target(f"cache smaller than with {what}", where, True, None, "×", ratio(*reversed(sizes))))
    return found


def targets(benchmark: Benchmark) -> list[Target]:
    """What the models are meant to reach, and what was measured."""
    return [*fastest(benchmark), *time_saved(benchmark), *share_of_saving(benchmark), *generation(benchmark)]


def draw_encoders(benchmark: Benchmark, mode: Mode, title: str) -> Figure:
    """Time per 1,000 tokens over length: level where cost is linear."""
    figure, (axes,) = style.new_figure(1, 1, height=5.6)
    lines = {}
    for name in LOOKS:
        points = line(benchmark.encoders, "seconds_median", model=name, mode=mode)
        lines[name] = [(length, 1000 * time / (length * benchmark.sweep.batch(int(length)))) for length, time in points]
    style.cost_lines(axes, f"{title}: time per 1,000 tokens", lines, LOOKS, "time")
    style.shared_legend(figure, axes, columns=4)
    return figure


def draw_generation(benchmark: Benchmark) -> Figure:
    """Speed and cache over the length of what was read."""
    figure, (speed, cache) = style.new_figure(1, 2, height=4.2)
    names = (CAUSAL, CAUSAL_FULL, SHORTENED, UNSHORTENED)
    styles = (
        Look(style.VERMILION, "o"),
        Look(style.GREY, "D"),
        Look(style.ORANGE, "v"),
        Look(style.BLACK, "s"),
    )
    looks = dict(zip(names, styles, strict=True))
    rates = {name: line(benchmark.generation, "tokens_per_second", model=name, phase=GO_ON) for name in names}
    sizes = {name: line(benchmark.generation, "cache_bytes", model=name, phase=GO_ON) for name in names}
    style.cost_lines(speed, "Tokens generated per second", rates, looks, "rate")
    mebibytes = {name: [(length, size / 2**20) for length, size in points] for name, points in sizes.items()}
    style.cost_lines(cache, "Cache", mebibytes, looks, "memory")
    for axes in (speed, cache):
        axes.set_xlabel("length of prompt or source")
    style.shared_legend(figure, speed, columns=2)
    return figure


def summarise(benchmark: Benchmark, machine: dict, console: Console) -> None:
    """Pictures, the table of targets, and the same as CSV."""
    sizes = benchmark.sweep.sizes
    note = (
        f"{sizes.layers} layers, C={sizes.hidden}, H={sizes.heads}, I={sizes.intermediate}, float32; {machine['cpu']}, "
    )
    note += f"threads={machine['threads']}, torch {machine['torch']}, transformers {machine['transformers']}"
    for name, figure in (
        ("models_forward.png", draw_encoders(benchmark, "forward", "Forward")),
        ("models_training.png", draw_encoders(benchmark, "forward+backward", "Training step")),
        ("models_generation.png", draw_generation(benchmark)),
    ):
        style.footnote(figure, note)
        style.save(figure, benchmark.folder / name)
    publish(targets(benchmark), benchmark.folder / TARGETS, console)


def markdown_table(path: Path) -> str:
    """The targets of a CSV as the documents show them."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [list(row.values()) for row in csv.DictReader(file)]
    lines = [list(HEADINGS), ["---"] * len(HEADINGS), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| --- ", "|---").replace("--- |", "---|")


def main(
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    into: Annotated[
        Path | None, typer.Option(help="A document in which to replace the table; printed if there is none.")
    ] = None,
) -> None:
    """Write the targets, and what was measured, as a Markdown table."""
    if not (results / TARGETS).exists():
        fail(f"there is no {TARGETS} in {results}; run benchmarks/models.py first")
    table = markdown_table(results / TARGETS)
    if into is None:
        print(table, end="")
        return
    if not into.is_file():
        fail(f"there is no document {into}; give the path of one that has a place for the table")
    start, end = "<!-- models: start -->\n", "<!-- models: end -->"
    text, places = re.subn(
        f"{start}.*?{end}", lambda _: f"{start}{table}{end}", into.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    if places != 1:
        fail(f"{into} has {places} places for the table; put {start.strip()} and {end} once, on lines of their own")
    write_atomically(into, lambda part: part.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
