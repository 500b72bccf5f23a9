"""The benchmark of learning: runs are those of `linformer train`, numbers are those of the runs, and what was run is kept."""

import csv
import dataclasses
import gzip
import json
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import typer
import yaml

pytest.importorskip("datasets", reason='needs pip install "linformer-kit[bench,train]"')

from training_zoo import running_lines

from linformer_kit import LinformerForMaskedLM
from linformer_kit.errors import UserError
from linformer_kit.training.config import load_config

ROOT = Path(__file__).parent.parent
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")  # which is no package
    learning, learning_summary, tables = (
        import_module(name) for name in ("learning", "learning_summary", "learning_tables")
    )

CONFIG = """
task: masked-lm
model: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, max_position_embeddings: 24}
data: {path: nowhere}
tokenizer: {kind: words, min_frequency: 1}
training: {steps: 3, batch_size: 4, log_every: 1}
"""


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def small(tmp_path):
    """A table of two variants, and its data."""
    (tmp_path / "counting.yaml").write_text(CONFIG)
    folder = tmp_path / "data" / "numbers"
    folder.mkdir(parents=True)
    for split, lines in (("train", 60), ("valid", 10), ("test", 10)):
        with gzip.open(folder / f"{split}.txt.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(running_lines(lines)) + "\n")
    return tables.LearningTable(
        name="small",
        title="Counting",
        config=str(tmp_path / "counting.yaml"),
        metric="perplexity",
        data="numbers",
        settings=("training.evaluate_every=2",),
        variants={tables.FULL: ("model.attention=full",), "K=4": ("model.projected_length=4",)},
        recommended="K=4",
    )


@pytest.fixture
def call(tmp_path, small, monkeypatch):
    def call(*names, **options):
        monkeypatch.setitem(learning.TABLES, "small", options.pop("table", small))
        given = {
            "data": tmp_path / "data",
            "output": tmp_path / "results",
            "runs": tmp_path / "runs",
            "at_once": 2,
            "summary": False,
        }
        learning.main(options.pop("names", list(names) or ["small"]), **given | options)

    yield call
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.slow
def test_a_table_is_run_kept_and_drawn(tmp_path, small, call, monkeypatch):
    call()
    results = tmp_path / "results" / "learning"
    found = {row["variant"]: row for row in rows_of(results / "small.csv")}
    assert set(found) == {tables.FULL, "K=4"}
    for name, row in found.items():
        (run,) = (tmp_path / "runs" / "small").glob(f"{name.replace(' ', '-')}-seed0-{row['fingerprint']}")
        evaluation, result = (json.loads((run / f"{each}.json").read_text()) for each in ("evaluation", "result"))
        assert evaluation["split"] == "test"
        assert float(row["test_perplexity"]) == pytest.approx(evaluation["perplexity"], rel=1e-4)
        assert float(row["validation"]) == pytest.approx(result["validation_perplexity"], rel=1e-4)
        model = LinformerForMaskedLM.from_pretrained(run / "model")
        assert int(row["parameters"]) == sum(weight.numel() for weight in model.parameters())
        assert model.config.projection == ("linear" if name == "K=4" else "none")
        # weights, gradients and the two moments of AdamW at least, and less than all of Python
        assert 16 * int(row["parameters"]) / 2**20 < float(row["peak_mib"]) < result["peak_mib"] / 2
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validation = [(line["step"], line["validation_perplexity"]) for line in metrics if "validation_loss" in line]
    curve = [
        (int(row["step"]), float(row["metric"]))
        for row in rows_of(results / "small_curves.csv")
        if row["variant"] == name
    ]
    assert [step for step, _ in validation] == [2, 3]
    assert curve == [(step, pytest.approx(value, rel=1e-4)) for step, value in validation]

    summary = {row["variant"]: row for row in rows_of(results / "small_summary.csv")}
    ratio = float(found["K=4"]["test_perplexity"]) / float(found[tables.FULL]["test_perplexity"])
    assert summary["K=4"]["beside full attention"] == f"{ratio - 1:+.1%}"
    assert summary[tables.FULL]["beside full attention"] == ""
    assert (results / "small.png").stat().st_size > 10_000

    (overview,) = rows_of(results / "overview.csv")
    assert overview["measured with Linformer"] == summary["K=4"]["measured perplexity"]
    assert overview["measured with full attention"] == summary[tables.FULL]["measured perplexity"]
    assert overview["difference"] == summary["K=4"]["beside full attention"]
    seconds = [float(found[variant]["seconds_per_epoch"]) for variant in (tables.FULL, "K=4")]
    assert overview["times as fast"] == f"{seconds[0] / seconds[1]:.2f}"
    assert (results / "overview.png").stat().st_size > 10_000

    # nothing is run twice; a run is no longer needed once it is in the table
    monkeypatch.setattr(learning.Processes, "run", lambda *_: pytest.fail("was run again"))
    before = (results / "small.csv").read_bytes()
    call()
    assert (results / "small.csv").read_bytes() == before
    (results / "small.png").unlink()
    call(summary=True)
    assert (results / "small.png").exists()


@pytest.mark.slow
def test_a_stopped_table_goes_on_from_its_checkpoints(tmp_path, small):
    """SIGTERM while a run is under way: it saves its last step; the same command goes on from there."""
    path = tmp_path / "counting.yaml"
    path.write_text(path.read_text().replace("steps: 3", "steps: 1500"))
    code = """
import sys
from pathlib import Path
import typer
sys.path.insert(0, sys.argv.pop(1))
import learning
folder = Path(sys.argv.pop(1))
sizes = dict(name="small", title="", config=str(folder / "counting.yaml"), metric="perplexity", data="numbers")
learning.TABLES["small"] = learning.LearningTable(**sizes, variants={"K=8": ("model.projected_length=8",)}, recommended="K=8")
given = dict(data=folder / "data", output=folder / "results", runs=folder / "runs", at_once=1, summary=False)
typer.run(lambda: learning.main(["small"], **given))
"""
    command = [sys.executable, "-c", code, str(ROOT / "benchmarks"), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/small/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; runs go on from their last checkpoints" in said
    (log,) = (tmp_path / "runs" / "small").glob("*.log")
    (step,) = re.findall(r"Stopped and saved at step (\d+) of 1500", log.read_text())
    results = tmp_path / "results" / "learning" / "small.csv"
    assert not results.exists()
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert f"goes on at {step}" in log.read_text()
    assert [row["steps"] for row in rows_of(results)] == ["1500"]


@pytest.mark.slow
def test_a_table_goes_on_from_the_models_of_another(tmp_path, small, call, monkeypatch):
    """The runs it starts from are run if their models are not there; each variant starts from its own twin."""
    longer = dataclasses.replace(
        small, name="longer", starts_from=("small", None), settings=("model.max_position_embeddings=48",)
    )
    monkeypatch.setitem(learning.TABLES, "longer", longer)
    call("longer")
    results = tmp_path / "results" / "learning"
    assert [len(rows_of(results / f"{name}.csv")) for name in ("small", "longer")] == [2, 2]
    for row in rows_of(results / "longer.csv"):
        (run,) = (tmp_path / "runs" / "longer").glob(f"*-{row['fingerprint']}")
        start = yaml.safe_load((run / "config.yaml").read_text())["model"]["from"]
        assert Path(start).parent.name.startswith(row["variant"].replace(" ", "-"))
        model = LinformerForMaskedLM.from_pretrained(run / "model")
        assert model.config.max_position_embeddings == 48
        assert model.config.hidden_size == 16
        assert model.config.projection == ("linear" if row["variant"] == "K=4" else "none")

    # other models to start from make it another table, which needs them again
    before = {row["fingerprint"] for row in rows_of(results / "longer.csv")}
    monkeypatch.setitem(learning.TABLES, "small", dataclasses.replace(small, settings=("training.evaluate_every=3",)))
    jobs = learning.jobs_of([longer], tmp_path / "data", tmp_path / "runs")
    assert not before & {job.fingerprint for job in jobs}
    there = {name: learning.table_in(results, learning.TABLES[name]) for name in ("small", "longer")}
    missing = [(job.table.name, job.variant) for job in learning.missing_of(jobs, there)]
    assert missing == [("small", tables.FULL), ("longer", tables.FULL), ("small", "K=4"), ("longer", "K=4")]


def test_a_run_counts_by_its_settings_not_by_its_place(tmp_path, small):
    def prints(table, data="data"):
        (tmp_path / data).mkdir(exist_ok=True)
        (tmp_path / data / "numbers").mkdir(exist_ok=True)
        return {job.variant: job.fingerprint for job in learning.jobs_of([table], tmp_path / data, tmp_path / "runs")}

    first = prints(small)
    assert len(set(first.values())) == 2
    assert prints(small, "elsewhere") == first
    assert prints(dataclasses.replace(small, seeds=3)) == first
    joined = learning.Job(dataclasses.replace(small, sentences=2), "K=4", 0, None, tmp_path)
    assert joined.fingerprint != dataclasses.replace(joined, table=small).fingerprint == first["K=4"]
    assert not set(prints(dataclasses.replace(small, settings=("training.evaluate_every=3",))).values()) & set(
        first.values()
    )
    (tmp_path / "counting.yaml").write_text(CONFIG.replace("steps: 3", "steps: 4"))
    assert not set(prints(small).values()) & set(first.values())


def test_the_first_seeds_come_first(tmp_path, small):
    table = dataclasses.replace(small, seeds=2, repeated={"K=4": 3})
    jobs = [(job.variant, job.seed) for job in learning.jobs_of([table], tmp_path / "data", tmp_path / "runs")]
    full, shortened = tables.FULL, "K=4"
    assert jobs == [(full, 0), (shortened, 0), (full, 1), (shortened, 1), (shortened, 2)]


@pytest.mark.parametrize("table", learning.TABLES.values(), ids=lambda table: table.name)
def test_every_variant_of_the_published_tables_is_a_configuration(table):
    assert {tables.FULL, table.recommended} <= set(table.variants)
    assert set(table.repeated) | table.beside.keys() | set(table.beside.values()) - {None} <= set(table.variants)
    assert table.sentences == 1 or not table.is_on_hub  # what is joined is a copy
    if table.starts_from is not None:
        name, other = table.starts_from
        start = tables.TABLES[name]
        assert {other or variant for variant in table.variants} <= set(start.variants)
    trees = [load_config(table.config, [*table.settings, *given]) for given in table.variants.values()]
    assert len({str(tree) for tree in trees}) == len(trees)


def test_mistakes_are_told(tmp_path, call, capsys):
    for names, options, said in (
        (["smal"], {}, "there is no table smal; there are masked_lm"),
        (["small"], {"data": tmp_path / "nowhere"}, "has no folder numbers; the table small needs it"),
    ):
        with pytest.raises(typer.Exit):
            call(*names, **options)
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_failed_run_said_is_told(tmp_path, small, call, capsys):
    (tmp_path / "data" / "numbers" / "test.txt.gz").unlink()
    with pytest.raises(typer.Exit):
        call()
    assert "the data of the run has no test split" in capsys.readouterr().err


def test_sentences_are_joined_split_by_split(tmp_path):
    """Held-out documents have so many sentences; those to train on have one, two and three in turn, none lost or doubled."""
    source = tmp_path / "pairs"
    source.mkdir()
    for split, count in (("train", 15), ("valid", 7), ("test", 3)):
        with gzip.open(source / f"{split}.tsv.gz", "wt", encoding="utf-8") as file:
            file.write("".join(f"{split} {number}.\tSatz „{number}“.\n" for number in range(count)))
    folder = learning.documents(source, tmp_path / "made", 3)
    read = {
        split: (folder / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
        for split in ("train", "valid", "test")
    }
    assert read["valid"][0] == "valid 0. valid 1. valid 2.\tSatz „0“. Satz „1“. Satz „2“."
    assert [len(read[split]) for split in ("valid", "test")] == [2, 1]
    sizes = [line.count("Satz") for line in read["train"]]
    assert sizes == [1, 2, 3, 1, 2, 3, 1, 2]
    numbers = [re.findall(r"\d+", line) for line in read["train"]]
    assert [found[: len(found) // 2] for found in numbers] == [
        found[len(found) // 2 :] for found in numbers
    ]  # pairs stay pairs
    order = [int(number) for found in numbers for number in found[: len(found) // 2]]
    assert sorted(order) == list(range(sum(sizes)))
    assert sum(after == before + 1 for before, after in pairwise(order)) < 5  # shuffled: neighbours were alike
    made = (folder / "train.tsv").stat().st_mtime_ns
    assert learning.documents(source, tmp_path / "made", 3) == folder
    assert (folder / "train.tsv").stat().st_mtime_ns == made  # nothing to prepare again


def test_rows_of_other_settings_are_left_out_of_summaries(tmp_path, small, call, capsys):
    path = tmp_path / "results" / "learning" / "small.csv"
    rows = learning.table_in(path.parent, small)
    path.parent.mkdir(parents=True)
    (full, shortened) = learning.jobs_of([small], tmp_path / "data", tmp_path / "runs")
    numbers = {"parameters": 10, "test_perplexity": 2.0, "seconds_per_epoch": 1.0}
    rows.put(
        [{**full.key, "fingerprint": full.fingerprint, **numbers}, {**shortened.key, "fingerprint": "old", **numbers}]
    )
    curve = {"seed": 0, "step": 1, "tokens": 10, "loss": 1.0, "metric": 2.0}
    learning.curves_in(path.parent, small).put([{"variant": tables.FULL, **curve}])
    call(summary=True)
    assert "small: K=4, seed 0, was run with other settings and is left out" in capsys.readouterr().out
    assert [row["variant"] for row in rows_of(path.parent / "small_summary.csv")] == [tables.FULL]
    assert len(rows_of(path)) == 2  # nothing is lost


def test_what_differs_in_more_than_the_attention_is_not_set_beside_it(tmp_path, small):
    found = {tables.FULL: 10.0, "K=4": 11.0, "long": 12.0, "bare full": 20.0, "bare": 21.0}
    beside = {"long": None, "bare full": None, "bare": "bare full"}
    table = dataclasses.replace(small, variants=dict.fromkeys(found, ()), beside=beside)
    rows = learning.table_in(tmp_path, table)
    rows.put([{"variant": name, "seed": 0, "parameters": 1, "test_perplexity": value} for name, value in found.items()])
    shown = {row["variant"]: row["beside full attention"] for row in learning_summary.summary_of(table, rows)}
    assert shown == {tables.FULL: "", "K=4": "+10.0%", "long": "", "bare full": "", "bare": "+5.0%"}


def test_only_like_seeds_are_compared(tmp_path, small):
    rows = learning.table_in(tmp_path, small)
    found = {(tables.FULL, 0): 10.0, (tables.FULL, 1): 20.0, ("K=4", 1): 21.0}
    rows.put(
        [
            {"variant": variant, "seed": seed, "parameters": 1, "test_perplexity": value, "seconds_per_epoch": 1.0}
            for (variant, seed), value in found.items()
        ]
    )
    full, shortened = learning_summary.summary_of(small, rows)
    assert full["measured perplexity"] == "15.00 ± 5.00"
    assert shortened["beside full attention"] == "+5.0%"
    (overview,) = learning_summary.overview_of([(small, rows)])
    assert (overview["measured with full attention"], overview["difference"]) == ("20.00", "+5.0%")


def test_means_and_spreads():
    assert learning_summary.in_words([20.0, 20.5, 19.75], "{:.2f}") == "20.08 ± 0.38"
    assert learning_summary.in_words([0.85], "{:.2%}") == "85.00%"
    assert learning_summary.in_words([], "{:.2f}") == ""
    assert learning_summary.difference("perplexity", [21.0], [20.0]) == "+5.0%"
    assert learning_summary.difference("accuracy", [0.85], [0.86, 0.84]) == "+0.00"
    assert learning_summary.difference("bleu", [20.0], [20.5]) == "-0.50"


def test_data_that_must_be_local_is_asked_for(tmp_path, small):
    table = dataclasses.replace(small, is_on_hub=False)
    with pytest.raises(UserError, match="needs local data: give --data FOLDER, with numbers/ in it"):
        learning.jobs_of([table], None, tmp_path)


def test_without_local_data_what_needs_it_is_left_out(small, call, monkeypatch, capsys):
    monkeypatch.setattr(
        learning, "TABLES", {"small": small, "local": dataclasses.replace(small, name="local", is_on_hub=False)}
    )
    run = []
    monkeypatch.setattr(learning, "run_all", lambda jobs, *_: run.extend(job.table.name for job in jobs))
    call(names=None, data=None)
    assert set(run) == {"small"}
    assert "left out, because they need --data FOLDER: local" in capsys.readouterr().out
    call(names=None, data=None, summary=True)  # which needs no data
    assert "left out" not in capsys.readouterr().out
