"""Any checkpoint can be evaluated, W&B artifacts too; nothing in a model directory runs or is loaded unasked."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import fork_server
import pytest
from training_zoo import answers, command, environment, read_json, refused

from linformer_kit.training.checkpoint import checkpoints_in
from linformer_kit.training.run import open_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("restore_global_state")]


# checkpoints


@pytest.fixture
def stopped(trained_run, tmp_path):
    """A run with checkpoints that is not finished."""
    run = trained_run("classification").copy(tmp_path)
    (run / "result.json").unlink()
    shutil.rmtree(run / "model")
    return run


def test_a_checkpoint_of_an_unfinished_run_is_evaluated_and_predicts(stopped, trained_run, tmp_path):
    """Its numbers are those of a finished run with these weights; the results of that run are not overwritten."""
    finished = trained_run("classification").copy(tmp_path / "finished")
    first, *_, last = checkpoints_in(stopped / "checkpoints")
    (stopped / "evaluation.json").write_text("of the finished model")
    command("evaluate", first)
    found = read_json(stopped / f"evaluation-{first.name}.json")
    assert (stopped / "evaluation.json").read_text() == "of the finished model"
    shutil.copy(first / "model.safetensors", finished / "model")
    command("evaluate", finished)
    assert found == read_json(finished / "evaluation.json")
    command("evaluate", last)
    assert read_json(stopped / f"evaluation-{last.name}.json")["loss"] < found["loss"]
    assert answers(first, "the river and a lovely road") == answers(finished, "the river and a lovely road")


def test_what_is_not_a_checkpoint_is_named_with_those_that_exist(stopped, monkeypatch):
    places = checkpoints_in(stopped / "checkpoints")
    names = ", ".join(path.name for path in places)
    missing = stopped / "checkpoints" / "checkpoint-7"
    assert refused("evaluate", missing) == f"there is no checkpoint {missing}; {missing.parent} has {names}"
    (stopped / "checkpoints" / "notes").mkdir()
    assert refused("evaluate", missing.with_name("notes")) == (
        f"{missing.with_name('notes')} is not a checkpoint; {missing.parent} has {names}"
    )
    assert refused("predict", missing.parent, "a") == (
        f"{missing.parent} contains checkpoints; pass the run directory, or one of them, such as {places[-1]}"
    )
    alone = Path(shutil.copytree(places[0], stopped.parent / "alone"))
    assert refused("predict", alone, "a").startswith(f"{alone} is a model without its run")
    monkeypatch.chdir(missing.parent)
    assert open_model(places[0].name).run.folder == stopped
    weights = places[0] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert refused("evaluate", places[0]) == (
        f"{places[0]} is damaged: model.safetensors has changed since it was written; {missing.parent} has {names}"
    )


def test_a_file_that_the_manifest_does_not_list_is_refused(stopped):
    """Transformers would load it when the run is resumed."""
    last = checkpoints_in(stopped / "checkpoints")[-1]
    (last / ".DS_Store").touch()
    assert open_model(last).folder == last
    (last / "scaler.pt").write_bytes(b"not a pickle")
    said = f"{last / 'scaler.pt'} is not part of the checkpoint: manifest.json does not list it; remove it"
    assert refused("train", stopped / "config.yaml") == said
    assert refused("evaluate", last) == said
    assert last.is_dir()


def test_a_run_that_begins_anew_has_a_new_tokenizer(stopped, quick):
    """Without a checkpoint, any setting may change."""
    shutil.rmtree(stopped / "checkpoints")
    path = quick("classification", stopped.parent, **{"training.steps": 1, "tokenizer": {"kind": "bytes"}})
    command("train", path)
    (last,) = checkpoints_in(stopped / "checkpoints")
    assert answers(last, "a fine river") == answers(stopped, "a fine river")


# code in a model directory


@pytest.fixture
def with_code(trained_run, tmp_path):
    """A run whose model directory has code that would leave a file, and the function that makes a JSON file name it."""
    run = trained_run("classification").copy(tmp_path)
    (run / "model" / "code.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\nclass Own: pass\n")

    def name_code(file, **changes):
        path = run / "model" / file
        path.write_text(json.dumps({**read_json(path), **changes}))

    yield run, name_code
    assert not (tmp_path / "it ran").exists()


def test_a_linformer_with_code_is_loaded_with_the_classes_of_the_package(with_code):
    run, name_code = with_code
    before = answers(run, "a fine river")
    name_code("config.json", auto_map={"AutoConfig": "code.Own", "AutoModelForSequenceClassification": "code.Own"})
    (run / "model" / "custom_generate").mkdir()
    shutil.copy(run / "model" / "code.py", run / "model" / "custom_generate" / "generate.py")
    assert answers(run, "a fine river", input="y\n") == before


def test_a_model_that_needs_its_code_is_refused_without_a_question(with_code, tmp_path):
    run, name_code = with_code
    name_code("tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["code.Own", None]})
    needs = "can be loaded only with code that it names (auto_map); linformer never runs code of a model"
    model = run / "model"
    assert refused("predict", run, "a", input="y\n") == f"{model} cannot be loaded: the tokenizer {needs}"
    said = refused("train", run / "config.yaml", f"run={tmp_path / 'new'}", f"tokenizer={{from: '{model}'}}")
    assert said == f"tokenizer.from is '{model}', which {needs}"
    (tmp_path / "text.txt").write_text("a fine river")
    assert refused("plot", run, "--what", "heads", "--text", "a") == f"the tokenizer in {model} {needs}"
    assert refused("spectrum", run, "--text", tmp_path / "text.txt") == f"MODEL is '{run}', which {needs}"
    name_code("config.json", model_type="own", auto_map={"AutoConfig": "code.Own"})
    assert refused("predict", run, "a", input="y\n") == (
        f"{model} cannot be loaded: it is a model of type 'own', not a Linformer; its own code is never run"
    )


# Weights & Biases


def wandb_records(path):
    """The records of an offline run: blocks of 32 KiB with parts of (checksum, length, kind), after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the only part of a record, or the last
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def offline_artifacts(run):
    """The artifacts of all offline runs in a run directory, oldest first."""
    paths = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    records = [record for path in paths for record in wandb_records(path)]
    return [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]


