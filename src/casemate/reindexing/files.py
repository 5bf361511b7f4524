"""Files that are there whole or not at all, readable by their owner only."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from casemate.errors import BackendError


def put(path: Path, content: bytes) -> None:
    """Makes or replaces a file.

    Raises:
        BackendError: If the disk is full, or nothing may be written there; what was there is as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> BackendError:
    """What to say of it."""
    return BackendError(
        f"{path} cannot be written ({error.strerror or type(error).__name__}); make room, or choose a folder that may "
        "be written to, and run the same again",
        backend="disk",
        retryable=True,
    )
