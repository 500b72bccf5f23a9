"""`docs/configuration.md`, written from the types of the configuration: `make docs`."""

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, get_type_hints

import yaml

from ..models.configuration_linformer import LinformerConfig
from ..schema import allowed, bare, join, key_of
from .config import DERIVED_FIELDS, Columns, DataConfig, RunConfig, TokenizerConfig, TrainingConfig

PAGE_BEGIN = """<!-- written by `make docs` from config.py and config_page.py in src/linformer_kit/training: change it there -->

One YAML file says what a run is: what is learnt, from which data, by which model, and how. Every key has a default except `task`
and where the data come from, `data.path` or `data.generated`. On the command line, `key=value` behind the file replaces a value:

```
linformer train imdb training.epochs=2 model.projected_length=64 data.path=reviews
```

Values are YAML: `true`, `1e-3`, `[16, 8]`, and `null` for nothing. An unknown key, or a value of the wrong kind, is an error that
names it. The run stores its whole configuration, defaults included, as `config.yaml`. Relative paths start where the command is
given.

The shipped files are in [src/linformer_kit/configs](../src/linformer_kit/configs)."""

MODEL_BEGIN = """The fields of `LinformerConfig`, described one by one in [encoders.md](encoders.md#the-configuration), and two keys
of our own:

- `from`: the folder `model/` of a run, or another saved model, to start from. It has its sizes and its tokenizer. Beside it may
  stand what changes how the model attends and reads: projection, projected length, sharing, `attention: full`, the settings of
  decoders, `max_position_embeddings`, dropout. E and F that the saved model lacks start fresh, all other weights are kept.
- `attention`: `full` makes the full-attention twin of a Linformer, the same model with `projection: none` and
  `decoder_attention: full`."""

MODEL_DERIVED = "What follows from something else is not for you to set:"


def reference_page() -> str:
    """The whole of `docs/configuration.md`."""
    tables: dict[str, list[tuple[str, ...]]] = {"": [], "model": list(model_reference())}
    for row in reference():
        tables.setdefault(row[0].rpartition(".")[0], []).append(row)
    texts = {
        "": PAGE_BEGIN,
        "model": model_text(),
        "data": DataConfig.__doc__,
        "data.columns": Columns.__doc__,
        "tokenizer": TokenizerConfig.__doc__,
        "training": TrainingConfig.__doc__,
    }
    parts = [
        f"{f'## `{path}`' if path else '# Configuration'}\n\n{text}\n\n{markdown_table(tables[path])}"
        for path, text in texts.items()
    ]
    return "\n\n".join(parts) + "\n"


def reference(kind: Any = RunConfig, path: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Every key with what it allows, its default and its meaning: the rows of `docs/configuration.md`."""
    hints = get_type_hints(kind, include_extras=True)
    for item in fields(kind):
        inner, meaning = bare(hints[item.name]), hints[item.name].__metadata__[0]
        name = join(path, key_of(item.name))
        if is_dataclass(inner):
            yield from reference(inner, name)
        else:
            yield name, allowed(hints[item.name]), default_of(item), meaning


def default_of(item: dataclasses.Field) -> str:
    """The default as one would write it in YAML."""
    if item.default is MISSING:
        return "(required)" if item.default_factory is MISSING else ""
    return yaml.safe_dump(item.default).splitlines()[0] if item.default is not None else ""


def model_reference() -> Iterator[tuple[str, str, str]]:
    """The keys of the section `model`, each with what it allows and its default."""
    items = {item.name: item for item in fields(LinformerConfig)}
    yield "model.from", allowed(str), ""
    yield "model.attention", allowed(Literal["linformer", "full"]), "linformer"
    for name, kind in LinformerConfig.__annotations__.items():
        if name not in DERIVED_FIELDS:
            # every whole number is a number
            yield (
                f"model.{name}",
                allowed(kind).replace("a number or a whole number", "a number"),
                default_of(items[name]),
            )


def model_text() -> str:
    """What the keys of the section `model` mean, in the words of LinformerConfig."""
    meanings = inspect.cleandoc(LinformerConfig.__doc__ or "").partition("\n- ")[2]
    origins = {
        origin: ", ".join(f"`{name}`" for name in DERIVED_FIELDS if DERIVED_FIELDS[name] == origin)
        for origin in DERIVED_FIELDS.values()
    }
    derived = "\n".join(f"- from {origin}: {names}" for origin, names in origins.items())
    return f"{MODEL_BEGIN}\n\nIn the words of `LinformerConfig`:\n\n- {meanings}\n\n{MODEL_DERIVED}\n\n{derived}"


def markdown_table(rows: list[tuple[str, ...]]) -> str:
    """Key, what is allowed, default and, where it is known, meaning."""
    heading = ("key", "allowed", "default", "meaning")[: len(rows[0])]
    lines = [heading, ("---",) * len(heading)]
    for key, may, default, *meaning in rows:
        lines.append((f"`{key}`", may, default if default in ("", "(required)") else f"`{default}`", *meaning))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
