"""Table 3 of the paper as a figure: our ratios, with those of the paper below."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..csv_tables import Row
from . import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = (128, 256, 512, 1024, 2048)  # the K of the table


def draw_paper_table(cells: Sequence[Row], facts: Row) -> "Figure":
    """Heat maps of time and memory saved over N and K; `facts` is a row of the table, with sizes and machine.

    A cell has the columns saved ("time" or "memory"), n, k, measured and paper; the last two may be empty.
    """
    figure, panels = style.new_figure(1, 2, height=4.6)
    lengths = sorted({int(cell["n"]) for cell in cells})
    for axes, saved in zip(panels, ("time", "memory"), strict=True):
        by_place = {
            (lengths.index(int(cell["n"])), ROWS.index(int(cell["k"]))): cell
            for cell in cells
            if cell["saved"] == saved
        }
        numbers = np.full((len(lengths), len(ROWS)), np.nan)
        for place, cell in by_place.items():
            numbers[place] = float(cell["measured"] or "nan")
        axes.imshow(np.log2(numbers), cmap="cividis", vmin=0, vmax=6, aspect="auto")
        for (line, column), cell in by_place.items():
            is_dark = cell["measured"] and float(cell["measured"]) < 8
            text = "\n".join(filter(None, (cell["measured"] or "?", f"({cell['paper']})" if cell["paper"] else "")))
            color = "white" if is_dark else "black"
            axes.text(column, line, text, ha="center", va="center", fontsize=9, color=color)
        style.set_title(axes, f"{saved.capitalize()} saved, × (the paper's)")
        axes.set_xticks(range(len(ROWS)), [f"{K:,}" for K in ROWS])
        axes.set_yticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set(xlabel="K", ylabel="N")
    note = f"{facts['num_layers']} layers, C={facts['hidden_size']}, H={facts['num_heads']}, float32; {facts['cpu']}, "
    style.footnote(figure, note + f"threads={facts['threads']}, torch {facts['torch']}; the paper: one V100")
    return figure
