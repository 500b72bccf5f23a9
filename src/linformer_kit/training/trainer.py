"""The trainer: that of transformers, with exact resumption, atomic checkpoints and metrics that count each token once.

Three private methods of `Trainer` are overridden: `_save_checkpoint`, `_load_optimizer_and_scheduler` and
`_load_rng_state`; `_prepare_inputs`, `_save_optimizer_and_scheduler` and `_save_scaler` are called, `_tr_loss` and
`_globalstep_last_logged` are restored. They may change in any minor version, so pyproject.toml allows the tested one
only.
"""

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ..errors import UserError
from ..models.projection_linformer import Projection
from ..process_memory import FreeMemoryLimit
from .batches import IGNORE_INDEX, Examples, LengthGroupedSampler
from .checkpoint import (
    PREFIX,
    atomic_checkpoint,
    remove_old,
)
from .config import RunConfig
from .metrics import class_metrics, token_metrics, token_sums
from .training_state import load_optimizer, preserve_rng_state, random_state, save_optimizer, set_random_state

# Bytes of freed memory that a run may hold between two steps: less would take time, because steps of medium length
# reuse this memory, more would add to the peak of the longest batch
FREE_MEMORY = 256 * 2**20


class EvaluationInterrupted(Exception):
    """A signal arrived during an evaluation."""


class TrainingComplete(Exception):
    """A resumed run has nothing left to train."""


