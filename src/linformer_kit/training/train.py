"""Training a run, from its configuration to a saved model; the same call resumes an interrupted run."""

import json
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from accelerate import PartialState
from accelerate.utils import set_seed
from rich.console import Console
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback

from ..errors import Stopped, UserError
from ..files import atomic_directory, write_text
from ..precision import compiled
from ..process_memory import peak_resident
from .announce import announce
from .arguments import resolve_hardware, training_arguments
from .batches import Examples, PaddingCollator, Stream, Transform, row_lengths, task_transform
from .checkpoint import PREFIX, atomic_checkpoint, find_damage, latest_intact, remove_newer, step_of, write_error
from .config import RunConfig
from .load import quiet_libraries
from .metrics import translation_metrics
from .model import MODELS, build_model, count_parameters
from .prepare import Prepared, prepare
from .progress import Bar, MetricsFile, format_metrics, validation_metrics
from .run import RunFolder
from .trainer import EvaluationInterrupted, FlowCallback, LinformerTrainer, TrainingComplete, evaluation_is_due
from .translate import batch_size_of, translations
from .wandb_report import report_to_wandb

# steps between evaluations of a stream, which has no epochs
STREAM_EVALUATION_INTERVAL = 1000


def train(config: RunConfig, console: Console) -> Path:
    """Train a run, or resume it; returns its directory."""
    run = RunFolder(config.folder)
    resumed = run.resumable_config
    config = resolve_hardware(config, resumed)
    state = PartialState(cpu=config.training.device == "cpu")
    if not state.is_main_process:
        console = Console(quiet=True)
    quiet_libraries()
    with locked_by_main_process(run, config, state):
        if run.is_finished:
            console.print(f"The run in {run.folder} is finished.", highlight=False, soft_wrap=True)
            return run.folder
        if resumed is not None:
            announce_hardware_change(resumed, config, console)
        with state.main_process_first():
            prepared = prepare(config, console)
        if state.is_main_process:
            run.check_data(prepared.facts)
            if resumed is None or not run.tokenizer.is_dir():  # for checkpoints, which have none
                with atomic_directory(run.tokenizer) as unfinished:
                    prepared.tokenizer.save_pretrained(unfinished)
        trainer, flow = make_trainer(config, prepared, run)
        with report_to_wandb(trainer, run, config, console):
            run_trainer(trainer, flow, run, config, prepared, console)
    return run.folder


def announce_hardware_change(before: RunConfig, now: RunConfig, console: Console) -> None:
    """Print a line if a run is resumed on another device than it began on, or if its precision was not recorded."""
    old, new = before.training, now.training
    if old.precision == "auto":
        line = f"An older version stored training.precision=auto. The run resumes on {new.device} in {new.precision}."
    elif old.device not in ("auto", new.device):
        line = f"The run began on {old.device} and resumes on {new.device}. It keeps its precision, {new.precision}."
    else:
        return
    console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def locked_by_main_process(run: RunFolder, config: RunConfig, state: PartialState) -> Iterator[None]:
    """The main process locks the run directory and stores the configuration before the others continue."""
    if not state.is_main_process:
        state.wait_for_everyone()
        yield
        return
    with run.locked():
        run.begin(config)
        state.wait_for_everyone()
        yield


# making the trainer


def make_trainer(config: RunConfig, prepared: Prepared, run: RunFolder) -> tuple[LinformerTrainer, FlowCallback]:
    """Build the model, the examples and the trainer from the configuration."""
    set_seed(config.seed)
    model = build_model(config, prepared.tokenizer, prepared.labels)
    if config.training.compile:
        compiled(model)
    transform = task_transform(config, prepared.tokenizer)
    train_rows, validation = prepared.splits["train"], prepared.splits["validation"]
    examples = (Stream if config.data.streaming else Examples)(train_rows, transform, config.seed)
    per_epoch = None if config.data.streaming else steps_per_epoch(len(train_rows), config)
    steps = config.training.steps or math.ceil((config.training.epochs or 3) * (per_epoch or 0))
    evaluate_every = min(config.training.evaluate_every or per_epoch or STREAM_EVALUATION_INTERVAL, steps)
    flow = FlowCallback(config, evaluate_every)
    trainer = LinformerTrainer(
        config=config,
        keep=config.training.keep,
        model=model,
        args=training_arguments(config, run, steps),
        data_collator=PaddingCollator(prepared.tokenizer.pad_token_id),
        train_dataset=examples,
        eval_dataset=evaluation_examples(validation, transform),
        callbacks=[flow],
    )
    # replaced by FlowCallback and Bar
    for callback in (DefaultFlowCallback, PrinterCallback):
        trainer.remove_callback(callback)
    return trainer, flow


def steps_per_epoch(examples: int, config: RunConfig) -> int:
    """Number of full batches in the training split."""
    steps = examples // config.training.batch_size
    if steps == 0:
        raise UserError(
            f"training.batch_size is {config.training.batch_size}, but there are only {examples} training examples; "
            "use a smaller batch size"
        )
    return steps


