"""Lower precisions: what stays in float32, and in which precision runs and commands compute."""

import copy
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from training_zoo import command, read_json, refused

from linformer_kit import LinformerAttention, LinformerConfig, LinformerForSequenceClassification
from linformer_kit.bench import implementations
from linformer_kit.bench.checks import WrongImplementation
from linformer_kit.bench.implementations import build_for_timing, can_do, check
from linformer_kit.bench.point import Point
from linformer_kit.bench.sweep import read_sweep
from linformer_kit.errors import UserError
from linformer_kit.models import multihead_linformer
from linformer_kit.models.int8_linformer import Int8Linear
from linformer_kit.models.projection_linformer import Projection
from linformer_kit.precision import compiled, in_precision

PROJECTIONS = [kind for kind in Projection.kinds if kind != "none"]
WINDOW = {"window_length": 64, "global_tokens": 1}


def waves(length, width):
    """Tokens whose means over segments differ, and noise; their sum over all tokens does not cancel out."""
    position, feature = torch.arange(length)[:, None] / length, torch.arange(width)
    return (1 + torch.sin(6 * position * (1 + feature % 3) + feature) + torch.randn(length, width))[None]


def relative_error(lower, exact):
    return float((lower.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("length", [512, 262_144], ids="N{}".format)
@pytest.mark.parametrize(
    ("projection", "options"),
    [*((kind, {}) for kind in PROJECTIONS), ("linear", WINDOW), ("mean", WINDOW)],
    ids=[*PROJECTIONS, "linear-window", "mean-window"],
)
def test_sums_over_many_tokens_keep_their_precision_in_bfloat16(projection, length, options):
    """The error does not grow with the length: some roundings to bfloat16, each of up to 0.4%."""
    layer = LinformerAttention(8, 1, max_length=length, projected_length=8, projection=projection, **options)
    if projection == "random":  # rows of unit variance; otherwise they grow with the square root of the length
        layer.projection.weight *= (8 / length) ** 0.5
    require_precision(layer, length)


def test_the_fused_kernel_keeps_the_precision_of_sums_over_many_tokens(monkeypatch):
    """It is used for many keys."""
    monkeypatch.setattr(multihead_linformer, "FEW_KEYS", 7)
    require_precision(LinformerAttention(16, 2, max_length=262_144, projected_length=16), 262_144)


def require_precision(layer, length):
    """Compare a layer under autocast with itself in float64: outputs and gradients."""
    x, upstream = waves(length, layer.embed_dim), waves(length, layer.embed_dim)
    mask = (torch.arange(length) < length - 5)[None]

    def outputs_and_gradients(layer, dtype, autocast):
        leaf = x.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = layer(leaf, mask=mask)
            with torch.no_grad():
                in_chunks = layer(leaf, mask=mask)
        output.backward(upstream.to(output.dtype))
        gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
        del gradients["key.bias"]  # zero: the softmax does not change with it
        return {"output": output.detach(), "without gradients": in_chunks, "x": leaf.grad, **gradients}

    exact = outputs_and_gradients(copy.deepcopy(layer).double(), torch.float64, autocast=False)
    found = outputs_and_gradients(layer, torch.float32, autocast=True)
    errors = {name: relative_error(found[name], exact[name]) for name in exact}
    # the gradient of a softmax is a difference of nearly equal numbers
    of_scores = [errors.pop(name) for name in list(errors) if name.startswith(("query", "key"))]
    assert max(errors.values()) < 0.03, errors
    assert max(of_scores) < 0.06, of_scores


@pytest.fixture
def classifier():
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LinformerForSequenceClassification(LinformerConfig(**sizes, initializer_range=0.3)).eval()


IDS = torch.randint(1, 50, (3, 40))


def test_the_loss_is_computed_in_float32(classifier):
    labels = torch.tensor([0, 1, 1])
    found = in_precision(classifier, "bfloat16")(IDS, labels=labels)
    assert found.logits.dtype == torch.bfloat16
    assert found.loss.dtype == torch.float32
    assert found.loss == nn.functional.cross_entropy(found.logits.float(), labels)


def test_a_model_computes_in_the_precision_that_is_asked_for(classifier):
    exact = classifier(IDS).logits
    assert torch.equal(in_precision(classifier, "float32")(IDS).logits, exact)
    quantized = in_precision(classifier, "int8")
    assert any(isinstance(module, Int8Linear) for module in quantized.modules())
    half = in_precision(classifier, "bfloat16")(IDS).logits
    assert half.dtype == torch.bfloat16
    for found in (half, quantized(IDS).logits):
        assert 0 < (found - exact).norm() < 0.05 * exact.norm()


# commands


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_a_run_is_evaluated_and_predicts_in_any_precision(trained_run, tmp_path, precision):
    run = shutil.copytree(trained_run("classification").run, tmp_path / "run")
    command("evaluate", run, "--precision", precision)
    lower = read_json(run / "evaluation.json")
    assert lower["precision"] == precision
    command("evaluate", run)
    exact = read_json(run / "evaluation.json")
    assert exact["precision"] == "float32"  # that of the training
    assert (lower["loss"] == exact["loss"]) is (precision == "float32")
    assert lower["loss"] == pytest.approx(exact["loss"], rel=0.05)
    answer = command("predict", run, "good", "--json", "--precision", precision).stdout
    assert (answer == command("predict", run, "good", "--json").stdout) is (precision == "float32")


def test_int8_is_refused_for_decoders(trained_run):
    assert "precision is int8: the model is a LinformerForCausalLM, but int8 is only for encoders" in refused(
        "evaluate", trained_run("causal-lm").run, "--precision", "int8"
    )


# linformer compare

SIZES = {"hidden_size": 32, "num_heads": 2, "num_layers": 2}


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    "name", [name for name in implementations.IMPLEMENTATIONS if can_do(name, "encoder", "forward", "torch", "int8")]
)
def test_every_encoder_survives_every_precision(name, precision):
    rows = 16 if implementations.projects(name, "encoder") else None
    check(Point("encoder", "forward", name, 256, rows, 2, precision=precision, **SIZES))


def test_an_encoder_that_is_wrong_in_a_precision_is_not_timed(monkeypatch):
    point = Point("encoder", "forward", "linformer-kit", 256, 16, 2, precision="int8", **SIZES)
    monkeypatch.setattr(Int8Linear, "reset_parameters", lambda _: None)
    weights = Int8Linear.of

    def doubled(linear):
        layer = weights(linear)
        layer.scale *= 2
        return layer

    monkeypatch.setattr(Int8Linear, "of", doubled)
    with pytest.raises(WrongImplementation, match="its output in int8 differs"):
        check(point)


def test_all_precisions_of_a_sweep_are_timed_in_the_same_rounds(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    keys = {"lengths": [64], "projected_lengths": [16], "implementations": ["linformer-kit", "gemm"]}
    sweep = read_sweep({**keys, "subjects": ["layer"], "precisions": ["float32", "auto", "bfloat16"]})
    (points,) = sweep.groups()
    assert [(point.implementation, point.precision) for point in points] == [
        ("linformer-kit", "float32"),
        ("linformer-kit", "bfloat16"),
        ("gemm", "float32"),
        ("gemm", "bfloat16"),
    ]
    assert build_for_timing(points[-1])(None).dtype == torch.bfloat16
    with pytest.raises(UserError, match="has nothing to measure for layer × training on torch in int8"):
        read_sweep({**keys, "subjects": ["layer"], "steps": ["training"], "precisions": ["int8"]})


# compilation


def test_a_compiled_model_computes_the_same(classifier, inductor):
    mask = torch.arange(40) < torch.tensor([[40], [7], [30]])
    exact = classifier(IDS, attention_mask=mask).logits
    assert torch.allclose(compiled(classifier)(IDS, attention_mask=mask).logits, exact, atol=1e-5)
    assert type(classifier) is LinformerForSequenceClassification  # not wrapped: its weights keep their names


def test_compiling_needs_a_compiler(classifier, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="compiling needs a C"):
        compiled(classifier)


# memory allocator


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is for Linux")
def test_a_program_starts_again_with_an_allocator_that_is_present(tmp_path):
    code = f"""
import os
from linformer_kit import process_memory
process_memory.LIBRARY_FOLDERS = ({str(tmp_path)[1:]!r},)
process_memory.preload_allocator()
print(os.environ.get("LD_PRELOAD"), process_memory.preloaded_allocator())
"""

    def printed():
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    assert printed() == "None None"
    library = tmp_path / "libtcmalloc_minimal.so.4"
    with open("/proc/self/maps") as maps:  # any library does
        shutil.copyfile(next(line.split()[-1] for line in maps if "libm.so" in line or "libm-" in line), library)
    assert printed() == f"{library} tcmalloc"
