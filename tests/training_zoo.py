"""Small datasets that a tiny model learns in seconds, the YAML of each task, and the command line.

conftest.py imports this file for all tests, so slow imports are inside the functions.
"""

import itertools
import json
import os
import random
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import fork_server
import pyarrow as pa
import torch
import yaml
from pyarrow import parquet
from rich.console import Console
from typer.testing import CliRunner

from linformer_kit.cli import app
from linformer_kit.training.config import load_config

QUIET = Console(quiet=True)

# `pairs` is classification with two texts
TASKS = ("classification", "pairs", "masked-lm", "causal-lm", "translation", "denoising")

FILLERS = [
    "a",
    "the",
    "of",
    "on",
    "by",
    "and",
    "to",
    "with",
    "from",
    "river",
    "stone",
    "cloud",
    "letter",
    "window",
    "garden",
    "winter",
    "copper",
    "road",
]
LIKED = ["good", "fine", "lovely"]
DISLIKED = ["bad", "poor", "awful"]
NUMBERS = (
    ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"],
    ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"],
    ["un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix"],
)
DICTIONARY = {
    "who": {"peter": "Peter", "mother": "Mutter", "nobody": "niemand", "everyone": "jeder", "who": "wer"},
    "does": {"sees": "sieht", "finds": "findet", "buys": "kauft", "paints": "malt", "loves": "liebt"},
    "color": {"red": "rote", "green": "grüne", "blue": "blaue", "white": "weiße", "black": "schwarze"},
    "what": {"houses": "Häuser", "flowers": "Blumen", "birds": "Vögel", "boats": "Boote", "letters": "Briefe"},
}

MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    "projected_length": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DECODER = {"block_length": 8, "slots": 4}
STEPS = {"classification": 60, "pairs": 150, "masked-lm": 150, "causal-lm": 60, "translation": 240, "denoising": 60}

# inputs, and the predictions of a trained model
QUESTIONS = {
    "classification": [("the river and a lovely road", "pos"), ("awful winter on the river by the road", "neg")],
    "pairs": [
        ("a good cloud on the road\tthe poor letter from winter", "neg"),
        ("bad stone to the road\ta fine garden", "pos"),
    ],
    "masked-lm": [
        (" ".join([*NUMBERS[0][:4], "<mask>", *(NUMBERS[0] * 3)[5:23]]), "five"),
        (" ".join(["<mask>", *(NUMBERS[1] * 3)[1:23]]), "eins"),
    ],
    "causal-lm": [
        ("one two three four", "five six seven eight nine ten"),
        ("dix neuf huit", "sept six cinq quatre trois deux"),
    ],
    "translation": [
        ("mother buys red birds", "Mutter Vögel rote kauft"),
        ("who sees white letters", "wer Briefe weiße sieht"),
    ],
    "denoising": [
        (" ".join([*NUMBERS[0][:6], "<mask>", *(NUMBERS[0] * 3)[8:23]]), " ".join((NUMBERS[0] * 3)[:23])),
        (" ".join([*NUMBERS[2][:3], "<mask>", *(NUMBERS[2] * 3)[6:23]]), " ".join((NUMBERS[2] * 3)[:23])),
    ],
}


# data


def classification_rows(count, seed=0):
    """Texts whose label depends on a single word at a random position."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        label = ("pos", "neg")[number % 2]
        words = rng.choices(FILLERS, k=rng.randint(4, 12))
        words.insert(rng.randrange(len(words) + 1), rng.choice(LIKED if label == "pos" else DISLIKED))
        rows.append({"text": " ".join(words), "label": label})
    return rows


def pair_rows(count, seed=0):
    """Pairs whose label depends on the second text only; the first one is random."""
    rng = random.Random(seed)
    premises = rng.sample(classification_rows(count, seed + 1000), count)
    return [
        {"premise": first["text"], "hypothesis": second["text"], "label": second["label"]}
        for first, second in zip(premises, classification_rows(count, seed), strict=True)
    ]


def running_lines(count, seed=0):
    """Counting in one of three languages, up or down: each word is predictable from the others.

    With its end token, a line fills a block of 24 tokens; only the last line is shorter.
    """
    rng, lines = random.Random(seed), []
    for number in range(count):
        words = rng.choice(NUMBERS)[:: rng.choice((1, -1))] * 3
        lines.append(" ".join(words[: 23 if number < count - 1 else 13]))
    return lines


def sentence_pairs(count, seed=0):
    """Distinct English and German sentences of four words, with different word orders."""
    choices = list(itertools.product(*(words.items() for words in DICTIONARY.values())))
    return [
        (" ".join(word for word, _ in sentence), " ".join(sentence[place][1] for place in (0, 3, 2, 1)))
        for sentence in random.Random(seed).sample(choices, count)
    ]


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_jsonl(path, rows):
    return write_lines(path, [json.dumps(row, ensure_ascii=False) for row in rows])


def write_parquet(path, rows):
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_data(task, folder):
    """Write train, validation and test files of a task; the numbers of examples are not multiples of the batch size."""
    folder = Path(folder)
    for number, (split, count) in enumerate({"train": 400, "validation": 45, "test": 37}.items()):
        if task == "classification":
            write_jsonl(folder / f"{split}.jsonl", classification_rows(count, seed=number))
        elif task == "pairs":
            write_jsonl(folder / f"{split}.jsonl", pair_rows(count, seed=number))
        elif task == "translation":
            rows = ["source\ttarget", *(f"{source}\t{target}" for source, target in sentence_pairs(count, seed=number))]
            write_lines(folder / f"{split}.tsv", rows)
        else:
            write_lines(folder / f"{split}.txt", running_lines(count, seed=number))
    return folder


ROWS = [
    *classification_rows(30),
    # texts that a CSV reader might change
    {"text": 'he said "no, never", and left', "label": "neg"},
    {"text": "007", "label": "pos"},
    {"text": "NA", "label": "neg"},
    {"text": "null", "label": "pos"},
    {"text": "1e5", "label": "neg"},
    {"text": "schöne Grüße, 東京", "label": "pos"},
    {"text": " # two  spaces ", "label": "neg"},
]


# configurations


def tree_for(task, folder, **overrides):
    """The configuration of a task as a dictionary, with data, cache and run in `folder`; override keys are dotted."""
    folder = Path(folder)
    path = overrides.get("data.path")
    tree = {
        "task": "classification" if task == "pairs" else task,
        "run": str(folder / "run"),
        "model": {**MODEL, **(DECODER if task in ("causal-lm", "translation", "denoising") else {})},
        "data": {"path": str(path or folder / f"{task} data"), "cache": str(folder / "cache")},
        "tokenizer": {"kind": "words", "vocab_size": 100, "min_frequency": 1},
        "training": {
            "steps": STEPS[task],
            "batch_size": 16,
            "learning_rate": 5e-3,
            "evaluate_every": STEPS[task] // 3,
            "device": "cpu",
            "precision": "float32",  # on every machine; test_precision.py trains in others
        },
    }
    if tree["task"] != "classification":
        # the default of 0.02 is for a hidden size of 768 and too small for 32
        tree["model"]["initializer_range"] = 0.15
        tree["training"]["learning_rate"] = 7e-3
    if task == "pairs":
        tree["data"]["columns"] = {"text": "premise", "pair": "hypothesis"}
        tree["model"]["max_position_embeddings"] = 40
    for key, value in overrides.items():
        *parents, last = key.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = str(value) if isinstance(value, Path) else value
    return tree


def yaml_for(task, folder, **overrides):
    """Write a YAML file to `folder` and, without `data.path`, its data; the override None removes a key.

    yaml_for("masked-lm", tmp_path, **{"training.steps": 5})
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if "data.path" not in overrides and not (folder / f"{task} data").exists():
        write_data(task, folder / f"{task} data")
    path = folder / f"{task}.yaml"
    path.write_text(
        yaml.safe_dump(tree_for(task, folder, **overrides), sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
    return path


# commands


STARTED_WITH = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "TENSORBOARD_"))}


