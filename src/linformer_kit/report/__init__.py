"""`linformer plot` and `linformer report`: read runs, tables, models and spectra, and show them."""
