"""The labels of a classification dataset."""

import re

import datasets

from ..errors import UserError
from .config import RunConfig
from .data import Rows, column, texts, top_column


def label_names(rows: Rows, config: RunConfig) -> list[str]:
    """The sorted labels of the training split; integers in numerical order."""
    name, names = config.data.columns.label, class_names(rows, config)
    batches = rows.select_columns(top_column(name, rows.column_names)).iter(10_000)
    found = {label for batch in batches for label in labels_of(batch, name, names)}
    if len(found) < 2:
        raise UserError(
            f"the training split has only one label, {', '.join(map(repr, found))}, in the column {name!r}; "
            "classification needs at least two"
        )
    if len(found) > 1000:
        raise UserError(
            f"the column {name!r} has {len(found):,} different values; is it the label? Set data.columns.label"
        )
    return sorted(found, key=lambda label: (0, int(label), label) if re.fullmatch(r"-?\d+", label) else (1, 0, label))


def labels_of(batch: dict[str, list], name: str, names: list[str] | None) -> list[str]:
    """The labels of a batch as texts; `names` are the class names if the data store indices."""
    if names is None:
        if "" in (labels := texts(batch, name)):
            raise UserError(
                f"the column {name!r} has rows without a label ({labels.count('')} among {len(labels)}); remove them"
            )
        return labels
    numbers = column(batch, name)
    if missing := sum(number is None or number < 0 for number in numbers):
        raise UserError(
            f"the column {name!r} has rows without a label ({missing} among {len(numbers)}, -1 or null); remove them"
        )
    return [names[number] for number in numbers]


def class_names(rows: Rows, config: RunConfig) -> list[str] | None:
    """The class names of a dataset that stores labels as indices; None for other datasets."""
    feature = (rows.features or {}).get(config.data.columns.label)
    return feature.names if isinstance(feature, datasets.ClassLabel) else None


def has_no_labels(rows: datasets.Dataset, config: RunConfig) -> bool:
    """Whether the label column is missing or all labels are -1 or null, as in test splits with secret labels."""
    name = config.data.columns.label
    column = top_column(name, rows.column_names)
    return column not in rows.column_names or (name == column and set(rows.unique(name)) <= {-1, "-1", "", None})