def environment(**more):
    """The environment of a subprocess: one thread, offline."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}
    return {**STARTED_WITH, **quiet, **more}


def linformer(*args, cwd, env=None, input=None, check=True, timeout=300, real=False):
    """Run `linformer …` in a subprocess (a fork unless `real`), with standard output and error as text."""
    result = fork_server.run(
        [sys.executable, "-m", "linformer_kit.cli", *args],
        cwd=cwd,
        env=environment(**(env or {})),
        input=input or "",
        encoding="utf-8",
        timeout=timeout,
        real=real,
    )
    assert not check or result.returncode == 0, (
        f"linformer {' '.join(map(str, args))}: {result.returncode}\n{result.stderr}"
    )
    return result


def command(*args, input=None):
    """Run a command in this process; it must succeed."""
    result = CliRunner().invoke(app, list(map(str, args)), input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.stderr
    return result


def refused(*args, input=None):
    """The error message, one line, of a command that ends with exit code 2."""
    result = CliRunner().invoke(app, list(map(str, args)), input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 2, result.stdout
    return error_message(result.stderr)


def error_message(stderr):
    """The error message; lines about progress may precede it."""
    doing = r"(?:(?:Prepared data found|Reading the data|Training a tokenizer|Tokenizing) [^\n]+\n)*"
    found = re.fullmatch(rf"{doing}Error: ([^\n]+)\n", stderr)
    assert found, stderr
    return found.group(1)


def answers(*args, **options):
    """The JSON lines that `linformer predict` writes."""
    return [json.loads(line) for line in command("predict", *args, "--json", **options).stdout.split("\n")[:-1]]


def train_here(path, *overrides):
    """Train a run in this process; returns its output, result and metrics."""
    printed = command("train", path, *overrides).stdout
    run = load_config(path, list(overrides)).folder
    return printed, read_json(run / "result.json"), read_lines(run / "metrics.jsonl")


# outputs of commands


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rows_of(table):
    """The rows of a printed table without borders, by their first cell."""
    return dict(
        re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in table.splitlines() if re.search(r"\S\s{2,}\S", line)
    )


AUTO_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "pairs": "AutoModelForSequenceClassification",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "translation": "AutoModelForSeq2SeqLM",
    "denoising": "AutoModelForSeq2SeqLM",
}


class Trained(NamedTuple):
    """A run of `linformer train`, with its output."""

    task: str
    folder: Path
    yaml: Path
    printed: str

    @property
    def run(self):
        return self.folder / "run"

    @property
    def data(self):
        return self.folder / f"{self.task} data"

    def copy(self, folder):
        """A copy of the run, for tests that change it."""
        return Path(shutil.copytree(self.run, folder / "run"))

    def load(self):
        """The model and the tokenizer, loaded with transformers only."""
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(self.run / "model")
        return getattr(transformers, AUTO_CLASSES[self.task]).from_pretrained(self.run / "model").eval(), tokenizer


def decode_greedily(model, tokenizer, source, most=30):
    """Greedy decoding without a cache and without `generate`."""
    target = [tokenizer.bos_token_id]
    while len(target) < most and (len(target) == 1 or target[-1] != tokenizer.eos_token_id):
        target.append(model(input_ids=source, decoder_input_ids=torch.tensor([target])).logits[0, -1].argmax().item())
    return tokenizer.decode(target, skip_special_tokens=True)
