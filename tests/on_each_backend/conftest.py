"""Settings of the tests that run on each backend."""

import gc
from types import SimpleNamespace

import battery
import keras
import numpy as np
import pytest
from keras.src.utils import rng_utils

if keras.backend.backend() != "tensorflow":
    # set_random_seed imports TensorFlow on every backend, which takes seconds
    rng_utils.tf = SimpleNamespace(available=False)

gc.set_threshold(100_000, 20, 100)  # as in ../conftest.py


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    keras.utils.set_random_seed(0)
    battery.RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state  # whatever ran before
    yield
    keras.config.set_dtype_policy("float32")
