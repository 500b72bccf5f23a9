"""`linformer compare`: every point by itself, then all points of a length in turns; one table that can be taken up again.

First each point goes alone through a fresh process (`solo`): is it right, does it fit, is it quick enough, what memory does it
take? Those that pass then take turns, so that whatever slows the machine for a while slows all of them.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from .. import drawing
from ..errors import Stopped, UserError
from .contenders import OURS_NONE, Point, call_of, version_of
from .machine import describe_machine
from .measure import OK, Timing, as_row, meminfo_bytes, time_interleaved
from .peer_models import model_dependencies
from .points import FACTS, FOUND, KEYS
from .run import Step, alone_in, require_writable, run_steps
from .solo import Solo, solo
from .sweep import Group, Sweep
from .table import Row, Table, as_text

# of what is free: the memory that the largest possible batch may take, since rounds hold the batches of all
USABLE_MEMORY = 0.5
# and of the time limit: a call of the slowest
USABLE_TIME = 0.1
# tokens with which the largest possible batch is found out
PROBE_TOKENS = 4096


def compare(sweep: Sweep, path: Path, fresh: bool, console: Console) -> Table:
    """Measure what is missing in the table at `path`."""
    require_writable(path.absolute().parent)
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a CSV file with --output")
    transformers.logging.set_verbosity_error()  # BigBird says that it falls back to full attention at short lengths
    with alone_in(path.absolute().parent):
        if fresh:
            path.unlink(missing_ok=True)
        comparison = Comparison(sweep, Table(path, KEYS, (*FOUND, *FACTS)))
        comparison.require_same_facts()
        try:
            run_steps(comparison.steps(), console)
        except KeyboardInterrupt:
            raise Stopped(f"Stopped; what was measured is kept in {path}, and the same command goes on from there.", 130) from None
    show(comparison.table, console)
    return comparison.table


class Comparison:
    """A table, and the steps that fill it."""

    def __init__(self, sweep: Sweep, table: Table):
        self.sweep = sweep
        self.table = table
        self.machine = describe_machine(model_dependencies())

    # what the numbers depend on

    def facts(self, implementation: str) -> Row:
        """All that a row of this implementation depends on."""
        named = {**self.sweep.sizes, **self.machine, "code": self.machine["model_code"], "package": version_of(implementation)}
        return {name: as_text(named[name]) for name in FACTS}

    def require_same_facts(self) -> None:
        """Refuse to add to numbers that come from elsewhere: they could not be compared."""
        for row in self.table.rows():
            now = self.facts(row["implementation"])
            for name in FACTS:
                if name != "date" and row[name] != now[name]:
                    raise UserError(
                        f"{self.table.path} was measured with {name}={row[name]}, now it is {now[name]}, so new numbers could "
                        "not be compared with those; give another file with --output, or measure everything anew with --fresh"
                    )

    # steps

    def steps(self) -> list[Step]:
        steps = []
        for group in self.sweep.groups():
            if self.sweep.tokens == 0:
                steps.append(Step(f"{group}: largest batch", partial(self.is_probed, group), partial(self.probe, group)))
            count = len(group.points(batch=1))
            for index in range(count):
                name = f"{group}: alone, {index + 1} of {count}"
                steps.append(Step(name, partial(self.is_tried, group, index), partial(self.try_alone, group, index)))
            steps.append(Step(f"{group}: in turns", partial(self.is_timed, group), partial(self.time, group)))
        return steps

    def is_probed(self, group: Group) -> bool:
        return self.known_batch(group) is not None

    def points(self, group: Group) -> list[Point]:
        return group.points(self.known_batch(group) or 1)

    def known_batch(self, group: Group) -> int | None:
        """Examples in a batch of this group: a number of tokens, or what was found to be possible."""
        if self.sweep.tokens:
            return max(1, self.sweep.tokens // group.length)
        found = next(self.table.rows(subject=group.subject, step=group.step, length=group.length), None)
        return int(found["batch"]) if found else None

    def probe(self, group: Group) -> Iterable[str]:
        """The largest batch of whoever projects nothing, which takes most time and memory."""
        tokens = max(1, PROBE_TOKENS // group.length)
        candidates = group.points(batch=tokens)
        probed = next((point for point in candidates if point.projected_length is None), candidates[0])
        found = solo(probed, self.sweep.time_limit)
        batch = largest_batch(found, tokens, self.sweep.time_limit, meminfo_bytes("MemAvailable"))
        self.table.put([self.row(point) for point in group.points(batch)])
        yield f"{group}: batches of {batch:,}"

    def row(self, point: Point, **found: object) -> dict[str, object]:
        key = {name: getattr(point, name) for name in KEYS}
        return {**key, **found, **self.facts(point.implementation)}

    def found(self, point: Point) -> Row:
        return self.table.get(**{name: getattr(point, name) for name in KEYS}) or {}

    def is_tried(self, group: Group, index: int) -> bool:
        return bool(self.found(self.points(group)[index]).get("memory_status"))

    def is_timed(self, group: Group) -> bool:
        return all(self.found(point).get("status") for point in self.points(group))

    def try_alone(self, group: Group, index: int) -> Iterable[str]:
        """The check, the memory, and whether it can be timed at all."""
        point = self.points(group)[index]
        found = self.refusal(point) or solo(point, self.sweep.time_limit)
        peak_mib = None if found.peak_bytes is None else found.peak_bytes / 2**20
        # a point that joins later has to take turns with all others: their times are forgotten
        for other in self.points(group):
            if self.found(other):
                self.table.put([self.row(other, status=None)])
        self.table.put([self.row(point, memory_status=found.status, peak_mib=peak_mib, note=found.note)])
        yield f"{point}: {found.status if peak_mib is None else drawing.size(peak_mib)}{'; ' if found.note else ''}{found.note}"

    def refusal(self, point: Point) -> Solo | None:
        """What did not work with fewer tokens is not tried with more."""
        same = {"subject": point.subject, "step": point.step, "implementation": point.implementation}
        for row in self.table.rows(**same, projected_length=point.projected_length):
            if int(row["length"]) < point.length and row["memory_status"] not in ("", OK):
                return Solo(row["memory_status"], note=f"so it was at N={int(row['length']):,}; not tried")
        return None

    def time(self, group: Group) -> Iterable[str]:
        """All that passed, in turns."""
        points = self.points(group)
        passed = [point for point in points if self.found(point)["memory_status"] == OK]
        torch.manual_seed(0)
        timings = time_interleaved(
            {point: call_of(point) for point in passed},
            budget_seconds=self.sweep.seconds,
            least_rounds=min(3, self.sweep.rounds),
            most_rounds=self.sweep.rounds,
        )
        timings |= {point: Timing(self.found(point)["memory_status"]) for point in points if point not in passed}
        self.table.put([self.row(point, **as_row(timings[point])) for point in points])
        for point in points:
            median = timings[point].median
            yield f"{point}: {timings[point].status if median is None else drawing.duration(median)}"


def largest_batch(found: Solo, tokens: int, time_limit: float, free_bytes: int | None) -> int:
    """How many examples a call may have, if so many took what was found.

    >>> largest_batch(Solo(OK, seconds=0.5, peak_bytes=2**20), 4, 40.0, 2**30)
    32
    >>> largest_batch(Solo(OK, seconds=0.5, peak_bytes=2**20), 4, 40.0, 2**23)
    16
    >>> largest_batch(Solo(OVER_TIME_LIMIT), 4, 40.0, 2**30)
    1
    """
    if found.status != OK or not found.seconds or not found.peak_bytes:
        return 1
    by_time = USABLE_TIME * time_limit / found.seconds
    by_memory = by_time if free_bytes is None else USABLE_MEMORY * free_bytes / found.peak_bytes
    return max(1, int(tokens * min(by_time, by_memory)))


def show(table: Table, console: Console) -> None:
    """What was measured, one table per subject and step, with the ratio to full attention."""
    rows = sorted(table.rows(), key=lambda row: int(row["length"]))
    for subject, step in dict.fromkeys((row["subject"], row["step"]) for row in rows):
        shown = RichTable(title=f"{subject}, {step}", caption=f"ratio: {OURS_NONE} ÷ this", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("N", "B", "implementation", "K", "time", "spread", "ratio", "memory"):
            shown.add_column(heading, no_wrap=True, justify="left" if heading == "implementation" else "right")
        for row in rows:
            if (row["subject"], row["step"]) == (subject, step):
                shown.add_row(*texts_of(row, table))
        console.print(shown)


def texts_of(row: Row, table: Table) -> list[str]:
    """A row as people read it."""
    full = {**{name: row[name] for name in KEYS}, "implementation": OURS_NONE, "projected_length": ""}
    fastest, median, slowest = (float(row[f"seconds_{name}"] or "nan") for name in ("fastest", "median", "slowest"))
    baseline = table.number("seconds_median", **full)
    is_timed = row["status"] == OK
    time = drawing.duration(median) if is_timed else row["status"]
    spread = f"±{50 * (slowest - fastest) / median:.0f} %" if is_timed else ""
    ratio = f"{baseline / median:.2f}×" if baseline and is_timed else ""
    memory = drawing.size(float(row["peak_mib"])) if row["peak_mib"] else row["memory_status"]
    return [f"{int(row['length']):,}", row["batch"], row["implementation"], row["projected_length"], time, spread, ratio, memory]
