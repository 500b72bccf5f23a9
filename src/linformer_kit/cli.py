"""The command line: one short function per command.

What is slow to import, torch above all, is imported inside the commands, so that `linformer --help` answers at once.
"""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .errors import Stopped, UserError

app = typer.Typer(
    no_args_is_help=True,
    # our mistakes are shown as Python shows them; the boxes of rich hide more than they explain
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# what the extras `keras` and `train` install
OF_KERAS = {"keras", "tensorflow", "jax"}
OF_TRAINING = {"accelerate", "datasets", "filelock", "jinja2", "matplotlib", "sacrebleu", "tokenizers", "yaml"}


def end_on_signal(number: int, frame: object) -> None:
    """SIGTERM as an exception, as Ctrl-C is one, so that what was begun is cleared away."""
    typer.echo("Stopped.", err=True)
    sys.exit(128 + number)


@contextmanager
def short_errors() -> Iterator[None]:
    """What the user can mend ends in one line and code 2, a signal in one line and 128 + its number; tracebacks are for bugs."""
    before = signal.signal(signal.SIGTERM, end_on_signal)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:  # whoever read the output has seen enough; typer ends quietly
        raise
    except ModuleNotFoundError as error:
        name = "train" if error.name in OF_TRAINING else error.name if error.name in OF_KERAS else None
        extra = f'; pip install "linformer-kit[{name}]"' if name else ""
        typer.echo(f"Error: {error}{extra}", err=True)
        raise typer.Exit(2) from None
    except (OSError, UserError) as error:
        typer.echo(f"Error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
    except Stopped as stop:
        typer.echo(str(stop), err=True)
        raise typer.Exit(stop.code) from None
    finally:
        signal.signal(signal.SIGTERM, before)


class Projection(StrEnum):
    """What E is."""

    linear = "linear"
    dynamic = "dynamic"
    conv = "conv"
    mean = "mean"
    max = "max"
    random = "random"


class Sharing(StrEnum):
    """Which matrices of one layer are the same."""

    none = "none"
    headwise = "headwise"
    kv = "kv"


class Backend(StrEnum):
    """What the layer is made of."""

    torch = "torch"
    keras = "keras"


class Preset(StrEnum):
    """Sweeps that come with the package."""

    paper_table_3 = "paper-table-3"


class What(StrEnum):
    """What a picture shows."""

    costs = "costs"
    paper_table = "paper-table"
    learning = "learning"
    quality = "quality"
    sharing = "sharing"
    heads = "heads"
    slots = "slots"


class Per(StrEnum):
    """What one input of a file is."""

    line = "line"
    file = "file"


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"linformer-kit {__version__}")
        raise typer.Exit


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
    """Train a detector of file kinds on the bytes of what this Python has installed, test and time it: some minutes."""
    with short_errors():
        from .demo import run

        run(output)


CONFIG = Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped configuration, such as imdb.")]
OVERRIDES = Annotated[
    list[str] | None, typer.Argument(help="Settings that replace those of the file: training.epochs=2 …")
]
RUN = Annotated[Path, typer.Argument(help="The folder of a finished run.")]


@app.command()
def prepare(config: CONFIG, overrides: OVERRIDES = None) -> None:
    """Train a tokenizer and tokenize the data ahead of training; shows how long the texts are."""
    with short_errors():
        from .training.config import load_config

        loaded = load_config(config, overrides)  # a slip of the pen is told before the rest is imported
        from .training.prepare import show

        show(loaded)


@app.command()
def train(config: CONFIG, overrides: OVERRIDES = None) -> None:
    """Train a model; the same command goes on with a run that was stopped or died."""
    with short_errors():
        from rich.console import Console

        from .training.config import load_config

        loaded = load_config(config, overrides)
        from .training.train import train

        train(loaded, Console())


@app.command()
def evaluate(
    run: RUN,
    split: Annotated[str, typer.Option(help="Which split of the run's data: train, validation or test.")] = "test",
    data: Annotated[str | None, typer.Option(help="Another file or folder, read as the run's data were.")] = None,
    beams: Annotated[int, typer.Option(min=1, help="Beams of a translation.")] = 1,
) -> None:
    """Measure a run on its test split or another file; writes evaluation.json."""
    with short_errors():
        from rich.console import Console

        from .training.evaluate import evaluate, table_of

        metrics = evaluate(run, split, data, beams)
        if os.environ.get("RANK", "0") == "0":  # of several processes, one speaks
            Console().print(table_of(metrics))


@app.command()
def predict(
    run: RUN,
    given: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT|FILE]...", help="Texts or files; else standard input.")
    ] = None,
    per: Annotated[Per | None, typer.Option(help="Whether a line or a whole file is one text.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Write JSON lines.")] = False,
    top: Annotated[int, typer.Option(min=1, help="How many tokens to offer for a mask.")] = 5,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="How many tokens to go on by; else 50, or half of what the model takes.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Of a continuation; 0 takes the likeliest token.")] = 0.0,
    beams: Annotated[int, typer.Option(min=1, help="Beams of a translation.")] = 1,
    seed: Annotated[int, typer.Option(help="Of what is drawn when temperature is not 0.")] = 0,
) -> None:
    """Classify, fill masks, continue or translate."""
    with short_errors():
        from .training.predict import Options, Predictor, as_text, read_inputs

        predictor = Predictor(
            run, Options(top, tokens, temperature, beams, seed), lambda line: typer.echo(line, err=True)
        )
        for answer in predictor(read_inputs(given or [], per.value if per else None, predictor.config)):
            typer.echo(json.dumps(answer, ensure_ascii=False) if json_lines else as_text(answer))


