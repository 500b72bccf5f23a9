"""Tables of measurements as CSV: one row per measurement, written after each, so that a stopped sweep can resume."""

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from .errors import UserError
from .files import write_text

Row = dict[str, str]


def as_csv(columns: tuple[str, ...], rows: Iterable[Mapping[str, object]]) -> str:
    """The text of a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Write a whole table atomically; the columns are those of the first row."""
    write_text(path, as_csv(tuple(rows[0]), rows))


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file as text."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_table(path: Path, columns: tuple[str, ...]) -> list[Row]:
    """The rows of a table that this version has written, with exactly these columns; other files are a `UserError`."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file)
        try:
            rows, found = list(reader), reader.fieldnames or []
        except csv.Error as error:
            raise UserError(f"{path} cannot be read as CSV: {error}; choose another file") from None
    missing = [name for name in columns if name not in found]
    unknown = [name for name in found if name not in columns]
    if missing or unknown:
        what = f"it lacks the column {missing[0]}" if missing else f"it has an unknown column {unknown[0]}"
        what = what if found else "it is empty"
        raise UserError(f"{path} is not a table of this version: {what}; choose another file, or create this one again")
    for place, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise UserError(
                f"{path} is damaged: row {place} has more or fewer values than there are columns; measure it again"
            )
    return rows


def as_text(value: object) -> str:
    """A value as it is stored: floats with six digits, None as an empty cell."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read_number(row: Row, column: str) -> float:
    """A number in a table of `linformer compare`."""
    try:
        return float(row[column])
    except ValueError:
        where = f"{row['implementation']}, N={row['length']}"
        raise UserError(
            f"the table is damaged: {column} is {row[column]!r} in the row of {where}; measure it again"
        ) from None


def fit_exponent(sizes: Iterable[float], costs: Iterable[float]) -> float:
    """The p of cost = c · size^p, by least squares over the logarithms.

    >>> round(fit_exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    points = [(math.log(size), math.log(cost)) for size, cost in zip(sizes, costs, strict=True)]
    if len(points) < 2:
        raise ValueError(f"an exponent needs two points or more, got {len(points)}")
    return statistics.linear_regression(*zip(*points, strict=True)).slope


class Table:
    """Rows of text in a CSV file, found by their key columns."""

    def __init__(
        self,
        path: Path,
        keys: tuple[str, ...],
        values: tuple[str, ...],
        convert: Callable[[Row], Row] = lambda row: row,  # rows that an earlier version has written
    ):
        self.path = path
        self.keys = keys
        self.values = values
        rows = map(convert, read_table(path, keys + values)) if path.exists() else ()
        self._rows = {self._key(row): row for row in rows}

    def _key(self, row: Mapping[str, object]) -> tuple[str, ...]:
        return tuple(as_text(row.get(name)) for name in self.keys)

    def get(self, **key: object) -> Row | None:
        """The row with this key; omitted key columns are empty."""
        return self._rows.get(self._key(key))

    def rows(self, **wanted: object) -> Iterator[Row]:
        """The rows with these values in these columns."""
        for row in self._rows.values():
            if all(row[name] == as_text(value) for name, value in wanted.items()):
                yield row

    def only(self, is_wanted: Callable[[Row], bool]) -> "Table":
        """A copy with these rows; the file changes with `put` only."""
        copy = Table(self.path, self.keys, self.values)
        copy._rows = {key: row for key, row in self._rows.items() if is_wanted(row)}
        return copy

    def put(self, rows: list[dict[str, object]]) -> None:
        """Add or update rows, and write the file."""
        for new in rows:
            row = self._rows.setdefault(self._key(new), dict.fromkeys(self.keys + self.values, ""))
            row.update({name: as_text(value) for name, value in new.items()})
        write_text(self.path, as_csv(self.keys + self.values, self._rows.values()))
