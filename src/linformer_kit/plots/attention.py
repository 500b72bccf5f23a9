"""What a model attends to: attention weights on a text, and the columns of E."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import style
from .style import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOR_MAP = "cividis"
FONT = "DejaVu Sans"  # part of matplotlib
MAX_LABELS = 64
INCHES_PER_LABEL = 0.125
INCHES_PER_SLOT = 0.13
MAX_HEADS_HEIGHT = 16.0  # inches of all heat maps of a head, one below the other
MAX_SLOTS_HEIGHT = 24.0
MAX_SLOTS = 32
MAX_COLUMNS = 3  # of panels; with a matrix for each head, also of heads


def drawable(text: str) -> str:
    """The text with boxes for characters that the font does not have."""
    from matplotlib.font_manager import findfont, get_font

    has = get_font(findfont(FONT)).get_charmap()
    return "".join(character if character.isprintable() and ord(character) in has else "□" for character in text)


# heads


def draw_heads(
    layers_HNK: Sequence[np.ndarray],
    labels: Sequence[str],
    slots: Sequence[int],
    note: str,
    *,
    names: Sequence[str] | None = None,
    title: str = "",
    size: tuple[float, float] | None = None,
) -> "Figure":
    """Heat maps of attention weights in a grid of layers × heads: a row for each token, labeled if `labels` is given.

    The first `slots` columns of a layer, if any, are those of finished blocks; a line separates them from the others.
    `names` of the layers are "layer 1" and so on by default; `size` is (width, height) in inches.
    """
    from matplotlib.colors import PowerNorm

    count, heads = len(layers_HNK), max(layer.shape[0] for layer in layers_HNK)
    width = max(5.0, min(9.5, 1.6 + 2.2 * heads)) if size is None else size[0]
    height = max(1.1, min(INCHES_PER_LABEL * min(len(labels) or 20, MAX_LABELS), MAX_HEADS_HEIGHT / count))
    room = 0.12 + 0.9 / count  # for titles, tick labels and the footnote
    if size is not None:
        height = max(0.5, size[1] / count - room)
    figure, grid = style.new_figure(count * heads, heads, width=width, height=height + room)
    lowest, highest = min(float(layer.min()) for layer in layers_HNK), max(float(layer.max()) for layer in layers_HNK)
    # one scale for all; the root keeps small weights visible next to one near 1
    scale = PowerNorm(0.5, lowest, highest)
    for place, axes in enumerate(grid):
        layer, head = divmod(place, heads)
        if layer == 0:
            axes.set_title(f"head {head + 1}", fontsize=10)
        if head >= len(layers_HNK[layer]):  # another layer has more heads
            axes.set_axis_off()
            continue
        image = axes.imshow(layers_HNK[layer][head], COLOR_MAP, aspect="auto", norm=scale)
        if slots[layer] > 0:
            axes.axvline(slots[layer] - 0.5, color="white", linewidth=1)
        rows, columns = layers_HNK[layer][head].shape
        label_columns(
            axes, slots[layer], columns, is_last=layer == count - 1 or columns != layers_HNK[layer + 1].shape[-1]
        )
        axes.set_yticks([])
        if head == 0:
            axes.set_ylabel(f"layer {layer + 1}" if names is None else names[layer], fontsize=10)
            if len(labels) == rows:
                label_rows(axes, labels, height)
            else:
                axes.set_yticks([0, rows - 1], ["1", f"{rows:,}"], fontsize=8)
    shrink = min(1.0, 3.5 / (height * count))
    bar = figure.colorbar(image, ax=grid, shrink=shrink, anchor=(0.0, 1.0), pad=0.01, aspect=30)
    bar.outline.set_visible(False)
    if title:
        figure.suptitle(title, fontsize=11, fontweight="bold")
    style.footnote(figure, textwrap.fill(note, int(13 * width)))
    return figure


def label_rows(axes: "Axes", labels: Sequence[str], height: float) -> None:
    """As many token labels as fit, evenly spaced."""
    step = -(-len(labels) // max(1, int(height / INCHES_PER_LABEL + 0.01)))
    shown = range(0, len(labels), step)
    axes.set_yticks(shown, [labels[place] for place in shown], fontsize=8, family=FONT, parse_math=False)
    axes.tick_params(axis="y", length=2, pad=2)


def label_columns(axes: "Axes", slots: int, count: int, is_last: bool) -> None:
    """The first and the last of the columns after the slots, below the last row of panels."""
    ticks = {slots: "1", count - 1: f"{count - slots:,}"} if is_last and count > 1 else {}
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.tick_params(axis="x", length=2, pad=2)


# slots


def draw_slots(panels: Sequence[tuple[str, np.ndarray]], xlabel: str, note: str) -> "Figure":
    """The columns of E as curves over positions: how much each position adds to each slot.

    A panel is a title and an E of shape (N, heads, K); with several heads, each gets its own panel.
    """
    heads = panels[0][1].shape[1]
    of_heads = [
        (f"{title}, head {head + 1}" if heads > 1 else title, E_NHK[:, head])
        for title, E_NHK in panels
        for head in range(min(MAX_COLUMNS, heads))
    ]
    columns = min(MAX_COLUMNS, heads if heads > 1 else len(panels))
    rows = -(-len(of_heads) // columns)
    # with many layers, fewer slots of each
    most = min(MAX_SLOTS, max(8, int((MAX_SLOTS_HEIGHT / rows - 0.8) / INCHES_PER_SLOT)))
    height = INCHES_PER_SLOT * min(most, max(E.shape[-1] for _, E in panels)) + 0.8 + 0.3 / rows
    figure, grid = style.new_figure(len(of_heads), columns, height=max(2.0, height))
    for place, (axes, (title, E_NK)) in enumerate(zip(grid, of_heads, strict=True)):
        draw_ridges(axes, title, E_NK, most)
        axes.set(xlabel=xlabel, ylabel="slot" if place % columns == 0 else "")
    some = f" The first {MAX_COLUMNS} of {heads} heads." if heads > MAX_COLUMNS else ""
    style.footnote(figure, note + some)
    return figure


def draw_ridges(axes: "Axes", title: str, E_NK: np.ndarray, most: int) -> None:
    """One curve per slot, slot 1 on top, all in one scale; their distance is two thirds of the highest value."""
    E_NK, count = E_NK.astype(float), E_NK.shape[1]
    slots = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))
    distance = float(np.abs(E_NK[:, slots]).max()) / 1.5 or 1.0
    positions = np.arange(1, len(E_NK) + 1)
    for rank, slot in enumerate(slots):
        base, color = -rank * distance, PALETTE[rank % 2]  # two alternating colors separate neighbors
        axes.fill_between(positions, base, E_NK[:, slot] + base, step="mid", color=color, alpha=0.25, linewidth=0)
        axes.plot(positions, E_NK[:, slot] + base, drawstyle="steps-mid", color=color, linewidth=0.8)
    shown = f"K={count}" if len(slots) == count else f"{len(slots)} of K={count}"
    axes.set_title(f"{title} ({shown})", loc="left", fontsize=10, fontweight="bold")
    axes.set_yticks([-rank * distance for rank in range(len(slots))], [str(slot + 1) for slot in slots], fontsize=7)
    axes.margins(x=0.01, y=0.03)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.7)
