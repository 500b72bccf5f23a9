"""Time and memory against length, from tables of `linformer compare`."""

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..bench.measure import OK, fit_exponent
from ..errors import UserError
from ..report.inputs import Row, number
from . import style
from .style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, Look, Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# colour and style say which implementation it is; others take the rest of the cycle, in the order in which they come
COLOURS = {
    "linformer-kit": (VERMILION, "-"),
    "linformer-kit-none": (GREY, "-"),
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
OTHER_COLOURS = tuple(
    (colour, style) for style in ("-.", ":") for colour in (GREEN, BLUE, VERMILION, PURPLE, ORANGE, SKY, GREY)
)
# the marker says which K; a point stands where nothing is projected
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
FEWEST_POINTS = 3  # two points lie on a line whatever they are
# what costs of one panel have in common, with the words for it
SIZES = {
    **{"hidden_size": "hidden size", "num_heads": "heads", "num_layers": "layers", "sharing": "sharing"},
    **{"target_length": "targets of", "device": ""},
}
MACHINE = ("cpu", "cores", "threads", "memory_gib", "system")
VERSIONS = ("linformer-kit", "torch", "transformers", "python", "code")
SUBJECTS = ("layer", "encoder", "encoder-decoder")
STEPS = ("forward", "training", "generation")


class Line(NamedTuple):
    """What has a line of its own in a panel."""

    implementation: str
    projected_length: int | None

    @property
    def name(self) -> str:
        return (
            self.implementation if self.projected_length is None else f"{self.implementation} K={self.projected_length}"
        )


@dataclass(frozen=True)
class Panel:
    """One kind of cost of one step of one subject."""

    title: str
    unit: str  # "time" or "memory"
    lines: dict[Line, Points]


def draw_costs(tables: Mapping[str, list[Row]]) -> "Figure":
    """Two panels per subject and step, time and memory, with the exponents of growth in their legends."""
    panels = panels_of(tables)
    if not panels:
        raise UserError(f"no point of {', '.join(tables)} was measured: {why_nothing(tables)}")
    looks = looks_of({line for panel in panels for line in panel.lines})
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    # a legend below each panel: beside them there is no room, and within it would hide the lines
    height = 3.3 + 0.16 * -(-max(len(panel.lines) for panel in panels) // 2)
    figure, all_axes = style.new_figure(rows, columns, width=9.5 if columns == 2 else 6.0, height=height)
    for axes, panel in zip(all_axes, panels, strict=False):
        draw_panel(axes, panel, looks)
    for axes in all_axes[len(panels) :]:
        axes.remove()
    # nearer, a title would seem to belong to the legend above it
    figure.get_layout_engine().set(h_pad=0.13)  # type: ignore[union-attr, call-arg]
    style.footnote(figure, textwrap.fill(facts([row for rows in tables.values() for row in rows]), 63 * columns))
    return figure


def why_nothing(tables: Mapping[str, list[Row]]) -> str:
    """Why there is nothing to draw."""
    if any(OK in (row["status"], row["memory_status"]) for rows in tables.values() for row in rows):
        return "all times and memories are 0, which is below what can be measured"
    return f"no row has the status {OK!r}"


def draw_panel(axes: "Axes", panel: Panel, looks: Mapping[Line, Look]) -> None:
    from matplotlib.transforms import ScaledTranslation

    named = {line.name + growth(points): points for line, points in panel.lines.items()}
    look_of_name = {name: looks[line] for name, line in zip(named, panel.lines, strict=True)}
    style.cost_lines(axes, panel.title, named, look_of_name, panel.unit)
    # in inches from the corner: below the words of the axis, however high the panel is
    below = axes.transAxes + ScaledTranslation(-0.75, -0.5, axes.figure.dpi_scale_trans)
    axes.legend(
        *axes.get_legend_handles_labels(),
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=below,
        ncols=2,
        frameon=False,
        fontsize=8,
        handlelength=2.4,
        columnspacing=0.8,
        handletextpad=0.5,
        borderpad=0,
        labelspacing=0.3,
    )


def growth(points: Points) -> str:
    """The exponent of growth, where there are points enough for one.

    >>> growth([(512, 1), (1024, 4), (2048, 16)])
    '  N^2.00'
    """
    lengths, costs = [length for length, _ in points], [cost for _, cost in points]
    return f"  N^{fit_exponent(lengths, costs):.2f}" if len(set(lengths)) >= FEWEST_POINTS else ""


def looks_of(lines: Iterable[Line]) -> dict[Line, Look]:
    """Colour and style by implementation, marker by K."""
    lines = sorted(lines, key=place_of)
    strangers = list(dict.fromkeys(line.implementation for line in lines if line.implementation not in COLOURS))
    colours = COLOURS | {name: OTHER_COLOURS[place % len(OTHER_COLOURS)] for place, name in enumerate(strangers)}
    lengths = sorted({line.projected_length for line in lines if line.projected_length is not None})
    markers: dict[int | None, str] = {length: MARKERS[place % len(MARKERS)] for place, length in enumerate(lengths)}
    looks = {}
    for line in lines:
        colour, style = colours[line.implementation]
        looks[line] = Look(colour, markers.get(line.projected_length, "."), style)
    return looks


def place_of(line: Line) -> tuple[int, str, int]:
    """Known implementations first, in the order of their looks."""
    known = list(COLOURS)
    place = known.index(line.implementation) if line.implementation in known else len(known)
    return place, line.implementation, line.projected_length or 0


# from rows to panels


def panels_of(tables: Mapping[str, list[Row]]) -> list[Panel]:
    """Rows that can be compared share a panel; what tells panels of a subject and step apart stands in their titles."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    tables_apart, batches_apart = have_common_points(tables), have_several_batches(tables)
    for name, rows in tables.items():
        for row in rows:
            batch, table = row["batch"] if batches_apart else "", name if tables_apart else ""
            groups[row["subject"], row["step"], *(row[size] for size in SIZES), batch, table].append(row)
    panels = []
    for key in sorted(groups, key=lambda key: (order(key[0], SUBJECTS), order(key[1], STEPS), *key[2:])):
        alike = [other for other in groups if other[:2] == key[:2]]
        words = zip(
            (*SIZES.values(), "batch", ""), key[2:], zip(*(other[2:] for other in alike), strict=True), strict=True
        )
        apart = [in_words(what, value) for what, value, all_values in words if value and len(set(all_values)) > 1]
        panels += [panel for panel in both_panels(", ".join([*key[:2], *apart]), groups[key]) if panel.lines]
    return panels


def order(value: str, known: Sequence[str]) -> tuple[int, str]:
    """Known values in their order, then the others."""
    return (known.index(value) if value in known else len(known)), value


def in_words(what: str, value: str) -> str:
    """
    >>> in_words("hidden size", "512"), in_words("layers", "2"), in_words("layers", "1"), in_words("", "cpu")
    ('hidden size 512', '2 layers', '1 layer', 'cpu')
    """
    if what in ("heads", "layers"):
        return f"{value} {what.removesuffix('s') if value == '1' else what}"
    return f"{what} {value}".strip()


def point_of(row: Row, *more: str) -> tuple[str, ...]:
    return tuple(
        row[name] for name in ("subject", "step", "implementation", "length", "projected_length", *SIZES, *more)
    )


def have_common_points(tables: Mapping[str, list[Row]]) -> bool:
    """Whether a point was measured in more than one table, as before and after a change: two numbers at one place of a line."""
    points = [{point_of(row) for row in rows} for rows in tables.values()]
    return sum(map(len, points)) > len(set().union(*points))


def have_several_batches(tables: Mapping[str, list[Row]]) -> bool:
    """Whether a table has a point in several batches; otherwise a batch follows from the length."""
    return any(
        len({point_of(row, "batch") for row in rows}) > len({point_of(row) for row in rows}) for rows in tables.values()
    )


def both_panels(title: str, rows: list[Row]) -> list[Panel]:
    """Time and memory; where long inputs came in smaller batches, per example."""
    per_example = len({row["batch"] for row in rows}) > 1
    measured = (("time", "status", "seconds_median"), ("memory", "memory_status", "peak_mib"))
    each = " per example" if per_example else ""
    return [
        Panel(textwrap.fill(f"{title}: {unit}{each}", 40), unit, lines_of(rows, status, cost, per_example))
        for unit, status, cost in measured
    ]


def lines_of(rows: list[Row], status: str, cost: str, per_example: bool) -> dict[Line, Points]:
    """(length, cost) of what was measured, by length; a cost of zero is below what could be measured."""
    lines: dict[Line, Points] = defaultdict(list)
    for row in rows:
        if row[status] == OK and (value := number(row, cost)) > 0:
            projected_length = int(number(row, "projected_length")) if row["projected_length"] else None
            share = number(row, "batch") if per_example else 1.0
            lines[Line(row["implementation"], projected_length)].append((number(row, "length"), value / share))
    return {line: sorted(lines[line]) for line in sorted(lines, key=place_of)}


# what the numbers depend on


def facts(rows: Sequence[Row]) -> str:
    """What the numbers depend on; and if rows come from different machines or versions, that they do, and which."""
    sizes = [one_or_several(rows, size, words) for size, words in {"batch": "batch", **SIZES}.items()]
    sentences = [", ".join(size for size in sizes if size)]
    if machines := differing(rows, MACHINE):
        sentences.append(f"The rows come from different machines: {'; '.join(machines)}")
    else:
        row = rows[0]
        sentences.append(
            f"{row['cpu']}, {row['cores']} cores, {row['threads']} threads, {row['memory_gib']} GiB, {row['system']}"
        )
    if versions := differing(rows, VERSIONS) + differing_packages(rows):
        sentences.append(f"The rows come from different versions: {'; '.join(versions)}")
    else:
        sentences.append(", ".join(f"{name} {rows[0][name]}" for name in VERSIONS if name != "code" and rows[0][name]))
    dates = values(rows, "date")
    sentences.append(dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}")
    return ". ".join(sentence for sentence in sentences if sentence) + "."


def one_or_several(rows: Sequence[Row], size: str, words: str) -> str:
    """A size that all rows have, or that all rows of a subject have; else it stands in the titles."""
    found = values(rows, size)
    if len(found) == 1:
        return in_words(words, found[0]) if found[0] else ""
    by_subject = {
        subject: values([row for row in rows if row["subject"] == subject], size) for subject in values(rows, "subject")
    }
    if size == "batch":
        return f"batches of {min(map(int, found))} to {max(map(int, found))}"
    if any(len(several) > 1 for several in by_subject.values()):
        return ""
    return " / ".join(f"{subject}: {in_words(words, value)}" for subject, (value,) in by_subject.items() if value)


def values(rows: Iterable[Row], column: str) -> list[str]:
    return sorted({row[column] for row in rows})


def differing(rows: Sequence[Row], columns: Iterable[str]) -> list[str]:
    """The columns that have several values, with these."""
    return [f"{column} {' / '.join(found)}" for column in columns if len(found := values(rows, column)) > 1]


def differing_packages(rows: Sequence[Row]) -> list[str]:
    """Implementations that were measured in several versions of their own packages."""
    names = values(rows, "implementation")
    found = {name: values([row for row in rows if row["implementation"] == name], "package") for name in names}
    return [f"{name} {' / '.join(versions)}" for name, versions in found.items() if len(versions) > 1]
