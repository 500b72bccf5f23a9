"""Speed of `LinearMultiHeadAttention` beside `keras.layers.MultiHeadAttention`, on each backend of Keras: `make bench`.

Writes to results/: keras.csv (backend × mode × length × layer), keras_machine.json, keras_targets.csv and keras.png.
Every backend, mode and length is kept as soon as it is measured: stop at any time, run again to go on.

- Self-attention of width 256 with 8 heads, as a model of one layer, `x -> layer(x, x)`, compiled with "sgd" and "mse", float32;
  ours with projection="linear", sharing="headwise". Batches hold 8192 tokens, the same for all layers.
- "predict" is `model.predict_on_batch`, "training step" is `model.train_on_batch`, each until its result is there: JAX returns
  before. Both begin with NumPy arrays. Jitted or not is up to Keras.
- Before anything is timed on a backend, all layers are compared with the float64 reference, on a short input with random weights;
  and ours without projection with MultiHeadAttention: equal in every bit.
- Time: layers take turns, in an order that changes; medians over the rounds, the calls that compile not counted.
- Each backend has a process of its own, as Keras finds it: not one that holds its memory, unlike in other benchmarks of layers.

Shapes: B batch, N length, K projected length, H heads, D head size, C width.
"""

# Keras is imported where it is used: it looks at KERAS_BACKEND once, which only the process of a backend has set
import gc
import logging
import os
import re
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from keras_layers_summary import BACKENDS, FULL, MODES, OURS, PREDICT, our_name, summarise

from linformer_kit import reference
from linformer_kit.bench.machine import code_fingerprint, describe_machine
from linformer_kit.bench.measure import MEASURED, OUT_OF_MEMORY, Timing, as_row, seconds_if_it_fits, time_interleaved
from linformer_kit.bench.peers import MissingPeer, WrongImplementation, require_agreement
from linformer_kit.bench.run import Program, Step, fail, in_words, run_program
from linformer_kit.csv_tables import Table

RESULTS = Path(__file__).resolve().parent.parent / "results"
MEASUREMENTS, MACHINE = "keras.csv", "keras_machine.json"
# packages that bring a backend; the second is the first without what only GPUs need
DISTRIBUTIONS = {"tensorflow": ("tensorflow", "tensorflow-cpu")}
# what is compared before timing: outputs at a few positions, each of which depends on every token
COMPARED_BATCH, COMPARED_LENGTH, COMPARED_POSITIONS = 2, 48, (0, 17, 47)