def evaluation_examples(rows: Any, transform: Transform) -> Examples:
    """Examples sorted by length, longest first: there is little padding, and a lack of memory shows at once.

    The masked tokens do not depend on the seed of the run: another choice alone changes perplexity by over 1%.
    """
    return Examples(rows.select(np.argsort(-row_lengths(rows), kind="stable")), transform, seed=0)


# running it


def run_trainer(
    trainer: LinformerTrainer,
    flow: FlowCallback,
    run: RunFolder,
    config: RunConfig,
    prepared: Prepared,
    console: Console,
) -> None:
    """Train from the last intact checkpoint to the end; a signal saves a checkpoint and stops."""
    resumed = last_checkpoint(run, console)
    state = TrainerState.load_from_json(str(resumed / TRAINER_STATE_NAME)) if resumed else None
    announce(trainer, prepared, config, state, console)
    bar = Bar(console)
    for callback in (MetricsFile(run, state.global_step if state else 0), bar):
        trainer.add_callback(callback)
    set_seed(config.seed, device_specific=True)  # dropout differs between processes
    trainer.args.eval_on_start = state is not None and evaluation_is_due(state, flow.evaluate_every)
    start = time.perf_counter()
    with flow.handle_signals(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
        except TrainingComplete:
            pass
        except EvaluationInterrupted:
            # if the evaluation was pending when the run was resumed, the checkpoint of its step exists already
            if resumed is None or step_of(resumed) != trainer.state.global_step:
                trainer._save_checkpoint(trainer.model)
                trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        except OSError as error:  # from metrics and curves; checkpoints raise UserError
            raise write_error(run.folder, error) from error
        finally:
            bar.close()
    if flow.signal is not None:
        raise Stopped(
            f"Stopped and saved at step {trainer.state.global_step} of {trainer.state.max_steps}. "
            f"To resume: linformer train {quote(str(run.config))}",
            128 + flow.signal,
        )
    finish(trainer, run, config, prepared, time.perf_counter() - start, console)


def last_checkpoint(run: RunFolder, console: Console) -> Path | None:
    """The checkpoint to resume from; the main process removes damaged ones before the others look."""
    state = PartialState()
    with state.main_process_first():
        if not run.checkpoints.is_dir():
            return None
        last = latest_intact(run.checkpoints, console)
        if state.is_main_process:
            remove_newer(run.checkpoints, last)
        return last


def best_checkpoint(trainer: LinformerTrainer, run: RunFolder, console: Console) -> tuple[Path, dict[str, Any]]:
    """The best intact checkpoint and its evaluation."""
    key = f"eval_{trainer.args.metric_for_best_model}"
    evaluations = [entry for entry in trainer.state.log_history if key in entry]
    for entry in sorted(evaluations, key=lambda entry: entry[key], reverse=trainer.args.greater_is_better):
        folder = run.checkpoints / f"{PREFIX}{entry['step']}"
        if (reason := find_damage(folder)) is None:
            return folder, entry
        if folder.is_dir():  # old checkpoints were removed
            console.print(
                f"{folder} is damaged: {reason}. Using the next best checkpoint.",
                style="yellow",
                markup=False,
                soft_wrap=True,
            )
    raise UserError(f"{run.checkpoints} has no intact checkpoint; delete {run.folder} and train again")


def finish(
    trainer: LinformerTrainer, run: RunFolder, config: RunConfig, prepared: Prepared, seconds: float, console: Console
) -> None:
    """Save the best weights as `model/` and their metrics as `result.json`."""
    best, evaluation = best_checkpoint(trainer, run, console)
    model = MODELS[config.task].from_pretrained(best, trust_remote_code=False, use_safetensors=True)
    metrics = validation_metrics(evaluation)
    if config.task == "translation":
        rows = prepared.splits["validation"]
        hypotheses, references = translations(
            model.to(trainer.args.device), prepared.tokenizer, rows, batch_size_of(config), console
        )
        metrics |= {f"validation_{name}": value for name, value in translation_metrics(hypotheses, references).items()}
    if trainer.args.should_save:
        with atomic_checkpoint(run.model) as unfinished:
            model.save_pretrained(unfinished)
            prepared.tokenizer.save_pretrained(unfinished)
        parameters, _ = count_parameters(model)
        result = {"best_step": step_of(best), "steps": trainer.state.global_step, "parameters": parameters, **metrics}
        peak = peak_resident()
        peak_mib = None if peak is None else round(peak / 2**20, 1)
        costs = {"tokens": trainer.state.num_input_tokens_seen, "seconds": seconds, "peak_mib": peak_mib}
        write_text(run.result, json.dumps({**result, **costs}, indent=1))
    trainer.accelerator.wait_for_everyone()
    console.print(f"Best at step {step_of(best)}: {format_metrics(metrics)}", highlight=False, soft_wrap=True)
    console.print(f"Model in {run.model}, curves in {run.curves}", highlight=False, soft_wrap=True)
    folder, split = quote(str(run.folder)), "" if "test" in prepared.summary["splits"] else " --split validation"
    console.print(
        f"Next: linformer evaluate {folder}{split}, linformer predict {folder} TEXT",
        highlight=False,
        soft_wrap=True,
    )
