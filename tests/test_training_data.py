"""Reading and tokenizing: formats, splits, columns, labels, tokenizers, truncation, very long lines."""

import codecs
import csv
import gzip
import json
import math
import re

import pytest
from training_zoo import (
    NUMBERS,
    QUIET,
    ROWS,
    classification_rows,
    command,
    linformer,
    pair_rows,
    read_json,
    read_lines,
    refused,
    rows_of,
    running_lines,
    sentence_pairs,
    train_here,
    write_jsonl,
    write_lines,
    write_parquet,
    yaml_for,
)
from transformers import AutoTokenizer

from linformer_kit.training.config import load_config
from linformer_kit.training.data import read_sources, read_splits
from linformer_kit.training.encoding import classified_texts, text_batches, tokenize_with_end
from linformer_kit.training.prepare import prepare
from linformer_kit.training.sources import find_sources
from linformer_kit.training.tokenizer import SPECIAL

pytestmark = pytest.mark.usefixtures("restore_global_state")


# formats


def write_table(path, rows, separator=",", header=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        quoting = {"quoting": csv.QUOTE_NONE, "quotechar": None} if separator == "\t" else {}
        writer = csv.writer(file, delimiter=separator, lineterminator="\n", **quoting)
        writer.writerows([["label", "text"]] * header + [[row["label"], row["text"]] for row in rows])
    return path


def write_list(path, rows):
    path.write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")
    return path


FORMATS = {
    "jsonl": lambda folder: write_jsonl(folder / "rows.jsonl", ROWS),
    "ndjson": lambda folder: write_jsonl(folder / "rows.ndjson", ROWS),
    "json": lambda folder: write_list(folder / "rows.json", ROWS),
    "csv": lambda folder: write_table(folder / "rows.csv", ROWS),
    "tsv": lambda folder: write_table(folder / "rows.tsv", ROWS, "\t"),
    "parquet": lambda folder: write_parquet(folder / "rows.parquet", ROWS),
}


def all_rows(splits):
    return sorted((row["text"], row["label"]) for rows in splits.values() for row in rows)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path, kind, packed):
    path = FORMATS[kind](tmp_path)
    if packed:
        plain, path = path, tmp_path / f"rows.{kind}.gz"
        path.write_bytes(gzip.compress(plain.read_bytes()))
    if packed and kind == "parquet":
        assert "rows.parquet.gz: Parquet files cannot be read from gzip" in refused(
            "prepare", yaml_for("classification", tmp_path, **{"data.path": path})
        )
        return
    splits = read_splits(
        load_config(yaml_for("classification", tmp_path, **{"data.path": path, "data.validation_share": 0.2}))
    )
    assert {role: len(rows) for role, rows in splits.items()} == {"train": 30, "validation": 7}
    assert all_rows(splits) == sorted((row["text"], row["label"]) for row in ROWS)


@pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("tsv", "\t")])
def test_tables_without_a_header(tmp_path, ending, separator):
    path = write_table(tmp_path / f"rows.{ending}", ROWS, separator, header=False)
    settings = {"data.path": path, "data.validation_share": 0.2}
    splits = read_splits(
        load_config(yaml_for("classification", tmp_path, **settings, **{"data.header": ["label", "text"]}))
    )
    assert all_rows(splits) == sorted((row["text"], row["label"]) for row in ROWS)
    said = refused("prepare", yaml_for("classification", tmp_path, **settings))
    assert said.startswith("data.columns.text is 'text', but the train split has the columns pos, ")
    assert said.endswith("; files without a header need data.header")


def test_a_column_may_turn_from_numbers_into_words_late(tmp_path):
    rows = [{"text": f"{number}", "label": f"{number % 2:02}"} for number in range(12_000)] + [
        {"text": "end", "label": "x"}
    ]
    splits = read_splits(
        load_config(yaml_for("classification", tmp_path, **{"data.path": write_table(tmp_path / "rows.csv", rows)}))
    )
    assert all_rows(splits) == sorted((row["text"], row["label"]) for row in rows)


