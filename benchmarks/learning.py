"""Train the models of docs/results.md and tabulate what they learn, Linformer and full attention: `make results`.

python benchmarks/learning.py --data FOLDER              # every table; FOLDER holds the datasets that they name
python benchmarks/learning.py --data FOLDER masked_lm    # one table
python benchmarks/learning.py --summary                  # only summaries and figures, from the existing CSVs

The tables are in benchmarks/learning/tables.yaml. Each writes to results/learning/: NAME.csv (one row per run),
NAME_curves.csv (validation during training), NAME_summary.csv (mean and spread over seeds) and NAME.png.
overview.csv and overview.png show all tables.

- A run is `linformer train`, then `linformer evaluate` on the test split. The checkpoint is the best on the validation
  split; the test split selects nothing.
- As many runs as there are cores train at the same time, with one thread each.
- Seconds per epoch come from the median of the tokens per second during training, without evaluation and checkpoints.
- Seed 0 of every table comes first. A run is stored when it ends, and a stopped run resumes from its last checkpoint.
"""

import asyncio
import contextlib
import gzip
import hashlib
import json
import os
import signal
import statistics
import sys
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import cycle, islice, repeat
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import torch
import typer
from learning_summary import FULL, write_overview, write_summary
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from linformer_kit import LinformerConfig
from linformer_kit.bench.isolated import PLAIN_ALLOCATION
from linformer_kit.bench.measure import peak_memory
from linformer_kit.cli import report_user_errors
from linformer_kit.csv_tables import Row, Table
from linformer_kit.errors import Stopped, UserError
from linformer_kit.files import check_writable, lock, write_text
from linformer_kit.schema import AT_LEAST_1, converted
from linformer_kit.training.announce import probe_batches
from linformer_kit.training.config import DERIVED_FIELDS, config_to_dict, load_config, resolve_model_config
from linformer_kit.training.prepare import prepare
from linformer_kit.training.progress import read_metrics
from linformer_kit.training.run import CHANGEABLE_KEYS, RunFolder, flatten_keys
from linformer_kit.training.train import make_trainer
from linformer_kit.yaml_loader import read_yaml

ROOT = Path(__file__).resolve().parent.parent
TABLES_FILE = ROOT / "benchmarks" / "learning" / "tables.yaml"
COLUMNS = (
    *("settings", "fingerprint", "parameters", "steps", "best_step", "tokens", "validation"),
    *("test_loss", "test_perplexity", "test_accuracy", "test_bleu", "test_chrf", "test_bleu_beam4", "test_chrf_beam4"),
    *("tokens_per_second", "seconds_per_epoch", "peak_mib"),
)
# settings that do not change what a model learns
NOT_IN_FINGERPRINT = CHANGEABLE_KEYS | {"seed", "data.path", "data.name", "data.revision"}


# tables


@dataclass(frozen=True)
class Variant:
    """One model of a table."""

    settings: dict[str, Any] = field(default_factory=dict)
    like: str | None = None  # an earlier variant, whose settings this one extends
    seeds: Annotated[int | None, AT_LEAST_1] = None  # default: the table's
    baseline: str | None = FULL  # null if more than the attention differs


@dataclass(frozen=True)
class LearningTable:
    """Runs that differ only in the settings of their variants and in their seeds."""

    title: str
    config: str  # name of a shipped configuration
    metric: Literal["perplexity", "accuracy", "bleu"]
    variants: dict[str, Variant]
    recommended: str  # the variant in the overview
    name: str = ""
    data: str | None = None  # directory in --data; none if the configuration generates its data
    local_only: bool = False  # needs --data
    sentences: Annotated[int, AT_LEAST_1] = 1  # joined into one example
    settings: dict[str, Any] = field(default_factory=dict)
    seeds: Annotated[int, AT_LEAST_1] = 1
    beams: list[int] = field(default_factory=lambda: [1])
    start_from: str | None = None  # the table whose models, of the same seed, are the initial ones
    start_variant: str | None = None  # default: the variant of the same name


Tables = dict[str, LearningTable]


