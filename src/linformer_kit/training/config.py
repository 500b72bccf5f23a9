"""The YAML configuration of a run: its keys, their types, and how a file and overrides become a `RunConfig`.

>>> config = load_config("imdb", ["model.projected_length=64", "training.epochs=2"])
>>> config.training.epochs, config.model["projected_length"]
(2.0, 64)

The classes below are the reference: the annotation of a field is its type, its meaning and its bounds.
`docs/configuration.md` is generated from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml

from ..errors import UserError
from ..models.options_linformer import NO_WINDOW, nearest_of
from ..schema import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    SHARE,
    converted,
    converted_field,
    describe,
    key_of,
    unknown_key,
)
from ..yaml_loader import parse_yaml, read_yaml

if TYPE_CHECKING:
    from ..models.configuration_linformer import LinformerConfig

Task = Literal["classification", "masked-lm", "causal-lm", "translation", "denoising"]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Column names; a dot selects a nested column, as in `translation.en`."""

    text: Annotated[str, "the text; classification and language models"] = "text"
    pair: Annotated[str | None, "the second text of a pair, such as a hypothesis; classification"] = None
    label: Annotated[str, "the label; classification"] = "label"
    source: Annotated[str, "the source text; translation"] = "source"
    target: Annotated[str, "the target text; translation"] = "target"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset."""

    path: Annotated[
        str | None,
        "a file, a directory (files named after splits, or one subdirectory per class), or a dataset on the Hub",
    ] = None
    generated: Annotated[Literal["listops", "file_kinds"] | None, "a generated dataset, instead of `path`"] = None
    name: Annotated[str | None, "configuration of a Hub dataset"] = None
    revision: Annotated[str | None, "commit, tag or branch of a Hub dataset"] = None
    format: Annotated[
        Literal["auto", "text", "csv", "tsv", "jsonl", "parquet"], "format of local files; `auto`: by file extension"
    ] = "auto"
    encoding: Annotated[str, "encoding of text, CSV and TSV files"] = "utf-8"
    sample: Annotated[
        Literal["line", "paragraph", "document"], "one example of a text file; `document`: the whole file"
    ] = "line"
    header: Annotated[list[str] | None, "column names of CSV and TSV files without a header"] = None
    columns: Annotated[Columns, "column names"] = field(default_factory=Columns)
    train: Annotated[str, "training split"] = "train"
    validation: Annotated[
        str | None, "validation split, which selects the best checkpoint; by default found by its name or split off"
    ] = None
    test: Annotated[str | None, "test split, for `linformer evaluate`; by default found by its name"] = None
    validation_share: Annotated[
        float, "fraction of the training examples used for validation if there is no validation split", SHARE
    ] = 0.05
    max_examples: Annotated[
        int | None,
        "maximum number of training rows: a random sample; for language models the first rows",
        AT_LEAST_1,
    ] = None
    streaming: Annotated[
        bool, "read the data during training, for corpora larger than the disk; requires `training.steps`"
    ] = False
    streaming_validation: Annotated[
        int, "number of first examples used for validation when streaming without a validation split", AT_LEAST_1
    ] = 1000
    shuffle_buffer: Annotated[int, "number of examples in the shuffle buffer when streaming", AT_LEAST_1] = 10_000
    mask_share: Annotated[float, "fraction of masked tokens; masked-lm and denoising", SHARE] = 0.15
    span_length: Annotated[float, "mean length of a masked span; denoising", POSITIVE] = 3.0
    workers: Annotated[int, "number of processes for tokenization", AT_LEAST_1] = 1
    cache: Annotated[str, "directory for prepared data, shared by runs with the same data"] = "~/.cache/linformer-kit"


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer."""

    from_: Annotated[str | None, "a tokenizer to load instead of training one: a directory or a name on the Hub"] = None
    kind: Annotated[
        Literal["bpe", "bytes", "words"],
        "byte-level BPE; one token per byte; one token per whitespace-separated word",
    ] = "bpe"
    vocab_size: Annotated[int, "vocabulary size of bpe and words, including special tokens", AT_LEAST_1] = 8000
    min_frequency: Annotated[int, "minimum number of occurrences of a pair or word; bpe and words", AT_LEAST_1] = 2
    lowercase: Annotated[bool, "convert texts to lowercase"] = False


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The training procedure. A step is one optimizer update."""

    epochs: Annotated[float | None, "passes over the training examples; default 3 unless `steps` is set", POSITIVE] = (
        None
    )
    steps: Annotated[int | None, "optimizer updates, instead of `epochs`", AT_LEAST_1] = None
    batch_size: Annotated[int, "examples per step, over all processes and accumulated batches", AT_LEAST_1] = 32
    accumulate: Annotated[int, "gradient accumulation: number of forward and backward passes per step", AT_LEAST_1] = 1
    learning_rate: Annotated[float, "maximum learning rate", POSITIVE] = 5e-4
    projection_rate: Annotated[
        float, "learning rate of a learned E (`projection: linear` or `affine`), relative to `learning_rate`", POSITIVE
    ] = 0.1
    schedule: Annotated[Literal["cosine", "linear", "constant"], "decay of the learning rate after the warmup"] = (
        "cosine"
    )
    warmup: Annotated[float, "fraction of the steps with a rising learning rate", SHARE] = 0.06
    weight_decay: Annotated[float, "weight decay of AdamW; not applied to norms and biases", NOT_NEGATIVE] = 0.01
    adam_beta2: Annotated[float, "second beta of AdamW", SHARE] = 0.999
    clip: Annotated[float, "maximum gradient norm; 0: no clipping", NOT_NEGATIVE] = 1.0
    label_smoothing: Annotated[float, "label smoothing factor", SHARE] = 0.0
    evaluate_every: Annotated[
        int | None, "steps between evaluations on the validation split; default: one epoch", AT_LEAST_1
    ] = None
    save_every: Annotated[int | None, "steps between checkpoints; each evaluation saves one, too", AT_LEAST_1] = None
    keep: Annotated[int, "number of newest checkpoints to keep, in addition to the best", AT_LEAST_1] = 2
    best_by: Annotated[
        Literal["loss", "accuracy", "macro_f1"] | None,
        "validation metric that selects the best checkpoint; default: accuracy for classification, loss otherwise",
    ] = None
    patience: Annotated[int | None, "early stopping: number of evaluations without improvement", AT_LEAST_1] = None
    precision: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "of matrix products; `auto`: bfloat16 on devices that multiply it fast (GPUs, CPUs with AVX512-BF16 or AMX), "
        "float32 on others; stored with the run and kept when it is resumed",
    ] = "auto"
    compile: Annotated[
        bool, "compile the model with `torch.compile`: faster steps after one or two minutes; needs a C++ compiler"
    ] = False
    device: Annotated[Literal["auto", "cpu", "cuda"], "`auto`: a GPU if there is one; stored with the run"] = "auto"
    gradient_checkpointing: Annotated[bool, "recompute layers in the backward pass: less memory, more time"] = False
    evaluation_batch_size: Annotated[
        int | None, "examples per process in evaluations; default: as in training", AT_LEAST_1
    ] = None
    log_every: Annotated[int, "steps between lines of metrics.jsonl", AT_LEAST_1] = 10
    report: Annotated[
        Literal["none", "tensorboard", "wandb"] | list[Literal["tensorboard", "wandb"]],
        "also report metrics to these tools; to wandb also checkpoints and the finished model, as artifacts",
    ] = "none"

    @property
    def reports(self) -> list[str]:
        """The tools of `report`."""
        names = [self.report] if isinstance(self.report, str) else list(dict.fromkeys(self.report))
        return [name for name in names if name != "none"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of a run."""

    task: Annotated[Task, "the task"]
    run: Annotated[str | None, "the run directory; default: runs/ and the name of the YAML file"] = None
    seed: Annotated[int, "random seed of initial weights, order of examples, masks and dropout", SEED] = 0
    model: Annotated[
        dict[str, Any],
        "fields of LinformerConfig; `from`: a saved model to start from; `attention: full`: full attention instead",
    ] = field(default_factory=dict)
    data: Annotated[DataConfig, "the dataset"] = field(default_factory=DataConfig)
    tokenizer: Annotated[TokenizerConfig, "the tokenizer"] = field(default_factory=TokenizerConfig)
    training: Annotated[TrainingConfig, "the training procedure"] = field(default_factory=TrainingConfig)

    @property
    def folder(self) -> Path:
        """The run directory."""
        assert self.run is not None  # set by load_config
        return Path(self.run)


