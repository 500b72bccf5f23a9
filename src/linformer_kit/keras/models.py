"""The models: classifier, backbone, masked LM and causal LM. Padding never changes their outputs.

Shapes: B batch, N length, C model size, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from ..models.options_linformer import choice, positive_integer, probability
from .checks import check_ids
from .generation import GenerationMixin, LoopCache
from .layers import Prompt, Stack, initializer, make_dense, make_norm
from .options import Options
from .tokens import Tensor, TokenOrder, real_tokens_first, take_tokens, zero_padding

POOLINGS = ("mean", "first")
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class PackedInput(NamedTuple):
    """Token ids and types, the real tokens first."""

    ids_BN: Tensor
    types_BN: Tensor | None
    order: TokenOrder | None  # None: every token is real

    @property
    def lengths_B(self) -> Tensor | None:
        return None if self.order is None else self.order.lengths_B

    def unpack(self, states_BNC: Tensor) -> Tensor:
        """Hidden states in the original order of the tokens."""
        return states_BNC if self.order is None else take_tokens(states_BNC, self.order.place_BN)


@contextmanager
def dtype_policy_scope(policy: Any) -> Iterator[None]:
    """Create layers with this dtype policy."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def make_embedding(options: Options, has_output: bool = False, name: str = "words") -> keras.layers.ReversibleEmbedding:
    """Word embeddings and, with `has_output`, the output matrix to logits, which is the same one if `tied`.

    They compute in the dtype of the weights: the gradient of a frequent token sums over all its positions.
    """
    return keras.layers.ReversibleEmbedding(
        options.vocab_size,
        options.d_model,
        tie_weights=options.tied or not has_output,
        embeddings_initializer=initializer(options),
        reverse_dtype="float32",
        dtype=keras.config.dtype_policy().variable_dtype,
        name=name,
    )


