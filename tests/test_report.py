"""`linformer report`: the page shows what the files hold, and loads nothing."""

import csv
import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from training_zoo import answers, classification_rows, command, environment, read_json, read_lines, refused, write_jsonl
from typer.testing import CliRunner

from linformer_kit.bench.result_table import COLUMNS
from linformer_kit.cli import app
from linformer_kit.plots import style
from linformer_kit.yaml_loader import parse_yaml

pytestmark = pytest.mark.usefixtures("restore_global_state")

ATTACK = "<script>document.title = 'taken'</script> <img src=x onerror=alert(1)> a good road"


# attributes that load something
LOADING = {"src", "srcset", "href", "data", "action", "poster", "background"}


# parsing the page


class Page(HTMLParser):
    """The tables of a page by name, its text, and what it would load."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.text, self.loaded, self.tags, self.alternatives = {}, "", [], [""], []
        self.cell = self.rows = None
        self.source = text
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.loaded += [value for name, value in attributes.items() if name in LOADING]
        if tag == "img":
            self.alternatives.append(attributes["alt"])
        if attributes.get("role") == "region":
            self.rows = self.tables[attributes["aria-label"]] = []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.cell = ["", attributes.get("data-value")]
            self.rows[-1].append(self.cell)

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.cell = None

    def handle_data(self, data):
        if self.cell is not None:
            self.cell[0] += data
        elif self.tags[-1] not in ("style", "script"):
            self.text += data

    def named(self, name):
        """The rows of a table as dictionaries: the text under each heading, and its number."""
        headings, *rows = self.tables[name]
        return [
            {
                heading: (shown, None if value is None else float(value))
                for (heading, _), (shown, value) in zip(headings, row, strict=True)
            }
            for row in rows
        ]


def page_about(*given, output):
    assert command("report", *given, "--output", output).stdout == f"{output}\n"
    return Page(output.read_text(encoding="utf-8"))


# inputs


def point(implementation, length, seconds=None, peak=None, status="ok", **more):
    """A row of `linformer compare`."""
    row = dict.fromkeys(COLUMNS, "") | {
        "subject": "layer",
        "step": "forward",
        "implementation": implementation,
        "length": length,
    }
    row |= {
        "batch": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "num_layers": 1,
        "device": "cpu",
        "cpu": "A & B <fast>",
        "cores": 2,
    }
    row |= {"torch": "2.13.0", "memory_gib": 15.6, "date": "2026-01-02", "status": status, "memory_status": status}
    if seconds is not None:
        row |= {
            "seconds_median": seconds,
            "seconds_fastest": seconds * 0.5,
            "seconds_slowest": seconds * 2,
            "rounds": 9,
        }
    return row | ({} if peak is None else {"peak_mib": peak}) | more


POINTS = [
    point("linformer-kit", 1024, 0.004, 8, projected_length=64),
    point("linformer-kit", 4096, 0.016, 32, projected_length=64),
    point("linformer-kit", 4096, 0.5, 32, projected_length=64, step="training"),
    point("full-attention", 1024, 0.016, 16),
    point("full-attention", 4096, 0.256, 2048),
    point("full-attention", 4096, 1.25, 4096, batch=1, step="training"),
    point("linformer", 4096, 0.032, 64, projected_length=64),
    point("linformer-pytorch", 4096, status="over the time limit", note="a call takes more than 60 s"),
    point("bert", 16384, status="out of memory"),
    point("bert", 4096, status="wrong", note="differs <by> 0.07"),
]


def write_table(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def change(path, *replacements):
    """Replace parts of a text file, which must exist."""
    text = path.read_text(encoding="utf-8")
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def unfinished_copy(run, folder):
    """The run before it finished, with other settings."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "model")
    (folder / "result.json").unlink()
    change(
        folder / "config.yaml",
        ("projected_length: 8", "projected_length: 4"),
        ("seed: 0", "seed: 7"),
        ("log_every: 10", "log_every: 5"),
    )
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    at_half = next(number for number, line in enumerate(lines, start=1) if "validation_loss" in line)
    (folder / "metrics.jsonl").write_text("".join(lines[:at_half]), encoding="utf-8")
    return folder


