"""`linformer benchmark`: the inference time of one attention layer, compared with full attention of the same sizes.

As in `linformer compare`, each layer first runs in a separate process, then both in interleaved rounds.
"""

import os
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from ..errors import UserError
from ..formatting import format_duration, format_size, plural
from ..precision import fastest_precision
from .implementations import BACKEND_PACKAGES
from .isolated import Isolated, measure_isolated, measure_rounds
from .layers import make_layer
from .machine import describe_machine, version_of
from .measure import OK, Timing, as_row
from .point import FULL, OURS, Point, window_variant
from .sweep import check_device

LAYERS = {"Linformer": OURS, "full attention": FULL}
TIME_LIMIT = 120.0  # seconds of a call


@dataclass(frozen=True)
class Experiment:
    """The sizes, by the names of the command line; `hidden_dim` is the size of a head."""

    sequence_length: int
    batch_size: int
    embedding_dim: int
    projection_dim: int
    num_heads: int
    hidden_dim: int
    projection: str
    sharing: str
    backend: str
    device: str
    window_length: int = 0
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.projection_dim > self.sequence_length:
            raise UserError(
                f"--projection-dim is {self.projection_dim:,}; it must be at most --sequence-length, which is "
                f"{self.sequence_length:,}"
            )
        if self.backend != "torch" and self.precision not in ("auto", "float32"):
            raise UserError(
                f"--precision is {self.precision}, which is measured with PyTorch only; use --backend torch, or "
                "--precision float32"
            )
        try:
            with torch.device("meta"):
                make_layer(self.point("Linformer", "torch"))
        except (RuntimeError, TypeError, ValueError) as error:  # incompatible options, sizes that are too large
            raise UserError(str(error).splitlines()[0]) from None

    @property
    def resolved_precision(self) -> str:
        """With `auto`, the fastest one of the device; Keras layers are measured in float32."""
        if self.precision != "auto":
            return self.precision
        return fastest_precision(self.device) if self.backend == "torch" else "float32"

    def point(self, layer: str, backend: str) -> Point:
        """The point of one of the two layers."""
        is_ours = LAYERS[layer] == OURS
        return Point(
            *("layer", "forward", LAYERS[layer], self.sequence_length),
            *(self.projection_dim if is_ours else None, self.batch_size),
            variant=window_variant(self.window_length, self.projection) if is_ours else "",
            backend=backend,  # type: ignore[arg-type]
            hidden_size=self.embedding_dim,
            num_heads=self.num_heads,
            head_dim=self.hidden_dim,
            sharing=self.sharing,
            precision=self.resolved_precision,  # type: ignore[arg-type]
            device=self.device,
        )


def measure(experiment: Experiment, console: Console) -> dict[str, Any]:
    """All measurements as plain values."""
    backend, facts = keras_backend(experiment.device) if experiment.backend == "keras" else ("torch", {})
    if experiment.backend == "torch":
        check_device(experiment.device)
    points = {layer: experiment.point(layer, backend) for layer in LAYERS}
    with console.status("peak memory, each layer in a new process"):
        isolated = {layer: measure_isolated(point, TIME_LIMIT) for layer, point in points.items()}
    passed = [point for layer, point in points.items() if isolated[layer].status == OK]
    with console.status("time, interleaved"):
        # with the default allocator, as users run it
        rounds = measure_rounds(passed, seconds=30.0, rounds=9, hold=False) if passed else {}
    timings = {layer: rounds.get(point, Timing(isolated[layer].status)) for layer, point in points.items()}
    ours, full = (timings[layer].median for layer in LAYERS)
    return {
        "settings": {**asdict(experiment), "precision": experiment.resolved_precision, **facts},
        "layers": {layer: layer_facts(isolated[layer], timings[layer]) for layer in LAYERS},
        "ratio": full / ours if ours and full else None,
        "machine": describe_machine(),
    }


def layer_facts(found: Isolated, timing: Timing) -> dict[str, Any]:
    parts = {name: {"shape": shape, "parameters": prod(shape)} for name, shape in found.parameters.items()}
    return {
        **as_row(timing),
        "peak_mib": found.peak_mib,
        "note": found.note or timing.note,
        "parameters": sum(map(prod, found.parameters.values())),
        "parts": parts,
    }


def keras_backend(device: str) -> tuple[str, dict[str, str]]:
    """The backend that KERAS_BACKEND or the configuration of Keras selects."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        import keras
    except ValueError as error:  # KERAS_BACKEND is unknown
        raise UserError(f"Keras cannot be imported: {error}") from None
    backend = keras.backend.backend()
    if backend == "torch":
        check_device(device)
    else:
        devices = [*keras.distribution.list_devices()]
        if device not in devices and device not in [name.split(":")[0] for name in devices]:
            raise UserError(f"device {device!r} is not available; Keras on {backend} has {', '.join(devices)}")
    version = version_of(*BACKEND_PACKAGES[backend])
    return f"keras-{backend}", {"keras": f"{keras.__version__} on {backend} {version}"}


def show(found: dict[str, Any], console: Console) -> None:
    """Settings, layers with their parameters, time and memory."""
    settings = Table("setting", "value", box=SIMPLE_HEAD)
    for name, value in found["settings"].items():
        settings.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    parameters = Table("layer", Column("part", overflow="fold"), "shape", "parameters", box=SIMPLE_HEAD)
    times = Table("layer", "time, median", "fastest – slowest", "rounds", "peak memory", box=SIMPLE_HEAD)
    for which, layer in found["layers"].items():
        for name, part in layer["parts"].items():
            shape = " × ".join(f"{size:,}" for size in part["shape"])
            parameters.add_row(which, name, shape, f"{part['parameters']:,}")
        parameters.add_row(which, "total", "", f"{layer['parameters']:,}", style="bold", end_section=True)
        median, peak = layer["seconds_median"], layer["peak_mib"]
        spread = [format_duration(layer[name]) for name in ("seconds_fastest", "seconds_slowest") if median]
        time = format_duration(median) if median else layer["status"]
        memory = "" if peak is None else format_size(peak)
        times.add_row(which, time, " – ".join(spread), str(layer["rounds"] or ""), memory)
    console.print(settings, parameters, times)
    for layer in found["layers"].values():
        if layer["note"]:
            console.print(layer["note"], highlight=False)
    if found["ratio"]:
        console.print(f"Full attention takes {found['ratio']:.2f} times as long.", highlight=False)
    machine = found["machine"]
    counts = ", ".join(plural(machine[f"{noun}s"], noun) for noun in ("core", "thread") if machine[f"{noun}s"])
    keras = found["settings"].get("keras")
    framework = f"Keras {keras}" if keras else f"torch {machine['torch']}"
    console.print(
        f"{machine['cpu']}, {counts}, {framework}, {found['settings']['precision']}, warm", style="dim", highlight=False
    )
