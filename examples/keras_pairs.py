"""Classify pairs of texts, as in natural language inference: entailment, contradiction or neutral.

    python examples/keras_pairs.py

The sentences are synthetic. In the first, a person rests or moves. The second says the same in another word, says the
opposite, or describes the weather. Token types distinguish the two sentences.
"""

import argparse
import random

import keras
import numpy as np

from linformer_kit.keras import Linformer

NAMES = ["anna", "ben", "clara", "david", "emma", "felix", "greta", "hugo"]
PLACES = ["garden", "kitchen", "station", "school", "harbor", "library", "market", "theater"]
RESTING, MOVING = ["rests", "sleeps", "sits", "waits"], ["runs", "jumps", "dances", "climbs"]
WEATHER = ["rains", "snows", "thunders", "clears"]
LABELS = ["entailment", "contradiction", "neutral"]
WORDS = ["<pad>", "<sep>", *NAMES, *PLACES, *RESTING, *MOVING, *WEATHER, "in", "the", "outside", "it"]
IDS = {word: number for number, word in enumerate(WORDS)}
LENGTH = 16


def synthetic_pairs(count, seed):
    """Yield `count` tuples of premise, hypothesis and label."""
    rng = random.Random(seed)
    for number in range(count):
        label, name = LABELS[number % 3], rng.choice(NAMES)
        same_group, other_group = rng.sample([RESTING, MOVING], 2)
        verb, synonym = rng.sample(same_group, 2)
        hypotheses = {
            "entailment": f"{name} {synonym}",
            "contradiction": f"{name} {rng.choice(other_group)}",
            "neutral": f"outside it {rng.choice(WEATHER)}",
        }
        yield f"{name} {verb} in the {rng.choice(PLACES)}", hypotheses[label], label


def to_arrays(pairs):
    """The inputs, with both texts of a pair in one row of ids, and the labels."""
    rows = [(premise.split(), hypothesis.split(), label) for premise, hypothesis, label in pairs]
    ids, types = np.zeros((2, len(rows), LENGTH), "int32")
    for number, (premise, hypothesis, _) in enumerate(rows):
        words = [*premise, "<sep>", *hypothesis]
        ids[number, : len(words)] = [IDS[word] for word in words]
        types[number, len(premise) + 1 : len(words)] = 1
    return {"input_ids": ids, "token_type_ids": types}, np.array([LABELS.index(label) for _, _, label in rows])


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Classify pairs of texts with Keras.")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args(arguments)

    x, y = to_arrays(synthetic_pairs(1500, seed=0))
    x_test, y_test = to_arrays(synthetic_pairs(300, seed=1))
    sizes = {
        "k": 12,
        "max_len": LENGTH,
        "vocab_size": len(WORDS),
        "d_model": 64,
        "d_ff": 128,
        "n_heads": 4,
        "n_layers": 1,
    }
    model = Linformer(**sizes, dropout=0.0, token_types=2, n_classes=3)
    model.compile(optimizer=keras.optimizers.Adam(2e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=50, epochs=options.epochs, validation_data=(x_test, y_test), verbose=2)
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    example = to_arrays([("anna sleeps in the garden", "anna dances", LABELS[0])])[0]
    answer = LABELS[int(model.predict(example, verbose=0).argmax())]
    print(f"accuracy {accuracy:.1%} on {len(y_test)} test pairs; 'anna sleeps in the garden', 'anna dances': {answer}")
    return accuracy


if __name__ == "__main__":
    main()
