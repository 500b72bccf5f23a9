"""`linformer compare`: every point is measured once, nothing is lost, numbers from elsewhere are not added to."""

import csv
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from training_zoo import environment
from typer.testing import CliRunner

from linformer_kit import LinformerConfig
from linformer_kit.bench import compare as compare_module
from linformer_kit.bench import isolated, machine, paper_table
from linformer_kit.bench.compare import Comparison
from linformer_kit.bench.encoders import saved_config
from linformer_kit.bench.implementations import IMPLEMENTATIONS, build, check, make_workload, projects
from linformer_kit.bench.isolated import Isolated, measure_isolated, run_isolated, run_rounds, run_worker
from linformer_kit.bench.measure import FAILED, OK, OUT_OF_MEMORY, OVER_TIME_LIMIT, WRONG, Timing
from linformer_kit.bench.point import Point
from linformer_kit.bench.result_table import COLUMNS, FACTS, KEYS, open_table, read_points
from linformer_kit.bench.sweep import PRESETS, Sweep, read_keys, read_sweep
from linformer_kit.cli import app
from linformer_kit.csv_tables import write_rows
from linformer_kit.errors import UserError
from linformer_kit.models.options_linformer import NO_WINDOW
from linformer_kit.process_memory import is_out_of_memory

ROOT = Path(__file__).parent.parent
SIZES = {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "target_length": 8}


def point_of(name, subject, step="forward", length=128):
    return Point(subject, step, name, length, 16 if projects(name, subject) else None, 2, **SIZES)


