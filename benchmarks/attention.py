"""Speed and memory of the attention layers beside other packages: `make bench`.

Writes to results/: attention.csv (length × K × implementation), attention_growth.csv (our layer up to 262,144 tokens),
attention_causal.csv (the causal layer), attention_machine.json, attention_targets.csv and the pictures attention.png and
attention_growth.png. Every point is kept as soon as it is measured: stop at any time, run again to go on.

- Layers of a point have the same weights and are compared with a float64 evaluation before they are timed.
- Times are medians over rounds; every round calls each implementation once, in turn.
- Memory is the peak above what was resident before the call (weights and input stand outside), each in a fresh process in which
  every freed tensor goes back to the system at once.
- The share of the GEMM rate is `plan(...).multiply_adds / seconds`, divided by the multiply-adds per second of a large float32
  matrix product timed in the same rounds, the faster of 2048 × 2048 × 2048 and 8192 × 512 × 512; medians all.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from linformer_kit.bench import peers, plots
from linformer_kit.bench.machine import describe_machine
from linformer_kit.bench.measure import (
    MODES,
    OK,
    OUT_OF_MEMORY,
    OVER_TIME_LIMIT,
    Mode,
    Timing,
    fit_exponent,
    gemm_calls,
    gemm_rate,
    limit_memory,
    make_call,
    time_interleaved,
)
from linformer_kit.bench.memory import MemoryPoint, measure_memory
from linformer_kit.bench.peers import FULL, LINFORMER, LINFORMER_PYTORCH, LINFORMERS, OURS
from linformer_kit.bench.table import Table, write_atomically

BATCH = 2
# the projected length of the pictures over N, of the growth, and of the points that include full attention
K = 128
# a call expected to take longer is left out
LIMIT_SECONDS = 30.0
# tokens on which causal layers are compared before they are timed; not a multiple of any block
CAUSAL_CHECK_LENGTH = 1000

RESULTS = Path(__file__).resolve().parent.parent / "results"
MAIN, GROWTH, CAUSAL, MACHINE = "attention.csv", "attention_growth.csv", "attention_causal.csv", "attention_machine.json"
MEASURED = ("status", "seconds_median", "seconds_fastest", "seconds_slowest", "rounds")
SHARE = ("multiply_adds", "gemm_rate", "gemm_fraction")
MEMORY = ("memory_status", "peak_mib")


@dataclass(frozen=True)
class Sweep:
    """Which points are measured."""

    name: str
    lengths: tuple[int, ...]
    projected_lengths: tuple[int, ...]
    memory_points: tuple[tuple[int, int], ...]  # (length, projected length)
    memory_modes: tuple[Mode, ...]
    growth_lengths: tuple[int, ...]
    causal_lengths: tuple[int, ...]
    causal_shapes: tuple[tuple[int, int], ...]  # (block length, slots)
    gemm_from: int  # the length from which on the GEMM is timed too
    least_rounds: int
    most_rounds: int


PROJECTED_LENGTHS = (32, 64, 128, 256)
COMPLETE = Sweep(
    name="complete",
    lengths=tuple(2**power for power in range(9, 17)),
    projected_lengths=PROJECTED_LENGTHS,
    memory_points=(*((4096, rows) for rows in PROJECTED_LENGTHS), (16384, K), (65536, K)),
    memory_modes=MODES,
    growth_lengths=tuple(2**power for power in range(12, 19)),
    causal_lengths=tuple(2**power for power in range(10, 15)),
    causal_shapes=((128, 4), (128, 8), (256, 8)),
    gemm_from=4096,
    least_rounds=3,
    most_rounds=9,
)
QUICK = Sweep(
    name="quick",
    lengths=(256, 512),
    projected_lengths=(K,),
    memory_points=((512, K),),
    memory_modes=("forward+backward",),
    growth_lengths=(256, 512),
    causal_lengths=(256,),
    causal_shapes=((64, 4),),
    gemm_from=512,
    least_rounds=1,
    most_rounds=1,
)


@dataclass(frozen=True)
class Step:
    """A piece of the run that is kept when it is done."""

    name: str
    is_done: Callable[[], bool]
    run: Callable[[], Iterable[str]]  # gives lines to print


def as_row(timing: Timing) -> dict[str, object]:
    """A timing in the columns of the tables."""
    return {
        "status": timing.status,
        "seconds_median": timing.median,
        "seconds_fastest": timing.fastest,
        "seconds_slowest": timing.slowest,
        "rounds": timing.rounds or None,
    }


def in_words(point: str, timings: dict[str, Timing]) -> str:
    """One line about a point."""
    parts = [f"{name} {plots.duration(timing.median) if timing.median else timing.status}" for name, timing in timings.items()]
    return f"{point}: {', '.join(parts)}"


class Benchmark:
    """The tables of a folder, and the steps that fill them."""

    def __init__(self, sweep: Sweep, folder: Path):
        self.sweep = sweep
        self.folder = folder
        point = ("implementation", "length", "projected_length", "batch", "mode")
        causal_point = ("implementation", "length", "block_length", "slots", "batch", "mode")
        self.main = Table(folder / MAIN, point, MEASURED + SHARE + MEMORY)
        self.growth = Table(folder / GROWTH, point, MEASURED + MEMORY)
        self.causal = Table(folder / CAUSAL, causal_point, MEASURED)

    def steps(self) -> list[Step]:
        """Everything there is to measure, time before memory, short before long."""
        sweep, steps = self.sweep, []

        def add(name: str, is_done: Callable[..., bool], run: Callable[..., Iterable[str]], *arguments) -> None:
            steps.append(Step(name, lambda: is_done(*arguments), lambda: run(*arguments)))

        for length, rows in product(sweep.lengths, sweep.projected_lengths):
            add(f"N={length:,} K={rows}", lambda *point: not self.untimed_modes(*point), self.time_layers, length, rows)
        for mode in MODES:
            add(f"growth, {mode}", self.growth_is_timed, self.time_growth, mode)
        for length in sweep.causal_lengths:
            add(f"causal N={length:,}", lambda length: not self.untimed_causal_modes(length), self.time_causal, length)
        for (length, rows), mode in product(sweep.memory_points, sweep.memory_modes):
            for name in self.implementations(rows):
                point = MemoryPoint(name, length, rows, BATCH, mode)
                add(f"memory N={length:,} K={rows} {name}", self.memory_is_known, self.measure_memory, self.main, point)
        for length, mode in product(sweep.growth_lengths, sweep.memory_modes):
            point = MemoryPoint(OURS, length, K, 1, mode)
            add(f"memory N={length:,}", self.memory_is_known, self.measure_memory, self.growth, point)
        return steps

    def implementations(self, projected_length: int) -> tuple[str, ...]:
        """Full attention has no projected length; it is measured once, beside the others with K rows."""
        return (*LINFORMERS, FULL) if projected_length == K else LINFORMERS

    @staticmethod
    def key(implementation: str, length: int, projected_length: int, batch: int, mode: str) -> dict[str, object]:
        """The key columns of a row."""
        rows = None if implementation == FULL else projected_length
        return {"implementation": implementation, "length": length, "projected_length": rows, "batch": batch, "mode": mode}

    def untimed_modes(self, length: int, projected_length: int) -> list[Mode]:
        """Layers of a point are timed together, so one of them tells for all."""
        rows = {mode: self.main.get(**self.key(OURS, length, projected_length, BATCH, mode)) for mode in MODES}
        return [mode for mode, row in rows.items() if not (row and row["status"])]

    def refusal(self, table: Table, key: dict[str, object], exponent: int) -> str | None:
        """Why a call is not worth starting, as far as the next shorter length tells."""
        length = int(str(key["length"]))
        shorter = [
            row for row in table.rows(**{name: key[name] for name in key if name != "length"}) if int(row["length"]) < length
        ]
        if not shorter:
            return None
        last = max(shorter, key=lambda row: int(row["length"]))
        if last["status"] != OK:
            return last["status"] or None
        expected = float(last["seconds_median"]) * (length / int(last["length"])) ** exponent
        return OVER_TIME_LIMIT if expected > LIMIT_SECONDS else None

    def time_layers(self, length: int, projected_length: int) -> Iterable[str]:
        """All implementations at one length and projected length, in both modes."""
        names, modes = self.implementations(projected_length), self.untimed_modes(length, projected_length)
        refusals: dict[tuple[str, Mode], str] = {}
        for name, mode in product(names, modes):
            key = self.key(name, length, projected_length, BATCH, mode)
            reason = self.refusal(self.main, key, exponent=2 if name == FULL else 1)
            if reason:
                refusals[name, mode] = reason

        ours, x = peers.our_layer(length, projected_length), torch.randn(BATCH, length, peers.EMBED_DIM)
        layers = {name: peers.build(name, ours) for name in names if any((name, mode) not in refusals for mode in modes)}
        for name, mode in product(peers.check_layers(layers, ours, x), modes):
            refusals[name, mode] = OUT_OF_MEMORY

        for mode in modes:
            calls = {name: make_call(layer, x, mode) for name, layer in layers.items() if (name, mode) not in refusals}
            with_gemm = mode == "forward" and length >= self.sweep.gemm_from
            timings = self.time({**calls, **gemm_calls()} if with_gemm else calls)
            rate = gemm_rate(timings)
            timings = {name: timings[name] for name in calls}
            timings |= {name: Timing(refusals[name, mode]) for name in names if (name, mode) in refusals}
            rows = {name: {**self.key(name, length, projected_length, BATCH, mode), **as_row(timings[name])} for name in names}
            if mode == "forward":
                multiply_adds, seconds = ours.plan(length, BATCH).multiply_adds, timings[OURS].median
                rows[OURS]["multiply_adds"] = multiply_adds
                if seconds and rate:
                    rows[OURS] |= {"gemm_rate": rate, "gemm_fraction": multiply_adds / seconds / rate}
            self.main.put(list(rows.values()))
            yield in_words(f"N={length:,} K={projected_length} {mode}", timings)

    def time(self, calls: dict[str, Callable[[], object]], budget_seconds: float = 20.0) -> dict[str, Timing]:
        """Interleaved timing with the rounds of this sweep."""
        return time_interleaved(
            calls, budget_seconds=budget_seconds, least_rounds=self.sweep.least_rounds, most_rounds=self.sweep.most_rounds
        )

    def growth_is_timed(self, mode: Mode) -> bool:
        rows = [self.growth.get(**self.key(OURS, length, K, 1, mode)) for length in self.sweep.growth_lengths]
        return all(row and row["status"] for row in rows)

    def time_growth(self, mode: Mode) -> Iterable[str]:
        """Our layer at all lengths, interleaved: a slow minute must not bend the line."""
        longest = torch.randn(1, max(self.sweep.growth_lengths), peers.EMBED_DIM)
        calls: dict[str, Callable[[], object]] = {}
        for length in self.sweep.growth_lengths:
            layer, x = peers.our_layer(length, K), longest[:, :length]
            if not peers.check_layers({OURS: layer}, layer, x):
                calls[str(length)] = make_call(layer, x, mode)
        timings = self.time(calls, budget_seconds=60)
        self.growth.put(
            [
                {**self.key(OURS, length, K, 1, mode), **as_row(timings.get(str(length), Timing(OUT_OF_MEMORY)))}
                for length in self.sweep.growth_lengths
            ]
        )
        yield in_words(f"growth, {mode}", timings)

    def causal_keys(self, length: int, mode: Mode) -> dict[str, dict[str, object]]:
        """The key columns of each causal layer at a length, by the name it has in lines and pictures."""
        point = {"length": length, "batch": 1, "mode": mode}
        keys: dict[str, dict[str, object]] = {
            causal_name(block, slots): {**point, "implementation": OURS, "block_length": block, "slots": slots}
            for block, slots in self.sweep.causal_shapes
        }
        return {**keys, FULL: {**point, "implementation": FULL, "block_length": None, "slots": None}}

    def untimed_causal_modes(self, length: int) -> list[Mode]:
        rows = {mode: [self.causal.get(**key) for key in self.causal_keys(length, mode).values()] for mode in MODES}
        return [mode for mode in MODES if not all(row and row["status"] for row in rows[mode])]

    def time_causal(self, length: int) -> Iterable[str]:
        """Our causal layer with several blocks and slots, and causal full attention."""
        layers: dict[str, peers.CausalLinformerAttention | peers.FullAttention] = {
            causal_name(block, slots): peers.our_causal_layer(block, slots) for block, slots in self.sweep.causal_shapes
        }
        layers[FULL] = peers.FullAttention(peers.our_causal_layer(128, 4), causal=True)
        x = torch.randn(1, max(length, CAUSAL_CHECK_LENGTH), peers.EMBED_DIM)
        peers.check_causal_layers(layers, x[:, :CAUSAL_CHECK_LENGTH])
        x = x[:, :length]
        for mode in self.untimed_causal_modes(length):
            keys = self.causal_keys(length, mode)
            refusals = {name: self.refusal(self.causal, key, exponent=2) for name, key in keys.items()}
            timings = self.time({name: make_call(layer, x, mode) for name, layer in layers.items() if not refusals[name]})
            timings |= {name: Timing(reason) for name, reason in refusals.items() if reason}
            self.causal.put([{**keys[name], **as_row(timings[name])} for name in layers])
            yield in_words(f"causal N={length:,} {mode}", timings)

    def memory_is_known(self, table: Table, point: MemoryPoint) -> bool:
        row = table.get(**self.key(**asdict(point)))
        return bool(row and row["memory_status"])

    def measure_memory(self, table: Table, point: MemoryPoint) -> Iterable[str]:
        """The peak memory of one call; not of one that was too slow or too large to be timed."""
        key = self.key(**asdict(point))
        row = table.get(**key)
        status, peak_bytes = (row["status"], None) if row and row["status"] not in ("", OK) else measure_memory(point)
        peak_mib = None if peak_bytes is None else peak_bytes / 2**20
        table.put([{**key, "memory_status": status, "peak_mib": peak_mib}])
        what = f"{point.implementation} N={point.length:,} K={point.projected_length} B={point.batch} {point.mode}"
        yield f"memory of {what}: {status if peak_mib is None else plots.size(peak_mib)}"


def causal_name(block_length: int, slots: int) -> str:
    return f"blocks of {block_length}, {slots} slots"


@dataclass(frozen=True)
class Target:
    """One thing to reach."""

    what: str
    where: str
    at_least: bool
    wanted: float
    unit: str
    measured: float | None

    @property
    def texts(self) -> tuple[str, str, str, str, str]:
        """As it is shown: what, where, wanted, measured, verdict."""
        wanted = f"{'≥' if self.at_least else '≤'} {self.in_unit(self.wanted)}"
        measured = "" if self.measured is None else self.in_unit(self.measured)
        return self.what, self.where, wanted, measured, self.verdict

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        return "met" if (self.measured >= self.wanted if self.at_least else self.measured <= self.wanted) else "missed"

    def in_unit(self, value: float) -> str:
        return f"{value * 100:.0f} %" if self.unit == "%" else f"{value:.2f}{self.unit}"


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def compare(benchmark: Benchmark, column: str, length: int, projected_length: int, mode: Mode, other: str) -> float | None:
    """The other implementation's number divided by ours."""
    theirs, ours = (
        benchmark.main.number(column, **benchmark.key(name, length, projected_length, BATCH, mode)) for name in (other, OURS)
    )
    return ratio(theirs, ours)


