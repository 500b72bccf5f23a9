"""The models: classifier, backbone, masked LM and causal LM. They read token ids, and padding never matters.

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
from .generation import Decoder, Loops
from .layers import Beginning, Stack, dense, norm, normal
from .options import Options
from .tokens import Order, Tensor, real_positions, real_tokens_first, take_tokens

POOLINGS = ("mean", "first")
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class Text(NamedTuple):
    """What a model was given, the real tokens first."""

    ids_BN: Tensor
    types_BN: Tensor | None
    order: Order | None  # None: every token is real

    @property
    def lengths_B(self) -> Tensor | None:
        return None if self.order is None else self.order.lengths_B

    def in_place(self, states_BNC: Tensor) -> Tensor:
        """Hidden states, back where their tokens stood."""
        return states_BNC if self.order is None else take_tokens(states_BNC, self.order.place_BN)


@contextmanager
def made_in(policy: Any) -> Iterator[None]:
    """Layers made meanwhile compute as the model that makes them."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def words_of(options: Options, speaks: bool = False, name: str = "words") -> keras.layers.ReversibleEmbedding:
    """The vocabulary: ids to vectors and, in models that speak, hidden states to logits, with the same matrix or another."""
    return keras.layers.ReversibleEmbedding(
        options.vocab_size,
        options.d_model,
        tie_weights=options.tied or not speaks,
        embeddings_initializer=normal(options),
        reverse_dtype="float32",
        name=name,
    )


