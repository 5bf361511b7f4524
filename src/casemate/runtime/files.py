"""Atomic file writes; by default, readable by the owner only."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from casemate.errors import BackendError

MAKE_ROOM = "make room, or choose a folder that may be written to, and run the same again"


def cache_folder() -> Path:
    """The folder of files that can be built again: ``casemate`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "casemate"


def file_checksum(path: Path) -> str:
    """SHA-256 of a file. Verify it before a library reads the file: a damaged file can crash the process."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, content: bytes, rights: int = 0o600, remedy: str = MAKE_ROOM) -> None:
    """Creates or replaces a file and its folder; after a crash it is whole, old or new.

    ``rights`` are those on POSIX, by default for the owner only. ``remedy`` ends the error message.

    Raises:
        BackendError: If the disk is full or the folder is not writable; the old file is unchanged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if rights != 0o600:  # those of the temporary file
                os.chmod(name, rights)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise write_error(path, error, remedy) from error


def write_error(path: Path, error: OSError, remedy: str = MAKE_ROOM) -> BackendError:
    """The error for a file that cannot be written."""
    problem = f"{path} cannot be written ({error.strerror or type(error).__name__})"
    return BackendError(f"{problem}; {remedy}", backend="disk", retryable=True)
