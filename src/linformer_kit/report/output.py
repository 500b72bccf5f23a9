"""Where pictures, pages and tables go."""

import tempfile
from pathlib import Path

from ..errors import UserError


def check_output(output: Path, folder: Path) -> None:
    """Refuse a folder that could not be written, or created, before there is any work to lose; nothing is created yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"--output is {output}, but {existing} is a file; give another folder")
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(
            f"--output is {output}, but {existing} cannot be written ({error.strerror}); give another folder"
        ) from None
