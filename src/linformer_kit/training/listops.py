"""ListOps, the first task of the Long Range Arena: nested operations on digits; the label is the value, 0 to 9.

    [MAX 2 9 [MIN 4 7 ] 0 ]  →  9

An expression is a random tree that follows the rules of the original generator (lra_benchmarks/data/listops.py):

- A node is an operator with probability 1/4, otherwise a digit; at depth 10 (the root has depth 1) always a digit.
  The same holds for the root: if it is a digit, the expression is too short and is dropped.
- The operators are MIN, MAX, MED (the truncated median) and SM (the sum modulo 10), with 2 to 10 arguments. Operators,
  numbers of arguments and digits are uniformly distributed.
- The length is the number of symbols: one per digit and two per operator. Expressions longer than 500 and shorter than
  2,000 symbols are kept, without duplicates.

The parentheses of the original only group and are omitted. Fifteen symbols remain: `SYMBOLS`.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from random import Random

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..files import atomic_file


def truncated_median(values: list[int]) -> int:
    """The middle value, or the truncated mean of the two middle values."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


# increase when the generated examples change
VERSION = 1

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": truncated_median,
    "[SM": lambda values: sum(values) % 10,
}
END = "]"
DIGITS = tuple("0123456789")
SYMBOLS = (*OPERATORS, END, *DIGITS)

DEEPEST = 10
# number of arguments of a node, 0 for a digit, as one uniform choice: 27 of 36 are digits, each of 2 to 10 is 1 of 36
ARGUMENTS = (*[0] * 27, *range(2, 11))
# give up after this many trees without a new expression; with the lengths of the benchmark, 1 tree in 12 is kept
PATIENCE = 1_000_000