def load_tables(path: Path) -> Tables:
    """Read and check the tables; errors name the key."""
    tables: Tables = {}

    def check(key: str, value: str | None, names: dict[str, Any]) -> None:
        if value is not None and value not in names:
            raise UserError(f"{key} is {value!r}; allowed: {', '.join(names)}")

    for name, section in converted(read_yaml(path, "a file of tables"), dict[str, Any], str(path)).items():
        table = converted(section, LearningTable, name)
        check(f"{name}.recommended", table.recommended, table.variants)
        check(f"{name}.start_from", table.start_from, tables)
        variants: dict[str, Variant] = {}
        for key, variant in table.variants.items():
            check(f"{name}.variants.{key}.baseline", variant.baseline, table.variants)
            check(f"{name}.variants.{key}.like", variant.like, variants)
            if table.start_from:
                check(f"{name}.start_variant", table.start_variant or key, tables[table.start_from].variants)
            variants[key] = replace(
                variant,
                settings={**(variants[variant.like].settings if variant.like else {}), **variant.settings},
                seeds=variant.seeds or table.seeds,
                baseline=None if key == FULL else variant.baseline,
            )
        tables[name] = replace(table, name=name, variants=variants)
    return tables


# jobs


@dataclass(frozen=True)
class Job:
    """One run of a table."""

    tables: Tables
    name: str  # of its table
    variant: str
    seed: int = 0
    runs: Path = Path()
    data: Path | None = None  # the directory of all datasets

    @property
    def table(self) -> LearningTable:
        return self.tables[self.name]

    @cached_property
    def start(self) -> "Job | None":
        """The run whose model is the initial one."""
        if self.table.start_from is None:
            return None
        return replace(self, name=self.table.start_from, variant=self.table.start_variant or self.variant)

    @property
    def key(self) -> dict[str, Any]:
        return {"variant": self.variant, "seed": self.seed}

    @property
    def overrides(self) -> list[str]:
        settings = {**self.table.settings, **self.table.variants[self.variant].settings}
        return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]

    @property
    def initial_model(self) -> list[str]:
        """The override that replaces the configured model by a trained one."""
        return [] if self.start is None else [f"model={{from: {json.dumps(str(self.start.run.model))}}}"]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of every setting that changes what is learned, with the defaults of the model filled in."""
        config = load_config(self.table.config, [*self.initial_model, *self.overrides])
        model = resolve_model_config(config.model).to_dict()
        names = [name for name in LinformerConfig.__annotations__ if name not in DERIVED_FIELDS]
        tree = {**config_to_dict(config), "model": {name: model[name] for name in names}}
        settings = {key: value for key, value in flatten_keys(tree) if key not in NOT_IN_FINGERPRINT}
        if self.start is not None:
            settings["start"] = self.start.fingerprint
        if self.table.sentences > 1:
            settings["sentences"] = f"{self.table.sentences}, shuffled"
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def run(self) -> RunFolder:
        name = f"{self.variant}-seed{self.seed}-{self.fingerprint}".replace(" ", "-")
        return RunFolder(self.runs / self.name / name)

    @property
    def arguments(self) -> list[str]:
        """The arguments of `linformer train`."""
        data = find_data(self.table, self.data, self.runs)
        path = [] if data is None else [f"data.path={json.dumps(str(data))}"]
        run = [f"run={json.dumps(str(self.run.folder))}", f"seed={self.seed}"]
        return [self.table.config, *self.initial_model, *self.overrides, *path, *run]


def make_jobs(tables: Tables, names: list[str], data: Path | None, runs: Path) -> list[Job]:
    """Every run of the named tables, ordered by seed."""
    jobs = [
        Job(tables, name, key, seed, runs, data)
        for name in names
        for key, variant in tables[name].variants.items()
        for seed in range(variant.seeds)
    ]
    return sorted(jobs, key=lambda job: job.seed)


def missing_jobs(jobs: list[Job], output: Path) -> list[Job]:
    """The runs still to do. A run that another one starts from is repeated if its model no longer exists."""
    missing: dict[Path, Job] = {}

    def add(job: Job) -> None:
        if job.start is not None and not job.start.run.result.exists():
            add(job.start)
        missing.setdefault(job.run.folder, job)

    for job in jobs:
        row = open_rows(output, job.name).get(**job.key)
        if row is None or row["fingerprint"] != job.fingerprint:
            add(job)
    return list(missing.values())


def open_rows(output: Path, name: str) -> Table:
    return Table(output / f"{name}.csv", ("variant", "seed"), COLUMNS)


def open_curves(output: Path, name: str) -> Table:
    return Table(output / f"{name}_curves.csv", ("variant", "seed", "step"), ("tokens", "loss", "metric"))


# data


def find_data(table: LearningTable, data: Path | None, runs: Path) -> Path | None:
    """The data of a table; None for the source that the configuration names."""
    if table.data is None or (data is None and not table.local_only):
        return None
    if data is None:
        raise UserError(f"the table {table.name} needs local data: give --data FOLDER with {table.data}/ in it")
    if not (directory := data / table.data).is_dir():
        raise UserError(f"--data is {data}, which has no directory {table.data}; the table {table.name} needs it")
    return join_sentences(directory, runs / "data", table.sentences) if table.sentences > 1 else directory


@cache
def join_sentences(source: Path, directory: Path, count: int) -> Path:
    """Write a copy of a translation corpus in which sentence pairs are joined into longer examples, split by split.

    Held-out examples have `count` pairs; training examples have 1, 2, … `count` in turn, so that some are easy.
    Training pairs are shuffled first, because Tatoeba lists all translations of a sentence next to each other.
    """
    target = directory / f"{source.name}-joined-{count}"
    target.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        with gzip.open(source / f"{split}.tsv.gz", "rt", encoding="utf-8", newline="") as file:
            pairs = [line.rstrip("\n").split("\t") for line in file]
        if split == "train":
            Random(0).shuffle(pairs)
        rest, lines = iter(pairs), []
        for size in cycle(range(1, count + 1)) if split == "train" else repeat(count):
            joined = list(islice(rest, size))
            if len(joined) < size:
                break
            lines.append("\t".join(" ".join(sentences) for sentences in zip(*joined, strict=True)) + "\n")
        path, text = target / f"{split}.tsv", "".join(lines)
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # a new file would be prepared again
            write_text(path, text)
    return target


# runs


def run_jobs(jobs: list[Job], output: Path, at_once: int, console: Console) -> None:
    """Run the missing jobs, `at_once` at a time, and store each when it ends."""
    message = f"another run is writing to {output}; wait for it, or choose another directory with --output"
    with lock(output / ".lock", message):
        missing = missing_jobs(jobs, output)
        for job in missing:
            find_data(job.table, job.data, job.runs)  # an error is raised now rather than after hours
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # stops like Ctrl-C
        try:
            asyncio.run(run_all(missing, output, at_once, console))
        except KeyboardInterrupt:
            raise Stopped("stopped; the same command resumes the runs from their last checkpoints", 130) from None


async def run_all(jobs: list[Job], output: Path, at_once: int, console: Console) -> None:
    """Run each job as a task; if one fails or Ctrl-C is pressed, the others are canceled."""
    threads = max(1, (os.cpu_count() or 1) // at_once)
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    slots, tasks = asyncio.Semaphore(at_once), {}

    async def run(job: Job) -> None:
        async with slots:
            if job.start is not None and job.start.run.folder in tasks:
                await tasks[job.start.run.folder]
            row, curve = await run_job(job, environment)
        open_curves(output, job.name).put(curve)
        open_rows(output, job.name).put([row])  # last: with this row the run counts as done
        score = f"test {job.table.metric} {row[f'test_{job.table.metric}']:.4g}"
        line = f"{job.name}: {job.variant}, seed {job.seed}: {score}, {row['seconds_per_epoch']:.0f} s per epoch"
        console.print(line, highlight=False, soft_wrap=True)
        progress.advance(bar)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("runs", total=len(jobs))
        for job in jobs:
            tasks[job.run.folder] = asyncio.create_task(run(job))
        await asyncio.gather(*tasks.values())


async def run_job(job: Job, environment: dict[str, str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train and evaluate; returns the row of the run and its validation curve."""
    run, peak = job.run, job.run.folder / "peak_mib.txt"
    call = partial(run_python, run.folder.with_suffix(".log"), **environment)
    await call("-m", "linformer_kit.cli", "train", *job.arguments)
    scores: dict[str, Any] = {}
    for beams in job.table.beams:
        await call("-m", "linformer_kit.cli", "evaluate", str(run.folder), "--beams", str(beams))
        suffix = f"_beam{beams}" if beams > 1 else ""
        found = json.loads(run.evaluation.read_text(encoding="utf-8"))
        scores |= {f"test_{name}{suffix}": value for name, value in found.items()}
    await call(__file__, "--peak", str(peak), *job.arguments, **PLAIN_ALLOCATION)
    result, metrics = json.loads(run.result.read_text(encoding="utf-8")), read_metrics(run.metrics)
    rate = statistics.median(line["tokens_per_second"] for line in metrics if "tokens_per_second" in line)
    row = {
        **job.key,
        "settings": " ".join(job.overrides),
        "fingerprint": job.fingerprint,
        **{name: result[name] for name in ("parameters", "steps", "best_step", "tokens")},
        "validation": result.get(f"validation_{job.table.metric}"),
        **{name: value for name, value in scores.items() if name in COLUMNS},
        "tokens_per_second": rate,
        "seconds_per_epoch": result["tokens"] / max(line["epoch"] for line in metrics) / rate,
        "peak_mib": float(peak.read_text()),
    }
    curve, tokens = [], 0
    metric = "accuracy" if job.table.metric == "accuracy" else "perplexity"
    for line in metrics:
        tokens = line.get("tokens", tokens)
        if "validation_loss" in line:
            values = {"loss": line["validation_loss"], "metric": line[f"validation_{metric}"]}
            curve.append({**job.key, "step": line["step"], "tokens": tokens, **values})
    return row, curve


