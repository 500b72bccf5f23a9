"""Checks of options: plain values, not tensors, so that nothing here needs PyTorch. Each error names the value, what is
allowed and what to do."""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

PROJECTIONS = ("linear", "dynamic", "conv", "mean", "max", "random", "none")
SHARINGS = ("none", "headwise", "kv", "layerwise")


def checked_options(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let `function` refuse a keyword it does not take with an error that lists those it does, and the nearest of them.

    Numbers of other kinds reach it as Python's: NumPy's would overflow in a product, or stop a compiler.
    """
    allowed = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        for name in options:
            if name not in allowed:
                raise TypeError(
                    f"{function.__qualname__.removesuffix('.__init__')} has no option {name!r}; it takes {', '.join(allowed)}"
                    f"{nearest_of(name, allowed)}"
                )
        plain_options = {name: plain_number(value) for name, value in options.items()}
        return function(*map(plain_number, args), **plain_options)

    return checked


def plain_number(value: Any) -> Any:
    """A number of whatever kind as int or float; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def nearest_of(value: Any, allowed: list[str], cutoff: float = 0.6) -> str:
    """A hint at the one of `allowed` that comes close to `value`; empty if none does."""
    nearest = difflib.get_close_matches(str(value), allowed, n=1, cutoff=cutoff)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def is_number(value: Any) -> bool:
    """Whether it is one, and finite; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def positive_integer(name: str, value: Any) -> int:
    """`value` as an int if it is an integer, of whatever kind, of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    return int(value)


def probability(name: str, value: Any) -> float:
    """`value` as a float if it lies in [0, 1); NaN does not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a number from 0 up to, but not including, 1")
    return float(value)


def boolean(name: str, value: Any) -> bool:
    """`value` itself if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be True or False")
    return value


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """`value` itself if it is one of `allowed`; otherwise an error that names the nearest of them."""
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}{nearest_of(value, allowed)}"
        )
    return value


def check_projection_options(
    projection: str, max_length: int, projected_length: int, sharing: str, rescale: bool
) -> None:
    """Refuse unknown values, and combinations that mean nothing, with the reason."""
    choice("projection", projection, PROJECTIONS)
    choice("sharing", sharing, SHARINGS)
    positive_integer("max_length", max_length)
    positive_integer("projected_length", projected_length)
    boolean("rescale", rescale)
    if sharing == "none" and projection in ("mean", "max", "none"):
        raise ValueError(
            f"sharing='none' gives every head matrices of its own, but projection={projection!r} has no matrices; "
            "use sharing='headwise', or a projection that has some: 'linear', 'dynamic', 'conv' or 'random'"
        )
    if rescale and projection in ("dynamic", "mean", "max", "none"):
        raise ValueError(
            f"rescale=True makes up for the rows of E that a short input flatten_keys unused, but projection={projection!r} "
            "uses none of a fixed length; drop rescale, or use projection='linear', 'random' or 'conv'"
        )


def check_local_width(width: int) -> None:
    """Neighbours are as many on the left as on the right."""
    if type(width) is not int or width < 0 or (width and width % 2 == 0):
        raise ValueError(
            f"local_width is {width!r}; it must be odd, as many neighbours on the left as on the right, or 0 for none"
        )
