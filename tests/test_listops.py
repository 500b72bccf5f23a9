"""ListOps: values, the rules of Long Range Arena, and the files.

The seeds are fixed, so no statistic here turns red by chance. The bounds are where one seed in a million would be.
"""

import gzip
import hashlib
import json
import re
import statistics
from collections import Counter
from itertools import islice
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linformer_kit.training import listops
from linformer_kit.training.listops import SYMBOLS, evaluate, examples, write

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
# chi-square with that many degrees of freedom is above this once in a million
ONCE_IN_A_MILLION = {3: 30.66, 8: 42.70, 9: 44.81, 19: 63.68}


@pytest.fixture(scope="module")
def some():
    """Examples of the lengths of the benchmark."""
    return list(islice(examples(seed=1), 3000))


def value_by_python(text):
    """The value of an expression, by Python's own parser and its statistics."""
    functions = {
        "MIN": lambda *values: min(values),
        "MAX": lambda *values: max(values),
        "MED": lambda *values: int(statistics.median(values)),
        "SM": lambda *values: sum(values) % 10,
    }
    code = re.sub(r"\[(\w+) ", r"\1(", text).replace(" ]", ")").replace(" ", ",")
    return eval(code, functions)


def nodes(text):
    """Depth and number of arguments, 0 for a digit, of each node of an expression."""
    counts = [0]  # of the open operators, under one that stands for what holds the root
    for symbol in text.split():
        if symbol == "]":
            yield len(counts) - 1, counts.pop()
        else:
            counts[-1] += 1
            if symbol in OPERATORS:
                counts.append(0)
            else:
                yield len(counts), 0
    assert counts == [1]


def chi_square(observed, expected):
    observed, expected = np.array(observed, dtype=float), np.array(expected, dtype=float)
    expected *= observed.sum() / expected.sum()
    assert expected.min() > 20
    return ((observed - expected) ** 2 / expected).sum()


def length_probabilities(longest, first=range(2, 11)):
    """P(length = L) for L < `longest` of a random tree, exactly: the rules as a recursion over depth.

    `first` are the numbers of arguments that a root that is an operator chooses from.
    """
    digit = np.zeros(longest)
    digit[1] = 1
    law = digit  # of a node at depth 10
    for depth in range(9, 0, -1):
        choices = first if depth == 1 else range(2, 11)
        of_operator, several = np.zeros(longest), np.zeros(longest)
        several[2] = 1  # an operator without arguments
        for arguments in range(1, 11):
            several = np.convolve(several, law)[:longest]
            if arguments in choices:
                of_operator += several / len(choices)
        law = 0.75 * digit + 0.25 * of_operator
    return law


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MIN 4 2 8 ]", 2),
        ("[MAX 4 2 8 ]", 8),
        ("[MED 3 9 1 ]", 3),
        ("[MED 1 2 3 4 ]", 2),  # 2.5, truncated
        ("[MED 9 0 ]", 4),
        ("[MED 5 5 5 6 ]", 5),
        ("[MED 0 2 9 4 ]", 3),
        ("[SM 9 8 7 6 ]", 0),
        ("[SM 5 4 ]", 9),
        ("[SM 9 9 9 9 9 9 9 9 9 9 ]", 0),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]", 5),  # the example of the paper of Long Range Arena
        ("[SM [SM 9 9 ] [MED [MAX 1 6 ] 3 ] ]", 2),
    ],
)
def test_values_by_hand(text, value):
    assert evaluate(text) == value
    assert value_by_python(text) == value


def test_values_equal_those_of_two_other_evaluators(some):
    for text, value in some[:1000]:
        assert type(value) is int
        assert value == evaluate(text) == value_by_python(text)
    assert {value for _, value in some} == set(range(10))


trees = st.recursive(
    st.sampled_from("0123456789"),
    lambda inner: st.builds(
        lambda name, arguments: f"{name} {' '.join(arguments)} ]",
        st.sampled_from(OPERATORS),
        st.lists(inner, min_size=2, max_size=10),
    ),
)


@given(trees)
def test_any_expression_is_read_as_python_reads_it(text):
    assert evaluate(text) == value_by_python(text)


def test_an_expression_may_be_deeper_than_the_stack_of_python():
    assert evaluate("[SM 1 " * 100_000 + "3" + " ]" * 100_000) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 expressions"),
        ("1 2", "2 expressions"),
        ("[MIN 1 2 ] 3", "2 expressions"),
        ("[MIN ]", r"symbol 2 is '\]' but \[MIN has no argument"),
        ("1 ]", r"symbol 2 is '\]' but no operator is open"),
        ("[MAX 1 [SM 2 3", r"ends before the '\]' of \[MAX \[SM"),
        ("[MAX 1 12 ]", "symbol 3 is '12'; allowed"),
        ("[AVG 1 2 ]", r"symbol 1 is '\[AVG'"),
        ("( [MIN 1 ) ]", r"symbol 1 is '\('"),
        ("[MIN 1 2]", r"symbol 3 is '2\]'.* separated by spaces"),
    ],
)
def test_invalid_expressions_are_rejected(text, message):
    with pytest.raises(ValueError, match=message):
        evaluate(text)


