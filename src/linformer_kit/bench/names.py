"""The names that `linformer compare` takes; apart from what they mean, so that a shell can complete them without PyTorch."""

IMPLEMENTATIONS = (
    *("linformer-kit", "linformer-kit-none", "linformer", "linformer-pytorch"),
    *("bert", "bert-eager", "modern-bert", "longformer", "big-bird", "nystromformer", "fnet", "led", "long-t5"),
)
SUBJECTS = ("layer", "encoder", "encoder-decoder")
STEPS = ("forward", "training", "generation")