def test_a_format_may_be_named(tmp_path):
    path = write_table(tmp_path / "rows.data", ROWS)
    settings = {"data.path": path, "data.validation_share": 0.2}
    said = refused("prepare", yaml_for("classification", tmp_path, **settings))
    assert said.startswith(f"{path}: unknown file extension; allowed: .txt, .csv, .tsv, .jsonl")
    splits = read_splits(load_config(yaml_for("classification", tmp_path, **settings, **{"data.format": "csv"})))
    assert all_rows(splits) == sorted((row["text"], row["label"]) for row in ROWS)


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "validation.jsonl", "test.jsonl"),
        ("training.jsonl", "dev.jsonl", "test.jsonl"),
        ("train-00000-of-00001.jsonl", "valid-0.jsonl", "test-0.jsonl"),
        ("train/a.jsonl", "val/b.jsonl", "test/c.jsonl"),
    ],
    ids=lambda names: names[0],
)
def test_a_directory_of_splits_is_read(tmp_path, names):
    parts = {"train": ROWS[:20], "validation": ROWS[20:25], "test": ROWS[25:]}
    for name, rows in zip(names, parts.values(), strict=True):
        write_jsonl(tmp_path / "data" / name, rows)
    (tmp_path / "data" / "README.md").write_text("about")
    splits = read_splits(load_config(yaml_for("classification", tmp_path, **{"data.path": tmp_path / "data"})))
    assert {role: list(rows) for role, rows in splits.items()} == parts


@pytest.mark.parametrize("split", [None, "train"])
def test_a_directory_of_classes_is_read(tmp_path, split):
    """As in the movie reviews: one file is one text, with its lines."""
    texts = {
        "pos": [f"good\n\nfilm {number}" for number in range(6)],
        "neg": [f"bad film {number}\n" for number in range(4)],
    }
    for label, found in texts.items():
        for number, text in enumerate(found):
            write_lines(tmp_path / "data" / (split or ".") / label / f"{number}.txt", [])
            (tmp_path / "data" / (split or ".") / label / f"{number}.txt").write_text(text)
    if split:
        write_lines(tmp_path / "data" / "test" / "neg" / "0.txt", ["bad"])
        write_lines(tmp_path / "data" / "test" / "pos" / "0.txt", ["good"])
    splits = read_splits(
        load_config(
            yaml_for("classification", tmp_path, **{"data.path": tmp_path / "data", "data.validation_share": 0.3})
        )
    )
    wanted = [(text, label) for label, found in texts.items() for text in found] + [
        ("bad\n", "neg"),
        ("good\n", "pos"),
    ] * bool(split)
    assert all_rows(splits) == sorted(wanted)
    assert ("test" in splits) == bool(split)
    command("prepare", tmp_path / "classification.yaml", "data.validation_share=0.3")


def test_a_split_may_contain_one_class_only(tmp_path):
    for split, labels in (("train", ("pos", "neg")), ("test", ("neg",))):
        for number in range(20):
            write_lines(tmp_path / "data" / split / labels[number % len(labels)] / f"{number}.txt", [f"film {number}"])
    config = load_config(
        yaml_for("classification", tmp_path, **{"data.path": tmp_path / "data", "data.validation_share": 0.2})
    )
    assert set(read_splits(config)["test"]["label"]) == {"neg"}


@pytest.mark.parametrize("answers", ["no column", -1, "-1", "", None])
def test_a_test_split_without_labels_is_skipped(tmp_path, answers):
    write_jsonl(
        tmp_path / "data" / "train.jsonl", [{"text": row["text"], "label": int(row["label"] == "pos")} for row in ROWS]
    )
    secret = [{"text": row["text"]} | ({} if answers == "no column" else {"label": answers}) for row in ROWS]
    write_jsonl(tmp_path / "data" / "test.jsonl", secret)
    path = yaml_for("classification", tmp_path, **{"data.path": tmp_path / "data", "data.validation_share": 0.2})
    assert "The test split has no labels and is skipped." in command("prepare", path).stdout
    assert set(prepare(load_config(path), QUIET).splits) == {"train", "validation"}


@pytest.mark.parametrize(
    "names", [("Train.jsonl", "Test.jsonl"), ("imdb_train.jsonl", "imdb_test.jsonl"), ("TRAIN/a.jsonl", "Test/b.jsonl")]
)
def test_files_are_named_after_their_split_in_many_ways(tmp_path, names):
    for name, rows in zip(names, (ROWS[:30], ROWS[30:]), strict=True):
        write_jsonl(tmp_path / "data" / name, rows)
    path = yaml_for("classification", tmp_path, **{"data.path": tmp_path / "data", "data.validation_share": 0.2})
    splits = read_splits(load_config(path))
    assert {role: len(rows) for role, rows in splits.items()} == {"train": 24, "validation": 6, "test": 7}
    files = [name.split("/")[-1] for name in names]
    assert f"Reading the data … train: {files[0]}, test: {files[1]}\n" in command("prepare", path).stdout


