"""`linformer compare`: only what is right is timed, every point once, nothing measured is lost."""

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from linformer_kit.bench import compare as compare_module
from linformer_kit.bench import implementations, names, paper_table, solo
from linformer_kit.bench.compare import Comparison
from linformer_kit.bench.implementations import IMPLEMENTATIONS, Point, check
from linformer_kit.bench.measure import FAILED, OK, OUT_OF_MEMORY, OVER_TIME_LIMIT, WRONG, is_out_of_memory
from linformer_kit.bench.peers import WrongImplementation
from linformer_kit.bench.result_table import COLUMNS, FACTS, FOUND, KEYS, read_points
from linformer_kit.bench.sweep import PRESETS, Sweep, read_sweep
from linformer_kit.cli import app
from linformer_kit.csv_tables import Table
from linformer_kit.errors import UserError
from linformer_kit.models import attention_linformer

SIZES = {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "target_length": 8}
SEES_THE_FUTURE = ("linformer-pytorch", "encoder-decoder")
ALL = [(name, subject) for name, contender in IMPLEMENTATIONS.items() for subject in contender.builds]


def point_of(name, subject, step="forward", length=128):
    return Point(subject, step, name, length, 16 if IMPLEMENTATIONS[name].projects else None, 2, **SIZES)


def linformer(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


# the check


@pytest.mark.parametrize(("name", "subject"), [pair for pair in ALL if pair != SEES_THE_FUTURE], ids=str)
def test_what_is_right_passes_and_can_be_called(name, subject):
    point = point_of(name, subject)
    check(point)
    for step in ("forward", "training", *(["generation"] if subject == "encoder-decoder" else [])):
        implementations.call_of(replace(point, step=step))()


@pytest.mark.parametrize("length", [97, 1500], ids="N{}".format)
@pytest.mark.parametrize("name", ["linformer-kit", "linformer-kit-none", "linformer", "linformer-pytorch"])
def test_layers_are_checked_at_their_own_length(name, length):
    check(point_of(name, "layer", length=length))


def test_an_encoder_decoder_that_sees_the_future_is_refused():
    with pytest.raises(WrongImplementation, match=r"linformer-pytorch: another last token .* it sees the future"):
        check(point_of(*SEES_THE_FUTURE))


@pytest.mark.parametrize("name", ["linformer-kit", "linformer-kit-none", "linformer", "linformer-pytorch"])
@pytest.mark.parametrize("subject", ["layer", "encoder"])
def test_one_percent_too_much_is_refused(monkeypatch, name, subject):
    right = IMPLEMENTATIONS[name].builds[subject]

    def wrong(point):
        model = right(point)
        ends = ("output.weight", "to_out.weight", "w_o.weight")
        weight = next(weight for name, weight in model.named_parameters() if name.endswith(ends))
        weight.data *= 1.01  # W_O of the first layer
        return model

    # the check builds its own twin of what is built, with the same seed
    monkeypatch.setattr(implementations, "build", wrong)
    with pytest.raises(WrongImplementation, match=f"^{name}: its"):
        check(point_of(name, subject))


def softmax_that_is_too_sharp(query, *rest, right=attention_linformer.softmax_attention, **options):
    return right(1.01 * query, *rest, **options)


@pytest.mark.parametrize("name", ["linformer-kit", "linformer-kit-none"])
@pytest.mark.parametrize("subject", ["layer", "encoder", "encoder-decoder"])
def test_a_softmax_that_is_too_sharp_is_refused(monkeypatch, name, subject):
    """Ours is compared with the equation, not with itself."""
    monkeypatch.setattr(attention_linformer, "softmax_attention", softmax_that_is_too_sharp)
    with pytest.raises(WrongImplementation, match=f"^{name}: its"):
        check(point_of(name, subject))


@pytest.mark.parametrize("length", [128, 1500], ids="N{}".format)
def test_what_is_done_in_chunks_without_gradients_is_checked(monkeypatch, length):
    """Layers are timed without gradients and with more queries than a chunk."""
    right = attention_linformer.in_chunks

    def too_loud(*args):
        outputs, weights = right(*args)
        return outputs.mul_(1.01), weights

    monkeypatch.setattr(attention_linformer, "in_chunks", too_loud)
    with pytest.raises(WrongImplementation, match="its output without gradients"):
        check(replace(point_of("linformer-kit", "layer", length=length), batch=16))


def test_a_package_is_needed_only_for_itself(monkeypatch):
    version = metadata.version

    def without(package):
        if package == "linformer-pytorch":
            raise metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(metadata, "version", without)
    check(point_of("linformer", "layer"))


def test_the_names_that_a_shell_completes_are_those_there_are():
    assert tuple(IMPLEMENTATIONS) == names.IMPLEMENTATIONS
    assert set(names.SUBJECTS) == set(implementations.CHECKS)
    assert {step for step in names.STEPS if step != "generation"} == set(implementations.MODES)


# one point alone


def test_the_memory_of_a_point_is_that_of_its_attention_weights():
    """Unfused attention stores all its weights twice, before and after the softmax; that is most of what it takes."""
    point = Point("encoder", "forward", "bert-eager", 1024, None, 2, **{**SIZES, "num_layers": 1})
    found = solo.solo(point, 60.0)
    assert found.status == OK
    weights = 2 * 4 * 1024**2 * 4
    assert 2 * weights <= found.peak_bytes < 2.5 * weights


def test_what_does_not_fit_is_recorded_as_such():
    point = Point("encoder", "forward", "bert-eager", 65536, None, 64, hidden_size=8, num_heads=4, num_layers=1)  # 4 TB
    assert solo.solo(point, 60.0) == solo.Solo(OUT_OF_MEMORY)


def test_what_fails_for_reasons_of_its_own_does_not_end_the_sweep():
    point = Point("encoder", "forward", "nystromformer", 100, None, 1, **SIZES)  # not a multiple of its 64 landmarks
    found = solo.solo(point, 60.0)
    assert found.status == FAILED
    assert "RuntimeError: shape" in found.note


def test_what_takes_too_long_is_recorded_as_such():
    found = solo.measure_here(point_of("linformer-kit", "layer"), time_limit=1e-9)
    assert found.status == OVER_TIME_LIMIT
    assert "the limit is 0 s" in found.note


def test_a_process_that_hangs_is_ended():
    with pytest.raises(solo.WorkerFailed, match=OVER_TIME_LIMIT):
        solo.ask("linformer_kit.bench.solo", {}, seconds=0.01)


# what is swept


def test_every_point_that_makes_sense_is_there_once():
    sweep = read_sweep(
        {
            "lengths": [64, 512, 64],
            "projected_lengths": [32, 128],
            "implementations": ["linformer-kit", "linformer-kit-none", "linformer", "led"],
            "subjects": ["layer", "encoder-decoder"],
            "steps": ["forward", "generation"],
        }
    )
    found = [
        (point.length, point.subject, point.step, point.implementation, point.projected_length)
        for group in sweep.groups()
        for point in group.points(batch=1)
    ]
    assert len(found) == len(set(found))
    expected = set()
    for length, subject, step in itertools.product((64, 512), ("layer", "encoder-decoder"), ("forward", "generation")):
        if subject == "layer" and step == "generation":
            continue
        for rows in (32, 128):
            if rows <= length:
                expected.add((length, subject, step, "linformer-kit", rows))
                if subject == "layer":
                    expected.add((length, subject, step, "linformer", rows))
        expected.add((length, subject, step, "linformer-kit-none", None))
        if subject == "encoder-decoder":
            expected.add((length, subject, step, "led", None))
    assert set(found) == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_the_presets_can_be_read(preset):
    assert read_sweep(PRESETS[preset]).groups()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--implementations", "linfromer"],
            "there is no implementation 'linfromer'; did you mean 'linformer'? known: linformer-kit,",
        ),
        (
            ["--projected-lengths", "256", "--lengths", "64,128"],
            "projected_lengths has 256, but no length is larger than 128",
        ),
        (["--lengths", "many"], "'many' is not a list of whole numbers, such as 512,1024"),
        (["--lengths", ","], "lengths is empty"),
        (["--lengths", "0"], "lengths[0] is 0; it must be at least 1"),
        (["--subjects", "decoder"], "subjects[0] is the text 'decoder'; allowed: layer, encoder, encoder-decoder"),
        (["--steps", "generation"], "linformer-kit takes no part in layer × generation"),
        (["--implementations", "bert"], "bert takes no part in layer × forward; it has encoder"),
        (["--device", "tpu"], "device is 'tpu'; PyTorch has here: cpu"),
        (["--time-limit", "0"], "time_limit is 0.0; it must be larger than 0"),
        (["--tokens", "-1"], "tokens is -1; it must be at least 0"),
        (["missing.yaml"], "missing.yaml"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_nothing_is_written(arguments, said, tmp_path):
    result = linformer(*arguments, "--output", tmp_path / "out.csv")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lenghts: [64]", "there is no key lenghts; did you mean 'lengths'? allowed here: lengths, projected_lengths"),
        ("hidden_size: 30\nnum_heads: 4", "hidden_size is 30, which 4 heads cannot share"),
        ("sharing: kv\nimplementations: [linformer]", "sharing is kv, but linformer is compared with headwise only"),
        ("just words", "holds no keys; it may have lengths, "),
        ("lengths: [64\n", "is not YAML"),
    ],
)
def test_a_bad_sweep_is_one_line(text, said, tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    result = linformer(path, "--output", tmp_path / "out.csv")
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "linformer", replace(IMPLEMENTATIONS["linformer"], package="no-such-package"))
    with pytest.raises(
        UserError, match=r'no-such-package is not installed; run: pip install "linformer-kit\[bench\]", or leave'
    ):
        read_sweep({"implementations": ["linformer"]})