def linformer(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


# one point in isolation


def test_the_memory_of_a_point_is_that_of_its_attention_weights():
    """Unfused attention stores all its weights twice, before and after the softmax; that is most of what it takes."""
    point = Point("encoder", "forward", "bert-eager", 1024, None, 2, **{**SIZES, "num_layers": 1})
    found = measure_isolated(point, 60.0)
    assert found.status == OK
    weights = 2 * 4 * 1024**2 * 4
    assert 2 * weights <= found.peak_bytes < 2.5 * weights


@pytest.mark.usefixtures("forked_workers")
def test_a_point_that_does_not_fit_in_memory_is_recorded():
    point = Point("encoder", "forward", "bert-eager", 65536, None, 64, hidden_size=8, num_heads=4, num_layers=1)  # 4 TB
    assert measure_isolated(point, 60.0) == Isolated(OUT_OF_MEMORY)


@pytest.mark.usefixtures("forked_workers")
def test_an_implementation_that_fails_does_not_end_the_sweep():
    point = Point("encoder", "forward", "nystromformer", 100, None, 1, **SIZES)  # not a multiple of its 64 landmarks
    found = measure_isolated(point, 60.0)
    assert found.status == FAILED
    assert "RuntimeError: shape" in found.note


def test_a_point_over_the_time_limit_is_recorded():
    found = run_isolated(point_of("linformer-kit", "layer"), time_limit=1e-9)
    assert found.status == OVER_TIME_LIMIT
    assert "the limit is 0 s" in found.note


def test_a_system_that_does_not_report_memory_gives_times_only(monkeypatch):
    monkeypatch.setattr(isolated, "peak_resident", lambda: None)
    found = run_isolated(point_of("linformer-kit", "layer"), time_limit=60.0)
    assert (found.status, found.peak_bytes) == (OK, None)


def test_a_hanging_worker_is_stopped():
    assert run_worker({}, {}, seconds=0.01) == {"status": OVER_TIME_LIMIT}


def test_a_crashed_worker_is_recorded_with_its_last_line_of_stderr():
    found = run_worker({}, {}, module="linformer_kit.no_such_module")
    assert found["status"] == FAILED
    assert "No module named" in found["note"]


def test_crashed_rounds_are_recorded_for_all_points(monkeypatch):
    monkeypatch.setattr(isolated, "run_worker", lambda *_: {"status": FAILED, "note": "Bus error"})
    points = [point_of("linformer-kit", "layer"), point_of("full-attention", "layer")]
    assert isolated.measure_rounds(points, 1.0, 3, hold=True) == dict.fromkeys(points, Timing(FAILED, note="Bus error"))


def test_a_point_that_does_not_fit_next_to_the_others_is_recorded(monkeypatch):
    right = isolated.make_workload

    def too_large(point):
        if point.implementation == "full-attention":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return right(point)

    monkeypatch.setattr(isolated, "make_workload", too_large)
    points = [point_of("linformer-kit", "layer"), point_of("full-attention", "layer")]
    first, second = run_rounds(points, 0.1, 1, hold=False)
    assert (first.status, first.rounds, second) == (OK, 1, Timing(OUT_OF_MEMORY))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("backend", ["keras-jax", "keras-tensorflow"])  # test_benchmark.py measures on PyTorch
def test_a_keras_layer_is_measured_on_its_backend(backend):
    pytest.importorskip(backend.removeprefix("keras-"))
    point = replace(point_of("linformer-kit", "layer", "training", length=48), backend=backend)
    assert measure_isolated(point, 60.0).status == OK
    (timing,) = isolated.measure_rounds([point], 0.1, 1, hold=False).values()
    assert timing.status == OK


def test_each_backend_of_keras_has_its_environment():
    point = replace(point_of("linformer-kit", "layer"), backend="keras-jax")
    assert isolated.environment_of(point)["KERAS_BACKEND"] == "jax"
    assert isolated.environment_of(point_of("linformer-kit", "layer")) == {}


# what is swept


def test_every_valid_point_is_listed_once():
    sweep = read_sweep(
        {
            "lengths": [64, 512, 64],
            "projected_lengths": [32, 128],
            "implementations": ["linformer-kit", "full-attention", "linformer", "led"],
            "subjects": ["layer", "encoder-decoder"],
            "steps": ["forward", "generation"],
        }
    )
    found = [
        (point.length, point.subject, point.step, point.implementation, point.projected_length)
        for group in sweep.groups()
        for point in group
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
        expected.add((length, subject, step, "full-attention", None))
        if subject == "encoder-decoder":
            expected.add((length, subject, step, "led", None))
    assert set(found) == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_the_presets_can_be_read(preset):
    assert read_sweep(PRESETS[preset]).groups()


SWEEPS = [path for path in sorted((ROOT / "benchmarks").glob("*.yaml")) if path.stem != "learning"]  # a study


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_sweeps_of_the_benchmarks_can_be_read_and_name_their_table(path):
    sweep = read_sweep(read_keys(path))
    assert sweep.groups()
    assert sweep.output == f"results/{path.stem}.csv"
    assert read_points(ROOT / sweep.output)


def test_a_former_name_is_accepted_with_a_warning():
    with pytest.warns(FutureWarning, match="the implementation linformer-kit-none is now called full-attention"):
        sweep = read_sweep({"implementations": ["linformer-kit", "linformer-kit-none"]})
    assert sweep.implementations == ["linformer-kit", "full-attention"]
    target = {"name": "time", "of": {"implementation": "linformer-kit"}, "at": {"step": ["reading", "decoding"]}}
    keys = {"subjects": ["causal-lm"], "implementations": ["linformer-kit"], "targets": [target]}
    with pytest.warns(FutureWarning, match="the step reading is now called prefill"):
        sweep = read_sweep({**keys, "steps": ["reading"]})
    assert (sweep.steps, sweep.targets[0].at) == (["prefill"], {"step": ["prefill", "decoding"]})


def test_a_table_with_former_names_is_read_with_the_new_ones(tmp_path):
    row = dict.fromkeys(COLUMNS, "") | {"step": "reading", "implementation": "linformer-kit-none", "length": "64"}
    write_rows(tmp_path / "points.csv", [row, {**row, "step": "preparation", "phase": "reading"}])
    found = [(row["implementation"], row["step"], row["phase"]) for row in read_points(tmp_path / "points.csv", True)]
    assert found == [("full-attention", "prefill", ""), ("full-attention", "preparation", "reading")]
    table = open_table(tmp_path / "points.csv")
    assert table.get(implementation="full-attention", step="prefill", length=64)
    assert next(table.rows(step="preparation"))["phase"] == "reading"


def test_blocks_and_slots_of_causal_subjects():
    keys = {"subjects": ["causal-layer"], "projected_lengths": [4, 16], "block_lengths": [8, 32], "lengths": [64]}
    (group,) = read_sweep({**keys, "implementations": ["linformer-kit", "full-attention"]}).groups()
    found = {(point.implementation, point.block_length, point.projected_length) for point in group}
    ours = {("linformer-kit", block, slots) for block, slots in ((8, 4), (32, 4), (32, 16))}
    assert found == {*ours, ("full-attention", None, None)}


def test_window_lengths_of_what_has_a_window():
    keys = {"lengths": [256], "projected_lengths": [0, 16], "window_lengths": [0, 32], "subjects": ["encoder"]}
    (group,) = read_sweep({**keys, "implementations": ["linformer-kit", "linformer", "longformer"]}).groups()
    assert [(point.implementation, point.variant, point.projected_length) for point in group] == [
        ("linformer-kit", "", 16),
        ("linformer-kit", "window 32", 0),
        ("linformer-kit", "window 32", 16),
        ("linformer", "", 16),
        ("longformer", "", None),
        ("longformer", "window 32", None),
    ]


def test_batches_are_fixed_or_hold_the_same_number_of_tokens():
    keys = {"lengths": [512, 8192], "implementations": ["full-attention"]}
    batches = [[p.batch for g in read_sweep({**keys, **more}).groups() for p in g] for more in ({}, {"batch": 3})]
    assert batches == [[8, 1], [3, 3]]


def test_interleaved_lengths_share_their_rounds():
    (group,) = read_sweep({"lengths": [64, 32], "projected_lengths": [8], "interleave_lengths": True}).groups()
    assert {point.length for point in group} == {32, 64}


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
        (["--lengths", "many"], "'many' is not a list of integers, such as 512,1024"),
        (["--lengths", ","], "lengths is empty"),
        (["--lengths", "0"], "lengths[0] is 0; it must be at least 1"),
        (
            ["--subjects", "decoder"],
            "subjects[0] is the string 'decoder'; allowed: layer, causal-layer, encoder, encoder-decoder",
        ),
        (["--steps", "generation"], "linformer-kit has nothing to measure for layer × generation on torch"),
        (
            ["--implementations", "bert"],
            "bert has nothing to measure for layer × forward on torch in float32; it has the subjects encoder",
        ),
        (["--window-lengths", "-8"], "window_lengths[0] is -8; it must be at least 0"),
        (
            ["--window-lengths", "0,128", "--implementations", "linformer,full-attention"],
            "window_lengths has 128, but nothing in this sweep has a window; add one of linformer-kit, longformer, ",
        ),
        (
            ["--projected-lengths", "0"],
            "projected_lengths has 0, which only layers with a window can have; add window_lengths, or use at least 1",
        ),
        (["--device", "tpu"], "device 'tpu' is not available; available: cpu"),
        (["--time-limit", "0"], "time_limit is 0.0; it must be larger than 0"),
        (["--tokens", "-1"], "tokens is -1; it must be at least 0"),
        (["missing.yaml"], "missing.yaml"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_invalid_input_prints_one_line_and_writes_nothing(arguments, said, tmp_path):
    result = linformer(*arguments, "--output", tmp_path / "out.csv")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lenghts: [64]", "there is no key lenghts; did you mean 'lengths'? allowed: lengths, projected_lengths"),
        ("hidden_size: 30\nnum_heads: 4", "hidden_size is 30, which is not divisible by num_heads, which is 4"),
        ("sharing: kv\nimplementations: [linformer]", "sharing is kv, but linformer supports headwise only"),
        ("interleave_lengths: true\ntokens: 0", "with interleave_lengths, set batch or tokens"),
        (
            "subjects: [trainer]\nsteps: [training]\nimplementations: [linformer-kit]\ndevice: cpu:0",
            "device is cpu:0, but the subject trainer is measured on the CPU; use cpu",
        ),
        (
            "backends: [keras-torch]\nimplementations: [linformer]",
            "linformer has nothing to measure for layer × forward on",
        ),
        ("targets: [{name: x, of: {size: 1}}]", "the target 'x' has the key size; allowed: subject, step"),
        ("targets: [{name: x, of: {}, quantity: speed}]", "the target 'x' has the quantity speed; allowed: seconds"),
        ("implementations: [[linformer]]", "implementations[0] is "),
        ("just words", "has no keys; it may have lengths, "),
        ("lengths: [64\n", "is not YAML"),
    ],
)
def test_an_invalid_sweep_prints_one_line(text, said, tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    result = linformer(path, "--output", tmp_path / "out.csv")
    assert result.exit_code == 2
    assert said in result.stderr


# a saved model

SAVED = {
    "conv without positions": {"projection": "conv", "projected_length": 16, "position_embedding": "none"},
    "dynamic with a local convolution": {
        **{"projection": "dynamic", "projected_length": [32, 8], "local_width": 3, "sharing": "none"},
        **{"position_embedding": "sinusoidal", "hidden_act": "relu", "norm_first": False, "head_dim": 4},
    },
    "window": {"projection": "mean", "projected_length": 16, "window_length": 16, "global_tokens": 1},
    "window only": {"projected_length": 0, "window_length": 32, "distance_bias": True},
    "layerwise and rescaled": {"projected_length": 16, "sharing": "layerwise", "rescale": True, "type_vocab_size": 0},
}


@pytest.fixture
def save(tmp_path):
    """Save a configuration, as in the directory of a run, and return that directory."""

    def save(**options):
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        LinformerConfig(**{"vocab_size": 300, **sizes, **options}).save_pretrained(tmp_path / "run" / "model")
        saved_config.cache_clear()
        return str(tmp_path / "run")

    return save


@pytest.mark.parametrize("options", SAVED.values(), ids=SAVED)
def test_a_saved_model_is_measured_with_its_own_configuration(save, options):
    model, K = save(**options), options["projected_length"]
    ours, full = read_sweep({"model": model, "lengths": [128]}).groups()[0]
    assert (ours.projected_length, full.projected_length) == (max(K) if isinstance(K, list) else K, None)
    saved, timed, with_full = (each.to_dict() for each in (saved_config(model), build(ours).config, build(full).config))
    assert timed["projected_length"] == (K if isinstance(K, list) else [K, K])
    of_measurement = {"vocab_size", "max_position_embeddings", "initializer_range"}
    of_measurement |= {"hidden_dropout_prob", "attention_probs_dropout_prob", "projected_length"}
    assert different(saved, timed) <= of_measurement
    without = {"projection", "sharing", "rescale", "projected_length", *NO_WINDOW}
    assert different(timed, with_full) <= without
    assert (timed["max_position_embeddings"], with_full["projection"]) == (128, "none")
    for point in (ours, full, replace(ours, step="training")):
        check(point)
        make_workload(point).call()


def different(one, other):
    return {name for name in {**one, **other} if one.get(name) != other.get(name)}


def test_a_model_next_to_full_attention_is_the_default(save):
    sweep = read_sweep({"model": save(projected_length=16)})
    assert (sweep.subjects, sweep.implementations) == (["encoder"], ["linformer-kit", "full-attention"])
    assert (sweep.hidden_size, sweep.num_heads, sweep.num_layers) == (32, 4, 2)


def test_a_table_of_another_model_is_not_extended(save, tmp_path):
    for activation in ("gelu", "relu"):
        sweep = read_sweep({"model": save(projected_length=16, hidden_act=activation), "lengths": [128]})
        comparison = Comparison(sweep, open_table(tmp_path / "points.csv"), Console(quiet=True))
        if activation == "gelu":
            comparison.table.put([comparison.row(point) for point in sweep.groups()[0]])
            comparison.require_same_facts()
    with pytest.raises(UserError, match=r"points\.csv was measured with code=.*--fresh"):
        comparison.require_same_facts()


@pytest.mark.parametrize(
    ("options", "arguments", "said"),
    [
        ({"projection": "none"}, [], "which has full attention; pass an encoder with a projection"),
        ({"is_decoder": True}, [], "which is a decoder or an encoder-decoder; pass an encoder"),
        ({}, ["--subjects", "layer"], "subjects is ['layer'], but the encoder in"),
        ({}, ["--projected-lengths", "8"], "projected_lengths is [8], but the encoder in"),
        ({}, ["--implementations", "bert"], "implementations has bert, which cannot have the configuration of"),
    ],
)
def test_a_model_that_cannot_be_compared_is_rejected_in_one_line(save, tmp_path, options, arguments, said):
    result = linformer("--model", save(**options), *arguments, "--output", tmp_path / "out.csv")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "has no configuration of a Linformer (config.json); pass the directory of a finished run or"),
        ('{"model_type": "bert"}', "has no configuration of a Linformer (config.json)"),
        ("{", "config.json is damaged: not a JSON object"),
    ],
)
def test_a_directory_without_a_model_is_rejected_in_one_line(tmp_path, text, said):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    result = linformer("--model", tmp_path, "--output", tmp_path / "out.csv")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "linformer", replace(IMPLEMENTATIONS["linformer"], package="no-such-package"))
    with pytest.raises(
        UserError, match=r'no-such-package is not installed; run: pip install "linformer-kit\[bench\]", or leave it out'
    ):
        read_sweep({"implementations": ["linformer"]})


