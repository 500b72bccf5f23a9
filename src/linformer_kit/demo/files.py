"""The demo's data: pieces of files that every Python installation has, labelled by kind, split by package.

The name of a file proposes its kind, its content has to confirm it, and the model sees neither: only the bytes of a piece.
All files of a package are in the same split, and what occurs in an earlier split, exactly or nearly, is left out of a later one.
So what is tested are files of packages of which training has seen nothing.
"""

import gzip
import hashlib
import json
import os
import random
import re
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from .kinds import KINDS

WINDOW = 4094  # tokens of an example, at most; with one for its start and one for its end, what the model takes
SHORTEST = 512  # bytes of a file; in less there is little to see
CHECKED = 2**19  # bytes by which a kind is confirmed; a longer text does not parse and is left out
COPIED = 0.5  # share of lines that makes a window a copy
SPLITS = ("train", "validation", "test")


# where the files are


class Source(NamedTuple):
    """A file, the package it belongs to, and a name that is the same on every computer."""

    path: str
    package: str
    name: str


def installation() -> Iterator[Source]:
    """The files of this Python: standard library, headers of C, and what is installed with it."""
    paths = sysconfig.get_paths()
    yield from library_sources(Path(paths["stdlib"]))
    yield from folder_sources(Path(paths["include"]), "include", lambda _: "python/include")
    for site in sorted({Path(paths[name]).resolve() for name in ("purelib", "platlib")}):
        yield from site_sources(site)


def library_sources(stdlib: Path) -> Iterator[Source]:
    """The standard library: each folder is a package; the modules that are single files are one together."""

    def package(parts: tuple[str, ...]) -> str:
        return f"python/{parts[0] if parts[1:] and parts[0] != '__pycache__' else 'modules'}"

    return folder_sources(stdlib, "python", package)


def site_sources(site: Path) -> Iterator[Source]:
    """What is installed: a package is a distribution, whatever folders it has."""
    owners = owners_of(site)
    return folder_sources(site, "site-packages", lambda parts: owners.get(top_of(parts), top_of(parts)))


