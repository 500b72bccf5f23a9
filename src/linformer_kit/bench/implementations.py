"""The registry: how each subject is checked and called, and which implementation builds which subjects."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..models.int8_linformer import Int8Linear
from ..precision import in_precision
from . import encoders, generators, keras_layers, layers
from .checks import require_precision
from .machine import version_of as installed_version
from .point import (
    BERT_EAGER,
    FULL,
    FULL_EAGER,
    GEMM,
    LINFORMER,
    LINFORMER_PYTORCH,
    LONGFORMER,
    NO_ATTENTION_DROPOUT,
    OURS,
    OURS_CHECKPOINTING,
    OURS_REVERSIBLE,
    Point,
    Subject,
)
from .workload import Build, Workload

KIT, TRANSFORMERS = "linformer-kit", "transformers"
# distributions that provide a Keras backend
BACKEND_PACKAGES = {"torch": ("torch",), "jax": ("jax",), "tensorflow": ("tensorflow", "tensorflow-cpu")}


# subjects


def training_workload(point: Point, build: Build) -> Workload:
    from .training_loop import make_workload  # imports `training`, which takes a while and nothing else needs

    return make_workload(point)


def check_nothing(point: Point, build: Build) -> None:
    """There is no model to check."""


@dataclass(frozen=True)
class SubjectKind:
    """The steps of a subject, and how a point is checked and turned into a workload."""

    steps: tuple[str, ...]
    check: Callable[[Point, Build], None]
    make_workload: Callable[[Point, Build], Workload]
    output: Callable[[Point, nn.Module], Tensor] | None = None  # of a forward pass; in float32 only without it


PASSES = ("forward", "training")
GENERATION = (*PASSES, "generation", "prefill", "decoding")
SUBJECT_KINDS: dict[str, SubjectKind] = {
    "layer": SubjectKind(PASSES, layers.check_layer, layers.layer_workload, layers.output),
    "causal-layer": SubjectKind(PASSES, layers.check_causal_layer, layers.layer_workload, layers.output),
    "encoder": SubjectKind(PASSES, encoders.check_encoder, encoders.encoder_workload, encoders.output),
    **{
        name: SubjectKind(GENERATION, generators.check_generator, generators.generator_workload, generators.output)
        for name in ("encoder-decoder", "causal-lm")
    },
    "trainer": SubjectKind(("training",), encoders.check_encoder, training_workload, encoders.output),
    "preparation": SubjectKind(("preparation",), check_nothing, training_workload),
}
KERAS_LAYER = SubjectKind(PASSES, keras_layers.check, keras_layers.make_workload)


# implementations


@dataclass(frozen=True)
class Implementation:
    """The package it comes from, whether it has a K, and how the model of each subject is built."""

    package: str
    projects: bool
    builds: Mapping[Subject, Build]


OUR_BUILDS: dict[Subject, Build] = {
    "layer": layers.our_layer,
    "causal-layer": layers.our_causal_layer,
    "encoder": encoders.our_encoder,
    "encoder-decoder": generators.our_encoder_decoder,
    "causal-lm": generators.our_causal_lm,
    "trainer": encoders.our_encoder,
}
LINFORMER_BUILDS: dict[Subject, Build] = {
    "layer": layers.linformer_layer,
    "encoder": encoders.linformer_encoder,
    "trainer": encoders.linformer_trainer_encoder,
}
LINFORMER_PYTORCH_BUILDS: dict[Subject, Build] = {
    "layer": layers.linformer_pytorch_layer,
    "encoder": encoders.linformer_pytorch_encoder,
    "encoder-decoder": generators.LinformerPytorchEncoderDecoder,
}
TRANSFORMERS_ENCODERS: dict[str, Build] = {
    **{"bert": encoders.bert, BERT_EAGER: partial(encoders.bert, attention="eager")},
    **{"modern-bert": encoders.modern_bert, LONGFORMER: encoders.longformer, "big-bird": encoders.big_bird},
    **{"nystromformer": encoders.nystromformer, "fnet": encoders.fnet},
}
IMPLEMENTATIONS: dict[str, Implementation] = {
    OURS: Implementation(KIT, True, {**OUR_BUILDS, "preparation": nn.Identity}),  # has no model
    FULL: Implementation(KIT, False, OUR_BUILDS),
    FULL_EAGER: Implementation(KIT, False, {"encoder": encoders.our_encoder}),
    LINFORMER: Implementation(LINFORMER, True, LINFORMER_BUILDS),
    LINFORMER_PYTORCH: Implementation(LINFORMER_PYTORCH, True, LINFORMER_PYTORCH_BUILDS),
    **{name: Implementation(TRANSFORMERS, False, {"encoder": build}) for name, build in TRANSFORMERS_ENCODERS.items()},
    "led": Implementation(TRANSFORMERS, False, {"encoder-decoder": generators.led}),
    "long-t5": Implementation(TRANSFORMERS, False, {"encoder-decoder": generators.long_t5}),
    GEMM: Implementation("torch", False, {"layer": layers.Gemm}),
    **{
        name: Implementation(KIT, True, {"encoder": encoders.our_encoder})
        for name in (OURS_REVERSIBLE, OURS_CHECKPOINTING)
    },
}
# where several variants are measured; otherwise one, the empty string
VARIANTS = {
    ("trainer", OURS): ("dynamic", "linear", f"dynamic, {NO_ATTENTION_DROPOUT}"),
    ("trainer", FULL): ("", NO_ATTENTION_DROPOUT),
    ("preparation", OURS): ("bpe", "bytes"),
}


def can_do(name: str, subject: str, step: str, backend: str = "torch", precision: str = "float32") -> bool:
    """Whether an implementation has this subject and step on this backend in this precision."""
    if subject not in IMPLEMENTATIONS[name].builds or step not in SUBJECT_KINDS[subject].steps:
        return False
    if precision != "float32" and (backend != "torch" or SUBJECT_KINDS[subject].output is None):
        return False
    if precision == "int8" and (subject, step) != ("encoder", "forward"):
        return False
    if backend != "torch":
        return subject == "layer" and name in (OURS, FULL)
    if step in ("prefill", "decoding"):
        return IMPLEMENTATIONS[name].package == KIT
    return True


def projects(name: str, subject: str) -> bool:
    return IMPLEMENTATIONS[name].projects and subject != "preparation"


def has_window(name: str, subject: str) -> bool:
    return subject in ("layer", "encoder") and name in (OURS, OURS_REVERSIBLE, OURS_CHECKPOINTING, LONGFORMER)


def has_blocks(name: str, subject: str) -> bool:
    return subject in ("causal-layer", "causal-lm") and projects(name, subject)


def version_of(name: str, backend: str = "torch") -> str | None:
    """The version of the implementation's package, or of Keras and its backend; None if something is not installed."""
    if backend == "torch":
        return installed_version(IMPLEMENTATIONS[name].package)
    under = backend.removeprefix("keras-")
    keras, other = installed_version("keras"), installed_version(*BACKEND_PACKAGES[under])
    return f"keras {keras}, {under} {other}" if keras and other else None