def test_an_older_table_is_not_touched(tmp_path):
    path = tmp_path / "old.csv"
    path.write_text("subject,length\nlayer,512\n")
    result = linformer("--output", path)
    assert result.exit_code == 2
    assert "old.csv has the columns subject, length, which this version does not write" in result.stderr
    assert path.read_text() == "subject,length\nlayer,512\n"
    with pytest.raises(UserError, match="it lacks the column step"):
        read_points(path)


@pytest.mark.parametrize("name", ["", "table.png"])
def test_what_is_no_csv_is_not_written(name, tmp_path):
    result = linformer("--output", tmp_path / name, "--fresh")
    assert result.exit_code == 2
    assert "it must be the name of a CSV file, such as compare.csv" in result.stderr


def test_a_table_that_is_no_text_is_not_touched(tmp_path):
    path = tmp_path / "points.csv"
    path.write_bytes(b"\xff\xfe\x00,1\n")
    result = linformer("--output", path)
    assert result.exit_code == 2, result.output
    assert "which this version does not write" in result.stderr
    assert path.read_bytes() == b"\xff\xfe\x00,1\n"


def comparison_of(tmp_path, **keys):
    sweep = Sweep(
        **{**SIZES, "lengths": [128], "projected_lengths": [16], "implementations": ["linformer-kit", "bert"], **keys}
    )
    return Comparison(replace(sweep, subjects=["encoder"]), Table(tmp_path / "points.csv", KEYS, (*FOUND, *FACTS)))


