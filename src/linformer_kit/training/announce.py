"""What `train` says before it begins: examples, tokens, parameters, steps, memory and time."""

from itertools import islice
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import TrainerState

from .batches import Examples
from .config import RunConfig
from .estimate import estimate
from .model import count_parameters
from .prepare import Prepared
from .tokens import few_of
from .trainer import LinformerTrainer


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
    if prepared.labels:
        table.add_row("labels", few_of(prepared.labels))
    whole, projections = count_parameters(trainer.model)
    table.add_row("parameters", f"{whole:,}, of them {projections:,} of E and F")
    done = state.global_step if state else 0
    steps = trainer.args.max_steps
    table.add_row(
        "steps", f"{steps:,} of {config.training.batch_size} examples" + (f"; goes on at {done:,}" if done else "")
    )
    memory, duration = "more than there is", "unknown"
    try:
        with trainer.accelerator.autocast():
            needed = estimate(
                trainer.model,
                *probe_batches(trainer),
                config.training.accumulate,
                config.training.gradient_checkpointing,
            )
        memory = f"about {in_bytes(needed.bytes)} for weights, gradients, AdamW and the longest batch"
        duration = f"about {in_time(needed.seconds * (steps - done))} without evaluations"
    except torch.OutOfMemoryError:  # training may find room where the copy made for this did not
        pass
    table.add_row("memory", memory)
    table.add_row("time", duration)
    table.add_row(
        "device", f"{trainer.args.device}, {trainer.accelerator.num_processes} process(es), {precision_of(trainer)}"
    )
    return table


def describe_split(rows: Any, counts: dict[str, Any] | None) -> str:
    """Examples, tokens and what was cut."""
    if counts is None:
        return "streamed"
    parts = [f"{len(rows):,}"]
    for name, what in (("length", "tokens"), ("target_length", "target tokens")):
        if name in counts:
            parts.append(f"{counts[name]['tokens']:,} {what}")
            if counts[name]["cut_texts"] and name in rows.column_names:  # packed texts are not cut
                parts.append(f"{counts[name]['cut_texts']:,} texts cut, losing {counts[name]['cut_tokens']:,}")
    return ", ".join(parts)


def probe_batches(trainer: LinformerTrainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The longest and a typical batch of a process; of a stream, the first."""
    examples, size = trainer.train_dataset, trainer.args.per_device_train_batch_size
    if isinstance(examples, Examples):
        order = examples.lengths.argsort(kind="stable")[::-1].tolist()
        middle = max(0, len(order) // 2 - size // 2)
        drawn = [examples.__getitems__(indices) for indices in (order[:size], order[middle : middle + size])]
    else:
        drawn = [list(islice(examples, size))] * 2
    longest, typical = (
        {name: tensor.to(trainer.args.device) for name, tensor in trainer.data_collator(batch).items()}
        for batch in drawn
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
