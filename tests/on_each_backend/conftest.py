"""Settings of the tests that run on each backend."""

import keras
import pytest


@pytest.fixture(autouse=True)
def seed():
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
