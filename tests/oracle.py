"""Shared by the tests: PyTorch layers converted for the reference, valid combinations of options, random parameters."""

from functools import partial

import numpy as np
import torch

from linformer_kit import make_projection, reference
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


def shared_projection(layer):
    """The projection to pass to a layer: None unless `sharing="layerwise"`."""
    options = layer.shared_projection_options
    return None if options is None else make_projection(**options)


def numpy(tensor):
    return None if tensor is None else tensor.detach().double().numpy()


def affine(linear):
    return reference.Affine(numpy(linear.weight), numpy(linear.bias))


def rows_function(projection, matrix, projected_length, functions=None):
    """The reference of one matrix (E or F, of one head or all) of a projection, cut to `projected_length` rows."""
    weight = numpy(getattr(projection, "weight", None))
    if projection.kind in reference.CUTS:
        weight = reference.CUTS[projection.kind](weight, projected_length)
    return partial(
        (functions or reference.ROWS)[projection.kind],  # looked up now: tests add kinds
        weight=weight,
        matrix=matrix,
        projected_length=projected_length,
        rescale=projection.options["rescale"],
    )


def reference_layer(layer, shared=None):
    """A layer converted for the reference."""
    projection, heads = shared or layer.projection, layer.num_kv_heads
    linears = [affine(linear) for linear in (layer.query, layer.key, layer.value, layer.output)]
    sizes = {"num_heads": layer.num_heads, "head_dim": layer.head_dim}
    if layer.projected_length == 0:  # a window without rows
        nothing = [lambda tokens: tokens[:0]] * heads
        no_mass = [lambda tokens: np.zeros((len(tokens), 0))] * heads
        return reference.Layer(*linears, **sizes, key_rows=nothing, value_rows=nothing, row_mass=no_mass)
    # the numbers of the matrices: for the keys of each key-value head, then for their values
    numbers = {1: [0] * 2 * heads, 2: [0] * heads + [1] * heads, 2 * heads: list(range(2 * heads))}[projection.matrices]
    # with one head, 2 and 2G are the same number
    if projection.options["sharing"] != "none" and projection.matrices == 2:
        numbers = [0] * heads + [1] * heads
    functions = [rows_function(projection, number, layer.projected_length) for number in numbers]
    biases, kernels = [], []
    if projection.kind == "affine":
        bias_MK = reference.CUTS["affine"](numpy(projection.bias), layer.projected_length)
        biases = [bias_MK[number] for number in numbers]
    if projection.kind == "head_conv":
        weight_MWDD, bias_MD = numpy(projection.weight), numpy(projection.bias)
        kernels = [reference.Kernel(weight_MWDD[number], bias_MD[number]) for number in numbers]
    row_mass = []
    if projection.kind in reference.ROW_MASS:
        options = (layer.projected_length, reference.ROW_MASS)
        row_mass = [rows_function(projection, number, *options) for number in numbers[:heads]]
    return reference.Layer(
        *linears,
        **sizes,
        key_rows=functions[:heads],
        value_rows=functions[heads:],
        key_bias=biases[:heads],
        value_bias=biases[heads:],
        key_kernels=kernels[:heads],
        value_kernels=kernels[heads:],
        row_mass=row_mass,
    )


def windowed_reference(layer, x, mask=None, shared=None):
    """Outputs and weights of the reference for the real tokens of each example; layers with a window."""
    return [
        [
            torch.from_numpy(result)
            for result in reference.windowed_linformer_attention(
                numpy(tokens if mask is None else tokens[mask[example]]),
                reference_layer(layer, shared),
                layer.window_length,
                layer.global_tokens,
                None if layer.distance_bias is None else numpy(layer.distance_bias.weight),
            )
        ]
        for example, tokens in enumerate(x)
    ]


def reference_output(layer, x, context=None, mask=None, shared=None, value=None):
    """The outputs of the reference for a padded batch: one example at a time, reduced to its real tokens."""
    if context is None:  # queries at padding are zero
        context = x = x if mask is None else x.masked_fill(~mask[..., None], 0)
    outputs = []
    for example in range(len(x)):
        real = slice(None) if mask is None else mask[example]
        tokens, values = context[example][real], None if value is None else numpy(value[example][real])
        output, _ = reference.linformer_attention(
            numpy(x[example]), numpy(tokens), reference_layer(layer, shared), values
        )
        outputs.append(torch.from_numpy(output))
    return torch.stack(outputs)
