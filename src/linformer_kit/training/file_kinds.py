"""The dataset `file_kinds`: pieces of files that every Python installation has, labeled by kind, split by package.

The name of a file suggests its kind and its content must confirm it; the model sees only the bytes of a piece. All
files of a package are in the same split, and exact or near copies of earlier examples are left out. So the test split
holds files of packages of which the training saw nothing.
"""

import gzip
import json
import os
import random
import re
import sysconfig
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from itertools import islice, product
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from rich.console import Console

from ..errors import UserError
from ..formatting import progress_bar
from .file_checks import KINDS

# increase when the gathered examples change
VERSION = 1

WINDOW = 4094  # maximum tokens of an example; the model adds one at the start and one at the end
MIN_SIZE = 512  # bytes of a file
CHECKED_SIZE = 2**19  # bytes by which a kind is confirmed; a longer text does not parse and is left out
MAX_COPIED = 0.5  # share of known lines above which a window counts as a copy
WINDOWS_PER_FILE = 16  # at most
EXAMPLES = {"train": 400, "validation": 60, "test": 100}  # of each kind, at most
LEAST = 0.2  # share of these below which a kind is left out
SHARES = {"train": 0.65, "validation": 0.15, "test": 0.2}  # of the packages, by windows
HEAVIEST = 20  # windows of a package that count when packages are split
SPLITS = tuple(SHARES)


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
    return folder_sources(
        site, "site-packages", lambda parts: owners.get(top_level_entry(parts), top_level_entry(parts))
    )


