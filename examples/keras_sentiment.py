"""Sentiment of long texts: compile and fit a Linformer classifier.

    python examples/keras_sentiment.py                      # synthetic reviews, about a minute
    python examples/keras_sentiment.py --data DIRECTORY     # train.jsonl and test.jsonl, or the same with .gz

The files have the columns `text` and `label`. The environment variable `KERAS_BACKEND` selects the backend: `jax`,
`tensorflow` or `torch`.
"""

import argparse
import gzip
import json
import random
import sys
from collections import Counter
from pathlib import Path

import keras
import numpy as np

from linformer_kit.keras import Linformer

PADDING, UNKNOWN = 0, 1
GOOD, BAD = ("wonderful", "moving", "brilliant", "charming"), ("dull", "tedious", "awful", "clumsy")
OTHERS = [f"{noun}{number}" for noun in ("scene", "actor", "line", "song", "story") for number in range(60)]


def synthetic_reviews(count, words, seed):
    """Yield long reviews. One word in twenty is an opinion, and three out of four opinions agree with the label."""
    rng = random.Random(seed)
    for number in range(count):
        text = rng.choices(OTHERS, k=rng.randint(words // 2, words))
        for place in range(rng.randrange(20), len(text), 20):
            text[place] = rng.choice(GOOD if (rng.random() < 0.75) == (number % 2) else BAD)
        yield {"text": " ".join(text), "label": number % 2}


def read_reviews(directory, split):
    """The rows of `split`.jsonl or `split`.jsonl.gz."""
    paths = (directory / f"{split}.jsonl", directory / f"{split}.jsonl.gz")
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        sys.exit(f"{directory} holds neither {split}.jsonl nor {split}.jsonl.gz; pass another directory with --data")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    if not rows:
        sys.exit(f"{path} is empty; write one line of JSON with text and label per review")
    return rows


def split_words(text):
    return text.lower().split()


def build_vocabulary(rows, size):
    """The most frequent words, numbered from 2."""
    counts = Counter(word for row in rows for word in split_words(row["text"]))
    return {word: number for number, (word, _) in enumerate(counts.most_common(size - 2), start=2)}


def to_arrays(rows, vocabulary, length):
    """(B, N) ids, padded with 0 at the end, and (B,) labels."""
    ids = np.full((len(rows), length), PADDING, "int32")
    for row, row_ids in zip(rows, ids, strict=True):
        known = [vocabulary.get(word, UNKNOWN) for word in split_words(row["text"])[:length]]
        row_ids[: len(known)] = known
    return ids, np.array([row["label"] for row in rows])


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Classify the sentiment of long texts with Keras.")
    parser.add_argument(
        "--data", type=Path, help="Directory with train.jsonl and test.jsonl (default: synthetic reviews)."
    )
    parser.add_argument("--words", type=int, default=512, help="Maximum number of words per text.")
    parser.add_argument(
        "--examples", type=int, default=1600, help="Maximum number of training examples; the test set has a quarter."
    )
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args(arguments)

    if options.data is None:
        train = list(synthetic_reviews(options.examples, options.words, seed=0))
        test = list(synthetic_reviews(options.examples // 4, options.words, seed=1))
    else:
        rng = random.Random(0)
        train, test = (read_reviews(options.data, split) for split in ("train", "test"))
        train = rng.sample(train, min(len(train), options.examples))
        test = rng.sample(test, min(len(test), options.examples // 4))
    vocabulary = build_vocabulary(train, size=10_000)
    x, y = to_arrays(train, vocabulary, options.words)
    x_test, y_test = to_arrays(test, vocabulary, options.words)

    model = Linformer(
        k=64,
        max_len=options.words,
        vocab_size=len(vocabulary) + 2,
        d_model=64,
        d_ff=128,
        n_heads=4,
        n_layers=1,
        dropout=0.1,
        projection="dynamic",
        n_classes=2,
    )
    model.compile(optimizer=keras.optimizers.Adam(2e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    stop = keras.callbacks.EarlyStopping(monitor="val_accuracy", patience=2, restore_best_weights=True)
    model.fit(x, y, batch_size=16, epochs=options.epochs, validation_split=0.1, callbacks=[stop], verbose=2)
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(
        f"accuracy {accuracy:.1%} on {len(test)} test texts of up to {options.words} words, {keras.backend.backend()}"
    )
    return accuracy


if __name__ == "__main__":
    main()