def train_offline(path, before="", code=0):
    """Train with W&B offline, in a process that first executes `before`; returns what it prints."""
    pytest.importorskip("wandb")
    script = f"import os, signal, sys\nfrom linformer_kit import cli\n{before}\ncli.app(sys.argv[1:])"
    done = fork_server.run(
        [sys.executable, "-c", script, "train", str(path)],
        cwd=path.parent,
        env=environment(WANDB_MODE="offline", WANDB_SILENT="true"),
        encoding="utf-8",
    )
    assert done.returncode == code, done.stderr
    return done.stdout


STOP_AT_3 = """
from linformer_kit.training.trainer import FlowCallback

on_step_end = FlowCallback.on_step_end

def stop(self, args, state, control, **kwargs):
    if state.global_step == 3:
        self.signal = signal.SIGTERM
    on_step_end(self, args, state, control, **kwargs)

FlowCallback.on_step_end = stop
"""


def test_checkpoints_and_the_model_are_artifacts_and_a_resumed_run_continues(tmp_path, quick, monkeypatch):
    settings = {"training.report": "wandb", "training.evaluate_every": 2, "training.keep": 1}
    path, run = quick("classification", tmp_path, **settings), tmp_path / "run"
    train_offline(path, STOP_AT_3, code=143)
    printed = train_offline(path)

    artifacts = offline_artifacts(run)
    steps = ["step-2", "step-3", "step-4", "final"]
    assert [sorted(artifact.aliases) for artifact in artifacts] == [sorted([each, "latest"]) for each in steps]
    (name,) = {artifact.name for artifact in artifacts}
    assert f"W&B artifact: wandb:ENTITY/linformer-kit/{name}:final" in printed
    assert {artifact.run_id for artifact in artifacts} == {(run / "wandb" / "id.txt").read_text()}
    assert json.loads(artifacts[-1].metadata) == read_json(run / "result.json")
    assert not (run / "checkpoints" / "checkpoint-3").exists()  # its artifact has copies

    # the server, which cannot run here, would return the files of the manifest
    versions = {f"me/linformer-kit/{name}:{alias}": number for number, alias in enumerate(steps)}

    def get(name):
        def download(root):
            for entry in artifacts[versions[name]].manifest.contents:
                (Path(root) / entry.path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(entry.local_path, Path(root) / entry.path)

        return SimpleNamespace(version=f"v{versions[name]}", download=download)

    monkeypatch.setattr("wandb.Api", lambda: SimpleNamespace(artifact=get))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    source = f"wandb:me/linformer-kit/{name}"
    command("evaluate", run)
    printed = command("evaluate", f"{source}:final").stderr
    place = tmp_path / "home" / ".cache" / "linformer-kit" / "wandb" / "me" / "linformer-kit" / name
    assert f"Written: {place / 'v3' / 'evaluation.json'}" in printed
    assert read_json(place / "v3" / "evaluation.json") == read_json(run / "evaluation.json")
    command("evaluate", f"{source}:step-2", "--split", "validation")
    found = read_json(place / "v0" / "evaluation-checkpoint-2.json")
    assert found["loss"] == pytest.approx(validation_loss(run, step=2))
    assert answers(f"{source}:final", "a fine river") == answers(run, "a fine river")
    assert answers(f"{source}:step-3", "a fine river") != answers(run, "a fine river")


def validation_loss(run, step):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line["validation_loss"] for line in lines if line["step"] == step and "validation_loss" in line)


