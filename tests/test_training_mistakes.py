"""Mistakes in data, settings, directories, models or inputs end a command with one line that names them."""

import gzip
import json
import re
import shutil

import pytest
from training_zoo import (
    QUIET,
    ROWS,
    classification_rows,
    error_message,
    linformer,
    read_json,
    refused,
    running_lines,
    train_here,
    write_jsonl,
    write_lines,
    write_parquet,
    yaml_for,
)

from linformer_kit import __version__
from linformer_kit.training.checkpoint import checkpoints_in
from linformer_kit.training.config import load_config
from linformer_kit.training.data import read_splits
from linformer_kit.training.prepare import prepare

pytestmark = pytest.mark.usefixtures("restore_global_state")


# data


def bad_file(tmp_path, name, content, task="classification", **overrides):
    """The error of `linformer train` for a file; it leaves nothing that looks like a model."""
    (tmp_path / name).write_bytes(content)
    said = refused(
        "train", yaml_for(task, tmp_path, **{"data.path": tmp_path / name, "training.steps": 2, **overrides})
    )
    assert not (tmp_path / "run" / "model").exists()
    assert not checkpoints_in(tmp_path / "run" / "checkpoints")
    assert not list((tmp_path / "cache" / "prepared").glob("*"))
    return said.replace(f"{tmp_path}/", "")


JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
NOT_UTF8 = "the byte 0xf6 is not utf-8; set data.encoding"
BAD_FILES = {
    "empty.jsonl": (b"", "empty.jsonl is empty"),
    "empty.jsonl.gz": (gzip.compress(b""), "empty.jsonl.gz is empty"),
    "nothing.jsonl.gz": (b"", "nothing.jsonl.gz is empty"),
    "plain.jsonl.gz": (JSONL.encode(), "plain.jsonl.gz is not a complete gzip file: Not a gzipped file"),
    "cut.jsonl.gz": (
        gzip.compress(JSONL.encode())[:-200],
        "cut.jsonl.gz cannot be read to the end: Compressed file ended",
    ),
    "latin.jsonl": (JSONL.replace(", 東京", "").encode("latin-1"), f"latin.jsonl, line 36: {NOT_UTF8}"),
    "latin.csv": ("text,label\na,b\nc,d\nschön,b\n".encode("latin-1"), f"latin.csv, line 4: {NOT_UTF8}"),
    "broken.jsonl": (
        f'{JSONL}{{"text": "a", "label":\n{JSONL}'.encode(),
        f"broken.jsonl, line {len(ROWS) + 1}: not JSON (",
    ),
    "list.json": (b'[{"text": "a", "label": "b"}, {"text"', "list.json cannot be read as jsonl: "),
    "ragged.tsv": (
        b"text\tlabel\na\tb\nc\td\te\n",
        "ragged.tsv cannot be read as tsv: Error tokenizing data. C error: Expected 2 fields",
    ),
    "one.jsonl": (
        JSONL.replace('"neg"', '"pos"').encode(),
        "the training split has only one label, 'pos', in the column 'label'",
    ),
    "null.jsonl": (
        f'{JSONL}{{"text": null, "label": "pos"}}\n'.encode(),
        "the column 'text' has rows without a value; remove or fill them",
    ),
    "heading.csv": (b"text,label\n", "heading.csv has no rows"),
    "few.jsonl": (
        "".join(JSONL.splitlines(True)[:2]).encode(),
        "data.validation_share is 0.05: of 2 rows, 2 are for training and 0 for validation",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name):
    content, said = BAD_FILES[name]
    assert said in bad_file(tmp_path, name, content)


def test_a_damaged_parquet_file_is_rejected(tmp_path):
    whole = write_parquet(tmp_path / "whole.parquet", ROWS).read_bytes()
    assert "cut.parquet cannot be read as parquet: Parquet magic bytes not found in footer" in bad_file(
        tmp_path, "cut.parquet", whole[:-40]
    )


def test_an_encoding_may_be_named(tmp_path):
    lines = [*running_lines(40), "fünf schöne Grüße", *running_lines(3)]
    text = "".join(f"{line}\n" for line in lines).encode("latin-1")
    number = next(number for number, line in enumerate(text.split(b"\n"), start=1) if b"\xfc" in line)
    assert bad_file(tmp_path, "latin.txt", text, "masked-lm") == (
        f"latin.txt, line {number}: the byte 0xfc is not utf-8; set data.encoding (latin-1, cp1252, …) for text, "
        "CSV and TSV files, or convert the file with iconv"
    )
    config = load_config(
        yaml_for("masked-lm", tmp_path, **{"data.path": tmp_path / "latin.txt", "data.encoding": "latin-1"})
    )
    assert "fünf schöne Grüße" in [text for rows in read_splits(config).values() for text in rows["text"]]
    assert prepare(config, QUIET).tokenizer.tokenize("Grüße") == ["Grüße"]
    assert refused("prepare", tmp_path / "masked-lm.yaml", "data.encoding=klingon") == (
        "data.encoding is 'klingon', which Python does not know; common ones: utf-8, latin-1, cp1252"
    )


@pytest.mark.parametrize("where", ["held out", "in what the tokenizer learns from", "in training"])
def test_a_stream_that_cannot_be_read_to_the_end_is_reported(tmp_path, where, monkeypatch):
    """The error occurs when the bad line is reached."""
    monkeypatch.setattr("linformer_kit.training.prepare.TOKENIZER_EXAMPLES", 3000 if where == "in training" else 10**9)
    lines = [f"{line}\n".encode() for line in running_lines(30_000 if where == "in training" else 3000)]
    lines[5 if where == "held out" else -5] = "schön\n".encode("latin-1")
    (tmp_path / "corpus.txt").write_bytes(b"".join(lines))
    wish = {"data.path": tmp_path / "corpus.txt", "data.streaming": True, "data.streaming_validation": 20}
    path = yaml_for("causal-lm", tmp_path, **wish, **{"data.shuffle_buffer": 40_000, "training.steps": 2})
    said = (
        refused("train", path)
        if where != "in training"
        else last_line(linformer("train", path, cwd=tmp_path, check=False))
    )
    assert "the stream contains the byte 0xf6, which is not utf-8; set data.encoding" in said


def last_line(result):
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def test_empty_text_is_rejected(tmp_path):
    assert bad_file(tmp_path, "blank.txt", b" \n\n\t\n" * 30, "causal-lm") == "the train split contains no text"


def test_missing_columns_and_labels_are_reported(tmp_path):
    rows = write_jsonl(tmp_path / "data" / "train.jsonl", ROWS)
    path = yaml_for("classification", tmp_path, **{"data.path": tmp_path / "data", "data.validation_share": 0.2})
    assert refused("prepare", path, "data.columns.text=txet") == (
        "data.columns.text is 'txet', but the train split has the columns text, label; did you mean 'text'?"
    )
    assert "data.columns.label is 'stars', but the train split" in refused("prepare", path, "data.columns.label=stars")
    assert "data.validation is 'vaildation', but" in refused("prepare", path, "data.validation=vaildation")
    write_jsonl(tmp_path / "data" / "test.jsonl", [*ROWS[:3], {"text": "so so", "label": "meh"}])
    said = "the test split has the label 'meh', which the training split does not have; known labels: neg, pos"
    assert refused("prepare", path) == said
    # in another process: this one has threads, and forked workers could deadlock
    assert error_message(linformer("prepare", path, "data.workers=2", cwd=tmp_path, check=False).stderr) == said
    many = [{"text": "a", "label": f"{number}"} for number in range(2000)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in many))
    said = "the column 'label' has 1,600 different values; is it the label? Set data.columns.label"
    assert refused("prepare", path) == said


def test_a_stream_that_is_too_short_is_refused(tmp_path):
    text = write_lines(tmp_path / "text.txt", running_lines(30))
    path = yaml_for("masked-lm", tmp_path, **{"data.path": text, "data.streaming": True})
    said = refused("train", path)
    assert "the stream ends before the first training example" in said
    assert "data.streaming_validation, now 1000" in said
    assert "data.streaming requires training.steps" in refused("train", path, "training.steps=")


