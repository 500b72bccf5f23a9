"""`linformer compare` from its flags to its tables and pictures."""

from pathlib import Path
from typing import Any

from rich.console import Console

from . import paper_table
from .compare import compare
from .sweep import PAPER_TABLE_3, PRESETS, keys_in, read_sweep, split_list

LISTS: dict[str, type[int] | type[str]] = {
    **{"lengths": int, "projected_lengths": int},
    **{"implementations": str, "subjects": str, "steps": str},
}


def run(path: Path | None, preset: str | None, flags: dict[str, Any], output: Path | None, fresh: bool) -> None:
    """Flags replace what the file says, and that what the preset says."""
    given = {name: split_list(value, LISTS[name]) if name in LISTS else value for name, value in flags.items()}
    sweep = read_sweep({**PRESETS.get(preset or "", {}), **(keys_in(path) if path else {}), **given})
    output = output or Path(f"{preset or 'compare'}.csv")
    if preset == PAPER_TABLE_3:
        import matplotlib  # noqa: F401 — what is missing is told before anything is measured

    console = Console()
    table = compare(sweep, output, fresh, console)
    written = [output]
    if preset == PAPER_TABLE_3:
        written += paper_table.publish(list(table.rows()), output, console)
    console.print("Written:", *map(str, written), highlight=False, soft_wrap=True)
