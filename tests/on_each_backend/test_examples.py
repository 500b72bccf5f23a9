"""The examples run, and learn what they show; on other backends than PyTorch they only run, where to compile takes longest."""

import json
import sys
from pathlib import Path

import keras
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import keras_pairs
import keras_replace_attention
import keras_sentiment

IS_QUICK = keras.backend.backend() == "torch"


def test_sentiment_with_fit():
    size = (
        ["--words", "200", "--examples", "1200", "--epochs", "4"]
        if IS_QUICK
        else ["--words", "60", "--examples", "64", "--epochs", "1"]
    )
    assert keras_sentiment.main(size) > (0.7 if IS_QUICK else 0)


def test_sentiment_of_files(tmp_path):
    for split, count in (("train", 20), ("test", 8)):
        rows = keras_sentiment.made_up_reviews(count, 30, seed=0)
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        0 <= keras_sentiment.main(["--data", str(tmp_path), "--words", "30", "--examples", "16", "--epochs", "1"]) <= 1
    )


def test_sentiment_of_files_that_are_not_there_or_empty(tmp_path):
    with pytest.raises(SystemExit, match=r"holds neither train\.jsonl nor train\.jsonl\.gz"):
        keras_sentiment.main(["--data", str(tmp_path)])
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(SystemExit, match=r"train\.jsonl is empty"):
        keras_sentiment.main(["--data", str(tmp_path)])


def test_pairs():
    keras.utils.set_random_seed(1)
    assert keras_pairs.main(["--epochs", "15" if IS_QUICK else "1"]) > (0.9 if IS_QUICK else 0)


def test_one_line_is_changed(monkeypatch):
    monkeypatch.setattr(keras_replace_attention, "LENGTH", 100)
    accuracies = keras_replace_attention.main(["--examples", "512", "--epochs", "6"])
    assert min(accuracies.values()) > 0.8
