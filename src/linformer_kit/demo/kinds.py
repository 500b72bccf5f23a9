"""The kinds of files that the demo tells apart: how they are named, what their content must be, what a piece must show."""

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


# what the content must be


def is_text(content: bytes) -> bool:
    """UTF-8 without control characters other than white space."""
    try:
        return not re.search(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]", content.decode())
    except UnicodeDecodeError:
        return False


def is_python(content: bytes) -> bool:
    """What Python parses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes and the like, which are none of our business
            return bool(ast.parse(content).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def is_c(content: bytes) -> bool:
    """Text with a line for the preprocessor, and a statement."""
    return (
        is_text(content)
        and b";" in content
        and bool(re.search(rb"^\s*#\s*(include|define|if|ifdef|ifndef|pragma)\b", content, re.M))
    )


def is_json(content: bytes) -> bool:
    """What parses as JSON, a single number or string excepted."""
    try:
        return isinstance(json.loads(content), dict | list)
    except (ValueError, RecursionError):
        return False


def is_markup(content: bytes) -> bool:
    """Text with tags."""
    return is_text(content) and has_tags(content)


def starts_with(*beginnings: bytes) -> Callable[[bytes], bool]:
    """A check for the first bytes that mark a binary format."""
    return lambda content: content.startswith(beginnings)


def is_byte_code(content: bytes) -> bool:
    """The magic number of byte code, of whatever version, ends in a line break."""
    return content[2:4] == b"\r\n"


# what a window must show: pieces that are half the one and half the other, as a program in a manual, are left out


def is_prose(window: bytes) -> bool:
    """Mostly letters, with the commonest words about as common as in English."""
    words = re.findall(rb"[a-z]+", window.lower())
    common = sum(word in COMMON for word in words)
    return sum(map(len, words)) > 0.6 * len(window) and common > 0.1 * len(words)


def has_code(signs: bytes) -> Callable[[bytes], bool]:
    """A check for signs of the language in a third of the lines."""

    def check(window: bytes) -> bool:
        lines = [set(line) for line in window.splitlines() if line.strip()]
        return 3 * sum(not line.isdisjoint(signs) for line in lines) > len(lines)

    return check


def has_tags(window: bytes) -> bool:
    """A tag in 100 bytes, on average."""
    return 100 * len(re.findall(rb"<[/!?a-zA-Z]", window)) > len(window)


def is_like_noise(window: bytes) -> bool:
    """Seven bits of information per byte and more: what is compressed holds no more patterns."""
    return -sum(count / len(window) * log2(count / len(window)) for count in Counter(window).values()) > 7


def is_not_text(window: bytes) -> bool:
    """Less than seven tenths can be printed."""
    return len(window.translate(None, PRINTABLE)) > 0.3 * len(window)


# all of them


class Kind(NamedTuple):
    """How a kind of file is named, what its content must be, and what a window of it must show."""

    name: re.Pattern[str]
    check: Callable[[bytes], bool]
    shows: Callable[[bytes], bool] = bool  # anything


KINDS = {
    "Python": Kind(re.compile(r"\.py$"), is_python, shows=has_code(b"=([{")),
    "byte code": Kind(re.compile(r"(?<!\.opt-\d)\.pyc$"), is_byte_code, shows=is_not_text),
    "C or C++": Kind(re.compile(r"\.(h|c|cc|cpp|hpp)$"), is_c, shows=has_code(b"=(;{}#")),
    # ELF of Linux, PE of Windows, Mach-O of macOS for one or several processors
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
    "HTML or XML": Kind(re.compile(r"\.(html?|xml|svg|xslt?|xsd|rng)$"), is_markup, shows=has_tags),
    # PNG, JPEG, gzip, bzip2, xz, ZIP
    "compressed": Kind(
        re.compile(r"\.(png|jpe?g|gz|bz2|xz|zip|whl)$"),
        starts_with(b"\x89PNG", b"\xff\xd8\xff", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"PK\x03\x04"),
        shows=is_like_noise,
    ),
}
