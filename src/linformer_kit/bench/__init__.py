"""`linformer compare` and `linformer benchmark`: time and memory of layers, models and training.

`point` names what can be measured; `layers`, `encoders`, `generators`, `keras_layers` and `training_loop` build and
check it, and `implementations` registers it. `isolated` measures in worker processes, `compare` runs a `sweep` and
stores a `result_table`, `targets` evaluates it.
"""
