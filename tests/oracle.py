"""What tests share: our layers read into the reference, the combinations that exist, and layers with random parameters."""

from functools import partial

import torch

from linformer_kit import reference
from linformer_kit.models import options_linformer as options
from linformer_kit.models import projection_linformer as projections

PROJECTIONS = options.PROJECTIONS
WITHOUT_MATRICES = ("mean", "max", "none")
# every pair that means something
COMBINATIONS = [
    (projection, sharing)
    for projection in PROJECTIONS
    for sharing in options.SHARINGS
    if not (sharing == "none" and projection in WITHOUT_MATRICES)
]
ANY_LENGTH = ("dynamic", "conv", "mean", "max", "none")


def randomise(*modules):
    """Fill every parameter, biases and norms too, so that none is zero or one by accident."""
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
    """The reference of one matrix (E or F, of one head or all) of our projection."""
    match projection:
        case projections.LinearProjection():
            return partial(reference.matrix_rows, E=numpy(projection.weight[:, matrix]), rescale=projection.rescale)
        case projections.DynamicProjection():
            return partial(reference.dynamic_rows, weight=numpy(projection.weight[:, matrix]))
        case projections.ConvProjection():
            return partial(reference.conv_rows, taps=numpy(projection.weight[matrix]), rescale=projection.rescale)
        case projections.MeanProjection():
            return partial(reference.mean_rows, projected_length=projection.projected_length)
        case projections.MaxProjection():
            return partial(reference.max_rows, projected_length=projection.projected_length)
        case projections.NoProjection():
            return lambda tokens: tokens
    raise TypeError(projection)


def reference_layer(layer, shared=None):
    """Our layer, parameter for parameter, as the reference sees it."""
    projection, heads = layer.projection or shared, layer.num_kv_heads
    # the matrices of keys, then those of values, for each key-value head
    numbers = {1: [0] * 2 * heads, 2: [0] * heads + [1] * heads, 2 * heads: list(range(2 * heads))}[projection.matrices]
    if layer.sharing != "none" and projection.matrices == 2:  # with one head, 2 and 2G are the same number
        numbers = [0] * heads + [1] * heads
    functions = [rows_function(projection, number) for number in numbers]
    return reference.Layer(
        *(affine(linear) for linear in (layer.query, layer.key, layer.value, layer.output)),
        num_heads=layer.num_heads,
        head_dim=layer.head_dim,
        key_rows=functions[:heads],
        value_rows=functions[heads:],
    )


def reference_output(layer, x, context=None, mask=None, shared=None):
    """The reference's outputs for a padded batch: each example alone, reduced to its real tokens."""
    if context is None:  # what stands behind the mask asks as a zero
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
