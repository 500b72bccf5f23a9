"""What models learn on real data, Linformers beside full attention: `make results`.

python benchmarks/learning.py --data ../shared/data              # all tables; the folders in it are named in learning_tables.py
python benchmarks/learning.py --data FOLDER masked_lm imdb       # some of them
python benchmarks/learning.py --summary                          # the pictures and summaries again, from the CSVs

Writes to results/learning/, for each table: NAME.csv (a row per run), NAME_curves.csv (its evaluations), NAME_summary.csv (mean and
spread over seeds) and NAME.png; causal_lm_generation.csv; overview.csv and overview.png, all tables side by side.

- A run is `linformer train` with a shipped configuration and what learning_tables.py sets beside it, then `linformer evaluate` on
  the test split. The best checkpoint is chosen on the validation split; nothing is ever chosen by the test split.
- Within a table everything is the same but what the variant names. Runs go one after another, as many at a time as there are
  cores, one thread each: times are of such runs, side by side.
- Seconds of an epoch come from the median of the tokens per second while training, evaluations and checkpoints left out. Memory
  is what the longest batch takes at its peak, weights and AdamW included, in a process of its own (learning_memory.py).
- The first seed of everything comes first. Every run is kept as soon as it has ended, and one that was stopped goes on from its
  last checkpoint: stop at any time, run again to go on.
"""

import gzip
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from learning_generation import GENERATION, measure_generation
from learning_summary import overview, summarise
from learning_tables import CAUSAL_LM, KEYS, TABLES, VALUES, LearningTable
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors import safe_open

from linformer_kit.bench.run import alone_in, fail, require_writable
from linformer_kit.bench.subprocess_call import PLAIN_ALLOCATION
from linformer_kit.csv_tables import Row, Table
from linformer_kit.errors import UserError
from linformer_kit.files import write_atomically
from linformer_kit.models.configuration_linformer import LinformerConfig
from linformer_kit.training.config import DERIVED_FIELDS, config_to_dict, load_config, resolve_model_config
from linformer_kit.training.progress import read_metrics
from linformer_kit.training.run import CHANGEABLE_KEYS, RunFolder, flatten_keys

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
LINFORMER, MEMORY = ("-m", "linformer_kit.cli"), ROOT / "benchmarks" / "learning_memory.py"
CURVE_KEYS, CURVE_VALUES = ("variant", "seed", "step"), ("tokens", "loss", "metric")
# what does not change what is learnt, or is told in a column of its own
NOT_SETTINGS = CHANGEABLE_KEYS | {"seed", "data.path", "data.name", "data.revision"}


@dataclass(frozen=True)
class Job:
    """One run of a table."""

    table: LearningTable
    variant: str
    seed: int
    data: str | None
    runs: Path
    start: "Job | None" = None  # the run whose model this one goes on from

    @property
    def key(self) -> dict[str, Any]:
        return {"variant": self.variant, "seed": self.seed}

    @property
    def overrides(self) -> list[str]:
        """What is set beside the shipped configuration."""
        return [*self.table.settings, *self.table.variants[self.variant]]

    @property
    def fingerprint(self) -> str:
        """Changes with any setting that changes what is learnt; the model counts as it is built, defaults filled in."""
        config = load_config(self.table.config, [*self.from_start, *self.overrides])
        model = resolve_model_config(config.model).to_dict()
        tree = config_to_dict(config) | {
            "model": {name: model[name] for name in LinformerConfig.__annotations__ if name not in DERIVED_FIELDS}
        }
        settings = {key: value for key, value in flatten_keys(tree) if key not in NOT_SETTINGS}
        if self.start is not None:
            settings["start"] = self.start.fingerprint
        if self.table.sentences > 1:
            settings["sentences"] = f"{self.table.sentences}, shuffled"
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def folder(self) -> RunFolder:
        return RunFolder(
            self.runs / self.table.name / f"{self.variant}-seed{self.seed}-{self.fingerprint}".replace(" ", "-")
        )

    @property
    def from_start(self) -> list[str]:
        """The model to start from, if there is one, in place of the sizes in the configuration."""
        return [] if self.start is None else [f"model={{from: {json.dumps(str(self.start.folder.model))}}}"]

    @property
    def arguments(self) -> list[str]:
        """What `linformer train` is given."""
        path = [] if self.data is None else [f"data.path={json.dumps(self.data)}"]
        here = [f"run={json.dumps(str(self.folder.folder))}", f"seed={self.seed}"]
        return [self.table.config, *self.from_start, *self.overrides, *path, *here]


