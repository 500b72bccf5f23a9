"""The benchmark: it refuses wrong layers, measures what it says, and keeps what it measured. No test looks at absolute times."""

import csv
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("linformer", reason='needs pip install "linformer-kit[bench]"')
pytest.importorskip("matplotlib", reason='needs pip install "linformer-kit[bench]"')

from linformer_kit.bench import measure, memory, peers
from linformer_kit.csv_tables import Table
from linformer_kit.files import write_atomically
from linformer_kit.plots import style

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "attention.py"


@pytest.fixture(autouse=True)
def one_thread_and_a_seed():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside other tests, threads that wait for each other take many times as long
    yield
    torch.set_num_threads(threads)


def small_layers(length: int = 96, projected_length: int = 16):
    ours = peers.our_layer(length, projected_length, embed_dim=64, num_heads=4)
    return ours, {name: peers.build(name, ours) for name in peers.IMPLEMENTATIONS}


# what may go wrong in an implementation: each changes the function it computes
MISTAKES = {
    "linformer-kit": lambda layer: layer.key.weight.data.__setitem__(0, 0),
    "linformer": lambda layer: layer.proj_k.data.__setitem__(0, 0),
    "linformer-pytorch": lambda layer: layer.heads[0].F.bias.data.add_(0.01),
    "full attention": lambda layer: layer.query.weight.data.mul_(1.01),
}


def test_layers_with_the_same_weights_agree():
    ours, layers = small_layers()
    assert peers.check_layers(layers, ours, torch.randn(2, 96, 64)) == []


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("compares_gradients", [True, False], ids=["short", "long"])
def test_a_wrong_implementation_is_refused(name, compares_gradients, monkeypatch):
    if not compares_gradients:
        monkeypatch.setattr(peers, "COMPARED_GRADIENTS_LENGTH", 0)
    ours, layers = small_layers()
    if name == "linformer-kit":  # our own layer is also what the others are compared with
        layers[name] = peers.our_layer(96, 16, embed_dim=64, num_heads=4)
        layers[name].load_state_dict(ours.state_dict())
    x = torch.randn(2, 96, 64)
    peers.check_layers(layers, ours, x)
    MISTAKES[name](layers[name])
    with pytest.raises(peers.WrongImplementation, match=f"^{name}: "):
        peers.check_layers(layers, ours, x)


def test_nan_is_refused():
    ours, layers = small_layers()
    layers["linformer"].to_out.bias.data.fill_(torch.nan)
    with pytest.raises(peers.WrongImplementation):
        peers.check_layers(layers, ours, torch.randn(2, 96, 64))


def test_a_wrong_gradient_is_refused():
    class Detached(torch.nn.Module):
        """The right output with the wrong gradient."""

        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x.detach()) + 0 * x

    ours, layers = small_layers()
    with pytest.raises(peers.WrongImplementation, match="gradient"):
        peers.check_layers({"linformer": Detached(layers["linformer"])}, ours, torch.randn(2, 96, 64))


def small_causal_layers():
    ours = peers.our_causal_layer(16, 4, embed_dim=64, num_heads=4)
    return {"ours": ours, "full": peers.FullAttention(ours, causal=True)}


@pytest.mark.parametrize("length", [64, 75])
def test_causal_layers_agree_with_a_plain_evaluation(length):
    peers.check_causal_layers(small_causal_layers(), torch.randn(2, length, 64))


def test_a_causal_layer_that_sees_the_future_is_refused():
    layers = small_causal_layers()
    layers["full"].causal = False
    with pytest.raises(peers.WrongImplementation, match="full"):
        peers.check_causal_layers(layers, torch.randn(2, 75, 64))


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_law_is_found(power):
    sizes = [4096 * 2**step for step in range(7)]
    noise = [1.02, 0.98, 1.01, 1.0, 0.99, 1.02, 0.98]
    assert measure.fit_exponent(sizes, [3e-5 * size**power for size in sizes]) == pytest.approx(power)
    assert measure.fit_exponent(
        sizes, [n * size**power for n, size in zip(noise, sizes, strict=True)]
    ) == pytest.approx(power, abs=0.02)


