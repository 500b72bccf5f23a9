"""`linformer study`: runs are those of `linformer train`, numbers are those of the runs, finished runs are kept."""

import asyncio
import csv
import gzip
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

pytest.importorskip("datasets", reason='needs pip install "linformer-kit[bench,train]"')

import fork_server
from training_zoo import environment, running_lines

from linformer_kit import LinformerForMaskedLM
from linformer_kit.bench import study
from linformer_kit.bench.study_summary import format_difference, format_mean, summarize, write_overview
from linformer_kit.bench.study_tables import Study, StudyTable, Variant, join_sentences, load_tables
from linformer_kit.cli import app
from linformer_kit.errors import UserError
from linformer_kit.plots.learning_table import draw_learning_overview, draw_learning_table
from linformer_kit.training.config import load_config

ROOT = Path(__file__).parent.parent
FULL = "full attention"
PUBLISHED = Study(load_tables(ROOT / "benchmarks" / "learning.yaml"), ROOT / "results" / "learning")
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
def load(tmp_path):
    """Write tables to the file of the study, and load them."""

    def load(**tables):
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump(tables, sort_keys=False))
        return Study(load_tables(path), tmp_path / "results", tmp_path / "runs", tmp_path / "data")

    return load


def command(folder, *arguments):
    """The arguments of `linformer` for the study in a folder."""
    options = {"output": folder / "results", "runs": folder / "runs", "at-once": 2}
    return ["study", str(folder / "small.yaml"), *(f"--{name}={value}" for name, value in options.items()), *arguments]


@pytest.fixture
def call(tmp_path):
    """Runs the study; returns what it printed. With `error`, it must end with that line."""

    def call(*arguments, data=tmp_path / "data", error=None):
        given = [] if data is None else [f"--data={data}"]
        result = CliRunner().invoke(app, command(tmp_path, *given, *arguments), catch_exceptions=False)
        assert result.exit_code == (0 if error is None else 2), result.output
        if error is not None:
            assert error in result.stderr
            assert result.stderr.startswith("Error: ")
            assert result.stderr.count("\n") == 1
        return result.stdout

    return call


class Fork:
    """A process of the fork server with the interface of those of asyncio."""

    def __init__(self, process):
        self.process, self.returncode = process, None

    async def wait(self):
        self.returncode = await asyncio.to_thread(self.process.wait)


@pytest.fixture
def forked_runs(monkeypatch):
    """`linformer train` and `linformer evaluate` of a study are forks instead of ordinary processes."""

    async def fork(*command, stdout, stderr, env):
        own = {name: env[name] for name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")}  # what the study sets
        return Fork(fork_server.Popen(command, stdout=stdout, stderr=stderr, env=environment(**own)))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fork)


def assert_peak_is_that_of_training(row, run):
    """At least weights, gradients and the two moments of AdamW, and less than all of Python."""
    most = json.loads((run / "result.json").read_text())["peak_mib"] / 2
    assert 16 * int(row["parameters"]) / 2**20 < float(row["peak_mib"]) < most


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs", "forked_workers")
def test_tables_are_run_stored_and_drawn(tmp_path, small, load, call, monkeypatch):
    """A table that starts from the models of another runs that one first."""
    longer = {**small, "start_from": "small", "settings": {"model.max_position_embeddings": 48}, "title": "Longer"}
    load(small=small, longer=longer)
    call("longer")
    results = tmp_path / "results"
    assert [len(rows_of(results / f"{name}.csv")) for name in ("small", "longer")] == [2, 2]
    for row in rows_of(results / "longer.csv"):
        (run,) = (tmp_path / "runs" / "longer").glob(f"*-{row['fingerprint']}")
        start = yaml.safe_load((run / "config.yaml").read_text())["model"]["from"]
        assert Path(start).parent.name.startswith(row["variant"].replace(" ", "-"))
        assert LinformerForMaskedLM.from_pretrained(run / "model").config.max_position_embeddings == 48

    # nothing is run twice; a run is no longer needed once it is in the table
    monkeypatch.setattr(study, "run_job", lambda *_: pytest.fail("was run again"))
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
        assert_peak_is_that_of_training(row, run)
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
    assert overview["speedup"] == f"{seconds[0] / seconds[1]:.2f}"
    assert (results / "overview.png").stat().st_size > 10_000

    (results / "small.png").unlink()
    call("--summary")
    assert (results / "small.png").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")  # for the second command; the first one, and what measures memory, are not
