"""Timing and memory: interleaved rounds, peaks in fresh processes. No test looks at absolute times."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from linformer_kit.bench import measure
from linformer_kit.bench.isolated import measure_isolated
from linformer_kit.bench.measure import OK, OUT_OF_MEMORY, Phases, Timing, time_interleaved
from linformer_kit.bench.point import Point
from linformer_kit.csv_tables import Table, fit_exponent

# elsewhere the peak cannot be reset, so it includes everything that this process did before
can_reset_peak = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc/self/clear_refs"
)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_law_is_found(power):
    sizes = [4096 * 2**step for step in range(7)]
    noise = [1.02, 0.98, 1.01, 1.0, 0.99, 1.02, 0.98]
    costs = [3e-5 * factor * size**power for factor, size in zip(noise, sizes, strict=True)]
    assert fit_exponent(sizes, [3e-5 * size**power for size in sizes]) == pytest.approx(power)
    assert fit_exponent(sizes, costs) == pytest.approx(power, abs=0.02)


def test_an_exponent_needs_two_points():
    with pytest.raises(ValueError, match="two points"):
        fit_exponent([4096], [1.0])


@can_reset_peak
@pytest.mark.parametrize("mib", [50, 200])
def test_peak_memory_includes_a_known_allocation(mib):
    def call():
        torch.ones(mib * 2**18)  # freed before the call returns: the peak counts, not what is left

    assert measure.peak_memory(call) / 2**20 == pytest.approx(mib, rel=0.1)


@can_reset_peak
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize("hold", [True, False])
def test_freed_memory_is_held_or_returned(hold):
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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems report another peak")
def test_the_peak_of_a_process_is_not_that_of_its_parent():
    child = "from linformer_kit.process_memory import peak_resident; print(peak_resident() // 2**20)"
    code = f"""
import subprocess, sys
large = b"x" * 400 * 2**20
print(subprocess.check_output([sys.executable, "-c", {child!r}], text=True))
"""
    assert int(subprocess.check_output([sys.executable, "-c", code])) < 300


def test_the_memory_of_a_point_is_measured_in_a_separate_process():
    hold = torch.ones(100 * 2**18)  # not the worker's
    found = measure_isolated(Point("layer", "forward", "full-attention", 1024, None, 2), 60.0)
    output = 2 * 1024 * 512 * 4
    assert found.status == OK
    assert 3 * output <= found.peak_bytes <= 8 * output  # keys, values and output at least; queries come in chunks
    del hold


def test_rounds_are_interleaved_and_fit_the_budget(monkeypatch):
    called = []
    monkeypatch.setattr(measure, "seconds_of", lambda call: call() or Phases({"": 1.0}))
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    timings = time_interleaved(calls, budget_seconds=15, least_rounds=3, most_rounds=9)
    rounds = ["".join(called[start : start + 3]) for start in range(0, len(called), 3)]
    assert len(rounds) == 6  # one to warm up, five that fit
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 2  # in changing order
    assert timings["a"] == Timing(OK, 1.0, 1.0, 1.0, 5)


def test_a_call_may_time_itself_and_its_phases():
    answers = iter([Phases({"": 9.0, "part": 9.0}), Phases({"": 1.0, "part": 0.5}), Phases({"": 3.0, "part": 0.5})])
    timing = time_interleaved({"a": lambda: next(answers)}, least_rounds=2, most_rounds=2)["a"]
    assert (timing.median, timing.slowest) == (2.0, 3.0)
    assert timing.phases == {"part": Timing(OK, 0.5, 0.5, 0.5, 2, share=0.25)}


def test_a_call_out_of_memory_leaves_the_others_running():
    def too_large():
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")

    timings = time_interleaved({"large": too_large, "small": int}, most_rounds=1, least_rounds=1)
    assert (timings["large"].status, timings["small"].status) == (OUT_OF_MEMORY, OK)


def test_a_call_may_run_out_of_memory_in_a_later_round():
    called = []

    def too_large_in_the_end():
        called.append(1)
        if len(called) == 3:
            raise MemoryError

    timings = time_interleaved({"large": too_large_in_the_end, "small": int}, most_rounds=5, least_rounds=5)
    assert len(called) == 3
    assert timings["large"] == Timing(OUT_OF_MEMORY)
    assert (timings["small"].status, timings["small"].rounds) == (OK, 5)


def test_other_errors_are_not_recorded_as_out_of_memory():
    def broken():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        time_interleaved({"broken": broken})


def test_a_table_is_read_as_it_was_written(tmp_path):
    table = Table(tmp_path / "t.csv", ("name", "length"), ("seconds", "note"))
    table.put([{"name": "a", "length": 512, "seconds": 0.25}, {"name": "b", "length": 512}])
    table.put([{"name": "a", "length": 512, "note": "x, y"}])
    again = Table(tmp_path / "t.csv", ("name", "length"), ("seconds", "note"))
    first, second = (again.get(name=name, length=512) for name in "ab")
    assert (first["seconds"], first["note"]) == ("0.25", "x, y")
    assert second["seconds"] == ""
    assert [row["name"] for row in again.rows(length=512)] == ["a", "b"]
    with pytest.raises(ValueError, match="unknown column length; choose another file"):
        Table(tmp_path / "t.csv", ("name",), ("seconds",))
