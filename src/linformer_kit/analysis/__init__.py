"""The rank of a model's attention: `linformer spectrum`."""