def attacked_copy(run, folder):
    """The run with markup in its validation split."""
    shutil.copytree(run, folder / "attacked")
    data = parse_yaml((run / "config.yaml").read_text(encoding="utf-8"), "")["data"]["path"]
    shutil.copytree(data, folder / "attacking data")
    write_jsonl(
        folder / "attacking data" / "validation.jsonl", [{"text": ATTACK, "label": "pos"}, *classification_rows(9)]
    )
    change(folder / "attacked" / "config.yaml", (data, str(folder / "attacking data")))
    return folder / "attacked"


@pytest.fixture(scope="module")
def classification(trained_run):
    return trained_run("classification").run


@pytest.fixture(scope="module")
def of_runs(classification, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    finished = shutil.copytree(classification, folder / "finished")
    (finished / "evaluation.json").write_text(
        json.dumps({"split": "test", "rows": 37, "loss": 0.25, "accuracy": 0.875})
    )
    runs = finished, unfinished_copy(classification, folder / "half"), attacked_copy(classification, folder)
    return runs, page_about(*runs, output=folder / "runs.html")


@pytest.fixture(scope="module")
def of_table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return page_about(write_table(folder / "compare.csv", POINTS), output=folder / "table.html")


# tables of measurements


def test_the_measurements_are_those_of_the_table(of_table):
    rows = of_table.named("Measurements of compare.csv")
    assert len(rows) == len(POINTS)
    columns = {
        "time": "seconds_median",
        "fastest": "seconds_fastest",
        "slowest": "seconds_slowest",
        "peak memory": "peak_mib",
    }
    columns |= {"N": "length", "K": "projected_length", "batch": "batch", "rounds": "rounds"}
    for row, wanted in zip(rows, POINTS, strict=True):
        assert [row[name][0] for name in ("implementation", "subject", "step", "status")] == [
            wanted[name] for name in ("implementation", "subject", "step", "status")
        ]
        assert {name: row[name][1] for name in columns} == {
            name: wanted[column] or None for name, column in columns.items()
        }
        assert row["note"][0] == (wanted["note"] or "–")
    assert [row["time"][0] for row in rows] == [
        *("4 ms", "16 ms", "500 ms", "16 ms", "256 ms", "1.25 s", "32 ms"),
        *("–", "–", "–"),
    ]
    assert rows[4]["peak memory"][0] == "2 GiB"
    assert rows[8]["peak memory"][0] == "out of memory"


def test_ratios_are_to_full_attention_at_the_same_point(of_table):
    rows = of_table.named("Measurements of compare.csv")
    # for the third, full attention was measured with another batch
    assert [row["time ratio"][1] for row in rows] == [4, 16, None, 1, 1, 1, 8, None, None, None]
    assert [row["memory ratio"][1] for row in rows] == [2, 64, None, 1, 1, 1, 32, None, None, None]
    assert rows[0]["time ratio"][0] == "4.00×"
    assert "Ratios: full-attention divided by this row" in of_table.text


def test_ratios_are_to_full_attention_of_the_same_sizes(tmp_path):
    rows = [
        point("linformer-kit", 1024, 0.25, 8, sharing="kv"),
        point("linformer-kit", 1024, 0.5, 16, hidden_size=512, sharing="kv"),
        point("full-attention", 1024, 1.0, 64),
        point("full-attention", 1024, 8.0, 256, hidden_size=512),
    ]
    page = page_about(write_table(tmp_path / "sizes.csv", rows), output=tmp_path / "page.html")
    found = page.named("Measurements of sizes.csv")
    assert [row["time ratio"][1] for row in found] == [4, 16, 1, 1]
    assert [row["memory ratio"][1] for row in found] == [8, 16, 1, 1]


def test_the_machine_of_the_measurements_is_shown(of_table):
    (row,) = of_table.named("Environment: compare.csv")
    assert row["cpu"][0] == "A & B <fast>"
    assert row["memory gib"] == ("15.6", 15.6)
    assert row["implementations"][0] == "linformer-kit, full-attention, linformer, linformer-pytorch, bert"
    assert row["points"][1] == len(POINTS)
    assert "hidden size 64, num heads 4, device cpu" in of_table.text


def test_a_table_in_which_nothing_was_measured_is_shown_without_a_picture(tmp_path):
    page = page_about(write_table(tmp_path / "none.csv", POINTS[-2:]), output=tmp_path / "page.html")
    assert len(page.named("Measurements of none.csv")) == 2
    assert "Not drawn: no point of none.csv was measured" in page.text
    assert "img" not in page.tags
    page = page_about(write_table(tmp_path / "empty.csv", []), output=tmp_path / "page.html")
    assert "No rows." in page.text


def test_a_report_on_tables_imports_nothing_of_training(tmp_path):
    """`linformer-kit[bench]` does not install the packages that only training needs."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['datasets', 'accelerate', 'filelock', 'sacrebleu', 'yaml'])); "
    )
    code += "from linformer_kit.cli import app; app()"
    table = write_table(tmp_path / "compare.csv", POINTS)
    subprocess.run(
        [sys.executable, "-c", code, "report", table, "--output", tmp_path / "page.html"], check=True, env=environment()
    )
    assert "linformer-pytorch" in (tmp_path / "page.html").read_text(encoding="utf-8")


# runs


@pytest.mark.slow
def test_the_metrics_are_those_of_the_result(of_runs):
    (finished, half, _), page = of_runs
    first, second, _ = page.named("Results")
    result = read_json(finished / "result.json")
    metrics = {name: value for name, value in result.items() if name.startswith("validation_")}
    assert {name: first[name.replace("_", " ")][1] for name in metrics} == metrics
    assert (first["at step"][1], first["tokens"][1], first["training time"][1], first["peak memory"][1]) == (
        *(result["best_step"], result["tokens"], result["seconds"], result["peak_mib"]),
    )
    assert result["peak_mib"] > 100
    assert (first["evaluated on test: loss"][1], first["evaluated on test: accuracy"][1]) == (0.25, 0.875)
    # of a run that is not finished, the last evaluation
    last = read_lines(half / "metrics.jsonl")[-1]
    assert second["state"][0] == "not finished"
    assert (second["at step"][1], second["validation loss"][1]) == (last["step"], last["validation_loss"])
    assert second["training time"] == second["evaluated on test: loss"] == ("–", None)


@pytest.mark.slow
def test_the_configuration_is_shown(of_runs):
    (_, half, _), page = of_runs
    first, second, _ = page.named("Configuration")
    wanted = {"run": "finished", "state": "finished", "task": "classification", "attention": "linformer", "K": "8"}
    wanted |= {
        "projection": "linear",
        "sharing": "headwise",
        "layers": "1",
        "hidden size": "32",
        "heads": "2",
        "length": "24",
    }
    wanted |= {"data": "classification data", "steps": "60", "planned": "60 steps", "batch": "16", "seed": "0"}
    assert {name: first[name][0] for name in wanted} == wanted
    assert (second["run"][0], second["state"][0], second["K"][1], second["seed"][1]) == ("half", "not finished", 4, 7)
    assert second["steps"][1] == read_lines(half / "metrics.jsonl")[-1]["step"] < 60


@pytest.mark.slow
def test_the_differences_are_those_that_affect_the_result(of_runs):
    (finished, _, attacked), page = of_runs
    first, second, third = page.named("Differing settings")
    assert list(first) == ["run", "seed", "model.projected_length", "data.path"]  # not log_every, nor the directory
    assert [row["model.projected_length"][1] for row in (first, second, third)] == [8, 4, 8]
    assert [row["seed"][1] for row in (first, second, third)] == [0, 7, 0]
    paths = [
        parse_yaml((run / "config.yaml").read_text(encoding="utf-8"), "")["data"]["path"]
        for run in (finished, attacked)
    ]
    assert [first["data.path"][0], third["data.path"][0]] == paths


@pytest.mark.slow
def test_a_default_that_is_written_out_is_no_difference(classification, tmp_path):
    for name in ("one", "other"):
        unfinished_copy(classification, tmp_path / name)
    change(tmp_path / "one" / "config.yaml", ("model:\n", "model:\n  sharing: headwise\n"))
    page = page_about(tmp_path / "one", tmp_path / "other", output=tmp_path / "page.html")
    assert "Differing settings" not in page.tables
    assert "The runs do not differ in any setting that affects" in page.text


@pytest.mark.slow
def test_a_run_that_starts_from_a_saved_model_has_its_sizes(classification, tmp_path):
    run = unfinished_copy(classification, tmp_path / "run")
    text, (start, end) = (run / "config.yaml").read_text(encoding="utf-8"), ("model:\n", "data:\n")
    before, after = text.split(start)[0], text.split(end, 1)[1]
    for saved, wanted in (
        (classification / "model", ("linformer", "8", "32")),
        (tmp_path / "gone", ("unknown", "–", "–")),
    ):
        (run / "config.yaml").write_text(f"{before}{start}  from: {saved}\n{end}{after}", encoding="utf-8")
        (row,) = page_about(run, output=tmp_path / "page.html").named("Configuration")
        assert (row["attention"][0], *(row.get(name, ("–",))[0] for name in ("K", "hidden size"))) == wanted


@pytest.mark.slow
def test_the_environment_of_the_runs_is_shown(of_runs):
    (finished, *_), page = of_runs
    row = page.named("Environment: Runs")[0]
    stored = read_json(finished / "environment.json")
    assert {name: row[name][0] for name in stored["packages"]} == stored["packages"]
    assert [row[name][0] for name in ("python", "system", "begun")] == [
        stored[name] for name in ("python", "system", "begun")
    ]


@pytest.mark.slow
def test_examples_are_answered_as_predict_answers_them(trained, tmp_path):
    run = trained.run
    page = page_about(run, output=tmp_path / "page.html")
    rows = page.named("Examples of run")
    sources = [row["source"][0].replace("\n", "\t") for row in rows]
    found = answers(run, *sources)
    assert len(rows) == 6
    for row, answer in zip(rows, found, strict=True):
        reference, prediction = row["reference"][0], row["prediction"][0]
        if trained.task in ("classification", "pairs"):
            assert prediction == f"{answer['label']} ({answer['probabilities'][answer['label']]:.1%})"
        elif trained.task == "masked-lm":
            (guesses,) = answer["masks"]
            assert prediction.startswith(f"{guesses[0]['token']} ({guesses[0]['probability']:.1%}), ")
            assert reference in prediction  # it has learned to count
        else:
            assert prediction == next(
                answer[key] for key in ("continuation", "translation", "restored") if key in answer
            )
    validation = next(trained.data.glob("validation.*")).read_text(encoding="utf-8")
    for source, row in zip(sources, rows, strict=True):
        reference = row["reference"][0]
        if trained.task == "translation":
            assert f"{source}\t{reference}\n" in validation
        elif trained.task == "masked-lm":
            assert source.replace("<mask>", reference) in validation
        elif trained.task == "causal-lm":
            assert f"{source} {reference}" in validation
        elif trained.task == "denoising":
            assert reference in validation
            assert source.count("<mask>") == 1
        else:
            examples = [json.loads(line) for line in validation.splitlines()]
            texts = [
                each["text"] if "text" in each else f"{each['premise']}\t{each['hypothesis']}" for each in examples
            ]
            assert examples[texts.index(source)]["label"] == reference


@pytest.mark.slow
def test_written_translations_are_shown(classification, tmp_path):
    run = unfinished_copy(classification, tmp_path / "run")
    written = [
        {"source": f"{number} <b>\u2028</b>", "hypothesis": "", "reference": f"r{number}"} for number in range(20)
    ]
    write_jsonl(run / "translations.jsonl", written)
    rows = page_about(run, output=tmp_path / "page.html").named("Examples of run")
    assert [row["source"][0] for row in rows] == [f"{number} <b> </b>" for number in range(6)]
    assert rows[0]["prediction"][0] == "(empty text)"
    (run / "translations.jsonl").write_text("{", encoding="utf-8")
    assert "translations.jsonl is damaged" in page_about(run, output=tmp_path / "page.html").text


@pytest.mark.slow
def test_missing_data_is_reported_on_the_page(classification, tmp_path):
    run = shutil.copytree(classification, tmp_path / "run")
    data = parse_yaml((run / "config.yaml").read_text(encoding="utf-8"), "")["data"]["path"]
    change(run / "config.yaml", (data, str(tmp_path / "gone")))
    page = page_about(run, output=tmp_path / "page.html")
    assert (
        f"There are no examples to show: data.path is '{tmp_path / 'gone'}': there is no such file or directory"
        in page.text
    )
    assert "Examples of run" not in page.tables
    assert page.named("Results")[0]["validation accuracy"][1] > 0.5


def finished_copy(run, folder, evaluation=None, **model):
    """The run with other fields of its model, and with the evaluation."""
    shutil.copytree(run, folder)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps({**read_json(config), **model}), encoding="utf-8")
    if evaluation:
        (folder / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    return folder


def without_examples(folder):
    """A run with translations, so that nothing is predicted, which would take long."""
    write_jsonl(folder / "translations.jsonl", [{"source": "a", "hypothesis": "b", "reference": "c"}])
    return folder


def test_an_evaluation_on_the_validation_split_does_not_replace_that_of_the_training(classification, tmp_path):
    evaluation = {"split": "validation", "rows": 9, "loss": 9.5, "accuracy": 0.125}
    run = without_examples(finished_copy(classification, tmp_path / "run", evaluation))
    (row,) = page_about(run, output=tmp_path / "page.html").named("Results")
    assert row["validation accuracy"][1] == read_json(run / "result.json")["validation_accuracy"] != 0.125
    assert row["evaluated on validation: accuracy"][1] == 0.125
    assert row["evaluated on validation: loss"][1] == 9.5


def test_runs_are_named_in_pictures_as_in_tables(classification, tmp_path):
    """Even if a figure shows only some of them, which shorter names would distinguish."""
    runs = [without_examples(finished_copy(classification, tmp_path / name / "run")) for name in ("one", "two")]
    (runs[1] / "metrics.jsonl").unlink()
    page = page_about(*runs, output=tmp_path / "page.html")
    assert [row["run"][0] for row in page.named("Configuration")] == ["one/run", "two/run"]
    assert "Lines: training, validation, one/run." in page.alternatives[0]


def test_quality_of_causal_language_models_is_drawn_over_their_slots(trained_run, tmp_path):
    run = trained_run("causal-lm").run
    runs = [without_examples(finished_copy(run, tmp_path / f"slots{slots}", slots=slots)) for slots in (2, 4)]
    page = page_about(*runs, output=tmp_path / "page.html")
    assert [said for said in page.alternatives if "slots per block" in said]


def test_too_many_runs_for_one_figure_are_reported(classification, tmp_path, monkeypatch):
    monkeypatch.setattr(style, "MAX_HEIGHT", 0.5)
    runs = [without_examples(finished_copy(classification, tmp_path / name)) for name in ("one", "two")]
    page = page_about(*runs, output=tmp_path / "page.html")
    assert "Not drawn: too many runs or too long names for one picture" in page.text
    assert "img" not in page.tags


def test_a_finished_run_without_its_model_is_described_by_its_configuration(classification, tmp_path):
    run = without_examples(finished_copy(classification, tmp_path / "run"))
    shutil.rmtree(run / "model")
    (row,) = page_about(run, output=tmp_path / "page.html").named("Configuration")
    assert (row["K"][0], row["hidden size"][0]) == ("8", "32")


# spectra

SPECTRUM = {
    "spectrum.csv": "layer,head,k,share\n1,1,1,0.5\n1,1,2,1\n2,1,1,0.75\n2,1,2,1\n",
    "ranks.csv": "layer,head,model,length,pieces,k90,k95,k99\n"
    "1,1,$some^$ model,2,3,2,2,2\n2,1,$some^$ model,2,3,2,2,2\n",
    "layers.csv": "layer,k90,k95,k99,kept_by_a_quarter,projected_length\n1,2,2,2,0.500,2\n2,2,2,2,0.750,1\n",
}


def write_spectrum(folder):
    folder.mkdir()
    for name, text in SPECTRUM.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_spectrum_has_its_pictures_and_its_table(tmp_path):
    one, other = write_spectrum(tmp_path / "one"), write_spectrum(tmp_path / "other")
    page = page_about(one, output=tmp_path / "new" / "page.html")
    assert "Report on 1 spectrum" in page.text
    assert "$some^$ model, 3 pieces of 2 tokens" in page.text
    rows = page.named("Layers of one")
    assert [row["kept by a quarter"][1] for row in rows] == [0.5, 0.75]
    assert [row["projected length"][0] for row in rows] == ["2", "1"]
    assert len(page.alternatives) == 2
    page = page_about(one, other, write_table(tmp_path / "c.csv", POINTS), output=tmp_path / "page.html")
    assert "Report on 1 table of measurements and 2 spectra" in page.text
    assert len(page.alternatives) == 5
    (one / "layers.csv").write_text("layer\n", encoding="utf-8")
    assert f"{one} contains a damaged spectrum" in refused("report", one, "--output", tmp_path / "page.html")


def test_saved_models_are_refused_by_name(classification, tmp_path):
    said = refused("report", classification, classification / "model", "--output", tmp_path / "page.html")
    assert said.startswith(f"{classification / 'model'} is a saved model without a run")
    assert not (tmp_path / "page.html").exists()


# the page


@pytest.mark.slow
def test_markup_is_shown_as_text(of_runs):
    _, page = of_runs
    assert ATTACK in [row["source"][0] for row in page.named("Examples of attacked")]
    assert page.tags.count("script") == 1
    assert ATTACK not in page.source


@pytest.mark.slow
def test_nothing_is_loaded_and_figures_have_descriptions(of_runs, of_table):
    for page, pictures in ((of_runs[1], 1), (of_table, 1)):
        assert all(each.startswith(("data:", "#")) for each in page.loaded)
        assert len(page.alternatives) >= pictures
        assert "@import" not in page.source
        assert "url(" not in page.source
    assert "attacked" in of_runs[1].alternatives[0]
    assert "linformer-pytorch" not in of_table.alternatives[0]  # which has no point to draw
    assert "bert" not in of_table.alternatives[0]
    assert "full-attention" in of_table.alternatives[0]


def test_tables_of_the_same_name_are_told_apart(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_table(tmp_path / name / "compare.csv", POINTS)
    page = page_about(tmp_path / "one/compare.csv", tmp_path / "two/compare.csv", output=tmp_path / "page.html")
    assert "Report on 2 tables of measurements" in page.text
    assert {"Measurements of one/compare.csv", "Measurements of two/compare.csv"} <= set(page.tables)


def test_infinite_numbers_sort_too(tmp_path):
    page = page_about(
        write_table(tmp_path / "c.csv", [point("bert", 1024, float("inf"), 1), POINTS[0]]), output=tmp_path / "p.html"
    )
    (endless, _) = page.named("Measurements of c.csv")
    assert endless["time"][1] == float("inf")
    assert 'data-value="Infinity"' in page.source  # as JavaScript writes it


# errors


def test_unreadable_inputs_and_unwritable_outputs_are_reported_at_once(tmp_path):
    table = write_table(tmp_path / "compare.csv", POINTS)
    there = tmp_path / "page.html"
    assert f"{tmp_path / 'gone'} does not exist" in refused("report", tmp_path / "gone", "--output", there)
    assert f"--output is {tmp_path}, a directory" in refused("report", table, "--output", tmp_path)
    assert "compare.csv is a file" in refused("report", table, "--output", table / "page.html")
    assert "is neither a run" in refused("report", tmp_path, "--output", there)
    write_table(tmp_path / "damaged.csv", [{**POINTS[0], "seconds_median": "soon"}])
    assert "seconds_median is 'soon' in the row of linformer-kit, N=1024" in refused(
        "report", tmp_path / "damaged.csv", "--output", there
    )
    assert not there.exists()
    assert "cannot write to /proc" in refused("report", table, "--output", "/proc/page.html")  # not even by root
    assert CliRunner().invoke(app, ["report"]).exit_code == 2


def test_a_page_is_replaced_only_by_a_complete_one(tmp_path):
    there = tmp_path / "page.html"
    there.write_text("the old one")
    write_table(tmp_path / "damaged.csv", [{**POINTS[0], "peak_mib": "much"}])
    refused("report", tmp_path / "damaged.csv", "--output", there)
    assert there.read_text() == "the old one"
    page_about(write_table(tmp_path / "compare.csv", POINTS), output=there)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.csv", "damaged.csv", "page.html"]
