"""The command line: one short function per command.

What is slow to import, torch above all, is imported inside the commands, so that `linformer --help` answers at once.
"""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from . import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    # our mistakes are shown as Python shows them; the boxes of rich hide more than they explain
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextmanager
def short_errors() -> Iterator[None]:
    """What the user can mend ends in one line and exit code 2, Ctrl-C in one line and 130; tracebacks are for bugs."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
        raise typer.Exit(130) from None
    except (OSError, ModuleNotFoundError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"linformer-kit {__version__}")
        raise typer.Exit


# with a callback, a single command stays a subcommand
@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Transformers over long sequences at linear cost."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # where × cannot be shown, as in an ASCII log, a ? is better than an end
        sys.stdout.reconfigure(errors="replace")


@app.command()
def demo(output: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("demo")) -> None:
    """Train and time a small Linformer beside full attention: about a minute and a half on two cores."""
    with short_errors():
        from .demo import run

        run(output)