async def run_python(log: Path, *arguments: str, **environment: str) -> None:
    """Run Python with these arguments and append its output to `log`; a task that is canceled stops the process."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=output, stderr=output, env={**os.environ, **environment}
        )
        try:
            await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                process.terminate()  # training saves a checkpoint
            await process.wait()
            raise
    if process.returncode:
        last = " ".join(log.read_text(encoding="utf-8").strip().splitlines()[-1:])
        raise UserError(f"python {' '.join(arguments)} failed: {last}; its complete output is in {log}")


def write_peak(path: str, name: str, *overrides: str) -> None:
    """Write the peak memory, in MiB, of training on the longest batch, AdamW included.

    The peak of a whole run would say little: batches of many lengths fragment its memory to several times that.
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

    write_text(Path(path), str(peak_memory(train_on_longest_batch) / 2**20))


# command


def current_rows(tables: Tables, name: str, output: Path, console: Console) -> Table:
    """The rows with today's settings; others are reported and ignored."""
    prints = {variant: Job(tables, name, variant).fingerprint for variant in tables[name].variants}

    def is_current(row: Row) -> bool:
        if row["fingerprint"] == prints.get(row["variant"]):
            return True
        console.print(f"{name}: {row['variant']}, seed {row['seed']}, was run with other settings and is ignored")
        return False

    return open_rows(output, name).only(is_current)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Tables to run (default: all).")] = None,
    data: Annotated[Path | None, typer.Option(help="Directory with local copies of the datasets.")] = None,
    output: Annotated[Path, typer.Option(help="Results directory; files go to learning/ in it.")] = ROOT / "results",
    runs: Annotated[Path, typer.Option(help="Directory for the runs.")] = Path("runs") / "learning",
    at_once: Annotated[int, typer.Option(min=1, help="Number of parallel runs.")] = os.cpu_count() or 1,
    summary: Annotated[bool, typer.Option(help="Only write summaries and figures from the existing CSVs.")] = False,
) -> None:
    """Train, evaluate, tabulate and draw; existing results are kept."""
    console, output = Console(), output / "learning"
    with report_user_errors():
        tables = load_tables(TABLES_FILE)
        chosen = names or list(tables)
        if unknown := set(chosen) - tables.keys():
            raise UserError(f"there is no table {', '.join(sorted(unknown))}; tables: {', '.join(tables)}")
        if not (names or data or summary) and (local := [name for name in tables if tables[name].local_only]):
            console.print(f"skipped, because they need --data FOLDER: {', '.join(local)}")
            chosen = [name for name in tables if name not in local]
        check_writable(output, "choose another directory with --output")
        output.mkdir(parents=True, exist_ok=True)
        if not summary:
            run_jobs(make_jobs(tables, chosen, data, runs.resolve()), output, at_once, console)
        current = {name: current_rows(tables, name, output, console) for name in tables}
        current = {name: rows for name, rows in current.items() if any(rows.rows())}
        for name in [name for name in chosen if name in current]:
            write_summary(tables[name], current[name], open_curves(output, name), output, console)
        write_overview([(tables[name], rows) for name, rows in current.items()], output)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:  # in a subprocess of run_job
        write_peak(*sys.argv[2:])
    else:
        typer.run(main)
