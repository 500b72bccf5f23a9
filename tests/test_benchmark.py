"""`linformer benchmark`, and what a shell completes."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from math import prod
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linformer_kit.bench import isolated, keras_layers, layers
from linformer_kit.bench.implementations import check, make_workload
from linformer_kit.bench.isolated import run_isolated
from linformer_kit.bench.measure import WRONG
from linformer_kit.bench.prediction_time import LAYERS, Experiment
from linformer_kit.cli import app, complete_config, complete_run

SCRIPT = Path(sys.executable).with_name("linformer")
# of the starting document: 2,000 tokens of 256 features, K = 64, 8 heads of 128 features
PUBLISHED = Experiment(2000, 25, 256, 64, 8, 128, "linear", "headwise", "torch", "cpu")
SMALL = Experiment(50, 2, 16, 8, 2, 4, "linear", "headwise", "keras", "cpu")


def run(*arguments, **environment):
    command = [SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


def test_the_published_experiment_as_json():
    done = run("benchmark", "--batch-size", 1, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ours, full = (found["layers"][which] for which in LAYERS)
    assert found["settings"]["sequence_length"] == 2000
    assert (ours["parameters"], full["parameters"]) == (1_307_904, 1_051_904)
    assert ours["parts"]["projection.weight"] == {"shape": [2000, 2, 64], "parameters": 256_000}
    for layer in (ours, full):
        assert layer["status"] == "ok"
        assert 0 < layer["seconds_fastest"] <= layer["seconds_median"] <= layer["seconds_slowest"]
        assert layer["parameters"] == sum(part["parameters"] for part in layer["parts"].values())
    assert found["ratio"] == pytest.approx(full["seconds_median"] / ours["seconds_median"])
    # the outputs of both are there at the end, and full attention has 2,000 keys and values where ours has 64
    output = 2000 * 256 * 4 / 2**20
    assert output < ours["peak_mib"] < full["peak_mib"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_keras_shows_tables():
    sizes = "--sequence-length 50 --batch-size 2 --embedding-dim 16 --projection-dim 8 --num-heads 2 --hidden-dim 4"
    command = ["benchmark", *sizes.split(), "--sharing", "kv", "--backend", "keras"]
    done = CliRunner().invoke(app, command, env={"KERAS_BACKEND": "torch", "COLUMNS": "80"})
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count(f"on torch {metadata.version('torch')}") == 2  # in the settings and below the tables
    for text in (
        " query/kernel ",
        " attention_output/kernel ",
        "50 × 1 × 8",
        "total",
        "Full attention takes",
        "times as long",
        "peak memory",
    ):
        assert text in done.stdout


@pytest.mark.parametrize(("sharing", "parameters"), [("headwise", 1_307_904), ("kv", 1_179_904), ("none", 3_099_904)])
def test_the_parameters_of_the_published_sizes(sharing, parameters):
    point = replace(PUBLISHED, batch_size=1, sharing=sharing).point("Linformer", "torch")
    assert sum(map(prod, make_workload(point).parameters.values())) == parameters


@pytest.mark.parametrize("projection", ["linear", "dynamic", "conv", "mean", "max", "random"])
@pytest.mark.parametrize("backend", ["torch", "keras-torch"])
def test_every_projection_passes_the_check(backend, projection):
    for layer in LAYERS:
        point = replace(SMALL, projection=projection).point(layer, backend)
        check(point)
        make_workload(point).call()


@pytest.mark.parametrize("rows", [8, 0], ids="K{}".format)
def test_a_window_belongs_to_our_layer(rows):
    experiment = replace(SMALL, projection="mean", projection_dim=rows, window_length=4)
    ours, full = (experiment.point(layer, "torch") for layer in LAYERS)
    assert (ours.variant, ours.projected_length, full.variant) == ("mean, window 4", rows, "")
    check(ours)


@pytest.mark.parametrize("backend", ["torch", "keras-torch"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_computes_something_else_is_not_timed(monkeypatch, backend, layer):
    right = layers.require_output_agreement

    def with_a_mistake(name, output, exact, x):
        right(name, 1.001 * output, exact, x)

    for module in (layers, keras_layers):
        monkeypatch.setattr(module, "require_output_agreement", with_a_mistake)
    monkeypatch.setattr(isolated, "make_workload", lambda point: pytest.fail("it was called"))
    found = run_isolated(SMALL.point(layer, backend), 60.0)
    assert found.status == WRONG
    assert f"{LAYERS[layer]}: its output without gradients differs from the float64 result by" in found.note


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--projection-dim", "100", "--sequence-length", "50"],
            "--projection-dim is 100; it must be at most --sequence-length, which is 50",
        ),
        (["--device", "tpu"], "device 'tpu' is not available; available: cpu"),
        (["--device", "meta"], "device 'meta' is not available; available: cpu"),
        (["--device", "tpu", "--backend", "keras"], "device 'tpu' is not available; available: cpu"),
        (["--sequence-length", "9" * 20], "Overflow"),
        (["--projection", "mean", "--sharing", "none"], "sharing"),
        (["--projection-dim", "0"], "--projection-dim is 0, which needs a window; add --window-length"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_input_prints_one_line(arguments, said):
    result = CliRunner().invoke(app, ["benchmark", *arguments])
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_missing_backend_is_named_with_what_to_install():
    code = """
import sys
sys.modules["keras"] = None
from linformer_kit.cli import app
app(["benchmark", "--backend", "keras"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert 'pip install "linformer-kit[keras]"' in done.stderr


# shells


def completed(*words):
    environment = {
        "_LINFORMER_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    return run(**environment).stdout.split()


def test_a_shell_completes_commands_options_and_the_last_of_several_values():
    assert completed("linformer", "bench") == ["benchmark"]
    assert completed("linformer", "compare", "--implem") == ["--implementations"]
    assert completed("linformer", "compare", "--implementations", "led,linformer-p") == ["led,linformer-pytorch"]
    assert completed("linformer", "compare", "--preset", "p") == ["paper-table-3"]
    assert set(completed("linformer", "compare", "--subjects", "enc")) == {"encoder", "encoder-decoder"}


def test_a_shell_completes_shipped_configurations_files_and_runs(tmp_path, monkeypatch):
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    for name in ("runs/first/checkpoints/checkpoint-75", "runs/second", "other"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/first/environment.json", "runs/second/environment.json", "imdb_mine.yaml"):
        (tmp_path / name).touch()
    assert completed("linformer", "train", "im") == ["imdb", "imdb_bytes", "imdb_mine.yaml"]
    assert completed("linformer", "evaluate", "r") == ["runs/first", "runs/second"]
    assert completed("linformer", "study", "den") == ["denoising_sharing"]
    assert complete_config("runs/") == []
    assert complete_run("") == ["runs/first", "runs/second"]
    assert complete_run("runs/s") == ["runs/second"]
    for typed in ("runs/first/", "runs/first/checkpoints/c"):
        assert complete_run(typed) == ["runs/first/checkpoints/checkpoint-75"]


def test_the_completion_of_a_shell_can_be_installed(tmp_path):
    # the shell is found among the parent processes; two commands, so that it does not replace itself by the first
    command = ["bash", "-c", f"{shlex.quote(str(SCRIPT))} --install-completion && true"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "linformer" in (tmp_path / ".bashrc").read_text()