def test_an_older_table_is_left_unchanged(tmp_path):
    path = tmp_path / "old.csv"
    path.write_text("subject,length\nlayer,512\n")
    result = linformer("--output", path)
    assert result.exit_code == 2
    assert "old.csv is not a table of this version: it lacks the column step" in result.stderr
    assert path.read_text() == "subject,length\nlayer,512\n"
    with pytest.raises(UserError, match="it lacks the column step"):
        read_points(path)


@pytest.mark.parametrize("name", ["", "table.png"])
def test_an_output_that_is_not_a_csv_is_rejected(name, tmp_path):
    result = linformer("--output", tmp_path / name, "--fresh")
    assert result.exit_code == 2
    assert "it must be the name of a CSV file, such as compare.csv" in result.stderr


def test_a_table_that_is_not_text_is_left_unchanged(tmp_path):
    path = tmp_path / "points.csv"
    path.write_bytes(b"\xff\xfe\x00,1\n")
    result = linformer("--output", path)
    assert result.exit_code == 2, result.output
    assert "points.csv is not a table of this version: it lacks the column subject" in result.stderr
    assert path.read_bytes() == b"\xff\xfe\x00,1\n"


def comparison_of(tmp_path, **keys):
    sweep = Sweep(
        **{**SIZES, "lengths": [128], "projected_lengths": [16], "implementations": ["linformer-kit", "bert"], **keys}
    )
    return Comparison(replace(sweep, subjects=["encoder"]), open_table(tmp_path / "points.csv"), Console(quiet=True))