def exponent(benchmark: Benchmark, column: str, mode: Mode) -> float | None:
    """How a column grows over the lengths of the sweep; None until all of them are measured."""
    points = line(benchmark.growth, column, implementation=OURS, mode=mode)
    complete = [length for length, _ in points] == list(benchmark.sweep.growth_lengths)
    return fit_exponent(*zip(*points, strict=True)) if complete else None


def lowest_gemm_fraction(benchmark: Benchmark, projected_length: int) -> float | None:
    points = line(benchmark.main, "gemm_fraction", implementation=OURS, projected_length=projected_length, mode="forward")
    return min((fraction for length, fraction in points if length >= 4096), default=None)


def causal_speed_up(benchmark: Benchmark, length: int, name: str) -> float | None:
    keys = benchmark.causal_keys(length, "forward")
    theirs, ours = (benchmark.causal.number("seconds_median", **keys[which]) for which in (FULL, name))
    return ratio(theirs, ours)


def targets(benchmark: Benchmark) -> list[Target]:
    """What the layers are meant to reach, and what was measured."""
    forward, both = MODES
    found = []
    for rows, wanted_forward, wanted_both in ((128, 1.8, 1.6), (32, 3.0, 3.0)):
        for mode, wanted in ((forward, wanted_forward), (both, wanted_both)):
            measured = compare(benchmark, "seconds_median", 4096, rows, mode, LINFORMER)
            found.append(Target("faster than linformer", f"{mode}, N=4,096, K={rows}", True, wanted, "×", measured))
    for rows in (128, 32):
        measured = ratio(1.0, compare(benchmark, "peak_mib", 4096, rows, both, LINFORMER))
        found.append(Target("peak memory beside linformer", f"{both}, N=4,096, K={rows}", False, 0.7, "×", measured))
    for rows in (128, 32):
        measured = compare(benchmark, "seconds_median", 4096, rows, forward, LINFORMER_PYTORCH)
        found.append(Target("faster than linformer-pytorch", f"{forward}, N=4,096, K={rows}", True, 2.0, "×", measured))
    measured = compare(benchmark, "seconds_median", 16384, 128, forward, FULL)
    found.append(Target("faster than full attention", f"{forward}, N=16,384, K=128", True, 15.0, "×", measured))
    for rows in PROJECTED_LENGTHS:
        measured = lowest_gemm_fraction(benchmark, rows)
        found.append(Target("share of the GEMM rate, lowest", f"{forward}, N≥4,096, K={rows}", True, 0.8, "%", measured))
    lengths = benchmark.sweep.growth_lengths
    for mode, (column, what) in product(MODES, (("seconds_median", "time"), ("peak_mib", "memory"))):
        measured = exponent(benchmark, column, mode)
        found.append(Target(f"exponent of {what}", f"{mode}, N={min(lengths):,}–{max(lengths):,}", False, 1.05, "", measured))
    for name in (causal_name(*shape) for shape in benchmark.sweep.causal_shapes):
        measured = causal_speed_up(benchmark, 16384, name)
        found.append(Target("faster than causal SDPA", f"{forward}, N=16,384, {name}", True, 5.0, "×", measured))
    return found