def test_a_stopped_table_resumes_from_its_checkpoints(tmp_path, small, load, call):
    """SIGTERM during a run saves its last step; the same command continues from there."""
    path = tmp_path / "counting.yaml"
    path.write_text(path.read_text().replace("steps: 3", "steps: 300"))
    table = {**small, "settings": {"training.evaluate_every": 300}, "variants": {FULL: {}}, "recommended": FULL}
    load(small=table)
    arguments = [sys.executable, "-m", "linformer_kit.cli", *command(tmp_path, f"--data={tmp_path / 'data'}")]
    arguments = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *arguments]  # as in the background of a script
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/small/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Stopped. The same command resumes the runs from their last checkpoints." in errors
    (metrics,) = tmp_path.glob("runs/small/*/metrics.jsonl")
    before = metrics.read_text()
    assert 0 < len(before.splitlines()) < 300
    results = tmp_path / "results" / "small.csv"
    assert not results.exists()
    call()
    # a new start would have measured other speeds
    assert metrics.read_text().startswith(before)
    (row,) = rows_of(results)
    assert row["steps"] == "300"
    assert_peak_is_that_of_training(row, metrics.parent)


def test_a_fingerprint_depends_on_settings_and_not_on_paths(tmp_path, small, load):
    def prints(**changes):
        return {job.variant: job.fingerprint for job in load(small={**small, **changes}).jobs(["small"])}

    first = prints()
    assert len(set(first.values())) == 2
    elsewhere = Study(load(small=small).tables, data=tmp_path / "elsewhere")
    assert {job.variant: job.fingerprint for job in elsewhere.jobs(["small"])} == first
    assert prints(seeds=3) == first
    for changes in (
        {"sentences": 2, "local_only": True},
        {"settings": {"training.evaluate_every": 3}},
        {"data": None},  # then the configuration names the data
    ):
        assert not set(prints(**changes).values()) & set(first.values()), changes
    own = prints(data=None)
    (tmp_path / "counting.yaml").write_text(CONFIG.replace("path: nowhere", "path: elsewhere"))
    assert prints() == first
    assert not set(prints(data=None).values()) & set(own.values())
    (tmp_path / "counting.yaml").write_text(CONFIG.replace("steps: 3", "steps: 4"))
    assert not set(prints().values()) & set(first.values())


def test_seed_0_of_every_variant_comes_first(small, load):
    small["variants"]["K=4"]["seeds"] = 3
    jobs = load(small={**small, "seeds": 2}).missing_jobs(["small"])
    order = [(FULL, 0), ("K=4", 0), (FULL, 1), ("K=4", 1), ("K=4", 2)]
    assert [(job.variant, job.seed) for job in jobs] == order


@pytest.mark.parametrize("name", PUBLISHED.tables)
def test_every_variant_of_the_published_tables_is_another_configuration(name):
    table = PUBLISHED.tables[name]
    assert table.baseline == FULL
    configs = {str(load_config(table.config, PUBLISHED.job(name, variant).overrides)) for variant in table.variants}
    assert len(configs) == len(table.variants)


@pytest.mark.parametrize("name", PUBLISHED.tables)
def test_the_published_rows_have_the_settings_and_seeds_of_their_tables(name):
    """A change that made them outdated would ask for hours of training."""
    published = {(row["variant"], row["seed"]): row["fingerprint"] for row in rows_of(csv_of(name))}
    assert published == {(job.variant, str(job.seed)): job.fingerprint for job in PUBLISHED.jobs([name])}
    assert PUBLISHED.missing_jobs([name]) == []


def csv_of(name):
    return ROOT / "results" / "learning" / f"{name}.csv"


