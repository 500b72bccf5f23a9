"""The kinds of files in the dataset `file_kinds`: their names, their content, and what a window must show."""

import ast
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable
from math import log2
from typing import NamedTuple

COMMON = {b"the", b"of", b"and", b"to", b"a", b"in", b"is", b"for", b"or", b"you", b"this", b"with"}
PRINTABLE = bytes(range(32, 127))


def is_text(content: bytes) -> bool:
    """UTF-8 without control characters except white space."""
    try:
        return not re.search(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]", content.decode())
    except UnicodeDecodeError:
        return False


def is_python(content: bytes) -> bool:
    """Python can parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes and the like
            return bool(ast.parse(content).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def is_c(content: bytes) -> bool:
    """Text with a preprocessor line and a statement."""
    directive = re.search(rb"^\s*#\s*(include|define|if|ifdef|ifndef|pragma)\b", content, re.M)
    return is_text(content) and b";" in content and bool(directive)


def is_json(content: bytes) -> bool:
    """JSON, except a single number or string."""
    try:
        return isinstance(json.loads(content), dict | list)
    except (ValueError, RecursionError):
        return False


def starts_with(*beginnings: bytes) -> Callable[[bytes], bool]:
    """A check for the magic number of a binary format."""
    return lambda content: content.startswith(beginnings)


# checks of a window; mixed ones, such as a program in a manual, are left out


def is_prose(window: bytes) -> bool:
    """Mostly letters, with the most common English words."""
    words = re.findall(rb"[a-z]+", window.lower())
    common = sum(word in COMMON for word in words)
    return sum(map(len, words)) > 0.6 * len(window) and common > 0.1 * len(words)


def has_code(signs: bytes) -> Callable[[bytes], bool]:
    """A check for characters of a programming language in a third of the lines."""

    def check(window: bytes) -> bool:
        lines = [set(line) for line in window.splitlines() if line.strip()]
        return 3 * sum(not line.isdisjoint(signs) for line in lines) > len(lines)

    return check


def has_tags(window: bytes) -> bool:
    """At least one tag per 100 bytes on average."""
    return 100 * len(re.findall(rb"<[/!?a-zA-Z]", window)) > len(window)


def is_noise(window: bytes) -> bool:
    """More than seven bits of information per byte: compressed data has no patterns."""
    return -sum(count / len(window) * log2(count / len(window)) for count in Counter(window).values()) > 7


def is_not_text(window: bytes) -> bool:
    """Less than 70% of the bytes are printable."""
    return len(window.translate(None, PRINTABLE)) > 0.3 * len(window)


class Kind(NamedTuple):
    """Patterns of the name, a check of the content, and a check of a window."""

    name: re.Pattern[str]
    check: Callable[[bytes], bool]
    shows: Callable[[bytes], bool] = bool  # anything


KINDS = {
    "Python": Kind(re.compile(r"\.py$"), is_python, shows=has_code(b"=([{")),
    # the magic number of byte code ends in a line break in every version of Python
    "byte code": Kind(re.compile(r"(?<!\.opt-\d)\.pyc$"), lambda content: content[2:4] == b"\r\n", shows=is_not_text),
    "C or C++": Kind(re.compile(r"\.(h|c|cc|cpp|hpp)$"), is_c, shows=has_code(b"=(;{}#")),
    # ELF (Linux), PE (Windows), Mach-O for one or several processors (macOS)
    "machine code": Kind(
        re.compile(r"\.(so(\.\d+)*|dylib|pyd|dll|exe)$"),
        starts_with(b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe"),
        shows=is_not_text,
    ),
    "English": Kind(
        re.compile(r"(\.(md|rst|txt)|/METADATA|/(LICEN[CS]E|NOTICE|README|COPYING|AUTHORS)[^/]*)$"),
        is_text,
        shows=is_prose,
    ),
    "JSON": Kind(re.compile(r"\.json$"), is_json),
    "HTML or XML": Kind(
        re.compile(r"\.(html?|xml|svg|xslt?|xsd|rng)$"),
        lambda content: is_text(content) and has_tags(content),
        shows=has_tags,
    ),
    # PNG, JPEG, gzip, bzip2, xz, zip
    "compressed": Kind(
        re.compile(r"\.(png|jpe?g|gz|bz2|xz|zip|whl)$"),
        starts_with(b"\x89PNG", b"\xff\xd8\xff", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"PK\x03\x04"),
        shows=is_noise,
    ),
}
