"""`linformer compare`: measures each point in isolation, then times all points of a group in interleaved rounds.

Each point first runs in a separate process (`isolated`), which checks that it is correct, fits in memory and is fast
enough, and measures its peak memory. Those that pass are then timed in interleaved rounds.
"""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from ..csv_tables import Row, Table, as_text
from ..errors import Stopped, UserError
from ..files import check_writable, lock
from ..formatting import format_duration, format_size, say
from . import paper_table, targets
from .encoders import saved_config
from .implementations import IMPLEMENTATIONS, version_of
from .isolated import Isolated, measure_isolated, measure_rounds
from .machine import describe_machine, timed_code
from .measure import FAILED, OK, OUT_OF_MEMORY, OVER_TIME_LIMIT, WRONG, Timing, as_row, available_bytes
from .point import TRAINING_SUBJECTS, Point, special_words
from .result_table import FACTS, baseline_name, baseline_of, open_table
from .sweep import LISTS, PAPER_TABLE_3, PRESETS, Sweep, read_keys, read_sweep, split_list

# share of the available memory that the largest possible batch may need, since rounds hold the batches of all points
USABLE_MEMORY = 0.5
# share of the time limit that the slowest call with that batch may take
USABLE_TIME = 0.1
# tokens per batch in the trial that finds the largest possible batch
PROBE_TOKENS = 4096


def run(
    path: Path | None, preset: str | None, flags: dict[str, Any], output: Path | None, fresh: bool, summary: bool
) -> None:
    """Run the command. Flags override keys of the file, which override keys of the preset."""
    if fresh and summary:
        raise UserError("--summary evaluates earlier measurements and --fresh discards them; choose one")
    values = {name: split_list(value, LISTS[name]) if name in LISTS else value for name, value in flags.items()}
    sweep = read_sweep({**PRESETS.get(preset or "", {}), **(read_keys(path) if path else {}), **values})
    output = output or Path(sweep.output or f"{preset or 'compare'}.csv")
    if output.suffix != ".csv" or output.is_dir():
        raise UserError(f"--output is {output}; it must be the name of a CSV file, such as compare.csv")
    if preset == PAPER_TABLE_3:
        import matplotlib  # noqa: F401 — report a missing package before anything is measured
    console = Console()
    if summary and not output.exists():
        raise UserError(f"there is no table {output} to summarize; run without --summary first")
    table = open_table(output) if summary else compare(sweep, output, fresh, console)
    rows, written = list(table.rows()), [output]
    show(rows, console)
    if sweep.targets:
        written.append(output.with_name(f"{output.stem}_targets.csv"))
        targets.publish(sweep.targets, rows, sweep.lengths, written[-1], console)
    if preset == PAPER_TABLE_3:
        written += paper_table.publish(rows, output, console)
    console.print("Written:", *map(str, written), highlight=False, soft_wrap=True)


def compare(sweep: Sweep, path: Path, fresh: bool, console: Console) -> Table:
    """Measure what is missing in the table at `path`."""
    folder = path.absolute().parent
    check_writable(folder, "choose another directory with --output")
    folder.mkdir(parents=True, exist_ok=True)
    # a lock file next to the results would stay there
    lock_file = Path(tempfile.gettempdir()) / f"linformer-compare-{hashlib.sha256(bytes(folder)).hexdigest()[:16]}.lock"
    with lock(
        lock_file, f"another run is measuring in {folder}; wait for it, or choose another directory with --output"
    ):
        if fresh:
            path.unlink(missing_ok=True)
        comparison = Comparison(sweep, open_table(path), console)
        comparison.require_same_facts()
        try:
            comparison.run()
        except KeyboardInterrupt:
            raise Stopped(f"Stopped. {path} keeps what was measured; the same command resumes.", 130) from None
    return comparison.table


