"""Speed of training beside full attention and another package, what the loop costs, and the speed of preparation: `make bench`.

python benchmarks/training.py --data ../shared/data/imdb    # a folder with train.jsonl.gz and test.jsonl.gz: text, label
python benchmarks/training.py                               # without it: made-up reviews, as long as real ones

Writes to results/: training.csv (part × name × length × phase), training_machine.json, training_targets.csv and training.png.
Every length and tokenizer is kept as soon as it is measured: stop at any time, run again to go on.

- The shipped configuration `imdb`, with `projection` "dynamic" as shipped and "linear"; its twin `attention: full`; and the same
  model with the layers of `linformer` 0.2.3, which knows a learned E only, in the place of ours. All have dropout, of attention
  weights too; without the latter, which keeps attention from being fused, "dynamic" and full are measured once more.
- All are trained by `LinformerTrainer` on the same batches: reviews joined and cut to N tokens, 16,384 tokens per step.
- Before anything is timed, "linear", full and `linformer` are compared with a plain float64 evaluation, with equal weights and
  without dropout.
- Time: models take turns, in an order that changes; a turn is up to ten steps of the trainer's loop, after one to warm up, with
  logs, metrics.jsonl and the bar of a terminal, and without evaluations. Medians over the turns. A step reaches from the end of
  the one before to its own, so fetching and padding the batch is a part of it.
- Phases of a step: forward (the loss included), backward, clipping of gradients together with the step of the optimizer; the rest
  is what the loop costs. Shares are of all steps together.
- The process is as `linformer train` finds it: not one that holds its memory, unlike in the other benchmarks.
- Preparation is what `linformer prepare` does: reading, training the tokenizer, tokenizing, writing; in a process with one core,
  and with a new cache each time. MB are millions of UTF-8 bytes of text. BPE as shipped; bytes with N=4,096.
"""

import copy
import dataclasses
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import metadata
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Annotated, Any

import datasets
import numpy as np
import typer
from rich.console import Console
from torch import Tensor, nn
from training_summary import (
    BACKWARD,
    BPE,
    BYTES,
    DYNAMIC,
    DYNAMIC_FUSED,
    EVERYTHING,
    FORWARD,
    FULL_FUSED,
    LEARNING,
    LINEAR,
    OPTIMIZER,
    PREPARATION,
    PROCESSOR,
    READING,
    REST,
    STEP,
    TOKENIZING,
    TRAINING,
    summarise,
)
from transformers import TrainerCallback

from linformer_kit.bench.machine import code_fingerprint, describe_machine
from linformer_kit.bench.measure import MEASURED, OK, OUT_OF_MEMORY, Timing, as_row, is_out_of_memory
from linformer_kit.bench.peer_models import Sizes, layers_of, model_dependencies, our_encoder, require_model_agreement
from linformer_kit.bench.peers import FULL, LINFORMER, linformer_layer, peer_versions
from linformer_kit.bench.run import Program, Step, fail, in_words, run_program
from linformer_kit.csv_tables import Table
from linformer_kit.models.modeling_linformer import LinformerModel
from linformer_kit.training import (
    arguments,
    batches,
    checkpoint,
    data,
    labels,
    metrics,
    model,
    prepare,
    progress,
    sources,
    tokenizer,
    tokens,
    train,
    trainer,
)
from linformer_kit.training.config import RunConfig, load_config
from linformer_kit.training.prepare import Prepared
from linformer_kit.training.progress import Bar, MetricsFile
from linformer_kit.training.run import RunFolder
from linformer_kit.training.trainer import LinformerTrainer

RESULTS = Path(__file__).resolve().parent.parent / "results"
MEASUREMENTS, MACHINE = "training.csv", "training_machine.json"
CONFIG = "imdb"
# what makes each model of the configuration
MODELS = {
    DYNAMIC: ["model.projection=dynamic"],
    LINEAR: ["model.projection=linear"],
    LINFORMER: ["model.projection=linear"],  # its layers are then replaced
    FULL: ["model.attention=full"],
    DYNAMIC_FUSED: ["model.projection=dynamic", "model.attention_probs_dropout_prob=0"],
    FULL_FUSED: ["model.attention=full", "model.attention_probs_dropout_prob=0"],
}
# a byte-level text is longer: as in the Long Range Arena
TOKENIZERS = {BPE: [], BYTES: ["tokenizer.kind=bytes", "model.max_position_embeddings=4096"]}
# of a run that is never finished: no evaluation, no checkpoint
STEPS = ["training.epochs=null", "training.steps=1000", "training.evaluate_every=1000"]


