"""The simplest baseline for text classification: TF-IDF of words and word pairs, and a linear SVM.

    python examples/tfidf_baseline.py imdb movie-reviews --output results/baselines.csv

Each directory holds train.jsonl.gz and test.jsonl.gz with the columns `text` and `label`. Needs scikit-learn.
"""

import argparse
import csv
import gzip
import json
from pathlib import Path

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC


def read_split(path: Path) -> tuple[list[str], list[str | int]]:
    """Texts and labels of a file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [row["text"] for row in rows], [row["label"] for row in rows]


def accuracy_of_baseline(directory: Path) -> float:
    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LinearSVC())
    model.fit(*read_split(directory / "train.jsonl.gz"))
    return model.score(*read_split(directory / "test.jsonl.gz"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIRECTORY")
    parser.add_argument("--output", type=Path, default=Path("baselines.csv"))
    arguments = parser.parse_args()
    rows = []
    for directory in arguments.directories:
        accuracy = f"{accuracy_of_baseline(directory):.2%}"
        rows.append([directory.name, "TF-IDF (1–2-grams, sublinear) + LinearSVC", "accuracy", accuracy])
        print(f"{directory.name}: accuracy {accuracy}")
    with arguments.output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([["data", "baseline", "metric", "measured"], *rows])


if __name__ == "__main__":
    main()
