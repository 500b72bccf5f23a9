"""Table 3 of the paper as a figure: our ratios, with those of the paper below."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..csv_tables import Row
from . import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_paper_table(cells: Sequence[Row], facts: Row) -> "Figure":
    """Heat maps of time and memory saved over N and K; `facts` is a row of the table, with sizes and machine.

    A cell has the columns saved ("time" or "memory"), n, k, measured and paper; the last two may be empty.
    """
    figure, panels = style.new_figure(2, height=4.6)
    lengths, rows = (sorted({int(cell[name]) for cell in cells}) for name in ("n", "k"))
    for axes, saved in zip(panels, ("time", "memory"), strict=True):
        numbers = np.full((len(lengths), len(rows)), np.nan)
        for cell in (cell for cell in cells if cell["saved"] == saved):
            line, column = lengths.index(int(cell["n"])), rows.index(int(cell["k"]))
            numbers[line, column] = float(cell["measured"] or "nan")
            text = "\n".join(filter(None, (cell["measured"] or "?", f"({cell['paper']})" if cell["paper"] else "")))
            style.write_in_cell(axes, line, column, text, is_dark=numbers[line, column] < 8)
        axes.imshow(np.log2(numbers), cmap="cividis", vmin=0, vmax=6, aspect="auto")
        style.set_title(axes, f"{saved.capitalize()} saved, × (the paper's)")
        axes.set_xticks(range(len(rows)), [f"{K:,}" for K in rows])
        axes.set_yticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set(xlabel="K", ylabel="N")
    note = f"{facts['num_layers']} layers, C={facts['hidden_size']}, H={facts['num_heads']}, float32; {facts['cpu']}, "
    style.footnote(figure, note + f"threads={facts['threads']}, torch {facts['torch']}; the paper: one V100")
    return figure
