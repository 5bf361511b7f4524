"""Parses files in a process of its own, with limits on processor time, memory and output.

A parser may run for hours, or take all memory, on a damaged or hostile file. The limits end the process, the caller
gets a ``DataError`` for this file, and the next file gets a new process. One process parses many files.

The process is not confined otherwise: it has the user's rights on files and the network.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Any, BinaryIO

from casemate.errors import DataError
from casemate.rag.parsing import READERS, Parsed, reason_of

SECONDS = 4.0  # Processor time per file. A large PDF gets more, because its cost is in its pages: see ``seconds_for``.
PDF_BYTES = 250_000  # Size up to which a PDF gets ``SECONDS``. Dense text takes about 4 kB a page and 20 ms to parse.
WAITING_FACTOR = 15
"""The process is killed after this multiple of its processor time, if it waits or if the system has no limits."""
MEMORY_BYTES = 2_000_000_000  # address space of the process
TEXT_CHARACTERS = 64_000_000  # length of the parsed text: a small file may refer to one page ten thousand times

_LENGTH = struct.Struct("!Q")
_REMEDY = "convert it to plain text, or split it"


def seconds_for(kind: str, size: int) -> float:
    """Processor time for a file, in seconds, by its suffix and its size in bytes.

    >>> seconds_for(".html", 50_000_000), seconds_for(".pdf", 100_000), seconds_for(".pdf", 1_000_000)
    (4.0, 4.0, 16.0)
    """
    return SECONDS * max(1.0, size / PDF_BYTES) if kind == ".pdf" else SECONDS


class ParsingProcess:
    """Starts the process when it is first needed, and again after a file has ended it. Safe to use from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        atexit.register(self.close)

    def parse(self, kind: str, raw: bytes) -> Parsed:
        """Returns title, text and metadata of a file's content, by its suffix, one of ``READERS``.

        Raises:
            DataError: If the content cannot be parsed within the limits. The message contains the remedy.
        """
        seconds = seconds_for(kind, len(raw))
        with self._lock:
            process = self._started()
            stopped = threading.Event()
            watch = threading.Timer(WAITING_FACTOR * seconds, _kill, (process, stopped))
            watch.start()
            try:
                reply = _exchange(process, {"kind": kind, "seconds": seconds}, raw)
            except OSError:  # includes a broken pipe: the process has ended
                reply = None
            except BaseException:  # interrupted between question and answer: the next answer would be for this file
                self._stop()
                raise
            finally:
                watch.cancel()
            if reply is None:
                raise DataError(self._exit_reason(seconds, stopped.is_set()))
        if "problem" in reply:
            raise DataError(reply["problem"])
        return reply["title"], reply["text"], reply["metadata"]

    def close(self) -> None:
        """Ends the process. A later call of ``parse`` starts another one."""
        with self._lock:
            self._stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process and self._process.poll() is not None:  # ended between two files: not the fault of this one
            self._stop()
        if self._process is None or self._owner != os.getpid():  # a forked child must not share its parent's pipes
            path = os.pathsep.join(filter(None, sys.path))  # without the current folder: it may contain the documents
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            )
            self._owner = os.getpid()
        return self._process

    def _stop(self) -> int:
        """Ends the process; returns its exit code."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return 0
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1)  # it ends by itself at the end of its input
        process.kill()
        return process.wait()

    def _exit_reason(self, seconds: float, stopped: bool) -> str:
        """Why the process ended before its answer. ``stopped``: it was killed here, after too long."""
        code = self._stop()
        if stopped or code == -getattr(signal, "SIGPROF", 0):
            return f"not parsed within {seconds:g} seconds; {_REMEDY}"
        if code == -getattr(signal, "SIGKILL", 0):
            return f"the system killed the parser, as it does when memory is short; free memory, {_REMEDY}"
        return f"the parser ended with exit code {code}; {_REMEDY}"


def _kill(process: subprocess.Popen[bytes], stopped: threading.Event) -> None:
    stopped.set()
    process.kill()


def _exchange(process: subprocess.Popen[bytes], header: dict[str, Any], raw: bytes) -> dict[str, Any] | None:
    """Sends one file; returns the answer, or nothing if the process ends before it."""
    assert process.stdin is not None
    assert process.stdout is not None
    for part in (json.dumps(header).encode(), raw):
        process.stdin.write(_LENGTH.pack(len(part)) + part)
    process.stdin.flush()
    answer = _receive(process.stdout)
    return None if answer is None else json.loads(answer)


def _receive(stream: IO[bytes]) -> bytes | None:
    """One message; nothing at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None


def _answer(kind: str, raw: bytes) -> dict[str, Any]:
    try:
        title, text, metadata = READERS[kind](raw)
    except DataError as error:
        return {"problem": str(error)}
    except MemoryError:
        return {"problem": f"takes more than {MEMORY_BYTES / 1e9:g} GB of memory; {_REMEDY}"}
    except Exception as error:  # parsers raise anything on damaged or hostile files
        return {"problem": reason_of(error)}
    if len(title) + len(text) > TEXT_CHARACTERS:
        return {"problem": f"contains more than {TEXT_CHARACTERS:,} characters of text; {_REMEDY}"}
    return {"title": title, "text": text, "metadata": metadata}


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Parses files until the source ends."""
    while (header := _receive(source)) is not None and (raw := _receive(source)) is not None:
        asked = json.loads(header)
        if hasattr(signal, "setitimer"):  # its signal ends the process
            signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
        answer = json.dumps(_answer(asked["kind"], raw)).encode()
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(_LENGTH.pack(len(answer)) + answer)
        sink.flush()


def main() -> None:
    """Runs the process. Standard output contains answers only; output of libraries is redirected to standard error."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides: it closes the input
    logging.disable()
    with suppress(ImportError):  # Windows has no such limits
        import resource

        with suppress(ValueError, OSError):  # a lower limit is in force
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    serve(sys.stdin.buffer, sink)


PARSER = ParsingProcess()  # the process of this program

if __name__ == "__main__":
    main()
