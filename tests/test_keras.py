"""Keras: the tests of tests/on_each_backend, each backend in its own process, and tests across backends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from training_zoo import QUESTIONS

BACKENDS = ("torch", "jax", "tensorflow")
FOLDER = Path(__file__).parent / "on_each_backend"
# what is compiled here runs once: to compile it quickly matters more
QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def run(backend, *arguments, check=True):
    """A Python process on one backend."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": QUICKLY,
    }
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment, check=check
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.stem)
@pytest.mark.parametrize("backend", BACKENDS)
def test_on(backend, path):
    tests = run(
        backend, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", path, check=False
    )
    assert tests.returncode == 0, tests.stdout[-10_000:] + tests.stderr[-2_000:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_import_brings_pytorch_only_as_a_backend(backend):
    code = "import sys, linformer_kit.keras, keras; print(keras.backend.backend(), 'torch' in sys.modules)"
    assert run(backend, "-c", code).stdout.split() == [backend, str(backend == "torch")]


def test_without_keras_the_error_says_what_to_install():
    code = "import sys; sys.modules['keras'] = None; import linformer_kit.keras"
    failed = run("torch", "-c", code, check=False)
    assert "pip install 'linformer-kit[keras]'" in failed.stderr.splitlines()[-1]


ANSWERS = """
import sys, json, keras, numpy as np
import linformer_kit.keras
folder, ids = sys.argv[1], np.array(json.loads(sys.argv[2]))
if len(sys.argv) > 3:
    keras.utils.set_random_seed(0)
    sizes = dict(k=8, max_len=32, vocab_size=30, d_model=16, d_ff=24, n_heads=2, n_layers=2, block_length=8, slots=2)
    linformer_kit.keras.Linformer(**sizes, n_classes=3).save(folder + "/classifier.keras")
    seq2seq = linformer_kit.keras.LinformerSeq2Seq(**sizes, sharing="layerwise", projection="dynamic")
    seq2seq.save(folder + "/seq2seq.keras")
classifier, seq2seq = (keras.models.load_model(f"{folder}/{name}.keras") for name in ("classifier", "seq2seq"))
drawn = seq2seq.generate(ids, 12, temperature=1.0, seed=3)
print(json.dumps([classifier.predict(ids, verbose=0).tolist(), seq2seq.generate(ids, 12).tolist(), drawn.tolist()]))
"""


@pytest.mark.slow
def test_what_one_backend_saves_says_the_same_on_all(tmp_path):
    ids = np.random.default_rng(0).integers(0, 30, (4, 20)).tolist()
    answers = []
    for backend in BACKENDS:
        saves = ["and save"] if not answers else []
        printed = run(backend, "-c", ANSWERS, tmp_path, json.dumps(ids), *saves).stdout
        answers.append(json.loads(printed.splitlines()[-1]))
    for probabilities, generated, drawn in answers[1:]:
        np.testing.assert_allclose(probabilities, answers[0][0], atol=1e-5)
        assert (generated, drawn) == tuple(answers[0][1:])


@pytest.mark.slow
def test_a_run_of_linformer_train_opens_as_a_keras_model(trained):
    from linformer_kit.keras import from_torch

    twin, tokenizer = trained.load()
    model = from_torch(trained.run)
    ids = [tokenizer(question.split("\t")[0])["input_ids"][:24] for question, _ in QUESTIONS[trained.task]]
    padded = np.array([row + [tokenizer.pad_token_id] * (24 - len(row)) for row in ids])
    given = {"input_ids": padded, "attention_mask": (np.arange(24) < [[len(row)] for row in ids]).astype("int32")}
    there = {name: torch.from_numpy(array) for name, array in given.items()}
    if trained.task in ("translation", "denoising"):
        expected = twin.generate(**there, max_new_tokens=20, do_sample=False, num_beams=1).numpy()
        np.testing.assert_array_equal(model.generate(given, max_new_tokens=20), expected)
        return
    with torch.no_grad():
        expected = twin(**there).logits.numpy()
    got = model.predict(given, verbose=0)
    is_real = given["attention_mask"].astype(bool) if got.ndim == 3 else slice(None)
    np.testing.assert_allclose(got[is_real], expected[is_real], atol=1e-4)
    if trained.task == "causal-lm":
        prompt = np.array([ids[0][:4]])
        expected = twin.generate(torch.from_numpy(prompt), max_new_tokens=12, do_sample=False).numpy()
        np.testing.assert_array_equal(model.generate(prompt, max_new_tokens=12), expected)
