"""`linformer benchmark`: how long one attention layer takes to predict, beside full attention of the same sizes.

Each of the two first goes alone through a fresh process (`python -m linformer_kit.bench.prediction_time JSON`), which checks it,
measures its peak memory and sees whether it can be timed; then they take turns.

Shapes: B batch, N length, P positions that are compared, K projected length, H heads, D head size, C model size.
"""

import copy
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..errors import UserError
from ..formatting import format_duration, format_size
from ..models.attention_linformer import LinformerAttention
from .implementations import PlainLayer, call_and_wait, checked_examples
from .isolated import START_SECONDS, Solo, measure_call
from .machine import describe_machine
from .measure import OK, WRONG, Timing, as_row, is_out_of_memory, limit_memory, make_call, time_interleaved
from .peers import COMPARED_POSITIONS, WrongImplementation, randomise_, require_agreement
from .subprocess_call import WorkerFailed, ask
from .sweep import check_device

Which = Literal["Linformer", "full attention"]
WHICH: tuple[Which, ...] = ("Linformer", "full attention")
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

    def __post_init__(self) -> None:
        if self.projection_dim > self.sequence_length:
            raise UserError(
                f"--projection-dim is {self.projection_dim:,}, but there are only {self.sequence_length:,} tokens to shorten; "
                "give at most --sequence-length"
            )
        try:
            with torch.device("meta"):
                torch_layer(self, "Linformer")
        except (
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:  # options that do not go together, sizes beyond all bounds
            raise UserError(str(error).splitlines()[0]) from None

    def options_of(self, which: Which) -> dict[str, Any]:
        """The two layers differ in one option."""
        return (
            {"projection": "none"}
            if which == "full attention"
            else {"projection": self.projection, "sharing": self.sharing}
        )


@dataclass(frozen=True)
class Contestant:
    """A layer that is ready to be timed."""

    call: Callable[[], object]
    parameters: dict[str, tuple[tuple[int, ...], int]]  # shape and count, by name


def build(experiment: Experiment, which: Which) -> Contestant:
    """One of the two, checked."""
    make = build_keras if experiment.backend == "keras" else build_torch
    torch.manual_seed(0)
    return make(experiment, which)


def build_torch(experiment: Experiment, which: Which) -> Contestant:
    layer = torch_layer(experiment, which).eval()
    randomise_(layer)
    x_BNC = torch.randn(experiment.batch_size, experiment.sequence_length, experiment.embedding_dim)
    some_BNC = x_BNC[: checked_examples(*x_BNC.shape[:2])]
    with torch.no_grad():
        check(experiment, which, layer, layer(some_BNC), some_BNC)
    parameters = {name: (tuple(weight.shape), weight.numel()) for name, weight in layer.named_parameters()}
    device = torch.device(experiment.device)
    call = make_call(layer.to(device), x_BNC.to(device), "forward")
    return Contestant(call if device.type == "cpu" else lambda: call_and_wait(call, device), parameters)


def torch_layer(experiment: Experiment, which: Which) -> LinformerAttention:
    return LinformerAttention(
        experiment.embedding_dim,
        experiment.num_heads,
        head_dim=experiment.hidden_dim,
        max_length=experiment.sequence_length,
        projected_length=experiment.projection_dim,
        **experiment.options_of(which),
    )


def build_keras(experiment: Experiment, which: Which) -> Contestant:
    """Keras's own layer is the full attention here; each is a model of one layer, as `predict_on_batch` wants it."""
    import keras
    import numpy as np

    from ..keras import LinearMultiHeadAttention

    sizes: dict[str, Any] = {"num_heads": experiment.num_heads, "key_dim": experiment.hidden_dim}
    options: dict[str, Any] = {"projection": experiment.projection, "sharing": experiment.sharing}
    with keras.device(experiment.device):
        keras.utils.set_random_seed(0)
        if which == "full attention":
            layer = keras.layers.MultiHeadAttention(**sizes)
        else:
            layer = LinearMultiHeadAttention(**sizes, projection_dim=experiment.projection_dim, **options)
        x = keras.Input((experiment.sequence_length, experiment.embedding_dim))
        model = keras.Model(x, layer(x, x))
    x_BNC = np.random.default_rng(0).standard_normal(
        (experiment.batch_size, experiment.sequence_length, experiment.embedding_dim), dtype=np.float32
    )
    if which == "Linformer":
        for weight in layer.projection.weights:  # as `randomise_` does
            weight.assign(np.random.default_rng(0).normal(0, experiment.sequence_length**-0.5, weight.shape))
    some_BNC = x_BNC[: checked_examples(*x_BNC.shape[:2])]
    output_BNC = torch.from_numpy(np.array(model.predict_on_batch(some_BNC)))
    check(experiment, which, twin(experiment, which, layer), output_BNC, torch.from_numpy(some_BNC))
    parameters = {weight.path: (tuple(weight.shape), int(np.prod(weight.shape))) for weight in layer.weights}

    def predict() -> object:
        with keras.device(experiment.device):
            return model.predict_on_batch(x_BNC)

    return Contestant(predict, parameters)


def twin(experiment: Experiment, which: Which, layer: Any) -> LinformerAttention:
    """Our PyTorch layer with the weights of a Keras layer."""
    import keras

    ours = torch_layer(experiment, which)
    features = experiment.num_heads * experiment.hidden_dim

    def tensor(weight: Any) -> torch.Tensor:
        return torch.from_numpy(keras.ops.convert_to_numpy(weight).copy())

    pairs = {
        "query": layer.query_dense,
        "key": layer.key_dense,
        "value": layer.value_dense,
        "output": layer.output_dense,
    }
    weights = {}
    for name, dense in pairs.items():
        rows = features if name == "output" else experiment.embedding_dim
        weights[f"{name}.weight"], weights[f"{name}.bias"] = (
            tensor(dense.kernel).reshape(rows, -1).T,
            tensor(dense.bias).flatten(),
        )
    if which == "Linformer":
        weights |= {f"projection.{weight.name}": tensor(weight) for weight in layer.projection.weights}
    ours.load_state_dict(weights)
    return ours


@torch.no_grad()
def check(
    experiment: Experiment, which: Which, layer: LinformerAttention, output_BNC: torch.Tensor, x_BNC: torch.Tensor
) -> None:
    """Refuse a layer whose output at some positions is not that of a float64 evaluation: the plainest there is, for a learned E."""
    exact = copy.deepcopy(layer).cpu().double()
    has_plain = which == "full attention" or (experiment.projection == "linear" and experiment.sharing != "none")
    evaluate = PlainLayer(exact) if has_plain else exact
    position_P, x64_BNC = torch.linspace(0, x_BNC.shape[1] - 1, COMPARED_POSITIONS).long(), x_BNC.double()
    require_agreement(which, "output", output_BNC[:, position_P], evaluate(x64_BNC[:, position_P], x64_BNC))


# measuring


def alone(experiment: Experiment, which: Which) -> Solo:
    """Peak memory, from a fresh process, or why there is none."""
    question = {"experiment": asdict(experiment), "which": which}
    try:
        return Solo(**ask(__name__, question, START_SECONDS + 3 * TIME_LIMIT))
    except WorkerFailed as end:
        return Solo(end.status)


def measure(experiment: Experiment, console: Console) -> dict[str, Any]:
    """Everything that is shown, as plain values."""
    facts = {"keras": keras_facts(experiment.device)} if experiment.backend == "keras" else {}
    if experiment.backend == "torch":
        check_device(experiment.device)
    with console.status("peak memory, each in a process of its own"):
        solos = {which: alone(experiment, which) for which in WHICH}
    contestants = {which: build(experiment, which) for which in WHICH if solos[which].status == OK}
    with console.status("time, in turns"):
        timings = time_interleaved(
            {which: contestant.call for which, contestant in contestants.items()}, budget_seconds=30.0
        )
    timings = {which: timings.get(which, Timing(solos[which].status)) for which in WHICH}
    ours, full = (timings[which].median for which in WHICH)
    return {
        "settings": {**asdict(experiment), **facts},
        "layers": {
            which: {
                **as_row(timings[which]),
                "peak_mib": None if (peak := solos[which].peak_bytes) is None else peak / 2**20,
                "note": solos[which].note,
                "parameters": sum(count for _, count in parts.values()),
                "parts": {name: {"shape": list(shape), "parameters": count} for name, (shape, count) in parts.items()},
            }
            for which in WHICH
            for parts in [contestants[which].parameters if which in contestants else {}]
        },
        "ratio": full / ours if ours and full else None,
        "machine": describe_machine({}),
    }


def keras_facts(device: str) -> str:
    """Which Keras, on what; TensorFlow is told to be silent about itself."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        import keras
    except ValueError as error:  # KERAS_BACKEND names something else
        raise UserError(f"Keras does not start: {error}") from None
    if keras.backend.backend() == "torch":
        check_device(device)
    elif device not in (devices := [*keras.distribution.list_devices()]) and device not in [
        name.split(":")[0] for name in devices
    ]:
        raise UserError(f"device is {device!r}; Keras on {keras.backend.backend()} has here: {', '.join(devices)}")
    return f"{keras.__version__} on {keras.backend.backend()}"


def show(found: dict[str, Any], console: Console) -> None:
    """Settings, layers with their parameters, time and memory."""
    settings = Table("setting", "value", box=SIMPLE_HEAD)
    for name, value in found["settings"].items():
        settings.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    parameters = Table("layer", "part", "shape", "parameters", box=SIMPLE_HEAD)
    for which, layer in found["layers"].items():
        for name, part in layer["parts"].items():
            parameters.add_row(
                which, name, " × ".join(f"{size:,}" for size in part["shape"]), f"{part['parameters']:,}"
            )
        parameters.add_row(which, "in all", "", f"{layer['parameters']:,}", style="bold", end_section=True)
    times = Table("layer", "time, median", "fastest – slowest", "rounds", "peak memory", box=SIMPLE_HEAD)
    for which, layer in found["layers"].items():
        median, peak = layer["seconds_median"], layer["peak_mib"]
        spread = [format_duration(layer[name]) for name in ("seconds_fastest", "seconds_slowest") if median]
        time = format_duration(median) if median else layer["status"]
        times.add_row(
            which, time, " – ".join(spread), str(layer["rounds"] or ""), "" if peak is None else format_size(peak)
        )
    console.print(settings, parameters, times)
    for layer in found["layers"].values():
        if layer["note"]:
            console.print(layer["note"], highlight=False)
    if found["ratio"]:
        console.print(f"Full attention takes {found['ratio']:.2f} times as long.", highlight=False)
    machine = found["machine"]
    facts = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}, float32, warm"
    console.print(facts, style="dim", highlight=False)


def main() -> None:
    question = json.loads(sys.argv[1])
    experiment = Experiment(**question["experiment"])
    limit_memory()
    try:
        # the check was a call already: libraries are loaded and threads started
        # what a GPU takes for Keras is not known: its backends do not tell
        on_cpu = experiment.device.startswith("cpu")
        device = torch.device("cpu" if on_cpu else "meta" if experiment.backend == "keras" else experiment.device)
        found = measure_call(build(experiment, question["which"]).call, device, TIME_LIMIT)
    except WrongImplementation as error:
        found = Solo(WRONG, note=str(error))
    except Exception as error:  # each backend of Keras has its own way to say that memory ran out
        if "memory" not in str(error).lower() and not is_out_of_memory(error):
            raise
        raise MemoryError("not enough memory") from error
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
