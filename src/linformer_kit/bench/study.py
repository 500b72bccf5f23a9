"""`linformer study`: trains and evaluates the variants of tables, and stores, summarizes and draws the results.

A run is `linformer train`, then `linformer evaluate` on the test split. It is stored when it ends, and a stopped run
resumes from its last checkpoint.
"""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..csv_tables import Table
from ..errors import Stopped, UserError
from ..files import check_writable, lock
from ..formatting import progress_bar, say
from ..training.announce import probe_batches
from ..training.arguments import resolve_hardware
from ..training.config import load_config
from ..training.prepare import prepare
from ..training.progress import read_metrics
from ..training.run import RunFolder
from ..training.train import make_trainer
from .isolated import PLAIN_ALLOCATION, peak_of, run_worker
from .measure import OK
from .study_summary import write_overview, write_summary
from .study_tables import COLUMNS, INITIAL_MODEL, Job, Study, load_tables


def run(
    path: Path, names: list[str], data: Path | None, output: Path, runs: Path, at_once: int | None, summary: bool
) -> None:
    """Run the command: the named tables, or all. Existing results are kept."""
    console, tables, command = Console(), load_tables(path), f"linformer study {path}"
    study, chosen = Study(tables, output, runs.resolve(), data and data.resolve()), names or list(tables)
    if unknown := set(names) - tables.keys():
        raise UserError(f"there is no table {', '.join(sorted(unknown))} in {path}; tables: {', '.join(tables)}")
    if not (names or data or summary) and (local := [name for name in tables if tables[name].local_only]):
        say(console, f"skipped, because they need --data DIRECTORY: {', '.join(local)}")
        chosen = [name for name in tables if name not in local]
    if not summary:
        run_jobs(study, chosen, at_once, console)
    current = {name: rows for name in tables if any((rows := current_rows(study, name, console)).rows())}
    if not current:
        raise UserError(f"{output} has no results of {path}; run it without --summary first")
    for name in [name for name in chosen if name in current]:
        write_summary(study, name, current[name], f"{command} {name}", console)
    write_overview([(tables[name], rows) for name, rows in current.items()], command, output)
    say(console, f"Tables and figures in {output}")


def current_rows(study: Study, name: str, console: Console) -> Table:
    """The rows with today's settings; others are reported and ignored."""
    rows, prints = study.rows(name), {key: study.job(name, key).fingerprint for key in study.tables[name].variants}
    for row in rows.rows():
        if row["fingerprint"] != prints.get(row["variant"]):
            say(console, f"{name}: {row['variant']}, seed {row['seed']}, was run with other settings and is ignored")
    return rows.only(lambda row: row["fingerprint"] == prints.get(row["variant"]))


# runs


def run_jobs(study: Study, names: list[str], at_once: int | None, console: Console) -> None:
    """Run what is missing in the named tables, `at_once` runs at a time."""
    # runs can share the cores, but hardly the memory of a GPU
    at_once = at_once or (1 if torch.cuda.is_available() else os.cpu_count() or 1)
    remedy = "choose another directory with --output"
    check_writable(study.output, remedy)
    study.output.mkdir(parents=True, exist_ok=True)
    with lock(study.output / ".lock", f"another run is writing to {study.output}; wait for it, or {remedy}"):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by default in the background of a script
        received: list[int] = []

        def stop(number: int, frame: object) -> None:
            received.append(number)
            signal.raise_signal(signal.SIGINT)  # which asyncio handles

        signal.signal(signal.SIGTERM, stop)
        try:
            asyncio.run(run_all(study, study.missing_jobs(names), at_once, console))
        except KeyboardInterrupt:
            code = 128 + (received or [signal.SIGINT])[0]
            raise Stopped("Stopped. The same command resumes the runs from their last checkpoints.", code) from None


