"""The examples that need no Keras; those that do run on each backend."""

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_tfidf_baseline_writes_its_test_accuracy(tmp_path):
    """One of four test texts contradicts the training texts, so that the accuracy is known."""
    training = [("good film", 1), ("bad film", 0), ("a good story", 1), ("a bad story", 0)]
    held_out = [("good plot", 1), ("bad plot", 0), ("a good ending", 1), ("a good end", 0)]
    for split, rows in (("train", training), ("test", held_out)):
        with gzip.open(tmp_path / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
    output = tmp_path / "baselines.csv"
    command = [sys.executable, str(EXAMPLES / "tfidf_baseline.py"), str(tmp_path), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "accuracy 75.00%" in done.stdout
    with output.open(newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert (row["data"], row["metric"], row["measured"]) == (tmp_path.name, "accuracy", "75.00%")