def test_a_byte_order_mark_is_not_text(tmp_path):
    for name in ("text.txt", "rows.csv", "rows.jsonl"):
        content = {"txt": b"one\ntwo\n", "csv": b"text,label\none,a\n", "jsonl": b'{"text": "one"}\n'}[
            name.split(".")[1]
        ]
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + content)
        config = load_config(yaml_for("causal-lm", tmp_path, **{"data.path": tmp_path / name}))
        rows = read_sources(find_sources(config.data, config.task)["train"], config.data, "file")
        assert rows["text"][0] == "one"


def test_a_column_name_may_contain_a_dot(tmp_path):
    rows = [{"review.text": row["text"], "the.label": row["label"]} for row in ROWS]
    columns = {"text": "review.text", "label": "the.label"}
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    prepared = prepare(
        load_config(yaml_for("classification", tmp_path, **{"data.path": path, "data.columns": columns})), QUIET
    )
    assert prepared.labels == ["neg", "pos"]


def test_dates_in_json_stay_text(tmp_path):
    rows = [{"text": f"2024-01-{1 + number % 28:02}", "label": f"2023-0{1 + number % 2}-01"} for number in range(60)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    prepared = prepare(load_config(yaml_for("classification", tmp_path, **{"data.path": path})), QUIET)
    assert prepared.labels == ["2023-01-01", "2023-02-01"]
    assert "2024-01-07" in prepared.tokenizer.get_vocab()


def test_empty_texts_are_reported_and_labels_are_shown(tmp_path):
    rows = [*ROWS, {"text": "", "label": "pos"}]
    write_jsonl(tmp_path / "data" / "train.jsonl", rows)
    write_jsonl(tmp_path / "data" / "validation.jsonl", ROWS[:9])
    printed = command("prepare", yaml_for("classification", tmp_path, **{"data.path": tmp_path / "data"})).stdout
    assert "\n1 of the texts are empty.\n" in printed
    assert "\nLabels: neg, pos\n" in printed


def test_words_written_like_special_tokens_do_not_disturb_the_vocabulary(tmp_path):
    lines = [f"{line} <unk> </s> <pad> <mask> <s> </S>" for line in running_lines(60)]
    for lowercase in (False, True):
        settings = {"tokenizer": {"kind": "words", "min_frequency": 1, "lowercase": lowercase}}
        path = yaml_for("masked-lm", tmp_path, **settings, **{"data.path": write_lines(tmp_path / "text.txt", lines)})
        tokenizer = prepare(load_config(path), QUIET).tokenizer
        assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL] == list(range(len(SPECIAL)))
        assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    train_here(path, "training.steps=1", "training.evaluate_every=null")


def test_a_stream_of_short_texts_loses_nothing(tmp_path):
    lines = [f"a{number % 7} b{number % 5}" for number in range(2500)]
    wish = {
        "data.streaming": True,
        "data.streaming_validation": 100,
        "data.shuffle_buffer": 1,
        "model.max_position_embeddings": 4096,
    }
    path = yaml_for("causal-lm", tmp_path, **wish, **{"data.path": write_lines(tmp_path / "text.txt", lines)})
    prepared = prepare(load_config(path), QUIET)
    ids = [token for row in prepared.splits["train"] for token in row["input_ids"]]
    assert prepared.tokenizer.decode(ids) == " ".join(f"{line} </s>" for line in lines[100:])


def test_paths_are_not_glob_patterns(tmp_path):
    folder = tmp_path / "data [v2] *"
    write_jsonl(folder / "train.jsonl", ROWS)
    settings = {"data.path": folder, "data.cache": tmp_path / "cache [1]", "data.validation_share": 0.2}
    prepared = prepare(load_config(yaml_for("classification", tmp_path, **settings)), QUIET)
    assert sum(map(len, prepared.splits.values())) == len(ROWS)


