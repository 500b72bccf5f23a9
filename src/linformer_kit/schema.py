"""Checks plain values, as read from YAML, against dataclasses whose fields are annotated with meaning and bounds.

>>> from dataclasses import dataclass
>>> @dataclass
... class Loader:
...     batch_size: Annotated[int, "examples per batch", AT_LEAST_1] = 32
>>> converted({"batch_size": 8}, Loader, "")
Loader(batch_size=8)
>>> converted({"batch_size": 0}, Loader, "loader")
Traceback (most recent call last):
linformer_kit.errors.UserError: loader.batch_size is 0; it must be at least 1
"""

import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from .errors import UserError
from .models.options_linformer import nearest_of

MOST_CHARACTERS = 60  # of a value in a message


class Bounds(NamedTuple):
    """The numbers that a field allows, as text and as a predicate."""

    words: str
    hold: Callable[[float], bool]


AT_LEAST_1 = Bounds("at least 1", lambda number: number >= 1)
POSITIVE = Bounds("larger than 0", lambda number: number > 0)
NOT_NEGATIVE = Bounds("at least 0", lambda number: number >= 0)
# NumPy's limit is 2³², and ranks are added to the seed
SEED = Bounds("at least 0 and less than 4 billion", lambda number: 0 <= number < 4_000_000_000)
SHARE = Bounds("at least 0 and less than 1", lambda number: 0 <= number < 1)


def converted(value: Any, kind: Any, path: str) -> Any:
    """Convert `value` to the type `kind`; raises `UserError` with the path, the value and what is allowed."""
    if (bounds := bounds_of(kind)) is not None:
        number = converted(value, bare(kind), path)
        if number is not None and not bounds.hold(number):
            raise UserError(f"{path} is {number}; it must be {bounds.words}")
        return number
    kind = bare(kind)
    if kind is Any:
        return value
    origin = get_origin(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return converted_section({} if value is None else value, kind, path)
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in get_args(kind):
            return None
        parts = [part for part in get_args(kind) if part is not types.NoneType]
        return converted(value, parts[0], path) if len(parts) == 1 else converted_field(value, kind, path)
    if origin is Literal and value in get_args(kind):
        return value
    if origin is list and isinstance(value, list):
        return [converted(item, get_args(kind)[0], f"{path}[{index}]") for index, item in enumerate(value)]
    if origin is dict and (value is None or isinstance(value, dict)):
        # YAML reads `64:` as a number
        return {str(key): converted(item, get_args(kind)[1], join(path, key)) for key, item in (value or {}).items()}
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < sys.float_info.max
    if kind is float and is_number:
        return float(value)
    if kind is int and is_number and value == int(value):  # 1e5 is a float in YAML
        return int(value)
    if kind in (str, bool) and isinstance(value, kind):
        return value
    hint = nearest_of(value, list(get_args(kind))) if origin is Literal else ""
    raise UserError(f"{path} is {describe(value)}; allowed: {allowed(kind)}{hint}")


def converted_section(value: Any, kind: Any, path: str) -> Any:
    """Convert a mapping to the dataclass `kind`."""
    if not isinstance(value, Mapping):
        raise UserError(f"{path or 'the configuration'} is {describe(value)}; allowed: a mapping")
    hints = get_type_hints(kind, include_extras=True)
    names = {key_of(item.name): item.name for item in fields(kind)}
    for key in value:
        if key not in names:
            raise unknown_key(path, key, list(names))
    for item in fields(kind):
        if item.name not in map(names.get, value) and item.default is MISSING and item.default_factory is MISSING:
            raise UserError(f"the key {join(path, item.name)} is missing; allowed: {allowed(hints[item.name])}")
    return kind(**{names[key]: converted(item, hints[names[key]], join(path, key)) for key, item in value.items()})


def converted_field(value: Any, kind: Any, path: str) -> Any:
    """Convert the value of a field whose type may be a union of several types, as in LinformerConfig."""
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for part in parts:
        if part is types.NoneType and value is None:
            return None
        try:
            return converted(value, part, path)
        except UserError:
            continue
    raise UserError(f"{path} is {describe(value)}; allowed: {allowed(kind)}")


def unknown_key(path: str, key: Any, names: list[str]) -> UserError:
    hint = nearest_of(key, names) or ";"
    return UserError(f"there is no key {join(path, str(key))}{hint} allowed: {', '.join(names)}")


def allowed(kind: Any) -> str:
    """Describe the values that a type allows.

    >>> allowed(int | None), allowed(Literal["a", "b"])
    ('an integer or null', 'a, b')
    """
    if (bounds := bounds_of(kind)) is not None:
        return f"{allowed(bare(kind))}, {bounds.words}"
    kind = bare(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(allowed(part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    if get_origin(kind) is list:
        items = {int: "integers", float: "numbers", str: "strings"}
        return f"a list of {items.get(get_args(kind)[0]) or allowed(get_args(kind)[0])}"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", types.NoneType: "null"}
    return names.get(kind, "a mapping")


def describe(value: Any) -> str:
    """Describe a value and its type.

    >>> describe(0.5), describe("a"), describe(None)
    ('the number 0.5', "the string 'a'", 'null')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{str(value).lower()}"
    kinds = {
        int: "the number",
        float: "the number",
        str: "the string",
        dict: "a mapping with the keys",
        list: "the list",
    }
    shown = ", ".join(map(str, value)) if isinstance(value, dict) else repr(value)
    shortened = shown if len(shown) <= MOST_CHARACTERS else f"{shown[:MOST_CHARACTERS]} …"
    return f"{kinds.get(type(value), 'the value')} {shortened}"


def bare(kind: Any) -> Any:
    """A type without its `Annotated` metadata."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def bounds_of(kind: Any) -> Bounds | None:
    """The bounds in the `Annotated` metadata of a type."""
    return next((each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Bounds)), None)


def key_of(name: str) -> str:
    """The YAML key of a field: `from_` stands for `from`, a Python keyword."""
    return name.rstrip("_")


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else str(key)
