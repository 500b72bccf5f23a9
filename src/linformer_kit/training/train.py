"""Training a run, from its configuration to a model on disk; the same call goes on with a run that was stopped or died."""

import json
import logging
import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from transformers import TrainerState, TrainingArguments, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback

from .batches import Examples, Padding, Stream, change_of
from .checkpoint import PREFIX, damage, latest_whole, not_written, remove_beyond, step_of, written_whole
from .config import RunConfig
from .errors import Stopped, UserError
from .estimate import estimate
from .metrics import translation_metrics
from .model import MODELS, build_model, count_parameters
from .prepare import Prepared, prepare
from .progress import Bar, MetricsFile, in_words, validation_metrics
from .run import RunFolder, write_text
from .trainer import Flow, Interrupted, LinformerTrainer, evaluation_is_due, lengths_of
from .translate import translate_rows

# a stream has no epochs to evaluate after
STREAM_EVALUATES_EVERY = 1000


def train(config: RunConfig, console: Console) -> Path:
    """Train, or go on training; the folder of the run."""
    state = PartialState(cpu=config.training.device == "cpu" or not torch.cuda.is_available())
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
        trainer, flow = make_trainer(config, prepared, run, console)
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


def make_trainer(config: RunConfig, prepared: Prepared, run: RunFolder, console: Console) -> tuple[LinformerTrainer, Flow]:
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
        eval_dataset=Examples(by_length(validation), change, config.seed),
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


def by_length(rows: Any) -> Any:
    """Rows with the longest first: little padding, and what does not fit into memory fails at once."""
    return rows.select(np.argsort(-np.asarray(rows["length"][:]), kind="stable")) if "length" in rows.column_names else rows


def training_arguments(config: RunConfig, run: RunFolder, steps: int) -> TrainingArguments:
    """Our settings in transformers' words."""
    training = config.training
    share = device_batch_size(config)
    precision = training.precision
    if precision == "auto":
        precision = (
            "bfloat16" if training.device != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"
        )
    if precision == "float16" and (training.device == "cpu" or not torch.cuda.is_available()):
        raise UserError("training.precision is float16, which needs a GPU; allowed here: float32, bfloat16, auto")
    prepare_reporting(config, run)
    arguments = TrainingArguments(
        output_dir=str(run.checkpoints),
        max_steps=steps,
        per_device_train_batch_size=share,
        per_device_eval_batch_size=training.evaluation_batch_size or share,
        gradient_accumulation_steps=training.accumulate,
        learning_rate=training.learning_rate,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(training.schedule, training.schedule),
        warmup_steps=round(training.warmup * steps),
        weight_decay=training.weight_decay,
        adam_beta2=training.adam_beta2,
        max_grad_norm=training.clip,
        bf16=precision == "bfloat16",
        fp16=precision == "float16",
        gradient_checkpointing=training.gradient_checkpointing,
        use_cpu=training.device == "cpu" or not torch.cuda.is_available(),
        ddp_backend=None if torch.cuda.is_available() and training.device != "cpu" else ("gloo" if is_distributed() else None),
        ddp_find_unused_parameters=False,
        seed=config.seed,
        metric_for_best_model=best_metric(config),
        greater_is_better=best_metric(config) != "loss",
        eval_strategy="steps",
        eval_steps=steps,  # Flow decides
        save_strategy="steps",
        save_steps=steps,
        logging_nan_inf_filter=False,
        include_num_input_tokens_seen="non_padding",
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        report_to=[] if training.report == "none" else [training.report],
        run_name=run.folder.name,
        restore_callback_states_from_checkpoint=False,
        # each process reads the whole stream and takes its share: batches put together elsewhere would have to be of one length
        accelerator_config={"dispatch_batches": False},
    )
    # one process works on one device; for several there is torchrun
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def is_distributed() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def device_batch_size(config: RunConfig) -> int:
    """How many examples a process works on at a time."""
    processes = PartialState().num_processes
    share, rest = divmod(config.training.batch_size, processes * config.training.accumulate)
    if rest or share == 0:
        raise UserError(
            f"training.batch_size is {config.training.batch_size}, which {processes} process(es) × training.accumulate="
            f"{config.training.accumulate} do not divide; choose a multiple of {processes * config.training.accumulate}"
        )
    return share


def best_metric(config: RunConfig) -> str:
    """By which validation metric the best checkpoint is chosen."""
    return config.training.best_by or ("accuracy" if config.task == "classification" else "loss")


def prepare_reporting(config: RunConfig, run: RunFolder) -> None:
    """Where TensorBoard and Weights & Biases find their folder, and whether they are installed."""
    import importlib.util

    report = config.training.report
    if report == "none":
        return
    if importlib.util.find_spec(report) is None:
        raise UserError(f"training.report is {report}, which is not installed; pip install {report}, or set training.report=none")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.folder / "tensorboard")
    os.environ.setdefault("WANDB_DIR", str(run.folder))
    os.environ.setdefault("WANDB_PROJECT", "linformer-kit")


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
            console.print(f"{folder} is damaged: {reason}. The next best is used.", style="yellow", markup=False, soft_wrap=True)
    raise UserError(f"no whole checkpoint is left in {run.checkpoints}; remove {run.folder} and train again")