def test_incomplete_pairs_are_not_trained_on(tmp_path):
    """A short row of a table has an empty translation; in a test split it counts all the same."""
    whole = ["\t".join(pair) for pair in sentence_pairs(40)]
    write_lines(
        tmp_path / "data" / "train.tsv", ["source\ttarget", *whole, "nobody finds", "\tniemand findet", " \tleer"]
    )
    write_lines(tmp_path / "data" / "validation.tsv", ["source\ttarget", *whole[:9], "nobody finds"])
    path = yaml_for("translation", tmp_path, **{"data.path": tmp_path / "data"})
    assert "3 pairs with an empty text are skipped." in command("prepare", path).stdout
    prepared = prepare(load_config(path), QUIET)
    assert {role: len(rows) for role, rows in prepared.splits.items()} == {"train": 40, "validation": 10}
    assert prepared.splits["validation"]["target"][-1] == ""


def test_a_dot_selects_a_nested_column(tmp_path):
    pairs = sentence_pairs(40)
    path = write_jsonl(
        tmp_path / "rows.jsonl", [{"translation": {"en": source, "de": target}} for source, target in pairs]
    )
    columns = {"data.path": path, "data.columns": {"source": "translation.en", "target": "translation.de"}}
    prepared = prepare(load_config(yaml_for("translation", tmp_path, **columns)), QUIET)
    held_out = prepared.splits["validation"]
    assert set(zip(held_out["source"], held_out["target"], strict=True)) < set(pairs)
    said = refused("prepare", yaml_for("translation", tmp_path, **columns), "data.columns.target=translation.fr")
    assert said == "some rows have no column 'translation.fr': there, 'translation' has the keys en, de"
    said = refused("prepare", yaml_for("translation", tmp_path, **columns), "data.columns.target=translation")
    assert said == "the column 'translation' contains dicts, not texts; did you mean 'translation.en'?"


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    ("sample", "wanted"), [("line", ["a b", "c", "", "d", "e f"]), ("paragraph", ["a b\nc", "d\ne f\n"])]
)
def test_an_example_is_a_line_a_paragraph_or_a_document(tmp_path, packed, sample, wanted):
    path = tmp_path / ("text.txt.gz" if packed else "text.txt")
    path.write_bytes((gzip.compress if packed else bytes)(b"a b\nc\n\nd\ne f\n"))
    settings = {"data.path": path, "data.sample": sample, "data.validation_share": 0.5}
    splits = read_splits(load_config(yaml_for("causal-lm", tmp_path, **settings)))
    assert [*splits["train"]["text"], *splits["validation"]["text"]] == wanted


# what is read of it


def test_max_examples_are_the_first_of_a_text_and_drawn_from_rows(tmp_path, quick):
    config = load_config(quick("causal-lm", tmp_path, **{"data.max_examples": 30}))
    splits = read_splits(config)
    assert splits["train"]["text"] == running_lines(400, seed=0)[:30]
    assert len(splits["validation"]) == 45
    drawn = read_splits(load_config(quick("classification", tmp_path, **{"data.max_examples": 30})))["train"]["text"]
    texts = [row["text"] for row in classification_rows(400)]
    assert len(drawn) == 30
    assert set(drawn) <= set(texts)
    assert drawn != texts[:30]


def test_labels_are_ordered_as_numbers_where_they_are(tmp_path):
    rows = write_jsonl(
        tmp_path / "rows.jsonl", [{"text": "a", "label": label} for label in ["10", "9", "-1", "²", "--5", "b"] * 9]
    )
    prepared = prepare(load_config(yaml_for("classification", tmp_path, **{"data.path": rows})), QUIET)
    assert prepared.labels == ["-1", "9", "10", "--5", "b", "²"]


# tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "bytes", "words"])
def test_tokenizers_are_trained(tmp_path, quick, kind):
    settings = {"kind": kind, "vocab_size": 300, "min_frequency": 1, "lowercase": True}
    command("train", quick("classification", tmp_path, **{"tokenizer": settings, "model.max_position_embeddings": 128}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    ids = tokenizer("a Lovely road", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "a lovely road"
    # of 18 + 6 words and 5 special tokens, or the bytes and them
    assert len(tokenizer) == {"bpe": 300, "bytes": 261, "words": 29}[kind]
    assert len(ids) in {"bpe": range(4, 13), "bytes": [13], "words": [3]}[kind]
    config = read_json(tmp_path / "run" / "model" / "config.json")
    assert config["vocab_size"] == len(tokenizer)


@pytest.mark.slow
def test_a_tokenizer_can_be_loaded_from_a_directory(tmp_path, quick, trained_run):
    other = trained_run("translation")
    command("train", quick("classification", tmp_path, **{"tokenizer": {"from": str(other.run / "tokenizer")}}))
    used = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert used.get_vocab() == other.load()[1].get_vocab()
    assert used("a lovely road", add_special_tokens=False)["input_ids"] == [used.unk_token_id] * 3


@pytest.mark.slow
def test_truncation_is_counted_and_reported(tmp_path):
    path = yaml_for(
        "classification",
        tmp_path,
        **{"model.max_position_embeddings": 10, "training.steps": 2, "training.evaluate_every": None},
    )
    counts = {}
    for split in ("train", "validation", "test"):
        lengths = [
            len(row["text"].split()) + 2 for row in read_lines(tmp_path / "classification data" / f"{split}.jsonl")
        ]
        over = [length - 10 for length in lengths if length > 10]
        counts[split] = (len(over), sum(over))
        assert 0 < len(over) < len(lengths)
    printed = command("prepare", path).stdout
    for split, (texts, _) in counts.items():
        assert re.search(rf"│ {split} .*│\s+{texts} │", printed)
    table = rows_of(command("train", path).stdout)
    for split, (texts, tokens) in counts.items():
        assert table[f"{split} examples"].endswith(f"{texts} texts truncated by {tokens:,} tokens")
    printed = command("evaluate", tmp_path / "run").stdout
    assert rows_of(printed)["truncated texts"] == str(counts["test"][0])
    assert read_json(tmp_path / "run" / "evaluation.json")["cut_texts"] == counts["test"][0]


@pytest.mark.slow
def test_tokenizing_in_small_batches_gives_the_same_tokens(trained_run, monkeypatch):
    tokenizer = trained_run("pairs").load()[1]
    first, second = ([row[name] for row in pair_rows(50)] for name in ("premise", "hypothesis"))
    for pairs in (None, second):
        whole = classified_texts(tokenizer, first, pairs, 12)
        monkeypatch.setattr(text_batches, "__defaults__", (30,))
        assert len(list(text_batches(first))) > 30
        assert classified_texts(tokenizer, first, pairs, 12) == whole
        end = [tokenizer.eos_token_id]
        cut = [tokenizer(text, add_special_tokens=False)["input_ids"][:6] + end for text in first]
        assert tokenize_with_end(tokenizer, first, 7) == (cut, [len(text.split()) + 1 for text in first])
        monkeypatch.undo()
    assert tokenize_with_end(tokenizer, [], 7) == ([], [])


# a line of three million characters


@pytest.mark.slow
def test_a_long_line_is_classified(tmp_path):
    long = "lovely " + "abcdefghij" * 300_000
    write_jsonl(tmp_path / "data" / "train.jsonl", [*classification_rows(60), {"text": long, "label": "pos"}])
    write_jsonl(tmp_path / "data" / "validation.jsonl", classification_rows(20, seed=1))
    settings = {"data.path": tmp_path / "data", "tokenizer": {"kind": "bpe", "vocab_size": 400}, "training.steps": 2}
    path = yaml_for("classification", tmp_path, **settings, **{"training.evaluate_every": None})
    printed = linformer("train", path, cwd=tmp_path).stdout
    lost = int(re.search(r"train examples\s+61, .* texts truncated by ([\d,]+) tokens", printed)[1].replace(",", ""))
    assert lost > 30_000  # tokens of up to a hundred letters
    # half of it are libraries; the text takes 3 MB
    assert read_json(tmp_path / "run" / "result.json")["peak_mib"] < 1600


@pytest.mark.slow
def test_a_language_model_trains_on_a_long_line(tmp_path):
    words = NUMBERS[0] * 62_000
    write_lines(tmp_path / "data" / "train.txt", [*running_lines(20), long := " ".join(words)])
    write_lines(tmp_path / "data" / "validation.txt", running_lines(20, seed=1))
    assert len(long) > 3_000_000
    settings = {"data.path": tmp_path / "data", "training.steps": 2, "training.evaluate_every": None}
    prepared = prepare(load_config(yaml_for("causal-lm", tmp_path, **settings)), QUIET)
    counts = prepared.summary["splits"]["train"]
    assert counts["length"]["longest"] == len(words) + 1
    assert counts["examples"] == math.ceil(counts["length"]["tokens"] / 24)
    train_here(tmp_path / "causal-lm.yaml")
