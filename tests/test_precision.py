"""Lower precisions: what stays in float32, and in which precision runs and commands compute."""

import copy

import pytest
import torch

from linformer_kit import LinformerAttention
from linformer_kit.models.projection_linformer import Projection

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
    x, upstream = waves(length, 8), waves(length, 8)
    mask = (torch.arange(length) < length - 5)[None]

    def outputs_and_gradients(layer, dtype, autocast):
        leaf = x.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = layer(leaf, mask=mask)
            with torch.no_grad():
                unchunked = layer(leaf, mask=mask)
        output.backward(upstream.to(output.dtype))
        gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
        del gradients["key.bias"]  # zero: the softmax does not change with it
        return {"output": output.detach(), "without gradients": unchunked, "x": leaf.grad, **gradients}

    exact = outputs_and_gradients(copy.deepcopy(layer).double(), torch.float64, autocast=False)
    found = outputs_and_gradients(layer, torch.float32, autocast=True)
    errors = {name: relative_error(found[name], exact[name]) for name in exact}
    # the gradient of a softmax is a difference of nearly equal numbers
    of_scores = [errors.pop(name) for name in list(errors) if name.startswith(("query", "key"))]
    assert max(errors.values()) < 0.03, errors
    assert max(of_scores) < 0.06, of_scores
