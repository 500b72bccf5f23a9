"""PyTorch layers and models. Imports nothing from the rest of the package: it can be saved with a checkpoint."""
