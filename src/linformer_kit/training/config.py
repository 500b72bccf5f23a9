"""One YAML per run: its keys, their types, and how a file and the overrides of the command line become a `RunConfig`.

>>> config = load_config("imdb", ["model.projected_length=64", "training.epochs=2"])
>>> config.training.epochs, config.model["projected_length"]
(2.0, 64)

The classes below are the reference: a field's type says what is allowed, the text beside it what it means.
`docs/configuration.md` is written from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml

from ..errors import UserError
from ..models.options_linformer import nearest_of
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
    """Which column of the data holds what; a dot reaches into nested columns, as in `translation.en`."""

    text: Annotated[str, "the text: classification and language models"] = "text"
    pair: Annotated[str | None, "the second text of a pair, such as the hypothesis; classification"] = None
    label: Annotated[str, "the class; classification"] = "label"
    source: Annotated[str, "what is translated"] = "source"
    target: Annotated[str, "its translation"] = "target"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the examples come from."""

    path: Annotated[
        str | None,
        "a file, a folder of files (named after their split, or one sub-folder per class), or a name on the hub",
    ] = None
    generated: Annotated[Literal["listops"] | None, "data made by our own code instead of `path`"] = None
    name: Annotated[str | None, "which configuration of a hub data set; of no meaning for local files"] = None
    revision: Annotated[str | None, "which commit, tag or branch of a hub data set"] = None
    format: Annotated[
        Literal["auto", "text", "csv", "tsv", "jsonl", "parquet"], "of local files; `auto` goes by their names"
    ] = "auto"
    encoding: Annotated[str, "of text, CSV and TSV files"] = "utf-8"
    sample: Annotated[
        Literal["line", "paragraph", "document"], "what one example of a text file is; `document`: the file"
    ] = "line"
    header: Annotated[list[str] | None, "names of the columns of CSV and TSV files that have no heading"] = None
    columns: Annotated[Columns, "which column holds what"] = field(default_factory=Columns)
    train: Annotated[str, "the split to train on"] = "train"
    validation: Annotated[
        str | None, "the split to choose the best checkpoint by; found by its name, or carved out"
    ] = None
    test: Annotated[str | None, "the split for `linformer evaluate`; found by its name"] = None
    validation_share: Annotated[
        float, "share of the training examples carved out when there is no validation split", SHARE
    ] = 0.05
    max_examples: Annotated[
        int | None,
        "train on so many lines, rows or pairs only: drawn at random, for language models the first ones",
        AT_LEAST_1,
    ] = None
    streaming: Annotated[
        bool, "read while training instead of ahead: for corpora larger than the disk; needs `training.steps`"
    ] = False
    streaming_validation: Annotated[
        int, "when streaming without a validation split: so many first examples are held out", AT_LEAST_1
    ] = 1000
    shuffle_buffer: Annotated[int, "when streaming: how many examples are mixed at a time", AT_LEAST_1] = 10_000
    mask_share: Annotated[float, "share of the tokens to guess; masked-lm and denoising", SHARE] = 0.15
    span_length: Annotated[float, "mean length of a masked span; denoising", POSITIVE] = 3.0
    workers: Annotated[int, "processes that tokenize", AT_LEAST_1] = 1
    cache: Annotated[str, "folder for prepared data, which runs with the same data share"] = "~/.cache/linformer-kit"


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes tokens."""

    from_: Annotated[str | None, "a tokenizer to load: a folder or a name on the hub; none is trained then"] = None
    kind: Annotated[
        Literal["bpe", "bytes", "words"],
        "trained: byte-level BPE; one token per byte; one token per word between spaces",
    ] = "bpe"
    vocab_size: Annotated[int, "of bpe and words, special tokens included", AT_LEAST_1] = 8000
    min_frequency: Annotated[
        int, "how often a pair or word must occur to become a token; bpe and words", AT_LEAST_1
    ] = 2
    lowercase: Annotated[bool, "fold case before everything else"] = False


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How the model learns. A step is one update of the weights."""

    epochs: Annotated[
        float | None, "times through the training examples; 3 if `steps` is not given either", POSITIVE
    ] = None
    steps: Annotated[int | None, "updates of the weights, instead of `epochs`", AT_LEAST_1] = None
    batch_size: Annotated[int, "examples per step, over all processes and accumulated batches together", AT_LEAST_1] = (
        32
    )
    accumulate: Annotated[
        int, "in how many pieces, one after the other, a process works through its share of a batch", AT_LEAST_1
    ] = 1
    learning_rate: Annotated[float, "at its highest", POSITIVE] = 5e-4
    projection_rate: Annotated[
        float, "of a learned E (`projection: linear`): its learning rate, as a share of the others'", POSITIVE
    ] = 0.1
    schedule: Annotated[Literal["cosine", "linear", "constant"], "how the learning rate falls after the warm-up"] = (
        "cosine"
    )
    warmup: Annotated[float, "share of the steps in which the learning rate rises", SHARE] = 0.06
    weight_decay: Annotated[float, "of AdamW; norms and biases are left alone", NOT_NEGATIVE] = 0.01
    adam_beta2: Annotated[float, "of AdamW", SHARE] = 0.999
    clip: Annotated[float, "largest norm of the gradients; 0: no limit", NOT_NEGATIVE] = 1.0
    label_smoothing: Annotated[float, "share of the target given to all classes or tokens alike", SHARE] = 0.0
    evaluate_every: Annotated[
        int | None, "steps between evaluations on the validation split; once per epoch if not given", AT_LEAST_1
    ] = None
    save_every: Annotated[int | None, "steps between checkpoints; evaluations save one in any case", AT_LEAST_1] = None
    keep: Annotated[int, "how many of the newest checkpoints stay, beside the best", AT_LEAST_1] = 2
    best_by: Annotated[
        Literal["loss", "accuracy", "macro_f1"] | None,
        "which validation metric chooses the best checkpoint; accuracy for classification and loss for the rest if not given",
    ] = None
    patience: Annotated[int | None, "stop early after so many evaluations without a better one", AT_LEAST_1] = None
    precision: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], "`auto`: bfloat16 on GPUs that have it, float32 elsewhere"
    ] = "auto"
    device: Annotated[Literal["auto", "cpu"], "`auto`: a GPU if there is one"] = "auto"
    gradient_checkpointing: Annotated[bool, "compute the layers again in the backward pass: less memory, more time"] = (
        False
    )
    evaluation_batch_size: Annotated[
        int | None, "examples per process in evaluations; as in training if not given", AT_LEAST_1
    ] = None
    log_every: Annotated[int, "steps between lines of metrics.jsonl", AT_LEAST_1] = 10
    report: Annotated[Literal["none", "tensorboard", "wandb"], "where else the metrics go"] = "none"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run is made of."""

    task: Annotated[Task, "what is learnt"]
    run: Annotated[str | None, "the folder of the run; runs/ and the name of the YAML if not given"] = None
    seed: Annotated[int, "of everything that is drawn: weights, order, masks, dropout", SEED] = 0
    model: Annotated[
        dict[str, Any],
        "fields of LinformerConfig; `from`: a saved model to start from; `attention: full` makes it the full-attention twin",
    ] = field(default_factory=dict)
    data: Annotated[DataConfig, "where the examples come from"] = field(default_factory=DataConfig)
    tokenizer: Annotated[TokenizerConfig, "how text becomes tokens"] = field(default_factory=TokenizerConfig)
    training: Annotated[TrainingConfig, "how the model learns"] = field(default_factory=TrainingConfig)

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        assert self.run is not None  # load_config has filled it in
        return Path(self.run)


# what a run may change of the model it starts from: how it attends, how far it reads and what is dropped, none of which has weights
# that could not be taken over or start fresh
OF_ATTENTION = {
    *("attention", "projection", "projected_length", "sharing", "rescale"),
    *("decoder_attention", "block_length", "slots", "max_position_embeddings"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
}
# what follows from the tokenizer, the labels and the task
DERIVED_FIELDS = {
    "vocab_size": "the tokenizer",
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
    "type_vocab_size": "data.columns.pair",
}


# reading


def shipped_configs() -> dict[str, Path]:
    """The configurations that come with the package, by name."""
    folder = Path(str(resources.files("linformer_kit"))) / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_config(source: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """The configuration in a YAML file, or shipped under that name, with overrides such as `training.epochs=2`."""
    path = find_config(source)
    tree = read_yaml(path, "a configuration")
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold keys and values, such as `task: classification`; it holds {describe(tree)}")
    if path.name == CONFIG_NAME and path.with_name("environment.json").is_file():
        tree["run"] = str(path.parent)  # the folder of a run may have been moved
    for override in overrides or []:
        apply_override(tree, override)
    if tree.get("run") is None:
        tree["run"] = str(Path("runs") / path.stem)
    return config_from_dict(tree)


def find_config(source: str | Path) -> Path:
    """The file that `source` means: a path, or the name of a shipped configuration."""
    path = Path(source)
    shipped = shipped_configs()
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"{path} is a folder; give its {CONFIG_NAME} or another YAML file")
    # `configs/imdb.yaml` is what people write, wherever they are
    if path.suffix in ("", ".yaml") and path.parent in (Path("."), Path("configs")) and path.stem in shipped:
        return shipped[path.stem]
    hint = nearest_of(path.stem, list(shipped)) or f"; shipped are {', '.join(shipped)}"
    raise UserError(f"there is no file {str(source)!r}, and no configuration of that name is shipped{hint}")


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
            raise UserError(
                f"{override!r}: {'.'.join(parents[:depth])} is a value, {describe(below)}, and holds no keys"
            )
        tree = below
    tree[last] = parse_yaml(text, f"the value in {override!r}")


def config_from_dict(tree: Mapping[str, Any]) -> RunConfig:
    """A tree of plain values, checked against the types."""
    config = converted(tree, RunConfig, "")
    check_model_keys(config.model)
    check_together(config)
    return config


def config_to_dict(config: Any) -> dict[str, Any]:
    """The reverse of `config_from_dict`."""
    return {
        key_of(item.name): config_to_dict(value) if is_dataclass(value := getattr(config, item.name)) else value
        for item in fields(config)
    }


def to_yaml(config: RunConfig) -> str:
    """The whole configuration, defaults included."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