def folder_sources(folder: Path, name: str, package: Callable[[tuple[str, ...]], str]) -> Iterator[Source]:
    """The files below a directory in a fixed order, without our own, so that the demo can classify itself."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "linformer_kit"})
        above = Path(root).relative_to(folder).parts
        for file in sorted(files):
            yield Source(os.path.join(root, file), package((*above, file)), "/".join((name, *above, file)))


def top_level_entry(parts: tuple[str, ...]) -> str:
    """The entry of site-packages that a file belongs to; for byte code of a single module, that module.

    >>> top_level_entry(("torch", "nn", "init.py")), top_level_entry(("__pycache__", "six.cpython-311.pyc"))
    ('torch', 'six.py')
    """
    return parts[1].split(".")[0] + ".py" if parts[0] == "__pycache__" and parts[1:] else parts[0]


def owners_of(site: Path) -> dict[str, str]:
    """The distribution of each entry of site-packages; those that share an entry, such as `google`, count as one."""
    owners: dict[str, str] = {}
    for distribution in sorted(distributions(path=[str(site)]), key=lambda found: found.name):
        files = (distribution.read_text("RECORD") or "").splitlines()
        tops = {top_level_entry(PurePosixPath(line.rsplit(",", 2)[0]).parts) for line in files}
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


def gather(
    sources: Iterable[Source],
    wanted: Mapping[str, int] = EXAMPLES,
    seed: int = 2020,
    advance: Callable[[str], None] = lambda _: None,
) -> Dataset:
    """Find, split, check and cut; `wanted` is the number of examples of a kind.

    `advance` is called once per split and kind.
    """
    files = candidates(sources)
    windows = {kind: {package: count_windows(each) for package, each in files[kind].items()} for kind in KINDS}
    split_of = split_packages(windows, seed)
    known: set[bytes] = set()
    found: dict[tuple[str, str], list[Example]] = {}
    for split, kind in product(SPLITS, KINDS):  # the test split is last: its examples are copies of no others
        packages = [each for package, each in files[kind].items() if split_of[package] == split]
        # one from each package in turn, so that no package dominates
        examples = round_robin(package_examples(kind, each, seed, known) for each in packages)
        found[split, kind] = list(islice(examples, wanted[split]))
        advance(f"{kind}, {split}")
    left_out = {
        kind: f"too few examples: {', '.join(f'{len(found[split, kind])} for {split}' for split in SPLITS)}"
        for kind in KINDS
        if any(len(found[split, kind]) < LEAST * wanted[split] for split in SPLITS)
    }
    kinds = [kind for kind in KINDS if kind not in left_out]
    return Dataset({split: [each for kind in kinds for each in found[split, kind]] for split in SPLITS}, left_out)


def candidates(sources: Iterable[Source]) -> dict[str, dict[str, list[Source]]]:
    """The files whose names suggest a kind, by kind and package."""
    files: dict[str, dict[str, list[Source]]] = {kind: {} for kind in KINDS}
    for source in sources:
        kind = next((kind for kind in KINDS if KINDS[kind].name.search(source.name)), None)
        if kind is not None:
            files[kind].setdefault(source.package, []).append(source)
    return files


def count_windows(sources: list[Source]) -> int:
    """The number of windows of a package, before its files are read."""
    sizes = (os.path.getsize(source.path) for source in sources if os.path.exists(source.path))  # no broken links
    return sum(min(WINDOWS_PER_FILE, max(1, size // WINDOW)) for size in sizes)


def split_packages(windows: dict[str, dict[str, int]], seed: int) -> dict[str, str]:
    """A split for each package, so that each split gets its share of every kind; the rarest kinds are split first.

    `windows` is the number of windows by kind and package. The largest package of a kind is the most varied one, and
    always used for training.
    """
    split_of = dict.fromkeys((max(counts, key=counts.__getitem__) for counts in windows.values() if counts), "train")
    for counts in sorted(windows.values(), key=len):
        weights = {package: min(HEAVIEST, count) for package, count in counts.items()}
        have = {split: sum(weights[each] for each in weights if split_of.get(each) == split) for split in SPLITS}
        new = [package for package in sorted(weights) if package not in split_of]
        random.Random(seed).shuffle(new)
        for package in sorted(new, key=lambda package: -weights[package]):  # light ones fill the gaps
            split_of[package] = min(SPLITS, key=lambda split: have[split] / SHARES[split])
            have[split_of[package]] += weights[package]
    return split_of


def package_examples(kind: str, sources: list[Source], seed: int, known: set[bytes]) -> Iterator[Example]:
    """One window of each file, then a second of each, and so on; atypical ones and copies are left out."""
    shuffled = random.Random(seed).sample(sources, len(sources))
    windows = round_robin(file_windows(kind, source, seed) for source in shuffled)
    return (window for window in windows if is_typical(window) and is_new(window, known))


def round_robin(streams: Iterable[Iterator[Example]]) -> Iterator[Example]:
    """One example of each stream, then a second of each, and so on; a stream is read only when it is its turn."""
    waiting = deque(streams)
    while waiting:
        stream = waiting.popleft()
        for example in islice(stream, 1):
            yield example
            waiting.append(stream)


def file_windows(kind: str, source: Source, seed: int) -> Iterator[Example]:
    """Windows of a file in random order; none if its content contradicts its name."""
    if size := confirmed_size(kind, source):
        for start in window_starts(size, f"{seed} {source.name}")[:WINDOWS_PER_FILE]:
            yield read_window(kind, source, start)


def confirmed_size(kind: str, source: Source) -> int:
    """The size of a file; 0 if its content contradicts its name, or if it is too short or unreadable."""
    try:
        with open(source.path, "rb") as file:
            beginning = file.read(CHECKED_SIZE)
            size = file.seek(0, os.SEEK_END)
    except OSError:
        return 0
    return size if size >= MIN_SIZE and KINDS[kind].check(beginning) else 0


def window_starts(size: int, seed: str) -> list[int]:
    """The starts of the windows of a file, in random order, without overlap.

    One file in three starts with its beginning; otherwise headers would decide, or would never be seen.
    """
    chance = random.Random(seed)
    places = max(1, size // WINDOW)
    rest = max(0, size - WINDOW * places)
    order = chance.sample(range(places), places)
    offset = chance.randint(0, rest)
    if chance.random() < 1 / 3:
        order, offset = sorted(order, key=bool), 0  # the beginning first, the others in random order
    return [offset + WINDOW * place for place in order]


def read_window(kind: str, source: Source, start: int) -> Example:
    """The window at `start`. Non-ASCII bytes are two tokens each, so windows of binary files are shorter."""
    with open(source.path, "rb") as file:
        file.seek(start)
        tokens = file.read(WINDOW).decode("latin-1").encode()[:WINDOW]
    return Example(tokens.decode(errors="ignore"), kind, source.package, source.name)


def is_typical(example: Example) -> bool:
    """Whether a window can be recognized: it may be nearly all zeros, or show another kind."""
    window = example.text.encode("latin-1")
    return max(Counter(window).values()) <= 0.75 * len(window) and KINDS[example.label].shows(window)


def is_new(example: Example, known: set[bytes]) -> bool:
    """Whether at most half of the lines of a window are known; those of a new one become known.

    Packages contain exact and near copies of other files, mostly licenses.
    """
    window = example.text.encode("latin-1")
    lines = long_lines(window) or {window}
    if len(lines & known) > MAX_COPIED * len(lines):
        return False
    known |= lines
    return True


def long_lines(window: bytes) -> set[bytes]:
    """The lines that are long enough to identify a text; in binary files, the bytes between zeros."""
    return {line.strip() for line in re.split(rb"[\n\0]", window) if len(line.strip()) >= 24}


# storage


def write(folder: Path) -> None:
    """Write train.jsonl.gz, validation.jsonl.gz and test.jsonl.gz with pieces of the files of this Python."""
    with progress_bar(Console(stderr=True), "kinds and splits", len(KINDS) * len(SPLITS)) as advance:
        dataset = gather(installed_files(), EXAMPLES, advance=advance)
    if len(dataset.kinds) < 2:
        reasons = "; ".join(map(": ".join, dataset.left_out.items()))
        raise UserError(f"this Python has too few files to train on: {reasons}; install more packages")
    write_examples(dataset, folder)


def write_examples(dataset: Dataset, folder: Path) -> None:
    """One file of JSON lines per split."""
    for split, examples in dataset.splits.items():
        lines = "".join(json.dumps(asdict(example)) + "\n" for example in examples)
        # without a time stamp, equal examples give equal bytes
        (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 3, mtime=0))


def read_examples(folder: Path) -> Dataset:
    """The dataset that `write_examples` wrote."""
    splits = {}
    for split in SPLITS:
        with gzip.open(folder / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            splits[split] = [Example(**json.loads(line)) for line in file]
    present = {example.label for example in splits["train"]}
    return Dataset(splits, {kind: "too few examples" for kind in KINDS if kind not in present})
