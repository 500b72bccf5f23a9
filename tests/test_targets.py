"""Targets: numbers are found in the right rows and judged right; the published tables follow from their CSVs."""

import csv
from pathlib import Path

import pytest
from rich.console import Console

from linformer_kit.bench import targets
from linformer_kit.bench.result_table import COLUMNS, read_points
from linformer_kit.bench.sweep import read_keys, read_sweep
from linformer_kit.bench.targets import Target
from linformer_kit.errors import UserError

ROOT = Path(__file__).parent.parent
FULL, OURS = {"implementation": "full-attention"}, {"implementation": "linformer-kit"}


def row(implementation, seconds, length=4096, **more):
    texts = {"subject": "encoder", "step": "forward", "implementation": implementation, "length": str(length)}
    texts["precision"] = "float32"
    return {**dict.fromkeys(COLUMNS, ""), **texts, "seconds_median": str(seconds), **more}


# seconds of a made-up forward pass, and multiply-adds
ROWS = [
    row("linformer-kit", 1.0, projected_length="128", multiply_adds="100"),
    row("linformer-kit", 2.0, projected_length="256", multiply_adds="150"),
    row("full-attention", 4.0, multiply_adds="500"),
    row("full-attention-eager", 6.0, multiply_adds="500"),
    row("longformer", 1.4),
    row("fnet", 0.5),
    row("gemm", 0.5, multiply_adds="80"),
    row("full-attention", "", length=8192, status="out of memory"),
    row("linformer-kit", 2.1, length=8192, projected_length="128", multiply_adds="200"),
    row("gemm", 0.5, length=8192, multiply_adds="50"),
    row("linformer-kit", 9.0, projected_length="128", phase="overhead", share="0.04"),
]


def found(**keys):
    lengths = keys.pop("lengths", [4096])
    return [tuple(result.values())[1:] for result in Target(name="x", **keys).results(ROWS, lengths)]


def test_a_ratio_is_judged_at_every_place():
    at = {"step": "forward", "length": 4096, "projected_length": [128, 256]}
    assert found(of=FULL, to=OURS, at=at, at_least=3) == [
        ("forward, N=4,096, K=128", "≥ 3.00×", "4.00×", "met"),
        ("forward, N=4,096, K=256", "≥ 3.00×", "2.00×", "missed"),
    ]
    assert found(of=OURS, to=FULL, at=at | {"projected_length": 128}, at_most=0.25)[0][1:] == (
        "≤ 0.25×",
        "0.25×",
        "met",
    )


def test_without_a_bound_or_without_a_number_nothing_is_judged():
    at = {"length": [4096, 8192], "projected_length": 128}
    assert found(of=FULL, to=OURS, at=at) == [
        ("N=4,096, K=128", "–", "4.00×", "reported"),
        ("N=8,192, K=128", "–", "", "not measured"),
    ]


def test_the_fastest_of_several_is_named():
    others = {"implementation": ["full-attention", "longformer", "bert"]}
    at = {"length": 4096, "projected_length": 128}
    assert found(of=others, to=OURS, at=at, at_least=1.5) == [
        ("N=4,096, K=128, against longformer", "≥ 1.50×", "1.40×", "missed")
    ]


def test_a_quantity_may_be_a_quotient_of_columns():
    at = {"length": 4096, "projected_length": 128}
    saved = {"quantity": "seconds/multiply_adds", "of": FULL, "to": OURS, "at": at, "at_least": 0.9, "unit": "%"}
    assert found(**saved)[0][2:] == ("80%", "missed")
    rate = {"quantity": "multiply_adds/seconds", "of": OURS, "at": at, "unit": " MB/s"}
    assert found(**rate)[0][2:] == ("100.00 MB/s", "reported")


def test_the_lowest_and_the_exponent_over_lengths():
    share = {"quantity": "multiply_adds/seconds", "of": OURS, "to": {"implementation": "gemm"}, "unit": "%"}
    at = {"length": 4096, "projected_length": 128}
    lowest = {**share, "at": at, "over_lengths": "lowest"}
    assert found(**lowest, lengths=[4096, 8192]) == [("N≥4,096, K=128", "–", "62%", "reported")]
    assert found(**lowest, lengths=[4096, 8192, 16384])[0][3] == "not measured"  # not before all lengths are
    exponent = {"of": OURS, "at": {"projected_length": 128}, "over_lengths": "exponent", "unit": "", "at_most": 1.1}
    assert found(**exponent, lengths=[4096, 8192]) == [("N=4,096–8,192, K=128", "≤ 1.10", "1.07", "met")]
    assert found(**exponent, lengths=[4096, 8192, 16384])[0][3] == "not measured"


def test_a_window_is_found_by_its_variant():
    rows = [
        *(
            row(name, seconds, variant=variant, projected_length=K)
            for name, variant, K, seconds in (
                ("linformer-kit", "", "128", 1.0),
                ("linformer-kit", "window 128", "128", 2.0),
                ("linformer-kit", "window 128", "0", 1.5),
                ("longformer", "window 128", "", 3.0),
                ("longformer", "", "", 4.0),
            )
        ),
    ]
    window, at = {"variant": "window 128"}, {"length": 4096, "projected_length": [128, 0]}
    target = Target(name="x", of={"implementation": "longformer", **window}, to={**OURS, **window}, at=at)
    assert [result["measured"] for result in target.results(rows, [4096])] == ["1.50×", "2.00×"]


def test_a_phase_is_judged_like_the_whole():
    overhead = {"quantity": "share", "of": {**OURS, "phase": "overhead"}, "at_most": 0.05, "unit": "%"}
    assert found(**overhead) == [("", "≤ 5%", "4%", "met")]


def test_a_target_that_matches_several_rows_is_refused():
    with pytest.raises(UserError, match="the target 'x' matches 2 rows of linformer-kit; add key columns"):
        found(of=OURS, at={"length": 4096})


SWEEPS = [path for path in sorted((ROOT / "benchmarks").glob("*.yaml")) if "targets:" in path.read_text()]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_published_table_of_targets_follows_from_the_csv(path, tmp_path):
    sweep = read_sweep(read_keys(path))
    rows = read_points(ROOT / sweep.output, phases=True)
    targets.publish(sweep.targets, rows, sweep.lengths, tmp_path / "targets.csv", Console(quiet=True))
    published = (ROOT / sweep.output).with_name(f"{path.stem}_targets.csv").read_text(encoding="utf-8")
    assert (tmp_path / "targets.csv").read_text(encoding="utf-8") == published
    assert "not measured" not in published
    with (tmp_path / "targets.csv").open(newline="") as file:
        assert {row["result"] for row in csv.DictReader(file)} <= {"met", "missed", "reported"}
