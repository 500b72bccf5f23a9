"""The demo: the files it finds, their splits, what it trains, prints and writes."""

import csv
import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from linformer_kit import demo
from linformer_kit.bench.measure import OK
from linformer_kit.bench.result_table import open_table, read_points
from linformer_kit.cli import app
from linformer_kit.formatting import format_duration
from linformer_kit.plots.demo import draw_demo
from linformer_kit.training import file_kinds as files
from linformer_kit.training.config import load_config
from linformer_kit.training.file_kinds import SPLITS, WINDOW, Source
from linformer_kit.training.prepare import with_generated_data

FEW = {"train": 12, "validation": 4, "test": 4}  # examples of each kind
TINY = demo.Settings(
    overrides=(
        *(
            "model.hidden_size=16",
            "model.intermediate_size=16",
            "model.num_attention_heads=2",
            "model.num_hidden_layers=1",
        ),
        *("model.max_position_embeddings=128", "model.projected_length=8"),
        *("training.steps=6", "training.batch_size=4", "training.evaluate_every=3"),
    ),
    lengths=(100,),
)

TIMED = ("linformer-kit", "full-attention")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """On a busy machine, threads that wait for each other make tiny models many times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def words(chance: random.Random, number: int) -> list[str]:
    return ["".join(chance.choices("abcdefghijklmnop", k=8)) for _ in range(number)]


def python_text(seed: str, functions: int = 60) -> bytes:
    """Python code that occurs nowhere else."""
    chance = random.Random(seed)
    bodies = (words(chance, 3) for _ in range(functions))
    return "".join(f"def {one}({two}):\n    return {two} + {three}\n\n" for one, two, three in bodies).encode()


def json_text(seed: str, rows: int = 100) -> bytes:
    chance = random.Random(seed)
    return json.dumps({word: chance.random() for word in words(chance, rows)}, indent=1).encode()


def make_site(folder: Path, packages: int = 9) -> list[Source]:
    """A site-packages with Python and JSON in every package, and one package with HTML."""
    for number in range(packages):
        package = folder / f"package{number}"
        package.mkdir(parents=True)
        for file in range(4):
            (package / f"module{file}.py").write_bytes(python_text(f"{number} {file}"))
            (package / f"table{file}.json").write_bytes(json_text(f"{number} {file}"))
        # an exact and a near copy in every package
        (package / "copied.py").write_bytes(python_text("copied"))
        (package / "changed.py").write_bytes(f"owner_of_this_file_is = {number}\n".encode() + python_text("changed"))
    (folder / "package0" / "page.html").write_bytes(b"<p>a paragraph</p>\n" * 300)
    return list(files.site_sources(folder))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return make_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, site):
    """The demo, run once with tiny settings: result, directory and output."""
    folder, printed = tmp_path_factory.mktemp("demo") / "new" / "a: demo", io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "installed_files", lambda: site)
        patch.setattr(files, "EXAMPLES", FEW)
        result = demo.run(folder, Console(file=printed, width=80), TINY)
    return result, folder, printed.getvalue()


def linformer(*arguments: str):
    return CliRunner().invoke(app, arguments)


# kinds


ENGLISH = b"This is the text of a manual, and it is for the people who want to read it in a chair. " * 10
C = b"#include <stdio.h>\n" + b"int answer(void) { return 42; }\n" * 40
NOISE = random.Random(0).randbytes(2000)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a/b.py", python_text("a"), "Python"),
        ("a/b.py", python_text("a") + b"def (", None),
        ("a/b.py", b"# nothing but a comment\n" * 40, None),
        ("a/b.pyc", b"\xa7\r\r\n" + NOISE, "byte code"),
        ("a/b.opt-1.pyc", b"\xa7\r\r\n" + NOISE, None),
        ("a/b.pyc", NOISE, None),
        ("a/b.h", C, "C or C++"),
        ("a/b.cpp", C, "C or C++"),
        ("a/b.h", ENGLISH, None),
        ("a/b.c", C + b"\0", None),
        ("a/b.cpython-311-x86_64-linux-gnu.so", b"\x7fELF" + NOISE, "machine code"),
        ("a/libb.so.1.2", b"\x7fELF" + NOISE, "machine code"),
        ("a/b.dll", b"MZ" + NOISE, "machine code"),
        ("a/b.so", ENGLISH, None),
        ("a/b.md", ENGLISH, "English"),
        ("a-1.0.dist-info/METADATA", ENGLISH, "English"),
        ("a/LICENSE", ENGLISH, "English"),
        ("a/b.txt", NOISE, None),
        ("a/b.txt", b"a bell\a" * 100, None),
        ("a/b.json", json_text("a"), "JSON"),
        ("a/b.json", json_text("a")[:-5], None),
        ("a/b.json", b'"' + b"a" * 1000 + b'"', None),
        ("a/b.html", b"<p>a <b>bold</b> paragraph</p>\n" * 30, "HTML or XML"),
        ("a/b.svg", b"<svg><path d='M 1 1'/></svg>\n" * 30, "HTML or XML"),
        ("a/b.html", ENGLISH, None),
        ("a/b.png", b"\x89PNG" + NOISE, "compressed"),
        ("a/b.gz", gzip.compress(NOISE), "compressed"),
        ("a/b.zip", ENGLISH, None),
        ("a/b.py", b"x = 1\n", None),  # too short
        ("a/b.unknown", ENGLISH, None),
    ],
)
def test_name_and_content_must_agree(tmp_path, name, content, kind):
    path = tmp_path / "file"
    path.write_bytes(content)
    proposed = files.candidates([Source(str(path), "a", name)])
    confirmed = [
        kind
        for kind, by_package in proposed.items()
        if any(files.confirmed_size(kind, *each) for each in by_package.values())
    ]
    assert confirmed == ([] if kind is None else [kind])


def test_an_unreadable_file_is_left_out(tmp_path):
    assert files.confirmed_size("Python", Source(str(tmp_path / "gone.py"), "a", "a/gone.py")) == 0
    assert files.confirmed_size("Python", Source(str(tmp_path), "a", "a/folder.py")) == 0


@pytest.mark.parametrize(
    ("kind", "window", "shows"),
    [
        ("machine code", NOISE, True),
        ("machine code", ENGLISH, False),
        ("machine code", bytes(1000) + NOISE[:100], False),
        ("byte code", b"a_name\0" * 500, False),
        ("HTML or XML", b"<p>short</p>" * 20, True),
        ("HTML or XML", b"<!-- " + ENGLISH, False),
        ("compressed", NOISE, True),
        ("compressed", b"\x00\x19\x03\x02" * 500, False),
        ("English", ENGLISH, True),
        ("English", C, False),
        ("English", b"numpy\nscipy\npandas\n" * 50, False),
        ("English", b"Das ist der Text der Anleitung, und er ist lang. " * 20, False),
        ("C or C++", C, True),
        ("C or C++", ENGLISH, False),
        ("Python", python_text("a"), True),
        ("Python", b"A docstring.\n" * 50, False),
        ("Python", b" " * 1000, False),
    ],
)
def test_a_window_must_be_typical_of_its_kind(kind, window, shows):
    assert files.is_typical(files.Example(window.decode("latin-1"), kind, "a", "a/b")) == shows


# files and their packages


def test_a_distribution_owns_all_its_directories(tmp_path):
    records = {
        "Torch-2.0.dist-info": ["torch/__init__.py", "torchgen/gen.py", "six.py", "../../bin/torchrun"],
        "protobuf-1.dist-info": ["google/protobuf/a.py"],
        "googleapis-1.dist-info": ["google/api/b.py"],
    }
    for folder, paths in records.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {folder.split('-')[0]}\nVersion: 1\n"
        )
        (tmp_path / folder / "RECORD").write_text(
            "".join(f"{path},sha256=x,1\n" for path in [*paths, f"{folder}/RECORD"])
        )
    for path in (
        "torch/nn/a.py",
        "torchgen/b.py",
        "__pycache__/six.cpython-311.pyc",
        "google/protobuf/a.py",
        "google/api/b.py",
        "alone/c.py",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    packages = {source.name.removeprefix("site-packages/"): source.package for source in files.site_sources(tmp_path)}
    assert packages["torch/nn/a.py"] == packages["torchgen/b.py"] == packages["Torch-2.0.dist-info/METADATA"] == "Torch"
    assert packages["__pycache__/six.cpython-311.pyc"] == "Torch"
    assert packages["google/protobuf/a.py"] == packages["google/api/b.py"] == packages["protobuf-1.dist-info/RECORD"]
    assert packages["alone/c.py"] == "alone"


def test_the_standard_library_is_several_packages(tmp_path):
    for path in ("abc.py", "ast.py", "json/decoder.py", "site-packages/torch/a.py", "__pycache__/abc.pyc"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    packages = {source.name: source.package for source in files.library_sources(tmp_path)}
    assert packages == {
        "python/abc.py": "python/modules",
        "python/ast.py": "python/modules",
        "python/__pycache__/abc.pyc": "python/modules",
        "python/json/decoder.py": "python/json",
    }


def test_our_own_files_are_left_out(tmp_path):
    (tmp_path / "linformer_kit").mkdir()
    (tmp_path / "linformer_kit" / "cli.py").touch()
    assert list(files.site_sources(tmp_path)) == []


# windows


@given(size=st.integers(files.MIN_SIZE, 10 * WINDOW), seed=st.integers(0, 10**6))
def test_windows_lie_in_the_file_and_do_not_overlap(size, seed):
    starts = files.window_starts(size, str(seed))
    assert len(starts) == max(1, size // WINDOW)
    for one, two in zip(sorted(starts), sorted(starts)[1:], strict=False):
        assert two - one >= WINDOW
    assert min(starts) >= 0
    assert max(starts) == 0 if size < WINDOW else max(starts) + WINDOW <= size


def test_a_third_of_the_files_show_their_beginning_first():
    first = Counter(files.window_starts(20 * WINDOW + 100, str(seed))[0] == 0 for seed in range(1000))
    assert 300 < first[True] < 400


# splits


@pytest.mark.parametrize("seed", range(3))
def test_no_package_and_no_content_is_in_two_splits(site, seed):
    found = files.gather(site, FEW, seed)
    packages = {split: {example.package for example in found.splits[split]} for split in SPLITS}
    texts = [example.text for examples in found.splits.values() for example in examples]
    assert all(packages.values())
    assert sum(map(len, packages.values())) == len(set.union(*packages.values()))
    assert len(texts) == len(set(texts))


def test_near_copies_are_left_out_of_later_splits(site):
    everything = {"train": 30, "validation": 20, "test": 20}  # more examples than there are
    found = files.gather(site, everything)
    assert all(len(found.select(split, kind)) < everything[split] for split in SPLITS for kind in found.kinds)
    for name in ("copied.py", "changed.py"):
        kept = [
            example.package for examples in found.splits.values() for example in examples if example.file.endswith(name)
        ]
        assert len(set(kept)) == 1
    lines = {
        split: {line for example in found.splits[split] for line in files.long_lines(example.text.encode("latin-1"))}
        for split in SPLITS
    }
    for later in found.splits["test"]:
        own = files.long_lines(later.text.encode("latin-1"))
        assert len(own & (lines["train"] | lines["validation"])) <= len(own) / 2


def test_every_kind_is_in_every_split_and_no_package_dominates(site):
    found = files.gather(site, FEW)
    assert found.kinds == ["Python", "JSON"]
    for kind in found.kinds:
        assert len(found.select("train", kind)) == 12
        assert len(found.packages("train", kind)) > 3
        assert found.packages("validation", kind)
        assert found.packages("test", kind)


@pytest.mark.parametrize("count", [6, 8, 30])
def test_each_split_has_its_share_of_every_kind(count):
    packages = {f"package{number}": 1 + number % 5 for number in range(count)}
    # the rarer kind is split first
    rare = dict.fromkeys(list(packages)[:6], 2)
    home = files.split_packages({"common": packages, "rare": rare}, seed=2020)
    for weights in (packages, rare):
        have = Counter()
        for package, weight in weights.items():
            have[home[package]] += weight
        assert have["train"] > max(have["test"], have["validation"])
        assert min(have["test"], have["validation"]) > 0
    assert set(home) == set(packages)


def test_an_example_is_a_piece_of_its_file_and_has_no_absolute_path(site):
    paths = {source.name: Path(source.path) for source in site}
    for example in files.gather(site, FEW).splits["train"]:
        assert not Path(example.file).is_absolute()
        assert example.text.encode("latin-1") in paths[example.file].read_bytes()
        assert len(example.text.encode()) <= WINDOW


def test_a_window_fits_the_model_whatever_its_bytes(tmp_path):
    content = random.Random(0).randbytes(3 * WINDOW)
    (tmp_path / "file").write_bytes(content)
    example = files.read_window("compressed", Source(str(tmp_path / "file"), "a", "a/file"), start=100)
    assert content[100:].startswith(example.text.encode("latin-1"))
    assert WINDOW - 1 <= len(example.text.encode()) <= WINDOW  # in tokens, a start and an end aside


def test_the_same_seed_gives_the_same_bytes_and_another_gives_others(site, tmp_path):
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        (tmp_path / name).mkdir()
        files.write_examples(files.gather(site, FEW, seed), tmp_path / name)
    one, two, three = (
        [(tmp_path / name / f"{split}.jsonl.gz").read_bytes() for split in SPLITS] for name in ("one", "two", "three")
    )
    assert one == two
    assert one != three


def test_examples_are_read_as_written(site, tmp_path):
    found = files.gather(site, FEW)
    files.write_examples(found, tmp_path)
    again = files.read_examples(tmp_path)
    assert again.splits == found.splits
    assert set(again.left_out) == set(found.left_out)


def test_examples_are_written_completely_or_not_at_all(site, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "installed_files", lambda: site)
    monkeypatch.setattr(files, "EXAMPLES", FEW)
    monkeypatch.setattr(files.gzip, "compress", full)
    config = load_config("file_kinds", [f"data.cache={tmp_path}"])
    with pytest.raises(OSError, match="No space left"):
        with_generated_data(config, Console(quiet=True))
    assert list(tmp_path.iterdir()) == []


def test_a_kind_with_too_few_examples_in_a_split_is_left_out_with_the_reason(site):
    found = files.gather(site, FEW)
    assert found.left_out["HTML or XML"] == "too few examples: 1 for train, 0 for validation, 0 for test"
    assert "HTML or XML" not in {example.label for examples in found.splits.values() for example in examples}
    many = files.gather(site, {**FEW, "test": 100})
    assert many.left_out["JSON"] == "too few examples: 12 for train, 4 for validation, 8 for test"


def test_this_python_has_files_of_many_kinds():
    found = files.gather(files.installed_files(), FEW)
    assert {"Python", "C or C++", "machine code", "English"} <= set(found.kinds)
    packages = [{example.package for example in found.splits[split]} for split in SPLITS]
    assert sum(map(len, packages)) == len(set.union(*packages))


# what it writes


def test_the_csv_holds_what_was_measured(tiny):
    result, folder, _ = tiny
    with (folder / demo.NUMBERS).open(newline="") as file:
        rows = list(csv.DictReader(file))
    table = {(row["quantity"], row["of"], row["by"]): float(row["value"]) for row in rows}
    assert len(table) == len(rows)  # no row twice
    assert table["accuracy", "test", ""] == result.metrics["accuracy"]
    assert table["examples", "JSON", "train"] == len(result.dataset.select("train", "JSON")) == 12
    right = sum(table["confusion", kind, kind] for kind in result.kinds)
    tested = sum(value for (quantity, *_), value in table.items() if quantity == "confusion")
    assert tested == len(result.dataset.splits["test"])
    assert right / tested == pytest.approx(result.metrics["accuracy"])
    assert {step for quantity, step, _ in table if quantity == "seconds"} == {
        "gathering",
        "training",
        "testing",
        "timing",
    }


def test_the_accuracy_is_that_of_the_evaluation_on_the_held_out_files(tiny):
    result, folder, _ = tiny
    stored = json.loads((folder / demo.RUN / "evaluation.json").read_text())
    assert (stored["split"], stored["accuracy"]) == ("test", result.metrics["accuracy"])
    truths = Counter(example.label for example in result.dataset.splits["test"])
    assert [sum(counts) for counts in result.confusion] == [truths[kind] for kind in result.kinds]


def test_similar_kinds_are_next_to_each_other():
    metrics = {
        "accuracy": 0.5,
        "macro_f1": 0.5,
        "labels": ["JSON", "Python"],
        "confusion": [[1, 2], [3, 4]],
        "loss": 1.0,
    }
    result = demo.Result(files.Dataset({}), metrics, [], {})
    assert (result.kinds, result.confusion) == (["Python", "JSON"], [[4, 3], [2, 1]])


def test_the_trained_encoder_is_compared_with_full_attention(tiny):
    result, folder, _ = tiny
    ours, full = read_points(folder / demo.COSTS)
    assert (ours["implementation"], ours["variant"], ours["projected_length"]) == ("linformer-kit", "conv", "8")
    assert (full["implementation"], full["variant"], full["projected_length"]) == ("full-attention", "", "")
    for row in (ours, full):
        assert (row["status"], row["memory_status"]) == (OK, OK)
        assert (row["length"], row["batch"], row["hidden_size"], row["num_layers"]) == ("100", "1", "16", "1")
    assert result.costs == [ours, full]
    times = {name: [(100.0, float(row["seconds_median"]))] for name, row in zip(TIMED, (ours, full), strict=True)}
    assert result.document_seconds == times


def test_lengths_at_which_a_model_runs_out_of_memory_are_left_out():
    rows = [
        {"implementation": name, "length": str(length), "seconds_median": seconds}
        for name, length, seconds in (
            *((TIMED[0], 64, "1.0"), (TIMED[1], 64, "2.0"), (TIMED[0], 128, "2.0")),
            (TIMED[1], 128, ""),  # out of memory
        )
    ]
    found = demo.Result(files.Dataset({}), {}, rows, {}).document_seconds
    assert found == {TIMED[0]: [(64.0, 1.0)], TIMED[1]: [(64.0, 2.0)]}


def test_the_picture_is_a_png_with_something_on_it(tiny):
    from matplotlib.image import imread

    _, folder, _ = tiny
    pixels = imread(folder / demo.PICTURE)
    assert pixels.shape[1] > 1000
    assert pixels.min() < pixels.max()


def test_the_confusion_matrix_has_true_classes_in_rows():
    seconds = dict(zip(TIMED, ([(64.0, 1.0)], [(64.0, 2.5)]), strict=True))
    left, right = draw_demo(["Python", "JSON"], [[3, 1], [0, 4]], seconds).axes
    assert (left.get_xlabel(), left.get_ylabel()) == ("predicted class", "true class")
    assert {(text.get_position(), text.get_text()) for text in left.texts} == {
        ((0, 0), "3"),
        ((1, 0), "1"),
        ((1, 1), "4"),
    }
    assert left.get_title() == "8 held-out pieces of files: 87.5% correct"
    assert right.texts[0].get_text() == "at 64 bytes, full attention\ntakes 2.50× as long"


def test_the_demo_leaves_no_other_files(tiny):
    _, folder, _ = tiny
    files_of_demo = {demo.PICTURE, demo.NUMBERS, demo.COSTS, demo.RUN, demo.CACHE}
    assert {path.name for path in folder.iterdir()} == files_of_demo


def test_the_printed_numbers_are_those_measured(tiny):
    result, folder, printed = tiny
    assert f"Correct: {result.metrics['accuracy']:.1%} of 8 pieces" in printed
    assert "Left out: HTML or XML, too few examples." in printed
    for points in result.document_seconds.values():
        assert format_duration(points[0][1]) in printed
    assert str(folder / demo.PICTURE) in printed
    assert "\x1b" not in printed


def test_the_printed_command_runs(tiny):
    import shlex

    result, _, printed = tiny
    shown, answer = printed.split("$ ")[1].splitlines()[:2]
    program, *arguments = shlex.split(shown)
    again = linformer(*arguments)
    assert (program, again.exit_code) == ("linformer", 0)
    assert again.stdout.split("\t")[0] == answer.split("\t")[0].split("  ")[0].strip()
    assert again.stdout.split("\t")[0] in result.kinds


def test_a_second_run_does_not_train_again_and_replaces_the_files(tiny, site, monkeypatch):
    result, folder, _ = tiny
    for name in (demo.PICTURE, demo.NUMBERS):
        (folder / name).write_text("old")
    weights = folder / demo.RUN / "model" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    printed = io.StringIO()
    # the installation may have changed in between
    monkeypatch.setattr(files, "installed_files", lambda: site[:5])
    monkeypatch.setattr("linformer_kit.bench.compare.compare", lambda sweep, path, **_: open_table(path))
    again = demo.run(folder, Console(file=printed, width=80, force_terminal=True), TINY)
    assert "is finished" in printed.getvalue()
    assert "━" in printed.getvalue()  # a terminal shows bars
    assert (again.confusion, again.dataset.splits) == (result.confusion, result.dataset.splits)
    assert weights.stat().st_mtime_ns == before
    assert (folder / demo.PICTURE).read_bytes().startswith(b"\x89PNG")
    assert (folder / demo.NUMBERS).read_text().startswith("quantity,")


# errors are reported at once, in one line


@pytest.fixture
def no_work(monkeypatch):
    """Fail if the demo starts its work."""
    monkeypatch.setattr(files, "write", lambda *_: pytest.fail("the work has started"))


def fails_in_one_line(result, *said: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    for each in said:
        assert each in result.stderr


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("path", ["taken", "taken/below"], ids=["a file", "below a file"])
def test_an_output_that_cannot_be_a_directory_is_rejected(tmp_path, path):
    (tmp_path / "taken").write_text("precious")
    fails_in_one_line(linformer("demo", "--output", str(tmp_path / path)), path, "--output")
    assert (tmp_path / "taken").read_text() == "precious"


@pytest.mark.usefixtures("no_work")
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a directory that even root cannot write")
@pytest.mark.parametrize("path", ["/proc", "/proc/demo"])
def test_an_output_that_cannot_be_written_is_rejected(path):
    fails_in_one_line(linformer("demo", "--output", path), path, "--output")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", [demo.PICTURE, demo.NUMBERS, demo.COSTS])
def test_an_output_whose_files_are_directories_is_rejected(tmp_path, name):
    (tmp_path / name).mkdir()
    fails_in_one_line(linformer("demo", "--output", str(tmp_path)), name, "--output")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", [demo.RUN, demo.CACHE])
def test_an_output_whose_directories_are_files_is_rejected(tmp_path, name):
    (tmp_path / name).write_text("precious")
    fails_in_one_line(linformer("demo", "--output", str(tmp_path)), name, "--output")
    assert (tmp_path / name).read_text() == "precious"


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("missing", demo.REQUIRED)
def test_a_missing_package_is_reported_with_the_install_command(tmp_path, monkeypatch, missing):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == missing else name)
    fails_in_one_line(linformer("demo", "--output", str(tmp_path)), missing, 'pip install "linformer-kit[train]"')


def test_too_few_files_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "installed_files", list)
    result = linformer("demo", "--output", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: this Python has too few files")
    assert result.stderr.count("\n") == 1


def test_damaged_examples_are_reported(tmp_path):
    (tmp_path / demo.CACHE / f"file_kinds-{files.VERSION}").mkdir(parents=True)
    result = linformer("demo", "--output", str(tmp_path))
    assert result.exit_code == 2
    assert "train.jsonl.gz" in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_interrupted_training_says_how_to_resume(tmp_path, site, monkeypatch):
    from linformer_kit.errors import Stopped
    from linformer_kit.training import train

    def stopped(*_):
        raise Stopped("stopped at step 3", 130)

    monkeypatch.setattr(files, "installed_files", lambda: site)
    monkeypatch.setattr(files, "EXAMPLES", FEW)
    monkeypatch.setattr(train, "train", stopped)
    result = linformer("demo", "--output", str(tmp_path / "a demo"))
    assert result.exit_code == 130
    assert result.stderr == f"Stopped and saved. To resume: linformer demo --output '{tmp_path}/a demo'\n"


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_real_interrupt_leaves_neither_traceback_nor_files(tmp_path):
    # shells make background jobs, and thus this test, ignore Ctrl-C
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from linformer_kit.cli import app; app()"
    command = [sys.executable, "-c", code, "demo", "--output", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # the first line: the work has started
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, errors) == (130, "Stopped.\n")
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []
