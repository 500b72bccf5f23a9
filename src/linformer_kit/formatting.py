"""Human-readable numbers, lines and progress bars."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def format_number(value: float) -> str:
    """Multiples of 1,024 as `4k`, other numbers with three digits.

    >>> [format_number(value) for value in (512, 4096, 0.25, 20, 1500)]
    ['512', '4k', '0.25', '20', '1,500']
    """
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:.0f}k"
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def format_duration(seconds: float) -> str:
    """
    >>> [format_duration(seconds) for seconds in (0.002, 0.25, 40, 300, 286.7, 7325, math.inf)]
    ['2 ms', '250 ms', '40 s', '5 min', '4 min 47 s', '2 h 2 min', '∞']
    """
    if math.isinf(seconds):
        return "∞"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def format_size(mib: float) -> str:
    """
    >>> format_size(20), format_size(4096)
    ('20 MiB', '4 GiB')
    """
    return f"{mib / 1024:.3g} GiB" if mib >= 1024 else f"{mib:.3g} MiB"


def format_ratio(value: float) -> str:
    """
    >>> format_ratio(0.0123), format_ratio(1), format_ratio(31.4)
    ('0.012×', '1.00×', '31.4×')
    """
    return f"{value:.2g}×" if value < 0.1 else f"{value:.2f}×" if value < 10 else f"{value:,.1f}×"


def format_value(value: float) -> str:
    """Integers in full, other numbers with four digits.

    >>> [format_value(value) for value in (4096, 0.98214, 10044.6, float("inf"))]
    ['4,096', '0.9821', '10,045', '∞']
    """
    if isinstance(value, int):
        return f"{value:,}"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "process"), plural(2, "process"), plural(1024, "thread")
    ('1 process', '2 processes', '1,024 threads')
    """
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def say(console: "Console", text: str) -> None:
    """Print a line without wrapping, so that paths and commands can be copied."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress_bar(console: "Console", description: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal, nothing elsewhere; each call advances it by one and sets the text at its end."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    status = TextColumn("{task.fields[status]}")
    with Progress(*columns, status, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total, status="")
        yield lambda text: progress.update(task, advance=1, status=text)