@dataclass(frozen=True)
class Sweep:
    """Which points are measured."""

    name: str
    width: int
    heads: int
    lengths: tuple[int, ...]
    projected_lengths: tuple[int, ...]
    tokens: int  # per batch
    budget_seconds: float  # for the rounds of one point
    least_rounds: int
    most_rounds: int

    def batch(self, length: int) -> int:
        return max(1, self.tokens // length)


COMPLETE = Sweep(
    name="complete",
    width=256,
    heads=8,
    lengths=(512, 1024, 2048, 4096, 8192),
    projected_lengths=(64, 256),
    tokens=8192,
    budget_seconds=10.0,
    least_rounds=3,
    most_rounds=25,
)
QUICK = Sweep(
    name="quick",
    width=16,
    heads=2,
    lengths=(32, 64),
    projected_lengths=(4, 8),
    tokens=64,
    budget_seconds=0.1,
    least_rounds=1,
    most_rounds=1,
)


# models; from here to "what is measured" everything happens in the process of a backend


def make_layers(sweep: Sweep) -> dict[str, Any]:
    """The layers that are compared, by their names."""
    import keras

    from linformer_kit.keras import LinearMultiHeadAttention

    sizes = (sweep.heads, sweep.width // sweep.heads)
    options = {"projection": "linear", "sharing": "headwise"}
    ours = {our_name(k): LinearMultiHeadAttention(*sizes, projection_dim=k, **options) for k in sweep.projected_lengths}
    return {FULL: keras.layers.MultiHeadAttention(*sizes), **ours}


def model_of(layer: Any, length: int, width: int) -> Any:
    """The layer as a model, ready to predict and to be trained."""
    import keras

    x = keras.Input((length, width))
    model = keras.Model(x, layer(x, x))
    model.compile("sgd", "mse")
    return model


def check_layers(sweep: Sweep) -> None:
    """Raise `WrongImplementation` unless every layer, with these sizes, computes what it should."""
    from linformer_kit.keras import LinearMultiHeadAttention

    generator = np.random.default_rng(0)
    x_BNC = generator.standard_normal((COMPARED_BATCH, COMPARED_LENGTH, sweep.width), dtype=np.float32)
    layers = make_layers(sweep)
    for name, layer in layers.items():
        model = model_of(layer, COMPARED_LENGTH, sweep.width)
        randomise(layer, generator)
        actual_BPC = model.predict_on_batch(x_BNC)[:, COMPARED_POSITIONS]
        exact = reference_layer(layer)
        expected = [
            reference.linformer_attention(x_NC[list(COMPARED_POSITIONS)], x_NC, exact)[0]
            for x_NC in x_BNC.astype(float)
        ]
        require_agreement(name, "output", torch.from_numpy(actual_BPC), torch.from_numpy(np.array(expected)))

    full = layers[FULL]
    unprojected = LinearMultiHeadAttention(sweep.heads, sweep.width // sweep.heads, projection_dim=None)
    models = [model_of(layer, COMPARED_LENGTH, sweep.width) for layer in (full, unprojected)]
    unprojected.set_weights(full.get_weights())
    if not np.array_equal(*(model.predict_on_batch(x_BNC) for model in models)):
        raise WrongImplementation(
            f"{OURS} with projection_dim=None gives other numbers than {FULL} with the same weights; they must be equal in every "
            "bit, so nothing was timed"
        )


def randomise(layer: Any, generator: np.random.Generator) -> None:
    """Weights that make a mistake visible: biases that are not 0, and an E that makes rows of unit variance."""
    for weight in layer.weights:
        if weight.name == "bias":
            weight.assign(generator.normal(0, 0.1, weight.shape))
    if hasattr(layer, "projection"):
        E_NMK = layer.projection.weight
        E_NMK.assign(generator.normal(0, E_NMK.shape[0] ** -0.5, E_NMK.shape))


def reference_layer(layer: Any) -> reference.Layer:
    """The numbers of a layer for the float64 reference."""
    import keras

    def array(weight: Any) -> np.ndarray:
        return keras.ops.convert_to_numpy(weight).astype(float)

    def affine(dense: Any, inputs: int) -> reference.Affine:
        return reference.Affine(array(dense.kernel).reshape(inputs, -1).T, array(dense.bias).flatten())

    width, features = layer.query_dense.kernel.shape[0], layer.num_heads * layer.key_dim
    if hasattr(layer, "projection"):
        E_NMK = array(layer.projection.weight)
        key_rows, value_rows = (partial(reference.matrix_rows, E=E_NMK[:, matrix]) for matrix in (0, 1))
    else:
        key_rows = value_rows = np.asarray
    return reference.Layer(
        *(affine(dense, width) for dense in (layer.query_dense, layer.key_dense, layer.value_dense)),
        affine(layer.output_dense, features),
        layer.num_heads,
        layer.key_dim,
        [key_rows] * layer.num_heads,
        [value_rows] * layer.num_heads,
    )


# time


def make_call(model: Any, x_BNC: np.ndarray, y_BNC: np.ndarray, mode: str) -> Callable[[], object]:
    """What is measured: it returns when everything has been computed, and says MemoryError when memory runs out."""
    import keras

    def predict() -> object:
        return model.predict_on_batch(x_BNC)

    def train() -> object:
        model.train_on_batch(x_BNC, y_BNC)
        # JAX returns before the step is done; what is left of it would count as time of the next layer
        return keras.ops.convert_to_numpy(model.trainable_variables[0])

    call = predict if mode == PREDICT else train

    def call_or_memory_error() -> object:
        try:
            return call()
        except Exception as error:  # JAX and TensorFlow have classes of their own
            if re.search(r"RESOURCE_EXHAUSTED|Out of memory|OOM when allocating", str(error)):
                raise MemoryError(str(error)) from error
            raise

    return call_or_memory_error


def time_layers(sweep: Sweep, mode: str, length: int) -> dict[str, Timing]:
    """All layers at one point, taking turns, warm."""
    import keras

    generator = np.random.default_rng(0)
    x_BNC, y_BNC = generator.standard_normal((2, sweep.batch(length), length, sweep.width), dtype=np.float32)
    calls = {
        name: make_call(model_of(layer, length, sweep.width), x_BNC, y_BNC, mode)
        for name, layer in make_layers(sweep).items()
    }
    names = list(calls)
    # the first call compiles; whoever runs out of memory then has, on JAX, lost its weights too
    fitting = {name: call for name, call in calls.items() if seconds_if_it_fits(call) is not None}
    rounds = {
        "budget_seconds": sweep.budget_seconds,
        "least_rounds": sweep.least_rounds,
        "most_rounds": sweep.most_rounds,
    }
    timings = time_interleaved(fitting, **rounds)
    del calls, fitting  # and the models with them
    keras.utils.clear_session()
    gc.collect()
    return {name: timings.get(name, Timing(OUT_OF_MEMORY)) for name in names}


def begin_process(backend: str) -> None:
    """In the process of a backend, before Keras is imported."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the one that asks ends the other
    os.environ |= {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # it warns that every new model is compiled


# what is measured


class Benchmark:
    """The table of a folder, and the steps that fill it."""

    def __init__(self, sweep: Sweep, folder: Path):
        self.sweep, self.folder = sweep, folder
        self.table = Table(folder / MEASUREMENTS, ("backend", "mode", "length", "name"), ("batch", *MEASURED))
        self.process: tuple[str, ProcessPoolExecutor] | None = None

    def steps(self) -> list[Step]:
        """Everything there is to measure."""
        points = [(backend, mode, length) for backend in BACKENDS for mode in MODES for length in self.sweep.lengths]
        return [
            Step(
                f"{BACKENDS[backend]}, {mode}, N={length:,}",
                partial(self.is_timed, backend, mode, length),
                partial(self.time_point, backend, mode, length),
            )
            for backend, mode, length in points
        ]

    def is_timed(self, backend: str, mode: str, length: int) -> bool:
        """Layers of a point are timed together, so one of them tells for all."""
        return any(self.table.rows(backend=backend, mode=mode, length=length, name=FULL))

    def time_point(self, backend: str, mode: str, length: int) -> Iterable[str]:
        """All layers on one backend, in one mode, at one length."""
        timings = self.call(backend, time_layers, self.sweep, mode, length)
        key = {"backend": backend, "mode": mode, "length": length, "batch": self.sweep.batch(length)}
        self.table.put([{**key, "name": name, **as_row(timing)} for name, timing in timings.items()])
        yield in_words(f"{BACKENDS[backend]}, {mode}, N={length:,}", timings)

    def call(self, backend: str, function: Callable[..., Any], *args: Any) -> Any:
        """What the function gives in the process of a backend, once its layers have been checked there."""
        try:
            if self.process is None or self.process[0] != backend:
                process = self.begin(backend)
                process.submit(check_layers, self.sweep).result()
                self.process = backend, process
            return self.process[1].submit(function, *args).result()
        except BrokenProcessPool:
            fail(
                f"the process of {backend} ended by itself, which happens when memory runs out; free some, and the same command "
                "goes on from there"
            )
        except KeyboardInterrupt:
            for child in active_children():
                child.kill()
            raise

    def begin(self, backend: str) -> ProcessPoolExecutor:
        """The process of a backend, spawned: this one has imported Keras for another, and has threads. The one before it ends."""
        if self.process is not None:
            self.process[1].shutdown()
        return ProcessPoolExecutor(1, get_context("spawn"), begin_process, (backend,))


def version_of(package: str) -> str:
    """The installed version of Keras or of a backend."""
    for name in DISTRIBUTIONS.get(package, (package,)):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise MissingPeer(f'{package} is not installed; run: pip install "linformer-kit[bench,keras,tensorflow,jax]"')


def dependencies() -> dict[str, str]:
    """What the numbers depend on: times of different code must not be mixed."""
    versions = {package: version_of(package) for package in ("keras", *BACKENDS)}
    from linformer_kit.keras import attention, checks, projection, tokens

    return {**versions, "layer_code": code_fingerprint(attention, checks, projection, tokens)}


def main(
    output: Annotated[Path, typer.Option(help="Folder for CSVs and pictures.")] = RESULTS,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget earlier measurements.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Only draw and print what has been measured.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny sweep, to try the benchmark itself; needs --output.")
    ] = False,
) -> None:
    """Measure predict and a training step of the Keras layer beside MultiHeadAttention, on each backend."""
    os.environ.setdefault("KERAS_BACKEND", "torch")  # of this process, which only reads the code of the layers
    program = Program(
        results=RESULTS,
        machine_file=MACHINE,
        tables=(MEASUREMENTS,),
        sweeps=(COMPLETE, QUICK),
        make=Benchmark,
        describe=lambda: describe_machine(dependencies()),
        summarise=summarise,
    )
    run_program(program, output, fresh, summary, quick)


if __name__ == "__main__":
    typer.run(main)
