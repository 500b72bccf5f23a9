"""Errors caused by user input, and the end of a run by a signal."""

NEEDS_CODE = "can be loaded only with code that it names (auto_map); linformer never runs code of a model"


class UserError(ValueError):
    """A wrong value, file or directory. The message names it, what is allowed and the remedy; no traceback is shown."""


class Stopped(Exception):
    """A signal stopped training after a checkpoint was saved; `code` is the exit code, 128 plus the signal number."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def needs_code(error: Exception) -> bool:
    """Whether transformers refused to load a model or tokenizer because that would run code from its repository."""
    return "trust_remote_code=True" in str(error)