# building, checking, calling


def build(point: Point) -> nn.Module:
    """The subject of a point, as its implementation builds it."""
    return IMPLEMENTATIONS[point.implementation].builds[point.subject](point)


def build_for_timing(point: Point) -> nn.Module:
    """The subject of a point on its device, in its precision."""
    model = build(point).to(point.device).train(point.step == "training")
    if point.precision == "int8" and IMPLEMENTATIONS[point.implementation].package != KIT:
        model = with_int8_linears(model)
    return in_precision(model, point.precision)


def with_int8_linears(model: nn.Module) -> nn.Module:
    """A model of another package with 8-bit weights in all of its linear layers."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear.of(child))
    return model


def kind_of(point: Point) -> SubjectKind:
    return SUBJECT_KINDS[point.subject] if point.backend == "torch" else KERAS_LAYER


def check(point: Point) -> None:
    """Raise `WrongImplementation` if the implementation is incorrect. Runs on the CPU, except for Keras."""
    kind, small = kind_of(point), point.small()
    torch.manual_seed(0)
    kind.check(replace(point, precision="float32"), build)
    if kind.output is None or point.precision == "float32":
        return
    outputs = []
    for each in (small, replace(small, precision="float32")):
        torch.manual_seed(0)  # the same weights and inputs
        outputs.append(kind.output(each, build_for_timing(each)))
    require_precision(point.implementation, point.precision, *outputs)


def make_workload(point: Point) -> Workload:
    """Build the workload of a point. Its call returns when everything has been computed."""
    torch.manual_seed(0)
    return kind_of(point).make_workload(point, build_for_timing if point.backend == "torch" else build)
