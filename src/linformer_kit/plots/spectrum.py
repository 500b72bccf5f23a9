"""Figures of a spectrum: the curves of the layers, the share held by a quarter in every head, the K of every layer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from .style import GRAY, MARKERS, PALETTE, footnote, legend, new_figure, set_title, style_axes, write_in_cell

COLORS = mpl.colormaps["cividis"]
MAX_NUMBERS = 16  # of numbers in a row or column of the heat map; more do not fit
MIDDLE_HALF = (0.25, 0.75)  # of the heads, drawn as a band


class Layer(NamedTuple):
    """The spectrum of a layer."""

    number: int
    ks: list[int]  # the last is the number of singular values
    shares: NDArray[np.float64]  # heads × ks: the share of the sum held by the k largest singular values
    quarter: int  # one of ks
    ranks: dict[float, list[int]]  # for each share, the k of each head that holds it
    mean_ranks: dict[float, int]  # the same for the mean curve


def draw_spectrum(layers: Sequence[Layer], source: str) -> dict[str, Figure]:
    """The figures by name; `source` says what was measured."""
    figure, (left, right) = new_figure(2, width=11, height=4.2)
    draw_curves(figure, left, layers)
    draw_heads(figure, right, layers)
    footnote(figure, f"{source}; lines: mean over heads, bands: the middle half of the heads")
    return {"spectrum": figure, "ranks": draw_ranks(layers, source)}


def draw_curves(figure: Any, axes: Any, layers: Sequence[Layer]) -> None:
    """The share over k: a line for the mean over heads, a band for the middle half of them."""
    colors = depth_colors(len(layers))
    for layer, color in zip(layers, colors, strict=True):
        band = np.quantile(layer.shares, MIDDLE_HALF, axis=0)
        axes.fill_between(layer.ks, *band, color=color, alpha=0.15, linewidth=0)
        axes.plot(layer.ks, layer.shares.mean(axis=0), color=color, linewidth=1.8)
    style_axes(axes, "Share held by the k largest singular values")
    for k in {layer.quarter for layer in layers}:
        axes.axvline(k, color=GRAY, linestyle=":", linewidth=1.2)
    axes.set(xlabel="k", ylim=(0, 1.01), xlim=(0, max(layer.ks[-1] for layer in layers)))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    limits = np.arange(len(layers) + 1) + 0.5
    steps = ScalarMappable(BoundaryNorm(limits, len(layers)), ListedColormap(colors))
    ticks = [number for number in range(1, len(layers) + 1) if len(layers) <= 12 or number % 4 == 0]
    figure.colorbar(steps, ax=axes, label="layer", ticks=ticks, pad=0.02).ax.tick_params(length=0)


def depth_colors(count: int) -> list[tuple[float, float, float]]:
    """A color for every layer, dark to light by depth, without the yellow that is hard to see on white."""
    return [mpl.colormaps["viridis"](place)[:3] for place in np.linspace(0, 0.85, count)]


def draw_heads(figure: Any, axes: Any, layers: Sequence[Layer]) -> None:
    """The share held by the largest quarter, a cell per head. Cells rather than an image keep pixels out of the SVG."""
    shares = np.full((len(layers), max(len(layer.shares) for layer in layers)), np.nan)
    for row, layer in zip(shares, layers, strict=True):
        row[: len(layer.shares)] = layer.shares[:, layer.ks.index(layer.quarter)]
    lost = max(1 - float(np.nanmin(shares)), 0.01)  # a range of 0 would have no levels
    levels = [1 - level for level in np.ravel(MaxNLocator(8).tick_values(0, lost)).tolist()[::-1]]  # down from 1
    edges = [np.arange(size + 1) + 0.5 for size in reversed(shares.shape)]
    norm = BoundaryNorm(levels, COLORS.N)
    masked = np.ma.masked_invalid(shares)
    cells = axes.pcolormesh(*edges, masked, cmap=COLORS, norm=norm, edgecolors="white", linewidth=0.6)
    if max(shares.shape) <= MAX_NUMBERS:
        for (layer, head), share in np.ndenumerate(shares):
            if not np.isnan(share):
                is_dark = norm(share) < COLORS.N / 2
                write_in_cell(axes, layer + 1, head + 1, f"{100 * share:.0f}", is_dark, fontsize=8)
    quarters = {layer.quarter for layer in layers}  # several in a Linformer with a K for each layer
    title = f"{quarters.pop():,} largest" if len(quarters) == 1 else "largest quarter"
    set_title(axes, f"Share held by the {title}")
    axes.set(xlabel="head", ylabel="layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(12, integer=True))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(cells, ax=axes, format=PercentFormatter(1), pad=0.02)


def draw_ranks(layers: Sequence[Layer], source: str) -> Figure:
    """The number of singular values that hold each share, by layer."""
    figure, (axes,) = new_figure(1, width=6.5)
    style_axes(axes, "Singular values needed for a share of their sum")
    for share, color, marker, offset in zip(layers[0].ranks, PALETTE, MARKERS, (-0.08, 0, 0.08), strict=False):
        heads = [(layer.number + offset, k) for layer in layers for k in layer.ranks[share]]
        look: dict[str, Any] = {"color": color, "marker": marker}
        axes.plot(*zip(*heads, strict=True), **look, markersize=3, linestyle="", alpha=0.3, markeredgewidth=0)
        means = [(layer.number, layer.mean_ranks[share]) for layer in layers]
        axes.plot(*zip(*means, strict=True), **look, markersize=6, linewidth=1.8, label=f"{share:.0%}")
    axes.set(xlabel="layer", ylabel="K", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    legend(axes, loc="best")
    footnote(figure, f"{source}; lines: of the mean curve, small: of each head")
    return figure