KILL_THE_SERVICE = """
import psutil
from linformer_kit.training.wandb_report import WandbReport

on_save = WandbReport.on_save

def kill(self, *args, **kwargs):
    for process in psutil.Process().children(recursive=True):
        process.kill()
    on_save(self, *args, **kwargs)

WandbReport.on_save = kill
"""


def test_training_continues_when_the_service_of_wandb_has_ended(tmp_path, quick):
    settings = {"training.report": "wandb", "training.evaluate_every": 2}
    printed = train_offline(quick("classification", tmp_path, **settings), KILL_THE_SERVICE)
    assert printed.count("Reporting to W&B failed") == 1
    assert read_json(tmp_path / "run" / "result.json")["steps"] == 4


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("me/project", "is not the name of an artifact; write wandb:ENTITY/PROJECT/ARTIFACT:ALIAS"),
        ("../../me/a:final", "is not the name of an artifact"),
        ("me/project/a:final", "could not be downloaded (no such artifact); check the name"),
        ("me/project/data:final", "is not an artifact of `linformer train`: it has no config.yaml"),
    ],
)
def test_an_artifact_that_cannot_be_evaluated_is_named(tmp_path, monkeypatch, name, said):
    pytest.importorskip("wandb")

    def get(name):
        if not name.startswith("me/project/data"):
            raise ValueError("no such artifact")
        return SimpleNamespace(version="v0", download=lambda root: Path(root, "table.csv").touch())

    monkeypatch.setattr("wandb.Api", lambda: SimpleNamespace(artifact=get))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert refused("evaluate", f"wandb:{name}").startswith(f"wandb:{name} {said}")


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tool_that_is_not_installed_is_named_with_its_extra(tmp_path, quick, monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    assert refused("train", quick("classification", tmp_path), f"training.report=[{name}]") == (
        f'training.report has {name}, which is not installed; pip install "linformer-kit[{name}]", or set '
        "training.report=none"
    )
