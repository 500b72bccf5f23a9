"""The command line: one short function per command.

Slow imports, such as torch, happen inside the commands, so that `linformer --help` is fast.
"""

import gc
import io
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .errors import Stopped, UserError
from .models.options_linformer import projection_names
from .process_memory import preload_allocator

app = typer.Typer(
    no_args_is_help=True,
    # plain tracebacks for bugs
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# modules that the extras `keras` and `train` install
KERAS_MODULES = {"keras", "tensorflow", "jax"}
TRAINING_MODULES = {"accelerate", "datasets", "jinja2", "matplotlib", "sacrebleu", "tokenizers", "yaml"}


def end_on_signal(number: int, frame: object) -> None:
    """Turn SIGTERM into an exception, like Ctrl-C, so that temporary files are removed."""
    typer.echo("Stopped.", err=True)
    sys.exit(128 + number)


# A pool of workers waits until each has ended by SIGTERM. A worker that waits for a lock would never run the handler.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def repeat_lost_interrupt(lost: "sys.UnraisableHookArgs") -> None:
    """Repeat a Ctrl-C that arrived in a destructor, where Python ignores exceptions."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        repeat = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        repeat.daemon = True
        repeat.start()
    else:
        sys.__unraisablehook__(lost)


@contextmanager
def report_user_errors() -> Iterator[None]:
    """Print errors caused by user input as one line, with exit code 2; a signal gives 128 + its number."""
    before = signal.signal(signal.SIGTERM, end_on_signal), warnings.formatwarning, sys.unraisablehook
    sys.unraisablehook = repeat_lost_interrupt
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {message}\n"  # without a line of our source
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:  # the reader closed the pipe; typer exits silently
        raise
    except ModuleNotFoundError as error:
        name = "train" if error.name in TRAINING_MODULES else error.name if error.name in KERAS_MODULES else None
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
        signal.signal(signal.SIGTERM, before[0])
        warnings.formatwarning = before[1]
        sys.unraisablehook = before[2]


@contextmanager
def imports() -> Iterator[None]:
    """Import torch and transformers without garbage collections.

    A collection finds next to nothing among modules, which stay, but traverses all of them: when their objects are
    allocated, and again at exit. That is a third of the CPU time of `linformer predict`.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# full attention is not an option here: every projection is compared with it
Projection = StrEnum("Projection", [name for name in projection_names() if name != "none"])  # type: ignore[misc]
DEFAULT_PROJECTION = Projection("linear")


class Sharing(StrEnum):
    """Which projection matrices of a layer are shared."""

    none = "none"
    headwise = "headwise"
    kv = "kv"


class Backend(StrEnum):
    """Framework of a layer."""

    torch = "torch"
    keras = "keras"


# packages whose models can be imported
Package = StrEnum("Package", {"linformer": "linformer", "linformer_pytorch": "linformer-pytorch", "fairseq": "fairseq"})


class Activation(StrEnum):
    """Activation of a feed-forward."""

    gelu = "gelu"
    relu = "relu"


class Preset(StrEnum):
    """Built-in sweeps."""

    paper_table_3 = "paper-table-3"
    encoder_only = "encoder-only"


class FigureKind(StrEnum):
    """What a figure shows."""

    costs = "costs"
    paper_table = "paper-table"
    learning = "learning"
    quality = "quality"
    sharing = "sharing"
    heads = "heads"
    slots = "slots"


class Precision(StrEnum):
    """Precision of matrix products in inference."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"


# of the weights of an exported model
WEIGHT_PRECISIONS = [each.value for each in Precision if each.value != "auto"]
WeightPrecision = StrEnum("WeightPrecision", WEIGHT_PRECISIONS)  # type: ignore[misc]
DEFAULT_WEIGHTS = WeightPrecision("float32")


class InputUnit(StrEnum):
    """One input per line, or one per file."""

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
    """Transformers for long sequences at linear cost."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # in an ASCII log, print ? instead of × rather than fail
        sys.stdout.reconfigure(errors="replace")


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Directory for the figure and the numbers.")] = Path("demo"),
) -> None:
    """Train, test and benchmark a file type classifier on the files of this Python installation, in a few minutes."""
    with report_user_errors():
        from .demo import run

        run(output)


