"""Settings of all tests."""

import os

import pytest
import torch
from hypothesis import settings

# the same examples every time: a red test stays red until it is mended
settings.register_profile("linformer", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("linformer")

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
