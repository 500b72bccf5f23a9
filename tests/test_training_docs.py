"""The documents about training: the reference is up to date, every YAML is valid, every command works as shown."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from training_zoo import environment, linformer

from linformer_kit.bench.study_tables import load_tables
from linformer_kit.bench.sweep import read_sweep
from linformer_kit.cli import app
from linformer_kit.training.config import load_config, shipped_configs
from linformer_kit.training.config_page import model_reference, reference, reference_page
from linformer_kit.training.run import CHANGEABLE_KEYS, flatten_keys
from linformer_kit.yaml_loader import parse_yaml

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))


def keys() -> set[str]:
    """All keys of the reference."""
    return {row[0] for row in (*reference(), *model_reference())}


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_the_page_is_up_to_date():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference_page(), "docs/configuration.md is out of date: make docs"


def test_the_page_has_every_key_once():
    rows = re.findall(r"^\| `([\w.]+)` \|", reference_page(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(keys())


@pytest.mark.parametrize("name", list(shipped_configs()))
def test_every_key_of_a_shipped_configuration_is_in_the_reference(name):
    tree = yaml.safe_load(shipped_configs()[name].read_text(encoding="utf-8"))
    assert {key for key, _ in flatten_keys(tree)} <= keys() | {"base"}
    assert load_config(name).run == f"runs/{name}"


def test_the_features_list_the_shipped_configurations_and_the_commands():
    features = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    table = features.split("## Shipped configurations")[1].split("\n#")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(shipped_configs())
    table = features.split("## Commands")[1].split("\n#")[0]
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert re.findall(r"^\| `linformer (\w+)", table, flags=re.MULTILINE) == commands


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{path.name}-{number}")
        for path in DOCS
        for number, block in enumerate(blocks(path, "yaml"), start=1)
    ],
)
def test_every_yaml_in_the_documents_is_a_configuration_a_sweep_or_a_study(block, tmp_path):
    keys = parse_yaml(block, "the document")
    if "targets" in keys:
        assert read_sweep(keys).targets
    elif "task" in keys or "base" in keys:
        (tmp_path / "document.yaml").write_text(block, encoding="utf-8")
        assert load_config(tmp_path / "document.yaml").task
    else:
        (tmp_path / "study.yaml").write_text(block)
        assert load_tables(tmp_path / "study.yaml")


def test_what_may_change_between_sessions_is_listed():
    text = (ROOT / "docs" / "reproducibility.md").read_text(encoding="utf-8")
    section = text.split("## What may change between sessions")[1].split("To train longer")[0]
    assert {name for name in re.findall(r"`([\w.]+)`", section) if name in keys()} == CHANGEABLE_KEYS


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS], ids=lambda path: path.name
)
def test_every_link_leads_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file) if file else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), target


def prose(page: Path) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings: lower case, spaces to dashes, no punctuation."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(block: str) -> list[str]:
    """The commands of a block: its lines, each with its document for standard input."""
    return re.findall(r"^.*<<'END'\n(?:.*\n)*?END$|^.+$", block, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart.md", "own-data.md"])
def test_the_commands_run_and_the_errors_are_those_shown(name, tmp_path):
    page = ROOT / "docs" / name
    found = [each for block in blocks(page, "bash") for each in commands(block)]
    assert len(found) > 5
    home = {"HOME": str(tmp_path / "home")}  # where the cache is
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    folder = tmp_path / "empty"
    folder.mkdir()
    said, is_first = "", name == "quickstart.md"
    for each in found:
        # `linformer` is forked, but for the first of the quickstart, because a process imports for many seconds
        plain = re.fullmatch(r"(linformer [^|<>&$]*?)( > \S+)?( \|\| true)?", each)
        if plain and not is_first:
            done = linformer(*shlex.split(plain[1], comments=True)[1:], cwd=folder, env=home, check=False)
            succeeded = done.returncode == (2 if plain[3] else 0)
            if plain[2]:
                (folder / plain[2].removeprefix(" > ")).write_text(done.stdout, encoding="utf-8")
                done.stdout = ""
        else:
            shell = ["bash", "-euo", "pipefail", "-c", each]
            own = environment(**home, **path)
            done = subprocess.run(shell, cwd=folder, env=own, capture_output=True, text=True, timeout=300)
            succeeded = done.returncode == 0
        is_first = is_first and not plain
        said += done.stdout + done.stderr
        assert succeeded, f"{each}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        assert "Traceback" not in done.stderr
    shown = [line for block in blocks(page, "text") for line in block.splitlines()]
    assert [line for line in shown if line.removesuffix("…") not in said] == []  # "…": the rest is left out
    for run in re.findall(r"^Model in (\S+),", said, flags=re.MULTILINE):
        assert (folder / run / "model.safetensors").is_file()
