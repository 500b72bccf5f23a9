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
# columns that are equal for all rows of a panel, with their labels
SIZES = {
    **{"hidden_size": "hidden size", "num_heads": "heads", "num_layers": "layers", "sharing": "sharing"},
    **{"target_length": "targets of", "backend": "", "device": ""},
}
MACHINE = ("cpu", "cores", "threads", "memory_gib", "system")
VERSIONS = ("linformer-kit", "torch", "transformers", "python", "code")
SUBJECTS = ("layer", "causal-layer", "encoder", "encoder-decoder", "causal-lm")
STEPS = ("forward", "training", "generation", "reading", "decoding")
COLUMNS = (
    *("subject", "step", "implementation", "variant", "length", "projected_length", "block_length", "batch"),
    *("status", "seconds_median", "memory_status", "peak_mib", "package", "date", *SIZES, *MACHINE, *VERSIONS),
)

Tables = Mapping[str, list[Row]]


class Line(NamedTuple):
    """A line of a panel."""

    implementation: str
    variant: str = ""  # such as the projection
    projected_length: int | None = None  # or the slots of a block
    block_length: int | None = None

    @property
    def name(self) -> str:
        name = f"{self.implementation}, {self.variant}" if self.variant else self.implementation
        if self.projected_length is None:
            return name
        if self.block_length is None:
            return f"{name} K={self.projected_length}"
        return f"{name} {self.block_length}→{self.projected_length}"

    @property
    def sizes(self) -> tuple[str, int, int]:
        """The sizes that the marker stands for."""
        return self.variant, self.block_length or 0, self.projected_length or 0


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


def complete_rows(rows: Iterable[Row]) -> list[Row]:
    """Rows with every column that is drawn; columns that an older table lacks are empty."""
    return [{**dict.fromkeys(COLUMNS, ""), **row} for row in rows]