def test_an_exponent_needs_two_points():
    with pytest.raises(ValueError, match="two points"):
        measure.fit_exponent([4096], [1.0])


# elsewhere the peak cannot be set back, so it tells of everything that this process has done before
can_reset_peak = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc/self/clear_refs"
)


@can_reset_peak
@pytest.mark.parametrize("mib", [50, 200])
def test_peak_memory_sees_a_known_allocation(mib):
    def call():
        torch.ones(mib * 2**18)  # freed before the call returns: the peak counts, not what is left

    assert measure.peak_memory(call) / 2**20 == pytest.approx(mib, rel=0.1)


@can_reset_peak
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize("hold", [True, False])
def test_freed_memory_is_held_or_given_back(hold):
    code = f"""
import torch
from linformer_kit.bench.measure import hold_memory
from linformer_kit.process_memory import status_bytes
hold_memory({hold})
before = status_bytes("VmRSS")
torch.ones(2**26)
print((status_bytes("VmRSS") - before) // 2**20)
"""
    left_mib = int(subprocess.check_output([sys.executable, "-c", code]))
    assert left_mib > 200 if hold else left_mib < 50


@can_reset_peak
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_held_memory_is_given_back_before_another_process_is_measured():
    code = """
import torch
from linformer_kit.bench import measure, memory
from linformer_kit.process_memory import status_bytes
measure.hold_memory()
before = status_bytes("VmRSS")
torch.ones(2**26)
memory.measure_memory(memory.MemoryPoint("linformer-kit", 128, 32, 1, "forward"))
print((status_bytes("VmRSS") - before) // 2**20)
"""
    assert int(subprocess.check_output([sys.executable, "-c", code])) < 50


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system tells no other")
def test_the_peak_of_a_process_is_not_that_of_its_parent():
    child = "from linformer_kit.process_memory import peak_resident; print(peak_resident() // 2**20)"
    code = f"""
import subprocess, sys
large = b"x" * 400 * 2**20
print(subprocess.check_output([sys.executable, "-c", {child!r}], text=True))
"""
    assert int(subprocess.check_output([sys.executable, "-c", code])) < 300


def test_memory_of_a_point_is_measured_in_a_process_of_its_own():
    hold = torch.ones(100 * 2**18)  # not the child's
    status, peak = memory.measure_memory(memory.MemoryPoint(peers.FULL, 1024, 32, 2, "forward"))
    output = 2 * 1024 * 512 * 4
    assert status == measure.OK
    assert 4 * output <= peak <= 8 * output  # queries, keys, values and heads at least
    del hold


def test_rounds_are_interleaved_and_fit_the_budget(monkeypatch):
    called = []
    monkeypatch.setattr(measure, "seconds_of", lambda call: call() or 1.0)
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    timings = measure.time_interleaved(calls, budget_seconds=15, least_rounds=3, most_rounds=9)
    rounds = ["".join(called[start : start + 3]) for start in range(0, len(called), 3)]
    assert len(rounds) == 6  # one to warm up, five that fit
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 2  # in changing order
    assert timings["a"] == measure.Timing(measure.OK, 1.0, 1.0, 1.0, 5)


def test_a_call_out_of_memory_leaves_the_others_running():
    def too_large():
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")

    timings = measure.time_interleaved({"large": too_large, "small": int}, most_rounds=1, least_rounds=1)
    assert (timings["large"].status, timings["small"].status) == (measure.OUT_OF_MEMORY, measure.OK)


