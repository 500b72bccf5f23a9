"""The summary that `train` prints first: examples, tokens, parameters, steps, memory and time."""

from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import TrainerState

from ..formatting import plural
from ..process_memory import is_out_of_memory, preloaded_allocator
from .batches import Examples
from .config import RunConfig
from .estimate import estimate
from .model import count_parameters
from .prepare import Prepared
from .tokens import format_names
from .trainer import LinformerTrainer


def announce(
    trainer: LinformerTrainer, prepared: Prepared, config: RunConfig, state: TrainerState | None, console: Console
) -> None:
    """Print the summary of a run."""
    if not console.quiet:
        console.print(announcement(trainer, prepared, config, state))


def announcement(trainer: LinformerTrainer, prepared: Prepared, config: RunConfig, state: TrainerState | None) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for role, rows in prepared.splits.items():
        table.add_row(f"{role} examples", describe_split(rows, prepared.summary["splits"].get(role)))
    if prepared.labels:
        table.add_row("labels", format_names(prepared.labels))
    total, projections = count_parameters(trainer.model)
    table.add_row("parameters", f"{total:,}, including {projections:,} in E and F")
    done = state.global_step if state else 0
    steps = trainer.args.max_steps
    table.add_row(
        "steps", f"{steps:,} of {config.training.batch_size} examples" + (f", resuming at {done:,}" if done else "")
    )
    memory, duration = "more than is available", "unknown"
    try:
        with trainer.accelerator.autocast():
            cost = estimate(
                trainer.model,
                *probe_batches(trainer),
                config.training.accumulate,
                config.training.gradient_checkpointing,
            )
        memory = f"about {format_bytes(cost.bytes)} for weights, gradients, AdamW and the longest batch"
        duration = f"about {format_time(cost.seconds * (steps - done))} without evaluations"
    except (MemoryError, RuntimeError) as error:
        # training may still fit into memory: the estimate uses a copy of the model
        if not is_out_of_memory(error):
            raise
    allocator = preloaded_allocator()
    table.add_row("memory", memory + (f"; allocator: {allocator}" if allocator else ""))
    table.add_row("time", duration)
    processes = plural(trainer.accelerator.num_processes, "process")
    compiled = ", compiled" if config.training.compile else ""
    table.add_row("device", f"{trainer.args.device}, {processes}, {precision_of(trainer)}{compiled}")
    return table


def describe_split(rows: Any, counts: dict[str, Any] | None) -> str:
    """Numbers of examples, tokens and truncated texts."""
    if counts is None:
        return "streamed"
    parts = [f"{len(rows):,}"]
    for name, what in (("length", "tokens"), ("target_length", "target tokens")):
        if name in counts:
            parts.append(f"{counts[name]['tokens']:,} {what}")
            if counts[name]["cut_texts"] and name in rows.column_names:  # packed texts are not truncated
                parts.append(f"{counts[name]['cut_texts']:,} texts truncated by {counts[name]['cut_tokens']:,} tokens")
    return ", ".join(parts)


def probe_batches(trainer: LinformerTrainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The longest and a typical batch of one process; for a stream, the first batch twice."""
    examples, size = trainer.train_dataset, trainer.args.per_device_train_batch_size
    if isinstance(examples, Examples):
        order = examples.lengths.argsort(kind="stable")[::-1].tolist()
        middle = max(0, len(order) // 2 - size // 2)
        batches = [examples.__getitems__(indices) for indices in (order[:size], order[middle : middle + size])]
    else:
        batches = [list(islice(examples, size))] * 2
    longest, typical = (
        {name: tensor.to(trainer.args.device) for name, tensor in trainer.data_collator(batch).items()}
        for batch in batches
    )
    return longest, typical


def precision_of(trainer: LinformerTrainer) -> str:
    return {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.accelerator.mixed_precision, "float32")


def format_bytes(count: float) -> str:
    """
    >>> format_bytes(3_400_000)
    '3 MB'
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def format_time(seconds: float) -> str:
    """
    >>> format_time(42), format_time(4000)
    ('42 s', '1 h 7 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