def line(table: Table, column: str, **wanted: object) -> plots.Points:
    """(length, number) of the rows that have it, by length."""
    return sorted((float(row["length"]), float(row[column])) for row in table.rows(**wanted) if row[column])


def draw_main(benchmark: Benchmark, labels: dict[str, str]) -> Figure:
    """Time and memory over length at K=128, and what we gain at every K."""
    figure, (forward, both, memory, gains) = plots.new_figure(2, 2)
    looks = {labels[name]: look for name, look in plots.LOOKS.items()}

    def lines(column: str, mode: Mode) -> dict[str, plots.Points]:
        wanted = {"batch": BATCH, "mode": mode}
        rows = {name: None if name == FULL else K for name in peers.IMPLEMENTATIONS}
        return {
            labels[name]: line(benchmark.main, column, implementation=name, projected_length=rows[name], **wanted) for name in rows
        }

    plots.cost_lines(forward, f"Forward, K={K}", lines("seconds_median", "forward"), looks, "time")
    plots.cost_lines(both, f"Forward and backward, K={K}", lines("seconds_median", "forward+backward"), looks, "time")
    plots.cost_lines(memory, f"Peak memory, forward and backward, K={K}", lines("peak_mib", "forward+backward"), looks, "memory")
    length = 4096 if 4096 in benchmark.sweep.lengths else max(benchmark.sweep.lengths)
    series = {
        mode.replace("+", " and "): [
            compare(benchmark, "seconds_median", length, rows, mode, LINFORMER) or 0 for rows in benchmark.sweep.projected_lengths
        ]
        for mode in MODES
    }
    groups = [f"K={rows}" for rows in benchmark.sweep.projected_lengths]
    plots.bars(gains, f"Times faster than {labels[LINFORMER]}, N={length:,}", groups, series, (plots.VERMILION, plots.ORANGE))
    plots.shared_legend(figure, forward)
    return figure


