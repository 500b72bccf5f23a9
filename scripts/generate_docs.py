"""Write the generated parts of the documents: docs/configuration.md, and the file tree of docs/architecture.md.

`make docs` runs it; tests compare the documents with what it would write.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from linformer_kit.training.config_page import reference_page

ROOT = Path(__file__).parent.parent
TREE_BEGIN = "<!-- tree: written by `make docs` from the first sentence of each docstring -->"
TREE_END = "<!-- tree: end -->"
DIRECTORIES = ("src/linformer_kit", "benchmarks", "examples", "scripts", "tests", "docs")
COLUMN = 38  # where descriptions begin
WIDTH = 120


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, without its period."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<! et al)\.(?: |$)", paragraph, maxsplit=1)[0]


def description(path: Path) -> str:
    """One line about a file or package: from its docstring, its heading, or its first comment."""
    if path.is_dir():
        path = path / "__init__.py"
        if not path.is_file():
            return ""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return first_sentence(ast.get_docstring(ast.parse(text)) or "")
    found = re.search(r"^# (.*)$" if path.suffix in (".md", ".yaml") else r"<!-- (.*?) -->", text, flags=re.MULTILINE)
    return first_sentence(found[1]) if found else ""


def is_listed(path: Path) -> bool:
    if path.is_dir():
        return not path.name.startswith((".", "__")) and any(is_listed(inside) for inside in path.iterdir())
    return path.suffix in (".py", ".yaml", ".md", ".html") and path.name != "__init__.py"


def tree_lines(directory: Path, indent: str = "") -> Iterator[str]:
    """The lines of a directory's content; packages after modules, each followed by its own content."""
    entries = sorted(filter(is_listed, directory.iterdir()), key=lambda path: (path.is_dir(), path.name))
    for number, path in enumerate(entries, start=1):
        is_last = number == len(entries)
        name = f"{indent}{'└── ' if is_last else '├── '}{path.name}{'/' if path.is_dir() else ''}"
        below = indent + ("    " if is_last else "│   ")
        yield from entry_lines(name, description(path), below + ("│" if path.is_dir() else ""))
        if path.is_dir():
            yield from tree_lines(path, below)


def entry_lines(name: str, text: str, below: str) -> Iterator[str]:
    """A name and its description, wrapped into the column of descriptions."""
    first, *rest = textwrap.wrap(text, WIDTH - COLUMN) or [""]
    yield f"{name:{COLUMN - 1}} {first}".rstrip()
    for line in rest:
        yield f"{below:{COLUMN}}{line}"


def file_tree() -> str:
    lines = []
    for name in DIRECTORIES:
        lines += [*entry_lines(f"{name}/", description(ROOT / name), "│"), *tree_lines(ROOT / name)]
    return "\n".join(lines)


def architecture_page(text: str) -> str:
    """docs/architecture.md with the present file tree."""
    begin, rest = text.split(TREE_BEGIN)
    return f"{begin}{TREE_BEGIN}\n```text\n{file_tree()}\n```\n{TREE_END}{rest.split(TREE_END)[1]}"


def main() -> None:
    (ROOT / "docs" / "configuration.md").write_text(reference_page(), encoding="utf-8")
    page = ROOT / "docs" / "architecture.md"
    page.write_text(architecture_page(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