def complete_config(incomplete: str) -> list[str]:
    """Shipped configurations and YAML files."""
    from .training.config import shipped_configs

    return with_yaml_files(shipped_configs(), incomplete)


def complete_study(incomplete: str) -> list[str]:
    """Shipped studies and YAML files."""
    from .bench.study_tables import shipped_studies

    return with_yaml_files(shipped_studies(), incomplete)


def with_yaml_files(names: Iterable[str], incomplete: str) -> list[str]:
    """Those of the names and of the YAML files in the directory typed so far that begin with `incomplete`."""
    place = incomplete[: incomplete.rfind("/") + 1]
    files = sorted(f"{place}{path.name}" for path in Path(place).glob("*.y*ml") if path.suffix in (".yaml", ".yml"))
    return [name for name in (*names, *files) if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Run directories in or one level below the directory typed so far; inside a run, its checkpoints."""
    place = incomplete[: incomplete.rfind("/") + 1]
    folder = Path(place)
    marks = [*folder.glob("*/environment.json"), *folder.glob("*/*/environment.json")]
    checkpoints = folder.glob("checkpoint-*" if folder.name == "checkpoints" else "checkpoints/checkpoint-*")
    found = sorted({*(path.parent for path in marks), *checkpoints})
    names = (f"{place}{path.relative_to(folder).as_posix()}" for path in found)
    return [name for name in names if name.startswith(incomplete)]


CONFIG = Annotated[
    str,
    typer.Argument(help="YAML file, or name of a shipped configuration, such as imdb.", autocompletion=complete_config),
]
OVERRIDES = Annotated[list[str] | None, typer.Argument(help="Overrides, such as training.epochs=2.")]
RUN = Annotated[
    str,
    typer.Argument(
        help="Directory of a finished run, a checkpoint (RUN/checkpoints/checkpoint-75), or a W&B artifact "
        "(wandb:ENTITY/PROJECT/ARTIFACT:ALIAS).",
        autocompletion=complete_run,
    ),
]

PRECISION = Annotated[
    Precision,
    typer.Option(
        help="Precision of matrix products; auto: that of the training, but float32 where bfloat16 is not fast."
    ),
]
COMPILE = Annotated[
    bool, typer.Option("--compile", help="Compile the model first, which takes a minute; for many inputs.")
]


@app.command()
def prepare(config: CONFIG, overrides: OVERRIDES = None) -> None:
    """Train a tokenizer, tokenize the data and show the lengths of the texts."""
    with report_user_errors():
        from .training.config import load_config

        with imports():
            loaded = load_config(config, overrides)  # before slow imports, so that typos are reported at once
            from .training.prepare import show

        show(loaded)


@app.command()
def train(config: CONFIG, overrides: OVERRIDES = None) -> None:
    """Train a model, or resume an interrupted run. Estimates the run time first."""
    with report_user_errors():
        from rich.console import Console

        from .training.config import load_config

        with imports():
            loaded = load_config(config, overrides)
            from .training.train import train

        train(loaded, Console())


@app.command()
def evaluate(
    run: RUN,
    split: Annotated[str, typer.Option(help="Split of the data of the run: train, validation or test.")] = "test",
    data: Annotated[str | None, typer.Option(help="Another file or directory in the same format.")] = None,
    beams: Annotated[int, typer.Option(min=1, help="Number of beams for translation.")] = 1,
    precision: PRECISION = Precision.auto,
    compile_: COMPILE = False,
) -> None:
    """Evaluate a run or a checkpoint on its test split or on another file; writes evaluation.json."""
    with report_user_errors():
        from rich.console import Console

        with imports():
            from .training.evaluate import evaluate, table_of

        metrics = evaluate(run, split, data, beams, precision.value, compile_)
        if os.environ.get("RANK", "0") == "0":  # one process prints
            Console().print(table_of(metrics))


@app.command()
def predict(
    run: RUN,
    inputs: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT|FILE", help="Texts or files; default: standard input.")
    ] = None,
    per: Annotated[
        InputUnit | None, typer.Option(help="One text per line or per file (default: as in training).")
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Write JSON lines.")] = False,
    top: Annotated[int, typer.Option(min=1, help="Number of tokens to list per mask.")] = 5,
    tokens: Annotated[int | None, typer.Option(min=1, help="Maximum number of new tokens (default 50).")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0: greedy decoding.")] = 0.0,
    beams: Annotated[int, typer.Option(min=1, help="Number of beams for translation.")] = 1,
    seed: Annotated[int, typer.Option(help="Random seed for sampling.")] = 0,
    precision: PRECISION = Precision.auto,
    compile_: COMPILE = False,
) -> None:
    """Classify, fill masks, continue or translate texts."""
    with report_user_errors():
        from .training.run import open_model

        with imports():
            opened = open_model(run)  # before slow imports, so that typos are reported at once
            from .training.predict import Options, Predictor, as_text, read_inputs

        options = Options(top, tokens, temperature, beams, seed)
        predictor = Predictor(opened, options, lambda line: typer.echo(line, err=True), precision.value, compile_)
        for answer in predictor(read_inputs(inputs or [], per.value if per else None, predictor.config)):
            typer.echo(json.dumps(answer, ensure_ascii=False) if json_lines else as_text(answer))


@app.command()
def export(
    model: Annotated[
        str,
        typer.Argument(metavar="RUN|MODEL", help="As for predict, or a saved model.", autocompletion=complete_run),
    ],
    output: Annotated[Path, typer.Option(help="Directory for the exported model.")],
    precision: Annotated[WeightPrecision, typer.Option(help="Precision of the weights.")] = DEFAULT_WEIGHTS,
) -> None:
    """Write the model of a run in another precision, with its tokenizer, for transformers, evaluate and predict."""
    with report_user_errors():
        from .training.export import export

        typer.echo(export(model, output, precision.value))


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="State dict: a PyTorch or safetensors file.")],
    package: Annotated[Package, typer.Option("--from", help="Package that the model comes from.")],
    output: Annotated[Path, typer.Option(help="Directory for the converted model.")],
    heads: Annotated[int | None, typer.Option(min=1, help="Heads; not in files of linformer and fairseq.")] = None,
    activation: Annotated[Activation | None, typer.Option(help="Activation of the feed-forward; default gelu.")] = None,
    full_attention: Annotated[
        bool, typer.Option("--full-attention", help="The linformer-pytorch model was built with full_attention=True.")
    ] = False,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="input_size of a linformer-pytorch model with method='convolution'.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of the model's tokenizer, which is copied to the output.")
    ] = None,
) -> None:
    """Convert a model of linformer (PyPI), linformer-pytorch or fairseq."""
    with report_user_errors():
        with imports():
            from transformers.utils import logging

            from .convert.import_model import convert, describe
            from .convert.packages import Options

        logging.disable_progress_bar()
        options = Options(heads, activation.value if activation else None, full_attention or None, max_length)
        module, weights = convert(file, package.value, output, options, tokenizer)
        typer.echo(describe(module, weights, package.value, output))


@app.command()
def benchmark(
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens per example.")] = 2000,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per batch.")] = 25,
    embedding_dim: Annotated[int, typer.Option(min=1, help="Embedding dimension.")] = 256,
    projection_dim: Annotated[
        int, typer.Option(min=0, help="Projected length K of keys and values; 0: only a window.")
    ] = 64,
    window_length: Annotated[
        int, typer.Option(min=0, help="Tokens per block; a query sees its block and those beside it; 0: no window.")
    ] = 0,
    num_heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 8,
    hidden_dim: Annotated[int, typer.Option(min=1, help="Head dimension.")] = 128,
    projection: Annotated[Projection, typer.Option(help="Projection type.")] = DEFAULT_PROJECTION,
    sharing: Annotated[Sharing, typer.Option(help="Sharing of the projection matrices.")] = Sharing.headwise,
    backend: Annotated[
        Backend, typer.Option(help="Framework; Keras uses the backend in KERAS_BACKEND.")
    ] = Backend.torch,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, …")] = "cpu",
    precision: Annotated[
        Precision,
        typer.Option(help="Precision of matrix products; auto: bfloat16 where the device multiplies it fast."),
    ] = Precision.float32,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Benchmark inference of one attention layer against full attention of the same size."""
    with report_user_errors():
        from rich.console import Console

        with imports():
            from .bench.prediction_time import Experiment, measure, show

        if projection_dim == 0 and window_length == 0:
            raise UserError("--projection-dim is 0, which needs a window; add --window-length, or pass at least 1")
        sizes = (sequence_length, batch_size, embedding_dim, projection_dim, num_heads, hidden_dim)
        found = measure(
            Experiment(*sizes, projection.value, sharing.value, backend.value, device, window_length, precision.value),
            Console(stderr=True),
        )
        if as_json:
            typer.echo(json.dumps(found, indent=1))
        else:
            show(found, Console())


def complete_last_item(names: str) -> Callable[[str], list[str]]:
    """Completes the last of several values separated by commas; `names` is a tuple in `bench.point`."""

    def complete(incomplete: str) -> list[str]:
        from .bench import point

        *before, last = incomplete.split(",")
        return [",".join([*before, name]) for name in getattr(point, names) if name.startswith(last)]

    return complete


@app.command()
def compare(
    sweep: Annotated[Path | None, typer.Argument(help="YAML file with the keys of docs/compare.md.")] = None,
    preset: Annotated[Preset | None, typer.Option(help="Built-in sweep.")] = None,
    lengths: Annotated[str | None, typer.Option(metavar="LIST", help="Tokens per example, such as 512,1024.")] = None,
    projected_lengths: Annotated[
        str | None, typer.Option(metavar="LIST", help="Projected lengths K, such as 64,128.")
    ] = None,
    window_lengths: Annotated[
        str | None, typer.Option(metavar="LIST", help="Window lengths, such as 0,128; 0: no window.")
    ] = None,
    implementations: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Implementations, such as linformer-kit.", autocompletion=complete_last_item("NAMES")
        ),
    ] = None,
    subjects: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Subjects, such as layer,encoder.", autocompletion=complete_last_item("SUBJECTS")
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Steps, such as forward,training.", autocompletion=complete_last_item("STEPS")
        ),
    ] = None,
    backends: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Backends, such as torch,keras-jax.", autocompletion=complete_last_item("BACKENDS")
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Precisions, such as float32,bfloat16; auto: the fastest of the device.",
            autocompletion=complete_last_item("PRECISIONS"),
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIRECTORY", help="Run or saved model, whose encoder is measured.")
    ] = None,
    num_layers: Annotated[int | None, typer.Option(help="Layers of a model.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per batch; 0: as many as memory and time allow.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps, …")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Time limit per call in seconds.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Output CSV (default: `output` of the sweep, or the name of the preset).")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard earlier measurements in that CSV.")] = False,
    summary: Annotated[
        bool, typer.Option("--summary", help="Show the CSV and evaluate its targets without measuring.")
    ] = False,
) -> None:
    """Measure time and memory of implementations; one CSV, resumable."""
    flags = {
        **{"lengths": lengths, "projected_lengths": projected_lengths, "window_lengths": window_lengths},
        **{"implementations": implementations},
        **{"subjects": subjects, "steps": steps, "backends": backends, "precisions": precision},
        **{"model": model, "num_layers": num_layers, "tokens": tokens, "device": device, "time_limit": time_limit},
    }
    with report_user_errors():
        from .bench.compare import run

        values = {name: value for name, value in flags.items() if value is not None}
        run(sweep, preset.value if preset else None, values, output, fresh, summary)