# running


class Processes:
    """The commands that run at this moment, so that all of them can be told to stop."""

    def __init__(self, threads: int):
        self.environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self.running: set[subprocess.Popen] = set()
        self.stopped = threading.Event()

    def run(self, arguments: list[str], log: Path, **environment: str) -> None:
        """Run Python with these arguments."""
        if self.stopped.is_set():
            raise KeyboardInterrupt
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as output:
            command, environment = [sys.executable, *arguments], {**self.environment, **environment}
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            self.running.add(process)
            process.wait()
            self.running.discard(process)
        if self.stopped.is_set():
            raise KeyboardInterrupt
        if process.returncode:
            last = log.read_text(encoding="utf-8").strip().splitlines()[-1:]
            raise UserError(f"python {' '.join(arguments)} has failed: {' '.join(last)}; all it said is in {log}")

    def stop(self) -> None:
        self.stopped.set()
        for process in list(self.running):
            process.send_signal(signal.SIGTERM)


def run_job(job: Job, processes: Processes, start: Future | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train and evaluate, once the run it starts from has ended: the row of the run, and its curve."""
    if start is not None:
        start.result()
    folder, log = job.folder, job.folder.folder.with_suffix(".log")
    processes.run([*LINFORMER, "train", *job.arguments], log)
    found: dict[str, Any] = {}
    for beams in job.table.beams:
        processes.run([*LINFORMER, "evaluate", str(folder.folder), "--beams", str(beams)], log)
        evaluation = json.loads(folder.evaluation.read_text(encoding="utf-8"))
        suffix = f"_beam{beams}" if beams > 1 else ""
        found |= {f"{name}{suffix}": evaluation[name] for name in ("bleu", "chrf") if name in evaluation}
        found |= {name: evaluation[name] for name in ("loss", "perplexity", "accuracy") if name in evaluation}
    result = json.loads(folder.result.read_text(encoding="utf-8"))
    metrics = read_metrics(folder.metrics)
    rates = [line["tokens_per_second"] for line in metrics if "tokens_per_second" in line]
    tokens_per_epoch = result["tokens"] / max(line["epoch"] for line in metrics)
    row = {
        **job.key,
        "settings": " ".join(job.overrides),
        "fingerprint": job.fingerprint,
        "parameters": parameters_of(folder.model),
        "steps": result["steps"],
        "best_step": result["best_step"],
        "tokens": result["tokens"],
        "validation": result.get(f"validation_{job.table.metric}"),
        **{f"test_{name}": value for name, value in found.items()},
        "tokens_per_second": statistics.median(rates),
        "seconds_per_epoch": tokens_per_epoch / statistics.median(rates),
        "peak_mib": peak_mib(job, processes, log),
    }
    return row, list(curve_of(job, metrics))


def peak_mib(job: Job, processes: Processes, log: Path) -> float:
    """What training takes at its peak."""
    path = job.folder.folder / "memory.json"
    processes.run([str(MEMORY), str(path), *job.arguments], log, **PLAIN_ALLOCATION)
    return json.loads(path.read_text(encoding="utf-8"))["peak_mib"]


def curve_of(job: Job, metrics: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The evaluations of a run."""
    metric = "accuracy" if job.table.metric == "accuracy" else "perplexity"
    tokens = 0
    for line in metrics:
        tokens = line.get("tokens", tokens)
        if "validation_loss" in line:
            values = {"loss": line["validation_loss"], "metric": line[f"validation_{metric}"]}
            yield {**job.key, "step": line["step"], "tokens": tokens, **values}


def parameters_of(folder: Path) -> int:
    """How many numbers a saved model has; what is shared is saved once."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                size = 1
                for length in file.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


# data


def documents(source: Path, folder: Path, pairs: int) -> Path:
    """Translations of several hundred tokens: so many pairs of Tatoeba joined into one, split by split.

    Those to train on have 1, 2, … pairs and then 1 again, so that there are easy ones among them; all those held out have `pairs`.
    Pairs to train on are shuffled first: in Tatoeba all translations of a sentence stand together, in its held-out files none do.
    """
    target = folder / f"{source.name}-joined-{pairs}"
    target.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        with gzip.open(source / f"{split}.tsv.gz", "rt", encoding="utf-8", newline="") as file:
            rows = [line.rstrip("\n").split("\t") for line in file]
        if split == "train":
            Random(0).shuffle(rows)
        lines, start, size = [], 0, 1 if split == "train" else pairs
        while start + size <= len(rows):
            joined = rows[start : start + size]
            lines.append(" ".join(row[0] for row in joined) + "\t" + " ".join(row[1] for row in joined) + "\n")
            start += size
            if split == "train":
                size = 1 + size % pairs
        path, text = target / f"{split}.tsv", "".join(lines)
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # a new file would be prepared anew
            write_atomically(path, lambda part, text=text: part.write_text(text, "utf-8"))
    return target


def data_of(table: LearningTable, data: Path | None, runs: Path) -> str | None:
    """Where a table finds its data; None for what the configuration names, on the hub or made by ourselves."""
    if table.data is None:
        return None
    if data is None:
        if not table.is_on_hub:
            raise UserError(f"the table {table.name} needs local data: give --data FOLDER, with {table.data}/ in it")
        return None
    folder = data / table.data
    if not folder.is_dir():
        raise UserError(f"--data is {data}, which has no folder {table.data}; the table {table.name} needs it")
    return str(documents(folder, runs / "data", table.sentences) if table.sentences > 1 else folder)


# all of it


def with_starts(tables: list[LearningTable]) -> list[LearningTable]:
    """These tables and those whose models they start from."""
    starts = [TABLES[table.starts_from[0]] for table in tables if table.starts_from is not None]
    return [*tables, *with_starts(starts)] if starts else tables


def job_of(table: LearningTable, variant: str, seed: int, paths: dict[str, str | None], runs: Path) -> Job:
    """A run, with the one it starts from; `paths` says where each table finds its data."""
    start = None
    if table.starts_from is not None:
        name, other = table.starts_from
        start = job_of(TABLES[name], other or variant, seed, paths, runs)
    return Job(table, variant, seed, paths.get(table.name), runs, start)


def jobs_of(tables: list[LearningTable], data: Path | None, runs: Path) -> list[Job]:
    """Every run of these tables, the first seeds of all before the second ones."""
    paths = {table.name: data_of(table, data, runs) for table in with_starts(tables)}
    found = [
        job_of(table, variant, seed, paths, runs)
        for table in tables
        for variant in table.variants
        for seed in range(table.seeds_of(variant))
    ]
    return sorted(found, key=lambda job: job.seed)


def missing_of(jobs: list[Job], tables: dict[str, Table]) -> list[Job]:
    """What is still to be run, in this order; a run that another one starts from is run again if its model is gone."""
    found: dict[Path, Job] = {}

    def add(job: Job) -> None:
        if job.start is not None and not job.start.folder.result.exists():
            add(job.start)
        found.setdefault(job.folder.folder, job)

    for job in jobs:
        if not is_done(job, tables[job.table.name]):
            add(job)
    return list(found.values())


def table_in(folder: Path, table: LearningTable) -> Table:
    return Table(folder / f"{table.name}.csv", KEYS, VALUES)


def curves_in(folder: Path, table: LearningTable) -> Table:
    return Table(folder / f"{table.name}_curves.csv", CURVE_KEYS, CURVE_VALUES)


def is_done(job: Job, table: Table) -> bool:
    row = table.get(**job.key)
    return row is not None and row["fingerprint"] == job.fingerprint


def current_rows(folder: Path, table: LearningTable, console: Console) -> Table | None:
    """What was measured with the settings of today; the rest is named and left out."""

    def is_current(row: Row) -> bool:
        variant = row["variant"]
        return variant in table.variants and row["fingerprint"] == job_of(table, variant, 0, {}, Path()).fingerprint

    rows = table_in(folder, table)
    for row in rows.rows():
        if not is_current(row):
            console.print(
                f"{table.name}: {row['variant']}, seed {row['seed']}, was run with other settings and is left out"
            )
    found = rows.only(is_current)
    return found if any(found.rows()) else None


def interrupt(*_: object) -> None:
    """A SIGTERM stops like Ctrl-C."""
    raise KeyboardInterrupt


def run_all(jobs: list[Job], output: Path, at_once: int, console: Console) -> None:
    """Run what is missing, so many at a time."""
    there = {table.name: table for table in with_starts([job.table for job in jobs])}
    tables = {name: table_in(output, table) for name, table in there.items()}
    curves = {name: curves_in(output, table) for name, table in there.items()}
    missing = missing_of(jobs, tables)
    processes = Processes(max(1, (os.cpu_count() or 1) // at_once))
    signal.signal(signal.SIGTERM, interrupt)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(at_once) as pool:
        task = progress.add_task("runs", total=len(missing))
        running: dict[Future, Job] = {}
        futures: dict[Path, Future] = {}
        for job in missing:
            start = None if job.start is None else futures.get(job.start.folder.folder)
            future = futures[job.folder.folder] = pool.submit(run_job, job, processes, start)
            running[future] = job
        try:
            for done in as_completed(running):
                job, (row, curve) = running[done], done.result()
                curves[job.table.name].put(curve)
                tables[job.table.name].put([row])  # the last: with it the run counts as done
                metric = job.table.metric
                shown = f"{job.table.name}: {job.variant}, seed {job.seed}: test {metric} {row[f'test_{metric}']:.4g}"
                console.print(f"{shown}, {row['seconds_per_epoch']:.0f} s per epoch", highlight=False, soft_wrap=True)
                progress.advance(task)
        except BaseException:
            for future in running:
                future.cancel()
            processes.stop()
            raise


def generate_with(jobs: list[Job], output: Path) -> None:
    """Measure how the causal LMs generate, unless that was done or one of them is not there yet."""
    models = {job.variant: job.folder.model for job in jobs if job.table is CAUSAL_LM and job.seed == 0}
    if models and not (output / GENERATION).exists() and all(path.is_dir() for path in models.values()):
        measure_generation(models, output)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Which tables; all if none is given.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with local copies of the data sets.")] = None,
    output: Annotated[
        Path, typer.Option(help="Folder of the results; tables and pictures go to learning/ in it.")
    ] = RESULTS,
    runs: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs") / "learning",
    at_once: Annotated[int, typer.Option(min=1, help="How many runs at a time; they share the cores.")] = os.cpu_count()
    or 1,
    summary: Annotated[bool, typer.Option(help="Only draw and summarise what is there.")] = False,
) -> None:
    """Train, evaluate, tabulate and draw; what is there already is kept."""
    console = Console()
    if unknown := set(names or ()) - TABLES.keys():
        fail(f"there is no table {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    chosen = [TABLES[name] for name in names or TABLES]
    if not (names or data or summary) and (local := [table.name for table in chosen if not table.is_on_hub]):
        console.print(f"left out, because they need --data FOLDER: {', '.join(local)}")
        chosen = [table for table in chosen if table.is_on_hub]
    output = output / "learning"
    try:
        require_writable(output)
        if not summary:
            with alone_in(output):
                jobs = jobs_of(chosen, data, runs.resolve())
                generate_with(jobs, output)  # before others run beside it
                run_all(jobs, output, at_once, console)
                generate_with(jobs, output)
        shown = [(table, rows) for table in TABLES.values() if (rows := current_rows(output, table, console))]
        for table, rows in shown:
            if table in chosen:
                summarise(table, rows, curves_in(output, table), output, console)
        overview(shown, output)
    except KeyboardInterrupt:
        print("stopped; runs go on from their last checkpoints with the same command", file=sys.stderr)
        raise typer.Exit(130) from None
    except UserError as error:
        fail(str(error))


if __name__ == "__main__":
    typer.run(main)
