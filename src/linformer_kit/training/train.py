"""Training a run, from its configuration to a model on disk; the same call goes on with a run that was stopped or died."""

import json
import logging
import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import transformers
from accelerate import PartialState
from accelerate.utils import set_seed
from rich.console import Console
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback

from ..errors import Stopped, UserError
from ..process_memory import peak_resident
from .announce import announce
from .arguments import is_on_gpu, training_arguments
from .batches import Change, Examples, Padding, Stream, change_of, lengths_of
from .checkpoint import PREFIX, damage, latest_whole, not_written, remove_beyond, step_of, written_whole
from .config import RunConfig
from .metrics import translation_metrics
from .model import MODELS, build_model
from .prepare import Prepared, prepare
from .progress import Bar, MetricsFile, format_metrics, validation_metrics
from .run import RunFolder, write_text
from .trainer import Flow, Interrupted, LinformerTrainer, evaluation_is_due
from .translate import batch_size_of, translations

# a stream has no epochs to evaluate after
STREAM_EVALUATES_EVERY = 1000


def train(config: RunConfig, console: Console) -> Path:
    """Train, or go on training; the folder of the run."""
    state = PartialState(cpu=not is_on_gpu(config.training))
    if not state.is_main_process:
        console = Console(quiet=True)
    run = RunFolder(config.folder)
    quiet_libraries()
    with one_process_begins(run, config, state):
        if run.is_finished:
            console.print(f"The run in {run.folder} is finished.", highlight=False, soft_wrap=True)
            return run.folder
        with state.main_process_first():
            prepared = prepare(config, console)
        if state.is_main_process:
            run.begin_with(prepared.facts)
        trainer, flow = make_trainer(config, prepared, run)
        run_trainer(trainer, flow, run, config, prepared, console)
    return run.folder


