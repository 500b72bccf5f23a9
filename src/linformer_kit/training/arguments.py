"""Device, precision and `transformers.TrainingArguments` of a run."""

import importlib.util
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

import torch
from accelerate import PartialState

from ..errors import UserError
from ..files import read_json
from ..formatting import plural
from ..precision import PRECISIONS, Precision, fastest_precision
from .config import RunConfig, TrainingConfig
from .run import RunFolder, TrainedModel

if TYPE_CHECKING:
    from transformers import TrainingArguments


def resolve_hardware(config: RunConfig, resumed: RunConfig | None = None) -> RunConfig:
    """The configuration with `auto` replaced by the device and the precision that are used.

    A resumed run keeps its precision on any device. Runs of older versions have stored `auto`, which is resolved anew.
    """
    training = config.training
    if training.device == "cuda" and not torch.cuda.is_available():
        raise UserError("training.device is cuda, but PyTorch finds no GPU; set training.device=cpu")
    device, precision = device_of(training), training.precision
    if precision == "auto" and resumed is not None:
        precision = resumed.training.precision
    if precision == "auto":
        precision = fastest_precision(device)
    if precision == "float16" and device == "cpu":
        raise UserError("training.precision is float16, which needs a GPU; allowed on CPUs: float32, bfloat16, auto")
    return replace(config, training=replace(training, device=device, precision=precision))


def is_on_gpu(training: TrainingConfig) -> bool:
    """Whether a run uses a GPU: one is available, and the configuration does not choose the CPU."""
    return training.device != "cpu" and torch.cuda.is_available()


def device_of(training: TrainingConfig) -> Literal["cpu", "cuda"]:
    """The device of a run; evaluations use the CPU if the GPU that a run was trained on does not exist."""
    return "cuda" if is_on_gpu(training) else "cpu"


def inference_precision(requested: str, trained: TrainedModel) -> Precision:
    """The precision in which a trained model is evaluated: for `auto`, that of its training or of its 8-bit weights.

    It is float32 if the model was trained in bfloat16 or float16 and this device does not multiply bfloat16 fast.
    """
    if requested not in (allowed := ("auto", *PRECISIONS)):
        raise UserError(f"precision is {requested!r}; allowed: {', '.join(allowed)}")
    training = trained.config.training
    if read_json(trained.folder / "config.json").get("quantization") == "int8":
        if requested not in ("auto", "int8"):
            raise UserError(f"precision is {requested}, but {trained.folder} has 8-bit weights; allowed: auto, int8")
        return "int8"
    if requested == "auto":
        return "float32" if training.precision == "float32" else fastest_precision(device_of(training))
    return cast(Precision, requested)


def training_arguments(config: RunConfig, run: RunFolder, steps: int) -> "TrainingArguments":
    """The arguments of `transformers.Trainer` for a run of `steps` steps."""
    # `linformer predict` asks this module for the device only
    from transformers import TrainingArguments

    training = resolve_hardware(config).training
    batch_size = device_batch_size(config)
    prepare_reporting(config, run)
    arguments = TrainingArguments(
        output_dir=str(run.checkpoints),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=training.evaluation_batch_size or batch_size,
        gradient_accumulation_steps=training.accumulate,
        learning_rate=training.learning_rate,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(training.schedule, training.schedule),
        warmup_steps=round(training.warmup * steps),
        weight_decay=training.weight_decay,
        adam_beta2=training.adam_beta2,
        max_grad_norm=training.clip,
        bf16=training.precision == "bfloat16",
        fp16=training.precision == "float16",
        gradient_checkpointing=training.gradient_checkpointing,
        use_cache=True,  # stored with the model, for generation
        use_cpu=training.device == "cpu",
        ddp_backend="gloo" if is_distributed() and training.device == "cpu" else None,
        ddp_find_unused_parameters=False,
        seed=config.seed,
        metric_for_best_model=best_metric(config),
        greater_is_better=best_metric(config) != "loss",
        eval_strategy="steps",
        eval_steps=steps,  # FlowCallback decides when to evaluate and to save
        save_strategy="steps",
        save_steps=steps,
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_pin_memory=training.device != "cpu",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        report_to=[name for name in training.reports if name != "wandb"],  # WandbReport is our own
        run_name=run.folder.name,
        restore_callback_states_from_checkpoint=False,
        # each process reads the whole stream and takes its share; dispatched batches would need equal lengths
        accelerator_config={"dispatch_batches": False},
    )
    # one process uses one device; torchrun starts several
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def is_distributed() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def device_batch_size(config: RunConfig) -> int:
    """Examples that a process computes at a time."""
    processes = PartialState().num_processes
    parts = processes * config.training.accumulate
    size, rest = divmod(config.training.batch_size, parts)
    if rest or size == 0:
        raise UserError(
            f"training.batch_size is {config.training.batch_size}, not a multiple of {plural(processes, 'process')} × "
            f"training.accumulate={config.training.accumulate}; choose a multiple of {parts}"
        )
    return size


def best_metric(config: RunConfig) -> str:
    """The validation metric that selects the best checkpoint."""
    return config.training.best_by or ("accuracy" if config.task == "classification" else "loss")


def prepare_reporting(config: RunConfig, run: RunFolder) -> None:
    """Check that the tools of `training.report` are installed, and direct the files of TensorBoard to the run."""
    for name in config.training.reports:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f'training.report has {name}, which is not installed; pip install "linformer-kit[{name}]", or set '
                "training.report=none"
            )
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.folder / "tensorboard")
