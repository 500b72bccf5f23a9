"""Sortable tables of the report page."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..formatting import format_value


@dataclass(frozen=True)
class Cell:
    """A text, and the number to sort by, if it is one. `missing` cells sort last in both directions."""

    text: str
    value: float | None = None
    missing: bool = False
    bad: bool = False


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row names the row."""

    caption: str
    headings: list[str]
    rows: list[list[Cell]]
    note: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers."""
        return [any(row[place].value is not None for row in self.rows) for place in range(len(self.headings))]


EMPTY = Cell("–", missing=True)


def make_cell(value: Any, show: Callable[[float], str] = format_value) -> Cell:
    """A cell for a value of any type; numbers are formatted by `show`.

    >>> [make_cell(value).text for value in (0.98214, 10044.6, 4096, None, True, [8, 4])]
    ['0.9821', '10,045', '4,096', '–', 'yes', '8, 4']
    """
    if value is None or value == "":
        return EMPTY
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    if isinstance(value, list):
        return Cell(", ".join(map(str, value)))
    if not isinstance(value, int | float):
        return Cell(str(value))
    if math.isnan(value):
        return Cell("not a number", missing=True, bad=True)
    return Cell(show(value), value)


def parse_cell(text: str) -> Cell:
    """A cell for the text of a CSV file.

    >>> [parse_cell(text).value for text in ("4096", "15.6", "2.13.0+cpu", "")]
    [4096, 15.6, None, None]
    """
    for number in (int, float):
        try:
            return make_cell(number(text))
        except (TypeError, ValueError):  # None where a line is cut off
            continue
    return make_cell(text)


def make_table(caption: str, rows: Iterable[Mapping[str, Cell]], note: str = "") -> Table:
    """A table from rows by heading: columns in order of first appearance, without those that are empty."""
    rows = list(rows)
    headings = [
        heading
        for heading in dict.fromkeys(heading for row in rows for heading in row)
        if any(row.get(heading, EMPTY) != EMPTY for row in rows)
    ]
    return Table(caption, headings, [[row.get(heading, EMPTY) for heading in headings] for row in rows], note)


def heading(name: str) -> str:
    """A setting or column name as a heading."""
    return name.replace("_", " ")