async def run_all(study: Study, jobs: list[Job], at_once: int, console: Console) -> None:
    """Run each job as a task; if one fails or Ctrl-C is pressed, the others are canceled."""
    threads = max(1, (os.cpu_count() or 1) // at_once)
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    slots, tasks = asyncio.Semaphore(at_once), dict[Path, asyncio.Task[None]]()

    async def run_in_slot(job: Job, arguments: list[str]) -> None:
        async with slots:
            if job.start is not None and job.start.run.folder in tasks:
                await tasks[job.start.run.folder]
            say(console, await run_job(study, job, arguments, environment))
        advance("")

    with progress_bar(console, "runs", len(jobs)) as advance:
        for job in jobs:  # no task starts before all have their arguments
            tasks[job.run.folder] = asyncio.create_task(run_in_slot(job, study.arguments(job)))
        await asyncio.gather(*tasks.values())


async def run_job(study: Study, job: Job, arguments: list[str], environment: dict[str, str]) -> str:
    """Train, evaluate and store a run; returns a line about it."""
    folder, scores, metric = job.run.folder, dict[str, Any](), f"test_{job.table.metric}"
    call = partial(run_linformer, folder.with_name(f"{folder.name}.log"), environment)
    await call("train", *arguments)
    for beams in sorted({1, *job.table.beams}):
        await call("evaluate", str(folder), "--beams", str(beams))
        suffix = f"_beam{beams}" if beams > 1 else ""
        found = json.loads(job.run.evaluation.read_text(encoding="utf-8"))
        scores |= {f"test_{name}{suffix}": value for name, value in found.items()}
    peak = await asyncio.to_thread(run_worker, arguments, environment | PLAIN_ALLOCATION, module=__name__)
    row, curve = result_of(job, {**scores, "peak_mib": peak.get("peak_mib")})
    # without the curve of a former run, which may have had other steps
    curves = study.curves(job.name).only(lambda row: (row["variant"], row["seed"]) != (job.variant, str(job.seed)))
    curves.put(curve)
    study.rows(job.name).put([row])  # last: with this row the run counts as done
    problem = "" if peak["status"] == OK else f"; peak memory: {peak['status']} {peak.get('note', '')}".rstrip()
    score = f"{metric.replace('_', ' ')} {row[metric]:.4g}, {row['seconds_per_epoch']:.3g} s per epoch{problem}"
    return f"{job.name}: {job.variant}, seed {job.seed}: {score}"


def result_of(job: Job, scores: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The row of a finished run, and its validation curve."""
    result, metrics = json.loads(job.run.result.read_text(encoding="utf-8")), read_metrics(job.run.metrics)
    key = {"variant": job.variant, "seed": job.seed}
    # evaluations and checkpoints take no part in it
    rate = statistics.median(line["tokens_per_second"] for line in metrics if "tokens_per_second" in line)
    row = {
        **key,
        "settings": " ".join(each for each in job.overrides if not each.startswith(INITIAL_MODEL)),
        "fingerprint": job.fingerprint,
        **{name: result[name] for name in ("parameters", "steps", "best_step", "tokens")},
        "validation": result.get(f"validation_{job.table.metric}"),
        **{name: value for name, value in scores.items() if name in COLUMNS},
        "tokens_per_second": rate,
        "seconds_per_epoch": result["tokens"] / max(line["epoch"] for line in metrics) / rate,
    }
    curve, tokens = [], 0
    metric = "accuracy" if job.table.metric == "accuracy" else "perplexity"  # BLEU is computed after training only
    for line in metrics:
        tokens = line.get("tokens", tokens)
        if "validation_loss" in line:
            values = {"loss": line["validation_loss"], "metric": line[f"validation_{metric}"]}
            curve.append({**key, "step": line["step"], "tokens": tokens, **values})
    return row, curve


async def run_linformer(log: Path, environment: dict[str, str], *arguments: str) -> None:
    """Run a command and append its output to `log`; a task that is canceled stops the process."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command, variables = [sys.executable, "-m", "linformer_kit.cli", *arguments], {**os.environ, **environment}
    with log.open("a", encoding="utf-8") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output, env=variables)
        try:
            await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                process.terminate()  # training saves a checkpoint
            await process.wait()
            raise
    if process.returncode:
        last = " ".join(log.read_text(encoding="utf-8").strip().splitlines()[-1:])
        raise UserError(f"linformer {' '.join(arguments)} failed: {last}; its complete output is in {log}")


# in a worker process


def peak_mib(name: str, *overrides: str) -> float | None:
    """Peak memory of training on the longest batch, AdamW included.

    The peak of a whole run would say little: it includes libraries, data, and memory that is free
    between batches of many lengths.
    """
    config = load_config(name, list(overrides))
    prepared = prepare(config, Console(quiet=True))

    def train_on_longest_batch() -> None:
        trainer, _ = make_trainer(config, prepared, RunFolder(config.folder))
        longest, _ = probe_batches(trainer)
        model, optimizer = trainer.model.train(), trainer.create_optimizer()
        for _ in range(2):  # only the second step has the states of AdamW from its beginning
            optimizer.zero_grad()
            trainer.compute_loss(model, longest, num_items_in_batch=torch.tensor(1)).backward()
            optimizer.step()

    peak_bytes = peak_of(train_on_longest_batch, resolve_hardware(config).training.device)
    return None if peak_bytes is None else peak_bytes / 2**20


if __name__ == "__main__":
    print(json.dumps({"status": OK, "peak_mib": peak_mib(*json.load(sys.stdin))}))
