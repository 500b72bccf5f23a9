"""Settings of all tests."""

import os

import pytest
import torch
from hypothesis import register_random, settings

# the same examples every time: a red test stays red until it is mended
settings.register_profile("linformer", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("linformer")


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


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def float64():
    """Tensors and parameters made in the test are float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
