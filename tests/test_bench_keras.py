"""The benchmark of the Keras layers: only what computes the right thing is timed, every point once, and on the backend it says."""

import csv
import dataclasses
import json
import os
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from functools import wraps
from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

pytest.importorskip("keras", reason='needs pip install "linformer-kit[bench,keras]"')
pytest.importorskip("matplotlib", reason='needs pip install "linformer-kit[bench,keras]"')

import keras

from linformer_kit.bench import measure
from linformer_kit.bench.measure import OK, OUT_OF_MEMORY, Timing
from linformer_kit.bench.peers import MissingPeer, WrongImplementation
from linformer_kit.keras import LinearMultiHeadAttention
from linformer_kit.keras.projection import LinearProjection

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(BENCHMARKS)  # which is no package
    keras_layers, summary = import_module("keras_layers"), import_module("keras_layers_summary")

COMPLETE, QUICK = keras_layers.COMPLETE, keras_layers.QUICK
FULL, MODES, BACKENDS = summary.FULL, summary.MODES, summary.BACKENDS
NAMES = [FULL, *map(summary.our_name, QUICK.projected_lengths)]
POINTS = list(product(BACKENDS, MODES, QUICK.lengths))
LENGTH = QUICK.lengths[0]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside other tests, threads that wait for each other take many times as long
    yield
    torch.set_num_threads(threads)


# the gate


@pytest.mark.parametrize("sweep", [COMPLETE, QUICK], ids=lambda sweep: sweep.name)
def test_the_layers_agree_with_the_reference(sweep):
    keras_layers.check_layers(sweep)


KERNELS = [(part, "kernel") for part in ("query_dense", "key_dense", "value_dense", "output_dense")]
# not that of the keys, which adds the same to all scores of a query
BIASES = [(part, "bias") for part in ("query_dense", "value_dense", "output_dense")]


@pytest.mark.parametrize(("part", "wrong"), [*KERNELS, *BIASES])
def test_a_wrong_weight_is_noticed(part, wrong, monkeypatch):
    right = keras_layers.reference_layer

    def of_another(layer):
        weight = getattr(getattr(layer, part), wrong)
        before = keras.ops.convert_to_numpy(weight).copy()
        weight.assign(before + 0.1 * np.arange(before.shape[0]).reshape(-1, *[1] * (before.ndim - 1)))
        found = right(layer)
        weight.assign(before)
        return found

    monkeypatch.setattr(keras_layers, "reference_layer", of_another)
    with pytest.raises(WrongImplementation, match=FULL):
        keras_layers.check_layers(QUICK)


def test_a_wrong_projection_is_noticed(monkeypatch):
    right = LinearProjection.call

    def keys_of_values(self, x, lengths=None, part="all"):
        rows, present = right(self, x, lengths, part)
        return keras.ops.flip(rows, axis=1), present

    monkeypatch.setattr(LinearProjection, "call", keys_of_values)
    with pytest.raises(WrongImplementation, match=NAMES[1]):
        keras_layers.check_layers(QUICK)


def test_ours_without_projection_may_not_differ_in_one_bit(monkeypatch):
    right = LinearMultiHeadAttention.call

    @wraps(right)  # Keras reads the names of the arguments
    def nearly(self, *args, **kwargs):
        found = right(self, *args, **kwargs)
        return found * (1 + 1e-6) if self.projection_dim is None else found

    monkeypatch.setattr(LinearMultiHeadAttention, "call", nearly)
    with pytest.raises(WrongImplementation, match="projection_dim=None"):
        keras_layers.check_layers(QUICK)


# what is timed


def test_batches_hold_the_same_tokens():
    assert {n: COMPLETE.batch(n) for n in COMPLETE.lengths} == {512: 16, 1024: 8, 2048: 4, 4096: 2, 8192: 1}
    assert dataclasses.replace(COMPLETE, tokens=1000).batch(8192) == 1


def test_the_layers_are_those_of_the_issue():
    layers = keras_layers.make_layers(COMPLETE)
    assert list(layers) == [FULL, "LinearMultiHeadAttention K=64", "LinearMultiHeadAttention K=256"]
    assert type(layers[FULL]) is keras.layers.MultiHeadAttention
    for layer in layers.values():
        assert (layer.num_heads, layer.key_dim, layer.dropout) == (8, 32, 0)
    for layer in list(layers.values())[1:]:
        assert (layer.projection_kind, layer.sharing) == ("linear", "headwise")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_changes_all_weights_and_predict_none(name, mode):
    layer = keras_layers.make_layers(QUICK)[name]
    model = keras_layers.model_of(layer, LENGTH, QUICK.width)
    before = [array.copy() for array in layer.get_weights()]
    x, y = np.random.default_rng(0).standard_normal((2, 2, LENGTH, QUICK.width), dtype=np.float32)
    call = keras_layers.make_call(model, x, y, mode)
    found = call()
    same = [np.array_equal(old, new) for old, new in zip(before, layer.get_weights(), strict=True)]
    changed = {weight.path for weight, is_same in zip(layer.weights, same, strict=True) if not is_same}
    if mode == summary.PREDICT:
        assert found.shape == x.shape
        assert not changed
    else:
        # the bias of the keys adds the same to all scores of a query
        assert changed >= {weight.path for weight in layer.weights if not weight.path.endswith("key/bias")}