@pytest.mark.parametrize("name", PUBLISHED.tables)
def test_the_published_summaries_are_those_of_the_published_rows(name):
    assert summarize(PUBLISHED.tables[name], PUBLISHED.rows(name)) == rows_of(csv_of(f"{name}_summary"))


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
        ({"variants": {}, "recommended": None}, "small.variants is empty"),
        ({"beams": [1, 5]}, "small.beams[1] is 5; it must be 1 or 4"),
        ({"sentences": 2}, "small: sentences above 1 need `local_only: true`, which needs `data`"),
        ({"local_only": True, "data": None}, "`local_only: true`, which needs `data`"),
        ({"metric": "bleu"}, "small.metric is 'bleu'; allowed for masked-lm: perplexity, accuracy"),
        ({"config": "imbd"}, "small, full attention: there is no file and no shipped configuration 'imbd'"),
        ({"settings": {"training.stepz": 3}}, "small, full attention: there is no key training.stepz"),
    ],
)
def test_a_mistake_in_a_table_is_reported_with_its_key(small, load, changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load(small={**small, **changes}).jobs(["small"])


@pytest.mark.parametrize("name", ["a/b", "overview"])
def test_files_can_be_named_after_tables(small, load, name):
    with pytest.raises(UserError, match=f"'{name}' cannot name a table; use letters"):
        load(**{name: small})


def test_names_may_be_numbers(small, load):
    """YAML reads `2:` as a number."""
    (small := {**small, "recommended": "2"})["variants"] = {1: {}, 2: {"settings": {"model.projected_length": 2}}}
    assert [job.variant for job in load(**{"7": small}).jobs(["7"])] == ["1", "2"]


def test_a_variant_extends_the_settings_of_another(small, load):
    small["variants"]["K=4, no sharing"] = {"like": "K=4", "settings": {"model.sharing": "none"}}
    variants = load(small=small).tables["small"].variants
    assert variants["K=4, no sharing"].settings == {"model.projected_length": 4, "model.sharing": "none"}
    assert variants["K=4"].settings == {"model.projected_length": 4}


def test_a_wrong_call_ends_in_one_line(tmp_path, small, load, call):
    call(error=f"there is no file {tmp_path / 'small.yaml'}; pass a YAML file with tables (docs/study.md)")
    path = tmp_path / "small.yaml"
    for text, error in (
        ("", "small.yaml has no tables; write each one as a name with the keys of docs/study.md"),
        ("- small\n", "small.yaml is the list ['small']; allowed: a mapping"),
        ("small: 3\n", "small is the number 3; allowed: a mapping"),
        ("small: {titel: x}\n", "there is no key small.titel; did you mean 'title'? allowed: title, config, "),
        ("small: [\n", "small.yaml is not YAML: "),
    ):
        path.write_text(text)
        call(error=error)
    load(small=small)
    call("smal", error=f"there is no table smal in {path}; tables: small")
    call("--summary", error=f"{tmp_path / 'results'} has no results of {path}; run it without --summary first")
    nowhere = tmp_path / "nowhere"
    call("small", data=nowhere, error=f"data.path is '{nowhere}/numbers': there is no such file or directory")
    assert not list(tmp_path.glob("runs/small/*"))


def test_a_missing_test_split_is_reported_before_training(tmp_path, small, load, call):
    load(small=small)
    (tmp_path / "data" / "numbers" / "test.txt.gz").unlink()
    call(error="numbers has no test split, which the table small needs")
    assert not list(tmp_path.glob("runs/small/*"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")
def test_the_error_of_a_failed_run_is_reported(small, load, call):
    load(small={**small, "settings": {"training.batch_size": 1000}})
    call(error="training.batch_size is 1000, but there are only")


def test_sentences_are_joined_split_by_split(tmp_path):
    """Held-out examples have three pairs; training examples have one, two and three in turn, none lost or doubled."""
    source = tmp_path / "pairs"
    source.mkdir()
    for split, count in (("train", 15), ("valid", 7), ("test", 3)):
        with gzip.open(source / f"{split}.tsv.gz", "wt", encoding="utf-8") as file:
            file.write("".join(f"{split} {number}.\tSatz „{number}“.\n" for number in range(count)))
    folder = join_sentences(source, tmp_path / "joined", 3)
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
    join_sentences.cache_clear()
    assert join_sentences(source, tmp_path / "joined", 3) == folder
    assert (folder / "train.tsv").stat().st_mtime_ns == written  # nothing to prepare again


def rows_with(stored, perplexities):
    """The rows of the table `small`, from {(variant, seed): perplexity}, with a curve each."""
    stored.output.mkdir()
    rows, numbers = stored.rows("small"), {"parameters": 1, "seconds_per_epoch": 1.0}
    keys = [{"variant": variant, "seed": seed} for variant, seed in perplexities]
    stored.curves("small").put([{**key, "step": 1, "tokens": 10, "loss": 1.0, "metric": 2.0} for key in keys])
    rows.put(
        [
            {**key, **numbers, "fingerprint": stored.job("small", key["variant"]).fingerprint, "test_perplexity": value}
            for key, value in zip(keys, perplexities.values(), strict=True)
        ]
    )
    return rows


def test_rows_with_other_settings_are_left_out_of_summaries(tmp_path, small, load, call):
    rows = rows_with(load(small=small), {(FULL, 0): 2.0, ("K=4", 0): 2.0})
    rows.put([{"variant": "K=4", "seed": 0, "fingerprint": "old"}])
    assert "small: K=4, seed 0, was run with other settings and is ignored" in call("--summary")
    assert [row["variant"] for row in rows_of(tmp_path / "results" / "small_summary.csv")] == [FULL]
    assert len(rows_of(rows.path)) == 2  # nothing is lost


def test_a_summary_needs_no_seed_0(tmp_path, small, load, call):
    """Another seed may end first."""
    rows_with(load(small=small), {(FULL, 1): 2.0})
    call("--summary")
    assert (tmp_path / "results" / "small.png").exists()


def test_a_variant_that_differs_in_more_than_attention_has_another_baseline_or_none(small, load):
    perplexities = {FULL: 10.0, "K=4": 11.0, "long": 12.0, "bare full": 20.0, "bare": 21.0}
    baselines = {"long": None, "bare full": None, "bare": "bare full"}
    variants = {name: {"baseline": baselines.get(name, FULL)} for name in perplexities}
    stored = load(small={**small, "variants": variants})
    rows = rows_with(stored, {(name, 0): value for name, value in perplexities.items()})
    summary = summarize(stored.tables["small"], rows)
    shown = {row["variant"]: row["vs full attention, same seeds"] for row in summary}
    assert shown == {FULL: "", "K=4": "+10.0%", "long": "", "bare full": "", "bare": "+5.0%"}


def test_only_seeds_that_both_have_are_compared(tmp_path, small, load):
    stored = load(small=small)
    table, rows = stored.tables["small"], rows_with(stored, {(FULL, 0): 10.0, (FULL, 1): 20.0, ("K=4", 1): 21.0})
    full, linformer = summarize(table, rows)
    assert full["measured perplexity"] == "15.00 ± 5.00"
    assert (linformer["seeds"], linformer["vs full attention, same seeds"]) == ("1", "+5.0%")
    write_overview([(table, rows)], "a command", tmp_path)
    (overview,) = rows_of(tmp_path / "overview.csv")
    assert (overview["measured with full attention"], overview["difference"]) == ("20.00", "+5.0%")


def test_a_seed_without_counterpart_changes_no_difference(tmp_path, small, load):
    stored = load(small=small)
    table, rows = stored.tables["small"], rows_with(stored, {(FULL, 1): 20.0, ("K=4", 1): 21.0, ("K=4", 2): 90.0})
    _, linformer = summarize(table, rows)
    assert linformer["vs full attention, same seeds"] == "+5.0% (1 of 2 seeds)"
    write_overview([(table, rows)], "a command", tmp_path)
    (overview,) = rows_of(tmp_path / "overview.csv")
    assert overview["measured with Linformer"] == "21.00"


def test_the_first_variant_is_the_baseline(tmp_path, small, load):
    small["variants"] = {"K=4": {}, "K=8": {"settings": {"model.projected_length": 8}}}
    stored = load(small={**small, "recommended": "K=8"})
    table, rows = stored.tables["small"], rows_with(stored, {("K=4", 0): 20.0, ("K=8", 0): 21.0})
    first, second = summarize(table, rows)
    assert (first["vs K=4, same seeds"], second["vs K=4, same seeds"]) == ("", "+5.0%")
    write_overview([(table, rows)], "a command", tmp_path)
    (overview,) = rows_of(tmp_path / "overview.csv")
    assert (overview["measured with K=4"], overview["measured with Linformer"]) == ("20.00", "21.00")


def test_means_spreads_and_differences():
    assert format_mean("perplexity", [20.0, 20.5, 19.75]) == "20.08 ± 0.38"
    assert format_mean("accuracy", [0.85]) == "85.00%"
    assert format_mean("bleu", []) == ""
    assert format_difference("perplexity", {"0": 21.0}, {"0": 20.0}) == "+5.0%"
    assert format_difference("accuracy", {"0": 0.86, "1": 0.84}, {"0": 0.84, "1": 0.86}) == "+0.00"
    assert format_difference("bleu", {"0": 20.0}, {"0": 20.5}) == "-0.50"
    assert format_difference("bleu", {"0": 20.0}, {"1": 20.5}) == ""


def test_local_data_is_requested(small, load, call):
    load(small={**small, "local_only": True})
    call("small", data=None, error="the table small needs local data: pass --data DIRECTORY with numbers/ in it")


def test_tables_that_need_local_data_are_skipped_without_it(small, load, call, monkeypatch):
    rows_with(load(small=small, local={**small, "local_only": True}), {(FULL, 0): 2.0})
    run = []
    monkeypatch.setattr(study, "run_jobs", lambda _, names, *rest: run.extend(names))
    assert "skipped, because they need --data DIRECTORY: local" in call(data=None)
    assert run == ["small"]
    assert "skipped" not in call("--summary", data=None)  # which needs no data


def test_the_document_describes_every_key():
    page = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    for heading, kind in (("## Tables", StudyTable), ("## Variants", Variant)):
        keys = re.findall(r"^\| `(\w+)` \|", page.split(heading)[1].split("\n## ")[0], flags=re.MULTILINE)
        assert keys == [each.name for each in fields(kind)]


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
    row = {"Linformer": "dynamic", "speedup": "1.50"}
    rows = [{"task": "words", "metric": "perplexity", **row}, {"task": "reviews", "metric": "accuracy", **row}]
    left, right = draw_learning_overview(rows, [([50.0], [40.0]), ([0.8], [0.6])], FULL, "a note").axes
    dots = [float(line.get_xdata()[0]) for line in left.lines if line.get_marker() == "o"]
    assert dots == pytest.approx([100, 125, 100, 75])
    assert [bar.get_width() for bar in right.patches] == [1.5, 1.5]