@app.command()
def study(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="YAML file with the keys of docs/study.md, or a shipped study.",
            autocompletion=complete_study,
        ),
    ],
    tables: Annotated[list[str] | None, typer.Argument(metavar="TABLE", help="Tables (default: all).")] = None,
    data: Annotated[Path | None, typer.Option(help="Directory with local copies of the datasets.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Results directory (default: results/ and the name of FILE).")
    ] = None,
    runs: Annotated[
        Path | None, typer.Option(help="Directory for the runs (default: runs/ and the name of FILE).")
    ] = None,
    at_once: Annotated[int | None, typer.Option(min=1, help="Parallel runs (default: one per core; GPU: one).")] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Only summarize and draw existing results.")] = False,
) -> None:
    """Train variants of a model with several seeds, evaluate them, and tabulate and plot the results; resumable."""
    with report_user_errors():
        from .bench.study import run

        output, runs = output or Path("results", file.stem), runs or Path("runs", file.stem)
        run(file, tables or [], data, output, runs, at_once, summary)


@app.command()
def plot(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="CSV|DIRECTORY",
            help="Tables of `linformer compare`; directories of runs, saved models or spectra.",
        ),
    ],
    what: Annotated[
        FigureKind | None,
        typer.Option(
            help="costs: time and memory over length; paper-table: the paper's Table 3; learning: metrics over steps; "
            "quality: final metric over K; sharing: final metric by sharing; heads: attention weights on a text; "
            "slots: columns of E. The default depends on the inputs."
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="Text or text file, for heads and for slots of `dynamic`.")] = None,
    output: Annotated[Path, typer.Option(help="Directory for PNG and SVG files, or one .png or .svg file.")] = Path(
        "plots"
    ),
) -> None:
    """Draw figures of benchmark tables, runs, models and spectra."""
    with report_user_errors():
        from .report.plot import plot

        for path in plot(paths, what.value if what else None, text, output):
            typer.echo(path)


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="CSV|DIRECTORY", help="Tables of `linformer compare`; directories of runs or spectra."),
    ],
    output: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Write a self-contained HTML page: configurations, results, differences, figures, examples and environments."""
    with report_user_errors():
        from .report.report import report

        report(paths, output)
        typer.echo(output)


@app.command()
def spectrum(
    model: Annotated[
        str, typer.Argument(help="Directory of a model or run, or name of a model on the Hugging Face Hub.")
    ],
    text: Annotated[list[Path], typer.Option(help="Text file; may be repeated.")],
    length: Annotated[int, typer.Option(min=2, help="Tokens per piece of text.")] = 512,
    pieces: Annotated[int, typer.Option(min=1, help="Number of pieces, spread over the texts.")] = 16,
    error: Annotated[
        float, typer.Option(help="Share of the sum of singular values that the suggested K may lose.")
    ] = 0.05,
    output: Annotated[Path, typer.Option(help="Directory for tables, figures and the suggested K.")] = Path("spectrum"),
) -> None:
    """Measure the rank of a model's attention (the paper's Figure 1) and suggest a K for each layer."""
    with report_user_errors():
        from rich.console import Console

        with imports():
            from .analysis.spectrum import spectrum

        spectrum(model, text, length, pieces, error, output, Console())


def run() -> None:
    """The program `linformer`."""
    if sys.argv[1:2] == ["train"]:
        preload_allocator()
    app()


if __name__ == "__main__":  # `python -m`, as torchrun and studies start it, keeps its allocator
    app()