def folder_sources(folder: Path, name: str, package: Callable[[tuple[str, ...]], str]) -> Iterator[Source]:
    """The files below a folder, always in the same order. Our own are left out, so that the demo can be shown itself."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "linformer_kit"})
        above = Path(root).relative_to(folder).parts
        for file in sorted(files):
            yield Source(os.path.join(root, file), package((*above, file)), "/".join((name, *above, file)))


def top_of(parts: tuple[str, ...]) -> str:
    """The entry of site-packages below which a file stands; byte code of a single module stands beside it.

    >>> top_of(("torch", "nn", "init.py")), top_of(("__pycache__", "six.cpython-311.pyc"))
    ('torch', 'six.py')
    """
    return parts[1].split(".")[0] + ".py" if parts[0] == "__pycache__" and parts[1:] else parts[0]


def owners_of(site: Path) -> dict[str, str]:
    """The distribution of each entry of site-packages. Those that share an entry, as `google`, count as one."""
    owners: dict[str, str] = {}
    for distribution in sorted(distributions(path=[str(site)]), key=lambda found: found.name):
        files = (distribution.read_text("RECORD") or "").splitlines()
        entries = sorted(
            {top_of(PurePosixPath(line.rsplit(",", 2)[0]).parts) for line in files} - {"..", "__pycache__"}
        )
        owner = next((owners[entry] for entry in entries if entry in owners), distribution.name)
        for entry in entries:
            owners.setdefault(entry, owner)
    return owners


# examples


@dataclass(frozen=True)
class Example:
    """A piece of a file; its bytes are characters, as Latin-1 has them."""

    text: str
    label: str
    package: str
    file: str


@dataclass
class Found:
    """The examples of each split, and why kinds are missing."""

    splits: dict[str, list[Example]]
    left_out: dict[str, str] = field(default_factory=dict)

    def count(self, kind: str, split: str) -> int:
        """How many examples."""
        return sum(example.label == kind for example in self.splits[split])

    def packages(self, kind: str, split: str) -> set[str]:
        """The packages they come from."""
        return {example.package for example in self.splits[split] if example.label == kind}

    @property
    def kinds(self) -> list[str]:
        """The kinds that there are, in our order."""
        present = {example.label for example in self.splits["train"]}
        return [kind for kind in KINDS if kind in present]


@dataclass(frozen=True)
class Wanted:
    """How much is gathered. A package counts in one split only; `shares` says how many go where."""

    examples: dict[str, int] = field(default_factory=lambda: {"train": 400, "validation": 60, "test": 100})
    least: dict[str, int] = field(default_factory=lambda: {"train": 120, "validation": 10, "test": 20})
    shares: dict[str, float] = field(default_factory=lambda: {"train": 0.65, "validation": 0.15, "test": 0.2})
    least_packages: int = 6
    windows_per_file: int = 16
    heaviest: int = 20  # windows of a package and kind that count when packages are shared out
    seed: int = 2020


def gather(
    sources: Iterable[Source], wanted: Wanted | None = None, advance: Callable[[str], None] = lambda _: None
) -> Found:
    """Find, check, split and cut. `advance` hears of each kind once when it is found, and once more for each split."""
    wanted = wanted or Wanted()
    files = candidates(sources)
    packages_of: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        packages_of[kind] = confirmed_packages(kind, files[kind], wanted)
        advance(kind)
    left_out = {
        kind: f"of which only {len(packages)} packages have files; {wanted.least_packages} are needed"
        for kind, packages in packages_of.items()
        if len(packages) < wanted.least_packages
    }
    home = split_packages({kind: packages for kind, packages in packages_of.items() if kind not in left_out}, wanted)
    splits: dict[str, list[Example]] = {}
    known = Known()
    for split in SPLITS:
        splits[split] = []
        for kind in KINDS:
            chosen = [
                files[kind][package]
                for package in packages_of[kind]
                if home.get(package) == split and kind not in left_out
            ]
            splits[split] += draw(kind, chosen, wanted.examples[split], wanted, known)
            advance(f"{kind}, {split}")
    return with_enough(Found(splits, left_out), wanted)


def with_enough(found: Found, wanted: Wanted) -> Found:
    """Without the kinds that have too few examples in one of the splits."""
    left_out = dict(found.left_out)
    for kind in KINDS:
        counts = {split: found.count(kind, split) for split in SPLITS}
        if kind not in left_out and any(counts[split] < wanted.least[split] for split in SPLITS):
            have = ", ".join(f"{counts[split]} for {split}" for split in SPLITS)
            left_out[kind] = f"of which there are too few examples: {have}"
    kept = {
        split: [each for each in examples if each.label not in left_out] for split, examples in found.splits.items()
    }
    return Found(kept, left_out)


def candidates(sources: Iterable[Source]) -> dict[str, dict[str, list[Source]]]:
    """By kind and package, the files whose names propose that kind."""
    files: dict[str, dict[str, list[Source]]] = {kind: {} for kind in KINDS}
    for source in sources:
        kind = next((kind for kind in KINDS if KINDS[kind].name.search(source.name)), None)
        if kind is not None:
            files[kind].setdefault(source.package, []).append(source)
    return files


def confirmed_packages(kind: str, files: dict[str, list[Source]], wanted: Wanted) -> dict[str, int]:
    """The packages with a file whose content confirms its name, and how many windows they may have.

    The files are put in random order on the way.
    """
    weights = {}
    for package, sources in sorted(files.items()):
        random.Random(f"{wanted.seed} {kind} {package}").shuffle(sources)
        if any(confirmed_size(kind, source) for source in sources):
            windows = (
                min(wanted.windows_per_file, max(1, os.path.getsize(source.path) // WINDOW)) for source in sources
            )
            weights[package] = sum(windows)
    return weights


def confirmed_size(kind: str, source: Source) -> int:
    """How long a file is; 0 if it is not what its name says, too short, or cannot be read."""
    try:
        with open(source.path, "rb") as file:
            beginning = file.read(CHECKED)
            size = file.seek(0, os.SEEK_END)
    except OSError:
        return 0
    return size if size >= SHORTEST and KINDS[kind].check(beginning) else 0


def split_packages(packages_of: dict[str, dict[str, int]], wanted: Wanted) -> dict[str, str]:
    """A split for each package, so that of every kind each split gets its share; the rarest kinds choose first.

    The largest package of a kind is the most varied one, and always for training.
    """
    home = {max(sorted(weights), key=weights.__getitem__): "train" for weights in packages_of.values() if weights}
    for _, weights in sorted(packages_of.items(), key=lambda item: (len(item[1]), item[0])):
        capped = {package: min(wanted.heaviest, weight) for package, weight in weights.items()}
        have = Counter(
            {split: sum(capped[package] for package in capped if home.get(package) == split) for split in SPLITS}
        )
        shuffled = random.Random(wanted.seed).sample(sorted(capped), len(capped))
        # the heavy ones first: what is light fills the gaps
        for package in sorted(shuffled, key=lambda package: -capped[package]):
            if package not in home:
                home[package] = min(SPLITS, key=lambda split: have[split] / wanted.shares[split])
                have[home[package]] += capped[package]
    return home


def draw(kind: str, packages: list[list[Source]], number: int, wanted: Wanted, known: "Known") -> list[Example]:
    """At most `number` examples, one from each package in turn, so that a large one does not rule."""
    streams = [windows_of_package(kind, sources, wanted) for sources in packages]
    examples: list[Example] = []
    while streams and len(examples) < number:
        for stream in list(streams):
            example = next((each for each in stream if shows_its_kind(each) and known.is_new(each)), None)
            if example is None:
                streams.remove(stream)
            elif len(examples) < number:
                examples.append(example)
    return examples


def windows_of_package(kind: str, sources: list[Source], wanted: Wanted) -> Iterator[Example]:
    """A window of each file, then another of each, and so on."""
    more: list[tuple[Source, list[int]]] = []
    for source in sources:
        if size := confirmed_size(kind, source):
            first, *others = window_starts(size, f"{wanted.seed} {source.name}")
            yield cut(kind, source, first)
            more.append((source, others))
    for turn in range(wanted.windows_per_file - 1):
        for source, starts in more:
            if turn < len(starts):
                yield cut(kind, source, starts[turn])


def window_starts(size: int, seed: str) -> list[int]:
    """Where the windows of a file begin, in random order; they do not overlap.

    One file in three shows its beginning first; else headers would decide, or never be seen.
    """
    chance = random.Random(seed)
    places, rest = max(1, size // WINDOW), size % WINDOW if size > WINDOW else 0
    order = chance.sample(range(places), places)
    if chance.random() < 1 / 3:
        return [WINDOW * place for place in sorted(order, key=bool)]  # the first place first, the others as they were
    offset = chance.randint(0, rest)
    return [offset + WINDOW * place for place in order]


def cut(kind: str, source: Source, start: int) -> Example:
    """The window that begins there. Bytes beyond ASCII are two tokens each, so of binary files it is shorter."""
    with open(source.path, "rb") as file:
        file.seek(start)
        tokens = file.read(WINDOW).decode("latin-1").encode()[:WINDOW]
    return Example(tokens.decode(errors="ignore"), kind, source.package, source.name)


def shows_its_kind(example: Example) -> bool:
    """Whether a window has anything to be recognised by: it may be nearly all zeros."""
    window = example.text.encode("latin-1")
    return max(Counter(window).values()) <= 0.75 * len(window) and KINDS[example.label].shows(window)


class Known:
    """What has occurred so far. Packages carry copies of others, licences above all: exact ones, and such with a line changed."""

    def __init__(self) -> None:
        self.windows: set[bytes] = set()
        self.lines: set[bytes] = set()

    def is_new(self, example: Example) -> bool:
        """Whether neither this window occurred before, nor half of its lines; if so, it has now."""
        window = example.text.encode("latin-1")
        digest = hashlib.sha256(window).digest()
        lines = long_lines(window)
        if digest in self.windows or len(lines & self.lines) > COPIED * len(lines):
            return False
        self.windows.add(digest)
        self.lines |= lines
        return True


def long_lines(window: bytes) -> set[bytes]:
    """The lines that are long enough to tell where they come from; in binary files, what stands between zeros."""
    return {line.strip() for line in re.split(rb"[\n\0]", window) if len(line.strip()) >= 24}


# on disk


def write_examples(found: Found, folder: Path) -> None:
    """One file of JSON lines per split; the folder appears when all are complete."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as unfinished:
        for split, examples in found.splits.items():
            lines = "".join(json.dumps(asdict(example)) + "\n" for example in examples)
            # no time in the file: the same examples give the same bytes
            Path(unfinished, f"{split}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 3, mtime=0))
        os.chmod(unfinished, 0o755)  # mkdtemp makes folders that only their owner can read
        os.rename(unfinished, folder)
        Path(unfinished).mkdir()  # which wants to be removed


def read_examples(folder: Path) -> Found:
    """What `write_examples` wrote."""
    splits = {}
    for split in SPLITS:
        with gzip.open(folder / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            splits[split] = [Example(**json.loads(line)) for line in file]
    present = {example.label for example in splits["train"]}
    return Found(splits, {kind: "of which there were too few files" for kind in KINDS if kind not in present})
