"""The registry: which implementation has which subjects, and how a point is built, checked and called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from . import encoders, generators, layers
from .machine import version_of as installed_version
from .point import (
    BERT_EAGER,
    FULL,
    FULL_EAGER,
    GEMM,
    LINFORMER,
    LINFORMER_PYTORCH,
    OURS,
    TRAINING_SUBJECTS,
    Point,
    Subject,
)

Build = Callable[[Point], nn.Module]
KIT, TRANSFORMERS = "linformer-kit", "transformers"
PASSES = ("forward", "training")
GENERATION = (*PASSES, "generation", "reading", "decoding")
STEPS_OF: dict[str, tuple[str, ...]] = {
    **{"layer": PASSES, "causal-layer": PASSES, "encoder": PASSES},
    **{
        "encoder-decoder": GENERATION,
        "causal-lm": GENERATION,
        "trainer": ("training",),
        "preparation": ("preparation",),
    },
}
# distributions that provide a Keras backend
BACKEND_PACKAGES = {"torch": ("torch",), "jax": ("jax",), "tensorflow": ("tensorflow", "tensorflow-cpu")}


@dataclass(frozen=True)
class Implementation:
    """The package it comes from, whether it has a K, and how each subject is built."""

    package: str
    projects: bool
    builds: Mapping[Subject, Build | None]  # None: built in another module


OUR_BUILDS: dict[Subject, Build | None] = {
    "layer": layers.our_layer,
    "causal-layer": layers.our_causal_layer,
    "encoder": encoders.our_encoder,
    "encoder-decoder": generators.our_encoder_decoder,
    "causal-lm": generators.our_causal_lm,
    "trainer": None,
}
IMPLEMENTATIONS: dict[str, Implementation] = {
    OURS: Implementation(KIT, True, {**OUR_BUILDS, "preparation": None}),
    FULL: Implementation(KIT, False, OUR_BUILDS),
    FULL_EAGER: Implementation(KIT, False, {"encoder": encoders.our_encoder}),
    LINFORMER: Implementation(
        LINFORMER, True, {"layer": layers.linformer_layer, "encoder": encoders.linformer_encoder, "trainer": None}
    ),
    LINFORMER_PYTORCH: Implementation(
        LINFORMER_PYTORCH,
        True,
        {
            "layer": layers.linformer_pytorch_layer,
            "encoder": encoders.linformer_pytorch_encoder,
            "encoder-decoder": generators.LinformerPytorchEncoderDecoder,
        },
    ),
    **{
        name: Implementation(TRANSFORMERS, False, {"encoder": build})
        for name, build in {
            **{"bert": encoders.bert, BERT_EAGER: encoders.bert_eager, "modern-bert": encoders.modern_bert},
            **{"longformer": encoders.longformer, "big-bird": encoders.big_bird},
            **{"nystromformer": encoders.nystromformer, "fnet": encoders.fnet},
        }.items()
    },
    "led": Implementation(TRANSFORMERS, False, {"encoder-decoder": generators.led}),
    "long-t5": Implementation(TRANSFORMERS, False, {"encoder-decoder": generators.long_t5}),
    GEMM: Implementation("torch", False, {"layer": layers.Gemm}),
}


def can_do(name: str, subject: str, step: str, backend: str = "torch") -> bool:
    """Whether an implementation has this subject and step on this backend."""
    if subject not in IMPLEMENTATIONS[name].builds or step not in STEPS_OF[subject]:
        return False
    if backend != "torch":
        return subject == "layer" and name in (OURS, FULL)
    if step in ("reading", "decoding"):
        return IMPLEMENTATIONS[name].package == KIT
    return step == "forward" or name != GEMM


def variants_of(name: str, subject: str) -> tuple[str, ...]:
    """The variants of an implementation that are measured; most have one, the empty string."""
    if subject not in TRAINING_SUBJECTS:
        return ("",)
    from .training_loop import VARIANTS

    return VARIANTS.get((subject, name), ("",))


def projects(name: str, subject: str) -> bool:
    return IMPLEMENTATIONS[name].projects and subject != "preparation"


def version_of(name: str, backend: str = "torch") -> str | None:
    """The version of the implementation's package, or of Keras and its backend; None if something is not installed."""
    if backend == "torch":
        return installed_version(IMPLEMENTATIONS[name].package)
    under = backend.removeprefix("keras-")
    keras, other = installed_version("keras"), installed_version(*BACKEND_PACKAGES[under])
    return f"keras {keras}, {under} {other}" if keras and other else None


# building, checking, calling


@dataclass(frozen=True)
class Workload:
    """The timed call of a point, other columns of its row by phase, and the shapes of its parameters."""

    call: Callable[[], object]
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)


def build(point: Point) -> nn.Module:
    """The subject of a point, as its implementation builds it."""
    make = IMPLEMENTATIONS[point.implementation].builds[point.subject]
    assert make is not None
    return make(point)


def check(point: Point) -> None:
    """Raise `WrongImplementation` if the implementation is incorrect. Runs on the CPU, except for Keras."""
    torch.manual_seed(0)
    if point.backend != "torch":
        from . import keras_layers

        keras_layers.check(point)
    elif point.subject == "layer":
        layers.check_layer(point, build(point))
    elif point.subject == "causal-layer":
        layers.check_causal_layer(point, build(point))
    elif point.subject == "encoder":
        encoders.check_encoder(point, build(point.small()))
    elif point.subject in ("encoder-decoder", "causal-lm"):
        generators.check_generator(point, build(point.small()))
    elif point.subject == "trainer":
        from .training_loop import check_trainer

        check_trainer(point)


def make_workload(point: Point) -> Workload:
    """Build the workload of a point. Its call returns when everything has been computed."""
    torch.manual_seed(0)
    if point.backend != "torch":
        from . import keras_layers

        layer, model = keras_layers.build(point)
        return Workload(keras_layers.make_call(point, model), parameters=keras_layers.parameter_shapes(layer))
    if point.subject in TRAINING_SUBJECTS:
        from . import training_loop

        if point.subject == "trainer":
            return Workload(training_loop.make_loop(point))
        prepare, megabytes = training_loop.make_preparation(point)
        return Workload(prepare, {phase: {"megabytes": size} for phase, size in megabytes.items()})
    return make_torch_workload(point)


def make_torch_workload(point: Point) -> Workload:
    device = torch.device(point.device)
    model = build(point).to(device)
    columns: dict[str, Any] = {}
    if point.subject in ("layer", "causal-layer"):
        x_BNC = torch.randn(point.batch, point.length, point.hidden_size, device=device)
        call = layers.layer_call(model, x_BNC, point.step)
        if point.step == "forward":
            columns["multiply_adds"] = layers.layer_multiply_adds(point, model)
    else:
        ids_BN = encoders.random_ids(point.batch, point.length).to(device)
        if point.subject == "encoder":
            call = encoders.encoder_call(model, ids_BN, point.step)
            if point.step == "forward":
                columns["multiply_adds"] = encoders.encoder_multiply_adds(model, point.length, point.batch)
        else:
            call = generators.generator_call(model, ids_BN, point)
            if point.step == "decoding":
                columns["cache_bytes"] = call().nbytes  # type: ignore[attr-defined]
    parameters = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    return Workload(call if device.type == "cpu" else partial(call_and_wait, call, device), {"": columns}, parameters)


def call_and_wait(call: Callable[[], object], device: torch.device) -> None:
    """Call and synchronize: a GPU computes asynchronously."""
    call()
    torch.accelerator.synchronize(device)
