"""`linformer predict` agrees with the model under transformers, for texts from any source."""

import codecs
import csv
import gzip
import json
import re

import numpy as np
import pytest
import torch
from training_zoo import (
    NUMBERS,
    QUESTIONS,
    answers,
    classification_rows,
    command,
    decode_greedily,
    linformer,
    pair_rows,
    refused,
    write_jsonl,
    write_lines,
)
from transformers import AutoTokenizer

from linformer_kit.training.translate import generate

pytestmark = pytest.mark.usefixtures("restore_global_state")


def by_hand(trained, text):
    """The prediction of the model of a run, with transformers and plain code."""
    model, tokenizer = trained.load()
    if model.config.architectures[0].endswith("SequenceClassification"):
        shares = model(**tokenizer(*text.split("\t"), return_tensors="pt")).logits[0].softmax(-1).tolist()
        return {model.config.id2label[number]: share for number, share in enumerate(shares)}
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if trained.task == "masked-lm":
        shares = model(torch.tensor([[*ids, tokenizer.eos_token_id]])).logits[0].softmax(-1)
        return {
            tokenizer.decode([token]): share.item()
            for token, share in enumerate(shares[ids.index(tokenizer.mask_token_id)])
        }
    if trained.task == "causal-lm":
        start = len(ids)
        for _ in range(6):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        return tokenizer.decode(ids[start:], skip_special_tokens=True)
    return decode_greedily(model, tokenizer, torch.tensor([[*ids, tokenizer.eos_token_id]]))


@pytest.mark.slow
def test_predictions_equal_those_of_the_model_in_transformers(trained):
    questions = QUESTIONS[trained.task]
    found = answers(trained.run, *(text for text, _ in questions), "--tokens", 6, "--top", 1000)
    assert len(found) == len(questions)
    for (text, wanted), answer in zip(questions, found, strict=True):
        expected = by_hand(trained, text)
        assert "\t".join([answer["text"], *([answer["pair"]] if "pair" in answer else [])]) == text
        if trained.task in ("classification", "pairs"):
            assert answer["label"] == wanted
            assert answer["probabilities"] == pytest.approx(expected, abs=1e-5)
        elif trained.task == "masked-lm":
            (guesses,) = answer["masks"]
            assert guesses[0]["token"] == wanted
            assert answer["filled"] == text.replace("<mask>", wanted)
            assert {guess["token"]: guess["probability"] for guess in guesses} == pytest.approx(expected, abs=1e-5)
            assert guesses == sorted(guesses, key=lambda guess: -guess["probability"])
        else:
            key = {"causal-lm": "continuation", "translation": "translation", "denoising": "restored"}[trained.task]
            assert answer[key] == expected == wanted


@pytest.mark.slow
def test_predict_writes_readable_text(trained):
    text, wanted = QUESTIONS[trained.task][0]
    printed = command("predict", trained.run, text, "--tokens", 6, "--top", 2).stdout
    if trained.task in ("classification", "pairs"):
        label, first, second = re.fullmatch(r"(\w+)\t\1=([01]\.\d{4}) \w+=([01]\.\d{4})\n", printed).groups()
        assert label == wanted
        assert float(first) + float(second) == pytest.approx(1, abs=1e-4)
    elif trained.task == "masked-lm":
        assert re.fullmatch(rf"{text.replace('<mask>', wanted)}\t{wanted} [01]\.\d+, \S+ [01]\.\d+\n", printed)
    else:
        assert printed == f"{wanted}\n"


@pytest.mark.slow
def test_texts_come_from_arguments_files_and_standard_input(trained_run, tmp_path):
    """More texts than fit into a batch, answered in order."""
    run = trained_run("classification").run
    rows = classification_rows(40, seed=3)
    texts = [row["text"] for row in rows]
    expected = answers(run, *texts)
    assert [answer["text"] for answer in expected] == texts
    assert np.mean([answer["label"] == row["label"] for answer, row in zip(expected, rows, strict=True)]) > 0.8
    lines = "".join(f"{text}\n" for text in texts)
    assert answers(run, input=lines) == answers(run, "-", input=lines) == expected
    plain = write_lines(tmp_path / "texts.txt", texts)
    packed = tmp_path / "texts.txt.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    windows = tmp_path / "windows.txt"
    windows.write_bytes(lines.replace("\n", "\r\n").encode())
    table = tmp_path / "texts.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([["number", "text"], *enumerate(texts)])
    for path in (plain, packed, windows, write_jsonl(tmp_path / "texts.jsonl", rows), table):
        assert answers(run, path) == expected, path
    # arguments and files together
    assert answers(run, texts[0], write_lines(tmp_path / "two.txt", texts[1:3]), texts[3]) == expected[:4]