@pytest.mark.parametrize("fact", ["cpu", "torch", "code"])
def test_a_table_of_another_machine_or_version_is_not_extended(fact, tmp_path):
    comparison = comparison_of(tmp_path)
    comparison.table.put([comparison.row(point_of("linformer", "encoder"))])
    comparison.require_same_facts()
    comparison.machine[fact] = "another"
    with pytest.raises(UserError, match=r"points\.csv was measured with \w+=.*, now it is another, .*--fresh"):
        comparison.require_same_facts()


def test_the_fingerprint_covers_all_code_of_the_package_but_no_comments(tmp_path):
    fingerprints = []
    for name, text in (
        *(("module.py", "x = 1\n"), ("module.py", "x = 1  # one\n"), ("module.py", "x = 2\n")),
        ("models/deeper/module.py", "y = 1\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        machine.code_fingerprint.cache_clear()
        fingerprints.append(machine.code_fingerprint(tmp_path))
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3
    assert (
        machine.timed_code("{}") != machine.timed_code() == machine.code_fingerprint(Path(machine.__file__).parents[1])
    )


def test_each_phase_of_a_call_has_its_own_row(tmp_path, monkeypatch):
    comparison = comparison_of(tmp_path, implementations=["bert"])
    ((point,),) = comparison.sweep.groups()
    columns = {"": {"megabytes": 4.0}, "reading": {"megabytes": 2.0}}
    phases = {"reading": Timing(OK, 1.0, 1.0, 1.0, 1, share=0.5)}
    monkeypatch.setattr(compare_module, "measure_isolated", lambda *_: Isolated(OK, 2.0, 2**20, columns=columns))
    monkeypatch.setattr(
        compare_module, "measure_rounds", lambda *_: {point: Timing(OK, 2.0, 2.0, 2.0, 1, phases=phases)}
    )
    comparison.isolate(point, [point])
    comparison.time([point])
    whole, reading = read_points(comparison.table.path, phases=True)
    assert [(row["phase"], row["seconds_median"], row["megabytes"], row["share"]) for row in (whole, reading)] == [
        ("", "2", "4", ""),
        ("reading", "1", "2", "0.5"),
    ]
    assert read_points(comparison.table.path) == [whole]
    assert comparison.is_timed([point])
    comparison.require_same_facts()


@pytest.mark.parametrize("keys", [{"tokens": 0}, {"hidden_size": 64}, {"sharing": "kv"}], ids=str)
def test_a_table_with_other_settings_is_not_extended(keys, tmp_path):
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
def test_longer_inputs_are_skipped_after_one_that_did_not_fit(status, tmp_path):
    comparison = comparison_of(tmp_path)
    point = replace(point_of("bert", "encoder", length=128), batch=4)
    comparison.table.put([comparison.row(point, memory_status=status, time_limit=comparison.sweep.time_limit)])
    refused = Isolated(status, note="same result at N=128; not tried")
    assert comparison.skip_reason(replace(point, length=256)) == refused
    assert comparison.skip_reason(replace(point, length=256, batch=2)) == refused  # as many tokens, in longer examples
    assert comparison.skip_reason(replace(point, length=256, batch=1)) is None  # fewer tokens
    assert comparison.skip_reason(replace(point, length=64, batch=64)) is None  # shorter examples
    assert comparison.skip_reason(replace(point, length=256, implementation="fnet")) is None
    assert comparison.skip_reason(point) is None
    longer = comparison_of(tmp_path, time_limit=2 * comparison.sweep.time_limit)
    assert longer.skip_reason(replace(point, length=256)) == (refused if status == OUT_OF_MEMORY else None)


def test_a_point_that_failed_at_one_length_is_tried_at_others(tmp_path):
    comparison = comparison_of(tmp_path)
    point = point_of("nystromformer", "encoder", length=100)
    comparison.table.put([comparison.row(point, memory_status=FAILED)])
    assert comparison.skip_reason(replace(point, length=128)) is None
    comparison.table.put([comparison.row(point, memory_status=WRONG)])
    assert comparison.skip_reason(replace(point, length=128)) == Isolated(WRONG, note="same result at N=100; not tried")


def test_failures_are_retried_and_slow_calls_with_a_higher_time_limit(tmp_path):
    comparison = comparison_of(tmp_path, time_limit=5.0)
    ((point, _),) = comparison.sweep.groups()
    for status, again, longer in (
        (OUT_OF_MEMORY, True, True),
        (FAILED, True, True),
        (OVER_TIME_LIMIT, False, True),
        (OK, False, False),
    ):
        comparison.table.put([comparison.row(point, memory_status=status, time_limit=5.0)])
        assert comparison.is_tried(point) != again
        assert comparison_of(tmp_path, time_limit=6.0).is_tried(point) != longer


def timed_here(points, *options):
    return dict(zip(points, run_rounds(points, *options), strict=True))


def test_a_new_point_is_timed_together_with_all_earlier_ones(tmp_path, monkeypatch):
    """Times of different rounds cannot be compared: those of the others are discarded, and all are timed again."""
    monkeypatch.setattr(compare_module, "measure_isolated", lambda point, limit: Isolated(OK, 0.1, 2**20))
    monkeypatch.setattr(compare_module, "measure_rounds", timed_here)
    first = comparison_of(tmp_path)
    (points,) = first.sweep.groups()
    for point in points:
        first.isolate(point, points)
    first.time(points)
    assert first.is_timed(points)

    second = comparison_of(tmp_path, projected_lengths=[32], implementations=["linformer-kit"])
    ((point,),) = second.sweep.groups()
    assert not second.is_tried(point)
    second.isolate(point, [point])
    assert all(not row["status"] and not row["seconds_median"] for row in second.table.rows())
    assert not second.is_timed([point])
    second.time([point])
    rows = read_points(second.table.path)
    assert {(row["implementation"], row["projected_length"]) for row in rows} == {
        ("linformer-kit", "16"),
        ("bert", ""),
        ("linformer-kit", "32"),
    }
    assert all(row["status"] == OK and row["seconds_median"] for row in rows)


def test_a_point_that_fits_alone_but_not_next_to_the_others_is_retried(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_module, "measure_rounds", timed_here)
    comparison = comparison_of(tmp_path, implementations=["bert"])
    ((point,),) = comparison.sweep.groups()
    comparison.table.put([comparison.row(point, memory_status=OK, status=OUT_OF_MEMORY, peak_mib=1.0)])
    assert not comparison.is_timed([point])
    comparison.time([point])
    assert comparison.found(point)["status"] == OK
    assert comparison.is_timed([point])


def test_the_largest_batch_is_that_of_the_most_demanding_point_and_is_kept(tmp_path, monkeypatch):
    requested = []

    def measured(point, limit):
        requested.append((point.implementation, point.projected_length))
        return Isolated(OK, seconds=0.5 if point.implementation == "bert" else 0.25, peak_bytes=1)

    monkeypatch.setattr(compare_module, "measure_isolated", measured)
    comparison = comparison_of(tmp_path, tokens=0, projected_lengths=[8, 16], time_limit=20.0)
    (points,) = comparison.sweep.groups()
    found = comparison.in_largest_batches(points)
    assert requested == [("linformer-kit", 16), ("bert", None)]
    # 32 examples of 128 tokens took half a second, and a tenth of the limit is two
    assert {point.batch for point in found} == {4 * 32}
    assert comparison_of(tmp_path, tokens=0).in_largest_batches(points) == found
    assert len(requested) == 2


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"),  # JAX
    ],
)
def test_running_out_of_memory_is_recognized(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("the size of tensor a must match"))