def checked_first(name: str) -> Callable[..., Any]:
    """A method of `keras.Model` that takes data, and refuses it early."""
    method = getattr(keras.Model, name)

    @functools.wraps(method)
    def checked(self: "LinformerModel", x: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.check_fed(x)
        validation = kwargs.get("validation_data")
        if isinstance(validation, tuple | list) and validation:
            self.check_fed(validation[0])
        values = [(variable, variable.value) for variable in self.variables]
        try:
            return method(self, x, *args, **kwargs)
        except Exception:
            for variable, value in values:
                if is_gone(variable):  # Keras on JAX takes them away while it predicts, and does not give them back
                    variable.assign(value)
            raise

    return checked


def is_gone(variable: keras.Variable) -> bool:
    """Whether a variable has no value any more."""
    try:
        return variable.value is None
    except TypeError:  # Keras would call its initializer, which is gone too
        return True


class LinformerModel(keras.Model):
    """What all models share: options, reading of inputs, saving, checks of what is fed."""

    is_by_token = False  # whether there is an output for each token

    def __init__(self, **options: Any):
        of_keras = {name: options.pop(name) for name in ("name", "dtype", "trainable") if name in options}
        checked = Options.of(options)
        super().__init__(**of_keras)
        self.autocast = False  # ids that come as floats must not be rounded to other ids
        self.supports_masking = True
        self.options = checked
        self.loops = Loops()
        with made_in(self.dtype_policy):
            self.make(checked)
        self.build_parts()
        self.built = True

    def make(self, options: Options) -> None:
        """Make the parts."""
        raise NotImplementedError

    def build_parts(self) -> None:
        """Make their weights: nothing of them depends on the data."""
        raise NotImplementedError

    def build(self, *_: Any, **__: Any) -> None:
        """Built since it was made."""

    def num_params(self) -> int:
        """How many numbers the model holds; those it learns and those it does not."""
        return self.count_params()

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.options.config(), **self.own_config()}

    def own_config(self) -> dict[str, Any]:
        """What this kind of model has beside the options of all."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "LinformerModel":
        if isinstance(config.get("dtype"), dict):
            config = {**config, "dtype": keras.dtype_policies.deserialize(config["dtype"])}
        return cls(**config)

    @property
    def reader(self) -> Stack:
        """The part that reads `input_ids`."""
        return self.stack

    def named(self, inputs: Any) -> dict[str, Any]:
        """(B, N) ids, or a dict of them with `attention_mask` and `token_type_ids`, as tokenizers give it: by name, checked."""
        named = dict(inputs) if isinstance(inputs, dict) else {"input_ids": inputs}
        for name in named:
            choice("an input", name, INPUTS)
        if "input_ids" not in named:
            raise ValueError(f"there are only {', '.join(named)}; input_ids are missing")
        shape = tuple(named["input_ids"].shape)
        for name, given in named.items():
            if name != "attention_mask":
                count = self.options.vocab_size if name == "input_ids" else max(1, self.options.token_types)
                check_ids(name, given, count)
            if tuple(given.shape) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(given.shape)} but input_ids {shape}; there must be one for each token"
                )
        self.reader.check_length(shape[1])
        return named

    def read(self, inputs: Any) -> Text:
        """What a model is given, the real tokens first."""
        named = self.named(inputs)
        ids_BN, mask_BN = ops.cast(named["input_ids"], "int32"), named.get("attention_mask")
        types_BN = None if "token_type_ids" not in named else ops.cast(named["token_type_ids"], "int32")
        if mask_BN is None and self.options.pad_id is not None:
            mask_BN = ops.not_equal(ids_BN, self.options.pad_id)
        if mask_BN is None:
            return Text(ids_BN, types_BN, None)
        order = real_tokens_first(ops.cast(mask_BN, "bool"))
        ids_BN, types_BN = (None if x is None else take_tokens(x, order.origin_BN) for x in (ids_BN, types_BN))
        return Text(ids_BN, types_BN, order)

    def check_fed(self, x: Any) -> None:
        """Refuse arrays that `call` would refuse before a graph is fed with them: inside of it values are not seen."""
        arrays = x.values() if isinstance(x, dict) else [x]
        if all(isinstance(array, np.ndarray) for array in arrays):
            self.checked(x)

    def checked(self, inputs: Any) -> Any:
        """What is wrong with inputs, if anything, is told."""
        return self.named(inputs)

    fit = checked_first("fit")
    evaluate = checked_first("evaluate")
    predict = checked_first("predict")
    train_on_batch = checked_first("train_on_batch")
    test_on_batch = checked_first("test_on_batch")
    predict_on_batch = checked_first("predict_on_batch")

    def export(self, filepath: Any, *args: Any, input_signature: Any = None, **kwargs: Any) -> Any:
        """As always; by default for any batch and, on TensorFlow, any length, on others for inputs of `max_len` tokens."""
        if input_signature is None:
            length = None if keras.backend.backend() == "tensorflow" else self.options.max_len
            input_signature = [self.signature(keras.InputSpec(shape=(None, length), dtype="int32"))]
        return super().export(filepath, *args, input_signature=input_signature, **kwargs)

    def signature(self, ids: keras.InputSpec) -> Any:
        """What an exported model is called with."""
        return ids

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """(B, N), True at real tokens, where there is an output for each: layers behind it leave padding out."""
        if not self.is_by_token:
            return None
        named = self.named(inputs)
        if "attention_mask" in named:
            return ops.cast(named["attention_mask"], "bool")
        return None if self.options.pad_id is None else ops.not_equal(named["input_ids"], self.options.pad_id)

    def compute_output_spec(self, inputs: Any, training: bool | None = None) -> keras.KerasTensor:
        return self.output_of(tuple(self.named(inputs)["input_ids"].shape))

    def output_of(self, shape: tuple[int | None, ...]) -> keras.KerasTensor:
        """What becomes of ids of this shape."""
        raise NotImplementedError


@keras.saving.register_keras_serializable(package="linformer_kit")
class LinformerBackbone(LinformerModel):
    """Token ids to hidden states: the encoder.

    >>> backbone = LinformerBackbone(k=32, max_len=1024, vocab_size=100, d_model=64, n_heads=4, n_layers=2)
    >>> tuple(backbone(np.arange(1, 91).reshape(2, 45)).shape)
    (2, 45, 64)

    All models take the options of `linformer_kit.keras.Options`.
    """

    is_by_token = True

    def make(self, options: Options) -> None:
        self.stack = Stack(options, words_of(options), name="stack")

    def build_parts(self) -> None:
        self.stack.build()

    def call(self, inputs: Any, training: bool | None = None) -> Tensor:
        """(B, N) ids, 0 where there is none, to (B, N, C); or a dict of input_ids, attention_mask, token_type_ids."""
        text = self.read(inputs)
        return text.in_place(self.stack(text.ids_BN, text.lengths_B, text.types_BN, training=training))

    def output_of(self, shape):
        return keras.KerasTensor((*shape, self.options.d_model), dtype=self.compute_dtype)


class Head(keras.layers.Layer):
    """`norm(activation(X W + b))`: what BERT puts between its last layer and the words."""

    def __init__(self, options: Options, **kwargs: Any):
        super().__init__(**kwargs)
        self.width = options.d_model
        self.dense = dense(options.d_model, options, activation=options.activation, name="dense")
        self.norm = norm(options, name="norm")

    def build(self, _: Any = None) -> None:
        self.dense.build((None, self.width))
        self.norm.build((None, self.width))
        self.built = True

    def call(self, x: Tensor) -> Tensor:
        return self.norm(self.dense(x))


@keras.saving.register_keras_serializable(package="linformer_kit")
class Linformer(LinformerModel):
    """The classifier of texts: compile it, fit it.

    >>> model = Linformer(k=16, max_len=128, vocab_size=100, d_model=32, d_ff=64, n_heads=2, n_layers=1, n_classes=3)
    >>> model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    >>> ids = np.random.default_rng(0).integers(1, 100, (8, 100))
    >>> history = model.fit(ids, np.arange(8) % 3, verbose=0)
    >>> model.predict(ids, verbose=0).shape
    (8, 3)

    It gives probabilities, as the losses of Keras expect them by name; with `classifier_activation=None` it gives logits. The
    class is told from the mean of the tokens (`pooling="mean"`) or from the first one ("first"). The other options are those
    of `linformer_kit.keras.Options`. `batch_size` is taken and not needed: every batch tells its own.
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
                "n_classes is 1, and the softmax over one class is always 1; for two classes say n_classes=2, or "
                "classifier_activation='sigmoid' with the loss 'binary_crossentropy', and for numbers classifier_activation=None"
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

    def make(self, options: Options) -> None:
        own = self._own
        self.stack = Stack(options, words_of(options), name="stack")
        self.head = Head(options, name="head")
        rate = options.dropout if own["classifier_dropout"] is None else own["classifier_dropout"]
        self.dropout = keras.layers.Dropout(rate, name="dropout")
        # losses and metrics want float32, whatever the rest computes in
        self.classifier = dense(
            own["n_classes"], options, activation=own["classifier_activation"], dtype="float32", name="classifier"
        )

    def build_parts(self) -> None:
        self.stack.build()
        self.head.build()
        self.classifier.build((None, self.options.d_model))

    def call(self, inputs: Any, training: bool | None = None) -> Tensor:
        """(B, N) ids, 0 where there is none, to (B, `n_classes`); or a dict of input_ids, attention_mask, token_type_ids."""
        text = self.read(inputs)
        states_BNC = self.stack(text.ids_BN, text.lengths_B, text.types_BN, training=training)
        pooled_BC = pooled(states_BNC, text.lengths_B, self._own["pooling"])
        return self.classifier(self.dropout(self.head(pooled_BC), training=training))

    def output_of(self, shape):
        return keras.KerasTensor((shape[0], self._own["n_classes"]), dtype="float32")

    def own_config(self) -> dict[str, Any]:
        return dict(self._own)