@pytest.mark.parametrize("fact", ["cpu", "torch", "model_code"])
def test_numbers_from_elsewhere_are_not_added_to(fact, tmp_path):
    comparison = comparison_of(tmp_path)
    comparison.table.put([comparison.row(point_of("linformer", "encoder"))])
    comparison.require_same_facts()
    comparison.machine[fact] = "another"
    with pytest.raises(UserError, match=r"points\.csv was measured with \w+=.*, now it is another, .*--fresh"):
        comparison.require_same_facts()


@pytest.mark.parametrize("keys", [{"tokens": 0}, {"hidden_size": 64}, {"sharing": "kv"}], ids=str)
def test_numbers_of_other_settings_are_not_added_to(keys, tmp_path):
    comparison = comparison_of(tmp_path)
    comparison.table.put([comparison.row(point_of("bert", "encoder"))])
    with pytest.raises(UserError, match=f"was measured with {next(iter(keys))}="):
        comparison_of(tmp_path, **keys).require_same_facts()


def test_an_implementation_of_another_version_is_named(tmp_path):
    comparison = comparison_of(tmp_path)
    comparison.table.put([{**comparison.row(point_of("bert", "encoder")), "implementation": "performer"}])
    with pytest.raises(UserError, match="has the implementation 'performer', which this version does not know"):
        comparison.require_same_facts()


@pytest.mark.parametrize("status", [OUT_OF_MEMORY, OVER_TIME_LIMIT])
def test_what_was_too_much_is_not_tried_with_more(status, tmp_path):
    comparison = comparison_of(tmp_path)
    point = replace(point_of("bert", "encoder", length=128), batch=4)
    comparison.table.put([comparison.row(point, memory_status=status)])
    refused = solo.Solo(status, note="so it was at N=128; not tried")
    assert comparison.refusal(replace(point, length=256)) == refused
    assert comparison.refusal(replace(point, length=256, batch=2)) == refused  # as many tokens, in longer examples
    assert comparison.refusal(replace(point, length=256, batch=1)) is None  # fewer tokens
    assert comparison.refusal(replace(point, length=64, batch=64)) is None  # shorter examples
    assert comparison.refusal(replace(point, length=256, implementation="fnet")) is None
    assert comparison.refusal(point) is None


