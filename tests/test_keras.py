"""Keras: tests/on_each_backend on the three backends, in separate processes, and tests that span several backends."""

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
DIRECTORY = Path(__file__).parent / "on_each_backend"


def run(backend, *arguments, check=True):
    """Run Python on one backend."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=check)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend(backend):
    """All files in one process, which imports the backend once and compiles what they have in common once."""
    options = ("-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist")
    tests = run(backend, "-m", "pytest", *options, DIRECTORY, check=False)
    if tests.returncode:
        command = f"KERAS_BACKEND={backend} pytest tests/on_each_backend"
        pytest.fail(f"{command}\n{tests.stdout[-10_000:]}{tests.stderr[-2_000:]}", pytrace=False)


def test_the_import_does_not_import_pytorch():
    code = "import sys, linformer_kit.keras, keras; print(keras.backend.backend(), 'torch' in sys.modules)"
    assert run("jax", "-c", code).stdout.split() == ["jax", "False"]


def test_without_keras_the_error_names_what_to_install():
    code = "import sys; sys.modules['keras'] = None; import linformer_kit.keras"
    failed = run("torch", "-c", code, check=False)
    assert "pip install 'linformer-kit[keras]'" in failed.stderr.splitlines()[-1]


OUTPUTS = """
import sys, json, keras, numpy as np
import linformer_kit.keras
assert ("torch" in sys.modules) == (keras.backend.backend() == "torch")
directory, ids = sys.argv[1], np.array(json.loads(sys.argv[2]))
if len(sys.argv) > 3:
    keras.utils.set_random_seed(0)
    sizes = dict(k=8, max_len=32, vocab_size=30, d_model=16, d_ff=24, n_heads=2, n_layers=2, block_length=8, slots=2)
    shared = dict(sharing="layerwise", projection="dynamic")
    window = dict(window_length=3, global_tokens=1, distance_bias=True)
    linformer_kit.keras.Linformer(**sizes, **window, n_classes=3).save(directory + "/classifier.keras")
    linformer_kit.keras.LinformerSeq2Seq(**sizes, **shared).save(directory + "/seq2seq.keras")
classifier, seq2seq = (keras.models.load_model(f"{directory}/{name}.keras") for name in ("classifier", "seq2seq"))
sampled = seq2seq.generate(ids, 12, temperature=1.0, seed=3)
print(json.dumps([classifier.predict(ids, verbose=0).tolist(), sampled.tolist()]))
"""


@pytest.mark.slow
def test_a_saved_model_has_the_same_outputs_on_every_backend(tmp_path):
    ids = np.random.default_rng(0).integers(0, 30, (4, 20)).tolist()
    outputs = []
    for backend in BACKENDS:
        saves = ["save"] if not outputs else []
        printed = run(backend, "-c", OUTPUTS, tmp_path, json.dumps(ids), *saves).stdout
        outputs.append(json.loads(printed.splitlines()[-1]))
    for probabilities, sampled in outputs[1:]:
        np.testing.assert_allclose(probabilities, outputs[0][0], atol=1e-5)
        assert sampled == outputs[0][1]


@pytest.mark.slow
def test_a_run_of_linformer_train_opens_as_a_keras_model(trained):
    from linformer_kit.keras import from_torch

    torch_model, tokenizer = trained.load()
    model = from_torch(trained.run)
    ids = [tokenizer(question.split("\t")[0])["input_ids"][:24] for question, _ in QUESTIONS[trained.task]]
    padded = np.array([row + [tokenizer.pad_token_id] * (24 - len(row)) for row in ids])
    inputs = {"input_ids": padded, "attention_mask": (np.arange(24) < [[len(row)] for row in ids]).astype("int32")}
    torch_inputs = {name: torch.from_numpy(array) for name, array in inputs.items()}
    if trained.task in ("translation", "denoising"):
        expected = torch_model.generate(**torch_inputs, max_new_tokens=20, do_sample=False, num_beams=1).numpy()
        np.testing.assert_array_equal(model.generate(inputs, max_new_tokens=20), expected)
        return
    with torch.no_grad():
        expected = torch_model(**torch_inputs).logits.numpy()
    outputs = model.predict(inputs, verbose=0)
    is_real = inputs["attention_mask"].astype(bool) if outputs.ndim == 3 else slice(None)
    np.testing.assert_allclose(outputs[is_real], expected[is_real], atol=1e-4)
    if trained.task == "causal-lm":
        prompt = np.array([ids[0][:4]])
        expected = torch_model.generate(torch.from_numpy(prompt), max_new_tokens=12, do_sample=False).numpy()
        np.testing.assert_array_equal(model.generate(prompt, max_new_tokens=12), expected)