def pooled(states_BNC: Tensor, lengths_B: Tensor | None, pooling: str) -> Tensor:
    """(B, C): the mean of the real tokens, or the first of them."""
    if pooling == "first":
        return states_BNC[:, 0]
    if lengths_B is None:
        return ops.mean(states_BNC, axis=1)
    real_BN1 = ops.expand_dims(real_positions(ops.shape(states_BNC)[1], lengths_B), -1)
    sums_BC = ops.sum(ops.cast(ops.where(real_BN1, states_BNC, ops.zeros_like(states_BNC)), "float32"), axis=1)
    return ops.cast(sums_BC / ops.cast(ops.maximum(lengths_B, 1), "float32")[:, None], states_BNC.dtype)


@keras.saving.register_keras_serializable(package="linformer_kit")
class LinformerMaskedLM(LinformerModel):
    """Fills masks: token ids to (B, N, V) logits.

    >>> model = LinformerMaskedLM(k=16, max_len=128, vocab_size=100, d_model=32, d_ff=64, n_heads=2, n_layers=1)
    >>> tuple(model(np.full((2, 50), 7)).shape)
    (2, 50, 100)

    Train it with `keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-100)`, -100 where no word is
    hidden.
    """

    is_by_token = True

    def make(self, options: Options) -> None:
        self.words = words_of(options, speaks=True)
        self.stack = Stack(options, self.words, name="stack")
        self.head = Head(options, name="head")

    def build_parts(self) -> None:
        self.stack.build()
        self.head.build()
        self.bias = self.add_weight(shape=(self.options.vocab_size,), initializer="zeros", name="bias", dtype="float32")

    def call(self, inputs: Any, training: bool | None = None) -> Tensor:
        """(B, N) ids, 0 where there is none, to (B, N, V); or a dict of input_ids, attention_mask, token_type_ids."""
        text = self.read(inputs)
        states_BNC = text.in_place(self.stack(text.ids_BN, text.lengths_B, text.types_BN, training=training))
        return self.words(self.head(states_BNC), reverse=True) + ops.cast(self.bias, "float32")

    def output_of(self, shape):
        return keras.KerasTensor((*shape, self.options.vocab_size), dtype="float32")