def test_what_failed_at_one_length_may_work_at_another(tmp_path):
    comparison = comparison_of(tmp_path)
    point = point_of("nystromformer", "encoder", length=100)
    comparison.table.put([comparison.row(point, memory_status=FAILED)])
    assert comparison.refusal(replace(point, length=128)) is None
    comparison.table.put([comparison.row(point, memory_status=WRONG)])
    assert comparison.refusal(replace(point, length=128)) == solo.Solo(WRONG, note="so it was at N=100; not tried")


def test_bad_luck_is_tried_again_by_a_new_command_and_time_by_a_higher_limit(tmp_path):
    comparison = comparison_of(tmp_path, time_limit=5.0)
    (group,) = comparison.sweep.groups()
    point = comparison.points(group)[0]
    for status, again, longer in (
        (OUT_OF_MEMORY, True, True),
        (FAILED, True, True),
        (OVER_TIME_LIMIT, False, True),
        (OK, False, False),
    ):
        comparison.table.put([comparison.row(point, memory_status=status, time_limit=5.0)])
        assert comparison.is_tried(group, 0) != again
        assert comparison_of(tmp_path, time_limit=6.0).is_tried(group, 0) != longer
        comparison.tried = {point}
        assert comparison.is_tried(group, 0)  # but once only
        comparison.tried = set()


def test_whoever_joins_takes_turns_with_all_that_are_there(tmp_path, monkeypatch):
    """Times of different rounds cannot be compared: those of others are forgotten, and all are timed again."""
    monkeypatch.setattr(compare_module, "solo", lambda point, limit: solo.Solo(OK, 0.1, 2**20))
    first = comparison_of(tmp_path)
    (group,) = first.sweep.groups()
    for index in range(2):
        list(first.try_alone(group, index))
    list(first.time(group))
    assert first.is_timed(group)

    second = comparison_of(tmp_path, projected_lengths=[32], implementations=["linformer-kit"])
    (group,) = second.sweep.groups()
    assert not second.is_tried(group, 0)
    list(second.try_alone(group, 0))
    assert all(not row["status"] and not row["seconds_median"] for row in second.table.rows())
    assert not second.is_timed(group)
    list(second.time(group))
    rows = read_points(second.table.path)
    assert {(row["implementation"], row["projected_length"]) for row in rows} == {
        ("linformer-kit", "16"),
        ("bert", ""),
        ("linformer-kit", "32"),
    }
    assert all(row["status"] == OK and row["seconds_median"] for row in rows)


def test_who_fits_alone_but_not_beside_the_others_gets_another_chance(tmp_path):
    comparison = comparison_of(tmp_path, implementations=["bert"])
    (group,) = comparison.sweep.groups()
    (point,) = comparison.points(group)
    comparison.table.put([comparison.row(point, memory_status=OK, status=OUT_OF_MEMORY, peak_mib=1.0)])
    assert not comparison.is_timed(group)
    list(comparison.time(group))
    assert comparison.found(point)["status"] == OK
    comparison.table.put([comparison.row(point, status=OUT_OF_MEMORY)])
    assert comparison.is_timed(group)  # once for each command


def test_the_largest_batch_is_that_of_whoever_takes_most_and_is_kept(tmp_path, monkeypatch):
    asked = []

    def measured(point, limit):
        asked.append((point.implementation, point.projected_length))
        return solo.Solo(OK, seconds=0.5 if point.implementation == "bert" else 0.25, peak_bytes=1)

    monkeypatch.setattr(compare_module, "solo", measured)
    comparison = comparison_of(tmp_path, tokens=0, projected_lengths=[8, 16], time_limit=20.0)
    (group,) = comparison.sweep.groups()
    assert not comparison.is_probed(group)
    list(comparison.probe(group))
    assert asked == [("linformer-kit", 16), ("bert", None)]
    # 32 examples of 128 tokens took half a second, and a tenth of the limit is two
    assert comparison.known_batch(group) == 4 * 32
    assert comparison_of(tmp_path, tokens=0).known_batch(group) == 4 * 32


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_of_memory_is_recognised(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("the size of tensor a must match"))


# the command


