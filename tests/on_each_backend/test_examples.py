"""The examples run. On PyTorch, which compiles nothing, they also learn what they show."""

import json
import sys
from pathlib import Path

import keras
import pytest
from battery import only_torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import keras_pairs
import keras_replace_attention
import keras_sentiment


@only_torch
def test_sentiment_with_fit():
    assert keras_sentiment.main(["--words", "100", "--examples", "600", "--epochs", "3"]) > 0.7


def test_sentiment_of_files(tmp_path):
    # as many test examples as validation examples: one graph evaluates both
    for split, count in (("train", 20), ("test", 2)):
        rows = keras_sentiment.synthetic_reviews(count, 30, seed=0)
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ["--words", "30", "--examples", "16", "--epochs", "1"]
    assert 0 <= keras_sentiment.main(["--data", str(tmp_path), *sizes]) <= 1


def test_missing_or_empty_files_raise_an_error(tmp_path):
    with pytest.raises(SystemExit, match=r"holds neither train\.jsonl nor train\.jsonl\.gz"):
        keras_sentiment.main(["--data", str(tmp_path)])
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(SystemExit, match=r"train\.jsonl is empty"):
        keras_sentiment.main(["--data", str(tmp_path)])


@only_torch
def test_pairs():
    keras.utils.set_random_seed(1)
    assert keras_pairs.main(["--epochs", "10"]) > 0.9


@only_torch
def test_replace_attention(monkeypatch):
    monkeypatch.setattr(keras_replace_attention, "LENGTH", 100)
    accuracies = keras_replace_attention.main(["--examples", "256", "--epochs", "8"])
    assert min(accuracies.values()) > 0.8
