"""What a benchmark is meant to reach, and what was measured: as CSV, and as a table on the screen."""

from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from ..csv_tables import write_rows

COLUMNS = ("target", "at", "wanted", "measured", "verdict")
HEADINGS = ("to reach", "at", "wanted", "measured", "")
COLOURS = {"met": "green", "missed": "red", "reported": "", "not measured": "dim"}


@dataclass(frozen=True)
class Target:
    """One thing to reach; without `wanted`, one that is only reported."""

    what: str
    where: str
    at_least: bool
    wanted: float | None
    unit: str
    measured: float | None

    @property
    def texts(self) -> tuple[str, str, str, str, str]:
        """As it is shown: what, where, wanted, measured, verdict."""
        wanted = "–" if self.wanted is None else f"{'≥' if self.at_least else '≤'} {self.in_unit(self.wanted)}"
        measured = "" if self.measured is None else self.in_unit(self.measured)
        return self.what, self.where, wanted, measured, self.verdict

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        if self.wanted is None:
            return "reported"
        return "met" if (self.measured >= self.wanted if self.at_least else self.measured <= self.wanted) else "missed"

    def in_unit(self, value: float) -> str:
        return f"{value * 100:.0f} %" if self.unit == "%" else f"{value:.2f}{self.unit}"


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient; None where one of the two was not measured."""
    return numerator / denominator if numerator and denominator else None


def publish(found: list[Target], path: Path, console: Console) -> None:
    """Write the targets as CSV, and show them."""
    write_rows(path, [dict(zip(COLUMNS, target.texts, strict=True)) for target in found])
    shown = RichTable(*HEADINGS, box=SIMPLE_HEAD)
    for target in found:
        shown.add_row(*target.texts, style=COLOURS[target.verdict])
    console.print(shown)
