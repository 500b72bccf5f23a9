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

from ..csv_tables import Row, Table, as_text
from ..errors import Stopped, UserError
from ..formatting import format_duration, format_size
from .implementations import IMPLEMENTATIONS, OURS_NONE, Point, call_of, version_of
from .isolated import Solo, solo
from .machine import describe_machine
from .measure import (
    FAILED,
    OK,
    OUT_OF_MEMORY,
    OVER_TIME_LIMIT,
    WRONG,
    Timing,
    as_row,
    available_bytes,
    hold_memory,
    is_out_of_memory,
    time_interleaved,
)
from .peer_models import model_dependencies
from .result_table import FACTS, FOUND, KEYS
from .run import Step, alone_in, require_writable, run_steps
from .sweep import Group, Sweep

# of what is free: the memory that the largest possible batch may take, since rounds hold the batches of all
USABLE_MEMORY = 0.5
# and of the time limit: a call of the slowest
USABLE_TIME = 0.1
# tokens with which the largest possible batch is found out
PROBE_TOKENS = 4096


def compare(sweep: Sweep, path: Path, fresh: bool, console: Console) -> Table:
    """Measure what is missing in the table at `path`."""
    if path.suffix != ".csv" or path.is_dir():
        raise UserError(f"--output is {path}; it must be the name of a CSV file, such as compare.csv")
    require_writable(path.absolute().parent)
    transformers.logging.set_verbosity_error()  # BigBird says that it falls back to full attention at short lengths
    with alone_in(path.absolute().parent):
        if fresh:
            path.unlink(missing_ok=True)
        comparison = Comparison(sweep, Table(path, KEYS, (*FOUND, *FACTS)))
        comparison.require_same_facts()
        try:
            run_steps(comparison.steps(), console)
        except KeyboardInterrupt:
            raise Stopped(
                f"Stopped; what was measured is kept in {path}, and the same command goes on from there.", 130
            ) from None
    show(comparison.table, console)
    return comparison.table


