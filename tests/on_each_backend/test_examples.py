"""The examples run, and learn what they show."""

import sys
from pathlib import Path

import keras
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import keras_pairs
import keras_replace_attention
import keras_sentiment


def test_sentiment_with_fit(tmp_path):
    arguments = ["--words", "200", "--examples", "1200", "--epochs", "4"]
    assert keras_sentiment.main(arguments) > 0.7


def test_sentiment_of_files(tmp_path):
    for split, count in (("train", 20), ("test", 8)):
        rows = list(keras_sentiment.made_up_reviews(count, 30, seed=0))
        (tmp_path / f"{split}.jsonl").write_text("".join(keras_sentiment.json.dumps(row) + "\n" for row in rows))
    assert 0 <= keras_sentiment.main(["--data", str(tmp_path), "--words", "30", "--examples", "16", "--epochs", "1"]) <= 1


def test_pairs():
    keras.utils.set_random_seed(1)
    assert keras_pairs.main(["--epochs", "30"]) > 0.8


def test_one_line_is_changed(monkeypatch):
    monkeypatch.setattr(keras_replace_attention, "LENGTH", 100)
    accuracies = keras_replace_attention.main(["--examples", "512", "--epochs", "6"])
    assert accuracies["LinearMultiHeadAttention"] > 0.8
    assert accuracies["MultiHeadAttention"] == pytest.approx(accuracies["LinearMultiHeadAttention"], abs=0.2)