@pytest.mark.slow
def test_errors_of_a_real_process(tmp_path):
    """One line on standard error without a traceback, also without access to the Hub."""
    path = yaml_for("classification", tmp_path)
    hub = "there is no such file or directory, and reading it from the Hugging Face Hub failed .+; for local files, .+"
    tokenizer = r"not a directory with a tokenizer and could not be loaded from the Hub \(.+\)"
    for override, said in {
        f"data.path={tmp_path}/missing": f"data.path is '{tmp_path}/missing': there is no such file or directory",
        "data.path=some/reviews": f"data.path is 'some/reviews': {hub}",
        "tokenizer.from=nonsense": f"tokenizer.from is 'nonsense', which is {tokenizer}",
    }.items():
        result = linformer("train", path, override, cwd=tmp_path, check=False)
        assert result.returncode == 2
        assert re.fullmatch(rf"Error: {said}\n", result.stderr)
        assert not (tmp_path / "run" / "model").exists()


# settings


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.epochs", "'training.epochs' is not an override; write key=value, such as training.epochs=2"),
        (
            "training.epocs=3",
            "there is no key training.epocs; did you mean 'epochs'? allowed: epochs, steps, batch_size,",
        ),
        (
            "trainning.epochs=3",
            "there is no key trainning; did you mean 'training'? allowed: task, run, seed, model, data,",
        ),
        (
            "model.hidden_siez=8",
            "there is no key model.hidden_siez; did you mean 'hidden_size'? allowed: from, attention,",
        ),
        (
            "data.columns.txt=a",
            "there is no key data.columns.txt; did you mean 'text'? allowed: text, pair, label, source",
        ),
        ("training.batch_size=many", "training.batch_size is the string 'many'; allowed: an integer"),
        ("training.steps=1.5", "training.steps is the number 1.5; allowed: an integer"),
        ("training.steps=.inf", "training.steps is the number inf; allowed: an integer"),
        ("training.steps=.nan", "training.steps is the number nan; allowed: an integer"),
        ("model.hidden_size=8.5", "model.hidden_size is the number 8.5; allowed: an integer"),
        ("model.vocab_size=8", "model.vocab_size is derived from the tokenizer and cannot be set; remove it"),
        ("model.from=nowhere", "model.from loads a saved model, which determines model."),
        ("tokenizer.kind=byte", "tokenizer.kind is the string 'byte'; allowed: bpe, bytes, words; did you mean"),
        (
            "training.precision=float16",
            "training.precision is float16, which needs a GPU; allowed on CPUs: float32, bfloat16, auto",
        ),
        (
            "training.batch_size=1000",
            "training.batch_size is 1000, but there are only 400 training examples; use a smaller batch size",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(tmp_path, quick, override, said):
    assert refused("train", quick("classification", tmp_path), override).startswith(said)
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("task: [classification\n", "is not YAML: while parsing a flow sequence"),
        ("task: classification\ntask: masked-lm\n", "the key 'task' occurs twice"),
        ("task: classification\ndata: {path: x, path: y}\n", "the key 'path' occurs twice"),
        (
            "classification\n",
            "must contain a mapping, such as `task: classification`; it contains the string 'classification'",
        ),
        ("", "it contains null"),
        ("data: {path: x.csv}\n", "the key task is missing; allowed: classification, masked-lm"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_rejected(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert said in refused("train", path)


def test_an_unknown_configuration_is_rejected():
    said = "there is no file and no shipped configuration 'imbd'; did you mean 'imdb'?"
    assert refused("train", "imbd") == refused("prepare", "imbd") == said
    assert "shipped configurations: bookcorpus_denoising, " in refused("train", "zzzzzz")


# runs and their directories


def test_a_corrected_command_may_use_the_same_directory(tmp_path, quick):
    """An attempt that fails before its first checkpoint does not restrict the next one."""
    path = quick("classification", tmp_path)
    assert "training.batch_size is 1000, but there are only 400 training examples" in refused(
        "train", path, "training.batch_size=1000"
    )
    assert "there is no such file or directory" in refused("train", path, f"data.path={tmp_path / 'nothing.jsonl'}")
    assert "model: hidden_size=32 is not divisible by num_attention_heads=5" in refused(
        "train", path, "model.num_attention_heads=5"
    )
    assert "the run in" in refused("predict", tmp_path / "run", "text")
    _, result, _ = train_here(path)
    assert result["steps"] == 4
    assert load_config(tmp_path / "run" / "config.yaml").training.batch_size == 16


@pytest.mark.parametrize("clip", [0, 1])
def test_a_non_finite_loss_ends_the_run(tmp_path, quick, clip):
    path = quick(
        "classification", tmp_path, **{"training.clip": clip, "training.warmup": 0, "training.learning_rate": 1e36}
    )
    said = refused("train", path, "training.log_every=1", "training.steps=20")
    assert re.match(
        r"the loss is (nan|inf) at step \d+; earlier checkpoints are kept. Train in another directory",
        said,
    )
    assert "smaller training.learning_rate" in said
    assert not (tmp_path / "run" / "model").exists()
    # also in the last step
    assert "the loss is " in refused("train", path, "training.steps=1", f"run={tmp_path / 'one'}")
    assert not (tmp_path / "one" / "model").exists()


@pytest.mark.parametrize("folder", ["file/run", "file", "/proc/x"])
def test_an_unwritable_directory_is_rejected(tmp_path, quick, folder):
    (tmp_path / "file").touch()
    run = tmp_path / folder  # /proc/x stays what it is
    said = refused("train", quick("classification", tmp_path), f"run={run}")
    reason = r"(\S+/file is a file, not a directory|cannot write to /proc \(.+\))"
    assert re.fullmatch(rf"{reason}; choose another directory with run=DIRECTORY", said)
    said = refused("prepare", quick("classification", tmp_path), f"data.cache={run}")
    assert re.fullmatch(rf"{reason}; set data.cache to another directory", said)


# models to start from


@pytest.mark.slow
def test_a_run_cannot_start_from_a_model_of_another_kind(tmp_path, quick, trained_run):
    for source, task, said in (
        (
            "masked-lm",
            "translation",
            "LinformerForMaskedLM, which has no weights for model.decoder.embeddings.norm.bias, ",
        ),
        (
            "masked-lm",
            "causal-lm",
            "LinformerForMaskedLM, which has no weights for model.layers.0.attention.projection.weight ",
        ),
        ("causal-lm", "masked-lm", "model: is_decoder=True, but a masked LM needs both sides of a mask"),
        ("translation", "classification", "model: the configuration is that of an encoder-decoder"),
    ):
        start = {"from": str(trained_run(source).run / "model")}
        assert said in refused("train", quick(task, tmp_path, **{"model": start, "tokenizer": None}))
        assert not (tmp_path / "run" / "model").exists()
    said = refused("train", quick("classification", tmp_path), f"model.from={tmp_path}")
    assert said.startswith("model.from loads a saved model, which determines model.hidden_size; remove that key")
    assert "Allowed with model.from: attention, attention_probs_dropout_prob, block_length" in said


@pytest.mark.slow
def test_invalid_models_and_tokenizers_are_rejected(tmp_path, quick, trained_run):
    (tmp_path / "empty").mkdir()
    for source in ("nowhere", str(tmp_path / "empty")):
        path = quick("classification", tmp_path, **{"model": {"from": source}, "tokenizer": None})
        assert (
            refused("train", path)
            == f"model.from is {source!r}, which has no config.json; set it to the directory model/ of a run, or to a "
            "saved model"
        )
    foreign = tmp_path / "foreign"
    shutil.copytree(trained_run("masked-lm").run / "model", foreign)
    config = read_json(foreign / "config.json")
    (foreign / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    path = quick("classification", tmp_path, **{"model": {"from": str(foreign)}, "tokenizer": None})
    assert f"model.from is '{foreign}', a model of type 'bert'" in refused("train", path)
    said = refused("train", quick("classification", tmp_path, **{"tokenizer": {"from": str(tmp_path / "empty")}}))
    assert said.startswith(
        f"tokenizer.from is '{tmp_path / 'empty'}', which is not a directory with a tokenizer and could not be loaded"
    )


# inputs of a run


@pytest.mark.slow
def test_other_data_is_checked_like_the_runs_own(trained_run, tmp_path):
    run = trained_run("classification").run
    rows = classification_rows(10)
    strange = write_jsonl(tmp_path / "strange.jsonl", [*rows, {"text": "so so", "label": "meh"}])
    assert (
        "the evaluation split has the label 'meh', which the training split does not have; known labels: neg, pos"
        in refused("evaluate", run, "--data", strange)
    )
    renamed = write_jsonl(tmp_path / "renamed.jsonl", [{"txt": row["text"], "label": row["label"]} for row in rows])
    said = refused("evaluate", run, "--data", renamed)
    assert said == "data.columns.text is 'text', but the given split has the columns txt, label; did you mean 'txt'?"


def test_runs_that_cannot_predict_are_rejected(tmp_path):
    assert refused("predict", tmp_path / "nowhere", "a") == (
        f"there is no directory {tmp_path / 'nowhere'}; pass a run directory, as printed by `linformer train`"
    )
    for name in ("predict", "evaluate"):
        assert refused(name, tmp_path) == f"{tmp_path} is not a run directory: it has no config.yaml"


@pytest.mark.slow
def test_unfinished_incompatible_and_damaged_runs_are_rejected(trained_run, tmp_path):
    trained = trained_run("classification")
    run = trained.copy(tmp_path / "unfinished")
    (run / "result.json").unlink()
    for name in ("predict", "evaluate"):
        said = refused(name, run, *(["text"] if name == "predict" else []))
        assert said == (
            f"the run in {run} is not finished; resume it with `linformer train {run / 'config.yaml'}`, or use a "
            f"checkpoint: {run / 'checkpoints' / 'checkpoint-60'}"
        )
    other = trained.copy(tmp_path / "other")
    environment = read_json(other / "environment.json")
    environment |= {"run_format": 99, "packages": {"linformer-kit": "9.9"}}
    (other / "environment.json").write_text(json.dumps(environment))
    for args in (("predict", other, "text"), ("evaluate", other), ("train", other / "config.yaml", f"run={other}")):
        said = refused(*args)
        assert said == (
            f"{other} was written by linformer-kit 9.9 in format 99; this is version {__version__}, "
            "which reads format 1. Install that version, or train again"
        )
    (other / "environment.json").write_text("{}")
    assert "environment.json is missing or damaged" in refused("predict", other, "text")
    damaged = trained.copy(tmp_path / "damaged")
    weights = damaged / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert re.match(rf"{damaged / 'model'} cannot be loaded: .+", refused("predict", damaged, "text"))


@pytest.mark.slow
def test_files_that_cannot_be_predicted_are_rejected(trained_run, tmp_path):
    run = trained_run("classification").run
    (tmp_path / "empty.txt").touch()
    assert refused("predict", run, tmp_path / "empty.txt") == f"{tmp_path / 'empty.txt'} is empty"
    (tmp_path / "latin.txt").write_bytes("schön\n".encode("latin-1"))
    assert "latin.txt: the byte 0xf6 is not utf-8; convert it with iconv" in refused(
        "predict", run, tmp_path / "latin.txt"
    )
    (tmp_path / "broken.gz").write_bytes(b"plain")
    assert "broken.gz is not a complete gzip file" in refused("predict", run, tmp_path / "broken.gz")
    other = write_jsonl(tmp_path / "other.jsonl", [{"txt": "a"}])
    assert refused("predict", run, other) == f"{other} has no column 'text'; it has txt"
    assert refused("predict", run, input="") == "standard input is empty; pass a text, a file or standard input"
    said = refused("predict", run, input="schön\n".encode("latin-1"))
    assert said == "standard input: the byte 0xf6 is not utf-8; convert it with iconv"
    assert refused("predict", run, "nowhere.txt").startswith(
        "there is no file 'nowhere.txt'; pass a text, a file or standard input"
    )