class Comparison:
    """A table, and the measurements that fill it."""

    def __init__(self, sweep: Sweep, table: Table, console: Console):
        self.sweep = sweep
        self.table = table
        self.console = console
        model = saved_config(sweep.model).to_json_string() if sweep.model is not None else ""
        self.machine = {**describe_machine(), "code": timed_code(model)}

    def run(self) -> None:
        """Measure what is missing."""
        if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5:
            self.console.print("[yellow]The machine is busy; timings are unreliable.")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        groups = self.sweep.groups()
        with Progress(*columns, console=self.console) as progress:
            bar = progress.add_task("", total=sum(len(points) + 1 for points in groups))
            for points in groups:
                name = group_name(points)
                if not self.sweep.batch and not self.sweep.tokens:
                    progress.update(bar, description=f"{name}: batch")
                    points = self.in_largest_batches(points)
                progress.update(bar, description=f"{name}: isolated")
                for point in points:
                    if not self.is_tried(point):
                        self.isolate(point, points)
                    progress.advance(bar)
                progress.update(bar, description=f"{name}: rounds")
                if not self.is_timed(points):
                    self.time(points)
                progress.advance(bar)

    # facts that the numbers depend on

    def facts(self, implementation: str, backend: str) -> Row:
        """Everything that a row depends on."""
        facts = {
            **self.sweep.sizes,
            **self.machine,
            "package": version_of(implementation, backend),
            "tokens": None if self.sweep.batch else self.sweep.tokens,
            "device": device_name(self.sweep.device),
        }
        return {name: as_text(facts[name]) for name in FACTS}

    def require_same_facts(self) -> None:
        """Refuse to add to numbers from another machine, version or setting: they could not be compared."""
        remedy = "choose another file with --output, or measure everything again with --fresh"
        for row in self.table.rows():
            if row["implementation"] not in IMPLEMENTATIONS:
                raise UserError(
                    f"{self.table.path} has the implementation {row['implementation']!r}, which this version does not "
                    f"know; {remedy}"
                )
            now = self.facts(row["implementation"], row["backend"])
            for name in FACTS:
                if name != "date" and row[name] != now[name]:
                    raise UserError(
                        f"{self.table.path} was measured with {name}={row[name]}, now it is {now[name]}, so new "
                        f"numbers could not be compared with those; {remedy}"
                    )

    # measuring

    def in_largest_batches(self, points: list[Point]) -> list[Point]:
        """The points in batches of the largest size that fits for all; it is found once and kept in the table."""
        first = points[0]
        same = {name: getattr(first, name) for name in ("subject", "step", "backend", "length")}
        known = next(self.table.rows(**same), None)
        batch = int(known["batch"]) if known else self.probe(points)
        points = [replace(point, batch=batch) for point in points]
        if not known:
            self.table.put([self.row(point) for point in points])
            say(self.console, f"{group_name(points)}: batches of {batch:,}")
        return points

    def probe(self, points: list[Point]) -> int:
        """The largest batch that fits for all points, from trials of the largest K and of those without K."""
        examples = max(1, PROBE_TOKENS // points[0].length)
        rows = [point.projected_length for point in points if point.projected_length is not None]
        probed = [point for point in points if point.projected_length in (None, max(rows, default=None))]
        limit, free = self.sweep.time_limit, free_bytes(self.sweep.device)
        trials = (measure_isolated(replace(point, batch=examples), limit) for point in probed)
        return min(largest_batch(found, examples, limit, free) for found in trials)

    def row(self, point: Point, phase: str = "", **found: object) -> dict[str, object]:
        return {**point.key(phase), **found, **self.facts(point.implementation, point.backend)}

    def found(self, point: Point) -> Row:
        return self.table.get(**point.key()) or {}

    def is_tried(self, point: Point) -> bool:
        """Whether a point was tried.

        A new command retries points that failed or did not fit, and with a higher time limit those that were too slow.
        """
        found = self.found(point)
        status = found.get("memory_status", "")
        if status == OVER_TIME_LIMIT:
            return self.sweep.time_limit <= float(found["time_limit"])
        return status not in ("", OUT_OF_MEMORY, FAILED)

    def timed_together(self, points: list[Point]) -> list[Point]:
        """All points that are timed together: those of this sweep, and earlier ones of the same group and batch."""
        sizes = {(point.length, point.batch) for point in points}
        wanted = {**{name: getattr(points[0], name) for name in ("subject", "step", "backend")}, "phase": ""}
        earlier = [point_from(row, self.sweep) for row in self.table.rows(**wanted) if row["memory_status"]]
        return list(dict.fromkeys([*points, *(point for point in earlier if (point.length, point.batch) in sizes)]))

    def is_timed(self, points: list[Point]) -> bool:
        """Whether all were timed; a new command retries a point that fits alone but failed next to the others."""
        rows = [self.found(point) for point in self.timed_together(points)]
        return all(
            row.get("status") and not (row["memory_status"] == OK and row["status"] in (OUT_OF_MEMORY, FAILED))
            for row in rows
        )

    def isolate(self, point: Point, points: list[Point]) -> None:
        """Check a point, measure its memory, and record whether it can be timed."""
        found = self.skip_reason(point) or measure_isolated(point, self.sweep.time_limit)
        if found.status == OK:  # all points of a group share their rounds, so earlier times are discarded
            together = [each for each in self.timed_together(points) if self.found(each).get("memory_status") == OK]
            self.table.put([{**self.row(each), **as_row(Timing(""))} for each in together])
        measured: dict[str, Any] = {"memory_status": found.status, "peak_mib": found.peak_mib, "note": found.note}
        measured |= {"time_limit": self.sweep.time_limit, "status": None if found.status == OK else found.status}
        columns = {**found.columns, "": found.columns.get("", {}) | measured}
        self.table.put([self.row(point, phase, **values) for phase, values in columns.items()])
        words = (found.status if found.peak_mib is None else format_size(found.peak_mib), found.note)
        say(self.console, f"{point}: {'; '.join(filter(None, words))}")

    def skip_reason(self, point: Point) -> Isolated | None:
        """The result of a point that is not tried: smaller inputs did not fit or took too long, or it was wrong."""
        same = {"subject": point.subject, "step": point.step, "implementation": point.implementation, "phase": ""}
        names = ("variant", "backend", "precision", "block_length", "projected_length")
        same |= {name: getattr(point, name) for name in names}
        for row in self.table.rows(**same):
            status, length, tokens = row["memory_status"], int(row["length"]), int(row["length"]) * int(row["batch"])
            is_smaller = length < point.length and tokens <= point.length * point.batch
            is_slow = status == OVER_TIME_LIMIT and float(row["time_limit"]) >= self.sweep.time_limit
            too_much = (status == OUT_OF_MEMORY or is_slow) and is_smaller
            # layers are checked at their own length, models always at the same
            wrong = status == WRONG and point.subject != "layer" and length != point.length
            if too_much or wrong:
                return Isolated(status, note=f"same result at N={length:,}; not tried")
        return None

    def time(self, points: list[Point]) -> None:
        """Time all points that passed in interleaved rounds."""
        passed = [point for point in self.timed_together(points) if self.found(point)["memory_status"] == OK]
        if not passed:
            return
        timings = measure_rounds(passed, self.sweep.seconds, self.sweep.rounds, self.holds_memory(passed))
        self.table.put(
            [
                self.row(point, phase, **as_row(timing), share=timing.share, note=timing.note)
                for point, whole in timings.items()
                for phase, timing in {"": whole, **whole.phases}.items()
            ]
        )
        for point, timing in timings.items():
            words = (timing.status if timing.median is None else format_duration(timing.median), timing.note)
            say(self.console, f"{point}: {'; '.join(filter(None, words))}")

    def holds_memory(self, points: list[Point]) -> bool:
        """Whether freed memory is kept between calls; not if a call needs a large part of the available memory."""
        if any(point.subject in TRAINING_SUBJECTS or point.backend != "torch" for point in points):
            return False  # measured with the default allocator, as users run them
        most = max((float(self.found(point)["peak_mib"] or 0) * 2**20 for point in points), default=0.0)
        available = available_bytes()
        return available is None or most < USABLE_MEMORY * available


def group_name(points: Sequence[Point]) -> str:
    """
    >>> group_name([Point("layer", "forward", "gemm", length, None, 1) for length in (512, 1024)])
    'layer, forward, N=512–1,024'
    """
    first = points[0]
    lengths = "–".join(f"{length:,}" for length in dict.fromkeys((first.length, points[-1].length)))
    return ", ".join([*special_words(first.backend, "float32"), first.subject, first.step, f"N={lengths}"])


def point_from(row: Row, sweep: Sweep) -> Point:
    """The point of a row."""
    names = ("subject", "step", "implementation", "variant", "backend", "precision")
    values: dict[str, Any] = {name: row[name] for name in names}
    values |= {name: int(row[name]) for name in ("length", "batch")}
    values |= {name: int(row[name]) if row[name] else None for name in ("projected_length", "block_length")}
    return Point(**values, **sweep.sizes)


def device_name(device: str) -> str:
    """The device, with the model of a GPU."""
    is_cuda = device.startswith("cuda")
    return f"{device}, {torch.cuda.get_device_name(torch.device(device))}" if is_cuda else device


def free_bytes(device: str) -> int | None:
    """Available memory of a device."""
    return torch.cuda.mem_get_info(torch.device(device))[0] if device.startswith("cuda") else available_bytes()


def largest_batch(found: Isolated, examples: int, time_limit: float, free_bytes: int | None) -> int:
    """The largest batch size for a call, estimated from a trial with `examples` examples.

    >>> largest_batch(Isolated(OK, seconds=0.5, peak_bytes=2**20), 4, 40.0, 2**30)
    32
    >>> largest_batch(Isolated(OK, seconds=0.5, peak_bytes=2**20), 4, 40.0, 2**23)
    16
    >>> largest_batch(Isolated(OVER_TIME_LIMIT), 4, 40.0, 2**30)
    1
    """
    if found.status != OK or not found.seconds or not found.peak_bytes:
        return 1
    by_time = USABLE_TIME * time_limit / found.seconds
    by_memory = by_time if free_bytes is None else USABLE_MEMORY * free_bytes / found.peak_bytes
    return max(1, int(examples * min(by_time, by_memory)))


# on the screen


def show(rows: Sequence[Row], console: Console) -> None:
    """One table per backend, precision, subject and step, with the ratio to full attention or the baseline there is."""
    rows = sorted((row for row in rows if not row["phase"]), key=lambda row: int(row["length"]))
    for title in dict.fromkeys(title_of(row) for row in rows):
        own = [row for row in rows if title_of(row) == title]
        baseline = baseline_name(own)
        caption = f"ratio: {baseline} ÷ this row" if baseline else None
        screen = RichTable(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("N", "B", "implementation", "K", "time", "spread", "ratio", "memory"):
            screen.add_column(heading, no_wrap=True, justify="left" if heading == "implementation" else "right")
        for row in own:
            screen.add_row(*texts_of(row, baseline_of(row, own, baseline)))
        console.print(screen)


def title_of(row: Row) -> str:
    return ", ".join([*special_words(row["backend"], row["precision"]), row["subject"], row["step"]])


def texts_of(row: Row, baseline: Row | None) -> list[str]:
    """The cells of a row."""
    fastest, median, slowest = (float(row[f"seconds_{name}"] or "nan") for name in ("fastest", "median", "slowest"))
    of_baseline = float(baseline["seconds_median"] or 0) if baseline else 0.0
    is_timed = row["status"] == OK
    K = f"{row['projected_length']} per {row['block_length']}" if row["block_length"] else row["projected_length"]
    return [
        f"{int(row['length']):,}",
        row["batch"],
        ", ".join(filter(None, (row["implementation"], row["variant"]))),
        K,
        format_duration(median) if is_timed else row["status"],
        f"±{50 * (slowest - fastest) / median:.0f}%" if is_timed else "",
        f"{of_baseline / median:.2f}×" if of_baseline and is_timed else "",
        format_size(float(row["peak_mib"])) if row["peak_mib"] else row["memory_status"],
    ]
