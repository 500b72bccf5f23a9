"""The house: imports point one way, `import linformer_kit` is quick, documents say what is true."""

import ast
import csv
import re
import shutil
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import linformer_kit
from linformer_kit.bench.paper_table import ROWS, in_words

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "linformer_kit"
# what each room may import of ours
SHARED = {"csv_tables", "errors", "files", "formatting", "process_memory", "schema", "yaml_loader"}
MAY_IMPORT = {
    "models": {"models"},
    **{name: {"models", *SHARED} for name in SHARED},
    "plots": {"plots", "models", *SHARED},
    "bench": {"bench", "plots", "models", "keras", "__init__", *SHARED},
    "training": {"training", "plots", "models", *SHARED},
    "analysis": {"analysis", "training", "plots", "models", *SHARED},
    "report": {"report", "analysis", "training", "bench", "plots", "models", "__init__", *SHARED},
    "demo": {"demo", "training", "bench", "plots", "models", *SHARED},
    "keras": {"keras", "models", "__init__"},
    "reference": set(),
    "cli": {"training", "bench", "demo", "report", "analysis", "models", "__init__", *SHARED},
    "__init__": {"models"},
}


def our_imports(path):
    """The rooms of this package that a file imports from."""
    package = ["linformer_kit", *path.relative_to(SOURCE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            names = [".".join([*start, *([node.module] if node.module else [alias.name])]) for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "linformer_kit":
                yield "__init__" if len(parts) == 1 or parts[1].startswith("__") else parts[1]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert set(our_imports(path)) <= MAY_IMPORT[room]


def test_models_import_siblings_only():
    """What travels with a checkpoint is found by `from .sibling import name`."""
    for path in (SOURCE / "models").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1
                assert node.module


def test_the_import_is_quick():
    code = "import linformer_kit, sys; print(*{'torch', 'numpy', 'transformers', 'matplotlib', 'typer'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_every_public_name_is_there_and_documented_and_what_one_calls_has_an_example():
    for name in linformer_kit._HOMES:
        public = getattr(linformer_kit, name)
        assert public.__doc__, name
        assert name in dir(linformer_kit)
    for name in set(linformer_kit._HOMES) - {"Plan", "CausalCache"}:  # which one gets, not makes
        assert ">>>" in getattr(linformer_kit, name).__doc__, name
    with pytest.raises(AttributeError, match="LinformerAttentoin"):
        linformer_kit.LinformerAttentoin  # noqa: B018


def python_blocks():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, block in enumerate(
            re.findall(r"^ *```python\n(.*?)```", path.read_text(), flags=re.DOTALL | re.MULTILINE), start=1
        ):
            yield pytest.param(textwrap.dedent(block), id=f"{path.name}-{number}")


@pytest.mark.parametrize("block", list(python_blocks()))
def test_the_code_in_the_documents_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(block, {"__name__": "__main__"})


def test_the_file_tree_in_the_readme_is_the_file_tree():
    tree = (ROOT / "README.md").read_text().split("## The file tree")[1].split("```")[1]
    named = set(re.findall(r"[\w.-]+(?:/|\.\w+)(?= )", tree)) | set(re.findall(r"(?:├──|└──) ([\w./-]+)", tree))
    for path in [
        *SOURCE.rglob("*.py"),
        *(ROOT / "tests").glob("*.py"),
        *(ROOT / "benchmarks").glob("*.py"),
        *(ROOT / "docs").glob("*.md"),
    ]:
        if path.name != "__init__.py":
            assert path.name in named, f"{path.relative_to(ROOT)} is not in the README's file tree"
    present = {
        path.name for folder in ("src", "tests", "benchmarks", "docs", ".") for path in (ROOT / folder).rglob("*.*")
    }
    assert {name for name in named if re.search(r"\.(py|md)$", name)} <= present


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# the tables of figures are those whose heading says so
FIGURES = re.compile(r"^\| [^\n]*\b(?:measured|milliseconds)\b[^\n]*\n\|[-| ]+\n((?:\|.*\n)+)", flags=re.MULTILINE)


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sections(text):
    """A document in pieces, cut at its headings."""
    return re.split(r"^#+ ", text, flags=re.MULTILINE)


def figure_tables():
    for path in DOCUMENTS:
        for section in sections(path.read_text()):
            for number, table in enumerate(FIGURES.findall(section), start=1):
                title = section.splitlines()[0]
                yield pytest.param(path, section, table, id=f"{path.name}-{title}-{number}")


@pytest.mark.parametrize(("path", "section", "table"), list(figure_tables()))
def test_the_figures_of_a_table_are_those_of_the_csv_that_its_section_cites(path, section, table):
    cited = re.findall(r"[\w/]*results/([\w/]+\.csv)", section)
    assert cited, f"the table in {path.name} cites no CSV in its section"
    measured = {" | ".join(row.values()) for name in cited for row in rows_of(ROOT / "results" / name)}
    quoted = {row.strip("| ") for row in table.splitlines()}
    assert quoted <= measured


def test_the_papers_table_in_the_documents_is_the_one_that_was_measured():
    cells = rows_of(ROOT / "results" / "paper_table_3_cells.csv")
    text = (ROOT / "docs" / "compare.md").read_text()
    for saved in ("time", "memory"):
        table = re.search(rf"^\| N \| {saved} saved[^\n]*\n\|[-| ]+\n((?:\|.*\n)+)", text, flags=re.MULTILINE)[1]
        quoted = {tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in table.splitlines()}
        by_place = {(int(cell["n"]), int(cell["k"])): cell for cell in cells if cell["saved"] == saved}
        measured = {
            (f"{length:,}", *(in_words(by_place.get((length, rows))) for rows in ROWS))
            for length in sorted({length for length, _ in by_place})
        }
        assert quoted == measured


@pytest.mark.slow
def test_make_figures_draws_every_picture_of_the_documents(tmp_path):
    """The commands of the Makefile, on a copy of the CSVs from which all pictures were removed."""
    results = tmp_path / "results"
    shutil.copytree(ROOT / "results", results, ignore=shutil.ignore_patterns("*.png", "*.svg"))
    recipe = (ROOT / "Makefile").read_text().split("\nfigures:")[1].split("\n\n")[0].splitlines()[1:]
    for line in recipe:
        command = line.replace("$(BIN)", str(Path(sys.executable).parent)).replace("results/", f"{results}/").split()
        if "benchmarks/" in line:
            command += ["--output", str(results)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    shown = {
        picture
        for path in DOCUMENTS
        for picture in re.findall(r"\]\((?:\.\./)?results/([\w/]+\.(?:png|svg))\)", path.read_text())
    }
    drawn = {str(path.relative_to(results)) for path in results.rglob("*") if path.suffix in (".png", ".svg")}
    kept = {
        str(path.relative_to(ROOT / "results"))
        for path in (ROOT / "results").rglob("*")
        if path.suffix in (".png", ".svg")
    }
    assert len(shown) > 5
    assert shown <= drawn
    assert kept <= drawn  # nothing lies there that nobody can draw again


def test_changelog_and_citation_tell_the_version():
    assert f"## [{linformer_kit.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {linformer_kit.__version__}" in (ROOT / "CITATION.cff").read_text()


def unpinned_requirements(name, extras, pins, seen):
    """What a distribution needs, and what that needs in turn, that neither our constraints nor itself pin."""
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        needed = requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        wanted = canonicalize_name(requirement.name)
        if not needed or (wanted, *sorted(requirement.extras)) in seen:
            continue
        seen.add((wanted, *sorted(requirement.extras)))
        pinned_there = any(specifier.operator == "==" for specifier in requirement.specifier)
        if wanted not in pins and wanted != "linformer-kit" and not pinned_there:
            yield wanted
        yield from unpinned_requirements(wanted, ["", *requirement.extras], pins, seen)


def test_every_dependency_is_pinned():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert "torch==2.13.0" in lines
    pins = {canonicalize_name(line.split("==")[0]) for line in lines}
    assert list(unpinned_requirements("linformer-kit", ["", "dev"], pins, set())) == []
    assert "hatchling" in pins  # what builds it