@dataclass(frozen=True)
class Sweep:
    """Which points are measured."""

    name: str
    overrides: tuple[str, ...]  # of the shipped configuration
    lengths: tuple[int, ...]
    tokens: int  # per step
    steps: int  # of a turn
    turn_seconds: float  # a turn that would take longer has fewer steps, two at least
    budget_seconds: float  # for the rounds of one length
    least_rounds: int
    most_rounds: int
    preparations: int
    reviews: int  # in each split of the made-up data


COMPLETE = Sweep(
    name="complete",
    overrides=(),
    lengths=(512, 1024, 4096),
    tokens=16384,
    steps=10,
    turn_seconds=15.0,
    budget_seconds=60.0,
    least_rounds=3,
    most_rounds=7,
    preparations=1,
    reviews=25_000,
)
QUICK = Sweep(
    name="quick",
    overrides=(
        *(
            "model.hidden_size=16",
            "model.num_attention_heads=2",
            "model.intermediate_size=64",
            "model.projected_length=8",
        ),
        *("tokenizer.vocab_size=300", "training.log_every=2"),
    ),
    lengths=(32, 64),
    tokens=128,
    steps=3,
    turn_seconds=1.0,
    budget_seconds=0.1,
    least_rounds=1,
    most_rounds=1,
    preparations=1,
    reviews=60,
)


# data


def write_reviews(folder: Path, reviews: int) -> None:
    """Made-up reviews, so many in each of two splits: as long as those of IMDB, words as long and as frequent as in English."""
    generator = np.random.default_rng(0)
    words = np.array(made_up_words(generator, 50_000), dtype=object)
    frequency = 1 / (np.arange(len(words)) + 2.7) ** 1.15
    for split in ("train", "test"):
        lengths = np.exp(generator.normal(5.23, 0.645, reviews)).clip(10, 2470).astype(int)
        drawn = words[generator.choice(len(words), lengths.sum(), p=frequency / frequency.sum())]
        drawn += np.array([" ", ", ", ". "], dtype=object)[generator.choice(3, len(drawn), p=[0.87, 0.07, 0.06])]
        with gzip.open(folder / f"{split}.jsonl.gz", "wt", compresslevel=1, encoding="utf-8") as file:
            for number, review in enumerate(np.split(drawn, lengths.cumsum()[:-1])):
                file.write(json.dumps({"text": "".join(review).strip(), "label": number % 2}) + "\n")


def made_up_words(generator: np.random.Generator, count: int) -> list[str]:
    """Different words, the commonest first; these are short."""
    letters = np.array(list("etaoinshrdlcumwfgypbvk"))
    frequency = 1 / (np.arange(len(letters)) + 4)
    drawn = 2 * count  # enough, though many are drawn twice
    lengths = (
        (2.1 + 1.25 * np.log10(1 + np.arange(drawn)) + generator.normal(0, 0.8, drawn)).round().clip(1, 16).astype(int)
    )
    rows = letters[generator.choice(len(letters), (drawn, 16), p=frequency / frequency.sum())]
    return list(dict.fromkeys("".join(row[:length]) for row, length in zip(rows, lengths, strict=True)))[:count]


def describe_data(folder: Path | None) -> str:
    """What the data is, without telling where it lies."""
    if folder is None:
        return "made-up reviews"
    if not folder.is_dir():
        fail(
            f"--data is {folder}: there is no such folder; give one with train.jsonl.gz and test.jsonl.gz, or leave it out"
        )
    content = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        content.update(path.name.encode() + path.read_bytes())
    return f"{folder.resolve().name}, {content.hexdigest()[:12]}"