@app.command()
def benchmark(
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens per example.")] = 2000,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per batch.")] = 25,
    embedding_dim: Annotated[int, typer.Option(min=1, help="Features of a token.")] = 256,
    projection_dim: Annotated[int, typer.Option(min=1, help="K: rows that keys and values are shortened to.")] = 64,
    num_heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 8,
    hidden_dim: Annotated[int, typer.Option(min=1, help="Features of a head.")] = 128,
    projection: Annotated[Projection, typer.Option(help="Kind of E.")] = Projection.linear,
    sharing: Annotated[Sharing, typer.Option(help="Which matrices are shared.")] = Sharing.headwise,
    backend: Annotated[Backend, typer.Option(help="Keras uses the backend in KERAS_BACKEND.")] = Backend.torch,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, …")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Time the prediction of one attention layer, compared with full attention of the same sizes."""
    with short_errors():
        from rich.console import Console

        from .bench.prediction_time import Experiment, measure, show

        sizes = (sequence_length, batch_size, embedding_dim, projection_dim, num_heads, hidden_dim)
        found = measure(
            Experiment(*sizes, projection.value, sharing.value, backend.value, device), Console(stderr=True)
        )
        if as_json:
            typer.echo(json.dumps(found, indent=1))
        else:
            show(found, Console())


def last_of(names: str) -> Callable[[str], list[str]]:
    """Completes the last of several values separated by commas; `names` is a tuple in `bench.point`."""

    def complete(incomplete: str) -> list[str]:
        from .bench import point

        *before, last = incomplete.split(",")
        return [",".join([*before, name]) for name in getattr(point, names) if name.startswith(last)]

    return complete


@app.command()
def compare(
    sweep: Annotated[Path | None, typer.Argument(help="A YAML file; docs/compare.md lists its keys.")] = None,
    preset: Annotated[Preset | None, typer.Option(help="A sweep that comes with the package.")] = None,
    lengths: Annotated[str | None, typer.Option(metavar="LIST", help="Tokens per example: 512,1024,2048.")] = None,
    projected_lengths: Annotated[str | None, typer.Option(metavar="LIST", help="K: 64,128.")] = None,
    implementations: Annotated[
        str | None, typer.Option(metavar="LIST", help="What to compare.", autocompletion=last_of("NAMES"))
    ] = None,
    subjects: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="layer,encoder,encoder-decoder,…", autocompletion=last_of("SUBJECTS")),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="LIST", help="forward,training,generation,…", autocompletion=last_of("STEPS"))
    ] = None,
    backends: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="torch,keras-torch,keras-jax,…", autocompletion=last_of("BACKENDS")),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per batch; 0: as many as memory and time allow.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps, …")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds of a call; slower calls are not timed.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="The CSV (default: key output, name of the preset, or compare.csv).")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard earlier measurements in that CSV.")] = False,
    summary: Annotated[
        bool, typer.Option("--summary", help="Only show the CSV and evaluate the targets; measure nothing.")
    ] = False,
) -> None:
    """Measure time and memory of implementations; one CSV, resumable."""
    flags = {
        **{"lengths": lengths, "projected_lengths": projected_lengths, "implementations": implementations},
        **{"subjects": subjects, "steps": steps, "backends": backends},
        **{"tokens": tokens, "device": device, "time_limit": time_limit},
    }
    with short_errors():
        from .bench.compare import run

        values = {name: value for name, value in flags.items() if value is not None}
        run(sweep, preset.value if preset else None, values, output, fresh, summary)


@app.command()
def plot(
    given: Annotated[
        list[Path],
        typer.Argument(
            metavar="CSV|RUN...", help="Tables of `linformer compare`, folders of runs, of saved models, of spectra."
        ),
    ],
    what: Annotated[
        What | None,
        typer.Option(
            help="Time and memory against length; the paper's table 3; metrics against steps; quality against K; sharings side by "
            "side; attention heads on a text; the slots of E. Else what the given files allow."
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="For heads, and dynamic slots: a text, or a file with one.")] = None,
    output: Annotated[Path, typer.Option(help="A folder for PNG and SVG, or one file.png or file.svg.")] = Path(
        "plots"
    ),
) -> None:
    """Draw pictures of tables and runs."""
    with short_errors():
        from .report.plot import plot

        for path in plot(given, what.value if what else None, text, output):
            typer.echo(path)


@app.command()
def report(
    given: Annotated[
        list[Path],
        typer.Argument(metavar="RUN|CSV...", help="Folders of runs or spectra, tables of `linformer compare`."),
    ],
    output: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
) -> None:
    """Write one page that needs nothing else: what was run, sortable tables, plots, differences, predictions, environment."""
    with short_errors():
        from .report.report import report

        report(given, output)
        typer.echo(output)


@app.command()
def spectrum(
    model: Annotated[
        str, typer.Argument(help="An encoder that transformers can load, by folder or name; or the folder of a run.")
    ],
    text: Annotated[list[Path], typer.Option(help="A file with text; may be given several times.")],
    length: Annotated[int, typer.Option(min=2, help="Tokens of a piece of the text.")] = 512,
    pieces: Annotated[int, typer.Option(min=1, help="How many pieces, spread over the text.")] = 16,
    error: Annotated[
        float, typer.Option(help="The share of the singular values that may be lost, for the suggestion.")
    ] = 0.05,
    output: Annotated[Path, typer.Option(help="Folder for tables, pictures and the suggested K.")] = Path("spectrum"),
) -> None:
    """How low the rank of a model's attention is (the paper's Figure 1), and which K that suggests for each layer."""
    with short_errors():
        from rich.console import Console

        from .analysis.spectrum import spectrum

        spectrum(model, text, length, pieces, error, output, Console())


if __name__ == "__main__":
    app()
