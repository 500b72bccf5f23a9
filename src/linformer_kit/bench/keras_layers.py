"""Single layers on a Keras backend: `LinearMultiHeadAttention` and `keras.layers.MultiHeadAttention`.

Keras reads KERAS_BACKEND on import, so it is imported inside functions, which run in a worker process.

Shapes: B batch, N length, C model size.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ..models.attention_linformer import LinformerAttention
from .checks import WrongImplementation
from .layers import checked_examples, our_layer, plain_outputs, require_output_agreement
from .point import FULL, Point
from .workload import Build, Workload


def torch_layer(point: Point) -> LinformerAttention:
    """Our PyTorch layer with random weights, biases included: the Keras layers get its weights."""
    torch.manual_seed(0)
    layer = our_layer(point)
    for linear in (layer.query, layer.key, layer.value):
        nn.init.normal_(linear.bias, std=0.1)
    return layer


def make_layer(point: Point) -> Any:
    import keras

    from ..keras import from_torch

    with keras.device(point.device):
        ours = from_torch(torch_layer(point))
        if point.implementation != FULL:
            return ours
        full = keras.layers.MultiHeadAttention(point.num_heads, point.head_size)
        full.build(*(2 * [(None, point.length, point.hidden_size)]))
        full.set_weights(ours.get_weights())
        return full


def make_model(layer: Any, point: Point) -> Any:
    """A compiled model that consists of this layer."""
    import keras

    with keras.device(point.device):
        x = keras.Input((point.length, point.hidden_size))
        model = keras.Model(x, layer(x, x))
        model.compile("sgd", "mse")
        return model


def check(point: Point, build: Build) -> None:
    """Compare outputs with the plain form in float64; without projection, our layer must equal Keras exactly."""
    from ..keras import from_torch

    x_BNC = random_features(point)[: checked_examples(point.batch, point.length)]
    output_BNC = np.array(make_model(make_layer(point), point).predict_on_batch(x_BNC))
    exact = partial(plain_outputs, torch_layer(point).double())
    with torch.no_grad():
        require_output_agreement(point.implementation, torch.from_numpy(output_BNC), exact, torch.from_numpy(x_BNC))
    ours = make_model(from_torch(torch_layer(point)), point)
    if point.implementation == FULL and not np.array_equal(ours.predict_on_batch(x_BNC), output_BNC):
        raise WrongImplementation(
            "LinearMultiHeadAttention with projection_dim=None differs from MultiHeadAttention with the same weights; "
            "they must be equal bit for bit, so it was not timed"
        )


def random_features(point: Point) -> np.ndarray:
    shape = (point.batch, point.length, point.hidden_size)
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def make_workload(point: Point, build: Build) -> Workload:
    """`predict_on_batch` or `train_on_batch`; returns when everything has been computed."""
    import keras

    layer = make_layer(point)
    model, x_BNC = make_model(layer, point), random_features(point)
    y_BNC = x_BNC[::-1].copy()

    def predict() -> object:
        with keras.device(point.device):
            return model.predict_on_batch(x_BNC)

    def train() -> object:
        with keras.device(point.device):
            model.train_on_batch(x_BNC, y_BNC)
            # JAX computes asynchronously; the rest of the step would count for the next layer
            return keras.ops.convert_to_numpy(model.trainable_variables[0])

    # without the name of the layer, which has a number that changes
    shapes = {weight.path.removeprefix(f"{layer.path}/"): tuple(weight.shape) for weight in layer.weights}
    return Workload(train if point.step == "training" else predict, parameters=shapes)
