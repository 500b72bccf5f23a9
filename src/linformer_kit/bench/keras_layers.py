"""Single layers on a Keras backend: `LinearMultiHeadAttention` and `keras.layers.MultiHeadAttention`.

Keras reads KERAS_BACKEND on import, so it is imported inside functions, which run in a worker process.

Shapes: B batch, N length, C model size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from ..models.attention_linformer import LinformerAttention
from ..models.plain_linformer import plain_attention
from .checks import WrongImplementation
from .layers import checked_examples, make_layer, require_output_agreement
from .point import FULL, Point


def build(point: Point) -> tuple[Any, Any]:
    """The layer, and a compiled model that consists of this layer."""
    import keras

    from ..keras import LinearMultiHeadAttention

    with keras.device(point.device):
        keras.utils.set_random_seed(0)
        if point.implementation == FULL:
            layer = keras.layers.MultiHeadAttention(point.num_heads, point.head_size)
        else:
            options: dict[str, Any] = {"projection": point.projection, "sharing": point.layer_sharing}
            layer = LinearMultiHeadAttention(point.num_heads, point.head_size, point.projected_length, **options)
        return layer, make_model(layer, point)


def make_model(layer: Any, point: Point) -> Any:
    import keras

    x = keras.Input((point.length, point.hidden_size))
    model = keras.Model(x, layer(x, x))
    model.compile("sgd", "mse")
    return model


def check(point: Point) -> None:
    """Compare outputs with the plain form in float64; without projection, our layer must equal Keras exactly."""
    layer, model = build(point)
    randomize(layer, np.random.default_rng(0))
    x_BNC = random_features(point)[: checked_examples(point.batch, point.length)]
    output_BNC = torch.from_numpy(np.array(model.predict_on_batch(x_BNC)))
    exact = partial(plain_attention, torch_twin(point, layer).double())
    with torch.no_grad():
        require_output_agreement(point.implementation, output_BNC, exact, torch.from_numpy(x_BNC))
    if point.implementation == FULL:
        check_without_projection(point, layer, model, x_BNC[:1])


def check_without_projection(point: Point, full: Any, model: Any, x_BNC: np.ndarray) -> None:
    from ..keras import LinearMultiHeadAttention

    ours = LinearMultiHeadAttention(point.num_heads, point.head_size, None)
    our_model = make_model(ours, point)
    ours.set_weights(full.get_weights())
    if not np.array_equal(our_model.predict_on_batch(x_BNC), model.predict_on_batch(x_BNC)):
        raise WrongImplementation(
            "LinearMultiHeadAttention with projection_dim=None differs from MultiHeadAttention with the same weights; "
            "they must be equal bit for bit, so it was not timed"
        )


def random_features(point: Point) -> np.ndarray:
    shape = (point.batch, point.length, point.hidden_size)
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def randomize(layer: Any, generator: np.random.Generator) -> None:
    """Set weights that reveal errors: nonzero biases, and an E that gives rows of unit variance."""
    projection = getattr(layer, "projection", None)
    for weight in [] if projection is None else projection.weights:
        weight.assign(generator.normal(0, weight.shape[0] ** -0.5, weight.shape))
    for weight in layer.weights:
        if weight.name == "bias":
            weight.assign(generator.normal(0, 0.1, weight.shape))


def torch_twin(point: Point, layer: Any) -> LinformerAttention:
    """Our PyTorch layer with the weights of a Keras layer."""
    import keras

    def tensor(weight: Any) -> torch.Tensor:
        return torch.from_numpy(keras.ops.convert_to_numpy(weight).copy())

    weights = {}
    for name in ("query", "key", "value", "output"):
        dense = getattr(layer, f"{name}_dense")
        inputs = point.num_heads * point.head_size if name == "output" else point.hidden_size
        weights[f"{name}.weight"] = tensor(dense.kernel).reshape(inputs, -1).T
        weights[f"{name}.bias"] = tensor(dense.bias).flatten()
    if point.projected_length is not None:
        weights |= {f"projection.{weight.name}": tensor(weight) for weight in layer.projection.weights}
    twin = make_layer(point)
    twin.load_state_dict(weights)
    return twin


def make_call(point: Point, model: Any) -> Callable[[], object]:
    """`predict_on_batch` or `train_on_batch`; returns when everything has been computed."""
    import keras

    x_BNC = random_features(point)
    y_BNC = x_BNC[::-1].copy()

    def predict() -> object:
        with keras.device(point.device):
            return model.predict_on_batch(x_BNC)

    def train() -> object:
        with keras.device(point.device):
            model.train_on_batch(x_BNC, y_BNC)
            # JAX computes asynchronously; the rest of the step would count for the next layer
            return keras.ops.convert_to_numpy(model.trainable_variables[0])

    return train if point.step == "training" else predict


def parameter_shapes(layer: Any) -> dict[str, tuple[int, ...]]:
    return {weight.path: tuple(weight.shape) for weight in layer.weights}
