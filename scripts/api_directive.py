"""Sphinx directive `api`: the reference of public names, from their docstrings.

Unlike autodoc, which expects reStructuredText, it reads docstrings as the Markdown they are.
"""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

# a doctest, from a prompt to the next blank line
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", flags=re.MULTILINE)


def markdown_docstring(thing: Any) -> str:
    """A docstring with its doctests in code blocks; Markdown would read them as quotations."""
    text = inspect.getdoc(thing) or ""
    return text if "```" in text else EXAMPLE.sub(r"\n```pycon\n\g<0>\n```\n", text)


def signature(thing: Any) -> str:
    """The parameters of a function or class, without `self` and annotations."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:
        return "()"
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature([parameter for parameter in bare if parameter.name != "self"]))


def documented_members(thing: type) -> Iterator[tuple[str, str, Any]]:
    """Kind, name and value of the methods and properties that a class defines and documents."""
    for name, member in vars(thing).items():
        value = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if name.startswith("_") or not (isinstance(value, property) or inspect.isfunction(value)):
            continue
        if value.__doc__:
            yield ("property" if isinstance(value, property) else "method"), name, value


def reference(path: str) -> str:
    """The Markdown of one public name, such as `linformer_kit.LinformerAttention`."""
    module, name = path.rsplit(".", 1)
    thing = getattr(import_module(module), name)
    kind = "class" if isinstance(thing, type) else "function"
    lines = [f"`````{{py:{kind}}} {path}{signature(thing)}", "", markdown_docstring(thing), ""]
    if isinstance(thing, type):
        for member_kind, member, value in documented_members(thing):
            shown = member if member_kind == "property" else f"{member}{signature(value)}"
            lines += [f"````{{py:{member_kind}}} {shown}", "", markdown_docstring(value), "````", ""]
    return "\n".join([*lines, "`````"])


class Api(SphinxDirective):
    """The reference of the names in its content, one per line."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        return [node for path in self.content for node in self.parse_text_to_nodes(reference(path))]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("api", Api)
    return {"parallel_read_safe": True}