def with_input_checks(name: str) -> Callable[..., Any]:
    """This method of `keras.Model`, with checks of its data before it runs."""
    method = getattr(keras.Model, name)

    @functools.wraps(method)
    def wrapper(self: "LinformerModel", x: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.check_arrays(x)
        validation = kwargs.get("validation_data")
        if isinstance(validation, tuple | list) and validation:
            self.check_arrays(validation[0])
        values = [(variable, variable.value) for variable in self.variables]
        try:
            return method(self, x, *args, **kwargs)
        except Exception:
            for variable, value in values:
                if has_lost_value(variable):  # Keras on JAX clears them during predict, and an error leaves them empty
                    variable.assign(value)
            raise

    return wrapper


def has_lost_value(variable: keras.Variable) -> bool:
    """Whether the value of a variable is gone."""
    try:
        return variable.value is None
    except TypeError:  # Keras tries to call the initializer, which is gone too
        return True


class LinformerModel(keras.Model):
    """Base class of the models: options, inputs, saving, checks."""

    outputs_per_token = False  # whether there is one output per token

    def __init__(self, **options: Any):
        keras_options = {name: options.pop(name) for name in ("name", "dtype", "trainable") if name in options}
        checked = Options.from_keywords(options)
        super().__init__(**keras_options)
        self.autocast = False  # float ids must not be rounded to other ids
        self.supports_masking = True
        self.options = checked
        self.loops = LoopCache()
        with dtype_policy_scope(self.dtype_policy):
            self.create_layers(checked)
        self.build_layers()
        self.built = True

    def create_layers(self, options: Options) -> None:
        """Create the layers."""
        raise NotImplementedError

    def build_layers(self) -> None:
        """Create the weights, none of which depends on the data."""
        raise NotImplementedError

    def build(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the constructor builds the model."""

    def num_params(self) -> int:
        """The number of parameters, trainable or not."""
        return self.count_params()

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.options.to_dict(), **self.own_config()}

    def own_config(self) -> dict[str, Any]:
        """The options of this model class only."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "LinformerModel":
        if isinstance(config.get("dtype"), dict):
            config = {**config, "dtype": keras.dtype_policies.deserialize(config["dtype"])}
        return cls(**config)

    @property
    def input_stack(self) -> Stack:
        """The stack that processes `input_ids`."""
        return self.stack

    def named_inputs(self, inputs: Any) -> dict[str, Any]:
        """Check (B, N) ids, or a dict with `attention_mask` and `token_type_ids`, and return them by name."""
        named = dict(inputs) if isinstance(inputs, dict) else {"input_ids": inputs}
        for name in named:
            choice("the input name", name, INPUTS)
        if "input_ids" not in named:
            raise ValueError(f"the inputs are {', '.join(named)}; input_ids are missing")
        shape = tuple(named["input_ids"].shape)
        for name, x in named.items():
            if name != "attention_mask":
                count = self.options.vocab_size if name == "input_ids" else max(1, self.options.token_types)
                check_ids(name, x, count)
            if tuple(x.shape) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)} but input_ids has {shape}; use one value per token"
                )
        self.input_stack.check_length(shape[1])
        return named

    def pack(self, inputs: Any) -> PackedInput:
        """Check the inputs and move the real tokens to the front."""
        named = self.named_inputs(inputs)
        ids_BN, mask_BN = ops.cast(named["input_ids"], "int32"), named.get("attention_mask")
        types_BN = None if "token_type_ids" not in named else ops.cast(named["token_type_ids"], "int32")
        if mask_BN is None and self.options.pad_id is not None:
            mask_BN = ops.not_equal(ids_BN, self.options.pad_id)
        if mask_BN is None:
            return PackedInput(ids_BN, types_BN, None)
        order = real_tokens_first(ops.cast(mask_BN, "bool"))
        ids_BN, types_BN = (None if x is None else take_tokens(x, order.origin_BN) for x in (ids_BN, types_BN))
        return PackedInput(ids_BN, types_BN, order)

    def check_arrays(self, x: Any) -> None:
        """Check NumPy inputs before they enter a graph, where values cannot be read."""
        arrays = x.values() if isinstance(x, dict) else [x]
        if all(isinstance(array, np.ndarray) for array in arrays):
            self.validate_inputs(x)

    def validate_inputs(self, inputs: Any) -> Any:
        """Raise for invalid inputs."""
        return self.named_inputs(inputs)

    fit = with_input_checks("fit")
    evaluate = with_input_checks("evaluate")
    predict = with_input_checks("predict")
    train_on_batch = with_input_checks("train_on_batch")
    test_on_batch = with_input_checks("test_on_batch")
    predict_on_batch = with_input_checks("predict_on_batch")

    def export(self, filepath: Any, *args: Any, input_signature: Any = None, **kwargs: Any) -> Any:
        """As in Keras. By default the batch size is free, and the length is free on TensorFlow, `max_len` elsewhere."""
        if input_signature is None:
            length = None if keras.backend.backend() == "tensorflow" else self.options.max_len
            input_signature = [self.signature(keras.InputSpec(shape=(None, length), dtype="int32"))]
        return super().export(filepath, *args, input_signature=input_signature, **kwargs)

    def signature(self, ids: keras.InputSpec) -> Any:
        """The input signature of an exported model."""
        return ids

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """(B, N), True at real tokens, if there is one output per token: later layers ignore padding."""
        if not self.outputs_per_token:
            return None
        named = self.named_inputs(inputs)
        if "attention_mask" in named:
            return ops.cast(named["attention_mask"], "bool")
        return None if self.options.pad_id is None else ops.not_equal(named["input_ids"], self.options.pad_id)

    def compute_output_spec(self, inputs: Any, training: bool | None = None) -> keras.KerasTensor:
        return self.output_spec(tuple(self.named_inputs(inputs)["input_ids"].shape))

    def output_spec(self, shape: tuple[int | None, ...]) -> keras.KerasTensor:
        """The output for ids of this shape."""
        raise NotImplementedError


