"""The benchmark of the models: it refuses wrong models, counts right, judges right, and keeps what it measured."""

import copy
import csv
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("matplotlib", reason='needs pip install "linformer-kit[bench]"')

from linformer_kit.bench import generation, measure, peer_models
from linformer_kit.bench.peer_models import BERT, FNET, LONGFORMER, NONE_EAGER, NONE_SDPA, Sizes, linear_name
from linformer_kit.bench.peers import WrongImplementation

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SMALL = Sizes(hidden=32, layers=2, heads=2, intermediate=64, vocabulary=100)
LENGTH = 256
OURS_AND_BERT = [*peer_models.OUR_ENCODERS, BERT]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside other tests, threads that wait for each other take many times as long
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def script(monkeypatch):
    """A module of benchmarks/, which is no package."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module


@pytest.fixture(scope="module")
def encoders():
    torch.manual_seed(0)
    models = {name: peer_models.ENCODERS[name](LENGTH, SMALL) for name in OURS_AND_BERT}
    models[NONE_EAGER].load_state_dict(models[NONE_SDPA].state_dict())
    return models


@pytest.fixture
def right_models(encoders):
    return copy.deepcopy(encoders)


def some_ids():
    return SMALL.random_ids(peer_models.COMPARED_BATCH, peer_models.COMPARED_LENGTH)


def test_the_models_agree_with_a_plain_evaluation(right_models):
    peer_models.check_encoders(right_models, some_ids())


def make_wrong(name, model):
    """What changes the function a little, whatever its weights."""
    attention = model.encoder.layer[1].attention.self if name == BERT else model.layers[1].attention
    right = attention.forward
    attention.forward = lambda x, *args, **kwargs: right(1.01 * x, *args, **kwargs)


@pytest.mark.parametrize("name", OURS_AND_BERT)
def test_a_wrong_model_is_refused(name, right_models):
    make_wrong(name, right_models[name])
    with pytest.raises(WrongImplementation, match=name.replace("(", r"\(").replace(")", r"\)")):
        peer_models.check_encoders({NONE_SDPA: right_models[NONE_SDPA], name: right_models[name]}, some_ids())


def test_unfused_attention_has_to_be_what_fused_attention_is(right_models):
    right_models[NONE_EAGER].layers[0].attention.query.weight.data.mul_(1.01)
    with pytest.raises(WrongImplementation, match="eager"):
        peer_models.check_encoders(right_models, some_ids())


def test_a_model_that_trains_wrongly_is_refused(right_models):
    model = right_models[linear_name(64)]
    right = model.layers[1].attention.forward
    model.layers[1].attention.forward = lambda x, *args: right(x.detach(), *args)
    with pytest.raises(WrongImplementation, match="gradient"):
        peer_models.check_encoders({linear_name(64): model}, some_ids())


@pytest.mark.parametrize(
    "options", [{"projected_length": 16}, {"projected_length": 128}, {"projection": "none"}], ids=str
)
def test_the_multiply_adds_are_those_of_the_products(options):
    # unfused, because the counter does not know the fused kernel
    model = peer_models.our_encoder(LENGTH, SMALL, attention="eager", **options).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(SMALL.random_ids(3, LENGTH))
    multiply_adds = peer_models.encoder_multiply_adds(model, LENGTH, batch=3)
    if model.layers[0].attention.plan(LENGTH).queries == "folded":  # b_Q keysᵀ, a vector's worth
        multiply_adds += 3 * SMALL.layers * SMALL.hidden * options["projected_length"]
    assert counter.get_total_flops() == 2 * multiply_adds


def generators():
    blocks = {"block_length": 16, "slots": 2}
    return {
        "causal": generation.causal_lm(SMALL, 64, decoder_attention="causal", **blocks),
        "full": generation.causal_lm(SMALL, 64, decoder_attention="full", **blocks),
        "K rows": generation.encoder_decoder(SMALL, 64, projected_length=8, **blocks),
        "no projection": generation.encoder_decoder(SMALL, 64, projection="none", **blocks),
    }


@pytest.mark.parametrize("name", generators())
def test_generation_is_checked_against_a_pass_over_everything(name, monkeypatch):
    model = generators()[name]
    ids, new_ids = SMALL.random_ids(2, 40), SMALL.random_ids(2, 20)
    generation.check_generator(name, model, ids, new_ids)
    monkeypatch.setattr(generation, "copied", lambda cache: cache)  # so that tokens generated before stay in the cache
    with pytest.raises(WrongImplementation, match=f"{name}: its logits"):
        generation.check_generator(name, model, ids, new_ids)


def test_the_cache_is_that_of_all_tokens():
    model = generators()["full"]
    started = generation.read(model, SMALL.random_ids(1, 48))
    cache = generation.go_on(model, started, 16)
    keys_and_values = 2 * 64 * SMALL.hidden * 4
    assert cache.nbytes == SMALL.layers * keys_and_values
    assert (started.cache.get_seq_length(), cache.get_seq_length()) == (48, 64)


def test_what_does_not_fit_is_recorded_and_not_started(script, tmp_path, monkeypatch):
    sweep = script("models_sweep")
    monkeypatch.setattr(
        sweep.peer_models, "ENCODERS", {name: peer_models.ENCODERS[name] for name in (NONE_SDPA, NONE_EAGER)}
    )
    benchmark = sweep.Benchmark(sweep.QUICK, tmp_path)
    benchmark.free_bytes = 10**6
    list(benchmark.time(512))
    status = {(row["model"], row["mode"]): row["status"] for row in benchmark.encoders.rows()}
    assert status.pop((NONE_EAGER, "forward+backward")) == measure.OUT_OF_MEMORY
    assert set(status.values()) == {measure.OK}
    assert benchmark.untimed_modes(512) == []
    benchmark.free_bytes = 20 * 2**30
    benchmark.sweep = sweep.COMPLETE
    assert [bool(benchmark.too_large(length, "forward+backward")) for length in (512, 4096, 16384)] == [
        False,
        False,
        True,
    ]
    assert not benchmark.too_large(16384, "forward")


# seconds of a made-up forward pass at N=4,096, and multiply-adds
MADE_UP = {
    linear_name(128): (1.0, 100),
    linear_name(256): (2.0, 150),
    NONE_SDPA: (4.0, 500),
    NONE_EAGER: (6.0, 500),
    BERT: (4.5, None),
    LONGFORMER: (1.4, None),
    FNET: (0.5, None),
}


@pytest.fixture
def made_up(script, tmp_path):
    """The tables of a complete run of which only one length was measured."""
    sweep = script("models_sweep")
    benchmark = sweep.Benchmark(sweep.COMPLETE, tmp_path)
    benchmark.encoders.put(
        [
            {
                "model": name,
                "length": 4096,
                "mode": "forward",
                "seconds_median": seconds,
                "multiply_adds": multiply_adds,
            }
            for name, (seconds, multiply_adds) in MADE_UP.items()
        ]
    )
    point = {"length": 16384, "phase": sweep.GO_ON}
    benchmark.generation.put(
        [
            {"model": sweep.CAUSAL, **point, "tokens_per_second": 90.0, "cache_bytes": 100},
            {"model": sweep.CAUSAL_FULL, **point, "tokens_per_second": 30.0, "cache_bytes": 2500},
        ]
    )
    return benchmark


def test_targets_are_judged_right(made_up, script):
    found = {target.texts[:2]: target.texts[2:] for target in script("models_summary").targets(made_up)}
    assert {key: texts for key, texts in found.items() if texts[2] != "not measured"} == {
        # FNet is faster, but not attention
        ("faster than the next attention-based model", "forward, N=4,096, K=128, next: Longformer"): (
            "≥ 1.50×",
            "1.40×",
            "missed",
        ),
        ("faster than unfused attention (the paper's Table 3)", "forward, N=4,096, K=128"): ("≥ 3.40×", "6.00×", "met"),
        ("faster than unfused attention (the paper's Table 3)", "forward, N=4,096, K=256"): (
            "≥ 3.20×",
            "3.00×",
            "missed",
        ),
        ("faster than fused attention ÷ fewer multiply-adds", "forward, N=4,096, K=128"): ("≥ 90 %", "80 %", "missed"),
        ("faster than fused attention ÷ fewer multiply-adds", "forward, N=4,096, K=256"): ("≥ 90 %", "60 %", "missed"),
        ("tokens per second beside full attention", "64 tokens, prompt of 16,384"): ("–", "3.00×", "reported"),
        ("cache smaller than with full attention", "64 tokens, prompt of 16,384"): ("–", "25.00×", "reported"),
    }
    assert len(found) == 10 + 12 + 12 + 4


def run(name: str, *arguments: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, BENCHMARKS / name, *map(str, arguments)], capture_output=True, text=True, env=environment
    )


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "results"
    done = run("models.py", "--quick", "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder


PICTURES = {"models_forward.png", "models_training.png", "models_generation.png"}
CSVS = ("models.csv", "models_generation.csv")


def test_a_quick_run_writes_everything(quick_run):
    assert {path.name for path in quick_run.iterdir()} == {
        *CSVS,
        *PICTURES,
        "models_targets.csv",
        "models_machine.json",
    }
    rows = read_rows(quick_run / "models.csv")
    points = {(row["model"], row["length"], row["mode"]) for row in rows}
    assert points == {
        (name, n, mode) for name in peer_models.ENCODERS for n in ("512", "1024") for mode in measure.MODES
    }
    assert all(row["status"] == measure.OK and float(row["seconds_median"]) > 0 for row in rows)
    assert {row["length"]: row["batch"] for row in rows} == {"512": "2", "1024": "1"}
    assert {row["model"] for row in rows if row["multiply_adds"]} == set(peer_models.OUR_ENCODERS)
    rows = read_rows(quick_run / "models_generation.csv")
    assert len(rows) == (2 * 2 + 2) * 2  # lengths × models, and the encoder-decoders; two phases
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)
    assert all(bool(row["cache_bytes"]) == (row["phase"] == "generate") for row in rows)


def test_the_next_run_measures_only_what_is_missing(quick_run):
    before = {name: ((quick_run / name).stat().st_mtime_ns, (quick_run / name).read_text()) for name in CSVS}
    for picture in PICTURES:
        (quick_run / picture).unlink()
    again = run("models.py", "--quick", "--output", quick_run)
    assert again.returncode == 0, again.stderr
    assert before == {name: ((quick_run / name).stat().st_mtime_ns, (quick_run / name).read_text()) for name in CSVS}
    assert all((quick_run / picture).stat().st_size > 0 for picture in PICTURES)

    lines = before["models.csv"][1].splitlines(keepends=True)
    kept = [line for line in lines if ",1024,forward+backward," not in line]
    (quick_run / "models.csv").write_text("".join(kept))
    again = run("models.py", "--quick", "--output", quick_run)
    assert again.returncode == 0, again.stderr
    after = (quick_run / "models.csv").read_text().splitlines(keepends=True)
    assert after[: len(kept)] == kept
    assert len(after) == len(lines)


def test_the_table_is_written_into_a_document(quick_run, tmp_path):
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- models: start -->\nold\n<!-- models: end -->\nafter\n")
    done = run("models_summary.py", "--results", quick_run, "--into", document)
    assert done.returncode == 0, done.stderr
    first, *table, last = document.read_text().split("\n<!-- models: start -->\n")[1].splitlines()
    assert first == "| to reach | at | wanted | measured |  |"
    assert table[1:-1] == [f"| {' | '.join(row.values())} |" for row in read_rows(quick_run / "models_targets.csv")]
    assert (table[-1], last) == ("<!-- models: end -->", "after")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("models.py", ["--quick"], "--output"),
        ("models_summary.py", ["--results", BENCHMARKS], "run benchmarks/models.py first"),
    ],
    ids=["quick-into-results", "no-results"],
)
def test_wrong_use_is_explained(name, arguments, message):
    done = run(name, *arguments)
    assert done.returncode == 1
    assert message in done.stderr
