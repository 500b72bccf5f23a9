"""Tables of `linformer compare` on the report page."""

from ..csv_tables import Row, read_number
from ..formatting import format_duration, format_ratio, format_size
from ..plots.costs import OK, SIZES, values
from .tables import Cell, Table, heading, make_cell, make_table, parse_cell


def common_sizes(rows: list[Row]) -> str:
    """The sizes that all rows that have them have in common."""
    common = {name: found for name in SIZES if len(found := values(rows, name)) == 1}
    return ", ".join(f"{heading(name)} {value}" for name, (value,) in common.items())


def measurement_table(name: str, rows: list[Row]) -> Table:
    """Every row, with the cost of full attention, or of the baseline that is there, as a multiple of its own."""
    from ..bench.result_table import baseline_name, baseline_of

    def kind(row: Row) -> tuple[str, ...]:
        return row["subject"], row["step"], row["backend"], row["precision"]

    varying = [size for size in SIZES if len(values(rows, size)) > 1]
    kinds = dict.fromkeys(map(kind, rows))
    baselines = {each: baseline_name(row for row in rows if kind(row) == each) for each in kinds}
    names = " or ".join(dict.fromkeys(filter(None, baselines.values())))
    note = f"Ratios: {names} divided by this row, at the same subject, step, length, batch and sizes." if names else ""
    cells = (measurement(row, baseline_of(row, rows, baselines[kind(row)]), varying) for row in rows)
    return make_table(name, cells, note)


def measurement(row: Row, baseline: Row | None, varying: list[str]) -> dict[str, Cell]:
    return {
        "implementation": make_cell(row["implementation"]),
        "subject": make_cell(row["subject"]),
        "step": make_cell(row["step"]),
        "N": parse_cell(row["length"]),
        "K": parse_cell(row["projected_length"]),
        "block": parse_cell(row["block_length"]),
        "variant": make_cell(row["variant"]),
        "batch": parse_cell(row["batch"]),
        **{heading(size): parse_cell(row[size]) for size in varying},
        "status": Cell(row["status"] or "–", missing=not row["status"], bad=row["status"] != OK),
        "time": make_cell(measured(row, "seconds_median"), format_duration),
        "time ratio": make_cell(ratio(baseline, row, "seconds_median"), format_ratio),
        "fastest": make_cell(measured(row, "seconds_fastest"), format_duration),
        "slowest": make_cell(measured(row, "seconds_slowest"), format_duration),
        "rounds": parse_cell(row["rounds"]),
        "peak memory": peak_memory(row),
        "memory ratio": make_cell(ratio(baseline, row, "peak_mib"), format_ratio),
        "note": make_cell(row["note"]),
    }


def peak_memory(row: Row) -> Cell:
    """The peak, or why there is none."""
    peak = measured(row, "peak_mib")
    if peak is None and row["memory_status"] not in ("", OK):
        return Cell(row["memory_status"], missing=True, bad=True)
    return make_cell(peak, format_size)


def measured(row: Row, column: str) -> float | None:
    return read_number(row, column) if row[column] else None


def ratio(baseline: Row | None, row: Row, column: str) -> float | None:
    """The cost of the baseline divided by this one; None if one of them was not measured."""
    own, other = measured(row, column), measured(baseline, column) if baseline else None
    return other / own if own and other is not None else None


def machine_table(name: str, rows: list[Row]) -> Table:
    """Each combination of machine, versions and date, with the implementations measured there."""
    from ..bench.result_table import FACTS

    facts = [fact for fact in FACTS if fact not in SIZES or fact == "device"]
    combinations: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        combinations.setdefault(tuple(row[fact] for fact in facts), []).append(row["implementation"])
    shown = (
        {
            "implementations": Cell(", ".join(dict.fromkeys(implementations))),
            "points": make_cell(len(implementations)),
            **{heading(fact): parse_cell(value) for fact, value in zip(facts, found, strict=True)},
        }
        for found, implementations in combinations.items()
    )
    return make_table(name, shown)
