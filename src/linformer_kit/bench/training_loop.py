"""The subjects that run `linformer_kit.training`: steps of the real training loop, and the preparation of data.

Both use synthetic reviews and the shipped configuration `imdb`. `training` is imported lazily: nothing else needs it.
"""

import atexit
import contextlib
import copy
import gzip
import io
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import TrainerCallback

from .checks import require_model_agreement
from .encoders import linformer_stack, our_encoder, random_ids
from .measure import Phases
from .point import LINFORMER, OURS, Point

CONFIG = "imdb"
NO_DROPOUT = "no attention dropout"  # fused attention is possible then
VARIANTS = {
    ("trainer", OURS): ("dynamic", "linear", f"dynamic, {NO_DROPOUT}"),
    ("trainer", "full-attention"): ("", NO_DROPOUT),
    ("preparation", OURS): ("bpe", "bytes"),
}
# timed steps per call of the training loop, after one step that is not timed
TURN_STEPS = 3
FORWARD, BACKWARD, OPTIMIZER, OVERHEAD = "forward", "backward", "clipping and optimizer", "overhead"
READING, TOKENIZER, TOKENIZING = "reading", "training the tokenizer", "tokenizing"


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
        "training.device=cpu",
        *(f"data.path={json.dumps(str(folder))}", f"data.cache={json.dumps(str(folder / 'cache'))}"),
        *(f"model.hidden_size={point.hidden_size}", f"model.intermediate_size={4 * point.hidden_size}"),
        *(f"model.num_attention_heads={point.num_heads}", f"model.num_hidden_layers={point.num_layers}"),
        f"model.max_position_embeddings={point.length}",
    ]


def quiet_console(**options: Any) -> Console:
    return Console(file=io.StringIO(), **options)


# the training loop


class PackageLayers(nn.Module):
    """All layers of the package `linformer` with our weights, as a drop-in for the layers of our model."""

    def __init__(self, ours: Any):
        super().__init__()
        self.stack = linformer_stack(ours)

    def forward(self, x_BNC: Tensor, mask_BN: Tensor | None, *others: Any, **options: Any) -> tuple[Tensor, None, None]:
        if mask_BN is not None:
            raise ValueError(f"{LINFORMER} ignores masks; all examples must have the same length")
        return self.stack(x_BNC), None, None  # as `LinformerLayer`: hidden states, and no attention weights


def with_package_layers(model: Any) -> Any:
    """The model with the layers of `linformer`; embeddings, last norm, pooling and head stay."""
    model.layers = nn.ModuleList([PackageLayers(model)])
    return model


def check_trainer(point: Point) -> None:
    """Compare the model without dropout with the plain form in float64."""
    small = replace(point.small(), variant=point.variant.split(",")[0].replace(NO_DROPOUT, ""))
    torch.manual_seed(0)
    exact = our_encoder(small)
    model = copy.deepcopy(exact)
    if point.implementation == LINFORMER:
        model = with_package_layers(model)
    require_model_agreement(point.implementation, model, exact.double(), random_ids(2, small.length))


class TimedLoop(TrainerCallback):
    """Runs the training loop a few steps at a time and measures the time of its phases."""

    def __init__(self, trainer: Any):
        self.trainer, self.begun = trainer, 0.0
        self.spent = dict.fromkeys((FORWARD, BACKWARD, OPTIMIZER), 0.0)
        self.marks: list[dict[str, float]] = []
        trainer.create_optimizer()
        trainer.model.register_forward_pre_hook(lambda *_: self.begin())
        trainer.model.register_forward_hook(lambda *_: self.end(FORWARD))
        trainer.optimizer.register_step_pre_hook(lambda *_: self.begin())
        trainer.optimizer.register_step_post_hook(lambda *_: self.end(OPTIMIZER))
        accelerator = trainer.accelerator
        accelerator.backward = self.timed(BACKWARD, accelerator.backward)
        accelerator.clip_grad_norm_ = self.timed(OPTIMIZER, accelerator.clip_grad_norm_)
        trainer.add_callback(self)  # added last, so that the time of the other callbacks is included

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

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.marks.append({**self.spent, "": time.perf_counter()})
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
        seconds = {phase: (last[phase] - first[phase]) / TURN_STEPS for phase in first}
        return Phases({**seconds, OVERHEAD: 2 * seconds[""] - sum(seconds.values())})


def make_loop(point: Point) -> TimedLoop:
    """The trainer that `linformer train` builds, with everything that it writes and shows, but without evaluations."""
    from ..training.config import load_config
    from ..training.prepare import prepare
    from ..training.progress import Bar, MetricsFile
    from ..training.run import RunFolder
    from ..training.train import make_trainer, quiet_libraries

    quiet_libraries()
    folder = temporary_folder()
    # every review is cut to N tokens, so that all examples have the same length; a tenth becomes the validation set
    write_reviews(folder, 2 * point.batch * (TURN_STEPS + 1), least_words=point.length)
    changes = ["training.epochs=null", "training.steps=1000", "training.evaluate_every=1000"]
    changes += [f"training.batch_size={point.batch}", f"run={json.dumps(str(folder / 'run'))}"]
    if point.projected_length is None:
        changes.append("model.attention=full")
    else:
        projection = point.variant.split(",")[0] or "linear"
        changes += [f"model.projection={projection}", f"model.projected_length={point.projected_length}"]
        changes.append(f"model.sharing={point.sharing}")
    if NO_DROPOUT in point.variant:
        changes.append("model.attention_probs_dropout_prob=0")
    config = load_config(CONFIG, [*overrides(point, folder), *changes])
    run = RunFolder(folder / "run")
    run.folder.mkdir()
    trainer, _ = make_trainer(config, prepare(config, quiet_console()), run)
    for callback in (MetricsFile(run, 0), Bar(quiet_console(force_terminal=True))):
        trainer.add_callback(callback)
    if point.implementation == LINFORMER:
        with_package_layers(trainer.model.model)
    return TimedLoop(trainer)


# preparation


def make_preparation(point: Point) -> tuple[Callable[[], Phases], dict[str, float]]:
    """A call of `linformer prepare` with an empty cache on one core, and the megabytes of text in each phase."""
    from ..training import prepare
    from ..training.config import load_config

    folder = temporary_folder()
    write_reviews(folder, point.batch)
    config = load_config(CONFIG, [*overrides(point, folder), f"tokenizer.kind={point.variant}"])
    splits = prepare.read_splits(config)
    sizes = {role: sum(len(text.encode()) for text in rows["text"]) / 1e6 for role, rows in splits.items()}
    call = partial(prepare_once, config, folder / "cache")
    return call, {**dict.fromkeys(("", READING, TOKENIZING), sum(sizes.values())), TOKENIZER: sizes["train"]}


def prepare_once(config: Any, cache: Path) -> Phases:
    from ..training import prepare

    shutil.rmtree(cache, ignore_errors=True)
    phases = {"read_splits": READING, "make_tokenizer": TOKENIZER, "tokenize": TOKENIZING}
    functions = {name: getattr(prepare, name) for name in phases}
    seconds = dict.fromkeys(["", *phases.values()], 0.0)

    def timed(phase: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[phase] += time.perf_counter() - begun

    try:
        for name, phase in phases.items():
            setattr(prepare, name, partial(timed, phase, functions[name]))
        with one_core():
            timed("", prepare.prepare, config, quiet_console())
    finally:
        for name, function in functions.items():
            setattr(prepare, name, function)
    return Phases({**seconds, OVERHEAD: 2 * seconds[""] - sum(seconds.values())})


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Run this thread, and threads that it starts, on one core, where the system supports it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
