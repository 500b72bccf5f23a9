"""Measurements as CSV: one row per point, written after each, so that a run can be stopped and taken up again."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from .errors import UserError
from .files import write_atomically

Row = dict[str, str]


def as_csv(columns: tuple[str, ...], rows: Iterable[Mapping[str, object]]) -> str:
    """The text of a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """A table that is measured as a whole: replaced by a new one, never half of it."""
    write_atomically(path, lambda part: part.write_text(as_csv(tuple(rows[0]), rows), encoding="utf-8"))


def read_rows(path: Path) -> list[Row]:
    """A table as it was written."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def as_text(value: object) -> str:
    """Floats with six digits, which is more than any measurement has; nothing for None."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class Table:
    """Rows of text, found by their key columns, kept in a CSV file."""

    def __init__(self, path: Path, keys: tuple[str, ...], values: tuple[str, ...]):
        self.path = path
        self.keys = keys
        self.values = values
        self._rows: dict[tuple[str, ...], Row] = {}
        if path.exists():
            self._load()

    def _load(self) -> None:
        with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != self.keys + self.values:
                raise UserError(
                    f"{self.path} has the columns {', '.join(reader.fieldnames or ['none'])}, which this version does not write; "
                    "move it away, or measure anew with --fresh"
                )
            for row in reader:
                self._rows[self._key(row)] = row

    def _key(self, row: Mapping[str, object]) -> tuple[str, ...]:
        return tuple(as_text(row.get(name)) for name in self.keys)

    def get(self, **key: object) -> Row | None:
        """The row with this key; key columns left out are empty."""
        return self._rows.get(self._key(key))

    def rows(self, **wanted: object) -> Iterator[Row]:
        """The rows in which these columns have these values."""
        for row in self._rows.values():
            if all(row[name] == as_text(value) for name, value in wanted.items()):
                yield row

    def only(self, is_wanted: Callable[[Row], bool]) -> "Table":
        """A copy with these rows, to read from."""
        copy = Table(self.path, self.keys, self.values)
        copy._rows = {key: row for key, row in self._rows.items() if is_wanted(row)}
        return copy

    def number(self, column: str, **key: object) -> float | None:
        """One number; None where it was not measured."""
        row = self.get(**key)
        return float(row[column]) if row and row[column] else None

    def put(self, rows: list[dict[str, object]]) -> None:
        """Add rows, or add to rows, and write the file."""
        for new in rows:
            row = self._rows.setdefault(self._key(new), dict.fromkeys(self.keys + self.values, ""))
            unknown = new.keys() - row.keys()
            if unknown:
                raise KeyError(f"{self.path.name} has no column {', '.join(sorted(unknown))}")
            row.update({name: as_text(value) for name, value in new.items()})
        text = as_csv(self.keys + self.values, self._rows.values())
        write_atomically(self.path, lambda part: part.write_text(text, encoding="utf-8"))


def line(table: Table, column: str, **wanted: object) -> list[tuple[float, float]]:
    """(length, number) of the rows that have it, by length."""
    return sorted((float(row["length"]), float(row[column])) for row in table.rows(**wanted) if row[column])