@keras.saving.register_keras_serializable(package="linformer_kit")
class LinformerCausalLM(LinformerModel, Decoder):
    """Predicts the next token: token ids to (B, N, V) logits, and generates.

    >>> model = LinformerCausalLM(max_len=128, vocab_size=100, d_model=32, d_ff=64, n_heads=2, n_layers=1, block_length=16)
    >>> model.generate(np.full((2, 40), 7), max_new_tokens=5).shape
    (2, 45)
    """

    is_by_token = True

    def make(self, options: Options) -> None:
        self.words = words_of(options, speaks=True)
        self.decoder = Stack(options, self.words, is_decoder=True, name="decoder")

    def build_parts(self) -> None:
        self.decoder.build()

    def call(self, inputs: Any, training: bool | None = None) -> Tensor:
        """(B, N) ids, 0 where there is none, to (B, N, V); or a dict of input_ids, attention_mask, token_type_ids."""
        text = self.read(inputs)
        states_BNC = self.decoder(text.ids_BN, text.lengths_B, text.types_BN, training=training)
        return self.words(text.in_place(states_BNC), reverse=True)

    def output_of(self, shape):
        return keras.KerasTensor((*shape, self.options.vocab_size), dtype="float32")

    @property
    def reader(self) -> Stack:
        return self.decoder

    def begin(self, inputs: dict[str, Tensor]) -> Beginning:
        text = self.read(inputs)
        assert text.lengths_B is not None
        return Beginning(text.ids_BN, text.lengths_B, text.types_BN, self.decoder.read(None))

    def logits(self, states_BC: Tensor) -> Tensor:
        return self.words(states_BC, reverse=True)

    def first_ids(self, given_BN: np.ndarray, longest: int) -> tuple[np.ndarray, int]:
        return given_BN, longest
