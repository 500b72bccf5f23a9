"""`linformer compare` and `benchmark`: time and memory of layers, models and training; `study`: what models learn.

`point` names what can be measured; `layers`, `encoders`, `generators`, `keras_layers` and `training_loop` build and
check it, and `implementations` registers it. `isolated` measures in worker processes, `compare` runs a `sweep` and
stores a `result_table`, `targets` evaluates it. `study` runs the models of `study_tables`, `study_summary` compares
their metrics.
"""