# fields of the initial model (`model.from`) that a run may change: their weights can be kept or initialized
CHANGEABLE_MODEL_FIELDS = {
    *("attention", "projection", "projected_length", "sharing", "rescale", *NO_WINDOW),
    *("decoder_attention", "block_length", "slots", "max_position_embeddings"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
}
# fields of LinformerConfig that are derived, and from what
DERIVED_FIELDS = {
    "vocab_size": "the tokenizer",
    "decoder_vocab_size": "the tokenizer of both sides",
    "pad_token_id": "the tokenizer",
    "bos_token_id": "the tokenizer",
    "eos_token_id": "the tokenizer",
    "decoder_start_token_id": "the tokenizer",
    "num_labels": "the labels of the training data",
    "id2label": "the labels of the training data",
    "label2id": "the labels of the training data",
    "is_decoder": "the task",
    "is_encoder_decoder": "the task",
    "add_cross_attention": "the task",
    "cross_attention_hidden_size": "the task",
    "type_vocab_size": "data.columns.pair",
    "quantization": "`linformer export`",
}


# reading


def shipped_configs() -> dict[str, Path]:
    """The configurations shipped with the package, by name."""
    folder = Path(str(resources.files("linformer_kit"))) / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_config(source: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Load a YAML file or a shipped configuration, with overrides such as `training.epochs=2`."""
    path = find_config(source)
    tree = read_with_base(path)
    if path.name == CONFIG_NAME and path.with_name("environment.json").is_file():
        tree["run"] = str(path.parent)  # the run directory may have been moved
    for override in overrides or []:
        apply_override(tree, override)
    if "base" in tree:
        raise UserError("base is a key of YAML files and cannot be set on the command line; pass that file instead")
    if tree.get("run") is None:
        tree["run"] = str(Path("runs") / path.stem)
    return config_from_dict(tree)


def read_with_base(path: Path, including: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The keys of a file; a file with `base` overrides those of another one, except `run`.

    `including` are the files whose bases led to this one.
    """
    tree = read_yaml(path, "a configuration")
    if not isinstance(tree, dict):
        raise UserError(f"{path} must contain a mapping, such as `task: classification`; it contains {describe(tree)}")
    base = tree.pop("base", None)
    if base is None:
        return tree
    chain = (*including, path.resolve())
    found = find_base(converted(base, str, f"{path}: base"), path)
    if found.resolve() in chain:
        names = " → ".join(each.name for each in (*chain[chain.index(found.resolve()) :], found))
        raise UserError(f"{path}: base is {base!r}, which leads back to itself: {names}; remove one of the keys")
    inherited = read_with_base(found, chain)
    inherited.pop("run", None)  # each file has a run of its own
    return merge(inherited, tree)


def find_base(base: str, path: Path) -> Path:
    """The file that `base` in the file `path` names: relative to that file, or a shipped configuration."""
    shipped = shipped_configs()
    if (beside := path.parent / base).is_file():
        return beside
    if base in shipped:
        return shipped[base]
    hint = nearest_of(base, list(shipped)) or f"; shipped configurations: {', '.join(shipped)}"
    raise UserError(f"{path}: base is {base!r}, but there is no file {beside} and no such shipped configuration{hint}")


def merge(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A tree with changes: mappings are merged, all other values replaced.

    >>> merge({"model": {"hidden_size": 64, "projected_length": [8, 4]}}, {"model": {"projected_length": 16}})
    {'model': {'hidden_size': 64, 'projected_length': 16}}
    """
    merged = dict(tree)
    for key, value in changes.items():
        before = tree.get(key)
        merged[key] = merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def find_config(source: str | Path) -> Path:
    """The path of a YAML file or of a shipped configuration."""
    path = Path(source)
    shipped = shipped_configs()
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"{path} is a directory; pass its {CONFIG_NAME} or another YAML file")
    # people write `configs/imdb.yaml` in any directory
    if path.suffix in ("", ".yaml") and path.parent in (Path("."), Path("configs")) and path.stem in shipped:
        return shipped[path.stem]
    hint = nearest_of(path.stem, list(shipped)) or f"; shipped configurations: {', '.join(shipped)}"
    raise UserError(f"there is no file and no shipped configuration {str(source)!r}{hint}")


CONFIG_NAME = "config.yaml"


def apply_override(tree: dict, override: str) -> None:
    """Set one value in the tree, such as `training.epochs=2`.

    >>> tree = {"training": {"epochs": 3}}
    >>> apply_override(tree, "training.learning_rate=1e-3"); tree
    {'training': {'epochs': 3, 'learning_rate': 0.001}}
    """
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise UserError(f"{override!r} is not an override; write key=value, such as training.epochs=2")
    *parents, last = path.split(".")
    for depth, parent in enumerate(parents, start=1):
        below = tree.setdefault(parent, {})
        if below is None:
            below = tree[parent] = {}
        if not isinstance(below, dict):
            raise UserError(f"{override!r}: {'.'.join(parents[:depth])} is a value, {describe(below)}, and has no keys")
        tree = below
    tree[last] = parse_yaml(text, f"the value in {override!r}")


def config_from_dict(tree: Mapping[str, Any]) -> RunConfig:
    """Convert nested dictionaries to a checked `RunConfig`."""
    config = converted(tree, RunConfig, "")
    check_model_keys(config.model)
    check_combinations(config)
    return config


def config_to_dict(config: Any) -> dict[str, Any]:
    """Convert a configuration to nested dictionaries."""
    return {
        key_of(item.name): config_to_dict(value) if is_dataclass(value := getattr(config, item.name)) else value
        for item in fields(config)
    }


def to_yaml(config: RunConfig) -> str:
    """The complete configuration as YAML, including defaults."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


# checks beyond types


def check_model_keys(model: dict[str, Any]) -> None:
    """Check the section `model`: its keys are fields of LinformerConfig, of the right type, and not derived ones."""
    from ..models.configuration_linformer import LinformerConfig

    own = {name: kind for name, kind in LinformerConfig.__annotations__.items() if name not in DERIVED_FIELDS}
    names = ["from", "attention", *own]
    for key, value in model.items():
        path = f"model.{key}"
        if key in DERIVED_FIELDS:
            raise UserError(f"{path} is derived from {DERIVED_FIELDS[key]} and cannot be set; remove it")
        if key not in names:
            raise unknown_key("model", key, names)
        if key == "from":
            model[key] = converted(value, str, path)
        elif key == "attention":
            model[key] = converted(value, Literal["linformer", "full"], path)
        else:
            model[key] = converted_field(value, own[key], path)
    if "from" in model and (others := sorted(set(model) - {"from"} - CHANGEABLE_MODEL_FIELDS)):
        raise UserError(
            f"model.from loads a saved model, which determines model.{others[0]}; remove that key "
            "(on the command line, model='{from: DIRECTORY}' replaces the whole section). "
            f"Allowed with model.from: {', '.join(sorted(CHANGEABLE_MODEL_FIELDS))}"
        )

    try:
        resolve_model_config(model)  # incompatible sizes are reported before any data is read
    except (ValueError, TypeError) as error:
        raise UserError(f"model: {error}") from error


def model_settings(model: dict[str, Any]) -> dict[str, Any]:
    """The fields of LinformerConfig that the section `model` sets."""
    settings = {name: value for name, value in model.items() if name not in ("from", "attention")}
    if model.get("attention") != "full":
        return settings
    lengths = settings.get("projected_length")
    if 0 in (lengths if isinstance(lengths, list) else [lengths]):  # a window without rows: K has no effect here
        del settings["projected_length"]
    # without E there is nothing to share or to rescale, and every token is in the window
    full = {"projection": "none", "decoder_attention": "full", "sharing": "headwise", "rescale": False}
    return settings | full | NO_WINDOW


def resolve_model_config(model: dict[str, Any]) -> "LinformerConfig":
    """The section `model` as a LinformerConfig; with `model.from`, the number of layers may be missing."""
    from ..models.configuration_linformer import LinformerConfig

    settings = model_settings(model)
    if "from" in model and isinstance(lengths := settings.get("projected_length"), list):
        settings["num_hidden_layers"] = len(lengths)
    return LinformerConfig(**settings)


def check_not_checkpointing(config: RunConfig) -> None:
    """Raise for gradient checkpointing of reversible layers."""
    if config.training.gradient_checkpointing:
        raise UserError(
            "training.gradient_checkpointing is true, but the layers of the model are reversible and keep no "
            "activations that it could save; set it to false"
        )


def check_combinations(config: RunConfig) -> None:
    """Check keys that depend on each other."""
    training, data = config.training, config.data
    if training.epochs is not None and training.steps is not None:
        raise UserError("training.epochs and training.steps are both set; remove one of them, or set it to null")
    if config.model.get("reversible"):
        check_not_checkpointing(config)
    if config.task == "causal-lm" and config.model.get("window_length") and config.model.get("attention") != "full":
        raise UserError(
            f"model.window_length is {config.model['window_length']}, but a causal model sees the tokens of its own "
            "block exactly already; set model.block_length instead"
        )
    sizes = [f"decoder_{name}" for name in ("hidden_size", "num_attention_heads", "intermediate_size")]
    if config.task not in ("translation", "denoising") and (unused := [name for name in sizes if name in config.model]):
        raise UserError(
            f"model.{unused[0]} is set, but a model for {config.task} has one stack of layers; set "
            f"model.{unused[0].removeprefix('decoder_')} instead"
        )
    if data.path is None and data.generated is None:
        raise UserError("there is no data; set data.path to a file, a directory or a name on the Hub")
    if data.path is not None and data.generated is not None:
        raise UserError(f"data.path is {data.path!r} and data.generated is {data.generated!r}; remove one of them")
    if data.streaming and training.steps is None:
        raise UserError("data.streaming requires training.steps, because the length of an epoch is unknown")
    if data.streaming and config.task == "classification":
        raise UserError(
            "data.streaming is for masked-lm, causal-lm, denoising and translation; classification needs all labels"
        )
    if data.streaming and data.generated:
        raise UserError("data.streaming requires data.path; generated data cannot be streamed")
    if data.mask_share == 0 and config.task in ("masked-lm", "denoising"):
        raise UserError("data.mask_share is 0, so no token would be masked; a common value is 0.15")
    try:
        "".encode(data.encoding)
    except LookupError:
        raise UserError(
            f"data.encoding is {data.encoding!r}, which Python does not know; common ones: utf-8, latin-1, cp1252"
        ) from None
    if data.columns.pair is not None and config.task != "classification":
        raise UserError(f"data.columns.pair is for classification; the task is {config.task}")
    if training.best_by == "macro_f1" and config.task != "classification":
        raise UserError(f"training.best_by is macro_f1, which {config.task} does not have; allowed: loss, accuracy")
