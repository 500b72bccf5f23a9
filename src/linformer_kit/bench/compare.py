"""`linformer compare`: measures each point in isolation, then times all points of a group in interleaved rounds.

Each point first runs in a separate process (`isolated`), which checks that it is correct, fits in memory and is fast
enough, and measures its peak memory. Those that pass are then timed in interleaved rounds.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
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
from ..formatting import format_duration, format_size
from . import paper_table, targets
from .implementations import IMPLEMENTATIONS, version_of
from .isolated import Isolated, measure_isolated, measure_rounds
from .machine import describe_machine, timed_code
from .measure import FAILED, OK, OUT_OF_MEMORY, OVER_TIME_LIMIT, WRONG, Timing, as_row, available_bytes
from .point import FULL, RENAMED, TRAINING_SUBJECTS, Point
from .result_table import FACTS, KEYS, open_table
from .sweep import LISTS, PAPER_TABLE_3, PRESETS, Group, Sweep, read_keys, read_sweep, split_list

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
    show(table, console)
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
        comparison = Comparison(sweep, open_table(path))
        comparison.require_same_facts()
        try:
            comparison.run(console)
        except KeyboardInterrupt:
            raise Stopped(f"Stopped. {path} keeps what was measured; the same command resumes.", 130) from None
    return comparison.table


@dataclass(frozen=True)
class Task:
    """A part of the run whose result is stored when it is done."""

    name: str
    is_done: Callable[[], bool]
    run: Callable[[], Iterable[str]]  # yields lines to print


class Comparison:
    """A table, and the tasks that fill it."""

    def __init__(self, sweep: Sweep, table: Table):
        self.sweep = sweep
        self.table = table
        self.machine = describe_machine()
        # since this command started
        self.tried: set[Point] = set()
        self.timed: set[str] = set()

    def run(self, console: Console) -> None:
        """Measure what is missing."""
        if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5:
            console.print("[yellow]Other programs are running: layers with many small operations will look slow.[/]")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        tasks = self.tasks()
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("", total=len(tasks))
            for task in tasks:
                progress.update(bar, description=task.name)
                if not task.is_done():
                    for text in task.run():
                        console.print(text, highlight=False, soft_wrap=True)
                progress.advance(bar)

    # facts that the numbers depend on

    def facts(self, implementation: str, subject: str, backend: str) -> Row:
        """Everything that a row depends on."""
        facts = {
            **self.sweep.sizes,
            **self.machine,
            "code": timed_code(subject, backend),
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
                current = RENAMED.get(row["implementation"])
                what = f"is now called {current}" if current else "this version does not know"
                raise UserError(
                    f"{self.table.path} has the implementation {row['implementation']!r}, which {what}; {remedy}"
                )
            now = self.facts(row["implementation"], row["subject"], row["backend"])
            for name in FACTS:
                if name != "date" and row[name] != now[name]:
                    raise UserError(
                        f"{self.table.path} was measured with {name}={row[name]}, now it is {now[name]}, so new "
                        f"numbers could not be compared with those; {remedy}"
                    )

    # tasks

    def tasks(self) -> list[Task]:
        tasks = []
        for group in self.sweep.groups():
            if self.needs_probe:
                tasks.append(Task(f"{group}: batch", partial(self.is_probed, group), partial(self.probe, group)))
            count = len(group.points())
            for index in range(count):
                name = f"{group}: isolated, {index + 1} of {count}"
                tasks.append(Task(name, partial(self.is_tried, group, index), partial(self.isolate, group, index)))
            tasks.append(Task(f"{group}: rounds", partial(self.is_timed, group), partial(self.time, group)))
        return tasks

    @property
    def needs_probe(self) -> bool:
        return not self.sweep.batch and not self.sweep.tokens

    def is_probed(self, group: Group) -> bool:
        return self.known_batch(group) is not None

    def points(self, group: Group) -> list[Point]:
        return group.points(self.known_batch(group))

    def rivals(self, group: Group) -> list[Point]:
        """All points that are timed together: those of this sweep, and earlier ones of the same group and batch."""
        points = self.points(group)
        sizes = {(point.length, point.batch) for point in points}
        wanted = {"subject": group.subject, "step": group.step, "backend": group.backend, "phase": ""}
        earlier = [point_from(row, self.sweep) for row in self.table.rows(**wanted) if row["memory_status"]]
        return list(dict.fromkeys([*points, *(point for point in earlier if (point.length, point.batch) in sizes)]))

    def known_batch(self, group: Group) -> int | None:
        """The batch size found by `probe`; None if it has not run, or if the sweep sets the batch size."""
        if not self.needs_probe:
            return None
        wanted = {"subject": group.subject, "step": group.step, "backend": group.backend, "length": group.lengths[0]}
        found = next(self.table.rows(**wanted), None)
        return int(found["batch"]) if found else None

    def probe(self, group: Group) -> Iterable[str]:
        """Find the largest batch that fits for all points, from trials of the largest K and of those without K."""
        examples = max(1, PROBE_TOKENS // group.lengths[0])
        candidates = group.points(examples)
        rows = [point.projected_length for point in candidates if point.projected_length is not None]
        probed = [point for point in candidates if point.projected_length in (None, max(rows, default=None))]
        limit, free = self.sweep.time_limit, free_bytes(self.sweep.device)
        batch = min(largest_batch(measure_isolated(point, limit), examples, limit, free) for point in probed)
        self.table.put([self.row(point) for point in group.points(batch)])
        yield f"{group}: batches of {batch:,}"

    def row(self, point: Point, phase: str = "", **found: object) -> dict[str, object]:
        return {**point.key(phase), **found, **self.facts(point.implementation, point.subject, point.backend)}

    def found(self, point: Point) -> Row:
        return self.table.get(**point.key()) or {}

    def is_tried(self, group: Group, index: int) -> bool:
        """Whether a point was tried.

        A new command retries points that failed or did not fit, and with a higher time limit those that were too slow.
        """
        point = self.points(group)[index]
        found = self.found(point)
        status = found.get("memory_status", "")
        if status in (OUT_OF_MEMORY, FAILED):
            return point in self.tried
        if status == OVER_TIME_LIMIT:
            return point in self.tried or self.sweep.time_limit <= float(found["time_limit"])
        return bool(status)

    def is_timed(self, group: Group) -> bool:
        """Whether all were timed; a point that fits alone but failed next to the others is tried once more."""
        rows = [self.found(point) for point in self.rivals(group)]
        failed_together = any(
            row.get("memory_status") == OK and row.get("status") in (OUT_OF_MEMORY, FAILED) for row in rows
        )
        return all(row.get("status") for row in rows) and (not failed_together or str(group) in self.timed)

    def isolate(self, group: Group, index: int) -> Iterable[str]:
        """Check a point, measure its memory, and record whether it can be timed."""
        point = self.points(group)[index]
        found = self.refusal(point) or measure_isolated(point, self.sweep.time_limit)
        self.tried.add(point)
        peak_mib = None if found.peak_bytes is None else found.peak_bytes / 2**20
        if found.status == OK:  # all points of a group share their rounds, so earlier times are discarded
            rivals = [rival for rival in self.rivals(group) if self.found(rival)]
            self.table.put([{**self.row(rival), **as_row(Timing(""))} for rival in rivals])
        measured: dict[str, Any] = {"memory_status": found.status, "peak_mib": peak_mib, "note": found.note}
        measured |= {"time_limit": self.sweep.time_limit, "status": None if found.status == OK else found.status}
        columns = {**found.columns, "": found.columns.get("", {}) | measured}
        self.table.put([self.row(point, phase, **values) for phase, values in columns.items()])
        words = (found.status if peak_mib is None else format_size(peak_mib), found.note)
        yield f"{point}: {'; '.join(filter(None, words))}"

    def refusal(self, point: Point) -> Isolated | None:
        """The result of a point that is not tried: smaller inputs did not fit or took too long, or it was wrong."""
        same = {"subject": point.subject, "step": point.step, "implementation": point.implementation, "phase": ""}
        same |= {name: getattr(point, name) for name in ("variant", "backend", "block_length", "projected_length")}
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

    def time(self, group: Group) -> Iterable[str]:
        """Time all points that passed in interleaved rounds."""
        points = self.rivals(group)
        self.timed.add(str(group))
        timings = {point: Timing(status) for point in points if (status := self.found(point)["memory_status"]) != OK}
        passed = [point for point in points if point not in timings]
        if passed:
            timings |= measure_rounds(passed, self.sweep.seconds, self.sweep.rounds, self.holds_memory(passed))
        self.table.put(
            [
                self.row(point, phase, **as_row(timing), **({"share": timing.share} if phase else {}))
                for point in points
                for phase, timing in {"": timings[point], **timings[point].phases}.items()
            ]
        )
        for point in points:
            median = timings[point].median
            yield f"{point}: {timings[point].status if median is None else format_duration(median)}"

    def holds_memory(self, points: list[Point]) -> bool:
        """Whether freed memory is kept between calls; not if a call needs a large part of the available memory."""
        if any(point.subject in TRAINING_SUBJECTS or point.backend != "torch" for point in points):
            return False  # measured with the default allocator, as users run them
        most = max((float(self.found(point)["peak_mib"] or 0) * 2**20 for point in points), default=0.0)
        available = available_bytes()
        return available is None or most < USABLE_MEMORY * available


def point_from(row: Row, sweep: Sweep) -> Point:
    """The point of a row."""
    numbers = {name: int(row[name]) if row[name] else None for name in ("projected_length", "block_length")}
    texts = {name: row[name] for name in ("subject", "step", "implementation", "variant", "backend")}
    return Point(**texts, **numbers, length=int(row["length"]), batch=int(row["batch"]), **sweep.sizes)  # type: ignore[arg-type]


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


def show(table: Table, console: Console) -> None:
    """One table per backend, subject and step, with the ratio to full attention."""
    rows = sorted(table.rows(phase=""), key=lambda row: int(row["length"]))
    for title in dict.fromkeys(title_of(row) for row in rows):
        screen = RichTable(title=title, caption=f"ratio: {FULL} ÷ this row", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("N", "B", "implementation", "K", "time", "spread", "ratio", "memory"):
            screen.add_column(heading, no_wrap=True, justify="left" if heading == "implementation" else "right")
        for row in rows:
            if title_of(row) == title:
                screen.add_row(*texts_of(row, table))
        console.print(screen)


def title_of(row: Row) -> str:
    return ", ".join([*([] if row["backend"] == "torch" else [row["backend"]]), row["subject"], row["step"]])


def texts_of(row: Row, table: Table) -> list[str]:
    """The cells of a row."""
    full = {**{name: row[name] for name in KEYS}, "implementation": FULL, "projected_length": "", "block_length": ""}
    fastest, median, slowest = (float(row[f"seconds_{name}"] or "nan") for name in ("fastest", "median", "slowest"))
    baseline = table.number("seconds_median", **{**full, "variant": ""})
    is_timed = row["status"] == OK
    K = f"{row['projected_length']} per {row['block_length']}" if row["block_length"] else row["projected_length"]
    return [
        f"{int(row['length']):,}",
        row["batch"],
        ", ".join(filter(None, (row["implementation"], row["variant"]))),
        K,
        format_duration(median) if is_timed else row["status"],
        f"±{50 * (slowest - fastest) / median:.0f} %" if is_timed else "",
        f"{baseline / median:.2f}×" if baseline and is_timed else "",
        format_size(float(row["peak_mib"])) if row["peak_mib"] else row["memory_status"],
    ]