@pytest.mark.slow
def test_a_whole_file_may_be_one_text(trained_run, tmp_path):
    run = trained_run("classification").run
    path = write_lines(tmp_path / "review.txt", ["the river", "a lovely garden\u2028by the road", "and winter"])
    assert [answer["text"] for answer in answers(run, path)] == path.read_text(encoding="utf-8").split("\n")[:-1]
    (answer,) = answers(run, path, "--per", "file")
    assert answer["text"] == path.read_text(encoding="utf-8")
    assert answer["label"] == "pos"
    assert answer["probabilities"] == pytest.approx(by_hand(trained_run("classification"), answer["text"]), abs=1e-5)
    assert answers(run, path, "--per", "line") == answers(run, path)


@pytest.mark.slow
def test_predict_in_a_real_process(trained_run, tmp_path):
    trained = trained_run("translation")
    (source, target), (other, _) = QUESTIONS["translation"]
    result = linformer(
        *("predict", trained.run, "--json"),
        cwd=tmp_path,
        input=f"{source}\n{other} {' '.join(['red'] * 40)}\n",
        real=True,
    )
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first == {"text": source, "translation": target}
    assert second["text"].startswith(other)
    assert result.stderr == "Warning: input 2 has 45 tokens and was truncated to 24, the maximum length of the model\n"
    assert "ö" in result.stdout  # as it is, not as \u00f6


@pytest.mark.slow
def test_pairs_are_read_from_two_columns_or_separated_by_a_tab(trained_run, tmp_path):
    run = trained_run("pairs").run
    rows = pair_rows(20, seed=5)
    expected = answers(run, *(f"{row['premise']}\t{row['hypothesis']}" for row in rows))
    assert [(answer["text"], answer["pair"]) for answer in expected] == [
        (row["premise"], row["hypothesis"]) for row in rows
    ]
    assert np.mean([answer["label"] == row["label"] for answer, row in zip(expected, rows, strict=True)]) > 0.7
    assert answers(run, write_jsonl(tmp_path / "pairs.jsonl", rows)) == expected
    assert "'one' is a single text; separate the two texts with a tab" in refused("predict", run, "one")
    half = write_jsonl(tmp_path / "half.jsonl", [{"premise": "a good road"}])
    assert refused("predict", run, half) == f"{half} has no column 'hypothesis'; it has premise"


@pytest.mark.slow
def test_truncation_is_reported(trained_run):
    for task, text, said in (
        (
            "classification",
            "good " * 30,
            r"input 1 has 32 tokens and was truncated to 24, the maximum length of the model",
        ),
        (
            "causal-lm",
            "one two " * 15,
            r"input 1 has 30 tokens and was truncated to the last 18, which leaves room for 6 new tokens",
        ),
    ):
        result = command("predict", trained_run(task).run, text, "short", text, "--tokens", 6)
        warnings = result.stderr.splitlines()
        assert warnings == [f"Warning: {said}", f"Warning: {said}".replace("input 1", "input 3")]
        assert len(result.stdout.splitlines()) == 3
    said = "--tokens is 24, but the maximum length of the model, including the input, is 24; allowed: 1 to 23"
    assert refused("predict", trained_run("causal-lm").run, "one two", "--tokens", 24) == said
    assert (
        len(command("predict", trained_run("causal-lm").run, "one two").stdout.split()) == 12
    )  # half of what it takes
    # a continuation uses the end of a long text, classification the beginning
    words, run = [*NUMBERS[1], *NUMBERS[0], *NUMBERS[2][:5]], trained_run("causal-lm").run
    whole, end, beginning = (
        answers(run, " ".join(part), "--tokens", 8)[0] for part in (words, words[-16:], words[:16])
    )
    assert whole["continuation"] == end["continuation"] != beginning["continuation"]
    words, run = ["lovely", *["river"] * 21, *["awful"] * 9], trained_run("classification").run
    whole, beginning = (answers(run, " ".join(part))[0] for part in (words, words[:22]))
    assert whole["probabilities"] == beginning["probabilities"]


