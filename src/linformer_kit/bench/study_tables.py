"""The tables of a study: their YAML keys, the runs that they need, and the settings and data of each run."""

import gzip
import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import accumulate, cycle, pairwise, repeat, takewhile
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

from ..csv_tables import Table
from ..errors import UserError
from ..files import write_text
from ..models.configuration_linformer import LinformerConfig
from ..models.options_linformer import NO_WINDOW
from ..schema import AT_LEAST_1, Bounds, converted
from ..training.config import DERIVED_FIELDS, RunConfig, config_to_dict, load_config, resolve_model_config
from ..training.run import CHANGEABLE_KEYS, RunFolder, flatten_keys
from ..training.sources import find_sources, split_roles
from ..yaml_loader import read_yaml

STUDIES = Path(str(resources.files("linformer_kit"))) / "configs" / "studies"
COLUMNS = (
    *("settings", "fingerprint", "parameters", "steps", "best_step", "tokens", "validation"),
    *("test_loss", "test_perplexity", "test_accuracy", "test_bleu", "test_chrf", "test_bleu_beam4", "test_chrf_beam4"),
    *("tokens_per_second", "seconds_per_epoch", "peak_mib"),
)
OVERVIEW = "overview"
FIRST = ""  # as a baseline: the first variant
BEAMS = Bounds("1 or 4", lambda number: number in (1, 4))  # others have no columns
TASK_METRICS = {"classification": ("accuracy",), "translation": ("bleu", "perplexity", "accuracy")}
INITIAL_MODEL = "model="  # the override that replaces the configured model by a trained one
# settings that name the dataset
SOURCE_KEYS = {"data.path", "data.name", "data.revision"}


@dataclass(frozen=True)
class Variant:
    """One model of a table."""

    settings: dict[str, Any] = field(default_factory=dict)
    like: str | None = None  # an earlier variant, whose settings this one extends
    seeds: Annotated[int | None, AT_LEAST_1] = None  # default: the table's
    baseline: str | None = FIRST  # null: none, because more differs than what the table compares


@dataclass(frozen=True)
class StudyTable:
    """Runs that differ only in the settings of their variants and in their seeds; docs/study.md describes the keys."""

    title: str
    config: str  # a YAML file or the name of a shipped configuration
    metric: Literal["perplexity", "accuracy", "bleu"]
    variants: dict[str, Variant]
    settings: dict[str, Any] = field(default_factory=dict)
    seeds: Annotated[int, AT_LEAST_1] = 1
    recommended: str | None = None  # the variant in the overview
    beams: list[Annotated[int, BEAMS]] = field(default_factory=lambda: [1])
    data: str | None = None  # directory in --data
    local_only: bool = False  # needs --data
    sentences: Annotated[int, AT_LEAST_1] = 1  # joined into one example
    start_from: str | None = None  # the table whose models, of the same seed, are the initial ones
    start_variant: str | None = None  # default: the variant of the same name

    @property
    def baseline(self) -> str:
        return next(iter(self.variants))


def shipped_studies() -> dict[str, Path]:
    """The shipped studies by name."""
    return {path.stem: path for path in sorted(STUDIES.glob("*.yaml"))}


def find_study(source: Path) -> Path:
    """The path of a YAML file or of a shipped study."""
    shipped = shipped_studies()
    if source.is_file():
        return source
    if str(source) not in shipped:
        raise UserError(
            f"there is no file {source}; pass a YAML file with tables (docs/study.md), or a shipped study: "
            f"{', '.join(shipped)}"
        )
    return shipped[str(source)]