def test_layers_take_turns_after_a_call_that_compiles(monkeypatch):
    called = []

    def make_call(model, x_BNC, y_BNC, mode):
        assert x_BNC.shape == y_BNC.shape == (QUICK.batch(LENGTH), LENGTH, QUICK.width)
        return lambda: called.append(id(model))

    monkeypatch.setattr(keras_layers, "make_call", make_call)
    timings = keras_layers.time_layers(dataclasses.replace(QUICK, budget_seconds=9, most_rounds=4), MODES[0], LENGTH)
    assert list(timings) == NAMES
    assert {timing.rounds for timing in timings.values()} == {4}
    rounds = [called[start : start + 3] for start in range(0, len(called), 3)]
    assert len(rounds) == 1 + 1 + 4  # compiling, warming up
    assert all(len(set(one)) == 3 for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1


@pytest.mark.parametrize(
    "message", ["RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes", "OOM when allocating tensor"]
)
def test_memory_that_runs_out_is_recorded_for_that_layer_only(message, monkeypatch):
    class Error(Exception):
        pass

    predict_on_batch = keras.Model.predict_on_batch

    def fails_for_full(self, x):
        if type(self.layers[-1]) is keras.layers.MultiHeadAttention:
            raise Error(message)
        return predict_on_batch(self, x)

    monkeypatch.setattr(keras.Model, "predict_on_batch", fails_for_full)
    timings = keras_layers.time_layers(QUICK, summary.PREDICT, LENGTH)
    assert [timings[name].status for name in NAMES] == [OUT_OF_MEMORY, OK, OK]
    monkeypatch.setattr(keras.Model, "predict_on_batch", lambda self, x: (_ for _ in ()).throw(Error("sizes differ")))
    with pytest.raises(Error, match="sizes differ"):
        keras_layers.time_layers(QUICK, summary.PREDICT, LENGTH)


# points and their table


class HereInstead:
    """Stands for the process of a backend; counts what it is asked for."""

    class Done:
        def __init__(self, value):
            self.value = value

        def result(self):
            if isinstance(self.value, Exception):
                raise self.value
            return self.value

    def __init__(self, asked, check=None):
        self.asked, self.check = asked, check

    def submit(self, function, sweep, *point):
        if function is keras_layers.check_layers:
            return self.Done(self.check)
        self.asked.append(point)
        return self.Done({name: Timing(OK, 2.0, 1.0, 3.0, 5) for name in NAMES})


def measure_here(folder, monkeypatch, check=None):
    """Take all steps that are not done; gives (backend, point) of those that were measured."""
    asked = []
    benchmark = keras_layers.Benchmark(QUICK, folder)

    def begin(backend):
        asked.append(backend)
        return HereInstead(asked, check)

    monkeypatch.setattr(benchmark, "begin", begin)
    for step in benchmark.steps():
        if not step.is_done():
            assert list(step.run())
    return asked


def read_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_point_is_measured_once_in_the_process_of_its_backend(tmp_path, monkeypatch):
    asked = measure_here(tmp_path, monkeypatch)
    each = list(product(MODES, QUICK.lengths))
    assert asked == [one for backend in BACKENDS for one in (backend, *each)]
    rows = read_rows(tmp_path / "keras.csv")
    points = [(row["backend"], row["mode"], int(row["length"]), row["name"]) for row in rows]
    assert points == [(*point, name) for point in POINTS for name in NAMES]
    assert {row["length"]: row["batch"] for row in rows} == {str(n): str(QUICK.batch(n)) for n in QUICK.lengths}
    assert {(row["seconds_median"], row["seconds_fastest"], row["seconds_slowest"], row["rounds"]) for row in rows} == {
        ("2", "1", "3", "5")
    }


def test_the_next_run_measures_only_what_is_missing(tmp_path, monkeypatch):
    measure_here(tmp_path, monkeypatch)
    path = tmp_path / "keras.csv"
    whole = path.read_text().splitlines(keepends=True)
    assert measure_here(tmp_path, monkeypatch) == []
    kept = [line for line in whole if not line.startswith(f"jax,{MODES[1]},{LENGTH},")]
    assert len(kept) == len(whole) - len(NAMES)
    path.write_text("".join(kept))
    assert measure_here(tmp_path, monkeypatch) == ["jax", (MODES[1], LENGTH)]
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(whole)


def test_a_layer_that_fails_the_check_is_not_timed(tmp_path, monkeypatch):
    with pytest.raises(WrongImplementation, match="something else"):
        measure_here(tmp_path, monkeypatch, check=WrongImplementation("computes something else"))
    assert not (tmp_path / "keras.csv").exists()


def test_a_process_that_dies_is_explained(tmp_path, monkeypatch, capsys):
    with pytest.raises(typer.Exit):
        measure_here(tmp_path, monkeypatch, check=BrokenProcessPool("died"))
    assert "memory" in capsys.readouterr().err


def test_versions_of_all_backends_are_recorded(monkeypatch):
    found = keras_layers.dependencies()
    assert set(found) == {"keras", *BACKENDS, "layer_code"}
    assert found["keras"] == keras.__version__
    monkeypatch.setitem(keras_layers.DISTRIBUTIONS, "jax", ("no-such-package",))
    with pytest.raises(MissingPeer, match="jax is not installed; run: pip install"):
        keras_layers.dependencies()


# targets


def test_targets_are_judged_right(tmp_path):
    benchmark = keras_layers.Benchmark(COMPLETE, tmp_path)
    full, k64, k256 = FULL, summary.our_name(64), summary.our_name(256)
    measured = {
        ("torch", "predict", 4096): {full: 0.6, k64: 0.1, k256: 0.2},
        ("torch", "training step", 4096): {full: 2.0, k64: 0.41, k256: 0.5},
        ("jax", "predict", 512): {full: 0.1, k64: 0.2, k256: 0.4},
    }
    benchmark.table.put(
        [
            {"backend": backend, "mode": mode, "length": length, "name": name, "seconds_median": seconds}
            for (backend, mode, length), times in measured.items()
            for name, seconds in times.items()
        ]
    )
    found = summary.speedups(benchmark.table, COMPLETE.lengths, COMPLETE.projected_lengths)
    assert len(found) == 3 * 2 * 5 * 2
    assert [target.wanted for target in found] == [5.0] * 6 + [None] * 54
    assert {target.where for target in found[:6]} == {f"{title}, N=4,096, K=64" for title in BACKENDS.values()}
    texts = {target.texts[:2]: target.texts[2:] for target in found}
    predict, train = (f"{mode}, speed beside MultiHeadAttention" for mode in MODES)
    assert {key: rest for key, rest in texts.items() if rest[2] != "not measured"} == {
        (predict, "PyTorch, N=4,096, K=64"): ("≥ 5.00×", "6.00×", "met"),
        (predict, "PyTorch, N=4,096, K=256"): ("–", "3.00×", "reported"),
        (train, "PyTorch, N=4,096, K=64"): ("≥ 5.00×", "4.88×", "missed"),
        (train, "PyTorch, N=4,096, K=256"): ("–", "4.00×", "reported"),
        (predict, "JAX, N=512, K=64"): ("–", "0.50×", "reported"),
        (predict, "JAX, N=512, K=256"): ("–", "0.25×", "reported"),
    }


def test_the_picture_shows_the_time_of_an_example(tmp_path):
    benchmark = keras_layers.Benchmark(COMPLETE, tmp_path)
    summary.draw(benchmark)  # of nothing
    key = {"backend": "jax", "mode": "training step", "name": FULL}
    benchmark.table.put([{**key, "length": n, "seconds_median": 2.0} for n in (512, 8192)])
    axes = {axes.get_title(loc="left"): axes for axes in summary.draw(benchmark).axes}
    assert list(axes) == [f"{title}: {mode}" for mode in MODES for title in BACKENDS.values()]
    (line,) = axes["JAX: training step"].lines
    assert line.get_xydata().tolist() == [[512, 2 / 16], [8192, 2]]


# the command


def run(*arguments: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, BENCHMARKS / "keras_layers.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quick": True}, "give another folder with --output"),
        ({"summary": True, "fresh": True}, "choose one"),
        ({"summary": True, "output": "empty"}, "run without --summary first"),
    ],
)
def test_bad_options_are_refused(options, said, tmp_path, capsys):
    given = {"output": keras_layers.RESULTS, "fresh": False, "summary": False, "quick": False, **options}
    if "output" in options:
        given["output"] = tmp_path / options["output"]
    with pytest.raises(typer.Exit):
        keras_layers.main(**given)
    assert said in capsys.readouterr().err


