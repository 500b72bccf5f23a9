"""What a person can mend."""


class UserError(ValueError):
    """A wrong value, file or folder: the message says what it was, what is allowed and what to do; no traceback is needed."""


class Stopped(Exception):
    """Training was asked to stop, and has saved; `code` is what a shell expects of a program ended by that signal."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code
