"""PyTorch layers and models. Imports nothing from the rest of the package, so that it can be saved with a checkpoint."""
