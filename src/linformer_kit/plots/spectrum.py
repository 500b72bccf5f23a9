"""Pictures of a spectrum: the curves of the layers, what a quarter keeps in every head, and the K of every layer."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..analysis.singular_values import KEPT, Curves, quarter
from ..csv_tables import Row, read_rows
from ..errors import UserError
from .style import GREY, PALETTE, calm, footnote, legend, new_figure

# the tables of a spectrum, in its folder
CURVES, RANKS, LAYERS = "spectrum.csv", "ranks.csv", "layers.csv"

COLOURS = mpl.colormaps["cividis"]
# more numbers than this in a row or column do not fit into the cells of the heat map
MOST_NUMBERS = 16
# the heads that a band shows: all of them would hide each other
MIDDLE = (0.25, 0.75)
MARKERS = ("o", "s", "^")


class Layer(NamedTuple):
    """What was written of a layer: the curves of its heads at some k, and how many singular values hold so much."""

    ks: list[int]
    shares: Curves  # heads × ks
    heads: list[Row]
    mean: Row

    @property
    def quarter(self) -> int:
        return quarter(self.ks[-1])


def draw_spectrum(folder: Path) -> dict[str, Figure]:
    """The pictures of what `linformer spectrum` has written into a folder, by name."""
    layers, source = read_layers(folder)
    figure, (left, right) = new_figure(1, 2, width=11, height=4.2)
    draw_curves(figure, left, layers)
    draw_heads(figure, right, layers)
    footnote(figure, f"{source}; lines: mean over heads, bands: the middle half of the heads")
    return {"spectrum": figure, "ranks": draw_ranks(layers, source)}


def read_layers(folder: Path) -> tuple[list[Layer], str]:
    """Its tables, and what was measured, in words."""
    try:
        curves, ranks, layers = (read_rows(folder / name) for name in (CURVES, RANKS, LAYERS))
        words = what_was_measured(ranks[0]["model"], int(ranks[0]["pieces"]), int(ranks[0]["length"]))
        found = [read_layer(mean, curves, ranks) for mean in layers]
    except (csv.Error, LookupError, TypeError, ValueError) as error:  # columns, rows or numbers that are not there
        raise UserError(f"{folder} holds a damaged spectrum ({error}); run `linformer spectrum` again") from None
    if not found:
        raise UserError(f"{folder} holds a damaged spectrum ({LAYERS} has no rows); run `linformer spectrum` again")
    return found, words


def read_layer(mean: Row, curves: Sequence[Row], ranks: Sequence[Row]) -> Layer:
    """What the tables hold of a layer; raises whatever comes of what is not there."""
    points = [row for row in curves if row["layer"] == mean["layer"]]
    ks = sorted({int(row["k"]) for row in points})
    shares = np.array([float(row["share"]) for row in points]).reshape(-1, len(ks))
    layer = Layer(ks, shares, [row for row in ranks if row["layer"] == mean["layer"]], mean)
    if len(layer.heads) != len(shares) or layer.quarter not in ks or not np.isfinite(shares).all():
        raise ValueError(f"layer {mean['layer']} is not whole")
    for row in (mean, *layer.heads):  # which are drawn as they are
        for name in ("layer", *KEPT):
            int(row[name])
    return layer


def what_was_measured(model: str, pieces: int, length: int) -> str:
    """
    >>> what_was_measured("bert", 1, 4096)
    'bert, 1 piece of 4,096 tokens'
    """
    return f"{model}, {pieces} {'piece' if pieces == 1 else 'pieces'} of {length:,} tokens"


def draw_curves(figure: Any, axes: Any, layers: Sequence[Layer]) -> None:
    """Share of the sum over k: a line for the mean over heads, a band for the middle half of them."""
    colours = depth_colours(len(layers))
    for layer, colour in zip(layers, colours, strict=True):
        axes.fill_between(layer.ks, *np.quantile(layer.shares, MIDDLE, axis=0), color=colour, alpha=0.15, linewidth=0)
        axes.plot(layer.ks, layer.shares.mean(axis=0), color=colour, linewidth=1.8)
    calm(axes)
    for k in {layer.quarter for layer in layers}:
        axes.axvline(k, color=GREY, linestyle=":", linewidth=1.2)
    axes.set_title("Share held by the k largest singular values", loc="left", fontsize=11, fontweight="bold")
    axes.set(xlabel="k", ylim=(0, 1.01), xlim=(0, max(layer.ks[-1] for layer in layers)))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    limits = np.arange(len(layers) + 1) + 0.5
    steps = ScalarMappable(BoundaryNorm(limits, len(layers)), ListedColormap(colours))
    ticks = [number for number in range(1, len(layers) + 1) if len(layers) <= 12 or number % 4 == 0]
    figure.colorbar(steps, ax=axes, label="layer", ticks=ticks, pad=0.02).ax.tick_params(length=0)


def depth_colours(count: int) -> list[tuple[float, float, float]]:
    """A colour for every layer, dark to light by depth, without the yellow that is hard to see on white."""
    return [mpl.colormaps["viridis"](place)[:3] for place in np.linspace(0, 0.85, count)]


def draw_heads(figure: Any, axes: Any, layers: Sequence[Layer]) -> None:
    """A cell for every head: the share held by the largest quarter. No image but cells, so that an SVG has no pixels."""
    shares = np.full((len(layers), max(len(layer.shares) for layer in layers)), np.nan)
    for row, layer in zip(shares, layers, strict=True):
        row[: len(layer.shares)] = layer.shares[:, layer.ks.index(layer.quarter)]
    lost = max(1 - float(np.nanmin(shares)), 0.01)  # where nothing is lost there would be no levels
    levels = [1 - level for level in np.ravel(MaxNLocator(8).tick_values(0, lost)).tolist()[::-1]]  # down from 1
    edges = [np.arange(size + 1) + 0.5 for size in reversed(shares.shape)]
    norm = BoundaryNorm(levels, COLOURS.N)
    cells = axes.pcolormesh(
        *edges, np.ma.masked_invalid(shares), cmap=COLOURS, norm=norm, edgecolors="white", linewidth=0.6
    )
    if max(shares.shape) <= MOST_NUMBERS:
        write_numbers(axes, shares, norm)
    quarters = {layer.quarter for layer in layers}  # several in a Linformer with a K for each layer
    title = f"{quarters.pop():,} largest" if len(quarters) == 1 else "largest quarter"
    axes.set_title(f"Share held by the {title}", loc="left", fontsize=11, fontweight="bold")
    axes.set(xlabel="head", ylabel="layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(12, integer=True))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(cells, ax=axes, format=PercentFormatter(1), pad=0.02)


def write_numbers(axes: Any, shares: Curves, norm: BoundaryNorm) -> None:
    """The shares in per cent, in their cells."""
    for (layer, head), share in np.ndenumerate(shares):
        if not np.isnan(share):
            colour = "white" if norm(share) < COLOURS.N / 2 else "black"
            axes.text(head + 1, layer + 1, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=colour)


def draw_ranks(layers: Sequence[Layer], source: str) -> Figure:
    """How many singular values hold 90, 95 and 99 % of their sum, layer by layer."""
    figure, (axes,) = new_figure(1, 1, width=6.5)
    calm(axes)
    for (name, share), colour, marker, aside in zip(KEPT.items(), PALETTE, MARKERS, (-0.08, 0, 0.08), strict=False):
        heads = [(int(row["layer"]) + aside, int(row[name])) for layer in layers for row in layer.heads]
        axes.plot(
            *zip(*heads, strict=True),
            color=colour,
            marker=marker,
            markersize=3,
            linestyle="",
            alpha=0.3,
            markeredgewidth=0,
        )
        means = [(int(layer.mean["layer"]), int(layer.mean[name])) for layer in layers]
        axes.plot(
            *zip(*means, strict=True), color=colour, marker=marker, markersize=6, linewidth=1.8, label=f"{share:.0%}"
        )
    axes.set_title("Singular values needed for a share of their sum", loc="left", fontsize=11, fontweight="bold")
    axes.set(xlabel="layer", ylabel="K", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    legend(axes, loc="best")
    footnote(figure, f"{source}; lines: of the mean curve, small: of each head")
    return figure
