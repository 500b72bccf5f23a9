"""A sweep of `linformer compare`: its keys, from YAML, flags or a preset, and the points that they describe.

>>> sweep = read_sweep({"lengths": [256, 1024], "projected_lengths": [64, 512], "implementations": ["linformer-kit"]})
>>> [[(point.length, point.projected_length) for point in group] for group in sweep.groups()]
[[(256, 64)], [(1024, 64), (1024, 512)]]
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from ..errors import UserError
from ..models.options_linformer import nearest_of
from ..precision import InferencePrecision, fastest_precision
from ..schema import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, Bounds, converted
from ..yaml_loader import read_yaml
from .encoders import saved_config
from .implementations import IMPLEMENTATIONS, VARIANTS, can_do, has_blocks, has_window, projects, version_of
from .point import (
    BERT_EAGER,
    FULL,
    FULL_EAGER,
    LINFORMER,
    LINFORMER_PYTORCH,
    LONGFORMER,
    OURS,
    TRAINING_SUBJECTS,
    Backend,
    Point,
    Step,
    Subject,
    current_name,
    window_variant,
)
from .targets import Target

Count = Annotated[int, AT_LEAST_1]
CountOrNone = Annotated[int, NOT_NEGATIVE]  # 0: none
LISTS: dict[str, type[int] | type[str]] = {
    **{"lengths": int, "projected_lengths": int, "block_lengths": int, "window_lengths": int},
    **{"implementations": str, "subjects": str, "steps": str, "backends": str, "precisions": str},
}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The points to measure, time limits, and targets."""

    lengths: list[Count] = field(default_factory=lambda: [512, 1024, 2048, 4096])
    projected_lengths: list[CountOrNone] = field(default_factory=lambda: [128])
    block_lengths: list[Count] = field(default_factory=lambda: [128])
    window_lengths: list[CountOrNone] = field(default_factory=lambda: [0])
    implementations: list[str] = field(default_factory=lambda: [OURS, FULL, LINFORMER, LINFORMER_PYTORCH])
    subjects: list[Subject] = field(default_factory=lambda: ["layer"])
    steps: list[Step] = field(default_factory=lambda: ["forward"])
    backends: list[Backend] = field(default_factory=lambda: ["torch"])
    precisions: list[InferencePrecision] = field(default_factory=lambda: ["float32"])  # timed in the same rounds
    # tokens per batch, but at least one example; 0: as many examples as memory and time allow
    tokens: Annotated[int, NOT_NEGATIVE] = 4096
    batch: Count | None = None  # examples per batch, instead of `tokens`
    hidden_size: Count = 512
    num_heads: Count = 8
    num_layers: Count = 4
    model: str | None = None  # a run or saved model: its encoder with the projection and with full attention
    sharing: Literal["none", "headwise", "kv", "layerwise"] = "headwise"
    target_length: Annotated[int, Bounds("at least 2", lambda number: number >= 2)] = 64
    device: str = "cpu"
    interleave_lengths: bool = False  # time all lengths in the same rounds
    seconds: Annotated[float, POSITIVE] = 20.0  # for the rounds of one group; there are at least 3 rounds
    rounds: Count = 9  # at most
    time_limit: Annotated[float, POSITIVE] = 60.0  # seconds of a call
    output: str | None = None  # the CSV
    targets: list[Target] = field(default_factory=list)

    def groups(self) -> list[list[Point]]:
        """The points that are timed in the same rounds; short lengths first, so that little is lost by a stop."""
        lengths = sorted(set(self.lengths))
        parts = [lengths] if self.interleave_lengths else [[length] for length in lengths]
        groups = (self.points(*names) for names in product(parts, self.backends, self.subjects, self.steps))
        return [points for points in groups if points]

    def points(self, lengths: Sequence[int], backend: Backend, subject: Subject, step: Step) -> list[Point]:
        """All combinations that exist: an implementation may lack the subject, and K must not exceed the length.

        K = 0 exists with a window only.
        """
        points = [
            Point(
                *(subject, step, name, length, rows, self.batch or max(1, self.tokens // length)),
                **{"variant": variant, "backend": backend, "precision": precision, "block_length": block, **self.sizes},
            )
            for length in lengths
            for name in self.implementations
            for precision in self.resolved_precisions
            if can_do(name, subject, step, backend, precision)
            for variant in self.variants(subject, name)
            for block in (self.block_lengths if has_blocks(name, subject) else [None])
            for rows in (self.projected_lengths if projects(name, subject) else [None])
            if rows is None or rows <= (block or length)
        ]
        return [point for point in points if point.projected_length != 0 or point.window_length]

    def variants(self, subject: Subject, name: str) -> tuple[str, ...]:
        if self.model is not None and projects(name, subject):
            saved = saved_config(self.model)
            return (window_variant(saved.window_length, saved.projection),)
        if has_window(name, subject):
            return tuple(map(window_variant, self.window_lengths))
        return VARIANTS.get((subject, name), ("",))

    @property
    def resolved_precisions(self) -> list[str]:
        """The precisions, each once, with the fastest one of the device for `auto`."""
        found = (fastest_precision(self.device) if name == "auto" else name for name in self.precisions)
        return list(dict.fromkeys(found))

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes, the model and the device, which all points have in common."""
        names = ("hidden_size", "num_heads", "num_layers", "sharing", "target_length", "device", "model")
        return {name: getattr(self, name) for name in names}


PAPER_TABLE_3, ENCODER_ONLY = "paper-table-3", "encoder-only"
PRESETS: dict[str, dict[str, Any]] = {
    # inference with one E for all layers, against attention that stores its weights, in the largest possible batches
    PAPER_TABLE_3: {
        "lengths": [2**power for power in range(9, 17)],
        "projected_lengths": [128, 256, 512, 1024, 2048],
        "implementations": [OURS, BERT_EAGER],
        "subjects": ["encoder"],
        "steps": ["forward"],
        "sharing": "layerwise",
        "tokens": 0,
        "seconds": 60.0,
        "rounds": 5,
        "time_limit": 120.0,
    },
    # an encoder with projection and with full attention, as it is used and unfused
    ENCODER_ONLY: {
        "lengths": [2**power for power in range(9, 14)],
        "projected_lengths": [64, 128, 256],
        "implementations": [OURS, FULL, FULL_EAGER],
        "subjects": ["encoder"],
        "steps": ["forward"],
        "tokens": 8192,
    },
}


def read_sweep(keys: Mapping[str, Any]) -> Sweep:
    """Check keys and values."""
    sweep: Sweep = converted(with_sizes_of_model(with_current_names(dict(keys))), Sweep, "")
    for name in LISTS:
        if not getattr(sweep, name):
            raise UserError(f"{name} is empty; pass at least one")
    for name, backend in product(sweep.implementations, sweep.backends):
        if name not in IMPLEMENTATIONS:
            known = list(IMPLEMENTATIONS)
            hint = nearest_of(name, known) or ";"
            raise UserError(f"there is no implementation {name!r}{hint} known: {', '.join(known)}")
        if version_of(name, backend) is None:
            what = IMPLEMENTATIONS[name].package if backend == "torch" else f"Keras or the backend of {backend}"
            extra = "bench" if backend == "torch" else "keras,tensorflow,jax"
            raise UserError(f'{what} is not installed; run: pip install "linformer-kit[{extra}]", or leave it out')
    check_combinations(sweep)
    check_sizes(sweep)
    check_windows(sweep)
    if "torch" in sweep.backends:
        check_device(sweep.device)
    for subject in TRAINING_SUBJECTS:
        if subject in sweep.subjects and sweep.device != "cpu":
            raise UserError(f"device is {sweep.device}, but the subject {subject} is measured on the CPU; use cpu")
    return sweep


def with_current_names(value: Any, key: str = "") -> Any:
    """The value of a key, in lists and targets too, with former names replaced; each gets a warning."""
    if isinstance(value, dict):
        return {name: with_current_names(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [with_current_names(each, key) for each in value]
    column = str(key).removesuffix("s")
    if not isinstance(value, str) or (name := current_name(column, value)) == value:
        return value
    warnings.warn(f"the {column} {value} is now called {name}", FutureWarning, stacklevel=2)
    return name


def with_sizes_of_model(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys; those of a sweep with `model` are completed by the sizes of its encoder."""
    if not isinstance(model := keys.get("model"), str):
        return dict(keys)
    config = saved_config(model)
    fixed = {
        "subjects": ["encoder"],
        "backends": ["torch"],
        "projected_lengths": [max(config.projected_lengths)],
        "window_lengths": [config.window_length],
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_layers": config.num_hidden_layers,
        "sharing": config.sharing,
    }
    for name, value in fixed.items():
        if keys.get(name, value) != value:
            raise UserError(f"{name} is {keys[name]}, but the encoder in {model} has {value}; remove one of the keys")
    return {"implementations": [OURS, FULL], **keys, **fixed}


def check_combinations(sweep: Sweep) -> None:
    """Every implementation must have something to measure."""
    for name in sweep.implementations:
        combinations = product(sweep.subjects, sweep.steps, sweep.backends, sweep.resolved_precisions)
        if not any(can_do(name, *combination) for combination in combinations):
            subjects = ", ".join(IMPLEMENTATIONS[name].builds)
            requested = (
                f"{' and '.join(sweep.subjects)} × {' and '.join(sweep.steps)} on {' and '.join(sweep.backends)} in "
                f"{' and '.join(sweep.resolved_precisions)}"
            )
            raise UserError(f"{name} has nothing to measure for {requested}; it has the subjects {subjects}")
        if sweep.model is not None and name not in (OURS, FULL, FULL_EAGER):
            raise UserError(
                f"implementations has {name}, which cannot have the configuration of {sweep.model}; leave it out, or "
                "compare sizes instead of a model"
            )
        if sweep.sharing != "headwise" and name in (LINFORMER, LINFORMER_PYTORCH):
            raise UserError(
                f"sharing is {sweep.sharing}, but {name} supports headwise only; leave it out, or use headwise"
            )


def check_sizes(sweep: Sweep) -> None:
    """Check values that depend on each other."""
    if sweep.hidden_size % sweep.num_heads:
        raise UserError(
            f"hidden_size is {sweep.hidden_size}, which is not divisible by num_heads, which is {sweep.num_heads}"
        )
    if sweep.interleave_lengths and not sweep.batch and not sweep.tokens:
        raise UserError(
            "tokens is 0, which finds a batch for each length; with interleave_lengths, set batch or tokens"
        )
    rows, length = max(sweep.projected_lengths), max(sweep.lengths)
    if rows > length and any(IMPLEMENTATIONS[name].projects for name in sweep.implementations):
        raise UserError(
            f"projected_lengths has {rows:,}, but no length is larger than {length:,}, so nothing would be shortened; "
            "use a smaller K, or longer inputs"
        )


def check_windows(sweep: Sweep) -> None:
    """A window needs an implementation that has one, and K = 0 needs a window."""
    windows = [length for length in sweep.window_lengths if length]
    if windows and not any(has_window(*each) for each in product(sweep.implementations, sweep.subjects)):
        found = [name for name in IMPLEMENTATIONS if has_window(name, "encoder")]
        raise UserError(
            f"window_lengths has {windows[0]}, but nothing in this sweep has a window; add one of {', '.join(found)} "
            "with the subject layer or encoder, or leave it out"
        )
    if odd := [length for length in windows if LONGFORMER in sweep.implementations and length % 2]:
        raise UserError(
            f"window_lengths has {odd[0]}, but {LONGFORMER} needs an even window, half of it on either side; use an "
            f"even number, or leave out {LONGFORMER}"
        )
    if 0 in sweep.projected_lengths and not windows:
        raise UserError(
            "projected_lengths has 0, which only layers with a window can have; add window_lengths, or use at least 1"
        )


def check_device(device: str) -> None:
    """Raise `UserError` for a device that PyTorch does not have on this machine."""
    try:
        torch.empty(1, device=device).item()  # fails on the meta device
    except (RuntimeError, AssertionError, NotImplementedError):
        found = [str(torch.accelerator.current_accelerator())] if torch.accelerator.is_available() else []
        raise UserError(f"device {device!r} is not available; available: {', '.join(['cpu', *found])}") from None


def read_keys(path: Path) -> dict[str, Any]:
    """The keys of a sweep in a file."""
    if not path.is_file():
        raise UserError(f"there is no file {path}; pass a YAML file with the keys of a sweep (docs/compare.md)")
    keys = read_yaml(path, "a sweep")
    if not isinstance(keys, dict):
        raise UserError(f"{path} has no keys; it may have {', '.join(asdict(Sweep()))}")
    return keys


def split_list(text: str, kind: type[int] | type[str]) -> list[Any]:
    """Split the value of a flag at commas.

    >>> split_list("512,1024", int)
    [512, 1024]
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return [kind(part) for part in parts]
    except ValueError:
        raise UserError(f"{text!r} is not a list of integers, such as 512,1024") from None