def test_a_call_may_run_out_of_memory_in_a_later_round():
    called = []

    def too_large_in_the_end():
        called.append(1)
        if len(called) == 3:
            raise MemoryError

    timings = measure.time_interleaved({"large": too_large_in_the_end, "small": int}, most_rounds=5, least_rounds=5)
    assert len(called) == 3
    assert timings["large"] == measure.Timing(measure.OUT_OF_MEMORY)
    assert (timings["small"].status, timings["small"].rounds) == (measure.OK, 5)


def test_other_errors_are_not_taken_for_lack_of_memory():
    def broken():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        measure.time_interleaved({"broken": broken})


def test_a_table_comes_back_from_its_file(tmp_path):
    table = Table(tmp_path / "t.csv", ("name", "length"), ("seconds", "note"))
    table.put([{"name": "a", "length": 512, "seconds": 0.25}, {"name": "b", "length": 512}])
    table.put([{"name": "a", "length": 512, "note": "x, y"}])
    again = Table(tmp_path / "t.csv", ("name", "length"), ("seconds", "note"))
    assert again.number("seconds", name="a", length=512) == 0.25
    assert again.get(name="a", length=512)["note"] == "x, y"
    assert again.number("seconds", name="b", length=512) is None
    assert [row["name"] for row in again.rows(length=512)] == ["a", "b"]
    with pytest.raises(ValueError, match="--fresh"):
        Table(tmp_path / "t.csv", ("name",), ("seconds",))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("old")

    def fails(part):
        part.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fails)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_panel_without_points_is_drawn_empty(tmp_path):
    figure, (axes,) = style.new_figure(1, 1)
    style.cost_lines(axes, "nothing yet", {"linformer-kit": []}, {}, "time")
    style.legend(axes)
    style.save(figure, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


def run_benchmark(*arguments: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, BENCHMARK, *map(str, arguments)], capture_output=True, text=True, env=environment
    )


def test_a_quick_run_writes_everything_and_the_next_measures_nothing_again(tmp_path):
    csvs = ("attention.csv", "attention_growth.csv", "attention_causal.csv", "attention_share.csv")
    pictures = ("attention.png", "attention_growth.png")
    folder = tmp_path / "results"
    done = run_benchmark("--quick", "--output", folder)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {
        *csvs,
        *pictures,
        "attention_targets.csv",
        "attention_machine.json",
    }
    with (folder / "attention.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["implementation"] for row in rows} == set(peers.IMPLEMENTATIONS)
    assert all(row["status"] == measure.OK and float(row["seconds_median"]) > 0 for row in rows)
    assert any(row["peak_mib"] for row in rows)
    with (folder / "attention_share.csv").open() as file:
        assert all(float(row["gemm_fraction"]) > 0 for row in csv.DictReader(file))

    before = {name: ((folder / name).stat().st_mtime_ns, (folder / name).read_text()) for name in csvs}
    for picture in pictures:
        (folder / picture).unlink()
    again = run_benchmark("--quick", "--output", folder)
    assert again.returncode == 0, again.stderr
    assert before == {name: ((folder / name).stat().st_mtime_ns, (folder / name).read_text()) for name in csvs}
    assert all((folder / picture).stat().st_size > 0 for picture in pictures)


def test_a_second_run_in_one_folder_is_refused(tmp_path):
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        done = run_benchmark("--quick", "--output", tmp_path)
    finally:
        os.close(handle)
    assert done.returncode == 1
    assert "another run is measuring" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_summary_needs_measurements(tmp_path):
    done = run_benchmark("--summary", "--output", tmp_path)
    assert done.returncode == 1
    assert "no measurements" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick"], "--output"),
        (["--summary", "--fresh"], "choose one"),
        (["--quik"], "No such option"),
        (["--quick", "--output", Path(__file__) / "below"], "cannot write to"),
    ],
    ids=["quick-into-results", "summary-and-fresh", "unknown-flag", "unwritable"],
)
def test_wrong_use_is_explained_before_anything_is_measured(arguments, message):
    done = run_benchmark(*arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
