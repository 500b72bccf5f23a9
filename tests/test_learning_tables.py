"""Learning tables: runs are those of `linformer train`, numbers are those of the runs, and finished runs are kept."""

import csv
import gzip
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
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
from linformer_kit.plots.learning_table import draw_learning_overview, draw_learning_table
from linformer_kit.training.config import load_config

ROOT = Path(__file__).parent.parent
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")  # which is not a package
    learning, learning_summary = import_module("learning"), import_module("learning_summary")

FULL = learning_summary.FULL
PUBLISHED = learning.load_tables(learning.TABLES_FILE)
CONFIG = """
task: masked-lm
model:
  {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, max_position_embeddings: 24}
data: {path: nowhere}
tokenizer: {kind: words, min_frequency: 1}
training: {steps: 3, batch_size: 4, log_every: 1}
"""


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def small(tmp_path):
    """The YAML of a table with two variants; writes its configuration and data."""
    (tmp_path / "counting.yaml").write_text(CONFIG)
    folder = tmp_path / "data" / "numbers"
    folder.mkdir(parents=True)
    for split, lines in (("train", 60), ("valid", 10), ("test", 10)):
        with gzip.open(folder / f"{split}.txt.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(running_lines(lines)) + "\n")
    return {
        "title": "Counting",
        "config": str(tmp_path / "counting.yaml"),
        "metric": "perplexity",
        "data": "numbers",
        "settings": {"training.evaluate_every": 2},
        "variants": {
            FULL: {"settings": {"model.attention": "full"}},
            "K=4": {"settings": {"model.projected_length": 4}},
        },
        "recommended": "K=4",
    }


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Write tables to the file that the script reads, and load them."""

    def load(**tables):
        path = tmp_path / "tables.yaml"
        path.write_text(yaml.safe_dump(tables, sort_keys=False))
        monkeypatch.setattr(learning, "TABLES_FILE", path)
        return learning.load_tables(path)

    return load


@pytest.fixture
def call(tmp_path):
    def call(*names, **options):
        defaults = {"output": tmp_path / "results", "runs": tmp_path / "runs", "at_once": 2, "summary": False}
        learning.main(list(names), **{"data": tmp_path / "data", **defaults, **options})

    yield call
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.slow
def test_tables_are_run_stored_and_drawn(tmp_path, small, load, call, monkeypatch):
    """A table that starts from the models of another runs that one first."""
    longer = {**small, "start_from": "small", "settings": {"model.max_position_embeddings": 48}, "title": "Longer"}
    load(small=small, longer=longer)
    call("longer")
    results = tmp_path / "results" / "learning"
    assert [len(rows_of(results / f"{name}.csv")) for name in ("small", "longer")] == [2, 2]
    for row in rows_of(results / "longer.csv"):
        (run,) = (tmp_path / "runs" / "longer").glob(f"*-{row['fingerprint']}")
        start = yaml.safe_load((run / "config.yaml").read_text())["model"]["from"]
        assert Path(start).parent.name.startswith(row["variant"].replace(" ", "-"))
        assert LinformerForMaskedLM.from_pretrained(run / "model").config.max_position_embeddings == 48

    # nothing is run twice; a run is no longer needed once it is in the table
    monkeypatch.setattr(learning, "run_job", lambda *_: pytest.fail("was run again"))
    before = (results / "small.csv").read_bytes()
    call()
    assert (results / "small.csv").read_bytes() == before
    found = {row["variant"]: row for row in rows_of(results / "small.csv")}
    assert set(found) == {FULL, "K=4"}
    for name, row in found.items():
        (run,) = (tmp_path / "runs" / "small").glob(f"{name.replace(' ', '-')}-seed0-{row['fingerprint']}")
        evaluation, result = (json.loads((run / f"{each}.json").read_text()) for each in ("evaluation", "result"))
        assert evaluation["split"] == "test"
        assert float(row["test_perplexity"]) == pytest.approx(evaluation["perplexity"], rel=1e-4)
        assert float(row["validation"]) == pytest.approx(result["validation_perplexity"], rel=1e-4)
        model = LinformerForMaskedLM.from_pretrained(run / "model")
        assert int(row["parameters"]) == sum(weight.numel() for weight in model.parameters())
        assert model.config.projection == ("linear" if name == "K=4" else "none")
        # at least weights, gradients and the two moments of AdamW, and less than all of Python
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
    ratio = float(found["K=4"]["test_perplexity"]) / float(found[FULL]["test_perplexity"])
    assert summary["K=4"]["vs full attention, same seeds"] == f"{ratio - 1:+.1%}"
    assert summary[FULL]["vs full attention, same seeds"] == ""
    assert (results / "small.png").stat().st_size > 10_000

    overview, _ = rows_of(results / "overview.csv")
    assert overview["measured with Linformer"] == summary["K=4"]["measured perplexity"]
    assert overview["measured with full attention"] == summary[FULL]["measured perplexity"]
    assert overview["difference"] == summary["K=4"]["vs full attention, same seeds"]
    seconds = [float(found[variant]["seconds_per_epoch"]) for variant in (FULL, "K=4")]
    assert overview["times as fast"] == f"{seconds[0] / seconds[1]:.2f}"
    assert (results / "overview.png").stat().st_size > 10_000

    (results / "small.png").unlink()
    call(summary=True)
    assert (results / "small.png").exists()


@pytest.mark.slow
def test_a_stopped_table_resumes_from_its_checkpoints(tmp_path, small, load):
    """SIGTERM during a run saves its last step; the same command continues from there."""
    path = tmp_path / "counting.yaml"
    path.write_text(path.read_text().replace("steps: 3", "steps: 300"))
    table = {**small, "settings": {"training.evaluate_every": 300}, "variants": {FULL: {}}, "recommended": FULL}
    load(small=table)
    code = """
import sys
from pathlib import Path
import typer
sys.path.insert(0, sys.argv.pop(1))
import learning
folder = Path(sys.argv.pop(1))
learning.TABLES_FILE = folder / "tables.yaml"
options = dict(data=folder / "data", output=folder / "results", runs=folder / "runs", at_once=1, summary=False)
typer.run(lambda: learning.main(["small"], **options))
"""
    command = [sys.executable, "-c", code, str(ROOT / "benchmarks"), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/small/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; the same command resumes the runs from their last checkpoints" in errors
    (metrics,) = tmp_path.glob("runs/small/*/metrics.jsonl")
    before = metrics.read_text()
    assert 0 < len(before.splitlines()) < 300
    results = tmp_path / "results" / "learning" / "small.csv"
    assert not results.exists()
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    # a new start would have measured other speeds
    assert metrics.read_text().startswith(before)
    assert [row["steps"] for row in rows_of(results)] == ["300"]


def test_a_fingerprint_depends_on_settings_and_not_on_paths(tmp_path, small, load):
    def prints(data="data", **changes):
        (tmp_path / data / "numbers").mkdir(exist_ok=True, parents=True)
        tables = load(small={**small, **changes})
        return {
            job.variant: job.fingerprint
            for job in learning.make_jobs(tables, ["small"], tmp_path / data, tmp_path / "runs")
        }

    first = prints()
    assert len(set(first.values())) == 2
    assert prints("elsewhere") == first
    assert prints(seeds=3) == first
    joined = learning.Job(load(small={**small, "sentences": 2}), "small", "K=4")
    assert joined.fingerprint != replace(joined, tables=load(small=small)).fingerprint == first["K=4"]
    assert not set(prints(settings={"training.evaluate_every": 3}).values()) & set(first.values())
    (tmp_path / "counting.yaml").write_text(CONFIG.replace("steps: 3", "steps: 4"))
    assert not set(prints().values()) & set(first.values())


def test_seed_0_of_every_variant_comes_first(tmp_path, small, load):
    small["variants"]["K=4"]["seeds"] = 3
    tables = load(small={**small, "seeds": 2})
    jobs = learning.make_jobs(tables, ["small"], tmp_path / "data", tmp_path / "runs")
    order = [(FULL, 0), ("K=4", 0), (FULL, 1), ("K=4", 1), ("K=4", 2)]
    assert [(job.variant, job.seed) for job in jobs] == order


@pytest.mark.parametrize("table", PUBLISHED.values(), ids=lambda table: table.name)
def test_every_variant_of_the_published_tables_is_another_configuration(table):
    assert FULL in table.variants
    assert table.sentences == 1 or table.local_only  # joined sentences are a copy
    jobs = [learning.Job(PUBLISHED, table.name, variant) for variant in table.variants]
    trees = [load_config(table.config, job.overrides) for job in jobs]
    assert len({str(tree) for tree in trees}) == len(trees)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_rows_have_the_settings_and_seeds_of_their_tables(name):
    """A change that made them outdated would ask for hours of training."""
    published = {(row["variant"], row["seed"]): row["fingerprint"] for row in rows_of(csv_of(name))}
    jobs = {
        (variant, str(seed)): learning.Job(PUBLISHED, name, variant, seed).fingerprint
        for variant in PUBLISHED[name].variants
        for seed in range(PUBLISHED[name].variants[variant].seeds)
    }
    assert published == jobs


def csv_of(name):
    return ROOT / "results" / "learning" / f"{name}.csv"


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_summaries_are_those_of_the_published_rows(name):
    rows = learning.open_rows(ROOT / "results" / "learning", name)
    assert learning_summary.summarize(PUBLISHED[name], rows) == rows_of(csv_of(f"{name}_summary"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrik": "accuracy"}, "small.metrik"),
        ({"metric": "f1"}, "small.metric"),
        ({"seeds": 0}, "small.seeds is 0"),
        ({"recommended": "K=5"}, "small.recommended is 'K=5'; allowed: full attention, K=4"),
        ({"start_from": "large"}, "small.start_from is 'large'; allowed: "),
        ({"variants": {FULL: {"seed": 3}, "K=4": {}}}, "small.variants.full attention.seed"),
        ({"variants": {FULL: {}, "K=4": {"like": "K=8"}}}, "small.variants.K=4.like is 'K=8'; allowed: full attention"),
        ({"variants": {FULL: {}, "K=4": {"baseline": "full"}}}, "small.variants.K=4.baseline is 'full'; allowed: "),
    ],
)
def test_a_mistake_in_a_table_is_reported_with_its_key(small, load, changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load(small={**small, **changes})


def test_a_variant_extends_the_settings_of_another(small, load):
    small["variants"]["K=4, no sharing"] = {"like": "K=4", "settings": {"model.sharing": "none"}}
    variants = load(small=small)["small"].variants
    assert variants["K=4, no sharing"].settings == {"model.projected_length": 4, "model.sharing": "none"}
    assert variants["K=4"].settings == {"model.projected_length": 4}


def test_unknown_tables_and_missing_data_are_reported(tmp_path, small, load, call, capsys):
    load(small=small)
    for names, options, message in (
        (["smal"], {}, "there is no table smal; tables: small"),
        (["small"], {"data": tmp_path / "nowhere"}, "has no directory numbers; the table small needs it"),
    ):
        with pytest.raises(typer.Exit):
            call(*names, **options)
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_error_of_a_failed_run_is_reported(tmp_path, small, load, call, capsys):
    load(small=small)
    (tmp_path / "data" / "numbers" / "test.txt.gz").unlink()
    with pytest.raises(typer.Exit):
        call()
    assert "the data of the run has no test split" in capsys.readouterr().err


def test_sentences_are_joined_split_by_split(tmp_path):
    """Held-out examples have three pairs; training examples have one, two and three in turn, none lost or doubled."""
    source = tmp_path / "pairs"
    source.mkdir()
    for split, count in (("train", 15), ("valid", 7), ("test", 3)):
        with gzip.open(source / f"{split}.tsv.gz", "wt", encoding="utf-8") as file:
            file.write("".join(f"{split} {number}.\tSatz „{number}“.\n" for number in range(count)))
    folder = learning.join_sentences(source, tmp_path / "joined", 3)
    lines = {
        split: (folder / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
        for split in ("train", "valid", "test")
    }
    assert lines["valid"][0] == "valid 0. valid 1. valid 2.\tSatz „0“. Satz „1“. Satz „2“."
    assert [len(lines[split]) for split in ("valid", "test")] == [2, 1]
    sizes = [line.count("Satz") for line in lines["train"]]
    assert sizes == [1, 2, 3, 1, 2, 3, 1, 2]
    numbers = [re.findall(r"\d+", line) for line in lines["train"]]
    sources, targets = zip(*((each[: len(each) // 2], each[len(each) // 2 :]) for each in numbers), strict=True)
    assert sources == targets  # pairs stay pairs
    order = [int(number) for each in sources for number in each]
    assert sorted(order) == list(range(sum(sizes)))
    assert sum(after == before + 1 for before, after in pairwise(order)) < 5  # shuffled: neighbors were alike
    written = (folder / "train.tsv").stat().st_mtime_ns
    learning.join_sentences.cache_clear()
    assert learning.join_sentences(source, tmp_path / "joined", 3) == folder
    assert (folder / "train.tsv").stat().st_mtime_ns == written  # nothing to prepare again


def test_rows_with_other_settings_are_left_out_of_summaries(tmp_path, small, load, call, capsys):
    tables = load(small=small)
    path = tmp_path / "results" / "learning" / "small.csv"
    path.parent.mkdir(parents=True)
    full, linformer = learning.make_jobs(tables, ["small"], tmp_path / "data", tmp_path / "runs")
    numbers = {"parameters": 10, "test_perplexity": 2.0, "seconds_per_epoch": 1.0}
    learning.open_rows(path.parent, "small").put(
        [{**full.key, "fingerprint": full.fingerprint, **numbers}, {**linformer.key, "fingerprint": "old", **numbers}]
    )
    curve = {"seed": 0, "step": 1, "tokens": 10, "loss": 1.0, "metric": 2.0}
    learning.open_curves(path.parent, "small").put([{"variant": FULL, **curve}])
    call(summary=True)
    assert "small: K=4, seed 0, was run with other settings and is ignored" in capsys.readouterr().out
    assert [row["variant"] for row in rows_of(path.parent / "small_summary.csv")] == [FULL]
    assert len(rows_of(path)) == 2  # nothing is lost


def rows_with(folder, perplexities):
    """The rows of a table, from {(variant, seed): perplexity}."""
    rows = learning.open_rows(folder, "small")
    rows.put(
        [
            {"variant": variant, "seed": seed, "parameters": 1, "test_perplexity": value, "seconds_per_epoch": 1.0}
            for (variant, seed), value in perplexities.items()
        ]
    )
    return rows


def test_a_variant_that_differs_in_more_than_attention_has_another_baseline_or_none(tmp_path, small, load):
    perplexities = {FULL: 10.0, "K=4": 11.0, "long": 12.0, "bare full": 20.0, "bare": 21.0}
    baselines = {"long": None, "bare full": None, "bare": "bare full"}
    variants = {name: {"baseline": baselines.get(name, FULL)} for name in perplexities}
    table = load(small={**small, "variants": variants})["small"]
    rows = rows_with(tmp_path, {(name, 0): value for name, value in perplexities.items()})
    shown = {row["variant"]: row["vs full attention, same seeds"] for row in learning_summary.summarize(table, rows)}
    assert shown == {FULL: "", "K=4": "+10.0%", "long": "", "bare full": "", "bare": "+5.0%"}


def test_only_seeds_that_both_have_are_compared(tmp_path, small, load):
    table = load(small=small)["small"]
    rows = rows_with(tmp_path, {(FULL, 0): 10.0, (FULL, 1): 20.0, ("K=4", 1): 21.0})
    full, linformer = learning_summary.summarize(table, rows)
    assert full["measured perplexity"] == "15.00 ± 5.00"
    assert (linformer["seeds"], linformer["vs full attention, same seeds"]) == ("1", "+5.0%")
    learning_summary.write_overview([(table, rows)], tmp_path)
    (overview,) = rows_of(tmp_path / "overview.csv")
    assert (overview["measured with full attention"], overview["difference"]) == ("20.00", "+5.0%")


def test_a_seed_without_counterpart_changes_no_difference(tmp_path, small, load):
    table = load(small=small)["small"]
    rows = rows_with(tmp_path, {(FULL, 1): 20.0, ("K=4", 1): 21.0, ("K=4", 2): 90.0})
    _, linformer = learning_summary.summarize(table, rows)
    assert linformer["vs full attention, same seeds"] == "+5.0% (1 of 2 seeds)"
    learning_summary.write_overview([(table, rows)], tmp_path)
    (overview,) = rows_of(tmp_path / "overview.csv")
    assert overview["measured with Linformer"] == "21.00"


def test_means_spreads_and_differences():
    assert learning_summary.format_mean([20.0, 20.5, 19.75], "{:.2f}") == "20.08 ± 0.38"
    assert learning_summary.format_mean([0.85], "{:.2%}") == "85.00%"
    assert learning_summary.format_mean([], "{:.2f}") == ""
    difference = learning_summary.format_difference
    assert difference("perplexity", {"0": 21.0}, {"0": 20.0}) == "+5.0%"
    assert difference("accuracy", {"0": 0.86, "1": 0.84}, {"0": 0.84, "1": 0.86}) == "+0.00"
    assert difference("bleu", {"0": 20.0}, {"0": 20.5}) == "-0.50"
    assert difference("bleu", {"0": 20.0}, {"1": 20.5}) == ""


def test_local_data_is_requested(tmp_path, small, load):
    tables = load(small={**small, "local_only": True})
    with pytest.raises(UserError, match="needs local data: give --data FOLDER with numbers/ in it"):
        learning.run_jobs(learning.make_jobs(tables, ["small"], None, tmp_path), tmp_path, 1, None)


def test_tables_that_need_local_data_are_skipped_without_it(small, load, call, monkeypatch, capsys):
    load(small=small, local={**small, "local_only": True})
    run = []
    monkeypatch.setattr(learning, "run_jobs", lambda jobs, *_: run.extend(job.name for job in jobs))
    call(data=None)
    assert set(run) == {"small"}
    assert "skipped, because they need --data FOLDER: local" in capsys.readouterr().out
    call(data=None, summary=True)  # which needs no data
    assert "skipped" not in capsys.readouterr().out


def test_the_figure_of_a_table_shows_every_seed_and_prints_what_is_far_off():
    scores = {FULL: (58.0, 60.0), "K=4": (61.0,), "plateau": (450.0,)}
    rows = [{"variant": name, "test_perplexity": str(value)} for name, values in scores.items() for value in values]
    curves = [
        {"variant": name, "tokens": str(step * 1e6), "metric": str(values[0] + 10 / step)}
        for name, values in scores.items()
        for step in (1, 2)
    ]
    figure = draw_learning_table(rows, curves, [*scores, "not run"], FULL, "perplexity", "a note")
    left, right = figure.axes
    assert {line.get_label(): list(line.get_xdata()) for line in left.lines} == {FULL: [1, 2], "K=4": [1, 2]}
    dots = [list(line.get_xdata()) for line in right.lines if line.get_marker() == "o"]
    assert dots == [[58.0, 60.0], [61.0]]
    assert [text.get_text() for text in right.texts] == ["450 →"]
    assert [label.get_text() for label in right.get_yticklabels()] == [FULL, "K=4", "plateau"]


def test_the_overview_draws_less_perplexity_as_better():
    row = {"Linformer": "dynamic", "times as fast": "1.50"}
    rows = [{"job": "words", "metric": "perplexity", **row}, {"job": "reviews", "metric": "accuracy", **row}]
    left, right = draw_learning_overview(rows, [([50.0], [40.0]), ([0.8], [0.6])]).axes
    dots = [float(line.get_xdata()[0]) for line in left.lines if line.get_marker() == "o"]
    assert dots == pytest.approx([100, 125, 100, 75])
    assert [bar.get_width() for bar in right.patches] == [1.5, 1.5]
