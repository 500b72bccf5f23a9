"""The data of the demo: pieces of files that every Python installation has, labeled by kind, split by package.

The name of a file suggests its kind and its content must confirm it; the model sees only the bytes of a piece. All
files of a package are in the same split, and exact or near copies of earlier examples are left out. So the test split
holds files of packages of which the training saw nothing.
"""

import gzip
import hashlib
import json
import os
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ..files import atomic_directory
from .kinds import KINDS

WINDOW = 4094  # maximum tokens of an example; the model adds one at the start and one at the end
MIN_SIZE = 512  # bytes of a file
CHECKED_SIZE = 2**19  # bytes by which a kind is confirmed; a longer text does not parse and is left out
MAX_COPIED = 0.5  # share of known lines above which a window counts as a copy
SPLITS = ("train", "validation", "test")


class Source(NamedTuple):
    """A file, its package, and a name that is the same on every machine."""

    path: str
    package: str
    name: str


def installed_files() -> Iterator[Source]:
    """The files of this Python: standard library, C headers and installed packages."""
    paths = sysconfig.get_paths()
    yield from library_sources(Path(paths["stdlib"]))
    yield from folder_sources(Path(paths["include"]), "include", lambda _: "python/include")
    for site in sorted({Path(paths[name]).resolve() for name in ("purelib", "platlib")}):
        yield from site_sources(site)


def library_sources(stdlib: Path) -> Iterator[Source]:
    """The standard library: each directory is a package; all single-file modules are one package."""
    return folder_sources(
        stdlib, "python", lambda parts: f"python/{parts[0] if parts[1:] and parts[0] != '__pycache__' else 'modules'}"
    )


def site_sources(site: Path) -> Iterator[Source]:
    """Installed files: all directories of a distribution are one package."""
    owners = owners_of(site)
    return folder_sources(site, "site-packages", lambda parts: owners.get(top_of(parts), top_of(parts)))


