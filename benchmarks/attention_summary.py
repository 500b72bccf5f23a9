"""What the benchmark of the attention layers found: targets met or missed, and pictures."""

from itertools import product

from attention_sweep import BATCH, PROJECTED_LENGTHS, Benchmark, K, causal_name
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from linformer_kit.bench import peers
from linformer_kit.bench.measure import MODES, Mode, fit_exponent
from linformer_kit.bench.peers import FULL, LINFORMER, LINFORMER_PYTORCH, OURS
from linformer_kit.bench.targets import Target, publish, ratio
from linformer_kit.csv_tables import line
from linformer_kit.plots import style
from linformer_kit.plots.style import Look

LOOKS = {
    OURS: Look(style.VERMILION, "o"),
    LINFORMER: Look(style.BLUE, "s"),
    LINFORMER_PYTORCH: Look(style.GREEN, "^"),
    FULL: Look(style.GREY, "D"),
}


def compare(
    benchmark: Benchmark, column: str, length: int, projected_length: int, mode: Mode, other: str
) -> float | None:
    """The other implementation's number divided by ours."""
    theirs, ours = (
        benchmark.main.number(column, **benchmark.key(name, length, projected_length, BATCH, mode))
        for name in (other, OURS)
    )
    return ratio(theirs, ours)


def exponent(benchmark: Benchmark, column: str, mode: Mode) -> float | None:
    """How a column grows over the lengths of the sweep; None until all of them are measured."""
    points = line(benchmark.growth, column, implementation=OURS, mode=mode)
    complete = [length for length, _ in points] == list(benchmark.sweep.growth_lengths)
    return fit_exponent(*zip(*points, strict=True)) if complete else None


def lowest_gemm_fraction(benchmark: Benchmark, projected_length: int) -> float | None:
    points = line(benchmark.share, "gemm_fraction", projected_length=projected_length)
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
    for rows in PROJECTED_LENGTHS:
        measured = compare(benchmark, "seconds_median", 4096, rows, forward, LINFORMER_PYTORCH)
        found.append(Target("faster than linformer-pytorch", f"{forward}, N=4,096, K={rows}", True, 2.0, "×", measured))
    measured = compare(benchmark, "seconds_median", 16384, 128, forward, FULL)
    found.append(Target("faster than full attention", f"{forward}, N=16,384, K=128", True, 15.0, "×", measured))
    for rows in PROJECTED_LENGTHS:
        measured = lowest_gemm_fraction(benchmark, rows)
        found.append(
            Target("share of the GEMM rate, lowest", f"{forward}, N≥4,096, K={rows}", True, 0.8, "%", measured)
        )
    lengths = benchmark.sweep.growth_lengths
    for mode, (column, what) in product(MODES, (("seconds_median", "time"), ("peak_mib", "memory"))):
        measured = exponent(benchmark, column, mode)
        found.append(
            Target(f"exponent of {what}", f"{mode}, N={min(lengths):,}–{max(lengths):,}", False, 1.05, "", measured)
        )
    for name in (causal_name(*shape) for shape in benchmark.sweep.causal_shapes):
        measured = causal_speed_up(benchmark, 16384, name)
        found.append(Target("faster than causal SDPA", f"{forward}, N=16,384, {name}", True, 5.0, "×", measured))
    return found


def draw_main(benchmark: Benchmark, labels: dict[str, str]) -> Figure:
    """Time and memory over length at K=128, and what we gain at every K."""
    figure, (forward, both, memory, gains) = style.new_figure(2, 2)
    looks = {labels[name]: look for name, look in LOOKS.items()}

    def lines(column: str, mode: Mode) -> dict[str, style.Points]:
        wanted = {"batch": BATCH, "mode": mode}
        rows = {name: None if name == FULL else K for name in peers.IMPLEMENTATIONS}
        return {
            labels[name]: line(benchmark.main, column, implementation=name, projected_length=rows[name], **wanted)
            for name in rows
        }

    style.cost_lines(forward, f"Forward, K={K}", lines("seconds_median", "forward"), looks, "time")
    style.cost_lines(both, f"Forward and backward, K={K}", lines("seconds_median", "forward+backward"), looks, "time")
    style.cost_lines(
        memory, f"Peak memory, forward and backward, K={K}", lines("peak_mib", "forward+backward"), looks, "memory"
    )
    length = 4096 if 4096 in benchmark.sweep.lengths else max(benchmark.sweep.lengths)
    series = {
        mode.replace("+", " and "): [
            compare(benchmark, "seconds_median", length, rows, mode, LINFORMER) or 0
            for rows in benchmark.sweep.projected_lengths
        ]
        for mode in MODES
    }
    groups = [f"K={rows}" for rows in benchmark.sweep.projected_lengths]
    style.bars(
        gains,
        f"Times faster than {labels[LINFORMER]}, N={length:,}",
        groups,
        series,
        (style.VERMILION, style.ORANGE),
    )
    style.shared_legend(figure, forward)
    return figure


def draw_growth(benchmark: Benchmark) -> Figure:
    """How our layer grows, how close to the machine's limit it runs, and the causal layer."""
    figure, (time, memory, share, causal) = style.new_figure(2, 2)
    looks = dict(zip(MODES, style.OTHER_LOOKS, strict=False))
    for axes, column, unit in ((time, "seconds_median", "time"), (memory, "peak_mib", "memory")):
        lines = {mode: line(benchmark.growth, column, implementation=OURS, mode=mode) for mode in MODES}
        exponents = {mode: exponent(benchmark, column, mode) for mode in MODES}
        names = {mode: mode if (power := exponents[mode]) is None else f"{mode}: $N^{{{power:.2f}}}$" for mode in MODES}
        title = f"Our layer, K={K}, one example: {unit}"
        style.cost_lines(axes, title, {names[m]: lines[m] for m in MODES}, {names[m]: looks[m] for m in MODES}, unit)
        style.legend(axes)

    lengths: set[float] = set()
    for rows, look in zip(benchmark.sweep.projected_lengths, style.OTHER_LOOKS, strict=False):
        points = line(benchmark.share, "gemm_fraction", projected_length=rows)
        xs, percents = [length for length, _ in points], [100 * fraction for _, fraction in points]
        share.plot(xs, percents, color=look.colour, marker=look.marker, label=f"K={rows}")
        lengths.update(xs)
    style.over_length(share, "Forward: share of the GEMM rate, %", sorted(lengths))
    share.set_ylim(0, 110)
    style.legend(share, ncols=2, loc="lower right")

    draw_causal(benchmark, causal)
    return figure


def draw_causal(benchmark: Benchmark, axes: Axes) -> None:
    """Our causal layers and causal full attention over length."""
    lines, looks = {}, {}
    for (block, slots), look in zip(benchmark.sweep.causal_shapes, style.OTHER_LOOKS, strict=False):
        wanted = {"implementation": OURS, "mode": "forward", "block_length": block, "slots": slots}
        lines[causal_name(block, slots)] = line(benchmark.causal, "seconds_median", **wanted)
        looks[causal_name(block, slots)] = look
    lines["causal SDPA"] = line(benchmark.causal, "seconds_median", implementation=FULL, mode="forward")
    looks["causal SDPA"] = LOOKS[FULL]
    style.cost_lines(axes, "Causal, forward, one example", lines, looks, "time")
    style.legend(axes)


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
        style.footnote(figure, batches + note)
        style.save(figure, benchmark.folder / name)

    publish(targets(benchmark), benchmark.folder / "attention_targets.csv", console)