def load_tables(source: Path) -> dict[str, StudyTable]:
    """Read and check the tables of a YAML file or a shipped study; errors name the key."""
    path = find_study(source)
    sections, tables = converted(read_yaml(path, "a study"), dict[str, Any], str(path)), dict[str, StudyTable]()
    if not sections:
        raise UserError(f"{path} has no tables; write each one as a name with the keys of docs/study.md")
    for name, section in sections.items():
        # files are named after it
        if not re.fullmatch(r"[\w-]+", name) or name == OVERVIEW:
            raise UserError(f"{name!r} cannot name a table; use letters, digits, - and _, and not {OVERVIEW!r}")
        tables[name] = resolve_table(name, converted(section, StudyTable, name), tables)
    return tables


def resolve_table(name: str, table: StudyTable, earlier: dict[str, StudyTable]) -> StudyTable:
    """Check keys that depend on each other, and complete the settings and the baselines of the variants."""

    def check(key: str, value: str | None, names: dict[str, Any]) -> None:
        if value is not None and value not in names:
            raise UserError(f"{name}.{key} is {value!r}; allowed: {', '.join(names)}")

    if not table.variants:
        raise UserError(f"{name}.variants is empty; pass at least one")
    if (table.sentences > 1 and not table.local_only) or (table.local_only and table.data is None):
        raise UserError(f"{name}: sentences above 1 need `local_only: true`, which needs `data`")
    check("recommended", table.recommended, table.variants)
    check("start_from", table.start_from, earlier)
    variants: dict[str, Variant] = {}
    for key, variant in table.variants.items():
        baseline = table.baseline if variant.baseline == FIRST else variant.baseline
        check(f"variants.{key}.baseline", baseline, table.variants)
        check(f"variants.{key}.like", variant.like, variants)
        if table.start_from:
            check("start_variant", table.start_variant or key, earlier[table.start_from].variants)
        settings = {**(variants[variant.like].settings if variant.like else {}), **variant.settings}
        variants[key] = replace(variant, settings=settings, baseline=None if key == table.baseline else baseline)
    return replace(table, variants=variants)


@dataclass(frozen=True)
class Job:
    """One run of a table."""

    name: str  # of the table
    table: StudyTable
    variant: str
    seed: int
    start: "Job | None"  # the run whose model is the initial one
    overrides: list[str]  # of the configuration
    fingerprint: str
    run: RunFolder