class Comparison:
    """A table, and the steps that fill it."""

    def __init__(self, sweep: Sweep, table: Table):
        self.sweep = sweep
        self.table = table
        self.machine = describe_machine(model_dependencies())
        # since this command began
        self.tried: set[Point] = set()
        self.timed: set[str] = set()

    # what the numbers depend on

    def facts(self, implementation: str) -> Row:
        """All that a row of this implementation depends on."""
        named = {
            **self.sweep.sizes,
            **self.machine,
            "code": self.machine["model_code"],
            "package": version_of(implementation),
        }
        named |= {"tokens": self.sweep.tokens, "device": device_name(self.sweep.device)}
        return {name: as_text(named[name]) for name in FACTS}

    def require_same_facts(self) -> None:
        """Refuse to add to numbers that come from elsewhere: they could not be compared."""
        for row in self.table.rows():
            if row["implementation"] not in IMPLEMENTATIONS:
                raise UserError(
                    f"{self.table.path} has the implementation {row['implementation']!r}, which this version does not know; give "
                    "another file with --output, or measure everything anew with --fresh"
                )
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
                steps.append(
                    Step(f"{group}: largest batch", partial(self.is_probed, group), partial(self.probe, group))
                )
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

    def rivals(self, group: Group) -> list[Point]:
        """Everybody who has to take turns: the points of this sweep, and those of earlier ones with the same batch."""
        batch = self.known_batch(group) or 1
        rows = self.table.rows(subject=group.subject, step=group.step, length=group.length, batch=batch)
        earlier = [
            Point(
                *(group.subject, group.step, row["implementation"], group.length),
                *(int(row["projected_length"]) if row["projected_length"] else None, batch),
                **self.sweep.sizes,
            )
            for row in rows
            if row["memory_status"]
        ]
        return list(dict.fromkeys([*self.points(group), *earlier]))

    def known_batch(self, group: Group) -> int | None:
        """Examples in a batch of this group: a number of tokens, or what was found to be possible."""
        if self.sweep.tokens:
            return max(1, self.sweep.tokens // group.length)
        found = next(self.table.rows(subject=group.subject, step=group.step, length=group.length), None)
        return int(found["batch"]) if found else None

    def probe(self, group: Group) -> Iterable[str]:
        """The largest batch that all can have, if those do who take most: the largest K, and whoever projects nothing."""
        examples = max(1, PROBE_TOKENS // group.length)
        candidates = group.points(batch=examples)
        rows = [point.projected_length for point in candidates if point.projected_length is not None]
        probed = [point for point in candidates if point.projected_length in (None, max(rows, default=None))]
        found = [solo(point, self.sweep.time_limit) for point in probed]
        batch = min(
            largest_batch(each, examples, self.sweep.time_limit, free_bytes(self.sweep.device)) for each in found
        )
        self.table.put([self.row(point) for point in group.points(batch)])
        yield f"{group}: batches of {batch:,}"

    def row(self, point: Point, **found: object) -> dict[str, object]:
        key = {name: getattr(point, name) for name in KEYS}
        return {**key, **found, **self.facts(point.implementation)}

    def found(self, point: Point) -> Row:
        return self.table.get(**{name: getattr(point, name) for name in KEYS}) or {}

    def is_tried(self, group: Group, index: int) -> bool:
        """What did not fit or failed may have been unlucky: a new command tries it again; so does a higher time limit."""
        point = self.points(group)[index]
        found = self.found(point)
        status = found.get("memory_status", "")
        if status in (OUT_OF_MEMORY, FAILED):
            return point in self.tried
        if status == OVER_TIME_LIMIT:
            return point in self.tried or self.sweep.time_limit <= float(found["time_limit"])
        return bool(status)

    def is_timed(self, group: Group) -> bool:
        """Whether all have taken turns; who fitted alone, but not beside the others, may have been unlucky."""
        rows = [self.found(point) for point in self.rivals(group)]
        unlucky = any((row.get("memory_status"), row.get("status")) == (OK, OUT_OF_MEMORY) for row in rows)
        return all(row.get("status") for row in rows) and (not unlucky or str(group) in self.timed)

    def try_alone(self, group: Group, index: int) -> Iterable[str]:
        """The check, the memory, and whether it can be timed at all."""
        point = self.points(group)[index]
        found = self.refusal(point) or solo(point, self.sweep.time_limit)
        self.tried.add(point)
        peak_mib = None if found.peak_bytes is None else found.peak_bytes / 2**20
        if found.status == OK:  # it has to take turns with all others: their times are forgotten
            self.table.put([self.row(rival, **as_row(Timing(""))) for rival in self.rivals(group) if self.found(rival)])
        what = {
            "memory_status": found.status,
            "peak_mib": peak_mib,
            "time_limit": self.sweep.time_limit,
            "note": found.note,
        }
        self.table.put([self.row(point, status=None if found.status == OK else found.status, **what)])
        yield f"{point}: {found.status if peak_mib is None else format_size(peak_mib)}{'; ' if found.note else ''}{found.note}"

    def refusal(self, point: Point) -> Solo | None:
        """What did not fit, or took too long, with fewer and no longer examples is not tried; nor a model that is wrong."""
        same = {"subject": point.subject, "step": point.step, "implementation": point.implementation}
        for row in self.table.rows(**same, projected_length=point.projected_length):
            status, length, tokens = row["memory_status"], int(row["length"]), int(row["length"]) * int(row["batch"])
            is_smaller = length < point.length and tokens <= point.length * point.batch
            too_much = status in (OUT_OF_MEMORY, OVER_TIME_LIMIT) and is_smaller
            wrong = (
                status == WRONG and point.subject != "layer" and length != point.length
            )  # checked at the same length always
            if too_much or wrong:
                return Solo(status, note=f"so it was at N={length:,}; not tried")
        return None

    def time(self, group: Group) -> Iterable[str]:
        """All that passed, in turns."""
        points = self.rivals(group)
        self.timed.add(str(group))
        self.hold_memory_for(points)
        timings = {point: Timing(status) for point in points if (status := self.found(point)["memory_status"]) != OK}
        calls = {}
        torch.manual_seed(0)
        for point in points:
            if point not in timings:
                try:
                    calls[point] = call_of(point)
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    timings[point] = Timing(OUT_OF_MEMORY)  # beside the others
        least = min(3, self.sweep.rounds)
        timings |= time_interleaved(
            calls, budget_seconds=self.sweep.seconds, least_rounds=least, most_rounds=self.sweep.rounds
        )
        self.table.put([self.row(point, **as_row(timings[point])) for point in points])
        for point in points:
            median = timings[point].median
            yield f"{point}: {timings[point].status if median is None else format_duration(median)}"

    def hold_memory_for(self, points: list[Point]) -> None:
        """Keep freed memory between the calls, unless one of them takes so much that the others' leavings are in its way."""
        most = max((float(self.found(point)["peak_mib"] or 0) * 2**20 for point in points), default=0.0)
        available = available_bytes()
        hold_memory(available is None or most < USABLE_MEMORY * available)


def device_name(device: str) -> str:
    """What it is; one GPU is not like another."""
    kind = torch.device(device)
    return f"{device}, {torch.cuda.get_device_name(kind)}" if kind.type == "cuda" else device


def free_bytes(device: str) -> int | None:
    """Memory that is free there."""
    kind = torch.device(device)
    return torch.cuda.mem_get_info(kind)[0] if kind.type == "cuda" else available_bytes()


def largest_batch(found: Solo, examples: int, time_limit: float, free_bytes: int | None) -> int:
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
    return max(1, int(examples * min(by_time, by_memory)))


def show(table: Table, console: Console) -> None:
    """What was measured, one table per subject and step, with the ratio to full attention."""
    rows = sorted(table.rows(), key=lambda row: int(row["length"]))
    for subject, step in dict.fromkeys((row["subject"], row["step"]) for row in rows):
        shown = RichTable(
            title=f"{subject}, {step}", caption=f"ratio: {OURS_NONE} ÷ this", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
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
    time = format_duration(median) if is_timed else row["status"]
    spread = f"±{50 * (slowest - fastest) / median:.0f} %" if is_timed else ""
    ratio = f"{baseline / median:.2f}×" if baseline and is_timed else ""
    memory = format_size(float(row["peak_mib"])) if row["peak_mib"] else row["memory_status"]
    return [
        f"{int(row['length']):,}",
        row["batch"],
        row["implementation"],
        row["projected_length"],
        time,
        spread,
        ratio,
        memory,
    ]
