"""Shared by the tests: PyTorch layers converted for the reference, valid combinations of options, random parameters."""

from functools import partial

import torch

from linformer_kit import reference
from linformer_kit.models.options_linformer import SHARINGS
from linformer_kit.models.projection_linformer import Projection

PROJECTIONS = Projection.kind_names()
# test_projection.py states the facts of each kind once more, independently
WITHOUT_MATRICES = [kind for kind in PROJECTIONS if kind not in Projection.kind_names("has_matrices")]
ANY_LENGTH = Projection.kind_names("takes_any_length")
# every valid pair
COMBINATIONS = [
    (projection, sharing)
    for projection in PROJECTIONS
    for sharing in SHARINGS
    if not (sharing == "none" and projection in WITHOUT_MATRICES)
]


def randomize(*modules):
    """Fill all parameters with random numbers, so that no bias is zero and no norm is one."""
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
    return modules[0]


def numpy(tensor):
    return None if tensor is None else tensor.detach().double().numpy()


def affine(linear):
    return reference.Affine(numpy(linear.weight), numpy(linear.bias))


def rows_function(projection, matrix):
    """The reference of one matrix (E or F, of one head or all) of a projection."""
    return partial(
        reference.ROWS[projection.kind],
        weight=numpy(getattr(projection, "weight", None)),
        matrix=matrix,
        projected_length=projection.options["projected_length"],
        rescale=projection.options["rescale"],
    )


def reference_layer(layer, shared=None):
    """A layer converted for the reference."""
    projection, heads = layer.projection or shared, layer.num_kv_heads
    # the numbers of the matrices: for the keys of each key-value head, then for their values
    numbers = {1: [0] * 2 * heads, 2: [0] * heads + [1] * heads, 2 * heads: list(range(2 * heads))}[projection.matrices]
    if layer.sharing != "none" and projection.matrices == 2:  # with one head, 2 and 2G are the same number
        numbers = [0] * heads + [1] * heads
    functions = [rows_function(projection, number) for number in numbers]
    bias_MK = numpy(projection.bias) if projection.kind == "affine" else None
    return reference.Layer(
        *(affine(linear) for linear in (layer.query, layer.key, layer.value, layer.output)),
        num_heads=layer.num_heads,
        head_dim=layer.head_dim,
        key_rows=functions[:heads],
        value_rows=functions[heads:],
        key_bias=() if bias_MK is None else list(bias_MK[numbers[:heads]]),
        value_bias=() if bias_MK is None else list(bias_MK[numbers[heads:]]),
    )


def reference_output(layer, x, context=None, mask=None, shared=None):
    """The outputs of the reference for a padded batch: one example at a time, reduced to its real tokens."""
    if context is None:  # queries at padding are zero
        context = x = x if mask is None else x.masked_fill(~mask[..., None], 0)
    outputs = []
    for example in range(len(x)):
        tokens = context[example] if mask is None else context[example][mask[example]]
        outputs.append(
            torch.from_numpy(
                reference.linformer_attention(numpy(x[example]), numpy(tokens), reference_layer(layer, shared))[0]
            )
        )
    return torch.stack(outputs)
