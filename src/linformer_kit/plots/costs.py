"""Time and memory over length, from tables of `linformer compare`."""

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..csv_tables import Row, fit_exponent, read_number
from ..errors import UserError
from . import style
from .style import BLACK, BLUE, GRAY, GREEN, MARKERS, ORANGE, PURPLE, SKY, VERMILION, Look, Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OK = "ok"  # the status of what was measured
FULL_ATTENTION = "full-attention"
# color and line style of an implementation; others take the rest of the cycle, in order of appearance
COLORS = {
    "linformer-kit": (VERMILION, "-"),
    FULL_ATTENTION: (GRAY, "-"),
    "full-attention-eager": (GRAY, ":"),
    "linformer": (BLUE, "-"),
    "linformer-pytorch": (GREEN, "-"),
    "bert": (BLACK, "-"),
    "bert-eager": (BLACK, ":"),
    "modern-bert": (BLACK, "--"),
    "longformer": (PURPLE, "-"),
    "led": (PURPLE, "--"),
    "big-bird": (SKY, "-"),
    "long-t5": (SKY, "--"),
    "nystromformer": (ORANGE, "-"),
    "fnet": (ORANGE, ":"),
}
OTHER_COLORS = tuple(
    (color, style) for style in ("-.", ":") for color in (GREEN, BLUE, VERMILION, PURPLE, ORANGE, SKY, GRAY)
)
LEGEND_CHARACTERS = 32  # of a label, if the legend is to have two columns
MIN_POINTS = 3  # for an exponent: two points always lie on a line
# the order of the panels; others follow in order of appearance
SUBJECTS = ("layer", "causal-layer", "encoder", "encoder-decoder", "causal-lm")
STEPS = ("forward", "training", "generation", "prefill", "decoding")
# columns that are equal for all rows of a panel, with their descriptions
SIZES = {
    **{"hidden_size": "hidden size {}", "num_heads": "{} heads", "num_layers": "{} layers", "sharing": "sharing {}"},
    **{"target_length": "targets of {}", "backend": "{}", "precision": "{}", "device": "{}"},
}
DESCRIPTIONS = {"batch": "batch {}", **SIZES, "table": "{}"}
# the subjects that a size belongs to, where these are not all
SUBJECTS_OF = {
    "num_layers": ("encoder", "encoder-decoder", "causal-lm", "trainer"),
    "target_length": ("encoder-decoder", "causal-lm"),
}
# the other columns that identify a point
POINT = ("subject", "step", "implementation", "variant", "length", "projected_length", "block_length")
# columns of the footnote; `code` is named only if it differs
MACHINE = {"cpu": "{}", "cores": "{} cores", "threads": "{} threads", "memory_gib": "{} GiB", "system": "{}"}
VERSIONS = {**{name: f"{name} {{}}" for name in ("linformer-kit", "torch", "transformers", "python")}, "code": ""}


class Line(NamedTuple):
    """A line of a panel."""

    implementation: str
    variant: str  # such as the projection
    block_length: int  # 0: no blocks
    projected_length: int  # K, or the slots of a block; 0: no projection

    @property
    def name(self) -> str:
        name = f"{self.implementation}, {self.variant}" if self.variant else self.implementation
        if self.block_length and self.projected_length:
            return f"{name} {self.block_length}→{self.projected_length}"
        return f"{name} K={self.projected_length}" if self.projected_length else name


@dataclass(frozen=True)
class Panel:
    """One cost of one step of one subject."""

    title: str
    unit: str  # "time" or "memory"
    lines: dict[Line, Points]

    @property
    def labels(self) -> list[str]:
        return [line.name + growth(points) for line, points in self.lines.items()]

    @property
    def legend_columns(self) -> int:
        return 2 if max(map(len, self.labels)) <= LEGEND_CHARACTERS else 1


def without_other_sizes(row: Row) -> Row:
    """The row without the sizes that its subject does not have: `num_layers` says nothing about a single layer."""
    return row | {size: "" for size, subjects in SUBJECTS_OF.items() if row["subject"] not in subjects}


