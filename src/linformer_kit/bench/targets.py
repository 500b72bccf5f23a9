"""The targets of a sweep and whether they are met, as CSV and as a table on the screen.

A target is a number from the result table: one value, the ratio of two, or their minimum or exponent over lengths.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from ..csv_tables import Row, as_text, fit_exponent, write_rows
from ..errors import UserError
from .paper_table import PAPER_TIME, paper_cell
from .point import KEYS, size_words
from .result_table import FOUND

COLUMNS = ("target", "at", "wanted", "measured", "verdict")
COLORS = {"met": "green", "missed": "red", "reported": "", "not measured": "dim"}
COLUMN_OF = {"seconds": "seconds_median"}
# key columns that are empty for implementations that do not project
ONLY_PROJECTED = ("projected_length", "block_length")


@dataclass(frozen=True, kw_only=True)
class Target:
    """An entry of `targets` in a sweep. Lists in `at` give one target each; without a bound, the number is reported."""

    name: str
    quantity: str = "seconds"  # a column, or one divided by another: multiply_adds/seconds
    of: dict[str, Any]  # key columns of the row; of several implementations, the one with the smallest number counts
    to: dict[str, Any] | None = None  # key columns of the row whose number divides it
    at: dict[str, Any] = field(default_factory=dict)  # key columns of both rows
    # one number over all lengths, from `length` in `at`
    over_lengths: Literal["lowest", "exponent"] | None = None
    at_least: float | None = None
    at_most: float | None = None
    at_least_paper: bool = False  # at least the time saved in the paper's table 3
    unit: str = "×"  # "%" shows percent

    def __post_init__(self) -> None:
        for part in (self.of, self.to or {}, self.at):
            for name in part:
                if name not in KEYS:
                    raise UserError(f"the target {self.name!r} has the key {name}; allowed: {', '.join(KEYS)}")
        if self.at_least_paper and not {"length", "projected_length"} <= self.at.keys():
            raise UserError(f"the target {self.name!r} has at_least_paper; add length and projected_length to `at`")
        for name in self.columns:
            if name not in FOUND:
                raise UserError(
                    f"the target {self.name!r} has the quantity {name}; allowed: seconds, {', '.join(FOUND)}"
                )

    @property
    def columns(self) -> list[str]:
        return [COLUMN_OF.get(name, name) for name in self.quantity.split("/")]

    def number(self, row: Row) -> float | None:
        values = [float(row[name]) if row[name] else None for name in self.columns]
        if None in values:
            return None
        first, *rest = (value for value in values if value is not None)
        return first / rest[0] if rest else first

    def smallest(
        self, rows: Sequence[Row], part: Mapping[str, Any], where: Mapping[str, Any]
    ) -> tuple[float, str] | None:
        """The number of the row that `part` describes, and its implementation."""
        names = part.get("implementation", "")
        found = []
        for name in names if isinstance(names, list) else [names]:
            wanted = {"phase": "", **where, **part, "implementation": name}
            matching = [row for row in rows if matches(row, wanted, where)]
            if len(matching) > 1:
                raise UserError(
                    f"the target {self.name!r} matches {len(matching)} rows of {name}; add key columns to `at`"
                )
            found += [(number, name) for row in matching if (number := self.number(row)) is not None]
        return min(found, default=None)

    def measure(self, rows: Sequence[Row], where: Mapping[str, Any]) -> tuple[float | None, str]:
        """The number of one target, and the name of the implementation if several were given."""
        over = self.smallest(rows, self.of, where)
        under = (1.0, "") if self.to is None else self.smallest(rows, self.to, where)
        chosen = over[1] if over and isinstance(self.of.get("implementation"), list) else ""
        return (over[0] / under[0] if over and under else None), chosen

    def results(self, rows: Sequence[Row], lengths: Sequence[int]) -> Iterator["Result"]:
        """All targets of this entry; `lengths` are those of the sweep."""
        names, values = self.at.keys(), [value if isinstance(value, list) else [value] for value in self.at.values()]
        for combination in product(*values):
            where = dict(zip(names, combination, strict=True))
            if self.over_lengths is None:
                measured, chosen = self.measure(rows, where)
                yield Result(self, self.words(where, chosen), self.bound(where), measured)
                continue
            counted = [length for length in sorted(lengths) if length >= where.get("length", 0)]
            found = {length: self.measure(rows, {**where, "length": length})[0] for length in counted}
            known = {length: number for length, number in found.items() if number is not None}
            yield Result(self, self.words(where, "", counted), self.bound(where), self.summarize(known, counted))

    def summarize(self, known: dict[int, float], counted: list[int]) -> float | None:
        if self.over_lengths == "lowest":
            return min(known.values(), default=None)
        return fit_exponent(known, known.values()) if len(known) == len(counted) > 1 else None

    def bound(self, where: Mapping[str, Any]) -> float | None:
        if self.at_least_paper:
            return paper_cell(PAPER_TIME, where["length"], where["projected_length"])
        return self.at_least if self.at_most is None else self.at_most

    def words(self, where: Mapping[str, Any], chosen: str, counted: Sequence[int] = ()) -> str:
        """The column `at`: implementation, step and sizes."""
        words = [str(where[name]) for name in KEYS if name in where and name not in (*ONLY_PROJECTED, "length")]
        sizes = size_words(where.get("length"), where.get("projected_length"), where.get("block_length"))
        if self.over_lengths == "lowest" and "length" in where:
            sizes[0] = sizes[0].replace("=", "≥")
        elif self.over_lengths and counted:
            sizes = [f"N={counted[0]:,}–{counted[-1]:,}", *sizes[1 if "length" in where else 0 :]]
        return ", ".join([*words, *sizes, *([f"next: {chosen}"] if chosen else [])])


def matches(row: Row, wanted: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Whether a row has these values; K and the block length in `at` do not apply to rows without projection."""
    return all(
        row[name] == as_text(value) or (name in ONLY_PROJECTED and name in where and not row[name])
        for name, value in wanted.items()
    )


@dataclass(frozen=True)
class Result:
    """One row of the table of targets."""

    target: Target
    where: str
    wanted: float | None
    measured: float | None

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        if self.wanted is None:
            return "reported"
        is_met = self.measured >= self.wanted if self.target.at_most is None else self.measured <= self.wanted
        return "met" if is_met else "missed"

    @property
    def row(self) -> Row:
        sign = "≥" if self.target.at_most is None else "≤"
        wanted = "–" if self.wanted is None else f"{sign} {self.text(self.wanted)}"
        measured = "" if self.measured is None else self.text(self.measured)
        texts = (self.target.name, self.where, wanted, measured, self.verdict)
        return dict(zip(COLUMNS, texts, strict=True))

    def text(self, value: float) -> str:
        return f"{value * 100:.0f} %" if self.target.unit == "%" else f"{value:.2f}{self.target.unit}"


def publish(
    targets: Sequence[Target], rows: Sequence[Row], lengths: Sequence[int], path: Path, console: Console
) -> None:
    """Write the targets as CSV, and show them."""
    found = [result for target in targets for result in target.results(rows, lengths)]
    write_rows(path, [result.row for result in found])
    screen = RichTable(*COLUMNS, box=SIMPLE_HEAD)
    for result in found:
        screen.add_row(*result.row.values(), style=COLORS[result.verdict])
    console.print(screen)
