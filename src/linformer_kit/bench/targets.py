"""The targets of a sweep and whether they are met, as CSV and as a table on the screen.

A target is a number from the result table: one value, the ratio of two, or their minimum or exponent over lengths.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import isnan, nan
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from ..csv_tables import Row, as_text, fit_exponent, write_rows
from ..errors import UserError
from .point import KEYS, size_words
from .result_table import FOUND

COLORS = {"met": "green", "missed": "red", "reported": "", "not measured": "dim"}
QUANTITY_COLUMNS = {"seconds": "seconds_median"}
# key columns that are empty for implementations that do not project
ONLY_PROJECTED = ("projected_length", "block_length")


@dataclass(frozen=True, kw_only=True)
class Target:
    """An entry of `targets` in a sweep. Lists in `at` give one target each; without a bound, the number is reported."""

    name: str
    quantity: str = "seconds"  # a column, or one divided by another: multiply_adds/seconds
    of: dict[str, Any]  # key columns of the row; of lists, the combination with the smallest number counts
    to: dict[str, Any] | None = None  # key columns of the row whose number divides it
    at: dict[str, Any] = field(default_factory=dict)  # key columns of both rows
    # one number over all lengths, from `length` in `at`
    over_lengths: Literal["lowest", "exponent"] | None = None
    at_least: float | None = None
    at_most: float | None = None
    unit: str = "×"  # "%" shows percent

    def __post_init__(self) -> None:
        for part in (self.of, self.to or {}, self.at):
            for name in part:
                if name not in KEYS:
                    raise UserError(f"the target {self.name!r} has the key {name}; allowed: {', '.join(KEYS)}")
        for name in self.columns:
            if name not in FOUND:
                raise UserError(
                    f"the target {self.name!r} has the quantity {name}; allowed: seconds, {', '.join(FOUND)}"
                )

    @property
    def columns(self) -> list[str]:
        return [QUANTITY_COLUMNS.get(name, name) for name in self.quantity.split("/")]

    def number(self, row: Row) -> float:
        """The quantity of a row; NaN, here and below, if it was not measured."""
        first, *rest = (float(row[name] or "nan") for name in self.columns)
        return first / rest[0] if rest else first

    def smallest(self, rows: Sequence[Row], part: Mapping[str, Any], where: Mapping[str, Any]) -> tuple[float, str]:
        """The number of the row that `part` describes, and its implementation."""
        found = []
        for each in combinations({"implementation": "", **part}):
            wanted = {"phase": "", "precision": "float32", **where, **each}
            matching = [row for row in rows if matches(row, wanted, where)]
            if len(matching) > 1:
                raise UserError(
                    f"the target {self.name!r} matches {len(matching)} rows of {each['implementation']}; add key "
                    "columns to `at`"
                )
            found += [(number, each["implementation"]) for row in matching if not isnan(number := self.number(row))]
        return min(found, default=(nan, ""))

    def measure(self, rows: Sequence[Row], where: Mapping[str, Any]) -> tuple[float, str]:
        """The number of one target, and the name of the implementation if several were given."""
        over, chosen = self.smallest(rows, self.of, where)
        under = 1.0 if self.to is None else self.smallest(rows, self.to, where)[0]
        return over / under, chosen if isinstance(self.of.get("implementation"), list) else ""

    def results(self, rows: Sequence[Row], lengths: Sequence[int]) -> Iterator[Row]:
        """All targets of this entry; `lengths` are those of the sweep."""
        for where in combinations(self.at):
            if self.over_lengths is None:
                measured, chosen = self.measure(rows, where)
                yield self.result(self.setting(where, chosen), measured)
            else:
                counted = [length for length in sorted(lengths) if length >= where.get("length", 0)]
                numbers = [self.measure(rows, {**where, "length": length})[0] for length in counted]
                measured = self.summarize(counted, numbers)
                yield self.result(self.setting(where, "", counted), measured)

    def summarize(self, lengths: list[int], numbers: list[float]) -> float:
        """One number over all lengths; none before all of them are measured."""
        least = 1 if self.over_lengths == "lowest" else 2
        if any(map(isnan, numbers)) or len(numbers) < least:
            return nan
        return min(numbers) if self.over_lengths == "lowest" else fit_exponent(lengths, numbers)

    def setting(self, where: Mapping[str, Any], chosen: str, counted: Sequence[int] = ()) -> str:
        """The column `setting`: implementation, step and sizes."""
        words = [str(where[name]) for name in KEYS if name in where and name not in (*ONLY_PROJECTED, "length")]
        sizes = size_words(where.get("length"), where.get("projected_length"), where.get("block_length"))
        if self.over_lengths == "lowest" and "length" in where:
            sizes[0] = sizes[0].replace("=", "≥")
        elif self.over_lengths and counted:
            sizes = [f"N={counted[0]:,}–{counted[-1]:,}", *sizes[1 if "length" in where else 0 :]]
        return ", ".join([*words, *sizes, *([f"against {chosen}"] if chosen else [])])

    def result(self, setting: str, measured: float) -> Row:
        """A row of the table of targets."""
        bound, sign = (self.at_least, "≥") if self.at_most is None else (self.at_most, "≤")
        if isnan(measured):
            result = "not measured"
        elif bound is None:
            result = "reported"
        else:
            result = "met" if (measured >= bound if sign == "≥" else measured <= bound) else "missed"
        return {
            "metric": self.name,
            "setting": setting,
            "target": "–" if bound is None else f"{sign} {self.text(bound)}",
            "measured": "" if isnan(measured) else self.text(measured),
            "result": result,
        }

    def text(self, value: float) -> str:
        return f"{value * 100:.0f}%" if self.unit == "%" else f"{value:.2f}{self.unit}"


def combinations(keys: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The keys with one value each, for all combinations of the values in lists.

    >>> list(combinations({"step": "forward", "length": [512, 1024]}))
    [{'step': 'forward', 'length': 512}, {'step': 'forward', 'length': 1024}]
    """
    values = [value if isinstance(value, list) else [value] for value in keys.values()]
    for combination in product(*values):
        yield dict(zip(keys, combination, strict=True))


def matches(row: Row, wanted: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Whether a row has these values; K and the block length in `at` do not apply to rows without projection."""
    return all(
        row[name] == as_text(value) or (name in ONLY_PROJECTED and name in where and not row[name])
        for name, value in wanted.items()
    )


def publish(
    targets: Sequence[Target], rows: Sequence[Row], lengths: Sequence[int], path: Path, console: Console
) -> None:
    """Write the targets as CSV, and show them."""
    found = [result for target in targets for result in target.results(rows, lengths)]
    write_rows(path, found)
    screen = RichTable(*found[0], box=SIMPLE_HEAD)
    for result in found:
        screen.add_row(*result.values(), style=COLORS[result["result"]])
    console.print(screen)