# checking what types cannot say


def check_model_keys(model: dict[str, Any]) -> None:
    """The section `model`: fields of LinformerConfig that a person may choose, of the right type."""
    from ..models.configuration_linformer import LinformerConfig

    own = {name: kind for name, kind in LinformerConfig.__annotations__.items() if name not in DERIVED_FIELDS}
    names = ["from", "attention", *own]
    for key, value in model.items():
        path = f"model.{key}"
        if key in DERIVED_FIELDS:
            raise UserError(f"{path} follows from {DERIVED_FIELDS[key]} and is not for you to set; remove it")
        if key not in names:
            raise unknown_key("model", key, names)
        if key == "from":
            model[key] = converted(value, str, path)
        elif key == "attention":
            model[key] = converted(value, Literal["linformer", "full"], path)
        else:
            model[key] = converted_field(value, own[key], path)
    if "from" in model and (others := sorted(set(model) - {"from"} - OF_ATTENTION)):
        raise UserError(
            f"model.from starts from a saved model, which has its sizes already; remove model.{others[0]} "
            "(on the command line, model='{from: FOLDER}' replaces the whole section). "
            f"What may stand beside it: {', '.join(sorted(OF_ATTENTION))}"
        )

    try:
        resolve_model_config(model)  # sizes that do not fit each other are told before any data is read
    except (ValueError, TypeError) as error:
        raise UserError(f"model: {error}") from error