def folder_sources(folder: Path, name: str, package: Callable[[tuple[str, ...]], str]) -> Iterator[Source]:
    """The files below a directory in a fixed order, without our own, so that the demo can classify itself."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "linformer_kit"})
        above = Path(root).relative_to(folder).parts
        for file in sorted(files):
            yield Source(os.path.join(root, file), package((*above, file)), "/".join((name, *above, file)))


def top_of(parts: tuple[str, ...]) -> str:
    """The entry of site-packages that a file belongs to; for byte code of a single module, that module.

    >>> top_of(("torch", "nn", "init.py")), top_of(("__pycache__", "six.cpython-311.pyc"))
    ('torch', 'six.py')
    """
    return parts[1].split(".")[0] + ".py" if parts[0] == "__pycache__" and parts[1:] else parts[0]


def owners_of(site: Path) -> dict[str, str]:
    """The distribution of each entry of site-packages; those that share an entry, such as `google`, count as one."""
    owners: dict[str, str] = {}
    for distribution in sorted(distributions(path=[str(site)]), key=lambda found: found.name):
        files = (distribution.read_text("RECORD") or "").splitlines()
        tops = {top_of(PurePosixPath(line.rsplit(",", 2)[0]).parts) for line in files}
        entries = sorted(tops - {"..", "__pycache__"})
        owner = next((owners[entry] for entry in entries if entry in owners), distribution.name)
        for entry in entries:
            owners.setdefault(entry, owner)
    return owners


# examples


@dataclass(frozen=True)
class Example:
    """A piece of a file; its bytes are stored as Latin-1 characters."""

    text: str
    label: str
    package: str
    file: str


@dataclass
class Dataset:
    """The examples of each split, and why kinds are left out."""

    splits: dict[str, list[Example]]
    left_out: dict[str, str] = field(default_factory=dict)

    def select(self, split: str, kind: str | None = None) -> list[Example]:
        """The examples of a split, or of one kind in it."""
        return [example for example in self.splits[split] if kind in (None, example.label)]

    def packages(self, split: str, kind: str | None = None) -> set[str]:
        return {example.package for example in self.select(split, kind)}

    @property
    def kinds(self) -> list[str]:
        """The kinds present, in the order of `KINDS`."""
        present = {example.label for example in self.splits["train"]}
        return [kind for kind in KINDS if kind in present]


@dataclass(frozen=True)
class Wanted:
    """How much is gathered; `shares` is the share of packages in each split."""

    examples: dict[str, int] = field(default_factory=lambda: {"train": 400, "validation": 60, "test": 100})
    least: dict[str, int] = field(default_factory=lambda: {"train": 120, "validation": 10, "test": 20})
    shares: dict[str, float] = field(default_factory=lambda: {"train": 0.65, "validation": 0.15, "test": 0.2})
    least_packages: int = 6
    windows_per_file: int = 16
    heaviest: int = 20  # maximum weight of a package when packages are split
    seed: int = 2020


def gather(
    sources: Iterable[Source], wanted: Wanted | None = None, advance: Callable[[str], None] = lambda _: None
) -> Dataset:
    """Find, check, split and cut. `advance` is called once per kind, and once per split and kind."""
    wanted = wanted or Wanted()
    files = candidates(sources)
    packages_of: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        packages_of[kind] = confirmed_packages(kind, files[kind], wanted)
        advance(kind)
    left_out = {
        kind: f"only {len(packages)} packages have such files; {wanted.least_packages} are needed"
        for kind, packages in packages_of.items()
        if len(packages) < wanted.least_packages
    }
    split_of = split_packages({kind: found for kind, found in packages_of.items() if kind not in left_out}, wanted)
    splits: dict[str, list[Example]] = {split: [] for split in SPLITS}
    known = Known()
    for split in SPLITS:
        for kind in KINDS:
            packages = [] if kind in left_out else packages_of[kind]
            chosen = [files[kind][package] for package in packages if split_of.get(package) == split]
            splits[split] += draw_examples(kind, chosen, wanted.examples[split], wanted, known)
            advance(f"{kind}, {split}")
    for kind in [kind for kind in KINDS if kind not in left_out]:
        counts = {split: sum(example.label == kind for example in splits[split]) for split in SPLITS}
        if any(counts[split] < wanted.least[split] for split in SPLITS):
            left_out[kind] = f"too few examples: {', '.join(f'{counts[split]} for {split}' for split in SPLITS)}"
    for split, examples in splits.items():
        splits[split] = [example for example in examples if example.label not in left_out]
    return Dataset(splits, left_out)


def candidates(sources: Iterable[Source]) -> dict[str, dict[str, list[Source]]]:
    """The files whose names suggest a kind, by kind and package."""
    files: dict[str, dict[str, list[Source]]] = {kind: {} for kind in KINDS}
    for source in sources:
        kind = next((kind for kind in KINDS if KINDS[kind].name.search(source.name)), None)
        if kind is not None:
            files[kind].setdefault(source.package, []).append(source)
    return files


def confirmed_packages(kind: str, files: dict[str, list[Source]], wanted: Wanted) -> dict[str, int]:
    """The packages with a file whose content confirms its name, and the number of their windows; shuffles the files."""
    weights = {}
    for package, sources in sorted(files.items()):
        random.Random(f"{wanted.seed} {kind} {package}").shuffle(sources)
        if any(confirmed_size(kind, source) for source in sources):
            windows = (max(1, os.path.getsize(source.path) // WINDOW) for source in sources)
            weights[package] = sum(min(wanted.windows_per_file, count) for count in windows)
    return weights


def confirmed_size(kind: str, source: Source) -> int:
    """The size of a file; 0 if its content contradicts its name, or if it is too short or unreadable."""
    try:
        with open(source.path, "rb") as file:
            beginning = file.read(CHECKED_SIZE)
            size = file.seek(0, os.SEEK_END)
    except OSError:
        return 0
    return size if size >= MIN_SIZE and KINDS[kind].check(beginning) else 0


def split_packages(packages_of: dict[str, dict[str, int]], wanted: Wanted) -> dict[str, str]:
    """A split for each package, so that each split gets its share of every kind; the rarest kinds are split first.

    The largest package of a kind is the most varied one, and always used for training.
    """
    split_of = {max(sorted(weights), key=weights.__getitem__): "train" for weights in packages_of.values() if weights}
    for _, weights in sorted(packages_of.items(), key=lambda item: (len(item[1]), item[0])):
        capped = {package: min(wanted.heaviest, weight) for package, weight in weights.items()}
        have: Counter[str] = Counter()
        for package in capped:
            have[split_of.get(package, "")] += capped[package]
        shuffled = random.Random(wanted.seed).sample(sorted(capped), len(capped))
        # heavy packages first: light ones fill the gaps
        for package in sorted(shuffled, key=lambda package: -capped[package]):
            if package not in split_of:
                split_of[package] = min(SPLITS, key=lambda split: have[split] / wanted.shares[split])
                have[split_of[package]] += capped[package]
    return split_of


def draw_examples(kind: str, packages: list[list[Source]], most: int, wanted: Wanted, known: "Known") -> list[Example]:
    """At most `most` examples, one from each package in turn, so that no package dominates."""
    streams = [package_windows(kind, sources, wanted) for sources in packages]
    examples: list[Example] = []
    while streams and len(examples) < most:
        for stream in list(streams):
            example = next((each for each in stream if is_typical(each) and known.is_new(each)), None)
            if example is None:
                streams.remove(stream)
            elif len(examples) < most:
                examples.append(example)
    return examples


def package_windows(kind: str, sources: list[Source], wanted: Wanted) -> Iterator[Example]:
    """One window of each file, then a second of each, and so on."""
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
    """The starts of the windows of a file, in random order, without overlap.

    One file in three starts with its beginning; otherwise headers would decide, or would never be seen.
    """
    chance = random.Random(seed)
    places, rest = max(1, size // WINDOW), size % WINDOW if size > WINDOW else 0
    order = chance.sample(range(places), places)
    if chance.random() < 1 / 3:
        return [WINDOW * place for place in sorted(order, key=bool)]  # the beginning first, the others in random order
    offset = chance.randint(0, rest)
    return [offset + WINDOW * place for place in order]


def cut(kind: str, source: Source, start: int) -> Example:
    """The window at `start`. Non-ASCII bytes are two tokens each, so windows of binary files are shorter."""
    with open(source.path, "rb") as file:
        file.seek(start)
        tokens = file.read(WINDOW).decode("latin-1").encode()[:WINDOW]
    return Example(tokens.decode(errors="ignore"), kind, source.package, source.name)


def is_typical(example: Example) -> bool:
    """Whether a window can be recognized: it may be nearly all zeros, or show another kind."""
    window = example.text.encode("latin-1")
    return max(Counter(window).values()) <= 0.75 * len(window) and KINDS[example.label].shows(window)


class Known:
    """The windows and lines seen so far: packages contain exact and near copies of other files, mostly licenses."""

    def __init__(self) -> None:
        self.windows: set[bytes] = set()
        self.lines: set[bytes] = set()

    def is_new(self, example: Example) -> bool:
        """Whether neither the window nor more than half of its lines were seen before; remembers a new one."""
        window = example.text.encode("latin-1")
        digest = hashlib.sha256(window).digest()
        lines = long_lines(window)
        if digest in self.windows or len(lines & self.lines) > MAX_COPIED * len(lines):
            return False
        self.windows.add(digest)
        self.lines |= lines
        return True


def long_lines(window: bytes) -> set[bytes]:
    """The lines that are long enough to identify a text; in binary files, the bytes between zeros."""
    return {line.strip() for line in re.split(rb"[\n\0]", window) if len(line.strip()) >= 24}


# storage


def write_examples(dataset: Dataset, folder: Path) -> None:
    """One file of JSON lines per split, written atomically."""
    with atomic_directory(folder) as unfinished:
        for split, examples in dataset.splits.items():
            lines = "".join(json.dumps(asdict(example)) + "\n" for example in examples)
            # without a time stamp, equal examples give equal bytes
            (unfinished / f"{split}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 3, mtime=0))


def read_examples(folder: Path) -> Dataset:
    """The dataset that `write_examples` wrote."""
    splits = {}
    for split in SPLITS:
        with gzip.open(folder / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            splits[split] = [Example(**json.loads(line)) for line in file]
    present = {example.label for example in splits["train"]}
    return Dataset(splits, {kind: "too few files" for kind in KINDS if kind not in present})