def draw_growth(benchmark: Benchmark) -> Figure:
    """How our layer grows, how close to the machine's limit it runs, and the causal layer."""
    figure, (time, memory, share, causal) = plots.new_figure(2, 2)
    looks = dict(zip(MODES, plots.OTHER_LOOKS, strict=False))
    for axes, column, unit in ((time, "seconds_median", "time"), (memory, "peak_mib", "memory")):
        lines = {mode: line(benchmark.growth, column, implementation=OURS, mode=mode) for mode in MODES}
        exponents = {mode: exponent(benchmark, column, mode) for mode in MODES}
        names = {mode: mode if (power := exponents[mode]) is None else f"{mode}: $N^{{{power:.2f}}}$" for mode in MODES}
        title = f"Our layer, K={K}, one example: {unit}"
        plots.cost_lines(axes, title, {names[m]: lines[m] for m in MODES}, {names[m]: looks[m] for m in MODES}, unit)
        plots.legend(axes)

    lengths: set[float] = set()
    for rows, look in zip(benchmark.sweep.projected_lengths, plots.OTHER_LOOKS, strict=False):
        points = line(benchmark.main, "gemm_fraction", implementation=OURS, projected_length=rows, mode="forward")
        xs, percents = [length for length, _ in points], [100 * fraction for _, fraction in points]
        share.plot(xs, percents, color=look.colour, marker=look.marker, label=f"K={rows}")
        lengths.update(xs)
    plots.over_length(share, "Forward: share of the GEMM rate, %", sorted(lengths))
    share.set_ylim(0, 110)
    plots.legend(share, ncols=2, loc="lower right")

    draw_causal(benchmark, causal)
    return figure