def start(path, *arguments):
    sizes = {
        **SIZES,
        "lengths": [64],
        "projected_lengths": [16],
        "subjects": ["encoder-decoder"],
        "seconds": 0.1,
        "rounds": 2,
    }
    sweep = path.with_suffix(".yaml")
    sweep.write_text(json.dumps({**sizes, "implementations": ["linformer-kit", "linformer-pytorch"]}))
    script = Path(sys.executable).with_name("linformer")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [script, "compare", sweep, "--output", path, *arguments]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


@pytest.mark.slow
def test_a_sweep_is_interrupted_and_taken_up_again(tmp_path):
    path = tmp_path / "points.csv"
    running = start(path)
    while not path.exists() or not any(row["memory_status"] for row in read_points(path)):
        assert running.poll() is None, running.communicate()
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "what was measured is kept in" in said
    kept = [row for row in read_points(path) if row["memory_status"]]
    assert kept

    shown, said = (again := start(path)).communicate(timeout=300)
    assert again.returncode == 0, said
    rows = {(row["implementation"], row["length"]): row for row in read_points(path)}
    assert set(rows) == {(name, length) for name in ("linformer-kit", "linformer-pytorch") for length in ("64",)}
    for row in kept:  # not measured twice
        assert rows[row["implementation"], row["length"]]["peak_mib"] == row["peak_mib"]
    for (name, _), row in rows.items():
        assert row["status"] == row["memory_status"] == ("ok" if name == "linformer-kit" else "wrong")
        assert bool(row["seconds_median"]) == bool(row["peak_mib"]) == (name == "linformer-kit")
        assert row["torch"] == torch.__version__
        assert all(row[name] for name in FACTS)
    assert float(rows["linformer-kit", "64"]["seconds_fastest"]) <= float(rows["linformer-kit", "64"]["seconds_median"])
    assert "sees the future" in rows["linformer-pytorch", "64"]["note"]
    assert "encoder-decoder, forward" in shown
    assert "linformer-pytorch" in shown

    before = path.read_bytes()
    _, said = (done := start(path)).communicate(timeout=300)
    assert done.returncode == 0, said
    assert path.read_bytes() == before  # nothing was left to do


# the paper's table


def test_a_cell_is_the_ratio_to_the_baseline_of_the_same_batch_beside_the_papers(tmp_path):
    table = Table(tmp_path / "points.csv", KEYS, (*FOUND, *FACTS))

    def row(implementation, length, rows, batch, seconds, peak, status=OK):
        key = {"subject": "encoder", "step": "forward", "implementation": implementation, "length": length}
        found = {"status": status, "seconds_median": seconds, "memory_status": status, "peak_mib": peak}
        return {**key, "projected_length": rows, "batch": batch, **found, **dict.fromkeys(FACTS, "1")}

    table.put(
        [
            row("bert-eager", 512, None, 8, 3.0, 100.0),
            row("linformer-kit", 512, 128, 8, 2.0, 40.0),
            row("bert-eager", 65536, None, 1, None, None, OUT_OF_MEMORY),
            row("linformer-kit", 65536, 2048, 1, 5.0, 50.0),
        ]
    )
    first, second, third, fourth = paper_table.cells(list(table.rows()))
    assert first == {
        "saved": "time",
        "n": "512",
        "k": "128",
        "batch": "8",
        "measured": "1.50",
        "paper": "1.5",
        "why not": "",
    }
    assert (second["measured"], second["paper"], second["why not"]) == ("", "7.9", "bert-eager: out of memory")
    assert (third["saved"], third["measured"], third["paper"]) == ("memory", "2.50", "1.7")
    assert fourth["paper"] == "18"

    from rich.console import Console

    written = paper_table.publish(list(table.rows()), tmp_path / "points.csv", Console(quiet=True))
    assert [path.name for path in written] == ["points_cells.csv", "points.png", "points.svg"]
    with written[0].open(newline="") as file:
        assert list(csv.DictReader(file)) == [first, second, third, fourth]
    svg = written[2].read_bytes()
    paper_table.publish(list(table.rows()), tmp_path / "points.csv", Console(quiet=True))
    assert written[2].read_bytes() == svg  # pictures change only when numbers do


def test_the_table_of_the_paper_is_complete():
    for table in (paper_table.PAPER_TIME, paper_table.PAPER_MEMORY):
        assert list(table) == [2**power for power in range(9, 17)]
        assert sum(map(len, table.values())) == 2 + 3 + 4 + 5 * 5
    assert COLUMNS[: len(KEYS)] == KEYS
