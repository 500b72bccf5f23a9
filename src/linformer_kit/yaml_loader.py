"""Strict YAML: `1e-3` is a number, and a repeated key is an error."""

import re
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError


class _Loader(yaml.SafeLoader):
    """A safe loader that reads `1e-3` as a number and rejects repeated keys."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d+)([eE][-+]?\d+)$"), list("-+0123456789.")
)


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text; `where` names it in errors.

    >>> parse_yaml("1e-3", "learning rate")
    0.001
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not YAML: {' '.join(str(error).split())}") from None


def read_yaml(path: Path, what: str) -> Any:
    """Parse a YAML file; `what` names its purpose in errors."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; pass {what} in YAML") from None
    return parse_yaml(text, str(path))
