"""The subjects that run `linformer_kit.training`: steps of the real training loop, and the preparation of data.

Both use synthetic reviews and the shipped configuration `imdb`.
"""

import atexit
import contextlib
import gzip
import io
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from transformers import TrainerCallback

from ..training import prepare
from ..training.config import load_config
from ..training.load import quiet_libraries
from ..training.progress import Bar, MetricsFile
from ..training.run import RunFolder
from ..training.train import make_trainer
from .encoders import with_linformer_layers
from .measure import Phases
from .point import LINFORMER, NO_ATTENTION_DROPOUT, Point
from .workload import Workload

CONFIG = "imdb"
# timed steps per call of the training loop, after one step that is not timed
TURN_STEPS = 3
FORWARD, BACKWARD, OPTIMIZER, OVERHEAD = "forward", "backward", "clipping and optimizer", "overhead"
READING, TOKENIZER, TOKENIZING = "reading", "training the tokenizer", "tokenizing"


class PhaseTimer:
    """Adds up the seconds of each phase; the phase "" is the whole."""

    def __init__(self, *phases: str):
        self.seconds = dict.fromkeys(("", *phases), 0.0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block, or as a decorator the calls of a function."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


def with_overhead(seconds: Mapping[str, float]) -> Phases:
    """The phases, and the rest of the whole."""
    return Phases({**seconds, OVERHEAD: 2 * seconds[""] - sum(seconds.values())})


def make_workload(point: Point) -> Workload:
    return Workload(make_loop(point)) if point.subject == "trainer" else make_preparation(point)


# data


def write_reviews(folder: Path, reviews: int, least_words: int = 10) -> None:
    """Write two splits of synthetic reviews: text lengths as in IMDB, word lengths and frequencies as in English."""
    generator = np.random.default_rng(0)
    words = np.array(synthetic_words(generator, 50_000), dtype=object)
    frequency = 1 / (np.arange(len(words)) + 2.7) ** 1.15
    for split in ("train", "test"):
        lengths = np.exp(generator.normal(5.23, 0.645, reviews)).clip(10, 2470).astype(int).clip(least_words)
        drawn = words[generator.choice(len(words), lengths.sum(), p=frequency / frequency.sum())]
        drawn += np.array([" ", ", ", ". "], dtype=object)[generator.choice(3, len(drawn), p=[0.87, 0.07, 0.06])]
        with gzip.open(folder / f"{split}.jsonl.gz", "wt", compresslevel=1, encoding="utf-8") as file:
            for number, review in enumerate(np.split(drawn, lengths.cumsum()[:-1])):
                file.write(json.dumps({"text": "".join(review).strip(), "label": number % 2}) + "\n")


def synthetic_words(generator: np.random.Generator, count: int) -> list[str]:
    """Distinct words, sorted from short to long on average: frequent words are short."""
    letters = np.array(list("etaoinshrdlcumwfgypbvk"))
    frequency = 1 / (np.arange(len(letters)) + 4)
    drawn = 2 * count  # enough to have `count` distinct ones
    lengths = 2.1 + 1.25 * np.log10(1 + np.arange(drawn)) + generator.normal(0, 0.8, drawn)
    rows = letters[generator.choice(len(letters), (drawn, 16), p=frequency / frequency.sum())]
    words = ("".join(row[:length]) for row, length in zip(rows, lengths.round().clip(1, 16).astype(int), strict=True))
    return list(dict.fromkeys(words))[:count]


def temporary_folder() -> Path:
    """A temporary directory that is removed when the worker process ends."""
    folder = Path(tempfile.mkdtemp(prefix="linformer-compare-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def overrides(point: Point, folder: Path) -> list[str]:
    """Overrides of the shipped configuration for a point; `folder` holds the reviews."""
    return [
        *("training.device=cpu", f"training.precision={point.precision}"),
        *(f"data.path={json.dumps(str(folder))}", f"data.cache={json.dumps(str(folder / 'cache'))}"),
        *(f"model.hidden_size={point.hidden_size}", f"model.intermediate_size={4 * point.hidden_size}"),
        *(f"model.num_attention_heads={point.num_heads}", f"model.num_hidden_layers={point.num_layers}"),
        f"model.max_position_embeddings={point.length}",
    ]


def quiet_console(**options: Any) -> Console:
    return Console(file=io.StringIO(), **options)


# the training loop


class TimedLoop(TrainerCallback):
    """Runs the training loop a few steps at a time and measures the time of its phases."""

    def __init__(self, trainer: Any):
        self.trainer, self.timer = trainer, PhaseTimer(FORWARD, BACKWARD, OPTIMIZER)
        self.marks: list[dict[str, float]] = []
        model, accelerator, optimizer = trainer.model, trainer.accelerator, trainer.create_optimizer()
        model.forward = self.timer.phase(FORWARD)(model.forward)
        accelerator.backward = self.timer.phase(BACKWARD)(accelerator.backward)
        accelerator.clip_grad_norm_ = self.timer.phase(OPTIMIZER)(accelerator.clip_grad_norm_)
        # a method, because learning rate schedulers wrap it
        optimizer.step = MethodType(self.timer.phase(OPTIMIZER)(type(optimizer).step), optimizer)
        trainer.add_callback(self)  # added last, so that the time of the other callbacks is included

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.marks.append({**self.timer.seconds, "": time.perf_counter()})
        control.should_training_stop = len(self.marks) > TURN_STEPS

    def __call__(self) -> Phases:
        """Seconds of one step, and of its phases; the first step is not counted."""
        self.marks.clear()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # as `linformer train` does
                self.trainer.train()
        finally:
            self.trainer.model.zero_grad()
            for callback in self.trainer.callback_handler.callbacks:
                if hasattr(callback, "close"):  # the progress bar has a thread, which an exception would not stop
                    callback.close()
        first, last = self.marks[0], self.marks[-1]
        return with_overhead({phase: (last[phase] - first[phase]) / TURN_STEPS for phase in first})


def make_loop(point: Point) -> TimedLoop:
    """The trainer that `linformer train` builds, with everything that it writes and shows, but without evaluations."""
    quiet_libraries()
    folder = temporary_folder()
    # every review is cut to N tokens, so that all examples have the same length; a part becomes the validation set
    write_reviews(folder, 2 * point.batch * (TURN_STEPS + 1), least_words=point.length)
    changes = ["training.epochs=null", "training.steps=1000", "training.evaluate_every=1000"]
    changes += [f"training.batch_size={point.batch}", f"run={json.dumps(str(folder / 'run'))}"]
    if point.projected_length is None:
        changes.append("model.attention=full")
    else:
        changes += [f"model.{name}={value}" for name, value in point.projection_options.items()]
    if NO_ATTENTION_DROPOUT in point.variant:
        changes.append("model.attention_probs_dropout_prob=0")
    config = load_config(CONFIG, [*overrides(point, folder), *changes])
    run = RunFolder(folder / "run")
    run.folder.mkdir()
    trainer, _ = make_trainer(config, prepare.prepare(config, quiet_console()), run)
    for callback in (MetricsFile(run, 0), Bar(quiet_console(force_terminal=True))):
        trainer.add_callback(callback)
    if point.implementation == LINFORMER:
        with_linformer_layers(trainer.model.model)
    return TimedLoop(trainer)


# preparation


def make_preparation(point: Point) -> Workload:
    """A call of `linformer prepare` with an empty cache, and the megabytes of text in each phase."""
    folder = temporary_folder()
    write_reviews(folder, point.batch)
    config = load_config(CONFIG, [*overrides(point, folder), f"tokenizer.kind={point.variant}"])
    splits = prepare.read_splits(config)
    sizes = {role: sum(len(text.encode()) for text in rows["text"]) / 1e6 for role, rows in splits.items()}
    megabytes = {**dict.fromkeys(("", READING, TOKENIZING), sum(sizes.values())), TOKENIZER: sizes["train"]}
    columns = {phase: {"megabytes": size} for phase, size in megabytes.items()}
    return Workload(partial(prepare_once, config, folder / "cache"), columns)


def prepare_once(config: Any, cache: Path) -> Phases:
    shutil.rmtree(cache, ignore_errors=True)
    timer = PhaseTimer(READING, TOKENIZER, TOKENIZING)
    timed = {
        name: timer.phase(phase)(getattr(prepare, name))
        for name, phase in {"read_splits": READING, "make_tokenizer": TOKENIZER, "tokenize": TOKENIZING}.items()
    }
    with patch.multiple(prepare, **timed), timer.phase(""):
        prepare.prepare(config, quiet_console())
    return with_overhead(timer.seconds)