def test_targets_of_nothing_cannot_be_printed(tmp_path, capsys):
    with pytest.raises(typer.Exit):
        summary.main(tmp_path)
    assert "run benchmarks/keras_layers.py first" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run_measures_every_backend(tmp_path, capsys):
    pytest.importorskip("jax")
    pytest.importorskip("tensorflow")
    folder = tmp_path / "results"
    done = run("--quick", "--output", folder)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {
        "keras.csv",
        "keras_targets.csv",
        "keras_machine.json",
        "keras.png",
    }
    rows = read_rows(folder / "keras.csv")
    points = {(row["backend"], row["mode"], int(row["length"]), row["name"]) for row in rows}
    assert points == {(*point, name) for point in POINTS for name in NAMES}
    assert all(row["status"] == measure.OK and float(row["seconds_median"]) > 0 for row in rows)
    assert {"keras", *BACKENDS} <= json.loads((folder / "keras_machine.json").read_text()).keys()
    targets = read_rows(folder / "keras_targets.csv")
    assert {row["verdict"] for row in targets} == {"reported"}
    summary.main(folder)
    first, _, *table = capsys.readouterr().out.splitlines()
    assert first == "| to reach | at | wanted | measured |  |"
    assert table == [f"| {' | '.join(row.values())} |" for row in targets]
