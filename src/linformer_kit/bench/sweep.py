"""What `linformer compare` measures: length × K × implementation × subject × step, from YAML, flags or a preset.

>>> sweep = read_sweep({"lengths": [256, 1024], "projected_lengths": [64, 512], "implementations": ["linformer-kit", "linformer"]})
>>> [(group.length, [point.projected_length for point in group.points(batch=1)]) for group in sweep.groups()]
[(256, [64, 64]), (1024, [64, 512, 64, 512])]
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch

from ..errors import UserError
from ..models.options_linformer import nearest_of
from ..schema import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, Bounds, converted
from ..yaml_loader import read_yaml
from .implementations import BERT_EAGER, IMPLEMENTATIONS, OURS, OURS_NONE, Point, Sharing, Step, Subject, version_of
from .peers import LINFORMER, LINFORMER_PYTORCH

Count = Annotated[int, AT_LEAST_1]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The points to measure, and how long that may take."""

    lengths: list[Count] = field(default_factory=lambda: [512, 1024, 2048, 4096])
    projected_lengths: list[Count] = field(default_factory=lambda: [128])
    implementations: list[str] = field(default_factory=lambda: [OURS, OURS_NONE, LINFORMER, LINFORMER_PYTORCH])
    subjects: list[Subject] = field(default_factory=lambda: ["layer"])
    steps: list[Step] = field(default_factory=lambda: ["forward"])
    # tokens of a batch, as far as one example is not longer; 0: as many examples as memory and time allow
    tokens: Annotated[int, NOT_NEGATIVE] = 4096
    hidden_size: Count = 512
    num_heads: Count = 8
    num_layers: Count = 4
    sharing: Sharing = "headwise"
    target_length: Annotated[int, Bounds("at least 2", lambda number: number >= 2)] = 64
    device: str = "cpu"
    seconds: Annotated[float, POSITIVE] = (
        20.0  # for the rounds of one length, subject and step; three rounds there are at least
    )
    rounds: Count = 9  # at most
    time_limit: Annotated[float, POSITIVE] = 60.0  # seconds of a call

    def groups(self) -> list["Group"]:
        """What takes turns with each other; the short ones first, so that a run that is stopped early has most of it."""
        combinations = product(sorted(set(self.lengths)), self.subjects, self.steps)
        groups = [Group(self, subject, step, length) for length, subject, step in combinations]
        return [group for group in groups if group.points(batch=1)]

    @property
    def sizes(self) -> dict[str, Any]:
        """What all points have in common."""
        names = ("hidden_size", "num_heads", "num_layers", "sharing", "target_length", "device")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Group:
    """The points of one length, subject and step."""

    sweep: Sweep
    subject: Subject
    step: Step
    length: int

    def points(self, batch: int) -> list[Point]:
        """Those that can be: who has no such subject, or would get more rows than tokens, takes no part."""
        return [
            Point(self.subject, self.step, name, self.length, rows, batch, **self.sweep.sizes)
            for name in self.sweep.implementations
            if can_do(name, self.subject, self.step)
            for rows in (self.sweep.projected_lengths if IMPLEMENTATIONS[name].projects else [None])
            if rows is None or rows <= self.length
        ]

    def __str__(self) -> str:
        return f"{self.subject}, {self.step}, N={self.length:,}"


def can_do(implementation: str, subject: Subject, step: Step) -> bool:
    """Whether there is such a thing."""
    return subject in IMPLEMENTATIONS[implementation].builds and (step != "generation" or subject == "encoder-decoder")


PAPER_TABLE_3 = "paper-table-3"
PRESETS: dict[str, dict[str, Any]] = {
    # inference, sharing by layers, beside attention that stores all its weights, in the largest possible batches
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
}


def read_sweep(keys: Mapping[str, Any]) -> Sweep:
    """Checked keys and values."""
    sweep: Sweep = converted(keys, Sweep, "")
    for name in ("lengths", "projected_lengths", "implementations", "subjects", "steps"):
        if not getattr(sweep, name):
            raise UserError(f"{name} is empty; give at least one")
    for name in sweep.implementations:
        if name not in IMPLEMENTATIONS:
            known = list(IMPLEMENTATIONS)
            raise UserError(f"there is no implementation {name!r}{nearest_of(name, known)} known: {', '.join(known)}")
        if version_of(name) is None:
            package = IMPLEMENTATIONS[name].package
            raise UserError(f'{package} is not installed; run: pip install "linformer-kit[bench]", or leave {name} out')
    check_sizes(sweep)
    check_device(sweep.device)
    return sweep


def check_sizes(sweep: Sweep) -> None:
    """What types cannot say."""
    if sweep.hidden_size % sweep.num_heads:
        raise UserError(
            f"hidden_size is {sweep.hidden_size}, which {sweep.num_heads} heads cannot share; num_heads must divide it"
        )
    if any(IMPLEMENTATIONS[name].projects for name in sweep.implementations):
        for rows in sweep.projected_lengths:
            if rows > max(sweep.lengths):
                raise UserError(
                    f"projected_lengths has {rows:,}, but no length is larger than {max(sweep.lengths):,}: K rows instead "
                    "of N tokens save nothing then; give a smaller K, or greater lengths"
                )
    for name in sweep.implementations:
        if not any(can_do(name, subject, step) for subject, step in product(sweep.subjects, sweep.steps)):
            subjects = ", ".join(IMPLEMENTATIONS[name].builds)
            raise UserError(
                f"{name} takes no part in {words(sweep.subjects)} × {words(sweep.steps)}; it has {subjects}"
            )
        if sweep.sharing != "headwise" and name in (LINFORMER, LINFORMER_PYTORCH):
            raise UserError(
                f"sharing is {sweep.sharing}, but {name} is compared with headwise only; leave it out, or use headwise"
            )
    for subject, step in product(sweep.subjects, sweep.steps):
        if step == "generation" and "encoder-decoder" not in sweep.subjects:
            raise UserError(f"steps has generation, but {subject} generates nothing; add encoder-decoder to subjects")


def check_device(device: str) -> None:
    """Refuse a device that PyTorch does not have here."""
    try:
        torch.empty(1, device=device).item()  # which meta tensors cannot do
    except (RuntimeError, AssertionError, NotImplementedError):
        found = [str(torch.accelerator.current_accelerator())] if torch.accelerator.is_available() else []
        raise UserError(f"device is {device!r}; PyTorch has here: {', '.join(['cpu', *found])}") from None


def words(names: Iterable[str]) -> str:
    return " and ".join(names)


def keys_in(path: Path) -> dict[str, Any]:
    """The keys of a sweep in a file."""
    keys = read_yaml(path, "a sweep")
    if not isinstance(keys, dict):
        raise UserError(f"{path} holds no keys; it may have {', '.join(asdict(Sweep()))}")
    return keys


def split_list(text: str, kind: type[int] | type[str]) -> list[Any]:
    """A flag with several values.

    >>> split_list("512,1024", int)
    [512, 1024]
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return [kind(part) for part in parts]
    except ValueError:
        raise UserError(f"{text!r} is not a list of whole numbers, such as 512,1024") from None