def test_every_rule_is_kept(some):
    deepest = 0
    for text, _ in some[:1000]:
        symbols = text.split()
        assert " ".join(symbols) == text
        assert set(symbols) <= set(SYMBOLS)
        assert 500 < len(symbols) < 2000
        assert len(symbols) == sum(2 if arguments else 1 for _, arguments in nodes(text))
        for depth, arguments in nodes(text):
            assert arguments == 0 or 2 <= arguments <= 10
            assert depth < 10 or (depth == 10 and arguments == 0)
            deepest = max(deepest, depth)
    assert deepest == 10
    assert {symbol for text, _ in some for symbol in text.split()} == set(SYMBOLS)
    assert len(SYMBOLS) == len(set(SYMBOLS)) == 15


@pytest.mark.parametrize(("shortest", "longest", "number"), [(0, 2, 10), (3, 5, 300), (0, 30, 300), (499, 501, 10)])
def test_both_limits_are_excluded_and_all_between_them_is_found(shortest, longest, number):
    lengths = {len(text.split()) for text, _ in islice(examples(0, shortest, longest), number)}
    # no expression has two symbols, or three
    assert lengths == set(range(shortest + 1, longest)) - {2, 3}


def test_operators_and_digits_are_uniform(some):
    counts = Counter(symbol for text, _ in some for symbol in text.split())
    assert counts["]"] == sum(counts[name] for name in OPERATORS)
    # neither depends on the length, so selecting by length keeps them uniform
    assert chi_square([counts[name] for name in OPERATORS], [1] * 4) < ONCE_IN_A_MILLION[3]
    assert chi_square([counts[digit] for digit in "0123456789"], [1] * 10) < ONCE_IN_A_MILLION[9]


def test_one_node_in_four_is_an_operator_and_its_arguments_are_uniform():
    """Of all trees; those of the benchmark are chosen by length, which numbers of arguments have a part in."""
    rng = Random(2)
    drawn = [listops.draw_tree(rng, 0, 10**9) for _ in range(4000)]
    arguments = Counter(count for levels in drawn for level in levels[:9] for count in level)
    digits = arguments.pop(0)
    operators = arguments.total()
    total = digits + operators
    assert total > 200_000
    # 4.9 standard deviations
    assert abs(operators - total / 4) < 4.9 * (total * 3 / 16) ** 0.5
    assert set(arguments) == set(range(2, 11))
    assert chi_square([arguments[count] for count in range(2, 11)], [1] * 9) < ONCE_IN_A_MILLION[8]


def test_arguments_of_the_benchmark_are_roughly_uniform(some):
    arguments = Counter(count for text, _ in some for _, count in nodes(text) if count)
    for count in range(2, 11):
        assert arguments[count] / arguments.total() == pytest.approx(1 / 9, rel=0.03)


def test_lengths_are_distributed_as_the_rules_say(some):
    """Giving up early on long trees does not change which are kept."""
    law = length_probabilities(2000)[501:]
    shares = law.cumsum() / law.sum()
    # twenty ranges of lengths, about equally likely
    ends = [*np.searchsorted(shares, np.arange(1, 20) / 20), len(law)]
    starts = [0, *ends[:-1]]
    lengths = np.array([len(text.split()) - 501 for text, _ in some])
    observed = [((start <= lengths) & (lengths < end)).sum() for start, end in zip(starts, ends, strict=True)]
    expected = [law[start:end].sum() for start, end in zip(starts, ends, strict=True)]
    assert chi_square(observed, expected) < ONCE_IN_A_MILLION[19]


def test_as_many_trees_are_kept_as_the_rules_say():
    trees, rng = 20_000, Random(3)
    kept = sum(listops.draw_tree(rng, 500, 2000) is not None for _ in range(trees))
    expected = length_probabilities(2000)[501:].sum()
    assert abs(kept - trees * expected) < 4.9 * (trees * expected * (1 - expected)) ** 0.5


def test_roots_have_as_many_arguments_as_the_rules_say(some):
    observed = Counter(arguments for text, _ in some for depth, arguments in nodes(text) if depth == 1)
    expected = [length_probabilities(2000, first=[arguments])[501:].sum() for arguments in range(2, 11)]
    assert chi_square([observed[arguments] for arguments in range(2, 11)], expected) < ONCE_IN_A_MILLION[8]