# the command


def sweep_of(path):
    """The YAML of a sweep, and where its points go: the arguments of `linformer compare`."""
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
    return sweep, "--output", path


def start(*arguments):
    command = [sys.executable, "-m", "linformer_kit.cli", "compare", *map(str, arguments)]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, text=True, env=environment(), **pipes)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")  # when it is resumed; the first command is a process that starts others
def test_a_sweep_is_interrupted_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    path = tmp_path / "points.csv"
    sweep = sweep_of(path)
    running = start(*sweep)
    while not path.exists() or not any(row["memory_status"] for row in read_points(path)):
        assert running.poll() is None, running.communicate()
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "keeps what was measured; the same command resumes" in said
    kept = [row for row in read_points(path) if row["memory_status"]]
    assert kept

    again = linformer(*sweep)
    assert again.exit_code == 0, again.stderr
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
    assert "encoder-decoder, forward" in again.stdout
    assert "linformer-pytorch" in again.stdout

    before = path.read_bytes()
    assert linformer(*sweep).exit_code == 0
    assert path.read_bytes() == before  # nothing was left to do


@pytest.mark.parametrize(
    ("seconds", "ratios"),
    [
        ({"linformer-kit": 2.0, "full-attention": 4.0, "bert-eager": 8.0}, [2.0, 1.0, 0.5]),
        ({"linformer-kit": 2.0, "linformer": 12.0, "bert-eager": 6.0}, [3.0, 0.5, 1.0]),
        ({"linformer-kit": 2.0, "linformer": 8.0}, [4.0, 1.0]),
        ({"linformer-kit": 2.0}, []),
    ],
    ids=["ours", "of another package", "not full attention", "none"],
)
def test_ratios_refer_to_full_attention_or_to_the_baseline_that_is_there(tmp_path, seconds, ratios):
    pytest.importorskip("matplotlib")
    from linformer_kit.report.measurements import measurement_table

    table = open_table(tmp_path / "points.csv")
    key = {"subject": "encoder", "step": "forward", "length": 512, "batch": 8, **dict.fromkeys(FACTS, "1")}
    columns = ("seconds_fastest", "seconds_median", "seconds_slowest")
    table.put(
        [
            {**key, "implementation": name, "status": OK, **dict.fromkeys(columns, time)}
            for name, time in seconds.items()
        ]
    )
    rows = list(table.rows())
    with (console := Console(width=120, quiet=False)).capture() as captured:
        compare_module.show(rows, console)
    assert [float(each) for each in re.findall(r"([\d.]+)×", captured.get())] == ratios
    assert ("ratio: " in captured.get()) == bool(ratios)
    page = measurement_table("points", rows)
    places = [place for place, heading in enumerate(page.headings) if heading == "time ratio"]
    assert [cells[place].value for place in places for cells in page.rows] == ratios


# the paper's table


def test_a_cell_is_the_ratio_to_the_baseline_of_the_same_batch_next_to_the_papers(tmp_path):
    pytest.importorskip("matplotlib")
    table = open_table(tmp_path / "points.csv")

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
        "note": "",
    }
    assert (second["measured"], second["paper"], second["note"]) == ("", "7.9", "bert-eager: out of memory")
    assert (third["saved"], third["measured"], third["paper"]) == ("memory", "2.50", "1.7")
    assert fourth["paper"] == "18"

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


def test_a_missing_sweep_is_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no file .*missing\.yaml; pass a YAML file"):
        read_keys(tmp_path / "missing.yaml")