def quiet_libraries() -> None:
    """What the libraries say of themselves, we say better or not at all."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    # tokenizers warns when a process with threads forks, which datasets does
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


@contextmanager
def one_process_begins(run: RunFolder, config: RunConfig, state: PartialState) -> Iterator[None]:
    """The main process holds the folder and stores the configuration before the others look."""
    if not state.is_main_process:
        state.wait_for_everyone()
        yield
        return
    with run.locked():
        run.begin(config)
        state.wait_for_everyone()
        yield


# making the trainer


def make_trainer(config: RunConfig, prepared: Prepared, run: RunFolder) -> tuple[LinformerTrainer, Flow]:
    """Model, examples, order, schedule: all that follows from the configuration."""
    set_seed(config.seed)
    model = build_model(config, prepared.tokenizer, prepared.labels)
    change = change_of(config, prepared.tokenizer)
    train_rows, validation = prepared.splits["train"], prepared.splits["validation"]
    examples = (Stream if config.data.streaming else Examples)(train_rows, change, config.seed)
    per_epoch = None if config.data.streaming else steps_per_epoch(len(train_rows), config)
    steps = config.training.steps or math.ceil((config.training.epochs or 3) * (per_epoch or 0))
    evaluate_every = min(config.training.evaluate_every or per_epoch or STREAM_EVALUATES_EVERY, steps)
    flow = Flow(config, evaluate_every)
    trainer = LinformerTrainer(
        config=config,
        keep=config.training.keep,
        model=model,
        args=training_arguments(config, run, steps),
        data_collator=Padding(prepared.tokenizer.pad_token_id),
        train_dataset=examples,
        eval_dataset=to_measure_on(validation, change),
        callbacks=[flow],
    )
    # ours decide when and show what happens
    for callback in (DefaultFlowCallback, PrinterCallback):
        trainer.remove_callback(callback)
    return trainer, flow


def steps_per_epoch(examples: int, config: RunConfig) -> int:
    """Whole batches in the training split."""
    steps = examples // config.training.batch_size
    if steps == 0:
        raise UserError(
            f"training.batch_size is {config.training.batch_size}, but there are only {examples} training examples; make it smaller"
        )
    return steps


def to_measure_on(rows: Any, change: Change) -> Examples:
    """The longest first: little padding, and what does not fit into memory fails at once.

    Whatever the seed of the run, the same words are hidden: by others alone, perplexity moves by more than a percent.
    """
    return Examples(rows.select(np.argsort(-lengths_of(rows), kind="stable")), change, seed=0)


# running it


def run_trainer(
    trainer: LinformerTrainer, flow: Flow, run: RunFolder, config: RunConfig, prepared: Prepared, console: Console
) -> None:
    """Train from the last whole checkpoint on, and finish; or stop on a signal, having saved."""
    resumed = last_checkpoint(run, console)
    state = TrainerState.load_from_json(str(resumed / TRAINER_STATE_NAME)) if resumed else None
    announce(trainer, prepared, config, state, console)
    bar = Bar(console)
    for callback in (MetricsFile(run, state.global_step if state else 0), bar):
        trainer.add_callback(callback)
    set_seed(config.seed, device_specific=True)  # each process draws its own dropout
    trainer.args.eval_on_start = state is not None and evaluation_is_due(state, flow.evaluate_every)
    begun = time.perf_counter()
    with flow.listening(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
        except Interrupted:
            # an evaluation that a resumed run makes up for is due again; what was saved for that step is whole
            if resumed is None or step_of(resumed) != trainer.state.global_step:
                trainer._save_checkpoint(trainer.model)
        except OSError as error:  # metrics and curves; checkpoints tell themselves
            raise not_written(run.folder, error) from error
        finally:
            bar.close()
    if flow.signal is not None:
        raise Stopped(
            f"Stopped and saved at step {trainer.state.global_step} of {trainer.state.max_steps}. "
            f"To go on: linformer train {run.config}",
            128 + flow.signal,
        )
    finish(trainer, run, config, prepared, time.perf_counter() - begun, console)


def last_checkpoint(run: RunFolder, console: Console) -> Path | None:
    """Where to go on; the main process has cleared away what is damaged before the others look."""
    state = PartialState()
    with state.main_process_first():
        if not run.checkpoints.is_dir():
            return None
        last = latest_whole(run.checkpoints, console)
        if state.is_main_process:
            remove_beyond(run.checkpoints, last)
        return last


def best_checkpoint(trainer: LinformerTrainer, run: RunFolder, console: Console) -> tuple[Path, dict[str, Any]]:
    """The best checkpoint that is whole, and what its evaluation found."""
    key = f"eval_{trainer.args.metric_for_best_model}"
    evaluations = [entry for entry in trainer.state.log_history if key in entry]
    for entry in sorted(evaluations, key=lambda entry: entry[key], reverse=trainer.args.greater_is_better):
        folder = run.checkpoints / f"{PREFIX}{entry['step']}"
        if (reason := damage(folder)) is None:
            return folder, entry
        if folder.is_dir():  # others have been removed as old
            console.print(
                f"{folder} is damaged: {reason}. The next best is used.", style="yellow", markup=False, soft_wrap=True
            )
    raise UserError(f"no whole checkpoint is left in {run.checkpoints}; remove {run.folder} and train again")


def finish(
    trainer: LinformerTrainer, run: RunFolder, config: RunConfig, prepared: Prepared, seconds: float, console: Console
) -> None:
    """The best weights become `model/`, with their metrics beside them in `result.json`."""
    best, evaluation = best_checkpoint(trainer, run, console)
    model = MODELS[config.task].from_pretrained(best)
    metrics = validation_metrics(evaluation)
    if config.task == "translation":
        rows = prepared.splits["validation"]
        hypotheses, references = translations(
            model.to(trainer.args.device), prepared.tokenizer, rows, batch_size_of(config), console
        )
        metrics |= {f"validation_{name}": value for name, value in translation_metrics(hypotheses, references).items()}
    if trainer.args.should_save:
        with written_whole(run.model) as unfinished:
            model.save_pretrained(unfinished)
            prepared.tokenizer.save_pretrained(unfinished)
        prepared.tokenizer.save_pretrained(run.tokenizer)
        result = {"best_step": step_of(best), "steps": trainer.state.global_step, **metrics}
        peak = peak_resident()
        peak_mib = None if peak is None else round(peak / 2**20, 1)
        costs = {"tokens": trainer.state.num_input_tokens_seen, "seconds": seconds, "peak_mib": peak_mib}
        write_text(run.result, json.dumps({**result, **costs}, indent=1))
    trainer.accelerator.wait_for_everyone()
    console.print(f"Best at step {step_of(best)}: {format_metrics(metrics)}", highlight=False, soft_wrap=True)
    console.print(f"Model in {run.model}, curves in {run.curves}", highlight=False, soft_wrap=True)
    console.print(
        f"Next: linformer evaluate {run.folder}, linformer predict {run.folder} TEXT", highlight=False, soft_wrap=True
    )