@keras.saving.register_keras_serializable(package="linformer_kit")
class LinformerBackbone(LinformerModel):
    """The encoder: token ids to hidden states.

    >>> backbone = LinformerBackbone(k=32, max_len=1024, vocab_size=100, d_model=64, n_heads=4, n_layers=2)
    >>> tuple(backbone(np.arange(1, 91).reshape(2, 45)).shape)
    (2, 45, 64)

    All models accept the options of `linformer_kit.keras.Options`.
    """

    outputs_per_token = True

    def create_layers(self, options: Options) -> None:
        self.stack = Stack(options, make_embedding(options), name="stack")

    def build_layers(self) -> None:
        self.stack.build()

    def call(self, inputs: Any, training: bool | None = None) -> Tensor:
        """(B, N) ids, or a dict of input_ids, attention_mask and token_type_ids, to (B, N, C)."""
        packed = self.pack(inputs)
        return packed.unpack(self.stack(packed.ids_BN, packed.lengths_B, packed.types_BN, training=training))

    def output_spec(self, shape):
        return keras.KerasTensor((*shape, self.options.d_model), dtype=self.compute_dtype)


class Head(keras.layers.Layer):
    """`norm(activation(X W + b))`, BERT's transform before the output layer."""

    def __init__(self, options: Options, **kwargs: Any):
        super().__init__(**kwargs)
        self.width = options.d_model
        self.dense = make_dense(options.d_model, options, activation=options.activation, name="dense")
        self.norm = make_norm(options, name="norm")

    def build(self, _: Any = None) -> None:
        self.dense.build((None, self.width))
        self.norm.build((None, self.width))
        self.built = True

    def call(self, x: Tensor) -> Tensor:
        return self.norm(self.dense(x))


@keras.saving.register_keras_serializable(package="linformer_kit")
class Linformer(LinformerModel):
    """Text classifier.

    >>> model = Linformer(k=16, max_len=128, vocab_size=100, d_model=32, d_ff=64, n_heads=2, n_layers=1, n_classes=3)
    >>> model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    >>> ids = np.random.default_rng(0).integers(1, 100, (8, 100))
    >>> history = model.fit(ids, np.arange(8) % 3, verbose=0)
    >>> model.predict(ids, verbose=0).shape
    (8, 3)

    It returns probabilities, which Keras losses expect by default, or logits with `classifier_activation=None`. The
    classifier reads the mean of the tokens (`pooling="mean"`) or the first one ("first"). The other options are those
    of `linformer_kit.keras.Options`. `batch_size` is accepted for compatibility and ignored.
    """

    def __init__(
        self,
        *,
        n_classes: int = 2,
        pooling: str = "mean",
        classifier_dropout: float | None = None,
        classifier_activation: str | None = "softmax",
        batch_size: int | None = None,
        **options: Any,
    ):
        n_classes = positive_integer("n_classes", n_classes)
        if n_classes == 1 and classifier_activation == "softmax":
            raise ValueError(
                "n_classes is 1, and the softmax over one class is always 1; for two classes use n_classes=2, or "
                "classifier_activation='sigmoid' with the loss 'binary_crossentropy'; for regression "
                "classifier_activation=None"
            )
        choice("pooling", pooling, POOLINGS)
        if classifier_dropout is not None:
            probability("classifier_dropout", classifier_dropout)
        self._own: dict[str, Any] = {
            "n_classes": n_classes,
            "pooling": pooling,
            "classifier_dropout": classifier_dropout,
            "classifier_activation": classifier_activation,
        }
        super().__init__(**options)

    def create_layers(self, options: Options) -> None:
        own = self._own
        self.stack = Stack(options, make_embedding(options), name="stack")
        self.head = Head(options, name="head")
        rate = options.dropout if own["classifier_dropout"] is None else own["classifier_dropout"]
        self.dropout = keras.layers.Dropout(rate, name="dropout")
        # losses and metrics need float32, whatever the compute dtype
        self.classifier = make_dense(
            own["n_classes"], options, activation=own["classifier_activation"], dtype="float32", name="classifier"
        )

    def build_layers(self) -> None:
        self.stack.build()
        self.head.build()
        self.classifier.build((None, self.options.d_model))

    def call(self, inputs: Any, training: bool | None = None) -> Tensor:
        """(B, N) ids, or a dict of input_ids, attention_mask and token_type_ids, to (B, `n_classes`)."""
        packed = self.pack(inputs)
        states_BNC = self.stack(packed.ids_BN, packed.lengths_B, packed.types_BN, training=training)
        pooled_BC = pool(states_BNC, packed.lengths_B, self._own["pooling"])
        return self.classifier(self.dropout(self.head(pooled_BC), training=training))

    def output_spec(self, shape):
        return keras.KerasTensor((shape[0], self._own["n_classes"]), dtype="float32")

    def own_config(self) -> dict[str, Any]:
        return dict(self._own)