def draw_causal(benchmark: Benchmark, axes: Axes) -> None:
    """Our causal layers and causal full attention over length."""
    lines, looks = {}, {}
    for (block, slots), look in zip(benchmark.sweep.causal_shapes, plots.OTHER_LOOKS, strict=False):
        wanted = {"implementation": OURS, "mode": "forward", "block_length": block, "slots": slots}
        lines[causal_name(block, slots)] = line(benchmark.causal, "seconds_median", **wanted)
        looks[causal_name(block, slots)] = look
    lines["causal SDPA"] = line(benchmark.causal, "seconds_median", implementation=FULL, mode="forward")
    looks["causal SDPA"] = plots.LOOKS[FULL]
    plots.cost_lines(axes, "Causal, forward, one example", lines, looks, "time")
    plots.legend(axes)


def summarise(benchmark: Benchmark, machine: dict, console: Console) -> None:
    """Pictures, the table of targets, and the same as CSV."""
    labels = {OURS: OURS, FULL: f"{FULL} (SDPA)"}
    labels |= {name: f"{name} {machine[name]}" for name in (LINFORMER, LINFORMER_PYTORCH)}
    sizes = f"C={peers.EMBED_DIM}, H={peers.NUM_HEADS}, float32"
    note = f"{sizes}; {machine['cpu']}, threads={machine['threads']}, torch {machine['torch']}"
    for name, figure, batches in (
        ("attention.png", draw_main(benchmark, labels), f"B={BATCH}, "),
        ("attention_growth.png", draw_growth(benchmark), ""),
    ):
        plots.footnote(figure, batches + note)
        plots.save(figure, benchmark.folder / name)

    found = targets(benchmark)
    path = benchmark.folder / "attention_targets.csv"
    path.unlink(missing_ok=True)
    table = Table(path, ("target", "at"), ("wanted", "measured", "verdict"))
    table.put([dict(zip(table.keys + table.values, target.texts, strict=True)) for target in found])
    shown = RichTable("to reach", "at", "wanted", "measured", "", box=SIMPLE_HEAD)
    colours = {"met": "green", "missed": "red", "not measured": "dim"}
    for target in found:
        shown.add_row(*target.texts, style=colours[target.verdict])
    console.print(shown)