def finish(
    trainer: LinformerTrainer, run: RunFolder, config: RunConfig, prepared: Prepared, seconds: float, console: Console
) -> None:
    """The best weights become `model/`, with their metrics beside them in `result.json`."""
    best, evaluation = best_checkpoint(trainer, run, console)
    model = MODELS[config.task].from_pretrained(best)
    metrics = validation_metrics(evaluation)
    if config.task == "translation":
        hypotheses, references = translate_rows(model.to(trainer.args.device), prepared, config, "validation", console)
        metrics |= {f"validation_{name}": value for name, value in translation_metrics(hypotheses, references).items()}
    if trainer.args.should_save:
        with written_whole(run.model) as unfinished:
            model.save_pretrained(unfinished)
            prepared.tokenizer.save_pretrained(unfinished)
        prepared.tokenizer.save_pretrained(run.tokenizer)
        result = {"best_step": step_of(best), "steps": trainer.state.global_step, **metrics}
        write_text(run.result, json.dumps({**result, "tokens": trainer.state.num_input_tokens_seen, "seconds": seconds}, indent=1))
    trainer.accelerator.wait_for_everyone()
    console.print(f"Best at step {step_of(best)}: {in_words(metrics)}", highlight=False, soft_wrap=True)
    console.print(f"Model in {run.model}, curves in {run.curves}", highlight=False, soft_wrap=True)
    console.print(f"Next: linformer evaluate {run.folder}, linformer predict {run.folder} TEXT", highlight=False, soft_wrap=True)


# saying what will be done


def announce(
    trainer: LinformerTrainer, prepared: Prepared, config: RunConfig, state: TrainerState | None, console: Console
) -> None:
    """Examples, tokens, parameters, steps, memory and time, before it begins."""
    if not console.quiet:
        console.print(announcement(trainer, prepared, config, state))


def announcement(trainer: LinformerTrainer, prepared: Prepared, config: RunConfig, state: TrainerState | None) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for role, rows in prepared.splits.items():
        table.add_row(f"{role} examples", describe_split(rows, prepared.summary["splits"].get(role)))
    whole, projections = count_parameters(trainer.model)
    table.add_row("parameters", f"{whole:,}, of them {projections:,} of E and F")
    done = state.global_step if state else 0
    steps = trainer.args.max_steps
    table.add_row("steps", f"{steps:,} of {config.training.batch_size} examples" + (f"; goes on at {done:,}" if done else ""))
    memory, duration = "more than there is", "unknown"
    try:
        with trainer.accelerator.autocast():
            needed = estimate(
                trainer.model, *probe_batches(trainer), config.training.accumulate, config.training.gradient_checkpointing
            )
        memory = f"about {in_bytes(needed.bytes)} for weights, gradients, AdamW and the longest batch"
        duration = f"about {in_time(needed.seconds * (steps - done))} without evaluations"
    except torch.OutOfMemoryError:  # training may find room where the copy made for this did not
        pass
    table.add_row("memory", memory)
    table.add_row("time", duration)
    table.add_row("device", f"{trainer.args.device}, {trainer.accelerator.num_processes} process(es), {precision_of(trainer)}")
    return table


def describe_split(rows: Any, counts: dict[str, Any] | None) -> str:
    """Examples, tokens and what was cut."""
    if counts is None:
        return "streamed"
    parts = [f"{len(rows):,}"]
    for name, what in (("length", "tokens"), ("target_length", "target tokens")):
        if name in counts:
            parts.append(f"{counts[name]['tokens']:,} {what}")
            if counts[name]["cut_texts"] and "input_ids" in rows.column_names and "length" in rows.column_names:
                parts.append(f"{counts[name]['cut_texts']:,} texts cut, losing {counts[name]['cut_tokens']:,}")
    return ", ".join(parts)


def probe_batches(trainer: LinformerTrainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The longest and a typical batch of a process; of a stream, the first."""
    examples, size = trainer.train_dataset, trainer.args.per_device_train_batch_size
    if isinstance(examples, Examples):
        order = lengths_of(examples).argsort(kind="stable")[::-1].tolist()
        middle = max(0, len(order) // 2 - size // 2)
        drawn = [examples.__getitems__(indices) for indices in (order[:size], order[middle : middle + size])]
    else:
        drawn = [list(islice(examples, size))] * 2
    longest, typical = (
        {name: tensor.to(trainer.args.device) for name, tensor in trainer.data_collator(batch).items()} for batch in drawn
    )
    return longest, typical


def precision_of(trainer: LinformerTrainer) -> str:
    return {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.accelerator.mixed_precision, "float32")


def in_bytes(count: float) -> str:
    """A number of bytes as people say it.

    >>> in_bytes(3_400_000)
    '3 MB'
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def in_time(seconds: float) -> str:
    """A duration as people say it.

    >>> in_time(42), in_time(4000)
    ('42 s', '1 h 7 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
