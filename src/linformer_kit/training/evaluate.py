"""Evaluates a finished run or a checkpoint on a split of its data or on another file."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainingArguments

from ..errors import UserError
from ..files import write_text
from .arguments import inference_precision, is_on_gpu
from .batches import PaddingCollator, task_transform
from .config import RunConfig
from .data import check_columns, is_language_model, read_sources
from .load import labels_of_model, load_model, quiet_libraries
from .metrics import confusion, task_metrics, translation_metrics
from .model import max_length
from .prepare import prepare
from .run import RunFolder, open_model
from .sources import find_sources
from .tokens import length_statistics, pack, tokenize
from .train import evaluation_examples
from .trainer import LinformerTrainer
from .translate import batch_size_of, translations

LABELS = {"cut_texts": "truncated texts"}  # of metrics in the printed table; others show their key


def evaluate(
    source: Path | str,
    split: str = "test",
    data: str | None = None,
    beams: int = 1,
    precision: str = "auto",
    compile: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Compute the metrics on a split, or on the file or directory `data`, and write them to `evaluation.json`.

    `source` is a finished run, a checkpoint or a W&B artifact (`open_model`). The results of a checkpoint have file
    names of their own, such as `evaluation-checkpoint-75.json`. `precision` is that of `inference_precision`.
    """
    console = console or Console(stderr=True)
    quiet_libraries()
    datasets.disable_progress_bars()
    trained = open_model(source)
    run, config = trained.run, trained.config
    state = PartialState(cpu=not is_on_gpu(config.training))
    if not state.is_main_process:
        console = Console(quiet=True)
    chosen = inference_precision(precision, trained)
    model, tokenizer = load_model(trained, chosen, compile)
    labels = labels_of_model(model) if config.task == "classification" else []
    with tempfile.TemporaryDirectory() as temporary:
        if data is None:
            with state.main_process_first():
                rows, counts = prepared_rows(run, config, split, tokenizer, labels, console)
        else:
            # the initial model (`model.from`) may no longer exist
            length = {"max_position_embeddings": model.config.max_position_embeddings}
            rows, counts = read_evaluation_file(replace(config, model=length), data, tokenizer, labels, Path(temporary))
        origin = data or config.data.path or config.data.generated
        metrics: dict[str, Any] = {"split": split if data is None else None, "data": origin, "rows": len(rows)}
        metrics["precision"] = chosen
        metrics |= measure(config, model, tokenizer, rows, labels)
        metrics["cut_texts"] = 0 if is_language_model(config.task) else counts["length"]["cut_texts"]
        if config.task == "translation":
            hypotheses, references = translations(model, tokenizer, rows, batch_size_of(config), console, beams)
            metrics |= {"beams": beams, **translation_metrics(hypotheses, references)}
            if state.is_main_process:
                write_translations(trained.output("translations.jsonl"), rows["source"], hypotheses, references)
    if state.is_main_process:
        path = trained.output(run.evaluation.name)
        write_text(path, json.dumps(metrics, indent=1, ensure_ascii=False))
        if run.folder != Path(source):
            console.print(f"Written: {path}", highlight=False, markup=False, soft_wrap=True)
    return metrics


def write_translations(path: Path, sources: list[str], hypotheses: list[str], references: list[str]) -> None:
    """Write each source with its translation and its reference as JSON lines."""
    lines = [
        json.dumps({"source": source, "hypothesis": hypothesis, "reference": reference}, ensure_ascii=False)
        for source, hypothesis, reference in zip(sources, hypotheses, references, strict=True)
    ]
    write_text(path, "\n".join(lines) + "\n")


def prepared_rows(
    run: RunFolder,
    config: RunConfig,
    split: str,
    tokenizer: PreTrainedTokenizerFast,
    labels: list[str],
    console: Console,
) -> tuple[Any, dict[str, Any]]:
    """A split of the data of the run."""
    prepared = prepare(config, console)
    trained_with = json.loads(run.data.read_text(encoding="utf-8"))["splits"]
    is_changed = split in trained_with and prepared.summary["splits"].get(split) != trained_with[split]
    if is_changed or prepared.tokenizer.get_vocab() != tokenizer.get_vocab() or prepared.labels != labels:
        raise UserError(
            f"{config.data.path} has changed since the run was trained: it yields different examples, tokens or "
            "labels; evaluate on a file with --data"
        )
    if split not in prepared.splits:
        raise UserError(
            f"the data of the run has no {split} split; choose one of {', '.join(prepared.splits)} with --split, "
            "or a file with --data"
        )
    if split not in prepared.summary["splits"]:
        raise UserError(f"the {split} split is streamed; evaluate on validation, or on a file with --data")
    return prepared.splits[split], prepared.summary["splits"][split]


def read_evaluation_file(
    config: RunConfig, data: str, tokenizer: PreTrainedTokenizerFast, labels: list[str], temporary: Path
) -> tuple[Any, dict[str, Any]]:
    """Read and tokenize another file in the same way as the data of the run."""
    if not Path(data).exists():
        raise UserError(f"--data is {data!r}: there is no such file or directory")
    config = replace(config, data=replace(config.data, path=data, generated=None, streaming=False))
    sources = find_sources(config.data, config.task) or {}
    name = "test" if "test" in sources else next(iter(sources))
    if len(sources) > 1 and name != "test":
        raise UserError(f"{data} has the splits {', '.join(sources)}; pass one file")
    rows: Any = read_sources(sources[name], config.data, "file")
    check_columns(rows, config, "given")
    tokens = tokenize(rows, config, tokenizer, labels, "evaluation")
    counts = length_statistics(tokens, max_length(config))
    if is_language_model(config.task):
        tokens = pack(tokens, max_length(config), temporary / "packed.arrow")
    if len(tokens) == 0:
        raise UserError(f"{data} contains no text")
    return tokens, counts


def measure(
    config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: Any, labels: list[str]
) -> dict[str, Any]:
    """The metrics of the task; for classification also the confusion matrix."""
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        per_device_eval_batch_size=batch_size_of(config),
        remove_unused_columns=False,
        label_names=["labels"],
        use_cpu=model.device.type == "cpu",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = LinformerTrainer(
        config=config, keep=1, model=model, args=arguments, data_collator=PaddingCollator(tokenizer.pad_token_id)
    )
    output = trainer.predict(evaluation_examples(rows, task_transform(config, tokenizer)))
    metrics = task_metrics(output.metrics, "test_")
    if config.task == "classification":
        matrix = confusion(output.predictions.argmax(axis=1), output.label_ids, len(labels))
        metrics |= {"labels": labels, "confusion": matrix.tolist()}
    return metrics


def table_of(metrics: dict[str, Any]) -> Table:
    """The metrics of an evaluation as a table to print."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in metrics.items():
        if isinstance(value, float | int | str):
            table.add_row(
                LABELS.get(name, name.replace("_", " ")), f"{value:.4f}" if isinstance(value, float) else f"{value}"
            )
    return table