def draw_costs(tables: Mapping[str, list[Row]]) -> "Figure":
    """A time and a memory panel for each subject and step, with the exponents of growth in the legends."""
    all_rows = [{**row, "table": name} for name, rows in tables.items() for row in rows]
    panels = make_panels(all_rows)
    if not panels:
        raise UserError(f"no point of {', '.join(tables)} was measured: {explain_empty(all_rows)}")
    looks = assign_looks({line for panel in panels for line in panel.lines})
    columns = min(2, len(panels))
    # the legend is below each panel, where it hides no line
    height = 3.3 + 0.16 * max(-(-len(panel.lines) // panel.legend_columns) for panel in panels)
    figure, all_axes = style.new_figure(len(panels), columns, height=height)
    for axes, panel in zip(all_axes, panels, strict=True):
        draw_panel(axes, panel, looks)
    # enough space between a title and the legend above it
    figure.get_layout_engine().set(h_pad=0.13)  # type: ignore[union-attr, call-arg]
    style.footnote(figure, textwrap.fill(describe_setup(all_rows), 63 * columns, break_on_hyphens=False))
    return figure


def explain_empty(rows: Iterable[Row]) -> str:
    """Why there is nothing to draw."""
    if any(OK in (row["status"], row["memory_status"]) for row in rows):
        return "all times and memories are 0, which is below what can be measured"
    return f"no row has the status {OK!r}"


def draw_panel(axes: "Axes", panel: Panel, looks: Mapping[Line, Look]) -> None:
    from matplotlib.transforms import ScaledTranslation

    lines = dict(zip(panel.labels, panel.lines.values(), strict=True))
    style.cost_lines(axes, panel.title, lines, [looks[line] for line in panel.lines], panel.unit)
    # offset in inches: below the axis label for any height of the panel
    below = axes.transAxes + ScaledTranslation(-0.75, -0.5, axes.figure.dpi_scale_trans)
    options: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": below, "borderpad": 0}
    options |= {"handlelength": 2.4, "columnspacing": 0.8, "handletextpad": 0.5, "labelspacing": 0.3}
    style.legend(axes, fontsize=8, ncols=panel.legend_columns, **options)


def growth(points: Points) -> str:
    """The exponent of growth, if there are enough points.

    >>> growth([(512, 1), (1024, 4), (2048, 16)])
    '  N^2.00'
    """
    lengths, costs = zip(*points, strict=True)
    return f"  N^{fit_exponent(lengths, costs):.2f}" if len(set(lengths)) >= MIN_POINTS else ""


def assign_looks(lines: Iterable[Line]) -> dict[Line, Look]:
    """Color and line style by implementation, marker by variant, blocks and K; a dot if there is none of them."""
    lines = sorted(lines, key=sort_key)
    others = list(dict.fromkeys(line.implementation for line in lines if line.implementation not in COLORS))
    colors = COLORS | {name: OTHER_COLORS[place % len(OTHER_COLORS)] for place, name in enumerate(others)}
    sizes = sorted({line[1:] for line in lines if any(line[1:])})
    markers = {size: MARKERS[place % len(MARKERS)] for place, size in enumerate(sizes)}
    looks: dict[Line, Look] = {}
    for line in lines:
        color, line_style = colors[line.implementation]
        looks[line] = {"color": color, "linestyle": line_style, "marker": markers.get(line[1:], ".")}
    return looks


def sort_key(line: Line) -> tuple:
    """Known implementations first, in the order of `COLORS`."""
    return rank(line.implementation, list(COLORS)), *line


def rank(value: str, known: Sequence[str]) -> int:
    """Known values in their order; all others after them."""
    return known.index(value) if value in known else len(known)


# from rows to panels


def make_panels(rows: Sequence[Row]) -> list[Panel]:
    """Comparable rows share a panel; titles name the differences between panels of the same subject and step."""
    # tables may have the same point, as before and after a change
    split_tables = count(rows, "table") > count(rows)
    # and a table may have a point with several batch sizes; otherwise the batch follows from the length
    split_batches = count(rows, "table", "batch") > count(rows, "table")
    columns = [*SIZES, *["batch"] * split_batches, *["table"] * split_tables]
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["subject"], row["step"], *(row[column] for column in columns)].append(row)
    panels = []
    for key in sorted(groups, key=lambda key: (rank(key[0], SUBJECTS), rank(key[1], STEPS), *key[2:])):
        found = zip(*(other[2:] for other in groups if other[:2] == key[:2]), strict=True)
        sizes = zip(columns, key[2:], found, strict=True)
        differing = [describe_size(column, value) for column, value, others in sizes if value and len(set(others)) > 1]
        panels += make_pair(", ".join([*key[:2], *differing]), groups[key])
    return panels


def count(rows: Iterable[Row], *more: str) -> int:
    """The number of points, told apart by `more` columns, too."""
    return len({tuple(row[column] for column in (*POINT, *SIZES, *more)) for row in rows})


def describe_size(column: str, value: str) -> str:
    """
    >>> describe_size("hidden_size", "512"), describe_size("num_layers", "2"), describe_size("num_layers", "1")
    ('hidden size 512', '2 layers', '1 layer')
    """
    return fill_template(DESCRIPTIONS[column], value)


def fill_template(template: str, value: str) -> str:
    """
    >>> fill_template("{} threads", "2"), fill_template("{} threads", "1")
    ('2 threads', '1 thread')
    """
    text = template.format(value)
    return text.removesuffix("s") if value == "1" else text


def make_pair(title: str, rows: list[Row]) -> list[Panel]:
    """Time and memory, if they were measured; per example where long inputs came in smaller batches."""
    per_example = len(values(rows, "batch")) > 1
    panels = []
    for unit, status, cost in (("time", "status", "seconds_median"), ("memory", "memory_status", "peak_mib")):
        name = f"{title}: {unit} per example" if per_example else f"{title}: {unit}"
        if lines := make_lines(rows, status, cost, per_example):
            panels.append(Panel(textwrap.fill(name, 40, break_on_hyphens=False), unit, lines))
    return panels


def make_lines(rows: list[Row], status: str, cost: str, per_example: bool) -> dict[Line, Points]:
    """(length, cost) of what was measured, by length; a cost of zero is below what can be measured."""
    lines: dict[Line, Points] = defaultdict(list)
    for row in rows:
        if row[status] == OK and (value := read_number(row, cost)) > 0:
            sizes = (int(read_number(row, name)) if row[name] else 0 for name in ("block_length", "projected_length"))
            examples = read_number(row, "batch") if per_example else 1.0
            line = Line(row["implementation"], row["variant"], *sizes)
            lines[line].append((read_number(row, "length"), value / examples))
    return {line: sorted(lines[line]) for line in sorted(lines, key=sort_key)}


# the footnote


def describe_setup(rows: Sequence[Row]) -> str:
    """Sizes, machine, versions and dates of the rows; differences between machines and versions are named."""
    sentences = [", ".join(filter(None, (common_size(rows, column) for column in ("batch", *SIZES))))]
    for what, columns, others in (("machines", MACHINE, []), ("versions", VERSIONS, differing_packages(rows))):
        facts = {column: found for column in columns if (found := values(rows, column))}
        different = [f"{column} {' / '.join(found)}" for column, found in facts.items() if len(found) > 1] + others
        if different:
            sentences.append(f"The rows come from different {what}: {'; '.join(different)}")
        else:
            sentences.append(
                ", ".join(filter(None, (fill_template(columns[column], *facts[column]) for column in facts)))
            )
    dates = values(rows, "date")
    sentences.append(f"{dates[0]} to {dates[-1]}" if len(dates) > 1 else "".join(dates))
    return ". ".join(filter(None, sentences)) + "."


def common_size(rows: Sequence[Row], column: str) -> str:
    """A size that all rows, or all rows of each subject, have in common; empty if the titles give it."""
    found = values(rows, column)
    if len(found) < 2:
        return "".join(describe_size(column, value) for value in found)
    if column == "batch":
        return f"batches of {min(map(int, found))} to {max(map(int, found))}"
    subjects = values(rows, "subject")
    by_subject = {subject: values([row for row in rows if row["subject"] == subject], column) for subject in subjects}
    if any(len(several) > 1 for several in by_subject.values()):
        return ""
    return " / ".join(f"{name}: {describe_size(column, value)}" for name, each in by_subject.items() for value in each)


def values(rows: Iterable[Row], column: str) -> list[str]:
    """The different values in a column, without empty ones."""
    return sorted({row[column] for row in rows} - {""})


def differing_packages(rows: Sequence[Row]) -> list[str]:
    """Implementations measured in several versions of their package, with the same backend."""
    versions: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        versions[row["implementation"], row["backend"]].add(row["package"])
    return [f"{name} {' / '.join(sorted(found))}" for (name, _), found in sorted(versions.items()) if len(found) > 1]
