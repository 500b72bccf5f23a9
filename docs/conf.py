"""Sphinx configuration of the documentation site: `make docs`.

The source directory is the repository, so that relative links between documents, results and sources work on the site
as they do on a code host.
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]
os.environ.setdefault("KERAS_BACKEND", "torch")

from linformer_kit import __version__  # noqa: E402 — after the path is set

project = "linformer-kit"
author = "The linformer-kit authors"
release = __version__
extensions = ["myst_parser", "api_directive"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md"]
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "docs"]
# anchors like those of GitHub
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"linformer-kit {release}"
html_copy_source = False
smartquotes = False
# a page may skip a heading level
suppress_warnings = ["myst.header"]
pygments_style = "friendly"
pygments_dark_style = "monokai"

NAVIGATION = {
    "Start": ["docs/index", "docs/quickstart", "docs/own-data", "docs/features"],
    "Train": [
        *("docs/classification", "docs/masked-lm", "docs/causal-lm", "docs/translation", "docs/denoising"),
        *("docs/configuration", "docs/distributed", "docs/reproducibility"),
    ],
    "Models": [
        *("docs/encoders", "docs/speed", "docs/quantization", "docs/encoder-decoder", "docs/switching"),
        *("docs/keras", "docs/keras-multiheadattention", "docs/api"),
    ],
    "Measure": [
        *("docs/compare", "docs/study", "docs/plots", "docs/spectrum"),
        *("docs/benchmarks", "docs/results", "docs/log"),
    ],
    "Background": ["docs/mathematics", "docs/paper-to-code"],
    "Develop": ["docs/architecture", "CONTRIBUTING", "CHANGELOG", "SECURITY"],
}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)\)")


def prepare_source(app, name: str, source: list[str]) -> None:
    """Add the navigation to the home page, and write links to directories as plain text, since the site has none."""
    directory = (ROOT / name).parent
    source[0] = LINK.sub(lambda link: link[1] if (directory / link[2]).is_dir() else link[0], source[0])
    if name == root_doc:
        for caption, pages in NAVIGATION.items():
            listing = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listing}\n```\n"


def write_index(app, exception: Exception | None) -> None:
    """The entry of the site, which leads to the home page."""
    if exception is None:
        text = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        (Path(app.outdir) / "index.html").write_text(text, encoding="utf-8")


def setup(app) -> None:
    app.connect("source-read", prepare_source)
    app.connect("build-finished", write_index)
