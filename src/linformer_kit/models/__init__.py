"""PyTorch layers and models. Flat, and free of imports from elsewhere in the package, so that it can travel with a checkpoint."""