class LinformerTrainer(Trainer):
    """`transformers.Trainer` for a `RunConfig`.

    - Examples come in the order of `LengthGroupedSampler`, the same for any number of processes.
    - Evaluations leave the random number generators unchanged and count each example and token once.
    - Checkpoints are atomic, contain no pickle (except the float16 scaler), and suffice for exact resumption.
    """

    def __init__(self, *, config: RunConfig, keep: int, **kwargs: Any):
        self.config, self.keep = config, keep
        self._timer_start: tuple[int, float] | None = None
        metrics = class_metrics if config.task == "classification" else lambda sums, _: token_metrics(sums)
        super().__init__(compute_metrics=lambda output: metrics(output.predictions, output.label_ids), **kwargs)

    # batches and steps

    def get_train_dataloader(self) -> DataLoader:
        examples = self.train_dataset
        if not isinstance(examples, Examples):
            return super().get_train_dataloader()
        loader = DataLoader(
            examples,
            batch_size=self.args.train_batch_size,
            sampler=LengthGroupedSampler(examples, self.config.training.batch_size),
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return self.accelerator.prepare(loader)

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        """Also counts the tokens without padding; a batch without a mask has no padding."""
        if self._timer_start is None:
            self._timer_start = (self.state.num_input_tokens_seen, time.perf_counter())
        loss = super().training_step(model, inputs, num_items_in_batch)
        tokens = (
            inputs["attention_mask"].sum()
            if "attention_mask" in inputs
            else inputs["input_ids"].new_tensor(inputs["input_ids"].numel())
        )
        self.state.num_input_tokens_seen += int(self.accelerator.gather(tokens).sum())
        return loss

    def log(self, logs, start_time=None):
        """Adds the tokens per second since the last log, without evaluations."""
        if "loss" in logs and self._timer_start is not None:
            tokens, start = self._timer_start
            speed = (self.state.num_input_tokens_seen - tokens) / (time.perf_counter() - start)
            logs |= {"tokens_per_second": round(speed, 1), "num_input_tokens_seen": self.state.num_input_tokens_seen}
            self._timer_start = None
        super().log(logs, start_time)

    def floating_point_ops(self, inputs):
        """Not counted: it would visit all modules at every step."""
        return 0

    # optimizer

    def create_optimizer(self, model=None):
        """The default optimizer, with a smaller learning rate for a learned E.

        A column of E weights N tokens, few of which matter. With the learning rate of the other weights, the noise of
        the many tokens exceeds the signal of the few; docs/results.md shows the effect.
        """
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        rate = self.config.training.projection_rate
        slow = {
            id(parameter)
            for module in self.model.modules()
            if isinstance(module, Projection) and module.has_own_learning_rate
            for parameter in module.parameters()
        }
        if is_new and slow and rate != 1:
            for group in list(optimizer.param_groups):
                projections = [parameter for parameter in group["params"] if id(parameter) in slow]
                if projections:
                    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in slow]
                    optimizer.add_param_group({**group, "params": projections, "lr": group["lr"] * rate})
        return optimizer

    # loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The default loss, or a smoothed one; label smoothing of `Trainer` does not fit shifted labels."""
        smoothing = self.config.training.label_smoothing
        if smoothing == 0:
            inputs = inputs | self.forward_options(inputs["labels"])
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs, labels = self.forward_without_loss(model, inputs)
        logits, labels = align_labels(outputs.logits, labels, self.config.task)
        if logits.dim() == 2:  # logits of the labeled tokens only
            labels = labels[labels != IGNORE_INDEX]
        total = functional.cross_entropy(
            logits.flatten(0, -2).float(),
            labels.flatten(),
            ignore_index=IGNORE_INDEX,
            label_smoothing=smoothing,
            reduction="sum",
        )
        # each process divides by the number of labels of all processes, and gradients are averaged
        loss = total / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def forward_without_loss(self, model, inputs: dict[str, Any]) -> tuple[Any, Tensor]:
        """The outputs of the model, which computes no loss, and the labels."""
        labels = inputs["labels"]
        rest = {name: value for name, value in inputs.items() if name != "labels"}
        if self.model.config.is_encoder_decoder:
            rest["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels)
        return model(**rest, **self.forward_options(labels)), labels

    def forward_options(self, labels: Tensor) -> dict[str, Any]:
        """Arguments that save work: a masked LM computes logits of masked tokens only, decoders keep no cache."""
        match self.config.task:
            case "masked-lm":
                return {"logits_to_keep": labels != IGNORE_INDEX}
            case "causal-lm" | "translation" | "denoising":
                return {"use_cache": False}
            case _:
                return {}

    # evaluation

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with preserve_rng_state():
            return super().evaluate(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Per example only what the metrics need: (B, classes) logits or (B, 3) sums."""
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs, labels = self.forward_without_loss(model, self._prepare_inputs(inputs))
        if self.config.task == "classification":
            return None, outputs.logits.float(), labels
        # Trainer needs labels to compute metrics
        return None, token_sums(*align_labels(outputs.logits, labels, self.config.task)), labels.new_zeros(len(labels))

    # checkpoints

    def _save_checkpoint(self, model, trial=None):
        """Save everything that resumption needs, under a temporary name until it is complete."""
        self.store_flos()
        folder = Path(self.args.output_dir) / f"{PREFIX}{self.state.global_step}"
        best = best_evaluation(self.state, self.args)
        if best is not None:
            self.state.best_model_checkpoint = str(folder.with_name(f"{PREFIX}{best['step']}"))
        with atomic_checkpoint(folder, self.args.should_save, self.accelerator.wait_for_everyone) as unfinished:
            self.save_model(str(unfinished), _internal_call=True)
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                self._save_optimizer_and_scheduler(str(unfinished))
            elif self.args.should_save:
                save_optimizer(unfinished, self.optimizer.state_dict(), self.lr_scheduler.state_dict())
            self._save_scaler(str(unfinished))
            state = json.dumps(random_state() | self.loss_since_log())
            (unfinished / f"random-{self.args.process_index}.json").write_text(state, encoding="utf-8")
            if self.args.should_save:
                self.state.save_to_json(str(unfinished / TRAINER_STATE_NAME))
        if self.args.should_save:
            kept = self.state.best_model_checkpoint
            remove_old(folder.parent, self.keep, Path(kept) if kept else None)

    def save_model(self, output_dir=None, _internal_call=False):
        """Save the weights and their configuration, but not the arguments, which would be a pickle."""
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        weights = self.accelerator.get_state_dict(self.model_wrapped) if is_sharded else None
        if self.args.should_save:
            self.accelerator.unwrap_model(self.model).save_pretrained(output_dir, state_dict=weights)

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is None or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer, scheduler = load_optimizer(Path(checkpoint))
        self.optimizer.load_state_dict(optimizer)
        self.lr_scheduler.load_state_dict(scheduler)

    def _load_rng_state(self, checkpoint):
        if checkpoint is None:
            return
        path = Path(checkpoint) / f"random-{self.args.process_index}.json"
        if path.is_file():  # a run resumed with more processes has too few states
            state = json.loads(path.read_text(encoding="utf-8"))
            set_random_state(state)
            self._tr_loss.fill_(state.get("loss_since_log", 0.0))
            self._globalstep_last_logged = self.state.global_step - state.get("steps_since_log", 0)

    def loss_since_log(self) -> dict[str, float]:
        """The losses that the next log averages; a signal stops a run between two logs."""
        steps = self.state.global_step - self._globalstep_last_logged
        return {"loss_since_log": self._tr_loss.item(), "steps_since_log": steps}


def align_labels(logits: Tensor, labels: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """Logits and the labels they predict: in a causal model, each position predicts the next token."""
    return (logits[:, :-1], labels[:, 1:]) if task == "causal-lm" else (logits, labels)


# callback


class FlowCallback(TrainerCallback):
    """Decides when to log, save, evaluate and stop, and sets the epoch of the dataset."""

    def __init__(self, config: RunConfig, evaluate_every: int):
        self.training, self.evaluate_every = config.training, evaluate_every
        self.signal: int | None = None
        self.free_memory = FreeMemoryLimit(FREE_MEMORY)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= state.max_steps or self.patience_is_exhausted(args, state):
            raise TrainingComplete
        # accelerate sets the epoch for some kinds of loaders only
        kwargs["train_dataloader"].dataset.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step, last = state.global_step, state.global_step >= state.max_steps
        control.should_evaluate = last or step % self.evaluate_every == 0
        control.should_save = control.should_evaluate or step % (self.training.save_every or self.evaluate_every) == 0
        control.should_training_stop = last
        control.should_log = control.should_save or step % self.training.log_every == 0
        if self.is_stop_requested():
            # only what the resumed run does not do: it logs and evaluates at the same steps as an uninterrupted one
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
        self.free_memory.check()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.signal is not None and args.world_size == 1:
            raise EvaluationInterrupted

    def on_log(self, args, state, control, logs=None, **kwargs: Any) -> None:
        loss = (logs or {}).get("loss", (logs or {}).get("eval_loss", 0.0))
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {state.global_step}; earlier checkpoints are kept. "
                "Train in another directory with a smaller training.learning_rate or a longer training.warmup"
            )

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.patience_is_exhausted(args, state):
            control.should_training_stop = True

    def patience_is_exhausted(self, args: TrainingArguments, state: TrainerState) -> bool:
        patience = self.training.patience
        return patience is not None and evaluations_since_best(state, args) >= patience

    def is_stop_requested(self) -> bool:
        """Whether any process has received a signal; all processes must stop at the same step."""
        if not distributed.is_available() or not distributed.is_initialized():
            return self.signal is not None
        number = torch.tensor(self.signal or 0, device="cuda" if distributed.get_backend() == "nccl" else "cpu")
        distributed.all_reduce(number, op=distributed.ReduceOp.MAX)
        self.signal = int(number) or None
        return self.signal is not None

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM finishes the step and saves; the second ends the process at once."""
        before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def request_stop(number: int, frame: Any) -> None:
            self.signal = number
            restore()

        for number in before:
            signal.signal(number, request_stop)
        try:
            yield
        finally:
            restore()


def best_evaluation(state: TrainerState, args: TrainingArguments) -> dict[str, Any] | None:
    """The first of the best evaluations; it depends on the history alone, so a resumed run finds the same."""
    key = f"eval_{args.metric_for_best_model}"
    evaluations = [entry for entry in state.log_history if key in entry]
    choose = max if args.greater_is_better else min
    return choose(evaluations, key=lambda entry: entry[key], default=None)


def evaluations_since_best(state: TrainerState, args: TrainingArguments) -> int:
    """Number of evaluations after the best one."""
    best, key = best_evaluation(state, args), f"eval_{args.metric_for_best_model}"
    return sum(entry["step"] > best["step"] for entry in state.log_history if key in entry) if best else 0


def evaluation_is_due(state: TrainerState, evaluate_every: int) -> bool:
    """Whether a run ended between a checkpoint and its evaluation."""
    step = state.global_step
    is_evaluated = any(entry["step"] == step and "eval_loss" in entry for entry in state.log_history)
    return step > 0 and (step % evaluate_every == 0 or step >= state.max_steps) and not is_evaluated
