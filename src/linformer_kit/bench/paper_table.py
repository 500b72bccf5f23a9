"""Table 3 of the paper, with the paper's numbers and ours."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from ..csv_tables import Row, write_rows
from .measure import OK
from .point import BERT_EAGER, OURS
from .result_table import baseline_of

ROWS = (128, 256, 512, 1024, 2048)
# how many times less time and memory Linformer needs than the Transformer (Wang et al. 2020, table 3), by n, for each k
PAPER_TIME: dict[int, tuple[float, ...]] = {
    512: (1.5, 1.3),
    1024: (1.7, 1.6, 1.3),
    2048: (2.6, 2.4, 2.1, 1.3),
    4096: (3.4, 3.2, 2.8, 2.2, 1.3),
    8192: (5.5, 5.0, 4.4, 3.5, 2.1),
    16384: (8.6, 7.8, 7.0, 5.6, 3.3),
    32768: (13, 12, 11, 8.8, 5.0),
    65536: (20, 18, 16, 14, 7.9),
}
PAPER_MEMORY: dict[int, tuple[float, ...]] = {
    512: (1.7, 1.5),
    1024: (3.0, 2.9, 1.8),
    2048: (6.1, 5.6, 3.6, 2.0),
    4096: (14, 13, 8.3, 4.3, 2.3),
    8192: (28, 26, 17, 8.5, 4.5),
    16384: (56, 48, 32, 16, 8),
    32768: (56, 48, 36, 18, 16),
    65536: (60, 52, 40, 20, 18),
}
SAVED = {"time": ("seconds_median", "status", PAPER_TIME), "memory": ("peak_mib", "memory_status", PAPER_MEMORY)}


def paper_cell(table: dict[int, tuple[float, ...]], length: int, rows: int) -> float | None:
    """A cell of the paper's table; None where it has none.

    >>> paper_cell(PAPER_TIME, 4096, 512), paper_cell(PAPER_TIME, 512, 512)
    (2.8, None)
    """
    return dict(zip(ROWS, table.get(length, ()), strict=False)).get(rows)


def cells(rows: Sequence[Row]) -> list[Row]:
    """All measured cells: our ratio, the paper's ratio, or why there is no number."""
    return [
        cell_of(rows, row, saved)
        for saved in SAVED
        for row in rows
        if (row["implementation"], row["subject"], row["step"]) == (OURS, "encoder", "forward")
        and int(row["projected_length"]) in ROWS
    ]


def cell_of(rows: Sequence[Row], row: Row, saved: str) -> Row:
    """The ratio of the baseline to one of our rows, at the same length and batch."""
    column, status, paper = SAVED[saved]
    costs, note = {}, ""
    for name, found in ((BERT_EAGER, baseline_of(row, rows, BERT_EAGER) or {}), (OURS, row)):
        costs[name] = float(found.get(column) or 0) if found.get(status) == OK else 0.0
        if not costs[name]:
            note = f"{name}: {found.get(status, '').replace(OK, '') or 'not measured'}"
    number = paper_cell(paper, int(row["length"]), int(row["projected_length"]))
    return {
        **{"saved": saved, "n": row["length"], "k": row["projected_length"], "batch": row["batch"]},
        "measured": "" if note else f"{costs[BERT_EAGER] / costs[OURS]:.2f}",
        "paper": "" if number is None else f"{number:g}",
        "note": note,
    }


def publish(rows: Sequence[Row], path: Path, console: Console) -> list[Path]:
    """Write the cells as CSV and as a figure, and show them; returns the files."""
    from ..plots import style
    from ..plots.paper_table import draw_paper_table

    found = cells(rows)
    if not found:
        return []
    csv_path = path.with_name(f"{path.stem}_cells.csv")
    write_rows(csv_path, found)
    for saved in SAVED:
        console.print(screen_table(saved, [cell for cell in found if cell["saved"] == saved]))
    for reason in dict.fromkeys(cell["note"] for cell in found if cell["note"]):
        lengths = dict.fromkeys(f"{int(cell['n']):,}" for cell in found if cell["note"] == reason)
        console.print(f"? at n = {', '.join(lengths)}: {reason}", highlight=False)
    figure = draw_paper_table(found, rows[0])
    pictures = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for picture in pictures:
        style.save(figure, picture)
    return [csv_path, *pictures]


def screen_table(saved: str, found: list[Row]) -> RichTable:
    """The table on the screen: ours, and the paper's in parentheses."""
    screen = RichTable("n", *(f"k={rows:,}" for rows in ROWS), box=SIMPLE_HEAD)
    screen.title = f"{saved} saved: measured (paper)"
    for length in dict.fromkeys(cell["n"] for cell in found):
        by_rows = {cell["k"]: cell for cell in found if cell["n"] == length}
        screen.add_row(f"{int(length):,}", *(format_cell(by_rows.get(str(rows))) for rows in ROWS))
    return screen


def format_cell(cell: Row | None) -> str:
    """Ours, and the paper's in parentheses.

    >>> format_cell({"measured": "1.40", "paper": "1.5"}), format_cell({"measured": "", "paper": "20"})
    ('1.40 (1.5)', '? (20)')
    """
    if cell is None:
        return "–"
    return f"{cell['measured'] or '?'} ({cell['paper']})" if cell["paper"] else cell["measured"] or "?"