def test_examples_are_unique():
    # there are only 10 digits and 4 × 100 operations on two of them: most are drawn again and again
    texts = [text for text, _ in islice(examples(0, 0, 5), 410)]
    assert len(set(texts)) == 410


def test_examples_depend_on_the_seed_alone(some):
    assert list(islice(examples(seed=1), 50)) == some[:50]
    assert not {text for text, _ in islice(examples(seed=2), 50)} & {text for text, _ in some}


def test_the_benchmark_stays_the_same():
    """Published numbers use this data; a change must be deliberate."""
    lines = "".join(f"{text} {value}\n" for text, value in islice(examples(), 100))
    assert (
        hashlib.sha256(lines.encode()).hexdigest() == "e8b150d1a75e223f7c8a77a2d24142cf38f707404535de902201c8d945638da5"
    )


def test_running_out_of_examples_raises(monkeypatch):
    monkeypatch.setattr(listops, "PATIENCE", 2000)
    with pytest.raises(RuntimeError, match=r"after 10 expressions longer than 0 and shorter than 2.*request fewer"):
        list(islice(examples(0, 0, 2), 11))
    source = examples(0, 1, 4)
    with pytest.raises(RuntimeError, match=r"after 0 expressions.*allow more lengths"):
        next(source)


@pytest.mark.parametrize(("shortest", "longest"), [(500, 501), (500, 500), (2000, 500), (-1, 10)])
def test_impossible_limits_are_rejected_at_once(shortest, longest):
    with pytest.raises(ValueError, match=f"shortest={shortest} and less than longest={longest}"):
        examples(0, shortest, longest)


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="seed is -1"):
        examples(-1)


def read(path):
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def test_files_hold_the_examples_and_share_none(tmp_path):
    folder = tmp_path / "new" / "listops"
    write(folder, train=60, validation=20, test=10, seed=4)
    assert {path.name for path in folder.iterdir()} == {"train.jsonl.gz", "validation.jsonl.gz", "test.jsonl.gz"}
    splits = {name: read(folder / f"{name}.jsonl.gz") for name in ("train", "validation", "test")}
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 60, "validation": 20, "test": 10}
    rows = [row for split in splits.values() for row in split]
    assert len({row["text"] for row in rows}) == 90
    for row in rows:
        assert set(row) == {"text", "label"}
        assert row["label"] == value_by_python(row["text"])
    assert {(row["text"], row["label"]) for row in rows} == set(islice(examples(seed=4), 90))


def test_splits_share_nothing_where_examples_are_few(tmp_path):
    """Every one of the 10 digits and 400 pairs, once."""
    write(tmp_path, train=300, validation=60, test=50, shortest=0, longest=5)
    texts = [row["text"] for name in ("train", "validation", "test") for row in read(tmp_path / f"{name}.jsonl.gz")]
    assert len(texts) == len(set(texts)) == 410


def test_the_same_seed_gives_the_same_bytes_and_a_larger_training_set_the_same_tests(tmp_path):
    write(tmp_path / "a", train=5, validation=4, test=3)
    write(tmp_path / "b", train=5, validation=4, test=3)
    write(tmp_path / "c", train=8, validation=4, test=3)
    write(tmp_path / "d", train=5, validation=4, test=3, seed=1)
    for name in ("train", "validation", "test"):
        contents = {folder: (tmp_path / folder / f"{name}.jsonl.gz").read_bytes() for folder in "abcd"}
        assert contents["a"] == contents["b"]
        assert contents["a"][3:8] == bytes(5)  # the header of gzip: no name, no time
        assert (contents["a"] == contents["c"]) == (name != "train")
        assert contents["a"] != contents["d"]
    assert read(tmp_path / "c" / "train.jsonl.gz")[:5] == read(tmp_path / "a" / "train.jsonl.gz")


def test_a_failure_leaves_the_old_files_and_nothing_else(tmp_path, monkeypatch):
    write(tmp_path, train=3, validation=2, test=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(listops, "PATIENCE", 2000)
    with pytest.raises(RuntimeError, match="after 10 expressions"):
        write(tmp_path, train=7, validation=2, test=2, shortest=0, longest=2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("wrong", [{"train": -1}, {"validation": -1}, {"test": -1}, {"seed": -1}, {"longest": 500}])
def test_invalid_arguments_are_rejected_before_anything_is_written(tmp_path, wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=rf"{name}( is |=){value}"):
        write(tmp_path / "listops", **wrong)
    assert not (tmp_path / "listops").exists()
