"""What the benchmark of the attention layers measures: the points, and how each is measured and kept."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from linformer_kit.bench import peers
from linformer_kit.bench.measure import (
    MEASURED,
    MODES,
    OK,
    OUT_OF_MEMORY,
    OVER_TIME_LIMIT,
    Mode,
    Timing,
    as_row,
    gemm_calls,
    gemm_rate,
    make_call,
    time_interleaved,
)
from linformer_kit.bench.memory import MemoryPoint, measure_memory
from linformer_kit.bench.peers import FULL, LINFORMERS, OURS
from linformer_kit.bench.run import Step, in_words
from linformer_kit.csv_tables import Table
from linformer_kit.formatting import format_size

BATCH = 2
# the projected length of the pictures over N, of the growth, and of the points that include full attention
K = 128
# a call expected to take longer is left out
LIMIT_SECONDS = 30.0
# tokens on which causal layers are compared before they are timed; not a multiple of any block
CAUSAL_CHECK_LENGTH = 1000

MAIN, GROWTH, CAUSAL, SHARE = "attention.csv", "attention_growth.csv", "attention_causal.csv", "attention_share.csv"
MACHINE = "attention_machine.json"
MEMORY = ("memory_status", "peak_mib")

Point = tuple[str, int]  # implementation, projected length


@dataclass(frozen=True)
class Sweep:
    """Which points are measured."""

    name: str
    lengths: tuple[int, ...]
    projected_lengths: tuple[int, ...]
    memory_points: tuple[tuple[int, int], ...]  # (length, projected length)
    memory_modes: tuple[Mode, ...]
    growth_lengths: tuple[int, ...]
    causal_lengths: tuple[int, ...]
    causal_shapes: tuple[tuple[int, int], ...]  # (block length, slots)
    share_from: int  # the length from which on our layer is timed beside a GEMM
    least_rounds: int
    most_rounds: int
    budget_seconds: float = 90.0  # for the rounds of one length and mode
    long_from: int = 32768  # measured last; a round of training steps takes minutes, and three must do


PROJECTED_LENGTHS = (32, 64, 128, 256)
COMPLETE = Sweep(
    name="complete",
    lengths=tuple(2**power for power in range(9, 17)),
    projected_lengths=PROJECTED_LENGTHS,
    memory_points=(*((4096, rows) for rows in PROJECTED_LENGTHS), (16384, K), (65536, K)),
    memory_modes=MODES,
    growth_lengths=tuple(2**power for power in range(12, 19)),
    causal_lengths=tuple(2**power for power in range(10, 15)),
    causal_shapes=((128, 4), (128, 8), (256, 8)),
    share_from=4096,
    least_rounds=5,
    most_rounds=25,
)
QUICK = Sweep(
    name="quick",
    lengths=(256, 512),
    projected_lengths=(K,),
    memory_points=((512, K),),
    memory_modes=("forward+backward",),
    growth_lengths=(256, 512),
    causal_lengths=(256,),
    causal_shapes=((64, 4),),
    share_from=512,
    least_rounds=1,
    most_rounds=1,
)


class Benchmark:
    """The tables of a folder, and the steps that fill them."""

    def __init__(self, sweep: Sweep, folder: Path):
        self.sweep = sweep
        self.folder = folder
        point = ("implementation", "length", "projected_length", "batch", "mode")
        causal_point = ("implementation", "length", "block_length", "slots", "batch", "mode")
        self.main = Table(folder / MAIN, point, MEASURED + MEMORY)
        self.growth = Table(folder / GROWTH, point, MEASURED + MEMORY)
        self.causal = Table(folder / CAUSAL, causal_point, MEASURED)
        self.share = Table(folder / SHARE, point, (*MEASURED, "multiply_adds", "gemm_rate", "gemm_fraction"))

    def steps(self) -> list[Step]:
        """Everything there is to measure; what takes longest last, so that a run that is stopped early has most of it."""
        sweep, steps = self.sweep, []

        def add(name: str, is_done: Callable[..., bool], run: Callable[..., Iterable[str]], *arguments) -> None:
            steps.append(Step(name, lambda: is_done(*arguments), lambda: run(*arguments)))

        def add_main(is_long: bool) -> None:
            for length in sweep.lengths:
                if (length >= sweep.long_from) == is_long:
                    add(f"N={length:,}", lambda length: not self.untimed_modes(length), self.time_layers, length)
            # after the times, which tell what is not worth starting
            for (length, rows), mode in product(sweep.memory_points, sweep.memory_modes):
                if (length >= sweep.long_from) == is_long:
                    for name in self.implementations(rows):
                        point = MemoryPoint(name, length, rows, BATCH, mode)
                        add(
                            f"memory N={length:,} K={rows} {name}",
                            self.memory_is_known,
                            self.measure_memory,
                            self.main,
                            point,
                        )

        add_main(is_long=False)
        for mode in MODES:
            add(f"growth, {mode}", self.growth_is_timed, self.time_growth, mode)
        for length in sweep.lengths:
            if length >= sweep.share_from:
                add(f"share of the GEMM rate, N={length:,}", self.share_is_known, self.measure_share, length)
        for length in sweep.causal_lengths:
            add(f"causal N={length:,}", lambda length: not self.untimed_causal_modes(length), self.time_causal, length)
        for length, mode in product(sweep.growth_lengths, sweep.memory_modes):
            point = MemoryPoint(OURS, length, K, 1, mode)
            add(f"memory N={length:,}", self.memory_is_known, self.measure_memory, self.growth, point)
        add_main(is_long=True)
        return steps

    def implementations(self, projected_length: int) -> tuple[str, ...]:
        """Full attention has no projected length; it is measured once, beside the others with K rows."""
        return (*LINFORMERS, FULL) if projected_length == K else LINFORMERS

    @staticmethod
    def key(implementation: str, length: int, projected_length: int, batch: int, mode: str) -> dict[str, object]:
        """The key columns of a row."""
        rows = None if implementation == FULL else projected_length
        return {
            "implementation": implementation,
            "length": length,
            "projected_length": rows,
            "batch": batch,
            "mode": mode,
        }

    def untimed_modes(self, length: int) -> list[Mode]:
        """Layers of a length are timed together, so one of them tells for all."""
        rows = {
            mode: self.main.get(**self.key(OURS, length, self.sweep.projected_lengths[0], BATCH, mode))
            for mode in MODES
        }
        return [mode for mode, row in rows.items() if not (row and row["status"])]

    def refusals(self, points: list[Point], length: int, modes: list[Mode]) -> dict[tuple[str, int, Mode], str]:
        """The points that are not worth starting at this length, and why."""
        found = {}
        for (name, rows), mode in product(points, modes):
            reason = self.refusal(
                self.main, self.key(name, length, rows, BATCH, mode), exponent=2 if name == FULL else 1
            )
            if reason:
                found[name, rows, mode] = reason
        return found

    def refusal(self, table: Table, key: dict[str, object], exponent: int) -> str | None:
        """Why a call is not worth starting, as far as the next shorter length tells."""
        length = int(str(key["length"]))
        shorter = [
            row
            for row in table.rows(**{name: key[name] for name in key if name != "length"})
            if int(row["length"]) < length
        ]
        if not shorter:
            return None
        last = max(shorter, key=lambda row: int(row["length"]))
        if last["status"] != OK:
            return last["status"] or None
        expected = float(last["seconds_median"]) * (length / int(last["length"])) ** exponent
        return OVER_TIME_LIMIT if expected > LIMIT_SECONDS else None

    def time_layers(self, length: int) -> Iterable[str]:
        """All implementations at one length with all projected lengths, in both modes.

        They all take turns, so that the rounds of each are spread over a minute or more: a machine has moods that last seconds.
        """
        modes = self.untimed_modes(length)
        points = [(name, rows) for rows in self.sweep.projected_lengths for name in self.implementations(rows)]
        refusals = self.refusals(points, length, modes)
        ours = {rows: peers.our_layer(length, rows) for rows in self.sweep.projected_lengths}
        x = torch.randn(BATCH, length, peers.EMBED_DIM)
        layers = {(name, rows): peers.build(name, ours[rows]) for name, rows in points}
        for name, rows in points:
            if any((name, rows, mode) not in refusals for mode in modes):
                too_large = peers.check_layers({name: layers[name, rows]}, ours[rows], x)
                refusals |= {(name, rows, mode): OUT_OF_MEMORY for mode in modes if too_large}

        for mode in modes:
            calls = {point: make_call(layers[point], x, mode) for point in points if (*point, mode) not in refusals}
            is_long_training = mode != "forward" and length >= self.sweep.long_from
            timings = self.time(calls, few_rounds=is_long_training)
            timings |= {point: Timing(refusals[*point, mode]) for point in points if point not in calls}
            self.main.put(
                [{**self.key(name, length, rows, BATCH, mode), **as_row(timings[name, rows])} for name, rows in points]
            )
            for rows in self.sweep.projected_lengths:
                found = {name: timings[name, rows] for name in self.implementations(rows)}
                yield in_words(f"N={length:,} K={rows} {mode}", found)

    def time(self, calls: dict[Any, Callable[[], object]], few_rounds: bool = False) -> dict[Any, Timing]:
        """Interleaved timing with the rounds of this sweep."""
        most = min(self.sweep.most_rounds, 3) if few_rounds else self.sweep.most_rounds
        least = min(self.sweep.least_rounds, most)
        return time_interleaved(calls, budget_seconds=self.sweep.budget_seconds, least_rounds=least, most_rounds=most)

    def share_is_known(self, length: int) -> bool:
        row = self.share.get(**self.key(OURS, length, self.sweep.projected_lengths[0], BATCH, "forward"))
        return bool(row and row["status"])

    def measure_share(self, length: int) -> Iterable[str]:
        """What share of the GEMM rate the multiply-adds of the plan reach, in all rounds of the sweep however long they take."""
        ours = {rows: peers.our_layer(length, rows) for rows in self.sweep.projected_lengths}
        x = torch.randn(BATCH, length, peers.EMBED_DIM)
        too_large = [rows for rows, layer in ours.items() if peers.check_layers({OURS: layer}, layer, x)]
        calls: dict[Any, Callable[[], object]] = {
            rows: make_call(layer, x, "forward") for rows, layer in ours.items() if rows not in too_large
        }
        rounds = self.sweep.most_rounds
        timings = time_interleaved({**calls, **gemm_calls()}, least_rounds=rounds, most_rounds=rounds)
        timings |= {rows: Timing(OUT_OF_MEMORY) for rows in too_large}
        rate, found = gemm_rate(timings), []
        for rows, layer in ours.items():
            multiply_adds, seconds = layer.plan(length, BATCH).multiply_adds, timings[rows].median
            fraction = multiply_adds / seconds / rate if seconds and rate else None
            point = {**self.key(OURS, length, rows, BATCH, "forward"), **as_row(timings[rows])}
            found.append({**point, "multiply_adds": multiply_adds, "gemm_rate": rate, "gemm_fraction": fraction})
        self.share.put(found)
        percents = [
            f"K={row['projected_length']} {100 * row['gemm_fraction']:.0f} %" for row in found if row["gemm_fraction"]
        ]
        yield f"share of the GEMM rate, N={length:,}: {', '.join(percents) or OUT_OF_MEMORY}"

    def growth_is_timed(self, mode: Mode) -> bool:
        rows = [self.growth.get(**self.key(OURS, length, K, 1, mode)) for length in self.sweep.growth_lengths]
        return all(row and row["status"] for row in rows)

    def time_growth(self, mode: Mode) -> Iterable[str]:
        """Our layer at all lengths, interleaved: a slow minute must not bend the line."""
        longest = torch.randn(1, max(self.sweep.growth_lengths), peers.EMBED_DIM)
        calls: dict[str, Callable[[], object]] = {}
        for length in self.sweep.growth_lengths:
            layer, x = peers.our_layer(length, K), longest[:, :length]
            if not peers.check_layers({OURS: layer}, layer, x):
                calls[str(length)] = make_call(layer, x, mode)
        timings = self.time(calls)
        self.growth.put(
            [
                {**self.key(OURS, length, K, 1, mode), **as_row(timings.get(str(length), Timing(OUT_OF_MEMORY)))}
                for length in self.sweep.growth_lengths
            ]
        )
        yield in_words(f"growth, {mode}", timings)

    def causal_keys(self, length: int, mode: Mode) -> dict[str, dict[str, object]]:
        """The key columns of each causal layer at a length, by the name it has in lines and pictures."""
        point = {"length": length, "batch": 1, "mode": mode}
        keys: dict[str, dict[str, object]] = {
            causal_name(block, slots): {**point, "implementation": OURS, "block_length": block, "slots": slots}
            for block, slots in self.sweep.causal_shapes
        }
        return {**keys, FULL: {**point, "implementation": FULL, "block_length": None, "slots": None}}

    def untimed_causal_modes(self, length: int) -> list[Mode]:
        rows = {mode: [self.causal.get(**key) for key in self.causal_keys(length, mode).values()] for mode in MODES}
        return [mode for mode in MODES if not all(row and row["status"] for row in rows[mode])]

    def time_causal(self, length: int) -> Iterable[str]:
        """Our causal layer with several blocks and slots, and causal full attention."""
        layers: dict[str, peers.CausalLinformerAttention | peers.FullAttention] = {
            causal_name(block, slots): peers.our_causal_layer(block, slots) for block, slots in self.sweep.causal_shapes
        }
        layers[FULL] = peers.FullAttention(peers.our_causal_layer(128, 4), causal=True)
        x = torch.randn(1, max(length, CAUSAL_CHECK_LENGTH), peers.EMBED_DIM)
        peers.check_causal_layers(layers, x[:, :CAUSAL_CHECK_LENGTH])
        x = x[:, :length]
        for mode in self.untimed_causal_modes(length):
            keys = self.causal_keys(length, mode)
            refusals = {name: self.refusal(self.causal, key, exponent=2) for name, key in keys.items()}
            timings = self.time(
                {name: make_call(layer, x, mode) for name, layer in layers.items() if not refusals[name]}
            )
            timings |= {name: Timing(reason) for name, reason in refusals.items() if reason}
            self.causal.put([{**keys[name], **as_row(timings[name])} for name in layers])
            yield in_words(f"causal N={length:,} {mode}", timings)

    def memory_is_known(self, table: Table, point: MemoryPoint) -> bool:
        row = table.get(**self.key(**asdict(point)))
        return bool(row and row["memory_status"])

    def measure_memory(self, table: Table, point: MemoryPoint) -> Iterable[str]:
        """The peak memory of one call; not of one that was too slow or too large to be timed."""
        key = self.key(**asdict(point))
        row = table.get(**key)
        status, peak_bytes = (row["status"], None) if row and row["status"] not in ("", OK) else measure_memory(point)
        peak_mib = None if peak_bytes is None else peak_bytes / 2**20
        table.put([{**key, "memory_status": status, "peak_mib": peak_mib}])
        what = f"{point.implementation} N={point.length:,} K={point.projected_length} B={point.batch} {point.mode}"
        yield f"memory of {what}: {status if peak_mib is None else format_size(peak_mib)}"


def causal_name(block_length: int, slots: int) -> str:
    return f"blocks of {block_length}, {slots} slots"
