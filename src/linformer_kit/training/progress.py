"""Progress of training: a bar with loss and tokens per second, `metrics.jsonl`, and learning curves."""

import json
import time
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..files import write_text
from ..plots.curves import draw_curves
from .metrics import task_metrics
from .run import RunFolder

# minimum time between lines when the output is not a terminal
SECONDS_BETWEEN_LINES = 10.0


class MetricsFile(TrainerCallback):
    """Writes every loss and every evaluation to `metrics.jsonl`, and plots them."""

    def __init__(self, run: RunFolder, resumed_at: int):
        self.run = run
        if run.metrics.exists() and PartialState().is_main_process:  # later steps are repeated
            write_text(
                run.metrics,
                "".join(json.dumps(line) + "\n" for line in read_metrics(run.metrics) if line["step"] <= resumed_at),
            )

    def on_log(self, args, state: TrainerState, control, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or not ("loss" in logs or "eval_loss" in logs):
            return
        line: dict[str, Any] = {"step": state.global_step, "epoch": round(logs.get("epoch", 0.0), 4)}
        if "loss" in logs:
            line |= {
                name: logs[name] for name in ("loss", "learning_rate", "grad_norm", "tokens_per_second") if name in logs
            }
            line["tokens"] = state.num_input_tokens_seen
        else:
            line |= validation_metrics(logs)
        with self.run.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def on_evaluate(self, args, state: TrainerState, control, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            draw_curves({self.run.folder.name: read_metrics(self.run.metrics)}, self.run.curves)


def validation_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics of an evaluation, prefixed with `validation_`."""
    return {f"validation_{name}": value for name, value in task_metrics(metrics, "eval_").items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; damaged lines, as after a crash, are skipped."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


class Bar(TrainerCallback):
    """A progress bar on a terminal, an occasional line elsewhere."""

    def __init__(self, console: Console):
        self.console, self.last_line = console, 0.0
        self.progress: Progress | None = None
        self.training = self.evaluation = TaskID(0)
        self.status = ""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.console.is_terminal:
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
        )
        self.progress = Progress(
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            refresh_per_second=2,
        )
        self.training = self.progress.add_task(
            "training", total=state.max_steps, completed=state.global_step, status=""
        )
        self.evaluation = self.progress.add_task("evaluating", visible=False, status="")
        self.progress.start()

    def on_step_end(self, args, state: TrainerState, control, **kwargs: Any) -> None:
        if self.progress:
            self.progress.update(self.training, completed=state.global_step)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs: Any) -> None:
        if self.progress:
            self.progress.update(self.evaluation, visible=True, total=len(eval_dataloader), advance=1)

    def on_log(self, args, state: TrainerState, control, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        speed = logs.get("tokens_per_second")
        self.status = f"loss {logs['loss']:.4f}" + (f"  {speed:,.0f} tokens/s" if speed else "")
        if self.progress:
            self.progress.update(self.training, status=self.status)
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            self.console.print(
                f"step {state.global_step}/{state.max_steps}  {self.status}", highlight=False, soft_wrap=True
            )

    def on_evaluate(
        self, args, state: TrainerState, control, metrics: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self.progress:
            self.progress.reset(self.evaluation, visible=False)
        found = format_metrics(validation_metrics(metrics or {}))
        self.console.print(
            f"step {state.global_step}/{state.max_steps}  {self.status}  {found}", highlight=False, soft_wrap=True
        )

    def on_train_end(self, args, state, control, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        if self.progress:
            self.progress.stop()
            self.progress = None


def format_metrics(metrics: dict[str, Any]) -> str:
    """Metrics as one line, without counts and signatures.

    >>> format_metrics({"validation_loss": 0.51234, "validation_tokens": 10})
    'validation loss 0.5123'
    """
    return "  ".join(
        f"{name.replace('_', ' ')} {value:.4f}"
        for name, value in metrics.items()
        if isinstance(value, float) and "signature" not in name
    )
