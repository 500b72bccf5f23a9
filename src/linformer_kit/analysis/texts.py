"""Reading text files given on the command line."""

from pathlib import Path

from ..errors import UserError


def read_text_file(path: Path) -> str:
    """The text of a UTF-8 file; raises if it is not text, or empty."""
    if path.is_dir():
        raise UserError(f"--text is {path}, a directory; give a file in it")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"--text is {path}, which cannot be read ({error.strerror}); give a UTF-8 text file") from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(f"--text is {path}, which is not UTF-8 text; give a plain text file")
    if not text.strip():
        raise UserError(f"--text is {path}, which is empty; give a file with text")
    return text
