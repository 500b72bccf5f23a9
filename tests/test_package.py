"""The package as a whole: imports point one way, `import linformer_kit` is fast, documents and CI match the code."""

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
import yaml
from generate_docs import architecture_page, description, file_tree
from mutations import MUTATIONS, mutated
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from training_zoo import linformer

import linformer_kit
from linformer_kit.bench.paper_table import ROWS, format_cell

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "linformer_kit"
# the rooms of this package that each room may import
SHARED = {"csv_tables", "errors", "files", "formatting", "process_memory", "schema", "yaml_loader"}
MAY_IMPORT = {
    "models": {"models"},
    **{name: {"models", *SHARED} for name in SHARED},
    "plots": {"plots", "models", *SHARED},
    "convert": {"convert", "models", *SHARED},
    "precision": {"models", *SHARED},
    "bench": {"bench", "training", "precision", "plots", "models", "keras", "__init__", *SHARED},
    "training": {"training", "precision", "plots", "models", *SHARED},
    "analysis": {"analysis", "training", "plots", "models", *SHARED},
    "report": {"report", "analysis", "training", "bench", "plots", "models", "__init__", *SHARED},
    "demo": {"demo", "training", "bench", "plots", "models", *SHARED},
    "keras": {"keras", "models", "__init__"},
    "reference": set(),
    "cli": {"convert", "training", "bench", "demo", "report", "analysis", "models", "__init__", *SHARED},
    "__init__": {"models", "convert", "plots"},
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
    """transformers saves the modules of a model with a checkpoint; it finds them by `from .sibling import name`."""
    for path in (SOURCE / "models").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1
                assert node.module


def test_no_auto_class_may_run_the_code_of_a_model():
    """Without the argument, transformers asks the user whether to run it."""
    found = 0
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and re.search(r"\bAuto\w+\.from_pretrained$", ast.unparse(node.func)):
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert options.get("trust_remote_code") == "False" or options.get(None) == "safe", ast.unparse(node)
                found += 1
    assert found > 4


def test_the_import_loads_no_heavy_package():
    heavy = "{'torch', 'numpy', 'transformers', 'matplotlib', 'typer'}"
    code = f"import linformer_kit, sys; print(*{heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.bug)
def test_a_mutation_applies_and_selects_a_test(mutation):
    """Renaming a test or editing a line must not silently disable a mutation."""
    assert mutated(ROOT, mutation), f"the snippet does not occur exactly once in {mutation.file}"
    files = [ROOT / name.split("::")[0] for name in mutation.tests.split()]
    names = re.findall(r"def (test_\w+)", "".join(path.read_text() for path in files if path.exists()))
    words = re.findall(r"(?<!not )\b(?!or\b|and\b|not\b)\w+", mutation.only)
    assert names
    assert not words or any(word in name for word in words for name in names)


def test_the_page_about_the_paper_quotes_code_that_exists():
    page = (ROOT / "docs" / "paper-to-code.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests/)?[\w/]+\.py)`: ((?:(?:, | and )?`[\w.]+`)+)", page)
    assert len(named) > 15
    for file, names in named:
        text = (ROOT / file if file.startswith("tests/") else SOURCE / file).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", names):
            assert re.search(rf"(def|class) {name.split('.')[-1]}\b", text), f"{file} has no {name}"
    (quoted,) = re.findall(r"The layer first applies E.*?```text\n(.*?)```", page, re.DOTALL)
    code = "".join((SOURCE / "models" / f"{name}_linformer.py").read_text() for name in ("attention", "multihead"))
    for line in quoted.split("\n"):
        assert line in code


def test_every_public_name_is_documented_and_every_callable_has_an_example():
    for name in linformer_kit._HOMES:
        public = getattr(linformer_kit, name)
        assert public.__doc__, name
        assert name in dir(linformer_kit)
    for name in set(linformer_kit._HOMES) - {"Plan", "CausalCache"}:  # results of calls
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
@pytest.mark.usefixtures("own_projections")
def test_the_code_in_the_documents_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(block, {"__name__": "__main__"})


def test_the_file_tree_of_the_documents_is_up_to_date():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert page == architecture_page(page), "docs/architecture.md is out of date: make docs"


@pytest.mark.parametrize("folder", ["src/linformer_kit", "benchmarks", "examples", "scripts", "tests"])
def test_the_file_tree_names_every_module_and_every_module_says_what_it_is(folder):
    named = re.findall(r"(?:├──|└──) ([\w.-]+)(?= |$)", file_tree(), flags=re.MULTILINE)
    for path in (ROOT / folder).rglob("*.py"):
        assert path.name == "__init__.py" or path.name in named, path
        assert description(path), f"{path} has no docstring"


def test_the_api_reference_names_every_public_name():
    listed = re.findall(r"^linformer_kit\.[\w.]+$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    keras_init = ast.parse((SOURCE / "keras" / "__init__.py").read_text())
    keras_names = next(
        ast.literal_eval(node.value)
        for node in keras_init.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    public = [f"linformer_kit.{name}" for name in linformer_kit.__all__ if name != "__version__"]
    assert sorted(listed) == sorted([*public, *(f"linformer_kit.keras.{name}" for name in keras_names)])


def test_the_workflow_runs_the_commands_of_ci():
    commands = re.findall(r"^make (\w+)$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    check = workflow["jobs"]["check"]
    assert sorted(check["strategy"]["matrix"]["target"]) == sorted(commands)
    assert {"run": "make ${{ matrix.target }}"} in check["steps"]


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readme_fits_on_a_few_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_lines_of_prose_are_at_most_120_wide(path):
    text = re.sub(r"^```text\n.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    # neither the output of a program nor rows of tables can be wrapped
    wide = [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert wide == []


@pytest.mark.parametrize("directory", ["src", "benchmarks", "docs", "examples", "scripts", "tests", ".github"])
def test_lines_of_code_are_at_most_120_wide(directory):
    paths = [path for path in (ROOT / directory).rglob("*") if path.suffix in (".py", ".yaml", ".yml")]
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > 120  # unlike ruff, pragmas count
    ]
    assert (bool(paths), wide) == (True, [])


# tables of measurements are those with "measured" or "milliseconds" in their heading
FIGURES = re.compile(r"^\| [^\n]*\b(?:measured|milliseconds)\b[^\n]*\n\|[-| ]+\n((?:\|.*\n)+)", flags=re.MULTILINE)


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sections(text):
    """A document, split at its headings."""
    return re.split(r"^#+ ", text, flags=re.MULTILINE)


def figure_tables():
    for path in DOCUMENTS[1:]:  # the README has a test of its own
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


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*_targets.csv")), ids=lambda path: path.stem)
def test_every_target_is_published_whether_met_or_missed(path):
    lines = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    published = {line.strip("| ") for line in lines}
    assert [row for row in rows_of(path) if " | ".join(row.values()) not in published] == []


def test_each_number_of_the_readme_is_in_the_csv_that_its_row_cites():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^\[([\w.]+)\]: (results/\S+\.csv)$", text, flags=re.MULTILINE))
    lines = FIGURES.search(text)[1].splitlines()
    assert 0 < len(lines) <= 6
    measured = set()
    for line in lines:
        *cells, source = (cell.strip() for cell in line.strip("|").split("|"))
        rows = rows_of(ROOT / files[re.match(r"\[([\w.]+)\], `.+`$", source)[1]])
        found = [row for row in rows if {cell for cell in cells if cell != "–"} <= set(row.values())]
        assert len(found) == 1, line
        measured |= set(found[0].values())
    # and those in the prose
    for number in re.findall(r"\d+\.\d+(?= ?[%×])", text):
        assert any(re.search(rf"\b{number}\b", value) for value in measured), number


def test_the_papers_table_in_the_documents_is_the_one_that_was_measured():
    cells = rows_of(ROOT / "results" / "paper_table_3_cells.csv")
    text = (ROOT / "docs" / "compare.md").read_text()
    for saved in ("time", "memory"):
        table = re.search(rf"^\| N \| {saved} saved[^\n]*\n\|[-| ]+\n((?:\|.*\n)+)", text, flags=re.MULTILINE)[1]
        quoted = {tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in table.splitlines()}
        by_place = {(int(cell["n"]), int(cell["k"])): cell for cell in cells if cell["saved"] == saved}
        measured = {
            (f"{length:,}", *(format_cell(by_place.get((length, rows))) for rows in ROWS))
            for length in sorted({length for length, _ in by_place})
        }
        assert quoted == measured


@pytest.mark.slow
def test_make_figures_draws_every_picture_of_the_documents(tmp_path):
    """Runs the commands of the Makefile on a copy of results/ without pictures."""
    results = tmp_path / "results"
    shutil.copytree(ROOT / "results", results, ignore=shutil.ignore_patterns("*.png", "*.svg"))
    recipe = (ROOT / "Makefile").read_text().split("\nfigures:")[1].split("\n\n")[0].splitlines()[1:]
    for line in recipe:
        program, *arguments = line.replace("results/", f"{results}/").split()
        assert program == "$(BIN)/linformer"
        linformer(*arguments, cwd=ROOT)
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
    assert kept <= drawn  # every committed picture can be drawn again


def test_changelog_and_citation_have_the_version():
    assert f"## [{linformer_kit.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {linformer_kit.__version__}" in (ROOT / "CITATION.cff").read_text()


def unpinned_requirements(name, extras, pins, seen):
    """Direct and indirect dependencies of a distribution that neither the constraints nor a dependency pins."""
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
    assert "hatchling" in pins  # the build backend