def fail(message: str) -> None:
    """Stop with a message."""
    print(message, file=sys.stderr)
    raise typer.Exit(1)


def require_writable(folder: Path) -> None:
    """Fail before measuring rather than after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fail(f"cannot write to {folder}: {error.strerror}; choose another folder with --output")


def start_over_if_needed(folder: Path, machine: dict, fresh: bool, console: Console) -> dict:
    """Keep earlier points only if they come from this machine, these versions and this code; gives the record that holds."""
    path = folder / MACHINE
    if path.exists() and not fresh:
        earlier = json.loads(path.read_text())
        if {**earlier, "date": ""} == {**machine, "date": ""}:
            return earlier
        changed = ", ".join(name for name in machine if name != "date" and machine[name] != earlier.get(name))
        console.print(f"{path} tells of another {changed}: measuring everything anew")
    for name in (MAIN, GROWTH, CAUSAL):
        (folder / name).unlink(missing_ok=True)
    write_atomically(path, lambda part: part.write_text(json.dumps(machine, indent=2) + "\n"))
    return machine


def run(benchmark: Benchmark, console: Console) -> None:
    """Measure what has not been measured yet."""
    torch.manual_seed(0)
    limit_memory()
    if os.getloadavg()[0] > 0.5:
        console.print("[yellow]Other programs are running: layers with many small steps will look slower than they are.[/]")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        steps = benchmark.steps()
        task = progress.add_task("", total=len(steps))
        for step in steps:
            progress.update(task, description=step.name)
            if not step.is_done():
                for text in step.run():
                    console.print(text, highlight=False, soft_wrap=True)
            progress.advance(task)


def main(
    output: Annotated[Path, typer.Option(help="Folder for CSVs and pictures.")] = RESULTS,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget earlier measurements.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Only draw and print what has been measured.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny sweep, to try the benchmark itself; needs --output.")] = False,
) -> None:
    """Measure time and memory of the attention layers beside other packages."""
    if summary and fresh:
        fail("--summary draws earlier measurements and --fresh forgets them: choose one")
    if quick and output.resolve() == RESULTS:
        fail("--quick would replace the results by numbers that mean nothing; give another folder with --output")
    console = Console()
    require_writable(output)
    try:
        if summary:
            if not (output / MACHINE).exists():
                fail(f"there are no measurements in {output}; run without --summary first")
            machine = json.loads((output / MACHINE).read_text())
            benchmark = Benchmark(QUICK if machine["sweep"] == QUICK.name else COMPLETE, output)
        else:
            sweep = QUICK if quick else COMPLETE
            machine = start_over_if_needed(output, {"sweep": sweep.name, **describe_machine()}, fresh, console)
            benchmark = Benchmark(sweep, output)
            run(benchmark, console)
    except KeyboardInterrupt:
        print(f"stopped; what was measured is kept in {output}, and the same command goes on from there", file=sys.stderr)
        raise typer.Exit(130) from None
    except (peers.MissingPeer, peers.WrongImplementation, ValueError) as error:
        fail(str(error))
    summarise(benchmark, machine, console)
    console.print(f"CSVs and pictures are in {output}")


if __name__ == "__main__":
    typer.run(main)
