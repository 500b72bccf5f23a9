"""What the benchmark of the models measures: the points, and how each is measured and kept."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from linformer_kit.bench import peer_models
from linformer_kit.bench.generation import Generator, Started, causal_lm, check_generator, encoder_decoder, go_on, read
from linformer_kit.bench.measure import (
    MEASURED,
    MODES,
    OK,
    OUT_OF_MEMORY,
    OVER_TIME_LIMIT,
    Mode,
    Timing,
    as_row,
    meminfo_bytes,
    time_interleaved,
)
from linformer_kit.bench.peer_models import COMPARED_BATCH, COMPARED_LENGTH, NONE_EAGER, Sizes
from linformer_kit.bench.run import Step, in_words
from linformer_kit.csv_tables import Table
from linformer_kit.models.modeling_linformer import LinformerModel
from linformer_kit.process_memory import release_free_memory

ENCODERS, GENERATION, MACHINE = "models.csv", "models_generation.csv", "models_machine.json"

# what is generated with; the first of each pair is what Linformer is for, the second what it is compared with
CAUSAL, CAUSAL_FULL = "causal LM, blocks", "causal LM, full attention"
SHORTENED, UNSHORTENED = "encoder-decoder, K rows", "encoder-decoder, no projection"
READ, GO_ON = "read", "generate"
# of the memory that was free at the start: what a call may be expected to need
USABLE = 0.9


@dataclass(frozen=True)
class Sweep:
    """Which points are measured."""

    name: str
    sizes: Sizes
    lengths: tuple[int, ...]
    tokens: int  # per batch, as far as one example is not longer
    prompts: tuple[int, ...]
    source: int
    projected_length: int  # of the encoder-decoder
    block_length: int
    slots: int
    new_tokens: int
    budgets: dict[Mode, float]  # seconds for the rounds of one length
    least_rounds: int
    most_rounds: int
    generation_budget: float = 40.0  # seconds for the rounds of one phase
    most_seconds_at_half: float = 15.0  # a model that took longer at half the length is left out

    def batch(self, length: int) -> int:
        """Examples per batch: the same number of tokens at every length, if that is possible."""
        return max(1, self.tokens // length)


COMPLETE = Sweep(
    name="complete",
    sizes=Sizes(),
    lengths=tuple(2**power for power in range(9, 15)),
    tokens=4096,
    prompts=(1024, 4096, 16384),
    source=16384,
    projected_length=128,
    block_length=128,
    slots=4,
    new_tokens=64,
    budgets={"forward": 80.0, "forward+backward": 120.0},
    least_rounds=2,  # beyond the budget at N=16,384 only, where a round takes minutes
    most_rounds=25,
)
QUICK = Sweep(
    name="quick",
    sizes=Sizes(hidden=32, layers=2, heads=2, intermediate=64, vocabulary=128),
    lengths=(512, 1024),
    tokens=1024,
    prompts=(64, 128),
    source=128,
    projected_length=16,
    block_length=32,
    slots=4,
    new_tokens=8,
    budgets={"forward": 1.0, "forward+backward": 1.0},
    least_rounds=1,
    most_rounds=1,
    generation_budget=1.0,
)


class Benchmark:
    """The tables of a folder, and the steps that fill them."""

    def __init__(self, sweep: Sweep, folder: Path):
        self.sweep = sweep
        self.folder = folder
        self.encoders = Table(folder / ENCODERS, ("model", "length", "mode"), ("batch", *MEASURED, "multiply_adds"))
        values = ("batch", *MEASURED, "tokens", "tokens_per_second", "cache_bytes")
        self.generation = Table(folder / GENERATION, ("model", "length", "phase"), values)
        # later this process holds what it has used, and it looks as if less were free
        self.free_bytes = meminfo_bytes("MemAvailable")

    def steps(self) -> list[Step]:
        """Everything there is to measure; what takes longest last, so that a run that is stopped early has most of it."""
        steps = [
            Step(
                f"generation, prompt of {length:,}",
                self.is_generated(CAUSAL, length),
                self.generates(self.causal_lms, length),
            )
            for length in self.sweep.prompts
        ]
        source = self.sweep.source
        steps.append(
            Step(
                f"generation, source of {source:,}",
                self.is_generated(SHORTENED, source),
                self.generates(self.seq2seq, source),
            )
        )
        steps += [
            Step(
                f"N={length:,}",
                lambda length=length: not self.untimed_modes(length),
                lambda length=length: self.time(length),
            )
            for length in self.sweep.lengths
        ]
        return steps

    def untimed_modes(self, length: int) -> list[Mode]:
        """Models of a length are timed together, so one of them tells for all."""
        rows = {mode: self.encoders.get(model=NONE_EAGER, length=length, mode=mode) for mode in MODES}
        return [mode for mode, row in rows.items() if not (row and row["status"])]

    def time(self, length: int) -> Iterable[str]:
        """All encoders at one length, taking turns, in every mode that is missing."""
        sweep, batch = self.sweep, self.sweep.batch(length)
        release_free_memory()  # what the last length has left in pieces
        models = peer_models.build_encoders(length, sweep.sizes)
        peer_models.check_encoders(models, sweep.sizes.random_ids(COMPARED_BATCH, COMPARED_LENGTH))
        multiply_adds = {
            name: peer_models.encoder_multiply_adds(model, length, batch)
            for name, model in models.items()
            if isinstance(model, LinformerModel)
        }
        ids = sweep.sizes.random_ids(batch, length)
        for mode in self.untimed_modes(length):
            left_out = {name: Timing(OVER_TIME_LIMIT) for name in models if self.takes_too_long(name, length, mode)}
            left_out |= {name: Timing(OUT_OF_MEMORY) for name in self.too_large(length, mode)}
            calls = {
                name: peer_models.make_model_call(model, ids, mode)
                for name, model in models.items()
                if name not in left_out
            }
            timings = left_out | self.interleaved(calls, sweep.budgets[mode])
            self.encoders.put(
                [
                    {
                        **{"model": name, "length": length, "mode": mode, "batch": batch},
                        **as_row(timings[name]),
                        "multiply_adds": multiply_adds.get(name) if mode == "forward" else None,
                    }
                    for name in models
                ]
            )
            yield in_words(f"N={length:,} {mode}", {name: timings[name] for name in models})

    def takes_too_long(self, model: str, length: int, mode: Mode) -> bool:
        """Whether a call at half the length took so long that at this one a few rounds would take a quarter of an hour."""
        before = self.encoders.number("seconds_median", model=model, length=length // 2, mode=mode)
        return before is not None and before > self.sweep.most_seconds_at_half

    def too_large(self, length: int, mode: Mode) -> list[str]:
        """The models that are not worth starting: the system would be busy with their memory for minutes before it gives up."""
        needed = peer_models.eager_training_bytes(self.sweep.sizes, self.sweep.batch(length), length)
        is_too_large = mode != "forward" and self.free_bytes is not None and needed > USABLE * self.free_bytes
        return [NONE_EAGER] if is_too_large else []

    def interleaved(self, calls: dict[str, Callable[[], object]], budget_seconds: float) -> dict[str, Timing]:
        """Timing with the rounds of this sweep."""
        rounds = {"least_rounds": self.sweep.least_rounds, "most_rounds": self.sweep.most_rounds}
        return time_interleaved(calls, budget_seconds=budget_seconds, **rounds)

    def is_generated(self, model: str, length: int) -> Callable[[], bool]:
        """Models of a length are timed together, so one of them tells for all."""
        return lambda: all(self.generation.get(model=model, length=length, phase=phase) for phase in (READ, GO_ON))

    def generates(self, build: Callable[[int], dict[str, Generator]], length: int) -> Callable[[], Iterable[str]]:
        return lambda: self.time_generation(build(length), length)

    def causal_lms(self, length: int) -> dict[str, Generator]:
        blocks = {"block_length": self.sweep.block_length, "slots": self.sweep.slots}
        kinds = {CAUSAL: "causal", CAUSAL_FULL: "full"}
        return {
            name: causal_lm(self.sweep.sizes, length, decoder_attention=kind, **blocks) for name, kind in kinds.items()
        }

    def seq2seq(self, length: int) -> dict[str, Generator]:
        blocks = {"block_length": self.sweep.block_length, "slots": self.sweep.slots}
        kinds = {SHORTENED: {"projected_length": self.sweep.projected_length}, UNSHORTENED: {"projection": "none"}}
        return {name: encoder_decoder(self.sweep.sizes, length, **blocks, **kind) for name, kind in kinds.items()}

    def time_generation(self, models: dict[str, Generator], length: int) -> Iterable[str]:
        """Both phases of several models, which take turns within each phase."""
        sweep, ids = self.sweep, self.sweep.sizes.random_ids(1, length)
        for name, model in models.items():
            # a block and a half, and somewhat more than half a block: one is finished while tokens come one by one
            new_ids = sweep.sizes.random_ids(1, sweep.block_length * 5 // 8)
            check_generator(name, model, ids[:, : sweep.block_length * 3 // 2], new_ids)
        reading = self.interleaved({name: partial(read, models[name], ids) for name in models}, sweep.generation_budget)
        started = {name: read(models[name], ids) for name in models if reading[name].status == OK}
        calls = {name: partial(go_on, models[name], start, sweep.new_tokens) for name, start in started.items()}
        generating = {name: Timing(OUT_OF_MEMORY) for name in models} | self.interleaved(calls, sweep.generation_budget)
        cache_bytes = {name: self.cache_bytes(models[name], start) for name, start in started.items()}
        phases = {READ: (reading, length), GO_ON: (generating, sweep.new_tokens)}
        self.generation.put(
            [
                {
                    **{"model": name, "length": length, "phase": phase, "batch": 1, "tokens": tokens},
                    **as_row(timings[name]),
                    "tokens_per_second": tokens / median if (median := timings[name].median) else None,
                    "cache_bytes": cache_bytes.get(name) if phase == GO_ON else None,
                }
                for (phase, (timings, tokens)), name in product(phases.items(), models)
            ]
        )
        for phase, (timings, tokens) in phases.items():
            yield in_words(f"{phase} {tokens:,} tokens, N={length:,}", timings)

    def cache_bytes(self, model: Generator, started: Started) -> int:
        """What is kept when all tokens have been generated."""
        return go_on(model, started, self.sweep.new_tokens).nbytes