def examples(seed: int = 0, shortest: int = 500, longest: int = 2000) -> Iterator[tuple[str, int]]:
    """An endless iterator of distinct expressions and their values; `shortest` < length < `longest`.

    The same seed gives the same examples.

    >>> next(examples(seed=3, shortest=5, longest=12))
    ('[MAX 7 8 7 9 [SM 8 4 ] 3 ]', 9)
    >>> text, value = next(examples())
    >>> 500 < len(text.split()) < 2000, value == evaluate(text)
    (True, True)
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be at least 0, because random.Random ignores the sign")
    if not 0 <= shortest < longest - 1:
        raise ValueError(
            f"no length is greater than shortest={shortest} and less than longest={longest}; "
            "shortest must be at least 0 and longest at least shortest + 2"
        )
    # a separate generator, so that the arguments are checked at once
    return unique_examples(Random(seed), shortest, longest)


def unique_examples(rng: Random, shortest: int, longest: int) -> Iterator[tuple[str, int]]:
    """The generator behind `examples`."""
    # hashes, because the texts of the whole benchmark take a quarter of a gigabyte
    seen: set[bytes] = set()
    while True:
        for _ in range(PATIENCE):
            if levels := draw_tree(rng, shortest, longest):
                text, value = fill_tree(rng, levels)
                fingerprint = blake2b(text.encode(), digest_size=16).digest()
                if fingerprint not in seen:
                    break
        else:
            raise RuntimeError(
                f"after {len(seen):,} expressions longer than {shortest} and shorter than {longest}, {PATIENCE:,} "
                "random trees gave no new one; request fewer, or allow more lengths"
            )
        seen.add(fingerprint)
        yield text, value


def draw_tree(rng: Random, shortest: int, longest: int) -> list[list[int]] | None:
    """The numbers of arguments in a random tree, level by level from the root; None if its length is out of range."""
    levels: list[list[int]] = []
    nodes, length = 1, 0
    while nodes:
        level = rng.choices(ARGUMENTS, k=nodes) if len(levels) < DEEPEST - 1 else [0] * nodes
        levels.append(level)
        length += 2 * nodes - level.count(0)
        nodes = sum(level)
        # each further node adds at least one symbol: stop early if the tree becomes too long
        if length + nodes >= longest:
            return None
    return levels if length > shortest else None


def fill_tree(rng: Random, levels: list[list[int]]) -> tuple[str, int]:
    """Text and value of a tree with random operators and digits, from its leaves up."""
    names, symbols = tuple(OPERATORS), tuple(zip(DIGITS, range(10), strict=True))
    texts: list[str] = []
    values: list[int] = []
    for level in reversed(levels):
        texts_below, values_below = texts, values
        texts, values = [], []
        digits = level.count(0)
        digit = iter(rng.choices(symbols, k=digits))
        operator = iter(rng.choices(names, k=len(level) - digits))
        start = 0
        for arguments in level:
            if arguments:
                name, end = next(operator), start + arguments
                texts.append(f"{name} {' '.join(texts_below[start:end])} {END}")
                values.append(OPERATORS[name](values_below[start:end]))
                start = end
            else:
                text, value = next(digit)
                texts.append(text)
                values.append(value)
    return texts[0], values[0]


def evaluate(text: str) -> int:
    """The value of an expression; raises `ValueError` if the text is not a valid expression.

    >>> evaluate("[MED 1 2 3 4 ]")
    2
    >>> evaluate("[SM 9 [MAX 1 5 ] 8 ]")
    2
    """
    # open operators, outermost first, with the arguments read so far; `found` collects values outside of any operator
    found: list[int] = []
    opened: list[tuple[str, list[int]]] = []
    for position, symbol in enumerate(text.split(), start=1):
        if symbol in OPERATORS:
            opened.append((symbol, []))
            continue
        if symbol == END:
            if not opened:
                raise ValueError(f"symbol {position} is ']' but no operator is open")
            name, arguments = opened.pop()
            if not arguments:
                raise ValueError(f"symbol {position} is ']' but {name} has no arguments")
            value = OPERATORS[name](arguments)
        elif symbol in DIGITS:
            value = int(symbol)
        else:
            raise ValueError(f"symbol {position} is {symbol!r}; allowed, separated by spaces: {' '.join(SYMBOLS)}")
        (opened[-1][1] if opened else found).append(value)
    if opened:
        raise ValueError(f"the text ends before the ']' of {' '.join(name for name, _ in opened)}")
    if len(found) != 1:
        raise ValueError(f"the text has {len(found)} expressions; it must have exactly one")
    return found[0]


def write(
    folder: Path,
    train: int = 96_000,
    validation: int = 2_000,
    test: int = 2_000,
    seed: int = 0,
    shortest: int = 500,
    longest: int = 2000,
) -> None:
    """Write train.jsonl.gz, validation.jsonl.gz and test.jsonl.gz with the keys `text` and `label`, without duplicates.

    The validation and test sets are generated first and do not depend on the size of the training set.
    The files appear when all of them are complete.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write(Path(folder), train=4, validation=2, test=1)
    ...     for path in sorted(Path(folder).iterdir()):
    ...         print(path.name, len(gzip.open(path).readlines()))
    test.jsonl.gz 1
    train.jsonl.gz 4
    validation.jsonl.gz 2
    """
    sizes = {"test": test, "validation": validation, "train": train}
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} is {size}; the number of examples must be at least 0")
    source = examples(seed, shortest, longest)
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    with (
        ExitStack() as unfinished,
        Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_interactive,
        ) as progress,
    ):
        files = {name: unfinished.enter_context(atomic_file(folder / f"{name}.jsonl.gz")) for name in sizes}
        for name, path in files.items():
            # without name and time, the same seed gives the same bytes; level 6 takes four times as long and saves 5%
            with (
                path.open("wb") as raw,
                gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=3, mtime=0) as file,
            ):
                for text, value in progress.track(islice(source, sizes[name]), total=sizes[name], description=name):
                    file.write(json.dumps({"text": text, "label": value}).encode() + b"\n")