def in_full(prepared: Prepared, longest: int, length: int, examples: int, folder: Path) -> Prepared:
    """The same reviews, one after the other, cut into examples of `length` tokens; each has the label of its first token's."""
    rows = prepared.splits["train"]
    ends = np.minimum(rows["length"][:], longest).cumsum()
    pieces = tokens.packed(rows.select_columns(["input_ids"]), length, folder / f"{length}.arrow")
    pieces = pieces.select(range(min(examples, int(ends[-1]) // length)))  # the last of all may be shorter
    labels = np.asarray(rows["labels"][:])[np.searchsorted(ends, np.arange(len(pieces)) * length, side="right")]
    pieces = pieces.add_column("labels", labels).add_column("length", np.full(len(pieces), length))
    pieces.save_to_disk(str(folder / str(length)))
    pieces = datasets.load_from_disk(str(folder / str(length)))  # mapped into memory, as prepared data is
    return dataclasses.replace(prepared, splits={"train": pieces, "validation": pieces.select(range(1))})


# models


class PackageLayers(nn.Module):
    """All layers of the package `linformer`, with the weights of ours."""

    def __init__(self, ours: LinformerModel):
        super().__init__()
        from linformer import Linformer

        config = ours.config
        if config.intermediate_size != 4 * config.hidden_size:
            raise ValueError(
                f"intermediate_size is {config.intermediate_size}; in {LINFORMER} it is always 4 × hidden_size"
            )
        sizes = {
            "dim": config.hidden_size,
            "seq_len": config.max_position_embeddings,
            "depth": config.num_hidden_layers,
        }
        sizes |= {"k": config.projected_length, "heads": config.num_attention_heads}
        self.stack = Linformer(**sizes, dropout=config.hidden_dropout_prob)
        for (attention, feed_forward), (layer, our_attention) in zip(
            self.stack.net.layers, layers_of(ours), strict=True
        ):
            for theirs, our in (
                (attention.fn, linformer_layer(our_attention)),
                (attention.norm, layer.attention_residual.norm),
                (feed_forward.norm, layer.feed_forward_residual.norm),
                (feed_forward.fn.w1, layer.feed_forward.inner),
                (feed_forward.fn.w2, layer.feed_forward.outer),
            ):
                theirs.load_state_dict(our.state_dict())
            attention.norm.eps = feed_forward.norm.eps = config.layer_norm_eps

    def forward(self, x_BNC: Tensor, mask_BN: Tensor | None, *others: Any, **options: Any) -> Tensor:
        if mask_BN is not None:
            raise ValueError(f"{LINFORMER} ignores masks; give it examples of one length")
        return self.stack(x_BNC)


def with_package_layers(ours: LinformerModel) -> LinformerModel:
    """The model, its layers replaced by those of `linformer`: embeddings, last norm, pooling and head stay."""
    ours.layers = nn.ModuleList([PackageLayers(ours)])
    return ours


def check_models(config: RunConfig, length: int) -> None:
    """Raise `WrongImplementation` unless the models, with these sizes, compute what a plain float64 evaluation gives."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes = Sizes(*(config.model[name] for name in names))
    ours, full = (
        our_encoder(length, sizes, projected_length=config.model["projected_length"]),
        our_encoder(length, sizes, projection="none"),
    )
    ids_BN = sizes.random_ids(2, length)
    for name, checked, exact in (
        (LINEAR, ours, ours),
        (LINFORMER, with_package_layers(copy.deepcopy(ours)), ours),
        (FULL, full, full),
    ):
        require_model_agreement(name, checked, copy.deepcopy(exact).double(), ids_BN)


# the loop


@dataclass(frozen=True)
class Turn:
    """Some steps of a training: how many tokens, and the seconds of each phase, all of them together under `STEP`."""

    steps: int
    tokens: int
    seconds: dict[str, float]

    @property
    def per_step(self) -> dict[str, float]:
        return {phase: seconds / self.steps for phase, seconds in self.seconds.items()}


class TimedLoop(TrainerCallback):
    """The loop of a trainer, run for a few steps at a time, and where its time goes."""

    def __init__(self, trained: LinformerTrainer):
        self.trainer, self.steps, self.begun = trained, 0, 0.0
        self.spent = dict.fromkeys((STEP, FORWARD, BACKWARD, OPTIMIZER), 0.0)
        self.marks: list[tuple[int, dict[str, float]]] = []
        trained.create_optimizer()
        trained.model.register_forward_pre_hook(lambda *_: self.begin())
        trained.model.register_forward_hook(lambda *_: self.end(FORWARD))
        trained.optimizer.register_step_pre_hook(lambda *_: self.begin())
        trained.optimizer.register_step_post_hook(lambda *_: self.end(OPTIMIZER))
        accelerator = trained.accelerator
        accelerator.backward = self.timed(BACKWARD, accelerator.backward)
        accelerator.clip_grad_norm_ = self.timed(OPTIMIZER, accelerator.clip_grad_norm_)
        trained.add_callback(self)  # the last of all, so that the time of the others counts

    def begin(self) -> None:
        self.begun = time.perf_counter()

    def end(self, phase: str) -> None:
        self.spent[phase] += time.perf_counter() - self.begun

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            try:
                return function(*args, **kwargs)
            finally:
                self.end(phase)

        return call

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        self.marks.append((state.num_input_tokens_seen, {**self.spent, STEP: time.perf_counter()}))
        control.should_training_stop = len(self.marks) > self.steps

    def turn(self, steps: int) -> Turn:
        """Train for one step, which is not counted, and `steps` more."""
        self.steps = steps
        self.marks.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as `linformer train` does
            try:
                self.trainer.train()
            finally:
                for callback in self.trainer.callback_handler.callbacks:
                    if isinstance(
                        callback, Bar
                    ):  # draws in a thread of its own, which memory that runs out does not end
                        callback.close()
        (first_tokens, first), (last_tokens, last) = self.marks[0], self.marks[-1]
        seconds = {phase: last[phase] - first[phase] for phase in first}
        seconds[REST] = seconds[STEP] - seconds[FORWARD] - seconds[BACKWARD] - seconds[OPTIMIZER]
        return Turn(len(self.marks) - 1, last_tokens - first_tokens, seconds)

    def turn_if_it_fits(self, steps: int) -> Turn | None:
        """A turn; None if memory ran out."""
        try:
            return self.turn(steps)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.trainer.model.zero_grad()
            return None


def take_turns(loops: dict[str, TimedLoop], sweep: Sweep) -> dict[str, list[Turn]]:
    """The turns of each model, one per round; none for a model that ran out of memory."""
    turns: dict[str, list[Turn]] = {name: [] for name in loops}
    # a first turn tells how long a step takes
    trials = {name: trial for name, loop in loops.items() if (trial := loop.turn_if_it_fits(1))}
    seconds = {name: trial.seconds[STEP] for name, trial in trials.items()}
    steps = {name: min(max(int(sweep.turn_seconds / one), 2), sweep.steps) for name, one in seconds.items()}
    round_seconds = sum((1 + steps[name]) * one for name, one in seconds.items())
    rounds = min(max(int(sweep.budget_seconds / max(round_seconds, 1e-9)), sweep.least_rounds), sweep.most_rounds)
    shuffler, order = random.Random(0), list(steps)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in tuple(order):
            turn = loops[name].turn_if_it_fits(steps[name])
            if turn is None:
                order.remove(name)
                turns[name] = []
            else:
                turns[name].append(turn)
    return turns


@dataclass(frozen=True)
class Trainings:
    """Trainers for all models."""

    sweep: Sweep
    overrides: list[str]  # of the shipped configuration, the path of the data among them
    scratch: Path

    def take_turns(self, length: int) -> dict[str, list[Turn]]:
        """The turns of all models at one length."""
        check_models(load_config(CONFIG, self.overrides), min(self.sweep.lengths))
        return take_turns(self.loops(length), self.sweep)

    def loops(self, length: int) -> dict[str, TimedLoop]:
        """A trainer for each model, all with the same batches."""
        train.quiet_libraries()
        # often prepared already, when that was timed
        config = load_config(CONFIG, [*self.overrides, f"data.cache={quoted(self.scratch / BPE)}"])
        prepared, batch = prepare.prepare(config, quiet_console()), self.sweep.tokens // length
        examples = 2 * batch * (self.sweep.steps + 1)
        prepared = in_full(
            prepared, model.max_length(config), length, examples, Path(tempfile.mkdtemp(dir=self.scratch))
        )
        sizes = [f"model.max_position_embeddings={length}", f"training.batch_size={batch}"]
        return {name: self.loop(name, [*sizes, *changes], prepared) for name, changes in MODELS.items()}

    def loop(self, name: str, changes: list[str], prepared: Prepared) -> TimedLoop:
        """The trainer that `linformer train` would make, with all that it writes and shows."""
        run = RunFolder(Path(tempfile.mkdtemp(dir=self.scratch)))
        config = load_config(CONFIG, [*self.overrides, *STEPS, *changes, f"run={quoted(run.folder)}"])
        made, _ = train.make_trainer(config, prepared, run)
        for callback in (MetricsFile(run, 0), Bar(quiet_console(force_terminal=True))):
            made.add_callback(callback)
        if name == LINFORMER:
            with_package_layers(made.model.model)
        return TimedLoop(made)


# preparation


@contextmanager
def one_core() -> Iterator[None]:
    """Threads that start inside share one core with us, where the system can see to that."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@dataclass(frozen=True)
class Preparation:
    """Seconds of each phase, all of them together under `EVERYTHING`; millions of bytes of text, and those the tokenizer saw."""

    seconds: dict[str, float]
    megabytes: float
    learnt_megabytes: float


def prepare_here(overrides: list[str], cache: Path) -> Preparation:
    """What `linformer prepare` does, with a new cache, and how long each phase takes."""
    shutil.rmtree(cache, ignore_errors=True)
    config = load_config(CONFIG, [*overrides, f"data.cache={quoted(cache)}"])
    seconds = dict.fromkeys((EVERYTHING, READING, LEARNING, TOKENIZING, PROCESSOR), 0.0)

    def timed(phase: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[phase] += time.perf_counter() - begun

    phases = {"read_splits": READING, "make_tokenizer": LEARNING, "tokenize": TOKENIZING}
    functions = {name: getattr(prepare, name) for name in phases}
    try:
        for name, phase in phases.items():
            setattr(prepare, name, partial(timed, phase, functions[name]))
        processor = time.process_time()
        with one_core():
            timed(EVERYTHING, prepare.prepare, config, quiet_console())
        seconds[PROCESSOR] = time.process_time() - processor
    finally:
        for name, function in functions.items():
            setattr(prepare, name, function)
    seconds[REST] = seconds[EVERYTHING] - sum(seconds[phase] for phase in phases.values())
    splits = prepare.read_splits(config)
    sizes = {
        role: sum(len(text.encode()) for text in data.all_texts(rows, ["text"])) / 1e6 for role, rows in splits.items()
    }
    return Preparation(seconds, sum(sizes.values()), sizes["train"])


def quiet_console(**options: Any) -> Console:
    return Console(file=io.StringIO(), **options)


def quoted(path: Path) -> str:
    """A path as the value of an override, which is YAML."""
    return json.dumps(str(path))


# what is measured


class Benchmark:
    """The table of a folder, and the steps that fill it."""

    def __init__(self, sweep: Sweep, folder: Path, source: Path | None = None):
        self.sweep, self.folder, self.source = sweep, folder, source
        values = ("batch", "steps", *MEASURED, "share", "rate", "unit")
        self.table = Table(folder / MEASUREMENTS, ("part", "name", "length", "phase"), values)

    def steps(self) -> list[Step]:
        """Everything there is to measure."""
        steps = [
            Step(f"preparation, {name}", partial(self.is_prepared, name), partial(self.time_preparation, name))
            for name in TOKENIZERS
        ]
        steps += [
            Step(f"training, N={length:,}", partial(self.is_trained, length), partial(self.time_training, length))
            for length in self.sweep.lengths
        ]
        return steps

    @cached_property
    def scratch(self) -> Path:
        """A folder for data and runs, which goes with this object."""
        folder = Path(tempfile.mkdtemp(prefix="linformer-training-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    @cached_property
    def data(self) -> Path:
        """The reviews."""
        if self.source is not None:
            return self.source.resolve()
        folder = self.scratch / "reviews"
        folder.mkdir()
        write_reviews(folder, self.sweep.reviews)
        return folder

    @property
    def overrides(self) -> list[str]:
        """What the configuration is changed by, for all models and tokenizers."""
        return [*self.sweep.overrides, "training.device=cpu", f"data.path={quoted(self.data)}"]

    @cached_property
    def process(self) -> ProcessPoolExecutor:
        """Where everything is measured; spawned, because this process has threads and holds its memory."""
        return ProcessPoolExecutor(1, get_context("spawn"), begin_process)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the function gives in that process."""
        try:
            return self.process.submit(function, *args).result()
        except KeyboardInterrupt:
            for child in active_children():
                child.kill()
            raise

    # preparation

    def is_prepared(self, name: str) -> bool:
        return any(self.table.rows(part=PREPARATION, name=name))

    def time_preparation(self, name: str) -> Iterable[str]:
        """The whole of preparation with one kind of tokenizer, several times."""
        overrides = [*self.overrides, *TOKENIZERS[name]]
        done = [self.call(prepare_here, overrides, self.scratch / name) for _ in range(self.sweep.preparations)]
        seconds = [one.seconds for one in done]
        timings, shares = timings_of(seconds), shares_of(seconds, EVERYTHING)
        del shares[PROCESSOR]  # the same once more
        megabytes = {phase: done[0].learnt_megabytes if phase == LEARNING else done[0].megabytes for phase in timings}
        key = {"part": PREPARATION, "name": name, "length": model.max_length(load_config(CONFIG, overrides))}
        self.table.put(
            [
                {
                    **key,
                    "phase": phase,
                    **as_row(timing),
                    "share": shares.get(phase),
                    **rate(megabytes[phase], timing, "MB/s"),
                }
                for phase, timing in timings.items()
            ]
        )
        yield in_words(f"preparation, {name}", timings)

    # training

    def is_trained(self, length: int) -> bool:
        """Models of a length are timed together, so one of them tells for all."""
        return any(self.table.rows(part=TRAINING, name=DYNAMIC, length=length))

    def time_training(self, length: int) -> Iterable[str]:
        """All models at one length, taking turns."""
        turns = self.call(Trainings(self.sweep, self.overrides, self.scratch).take_turns, length)
        self.table.put([row for name in turns for row in self.training_rows(name, length, turns[name])])
        steps = {
            name: timings_of([turn.per_step for turn in turns[name]])[STEP] if turns[name] else Timing(OUT_OF_MEMORY)
            for name in turns
        }
        yield in_words(f"step, N={length:,}", steps)

    def training_rows(self, name: str, length: int, turns: list[Turn]) -> list[dict[str, object]]:
        """A row for each phase of a step."""
        key = {"part": TRAINING, "name": name, "length": length, "batch": self.sweep.tokens // length}
        if not turns:
            return [{**key, "phase": STEP, **as_row(Timing(OUT_OF_MEMORY))}]
        timings = timings_of([turn.per_step for turn in turns])
        shares = shares_of([turn.seconds for turn in turns], STEP)
        rows = [
            {**key, "phase": phase, "steps": turns[0].steps, **as_row(timing), "share": shares[phase]}
            for phase, timing in timings.items()
        ]
        rows[0] |= rate(turns[0].tokens / turns[0].steps, timings[STEP], "tokens/s")
        return rows


def begin_process() -> None:
    """In the process where everything is measured."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the one that asks ends the other
    os.environ["RAYON_NUM_THREADS"] = "1"  # of tokenizers, whose threads start with the first text


def timings_of(rounds: list[dict[str, float]]) -> dict[str, Timing]:
    """By phase, the seconds of all rounds as a timing."""
    by_phase = {phase: [seconds[phase] for seconds in rounds] for phase in rounds[0]}
    return {
        phase: Timing(OK, statistics.median(times), min(times), max(times), len(times))
        for phase, times in by_phase.items()
    }


def shares_of(rounds: list[dict[str, float]], whole: str) -> dict[str, float]:
    """By phase, the part of the whole, all rounds together."""
    return {
        phase: sum(seconds[phase] for seconds in rounds) / sum(seconds[whole] for seconds in rounds)
        for phase in rounds[0]
    }


def rate(amount: float, timing: Timing, unit: str) -> dict[str, object]:
    """So much per second; nothing where there was nothing to do."""
    return {"rate": amount / timing.median, "unit": unit} if timing.median else {}


def dependencies(source: Path | None) -> dict[str, str]:
    """What the numbers depend on: times of different code, or of different data, must not be mixed."""
    modules = (
        arguments,
        batches,
        checkpoint,
        data,
        labels,
        metrics,
        model,
        prepare,
        progress,
        sources,
        tokenizer,
        tokens,
        train,
        trainer,
    )
    return {
        LINFORMER: peer_versions()[LINFORMER],
        **{name: metadata.version(name) for name in ("accelerate", "datasets", "tokenizers")},
        **model_dependencies(),
        "training_code": code_fingerprint(*modules),
        "data": describe_data(source),
    }


def main(
    data: Annotated[Path | None, typer.Option(help="Folder of the IMDB reviews; made-up ones if not given.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for CSVs and pictures.")] = RESULTS,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget earlier measurements.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Only draw and print what has been measured.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny sweep, to try the benchmark itself; needs --output.")
    ] = False,
) -> None:
    """Measure the speed of training, what the loop around it costs, and the speed of preparation."""
    program = Program(
        results=RESULTS,
        machine_file=MACHINE,
        tables=(MEASUREMENTS,),
        sweeps=(COMPLETE, QUICK),
        make=lambda sweep, folder: Benchmark(sweep, folder, data),
        describe=lambda: describe_machine(dependencies(data)),
        summarise=summarise,
    )
    run_program(program, output, fresh, summary, quick)


if __name__ == "__main__":
    typer.run(main)