@dataclass(frozen=True)
class Study:
    """Tables, and the directories of their results, runs and local data."""

    tables: dict[str, StudyTable]
    output: Path = Path()
    runs: Path = Path()
    data: Path | None = None

    def rows(self, name: str) -> Table:
        return Table(self.output / f"{name}.csv", ("variant", "seed"), COLUMNS)

    def curves(self, name: str) -> Table:
        return Table(self.output / f"{name}_curves.csv", ("variant", "seed", "step"), ("tokens", "loss", "metric"))

    def job(self, name: str, variant: str, seed: int = 0) -> Job:
        """A run of a table, preceded by the run that it starts from."""
        table, start = self.tables[name], None
        # not `auto`: results must not depend on the machine
        settings = {"training.precision": "float32", **table.settings, **table.variants[variant].settings}
        overrides = [f"{key}={each if isinstance(each, str) else json.dumps(each)}" for key, each in settings.items()]
        if table.start_from is not None:
            start = self.job(table.start_from, table.start_variant or variant, seed)
            overrides.insert(0, f"{INITIAL_MODEL}{{from: {json.dumps(str(start.run.model))}}}")
        try:
            config = load_config(table.config, overrides)
        except UserError as error:
            raise UserError(f"{name}, {variant}: {error}") from None
        allowed = TASK_METRICS.get(config.task, ("perplexity", "accuracy"))
        if table.metric not in allowed:
            raise UserError(f"{name}.metric is {table.metric!r}; allowed for {config.task}: {', '.join(allowed)}")
        fingerprint = fingerprint_of(config, table, start)
        run = self.runs / name / (re.sub(r"[^\w=,.+-]+", "-", variant) + f"-seed{seed}-{fingerprint}")
        return Job(name, table, variant, seed, start, overrides, fingerprint, RunFolder(run))

    def jobs(self, names: list[str]) -> list[Job]:
        """Every run of the named tables, ordered by seed."""
        jobs = [
            self.job(name, key, seed)
            for name in names
            for key, variant in self.tables[name].variants.items()
            for seed in range(variant.seeds or self.tables[name].seeds)
        ]
        return sorted(jobs, key=lambda job: job.seed)

    def missing_jobs(self, names: list[str]) -> list[Job]:
        """The runs still to do. A run that another one starts from is repeated if its model no longer exists."""
        missing: dict[Path, Job] = {}
        for job in self.jobs(names):
            row = self.rows(job.name).get(variant=job.variant, seed=job.seed)
            if row is None or row["fingerprint"] != job.fingerprint:
                chain = [job]
                while (start := chain[0].start) is not None and not start.run.is_finished:
                    chain.insert(0, start)
                missing |= {each.run.folder: each for each in chain}
        return list(missing.values())

    def arguments(self, job: Job) -> list[str]:
        """The arguments of `linformer train`; a lack of data is an error now rather than after hours of training."""
        table, paths = job.table, {"run": job.run.folder}
        if table.data is not None and self.data is not None:
            paths["data.path"] = self.data / table.data
            if table.sentences > 1:
                paths["data.path"] = join_sentences(paths["data.path"], self.runs / "data", table.sentences)
        elif table.local_only:
            raise UserError(f"the table {job.name} needs local data: pass --data DIRECTORY with {table.data}/ in it")
        given = [f"{key}={json.dumps(str(path))}" for key, path in paths.items()]
        overrides = [*job.overrides, *given, f"seed={job.seed}"]
        config = load_config(table.config, overrides)
        sources = None if config.data.path is None else find_sources(config.data, config.task)
        if sources is not None and "test" not in split_roles(config.data, list(sources)):
            raise UserError(
                f"{config.data.path} has no test split, which the table {job.name} needs; see docs/study.md"
            )
        return [table.config, *overrides]


# fields of LinformerConfig that are younger than published results; at their defaults, these results stay valid
ADDED_FIELDS = (
    *("embedding_size", "outer_norms", "reversible", *NO_WINDOW),
    *("decoder_hidden_size", "decoder_num_attention_heads", "decoder_intermediate_size"),
)


def fingerprint_of(config: RunConfig, table: StudyTable, start: Job | None) -> str:
    """Hash of every setting that changes what is learned, with the defaults of the model filled in."""
    model = resolve_model_config(config.model).to_dict()
    added = {name for name in ADDED_FIELDS if model[name] == getattr(LinformerConfig, name)}
    names = [name for name in LinformerConfig.__annotations__ if name not in DERIVED_FIELDS and name not in added]
    tree = {**config_to_dict(config), "model": {name: model[name] for name in names}}
    settings = {key: value for key, value in flatten_keys(tree) if key not in CHANGEABLE_KEYS | {"seed"}}
    if not settings["training.compile"]:
        del settings["training.compile"]
    if settings["training.precision"] == "float32":
        settings["training.precision"] = "auto"  # which meant float32 on every CPU when results were published
    for key in SOURCE_KEYS:
        if table.data or settings[key] is None:  # with `data`, a local copy may replace the dataset
            del settings[key]
    if start is not None:
        settings["start"] = start.fingerprint
    if table.sentences > 1:
        settings["sentences"] = f"{table.sentences}, shuffled"
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


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
        sizes = cycle(range(1, count + 1)) if split == "train" else repeat(count)
        ends = takewhile(lambda end: end <= len(pairs), accumulate(sizes, initial=0))  # noqa: B023 — used up here
        joined = [map(" ".join, zip(*pairs[begin:end], strict=True)) for begin, end in pairwise(ends)]
        path, text = target / f"{split}.tsv", "".join("\t".join(columns) + "\n" for columns in joined)
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # a new file would be prepared again
            write_text(path, text)
    return target
