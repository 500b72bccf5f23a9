"""Our layers and models beside others.

`peers`, `peer_models` and `generation` build and check them, `measure` and `memory` take time and memory, `machine` says what the
numbers depend on, `table` keeps them, `targets` judges them, and `run` makes a command of it.
"""