@pytest.mark.slow
def test_a_continuation_can_be_sampled(trained_run):
    run = trained_run("causal-lm").run
    drawn = [
        command("predict", run, "one two three", "--tokens", 12, "--temperature", 5.0, "--seed", seed).stdout
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(command("predict", run, "one two three", "--tokens", 3).stdout.split()) == 3


@pytest.mark.slow
def test_every_mask_of_a_text_is_filled(trained_run):
    run = trained_run("masked-lm").run
    text = " ".join(["one", "<mask>", "three", "<mask>", *(NUMBERS[0] * 3)[4:23]])
    (answer,) = answers(run, text, "--top", 3)
    assert [len(mask) for mask in answer["masks"]] == [3, 3]
    assert [mask[0]["token"] for mask in answer["masks"]] == ["two", "four"]
    result = command("predict", run, "--json", input=f"{text}\none two three\n\n{'one ' * 30}<mask>\n")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [len(answer["masks"]) for answer in found] == [2, 0, 0, 0]
    assert found[1]["filled"] == "one two three"
    write = "has no mask; write <mask> for each token to predict"
    assert [line.removeprefix("Warning: ") for line in result.stderr.splitlines()] == [
        "input 4 has 32 tokens and was truncated to 24, the maximum length of the model",
        f"input 2 {write}",
        f"input 3 {write}",
        "input 4 has no mask; it was truncated",
    ]


@pytest.mark.slow
def test_inputs_are_read_in_the_format_of_the_training_data(tmp_path, quick):
    table = write_lines(
        tmp_path / "rows.data", ["text,label", *(f"{row['text']},{row['label']}" for row in classification_rows(40))]
    )
    command(
        "train",
        quick("classification", tmp_path, **{"data.path": table, "data.format": "csv", "training.batch_size": 8}),
    )
    assert [answer["text"] for answer in answers(tmp_path / "run", table)] == [
        row["text"] for row in classification_rows(40)
    ]
    (tmp_path / "marked.txt").write_bytes(codecs.BOM_UTF8 + b"a good road\n")
    assert answers(tmp_path / "run", tmp_path / "marked.txt")[0]["text"] == "a good road"
    quoted = write_lines(tmp_path / "quoted.csv", ["text,label", '"two', 'lines",pos'])
    assert len(command("predict", tmp_path / "run", quoted).stdout.splitlines()) == 1
    assert refused("predict", tmp_path / "run", tmp_path) == f"{tmp_path} is a directory; pass its files"
    assert (
        refused("predict", tmp_path / "run", "good", "-") == "`-` (standard input) cannot be combined with other inputs"
    )
    assert "is not in the encoding of this terminal" in refused("predict", tmp_path / "run", "\udcff")


@pytest.mark.slow
def test_a_mask_replaces_a_word_with_its_space(tmp_path, quick):
    """In byte-level BPE the space belongs to the word, so a space before the mask would not occur in training."""
    command("train", quick("masked-lm", tmp_path, **{"tokenizer": {"kind": "bpe", "vocab_size": 400}}))
    text = " ".join((NUMBERS[0] * 3)[:23])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    whole, hidden = (tokenizer(each)["input_ids"] for each in (text, text.replace(" three", " <mask>", 1)))
    assert [(one, other) for one, other in zip(whole, hidden, strict=True) if one != other] == [
        (tokenizer.convert_tokens_to_ids("Ġthree"), tokenizer.mask_token_id)
    ]
    (answer,) = answers(tmp_path / "run", text.replace(" three", " <mask>", 1))
    assert len(answer["filled"].split()) == 23


@pytest.mark.parametrize("beams", [1, 3])
def test_the_length_limit_of_a_translation_does_not_depend_on_its_batch(trained_run, beams):
    trained, tokenizer = trained_run("translation").load()
    trained.config.max_position_embeddings = 64
    model = type(trained)(trained.config)
    model.generation_config.suppress_tokens = [tokenizer.eos_token_id, *tokenizer.all_special_ids]
    sources = [tokenizer(text)["input_ids"] for text in ("one", "one two three")]
    together = generate(model, tokenizer, sources, beams)
    assert together == [generate(model, tokenizer, [source], beams)[0] for source in sources]
    limits = [min(2 * len(source) + 20, model.config.max_position_embeddings - 1) for source in sources]
    assert limits[0] < limits[1]
    assert [len(text.split()) for text in together] == limits
