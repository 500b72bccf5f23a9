"""The two orders of the queries of the Keras layer, in float32 and bfloat16, on the three backends.

python benchmarks/keras_orders.py    # minutes; writes results/keras_orders.csv
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from linformer_kit.bench.measure import time_interleaved
from linformer_kit.csv_tables import write_rows

RESULTS = Path(__file__).parent.parent / "results"
BATCH, LENGTH, WIDTH, HEADS = 2, 4096, 512, 8
BACKENDS, ROWS, ORDERS = ("torch", "jax", "tensorflow"), (32, 64), ("per head", "folded")


def make_call(rows: int, dtype: str, order: str) -> Callable[[], object]:
    """`predict_on_batch` of a model that consists of the layer."""
    import keras

    from linformer_kit.keras import LinearMultiHeadAttention

    class Ordered(LinearMultiHeadAttention):
        def _query_order(self, *_: object) -> str:
            return order

    x = keras.Input((LENGTH, WIDTH))
    model = keras.Model(x, Ordered(HEADS, WIDTH // HEADS, rows, dtype=dtype)(x, x))
    tokens = np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH), dtype="float32")
    return lambda: model.predict_on_batch(tokens)


def measure() -> list[dict[str, str]]:
    """The rows of the table for the backend of this process."""
    found = []
    for dtype in ("float32", "mixed_bfloat16"):
        for rows in ROWS:
            calls = {order: make_call(rows, dtype, order) for order in ORDERS}
            for call in calls.values():
                call()  # compiles a graph
            seconds = {order: timing.median or 0 for order, timing in time_interleaved(calls, budget_seconds=3).items()}
            found += [
                {"backend": os.environ["KERAS_BACKEND"], "dtype": dtype, "rows": str(rows), "order": order}
                | {"milliseconds": f"{1e3 * median:.4g}", "ratio": f"{median / min(seconds.values()):.2f}"}
                for order, median in seconds.items()
            ]
    return found


def main() -> None:
    """Measure each backend in its own process, and write the table."""
    if "KERAS_BACKEND" in os.environ:
        print(json.dumps(measure()))
        return
    found = []
    for backend in BACKENDS:
        command, environment = [sys.executable, __file__], {**os.environ, "KERAS_BACKEND": backend}
        printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        found += json.loads(printed.splitlines()[-1])
        write_rows(RESULTS / "keras_orders.csv", found)  # what is there if a later backend fails


if __name__ == "__main__":
    main()