def pool(states_BNC: Tensor, lengths_B: Tensor | None, pooling: str) -> Tensor:
    """(B, C): the mean of the real tokens, or the first one."""
    if pooling == "first":
        return states_BNC[:, 0]
    if lengths_B is None:
        return ops.mean(states_BNC, axis=1)
    sums_BC = ops.sum(ops.cast(zero_padding(states_BNC, lengths_B), "float32"), axis=1)
    return ops.cast(sums_BC / ops.cast(ops.maximum(lengths_B, 1), "float32")[:, None], states_BNC.dtype)


@keras.saving.register_keras_serializable(package="linformer_kit")
class LinformerMaskedLM(LinformerModel):
    """Masked language model: token ids to (B, N, V) logits.

    >>> model = LinformerMaskedLM(k=16, max_len=128, vocab_size=100, d_model=32, d_ff=64, n_heads=2, n_layers=1)
    >>> tuple(model(np.full((2, 50), 7)).shape)
    (2, 50, 100)

    Train it with `keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-100)`; labels are -100
    where the input is not masked.
    """

    outputs_per_token = True

    def create_layers(self, options: Options) -> None:
        self.words = make_embedding(options, has_output=True)
        self.stack = Stack(options, self.words, name="stack")
        self.head = Head(options, name="head")

    def build_layers(self) -> None:
        self.stack.build()
        self.head.build()
        self.bias = self.add_weight(shape=(self.options.vocab_size,), initializer="zeros", name="bias", dtype="float32")

    def call(self, inputs: Any, training: bool | None = None) -> Tensor:
        """(B, N) ids, or a dict of input_ids, attention_mask and token_type_ids, to (B, N, V)."""
        packed = self.pack(inputs)
        states_BNC = packed.unpack(self.stack(packed.ids_BN, packed.lengths_B, packed.types_BN, training=training))
        return self.words(self.head(states_BNC), reverse=True) + ops.cast(self.bias, "float32")

    def output_spec(self, shape):
        return keras.KerasTensor((*shape, self.options.vocab_size), dtype="float32")


@keras.saving.register_keras_serializable(package="linformer_kit")
class LinformerCausalLM(LinformerModel, GenerationMixin):
    """Causal language model: token ids to (B, N, V) logits of the next token, and generation.

    >>> sizes = {"max_len": 128, "vocab_size": 100, "d_model": 32, "d_ff": 64, "n_heads": 2, "n_layers": 1}
    >>> model = LinformerCausalLM(**sizes, block_length=16)
    >>> model.generate(np.full((2, 40), 7), max_new_tokens=5).shape
    (2, 45)
    """

    outputs_per_token = True

    def create_layers(self, options: Options) -> None:
        self.words = make_embedding(options, has_output=True)
        self.decoder = Stack(options, self.words, is_decoder=True, name="decoder")

    def build_layers(self) -> None:
        self.decoder.build()

    def call(self, inputs: Any, training: bool | None = None) -> Tensor:
        """(B, N) ids, or a dict of input_ids, attention_mask and token_type_ids, to (B, N, V)."""
        packed = self.pack(inputs)
        states_BNC = self.decoder(packed.ids_BN, packed.lengths_B, packed.types_BN, training=training)
        return self.words(packed.unpack(states_BNC), reverse=True)

    def output_spec(self, shape):
        return keras.KerasTensor((*shape, self.options.vocab_size), dtype="float32")

    @property
    def input_stack(self) -> Stack:
        return self.decoder

    def make_prompt(self, inputs: dict[str, Tensor]) -> Prompt:
        packed = self.pack(inputs)
        assert packed.lengths_B is not None
        return Prompt(packed.ids_BN, packed.lengths_B, packed.types_BN, self.decoder.project_source(None))

    def logits(self, states_BC: Tensor) -> Tensor:
        return self.words(states_BC, reverse=True)

    def output_prefix(self, ids_BN: np.ndarray, longest: int) -> tuple[np.ndarray, int]:
        return ids_BN, longest
