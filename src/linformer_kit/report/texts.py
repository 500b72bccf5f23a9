"""Texts that models are shown."""

from pathlib import Path

from ..errors import UserError


def read_text(path: Path) -> str:
    """The text of a file, which is not empty."""
    if path.is_dir():
        raise UserError(f"--text is {path}, a folder; give a file of it")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(
            f"--text is {path}, which cannot be read ({error.strerror}); give a file with text in UTF-8"
        ) from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(f"--text is {path}, which is no text in UTF-8; give a text file, unpacked and without layout")
    if not text.strip():
        raise UserError(f"--text is {path}, which is empty; give a file with text")
    return text
