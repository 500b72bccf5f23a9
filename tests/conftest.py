"""Settings of all tests, and fixtures of the training tests."""

import gc
import os
import shutil
import signal
import subprocess
from types import SimpleNamespace

import fork_server
import pytest
import torch
from filelock import FileLock
from hypothesis import register_random, settings
from training_zoo import TASKS, Trained, environment, linformer, write_data, yaml_for

# the same examples in every run, so that a failing test keeps failing until it is fixed
settings.register_profile("linformer", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("linformer")

# fewer garbage collections: a tenth of the time was spent on objects that live as long as the tests, such as modules
gc.set_threshold(100_000, 20, 100)

# read by PyTorch when its compiler is imported: the cache of what operations give on fake tensors costs more than it
# saves where shapes are symbolic, as they are in exported graphs
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
# read by JAX and TensorFlow: compiled code runs once here, so compile time matters more than its speed
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1",
)

# Keras in this process uses PyTorch, which is loaded anyway; test_keras.py runs all backends in separate processes
os.environ.setdefault("KERAS_BACKEND", "torch")


class TorchRandom:
    """Lets hypothesis seed torch before each example, so that a failing one can be replayed."""

    def seed(self, value):
        torch.manual_seed(value)

    def getstate(self):
        return torch.get_rng_state()

    def setstate(self, state):
        torch.set_rng_state(state)


TORCH_RANDOM = TorchRandom()  # hypothesis keeps a weak reference only
register_random(TORCH_RANDOM)

if "PYTEST_XDIST_WORKER" in os.environ:  # processes, not threads, share the cores
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


# background jobs of a shell ignore Ctrl-C, and so would the commands that the tests interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def fresh_compiler():
    """For `torch.compile`, without the graphs of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def inductor(fresh_compiler):
    """For `torch.compile` with its default backend, which compiles to machine code."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("PyTorch's compiler needs a C++ compiler")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def pack_short_texts(monkeypatch):
    """Padded batches are packed however short their texts; by default, only where it is faster."""
    from linformer_kit.models import packing_linformer

    monkeypatch.setattr(packing_linformer, "GROUP_COST", 0)


@pytest.fixture
def float64():
    """Make float64 the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def own_projections(monkeypatch):
    """Projections that the test registers, in PyTorch, Keras and the reference, are gone after it."""
    from linformer_kit import reference
    from linformer_kit.keras.projection import Projection as KerasProjection
    from linformer_kit.models.projection_linformer import Projection

    for registry, name in ((Projection, "kinds"), (KerasProjection, "kinds"), (reference, "ROWS")):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


@pytest.fixture
def forked_workers(monkeypatch):
    """Workers of measurements are forks, without the seconds of imports; other tests start ordinary processes.

    A fork ignores the settings of the allocator, so its peak memory is less exact.
    """
    from linformer_kit.bench import isolated

    def run(command, *, env, capture_output, **options):
        own = {name: env[name] for name in fork_server.FREE if name in env}
        return fork_server.run(command, env=environment(**own), **options)

    monkeypatch.setattr(isolated, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))


# training; slow imports are inside the functions


@pytest.fixture(scope="module")
def restore_global_state():
    """Restores global state that commands change, for modules that run commands in this process."""
    import datasets
    import transformers
    from accelerate.state import AcceleratorState

    environment, threads, level = dict(os.environ), torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    os.environ["COLUMNS"] = "300"
    with pytest.MonkeyPatch.context() as patch:
        # drawing takes longer than training here; `trained_run` and commands in subprocesses do draw
        patch.setattr("linformer_kit.training.progress.draw_curves", lambda *_: None)
        yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()
    datasets.enable_progress_bars()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """The run of a task, trained on first use and shared by all xdist workers."""
    root = tmp_path_factory.getbasetemp()
    root = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "trained"
    root.mkdir(exist_ok=True)

    def train(task):
        folder = root / task
        with FileLock(root / f"{task}.lock"):
            if not (folder / "printed.txt").exists():
                shutil.rmtree(folder, ignore_errors=True)
                path = yaml_for(task, folder)
                (folder / "printed.txt").write_text(linformer("train", path, cwd=folder).stdout, encoding="utf-8")
        return Trained(task, folder, folder / f"{task}.yaml", (folder / "printed.txt").read_text(encoding="utf-8"))

    return train


@pytest.fixture(params=TASKS)
def trained(request, trained_run):
    return trained_run(request.param)


@pytest.fixture(scope="session")
def quick(tmp_path_factory):
    """Writes the YAML of a short run; all of them share data and cache."""
    shared = tmp_path_factory.mktemp("quick")

    def write(task, folder, **overrides):
        if not (shared / task).exists():
            write_data(task, shared / task)
        few = {
            "training.steps": 4,
            "training.evaluate_every": None,
            "data.path": shared / task,
            "data.cache": shared / "cache",
        }
        return yaml_for(task, folder, **{**few, **overrides})

    return write
