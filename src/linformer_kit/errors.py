"""Errors caused by user input, and the end of a run by a signal."""


class UserError(ValueError):
    """A wrong value, file or directory. The message names it, what is allowed and the remedy; no traceback is shown."""


class Stopped(Exception):
    """A signal stopped training after a checkpoint was saved; `code` is the exit code, 128 plus the signal number."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code
