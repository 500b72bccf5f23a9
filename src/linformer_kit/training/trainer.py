"""The trainer: transformers' own, with exact resumption, whole checkpoints and metrics that count every token once."""

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ..errors import UserError
from ..models.projection_linformer import LinearProjection
from ..process_memory import release_free_memory
from .batches import IGNORED, Examples, InBuckets
from .checkpoint import (
    PREFIX,
    load_optimizer,
    preserve_rng_state,
    random_state,
    remove_old,
    save_optimizer,
    set_random_state,
    written_whole,
)
from .config import RunConfig
from .metrics import class_metrics, token_metrics, token_sums

# steps after which freed memory goes back to the system: batches of ever other lengths leave holes in it that glibc keeps; not
# after every step, because pages that went back take time to be had again
RELEASE_EVERY = 50


class Interrupted(Exception):
    """A signal has asked to stop while an evaluation was running."""


class LinformerTrainer(Trainer):
    """`transformers.Trainer` for a `RunConfig`.

    - Examples come in the order of `InBuckets`, the same for any number of processes.
    - Evaluating draws nothing from the generators of training and counts each example and token once.
    - A checkpoint is whole or not there, holds no pickle (but for the scaler of float16), and is enough to go on exactly.
    """

    def __init__(self, *, config: RunConfig, keep: int, **kwargs: Any):
        self.config, self.keep = config, keep
        self._since: tuple[int, float] | None = None
        metrics = class_metrics if config.task == "classification" else lambda sums, _: token_metrics(sums)
        super().__init__(compute_metrics=lambda output: metrics(output.predictions, output.label_ids), **kwargs)

    # order and length

    def _run_epoch(self, **kwargs):
        """Nothing, if a resumed run was over already: the last epoch need not be a whole one."""
        patience = self.config.training.patience
        is_exhausted = patience is not None and evaluations_without_gain(self.state, self.args) >= patience
        if self.control.should_training_stop or is_exhausted or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(**kwargs)

    def _get_train_sampler(self, train_dataset=None):
        examples = self.train_dataset
        if not isinstance(examples, Examples):
            return None
        return InBuckets(examples, self.config.training.batch_size)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._since is None:
            self._since = (self.state.num_input_tokens_seen, time.perf_counter())
        return super().training_step(*args, **kwargs)

    def log(self, logs, start_time=None):
        """Adds the tokens per second since the last log, evaluations excepted."""
        if "loss" in logs and self._since is not None:
            tokens, since = self._since
            logs["tokens_per_second"] = round(
                (self.state.num_input_tokens_seen - tokens) / (time.perf_counter() - since), 1
            )
            self._since = None
        super().log(logs, start_time)

    def floating_point_ops(self, inputs):
        """Not counted: it would walk through all modules at every step, and nobody asks."""
        return 0

    def _track_num_input_tokens(self, inputs):
        """Real tokens; a batch without a mask has no others."""
        tokens = (
            inputs["attention_mask"].sum()
            if "attention_mask" in inputs
            else inputs["input_ids"].new_tensor(inputs["input_ids"].numel())
        )
        self.state.num_input_tokens_seen += int(self.accelerator.gather(tokens).sum())

    # optimizer

    def create_optimizer(self, model=None):
        """As always, but a learned E moves more slowly than the rest.

        A column of E weighs N tokens, a few of which matter. Steps as large as those of other weights add up, over the tokens
        that do not matter, to more noise than the few have signal; docs/results.md shows what that costs.
        """
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        slow = {
            id(module.weight)
            for module in self.model.modules()
            if isinstance(module, LinearProjection) and isinstance(module.weight, nn.Parameter)
        }
        if is_new and slow and self.config.training.projection_rate != 1:
            for group in list(optimizer.param_groups):
                of_E = [parameter for parameter in group["params"] if id(parameter) in slow]
                if of_E:
                    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in slow]
                    optimizer.add_param_group(
                        {**group, "params": of_E, "lr": group["lr"] * self.config.training.projection_rate}
                    )
        return optimizer

    # loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """As always; with label smoothing our own, since causal models shift their labels and encoder-decoders their inputs."""
        smoothing = self.config.training.label_smoothing
        if smoothing == 0:
            inputs = inputs | self.spared(inputs["labels"])
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        rest = {name: value for name, value in inputs.items() if name != "labels"}
        if self.model.config.is_encoder_decoder:
            rest["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels)
        outputs = model(**rest, **self.spared(labels))
        logits, labels = aligned(outputs.logits, labels, self.config.task)
        if logits.dim() == 2:  # of the labelled tokens only
            labels = labels[labels != IGNORED]
        total = functional.cross_entropy(
            logits.flatten(0, -2).float(),
            labels.flatten(),
            ignore_index=IGNORED,
            label_smoothing=smoothing,
            reduction="sum",
        )
        # every process divides by the labels of all, and their gradients are averaged
        loss = total / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def spared(self, labels: Tensor) -> dict[str, Any]:
        """What a model need not do: a masked LM, logits of words nobody asks for; a decoder, keep what generation would need."""
        match self.config.task:
            case "masked-lm":
                return {"logits_to_keep": labels != IGNORED}
            case "causal-lm" | "translation" | "denoising":
                return {"use_cache": False}
            case _:
                return {}

    # evaluation

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with preserve_rng_state():
            return super().evaluate(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Per example: what the metrics need and no more, (B, classes) logits or (B, 3) sums."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs["labels"]
        rest = {name: value for name, value in inputs.items() if name != "labels"}
        if self.model.config.is_encoder_decoder:
            rest["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels)
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**rest, **self.spared(labels)).logits
        if self.config.task == "classification":
            return None, logits.float(), labels
        # the second is only there because Trainer wants labels
        return None, token_sums(*aligned(logits, labels, self.config.task)), labels.new_zeros(len(labels))

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
        """Also notes the best: Trainer does not, when it evaluates at the start of a resumed run."""
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        self._determine_best_metric(metrics, trial)
        return metrics

    # checkpoints

    def _save_checkpoint(self, model, trial=None):
        """Everything a run needs to go on, under a temporary name until it is whole."""
        self.store_flos()
        folder = Path(self.args.output_dir) / f"{PREFIX}{self.state.global_step}"
        with written_whole(folder, self.args.should_save, self.accelerator.wait_for_everyone) as unfinished:
            self.save_model(str(unfinished), _internal_call=True)
            self._save_optimizer_and_scheduler(str(unfinished))
            self._save_scaler(str(unfinished))
            state = json.dumps(random_state())
            (unfinished / f"random-{self.args.process_index}.json").write_text(state, encoding="utf-8")
            if self.state.best_global_step:
                best = folder.with_name(f"{PREFIX}{self.state.best_global_step}")
                self.state.best_model_checkpoint = str(best)
            if self.args.should_save:
                self.state.save_to_json(str(unfinished / TRAINER_STATE_NAME))
        if self.args.should_save:
            remove_old(
                folder.parent,
                self.keep,
                Path(self.state.best_model_checkpoint) if self.state.best_model_checkpoint else None,
            )

    def _save(self, output_dir=None, state_dict=None):
        """The weights and their configuration; not the arguments, which would be a pickle."""
        self.accelerator.unwrap_model(self.model).save_pretrained(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir):
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            save_optimizer(Path(output_dir), self.optimizer.state_dict(), self.lr_scheduler.state_dict())

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
        if path.is_file():  # with more processes than before there are not enough
            set_random_state(json.loads(path.read_text(encoding="utf-8")))


def aligned(logits: Tensor, labels: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """Logits with the labels they are to guess: in a causal model each guesses the token behind it."""
    return (logits[:, :-1], labels[:, 1:]) if task == "causal-lm" else (logits, labels)


# what happens between the steps


class Flow(TrainerCallback):
    """When to log, save, evaluate and stop, and the epoch for those who draw by it."""

    def __init__(self, config: RunConfig, evaluate_every: int):
        self.training, self.evaluate_every = config.training, evaluate_every
        self.signal: int | None = None

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # accelerate hands the epoch on too, if what it wraps around the loader lets it; the order must not depend on that
        kwargs["train_dataloader"].dataset.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step, last = state.global_step, state.global_step >= state.max_steps
        control.should_evaluate = last or step % self.evaluate_every == 0
        control.should_save = control.should_evaluate or step % (self.training.save_every or self.evaluate_every) == 0
        control.should_training_stop = last
        if self.asked_to_stop():
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
        # with a log at every checkpoint, the losses between two logs are the same after a resumption
        control.should_log = control.should_save or step % self.training.log_every == 0
        if step % RELEASE_EVERY == 0:
            release_free_memory()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.signal is not None and args.world_size == 1:
            raise Interrupted

    def on_log(self, args, state, control, logs=None, **kwargs: Any) -> None:
        loss = (logs or {}).get("loss", (logs or {}).get("eval_loss", 0.0))
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {state.global_step}; the last checkpoint from before is kept. "
                "Train again, in another folder, with a smaller training.learning_rate or a longer training.warmup"
            )

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training.patience is not None and evaluations_without_gain(state, args) >= self.training.patience:
            control.should_training_stop = True

    def asked_to_stop(self) -> bool:
        """Whether any of the processes has had a signal: all must stop at the same step."""
        if not distributed.is_available() or not distributed.is_initialized():
            return self.signal is not None
        asked = torch.tensor(self.signal or 0, device="cuda" if distributed.get_backend() == "nccl" else "cpu")
        distributed.all_reduce(asked, op=distributed.ReduceOp.MAX)
        self.signal = int(asked) or None  # now all of them have had it
        return self.signal is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM lets the step finish and saves; the second ends at once."""
        before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def as_before() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def note(number: int, frame: Any) -> None:
            self.signal = number
            as_before()

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            as_before()


def evaluations_without_gain(state: TrainerState, args: TrainingArguments) -> int:
    """How many evaluations ago the best one was; a function of the history alone, so that a resumed run counts the same."""
    key = f"eval_{args.metric_for_best_model}"
    values = [entry[key] for entry in state.log_history if key in entry]
    if not values:
        return 0
    best = max(values) if args.greater_is_better else min(values)
    return len(values) - 1 - values.index(best)


def evaluation_is_due(state: TrainerState, evaluate_every: int) -> bool:
    """Whether a run died, or was stopped, between a checkpoint and the evaluation that belongs to it."""
    step = state.global_step
    is_evaluated = any(entry["step"] == step and "eval_loss" in entry for entry in state.log_history)
    return step > 0 and (step % evaluate_every == 0 or step >= state.max_steps) and not is_evaluated