def model_settings(model: dict[str, Any]) -> dict[str, Any]:
    """What the section `model` says about LinformerConfig."""
    # without E there is nothing to share or to rescale
    full = {"projection": "none", "decoder_attention": "full", "sharing": "headwise", "rescale": False}
    told = {name: value for name, value in model.items() if name not in ("from", "attention")}
    return told | full if model.get("attention") == "full" else told


def resolve_model_config(model: dict[str, Any]) -> "LinformerConfig":
    """What the section `model` tells, defaults filled in; of a saved model it need not tell how many layers there are."""
    from ..models.configuration_linformer import LinformerConfig

    settings = model_settings(model)
    if "from" in model and isinstance(lengths := settings.get("projected_length"), list):
        settings["num_hidden_layers"] = len(lengths)
    return LinformerConfig(**settings)


def check_together(config: RunConfig) -> None:
    """What no single type can say."""
    training, data = config.training, config.data
    if training.epochs is not None and training.steps is not None:
        raise UserError("training.epochs and training.steps are both given; remove one of them, or set it to null")
    if (data.path is None) == (data.generated is None):
        raise UserError(
            "give data.path (a file, a folder or a name on the hub), or data.generated; one of them, not both"
        )
    if data.streaming and training.steps is None:
        raise UserError("data.streaming needs training.steps: how long an epoch is, nobody knows before it was read")
    if data.streaming and config.task == "classification":
        raise UserError(
            "data.streaming is for masked-lm, causal-lm, denoising and translation; labels must be known beforehand"
        )
    if data.streaming and data.generated:
        raise UserError("data.streaming reads data.path; generated data is made ahead")
    if data.mask_share == 0 and config.task in ("masked-lm", "denoising"):
        raise UserError("data.mask_share is 0: nothing would be left to guess; a usual share is 0.15")
    try:
        "".encode(data.encoding)
    except LookupError:
        raise UserError(
            f"data.encoding is {data.encoding!r}, which Python does not know; usual: utf-8, latin-1, cp1252"
        ) from None
    if data.columns.pair is not None and config.task != "classification":
        raise UserError(f"data.columns.pair is for classification; the task is {config.task}")
    if training.best_by == "macro_f1" and config.task != "classification":
        raise UserError(f"training.best_by is macro_f1, which {config.task} does not have; allowed: loss, accuracy")
