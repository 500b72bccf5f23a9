"""Plain values, as YAML has them, checked against types: dataclasses whose fields are annotated with meaning and bounds.

>>> from dataclasses import dataclass
>>> @dataclass
... class Garden:
...     trees: Annotated[int, "how many", AT_LEAST_1] = 1
>>> converted({"trees": 3}, Garden, "")
Garden(trees=3)
>>> converted({"trees": 0}, Garden, "garden")
Traceback (most recent call last):
linformer_kit.errors.UserError: garden.trees is 0; it must be at least 1
"""

import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from .errors import UserError
from .models.options_linformer import nearest_of


class Bounds(NamedTuple):
    """Which numbers a field allows, in words and as a test."""

    words: str
    hold: Callable[[float], bool]


AT_LEAST_1 = Bounds("at least 1", lambda number: number >= 1)
POSITIVE = Bounds("larger than 0", lambda number: number > 0)
NOT_NEGATIVE = Bounds("at least 0", lambda number: number >= 0)
SEED = Bounds(
    "at least 0 and less than 4 billion", lambda number: 0 <= number < 4_000_000_000
)  # below 2³², the limit of NumPy, to which ranks are added
SHARE = Bounds("at least 0 and less than 1", lambda number: 0 <= number < 1)


def converted(value: Any, kind: Any, path: str) -> Any:
    """`value` as `kind`, or an error that names the path, the value and what is allowed."""
    if (bounds := bounds_of(kind)) is not None:
        number = converted(value, bare(kind), path)
        if number is not None and not bounds.hold(number):
            raise UserError(f"{path} is {number}; it must be {bounds.words}")
        return number
    kind = bare(kind)
    origin = get_origin(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return converted_section({} if value is None else value, kind, path)
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in get_args(kind):
            return None
        (kind,) = (part for part in get_args(kind) if part is not types.NoneType)
        return converted(value, kind, path)
    if origin is Literal and value in get_args(kind):
        return value
    if origin is list and isinstance(value, list):
        return [converted(item, get_args(kind)[0], f"{path}[{index}]") for index, item in enumerate(value)]
    if origin is dict and (value is None or isinstance(value, dict)):
        return value or {}
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < sys.float_info.max
    if kind is float and is_number:
        return float(value)
    if kind is int and is_number and value == int(value):  # 1e5 is a whole number
        return int(value)
    if kind in (str, bool) and isinstance(value, kind):
        return value
    hint = nearest_of(value, list(get_args(kind))) if origin is Literal else ""
    raise UserError(f"{path} is {describe(value)}; allowed: {allowed(kind)}{hint}")


def converted_section(value: Any, kind: Any, path: str) -> Any:
    """The keys of a section, each as its type wants it."""
    if not isinstance(value, Mapping):
        raise UserError(f"{path or 'the configuration'} is {describe(value)}; allowed: keys and values")
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
    """The value of a field of LinformerConfig; its unions have several kinds of values."""
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
    hint = nearest_of(key, names)
    return UserError(
        f"there is no key {join(path, str(key))}{hint or '; '}{' ' if hint else ''}allowed here: {', '.join(names)}"
    )


def allowed(kind: Any) -> str:
    """What a type allows, in words.

    >>> allowed(int | None), allowed(Literal["a", "b"])
    ('a whole number or nothing', 'a, b')
    """
    if (bounds := bounds_of(kind)) is not None:
        return f"{allowed(bare(kind))}, {bounds.words}"
    kind = bare(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(allowed(part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    if get_origin(kind) is list:
        return f"a list of {allowed(get_args(kind)[0])}"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", types.NoneType: "nothing"}
    return names.get(kind, "keys and values")


def describe(value: Any) -> str:
    """A value and its kind, as people call it.

    >>> describe(0.5), describe("a"), describe(None)
    ('the number 0.5', "the text 'a'", 'nothing')
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"{str(value).lower()}"
    kinds = {int: "the number", float: "the number", str: "the text", dict: "the keys", list: "the list"}
    shown = ", ".join(map(str, value)) if isinstance(value, dict) else repr(value)
    return f"{kinds.get(type(value), 'the value')} {shown}"


def bare(kind: Any) -> Any:
    """A type without its annotation."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def bounds_of(kind: Any) -> Bounds | None:
    """Those in the annotation of a type."""
    return next((each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Bounds)), None)


def key_of(name: str) -> str:
    """How a field is written in YAML: `from` is a word of Python."""
    return name.rstrip("_")


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else str(key)
