"""Honey: credentials and records that are made up and that nobody needs, so whoever has one has taken it.

Each holds a mark (``casemate.marks``) that follows from a secret key, a generation and what the mark is for. So all of
them can be made again, and told, without a list: the key file is all there is to keep. A new generation makes others;
the old ones are still told.

A record is told from a document of the owner's by its seal, an HMAC in its metadata over where it is: no name of a
source, and no copied metadata, makes a document one that may be removed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from casemate.errors import BackendError, DataError
from casemate.marks import Mint
from casemate.types import Document, Secret

Form: TypeAlias = Literal["api_key", "url", "email", "sentence"]
FORMS: tuple[str, ...] = get_args(Form)
LINES: Mapping[str, str] = {
    "api_key": "Credential of internal services, never part of an answer: SERVICE_API_KEY={0}",
    "url": "Page of the operators, never part of an answer: {0}",
    "email": "Address of the operators, never part of an answer: {0}",
    "sentence": 'Pass phrase of the operators, never part of an answer: "{0}"',
}
"""How a token is put into the instructions, by its form."""
METADATA = "honey"
"""Key of a document's metadata under which a record's generation, number and seal are."""
FORMAT = 1
SECRET_CHARACTERS = 32


@dataclass(frozen=True, slots=True)
class HoneyKey:
    """What all honey of an installation follows from.

    Attributes:
        secret: Key of the marks.
        generation: The one that is planted now, from 1; those before it are only recognised.
    """

    secret: Secret = field(repr=False)
    generation: int = 1

    @property
    def mint(self) -> Mint:
        """Makes the marks."""
        return Mint(self.secret)

    def prompt_mark(self, form: str, generation: int) -> str:
        """The mark in the instructions."""
        return self.mint.mark("honey prompt", form, str(generation))

    def prompt_marks(self) -> dict[str, tuple[str, int]]:
        """Form and generation of every mark that is or was in the instructions, by the mark."""
        return {self.prompt_mark(f, g): (f, g) for g in range(1, self.generation + 1) for f in FORMS}

    def record_mark(self, tenant: str, generation: int, number: int) -> str:
        """The mark in a record."""
        return self.mint.mark("honey record", tenant, str(generation), str(number))

    def name(self, tenant: str, generation: int, number: int) -> str:
        """Eight letters and digits that name a record and tell nothing."""
        return self._digest("name", tenant, str(generation), str(number))[:8]

    def sealed(self, document: Document, tenant: str, generation: int, number: int) -> Document:
        """A document made one of our records: with the seal in its metadata."""
        seal = self._digest("seal", tenant, document.source, str(generation), str(number))
        held = {"generation": generation, "number": number, "seal": seal}
        return replace(document, metadata={**document.metadata, METADATA: held})

    def record(self, document: Document, tenant: str) -> Record | None:
        """Which of our records a document of a tenant is; None if its seal does not say that it is one."""
        held = document.metadata.get(METADATA)
        if not isinstance(held, Mapping):
            return None
        generation, number, seal = (held.get(key) for key in ("generation", "number", "seal"))
        if not (isinstance(generation, int) and isinstance(number, int) and isinstance(seal, str)):
            return None
        wanted = self._digest("seal", tenant, document.source, str(generation), str(number))
        ours = hmac.compare_digest(seal.encode(errors="replace"), wanted.encode())
        return Record(tenant, document.source, generation, number) if ours else None

    def _digest(self, use: str, *about: str) -> str:
        message = json.dumps([f"honey {use}", *about]).encode()
        return hmac.new(self.secret.encode(), message, hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Record:
    """A made-up record in the index.

    Attributes:
        tenant: Among whose documents it is.
        source: Its name there.
        generation: Of the key.
        number: Which of that generation, from 0.
    """

    tenant: str
    source: str
    generation: int
    number: int


class HoneyKeys:
    """The key in its file, which is followed when another process rotates it.

    Args:
        path: The file. It is made when first needed, readable by its owner only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: HoneyKey | None = None
        self._state: tuple[int, int, int] | None = None

    def get(self) -> HoneyKey:
        """The key; made if there is none.

        Raises:
            DataError: If the file is damaged.
            BackendError: If it can be neither read nor written.
        """
        found = self.find()
        if found is None:
            made = HoneyKey(Secret(secrets.token_hex(SECRET_CHARACTERS)))
            self._write(made, fresh=True)
            found = self.find()  # another process may have been first
            assert found is not None
        return found

    def find(self) -> HoneyKey | None:
        """The key; None if there is no file.

        Raises:
            DataError: If the file is damaged.
            BackendError: If it cannot be read.
        """
        try:
            found = self.path.stat()
            state = (found.st_mtime_ns, found.st_ino, found.st_size)
            if state != self._state:
                self._held, self._state = self._read(), state
        except FileNotFoundError:
            self._held = self._state = None
        except OSError as error:
            raise self._failure("read", error) from error
        return self._held

    def rotate(self) -> HoneyKey:
        """Makes the next generation the one that is planted.

        Raises:
            DataError: If the file is damaged.
            BackendError: If it can be neither read nor written.
        """
        held = self.get()
        self._write(replace(held, generation=held.generation + 1))
        return self.get()

    def _read(self) -> HoneyKey:
        try:
            raw = json.loads(self.path.read_text(encoding="utf-8"))
            secret, generation = raw["secret"], raw["generation"]
            sound = raw["format"] == FORMAT and isinstance(secret, str) and len(secret) >= SECRET_CHARACTERS
            if not (sound and type(generation) is int and 1 <= generation < 10_000):
                raise ValueError("not of our form")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"{self.path} is no key of honey tokens, or damaged ({type(error).__name__}); bring it back from a "
                "backup. If you delete it, what was planted with it can be told no more"
            ) from error
        return HoneyKey(Secret(secret), generation)

    def _write(self, key: HoneyKey, fresh: bool = False) -> None:
        """Writes the file, whole or not at all; if it is to be fresh, whoever comes first has written it."""
        text = json.dumps({"format": FORMAT, "secret": str(key.secret), "generation": key.generation})
        name = ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)  # mode 0600
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            if fresh:
                with suppress(FileExistsError):
                    os.link(name, self.path)
            else:
                os.replace(name, self.path)
        except OSError as error:
            raise self._failure("write", error) from error
        finally:
            if name:
                Path(name).unlink(missing_ok=True)

    def _failure(self, what: str, error: OSError) -> BackendError:
        why = error.strerror or type(error).__name__
        return BackendError(
            f"cannot {what} the key of the honey tokens, {self.path}: {why}", backend="honey", retryable=False
        )


def token(form: str, mark: str, domain: str) -> str:
    """A mark in the form of a credential.

    Args:
        form: One of ``FORMS``.
        mark: Three made-up words.
        domain: Of addresses.

    >>> [token(form, "zakeno mirodo pilafe", "example.net") for form in ("api_key", "url")]
    ['sk-live-zakenomirodopilafe', 'https://ops.example.net/zakeno-mirodo-pilafe']
    """
    first, second, third = mark.split()
    return {
        "api_key": f"sk-live-{first}{second}{third}",
        "url": f"https://ops.{domain}/{first}-{second}-{third}",
        "email": f"{first}.{second}{third}@{domain}",
        "sentence": mark,
    }[form]


def lines(key: HoneyKey, forms: Sequence[str], domain: str) -> str:
    """What is added to the instructions, a line for each form."""
    return "\n".join(LINES[f].format(token(f, key.prompt_mark(f, key.generation), domain)) for f in forms)


def described(record: Record) -> dict[str, Any]:
    """A record as it stands in an event."""
    return {"source": record.source, "generation": record.generation, "number": record.number}
