"""Our settings in the words of transformers."""

import importlib.util
import os

import torch
from accelerate import PartialState
from transformers import TrainingArguments

from ..errors import UserError
from .config import RunConfig, TrainingConfig
from .run import RunFolder


def training_arguments(config: RunConfig, run: RunFolder, steps: int) -> TrainingArguments:
    """What `transformers.Trainer` needs to know; `steps` is how long the run is."""
    training = config.training
    share = device_batch_size(config)
    precision = precision_for(training)
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
        use_cache=True,  # of the model when it is saved: it is to generate with one
        use_cpu=not is_on_gpu(training),
        ddp_backend="gloo" if is_distributed() and not is_on_gpu(training) else None,
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
        dataloader_pin_memory=is_on_gpu(training),
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


def is_on_gpu(training: TrainingConfig) -> bool:
    """Whether a run works on a GPU: there must be one, and nobody must have chosen otherwise."""
    return training.device == "auto" and torch.cuda.is_available()


def precision_for(training: TrainingConfig) -> str:
    """In which precision a run computes."""
    if training.precision == "auto":
        return "bfloat16" if is_on_gpu(training) and torch.cuda.is_bf16_supported() else "float32"
    if training.precision == "float16" and not is_on_gpu(training):
        raise UserError("training.precision is float16, which needs a GPU; allowed here: float32, bfloat16, auto")
    return training.precision


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
    report = config.training.report
    if report == "none":
        return
    if importlib.util.find_spec(report) is None:
        raise UserError(
            f"training.report is {report}, which is not installed; pip install {report}, or set training.report=none"
        )
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.folder / "tensorboard")
    os.environ.setdefault("WANDB_DIR", str(run.folder))
    os.environ.setdefault("WANDB_PROJECT", "linformer-kit")