def draw_costs(tables: Tables) -> "Figure":
    """A time and a memory panel for each subject and step, with the exponents of growth in the legends."""
    tables = {name: complete_rows(rows) for name, rows in tables.items()}
    panels = make_panels(tables)
    if not panels:
        raise UserError(f"no point of {', '.join(tables)} was measured: {explain_empty(tables)}")
    looks = assign_looks({line for panel in panels for line in panel.lines})
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    # the legend is below each panel, where it hides no line
    height = 3.3 + 0.16 * max(-(-len(panel.lines) // panel.legend_columns) for panel in panels)
    figure, all_axes = style.new_figure(rows, columns, width=9.5 if columns == 2 else 6.0, height=height)
    for axes, panel in zip(all_axes, panels, strict=False):
        draw_panel(axes, panel, looks)
    for axes in all_axes[len(panels) :]:
        axes.remove()
    # enough space between a title and the legend above it
    figure.get_layout_engine().set(h_pad=0.13)  # type: ignore[union-attr, call-arg]
    note = describe_setup([row for rows in tables.values() for row in rows])
    style.footnote(figure, textwrap.fill(note, 63 * columns))
    return figure


def explain_empty(tables: Tables) -> str:
    """Why there is nothing to draw."""
    if any(OK in (row["status"], row["memory_status"]) for rows in tables.values() for row in rows):
        return "all times and memories are 0, which is below what can be measured"
    return f"no row has the status {OK!r}"


def draw_panel(axes: "Axes", panel: Panel, looks: Mapping[Line, Look]) -> None:
    from matplotlib.transforms import ScaledTranslation

    named = dict(zip(panel.labels, panel.lines.values(), strict=True))
    look_of_name = {name: looks[line] for name, line in zip(named, panel.lines, strict=True)}
    style.cost_lines(axes, panel.title, named, look_of_name, panel.unit)
    # offset in inches: below the axis label for any height of the panel
    below = axes.transAxes + ScaledTranslation(-0.75, -0.5, axes.figure.dpi_scale_trans)
    options: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": below, "borderpad": 0}
    options |= {"handlelength": 2.4, "columnspacing": 0.8, "handletextpad": 0.5, "labelspacing": 0.3}
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, ncols=panel.legend_columns, frameon=False, fontsize=8, **options)


def growth(points: Points) -> str:
    """The exponent of growth, if there are enough points.

    >>> growth([(512, 1), (1024, 4), (2048, 16)])
    '  N^2.00'
    """
    lengths, costs = [length for length, _ in points], [cost for _, cost in points]
    return f"  N^{fit_exponent(lengths, costs):.2f}" if len(set(lengths)) >= MIN_POINTS else ""


def assign_looks(lines: Iterable[Line]) -> dict[Line, Look]:
    """Color and line style by implementation, marker by variant and K; a dot if there is neither."""
    lines = sorted(lines, key=sort_key)
    others = list(dict.fromkeys(line.implementation for line in lines if line.implementation not in COLORS))
    colors = COLORS | {name: OTHER_COLORS[place % len(OTHER_COLORS)] for place, name in enumerate(others)}
    sizes = sorted({line.sizes for line in lines} - {Line("").sizes})
    markers = {size: MARKERS[place % len(MARKERS)] for place, size in enumerate(sizes)}
    looks = {}
    for line in lines:
        color, line_style = colors[line.implementation]
        looks[line] = Look(color, markers.get(line.sizes, "."), line_style)
    return looks


def sort_key(line: Line) -> tuple:
    """Known implementations first, in the order of `COLORS`."""
    known = list(COLORS)
    place = known.index(line.implementation) if line.implementation in known else len(known)
    return place, line.implementation, *line.sizes


# from rows to panels


def make_panels(tables: Tables) -> list[Panel]:
    """Comparable rows share a panel; titles name the differences between panels of the same subject and step."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    split_tables, split_batches = have_common_points(tables), have_several_batches(tables)
    for name, rows in tables.items():
        for row in rows:
            batch, table = row["batch"] if split_batches else "", name if split_tables else ""
            groups[row["subject"], row["step"], *(row[size] for size in SIZES), batch, table].append(row)
    subjects = [*SUBJECTS, *dict.fromkeys(subject for subject, *_ in groups)]  # others in order of appearance
    panels = []
    for key in sorted(groups, key=lambda key: (subjects.index(key[0]), rank(key[1], STEPS), *key[2:])):
        alike = zip(*(other[2:] for other in groups if other[:2] == key[:2]), strict=True)
        labels = zip((*SIZES.values(), "batch", ""), key[2:], alike, strict=True)
        differing = [label_size(what, value) for what, value, values in labels if value and len(set(values)) > 1]
        panels += [panel for panel in make_pair(", ".join([*key[:2], *differing]), groups[key]) if panel.lines]
    return panels


def rank(value: str, known: Sequence[str]) -> tuple[int, str]:
    """Known values in their order, then the others."""
    return (known.index(value) if value in known else len(known)), value


def label_size(what: str, value: str) -> str:
    """
    >>> label_size("hidden size", "512"), label_size("layers", "2"), label_size("layers", "1"), label_size("", "cpu")
    ('hidden size 512', '2 layers', '1 layer', 'cpu')
    """
    if what in ("heads", "layers"):
        return f"{value} {what.removesuffix('s') if value == '1' else what}"
    return f"{what} {value}".strip()


def point_of(row: Row, *more: str) -> tuple[str, ...]:
    names = (
        "subject",
        "step",
        "implementation",
        "variant",
        "length",
        "projected_length",
        "block_length",
        *SIZES,
        *more,
    )
    return tuple(row[name] for name in names)


def have_common_points(tables: Tables) -> bool:
    """Whether several tables have the same point, as before and after a change."""
    points = [{point_of(row) for row in rows} for rows in tables.values()]
    return sum(map(len, points)) > len(set().union(*points))


def have_several_batches(tables: Tables) -> bool:
    """Whether a table has a point with several batch sizes; otherwise the batch follows from the length."""
    return any(
        len({point_of(row, "batch") for row in rows}) > len({point_of(row) for row in rows}) for rows in tables.values()
    )


def make_pair(title: str, rows: list[Row]) -> list[Panel]:
    """Time and memory; per example where long inputs came in smaller batches."""
    per_example = len({row["batch"] for row in rows}) > 1
    measured = (("time", "status", "seconds_median"), ("memory", "memory_status", "peak_mib"))
    each = " per example" if per_example else ""
    return [
        Panel(
            textwrap.fill(f"{title}: {unit}{each}", 40, break_on_hyphens=False),
            unit,
            make_lines(rows, status, cost, per_example),
        )
        for unit, status, cost in measured
    ]


def make_lines(rows: list[Row], status: str, cost: str, per_example: bool) -> dict[Line, Points]:
    """(length, cost) of what was measured, by length; a cost of zero is below what can be measured."""
    lines: dict[Line, Points] = defaultdict(list)
    for row in rows:
        if row[status] == OK and row["length"] and (value := read_number(row, cost)) > 0:
            lengths = (row[name] and int(read_number(row, name)) for name in ("projected_length", "block_length"))
            examples = read_number(row, "batch") if per_example and row["batch"] else 1.0
            line = Line(row["implementation"], row["variant"], *(length or None for length in lengths))
            lines[line].append((read_number(row, "length"), value / examples))
    return {line: sorted(lines[line]) for line in sorted(lines, key=sort_key)}


# the footnote


def describe_setup(rows: Sequence[Row]) -> str:
    """Sizes, machine, versions and dates of the rows; differences between machines and versions are named."""
    sizes = [describe_size(rows, size, label) for size, label in {"batch": "batch", **SIZES}.items()]
    sentences = [", ".join(size for size in sizes if size)]
    if machines := differing_columns(rows, MACHINE):
        sentences.append(f"The rows come from different machines: {'; '.join(machines)}")
    else:
        row = rows[0]
        sentences.append(
            f"{row['cpu']}, {row['cores']} cores, {row['threads']} threads, {row['memory_gib']} GiB, {row['system']}"
        )
    if versions := differing_columns(rows, VERSIONS) + differing_packages(rows):
        sentences.append(f"The rows come from different versions: {'; '.join(versions)}")
    else:
        sentences.append(", ".join(f"{name} {rows[0][name]}" for name in VERSIONS if name != "code" and rows[0][name]))
    dates = values(rows, "date")
    sentences.append(dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}")
    return ". ".join(sentence for sentence in sentences if sentence) + "."


def describe_size(rows: Sequence[Row], size: str, label: str) -> str:
    """A size that all rows, or all rows of each subject, have in common; empty if the titles give it."""
    found = values(rows, size)
    if len(found) == 1:
        return label_size(label, found[0]) if found[0] else ""
    if size == "batch":
        batches = [int(batch) for batch in found if batch]
        return f"batches of {min(batches)} to {max(batches)}"
    by_subject = {
        subject: values([row for row in rows if row["subject"] == subject], size) for subject in values(rows, "subject")
    }
    if any(len(several) > 1 for several in by_subject.values()):
        return ""
    return " / ".join(f"{subject}: {label_size(label, value)}" for subject, (value,) in by_subject.items() if value)


def values(rows: Iterable[Row], column: str) -> list[str]:
    return sorted({row[column] for row in rows})


def differing_columns(rows: Sequence[Row], columns: Iterable[str]) -> list[str]:
    """The columns that have several values, with these values."""
    return [f"{column} {' / '.join(found)}" for column in columns if len(found := values(rows, column)) > 1]


def differing_packages(rows: Sequence[Row]) -> list[str]:
    """Implementations measured in several versions of their package, with the same backend."""
    versions: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        versions[row["implementation"], row["backend"]].add(row["package"])
    return [f"{name} {' / '.join(sorted(found))}" for (name, _), found in sorted(versions.items()) if len(found) > 1]
