"""Replace the attention of an existing functional model by changing one line.

    python examples/keras_replace_attention.py

The task: one of 1,000 numbers is marked; is it above their mean?
"""

import argparse
import time

import keras
import numpy as np

from linformer_kit.keras import LinearMultiHeadAttention

LENGTH, WIDTH = 1000, 32


def full_attention():
    return keras.layers.MultiHeadAttention(num_heads=4, key_dim=8)


def linear_attention():  # the changed line
    return LinearMultiHeadAttention(num_heads=4, key_dim=8, projection_dim=32)


def build_model(attention):
    """A transformer block with a classifier."""
    inputs = keras.Input((LENGTH, 2))
    x = keras.layers.Dense(WIDTH)(inputs)
    y = keras.layers.LayerNormalization()(x)
    x = keras.layers.Add()([x, attention(y, y)])
    y = keras.layers.LayerNormalization()(x)
    x = keras.layers.Add()([x, keras.layers.Dense(WIDTH)(keras.layers.Dense(2 * WIDTH, activation="gelu")(y))])
    x = keras.layers.GlobalMaxPooling1D()(keras.layers.LayerNormalization()(x))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
    model.compile(keras.optimizers.Adam(3e-3), "binary_crossentropy", metrics=["accuracy"])
    return model


def synthetic_rows(count, seed):
    """(B, N, 2) numbers around the mean of each row, one of them marked; (B,) whether that one is above the mean."""
    rng = np.random.default_rng(seed)
    values, answers = rng.normal(size=(count, 1)) + rng.normal(size=(count, LENGTH)), rng.integers(0, 2, count)
    rows, marked = np.arange(count), rng.integers(0, LENGTH, count)
    values[rows, marked] = values.mean(axis=1) + 2 * answers - 1
    marks = np.zeros_like(values)
    marks[rows, marked] = 1
    return np.stack([values, marks], axis=-1).astype("float32"), answers.astype("float32")


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Replace MultiHeadAttention in a functional model.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--examples", type=int, default=512)
    options = parser.parse_args(arguments)

    keras.utils.set_random_seed(0)
    (x, y), (x_test, y_test) = synthetic_rows(options.examples, seed=0), synthetic_rows(200, seed=1)
    accuracies = {}
    for attention in (full_attention(), linear_attention()):
        name = type(attention).__name__
        model = build_model(attention)
        model.fit(x[:16], y[:16], batch_size=16, verbose=0)  # compiles
        start = time.perf_counter()
        model.fit(x, y, batch_size=16, epochs=options.epochs, verbose=0)
        seconds = time.perf_counter() - start
        accuracies[name] = model.evaluate(x_test, y_test, verbose=0)[1]
        print(f"{name:26} {seconds:6.1f} s of training, accuracy {accuracies[name]:.0%} on {len(y_test)} test rows")
    return accuracies


if __name__ == "__main__":
    main()
