"""Checks of options, and the facts about projections that they need. Nothing here imports PyTorch.

Each error names the value, what is allowed and the remedy.
"""

import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Literal, ParamSpec, Self, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

SHARINGS = ("none", "headwise", "kv", "layerwise")

POST_NORM_IS_NOT_REVERSIBLE = (
    "reversible=True with norm_first=False, but the input of a layer cannot be recomputed from a sum that was "
    "normalized; use norm_first=True, or reversible=False with gradient checkpointing"
)
CHECKPOINTING_OF_REVERSIBLE = (
    "gradient checkpointing with reversible=True, but reversible layers keep no activations that it could save; drop "
    "one of them"
)
WITHOUT_WINDOW = "only encoders have a window; a causal layer sees each block up to the query exactly, see block_length"


def checked_options(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make `function` raise a helpful error for unknown keywords, and pass all numbers to it as Python numbers.

    NumPy integers could overflow in a product, and `torch.compile` cannot trace them.
    """
    allowed = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        for name in options:
            if name not in allowed:
                owner = function.__qualname__.removesuffix(".__init__")
                remedy = f" ({WITHOUT_WINDOW})" if name in NO_WINDOW else nearest_of(name, allowed)
                raise TypeError(f"{owner} has no option {name!r}; it takes {', '.join(allowed)}{remedy}")
        plain_options = {name: plain_number(value) for name, value in options.items()}
        return function(*map(plain_number, args), **plain_options)

    return checked


def plain_number(value: Any) -> Any:
    """A number of any type as int or float; anything else unchanged."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def nearest_of(value: Any, allowed: list[str], cutoff: float = 0.6) -> str:
    """`"; did you mean 'x'?"` with the closest of the allowed names; empty if none is close."""
    nearest = difflib.get_close_matches(str(value), allowed, n=1, cutoff=cutoff)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def list_names(names: Iterable[str]) -> str:
    """`"'linear', 'dynamic' or 'conv'"`."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last


def is_finite_number(value: Any) -> bool:
    """Whether `value` is a finite real number; booleans are not numbers."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def positive_integer(name: str, value: Any) -> int:
    """`value` as an int; raises unless it is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    return int(value)


def probability(name: str, value: Any) -> float:
    """`value` as a float; raises unless it lies in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a number from 0 up to, but not including, 1")
    return float(value)


def boolean(name: str, value: Any) -> bool:
    """`value`; raises unless it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be True or False")
    return value


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """`value`; raises, with the closest allowed name, unless it is one of `allowed`."""
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}{nearest_of(value, allowed)}"
        )
    return value


class ProjectionFacts:
    """Base of all projection classes, in PyTorch and Keras: registry, facts about each kind, checks of options.

    `class LinearProjection(Projection, kind="linear")` registers the class in `Projection.kinds`. Facts are
    attributes of the class; layers, models and commands read them instead of comparing names.
    """

    kinds: ClassVar[dict[str, type[Any]]]  # by name; one registry for each framework
    kind: ClassVar[str]  # the value of the option `projection`

    has_matrices: ClassVar[bool] = True  # E and F are tensors, and `sharing` decides how many there are
    takes_any_length: ClassVar[bool] = True  # if not, inputs have at most `max_length` tokens
    can_rescale: ClassVar[bool] = False  # `rescale` has a meaning
    is_dense: ClassVar[bool] = False  # `Eᵀ X` is a matrix product, so E can also be applied after W_K and W_V
    is_features_first: ClassVar[bool] = False  # E is applied after W_K and W_V, never before
    sized_by_max_length: ClassVar[bool] = False  # the shape of the weights depends on `max_length`
    sized_by_width: ClassVar[bool] = False  # the shape of the weights depends on `embed_dim`
    sized_by_head: ClassVar[bool] = False  # the shape of the weights depends on `head_dim`
    can_have_window: ClassVar[bool] = True  # `window_length` has a meaning
    can_be_cut: ClassVar[bool] = True  # layers with smaller K can use a part of it
    has_own_learning_rate: ClassVar[bool] = False  # the weights are trained with `training.projection_rate`
    matrix_depends_on: ClassVar[Literal["length", "input"] | None] = None  # what E follows from; None: there is no E
    why_no_matrix: ClassVar[str] = ""  # completes "it …" when there is no E

    def __init_subclass__(cls, kind: str | None = None, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if kind is None:
            return
        registered = cls.kinds.get(kind)
        # a cell of a notebook may define the same class again
        if registered is not None and registered.__qualname__ != cls.__qualname__:
            raise ValueError(f"kind {kind!r} is already registered by {registered.__qualname__}; choose another name")
        cls.kind = kind
        cls.kinds[kind] = cls

    @classmethod
    def kind_names(cls, fact: str | None = None) -> list[str]:
        """The registered names: all, or those of which a fact is true."""
        return [name for name, kind in cls.kinds.items() if fact is None or getattr(kind, fact)]

    @classmethod
    def check_options(
        cls, projection: str, max_length: int, projected_length: int, sharing: str, rescale: bool
    ) -> None:
        """Raise for unknown values and for combinations without a meaning."""
        kind = cls.kinds[choice("projection", projection, cls.kinds)]
        choice("sharing", sharing, SHARINGS)
        positive_integer("max_length", max_length)
        positive_integer("projected_length", projected_length)
        boolean("rescale", rescale)
        if sharing == "none" and not kind.has_matrices:
            raise ValueError(
                f"sharing='none' gives each head its own matrices, but projection={projection!r} has no matrices; "
                f"use sharing='headwise', or projection={list_names(cls.kind_names('has_matrices'))}"
            )
        if rescale and not kind.can_rescale:
            raise ValueError(
                "rescale=True compensates for rows of E unused by short inputs, which "
                f"projection={projection!r} does not support; drop rescale, or use "
                f"projection={list_names(cls.kind_names('can_rescale'))}"
            )

    @classmethod
    def check_lengths(cls, projection: str, lengths: list[int], sharing: str) -> None:
        """Raise unless layers with these projected lengths can have this sharing."""
        if sharing == "layerwise" and len(set(lengths)) > 1 and not cls.kinds[projection].can_be_cut:
            raise ValueError(
                f"projected_length is {lengths} with sharing='layerwise', but the windows of projection={projection!r} "
                "depend on projected_length, so layers cannot use a part of a shared one; pass one number, use "
                f"sharing='kv', or projection={list_names(cls.kind_names('can_be_cut'))}"
            )

    @classmethod
    def make(
        cls,
        projection: str,
        *,
        embed_dim: int,
        max_length: int,
        projected_length: int,
        sharing: str,
        num_kv_heads: int,
        rescale: bool,
        head_dim: int | None = None,
        **kwargs: Any,
    ) -> Self:
        """An instance of the registered class, built with `kwargs` and those options that its constructor names."""
        cls.check_options(projection, max_length, projected_length, sharing, rescale)
        options = {
            "embed_dim": positive_integer("embed_dim", embed_dim),
            "max_length": max_length,
            "projected_length": projected_length,
            "rescale": rescale,
            "head_dim": positive_integer("head_dim", embed_dim if head_dim is None else head_dim),
        }
        matrices = {"matrices": matrix_count(sharing, positive_integer("num_kv_heads", num_kv_heads))}
        kind = cls.kinds[projection]
        parameters = inspect.signature(kind.__init__).parameters
        named = {name: value for name, value in {**options, **matrices}.items() if name in parameters}
        made = kind(**named, **kwargs)
        made.options = {"projection": projection, "sharing": sharing, **options}
        return made


def matrix_count(sharing: str, num_kv_heads: int) -> int:
    """How many matrices one projection holds: E and F for each key-value head, E and F, or one for both."""
    return {"none": 2 * num_kv_heads, "headwise": 2, "kv": 1, "layerwise": 1}[sharing]


def projection_names() -> tuple[str, ...]:
    """Names of the PyTorch projections, for the command line.

    They are read from the source: importing PyTorch takes seconds, too long for `--help` and shell completion.
    """
    source = Path(__file__).with_name("projection_linformer.py").read_text(encoding="utf-8")
    return tuple(re.findall(r'^class \w+\(.*\bkind="(\w+)"\):', source, flags=re.MULTILINE))


WINDOW_IN_DECODER = (
    "window_length is {window_length} in a causal layer, which attends exactly to the tokens of its own block already "
    "and must not see later ones; set window_length=0, and choose block_length instead"
)


# the distance bias of a new layer at the neighbor that a head starts with; e^5 ≈ 150: as much weight as 150 other
# columns with equal scores
FIRST_BIAS = 5.0
# for layers and models without a window
NO_WINDOW: dict[str, Any] = {"window_length": 0, "global_tokens": 0, "distance_bias": False}


def check_window(
    kind: type[ProjectionFacts],
    projected_length: int,
    window_length: int,
    global_tokens: int,
    distance_bias: bool,
    rows_name: str = "projected_length",
) -> None:
    """Raise unless a layer can have this window, and this number of rows; `rows_name` is the option that sets it."""
    for name, value in (("window_length", window_length), ("global_tokens", global_tokens)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 0")
    if boolean("distance_bias", distance_bias) and window_length == 0:
        raise ValueError(
            "distance_bias=True needs a window, but window_length is 0; set window_length, or distance_bias=False"
        )
    if window_length == 0:
        if global_tokens:
            raise ValueError(
                f"global_tokens={global_tokens} needs a window, but window_length is 0; set window_length, or "
                "global_tokens=0"
            )
        if projected_length == 0 and not isinstance(projected_length, bool):
            raise ValueError(
                f"{rows_name} is 0, which only layers with a window can have; set {rows_name} to at least 1, or "
                "set window_length"
            )
        positive_integer(rows_name, projected_length)
        return
    if not kind.can_have_window:
        raise ValueError(
            f"window_length={window_length} with projection={kind.kind!r}, which sees every token exactly already; "
            f"set window_length=0, or projection={list_names(kind.kind_names('can_have_window'))}"
        )
    if isinstance(projected_length, bool) or not isinstance(projected_length, Integral) or projected_length < 0:
        raise ValueError(f"{rows_name} is {projected_length!r}; with a window it must be an integer of at least 0")


def check_local_width(width: int) -> None:
    """Raise unless the width of the local convolution is odd, or 0."""
    if type(width) is not int or width < 0 or (width and width % 2 == 0):
        raise ValueError(
            f"local_width is {width!r}; it must be an odd number of tokens, so that the window is centered, or 0 for "
            "none"
        )
