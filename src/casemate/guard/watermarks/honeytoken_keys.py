"""Honeytokens: planted credentials and records without a legitimate use, so that every use of one is a detected leak.

Each contains a watermark derived from a secret key, a generation and its purpose. All honeytokens can be generated
again for recognition; the key file is all there is to keep. A new generation replaces the planted tokens; the earlier
ones remain recognizable.

A seal, an HMAC in the metadata over tenant and source, distinguishes a planted record from the owner's documents. No
source name and no copied metadata makes a document removable.
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
from casemate.guard.watermarks.tokens import TokenGenerator
from casemate.types import Document, Secret

Form: TypeAlias = Literal["api_key", "url", "email", "sentence"]
FORMS: tuple[str, ...] = get_args(Form)
INSTRUCTION_TEMPLATES: Mapping[str, str] = {
    "api_key": "Credential of internal services, never part of an answer: SERVICE_API_KEY={0}",
    "url": "Page of the operators, never part of an answer: {0}",
    "email": "Address of the operators, never part of an answer: {0}",
    "sentence": 'Pass phrase of the operators, never part of an answer: "{0}"',
}
"""The line for each form of credential in the instructions."""
METADATA = "honeytoken"
"""Metadata key of a record's generation, number and seal."""
FORMAT = 1
SECRET_CHARACTERS = 32


@dataclass(frozen=True, slots=True)
class HoneytokenRecord:
    """A planted record in the index.

    Attributes:
        tenant: Owner of the collection.
        source: Source name in the collection.
        number: Number within the generation, from 0.
    """

    tenant: str
    source: str
    generation: int
    number: int


@dataclass(frozen=True, slots=True)
class HoneytokenKey:
    """The key from which all honeytokens of an installation are derived.

    The labels of the derivation ("honey record" and others) are part of the tokens: another label changes all of them,
    and with them the published measurements.

    Attributes:
        secret: Key of the watermarks.
        generation: The planted generation, from 1; earlier ones are recognized only.
    """

    secret: Secret = field(repr=False)
    generation: int = 1

    @property
    def generator(self) -> TokenGenerator:
        """Generates the watermarks."""
        return TokenGenerator(self.secret)

    def prompt_token(self, form: str, generation: int) -> str:
        """Returns the watermark of a credential in the instructions."""
        return self.generator.token("honey prompt", form, str(generation))

    def prompt_tokens(self) -> dict[str, tuple[str, int]]:
        """Returns form and generation of every credential that is or was in the instructions, by watermark."""
        return {self.prompt_token(f, g): (f, g) for g in range(1, self.generation + 1) for f in FORMS}

    def record_token(self, tenant: str, generation: int, number: int) -> str:
        """Returns the watermark of a record."""
        return self.generator.token("honey record", tenant, str(generation), str(number))

    def record_name(self, tenant: str, generation: int, number: int) -> str:
        """Returns the name of a record: eight hexadecimal digits without meaning."""
        return self._digest("name", tenant, str(generation), str(number))[:8]

    def record_choice(self, tenant: str, generation: int, number: int, use: str, options: int) -> int:
        """Returns a number below ``options``, a power of two, that looks uniform and independent without the key."""
        return int(self._digest("choice", tenant, str(generation), str(number), use), 16) % options

    def seal(self, document: Document, tenant: str, generation: int, number: int) -> Document:
        """Returns the document as a planted record, with the seal in its metadata."""
        seal = self._digest("seal", tenant, document.source, str(generation), str(number))
        sealed = {"generation": generation, "number": number, "seal": seal}
        return replace(document, metadata={**document.metadata, METADATA: sealed})

    def identify(self, document: Document, tenant: str) -> HoneytokenRecord | None:
        """Returns the planted record that a tenant's document is; None without a valid seal."""
        sealed = document.metadata.get(METADATA)
        if not isinstance(sealed, Mapping):
            return None
        generation, number, seal = (sealed.get(key) for key in ("generation", "number", "seal"))
        if not (isinstance(generation, int) and isinstance(number, int) and isinstance(seal, str)):
            return None
        expected = self._digest("seal", tenant, document.source, str(generation), str(number))
        valid = hmac.compare_digest(seal.encode(errors="replace"), expected.encode())
        return HoneytokenRecord(tenant, document.source, generation, number) if valid else None

    def _digest(self, use: str, *subject: str) -> str:
        message = json.dumps([f"honey {use}", *subject]).encode()
        return hmac.new(self.secret.encode(), message, hashlib.sha256).hexdigest()


class HoneytokenKeyFile:
    """The key file, read again when another process rotates the key.

    Args:
        path: The file; created on first use with mode 0600.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._key: HoneytokenKey | None = None
        self._state: tuple[int, int, int] | None = None

    def load_or_create(self) -> HoneytokenKey:
        """Returns the key; creates it if there is none.

        Raises:
            DataError: If the file is damaged.
            BackendError: If it cannot be read or written.
        """
        key = self.load()
        if key is None:
            self._write(HoneytokenKey(Secret(secrets.token_hex(SECRET_CHARACTERS))), exclusive=True)
            key = self.load()  # that of another process, if it was first
            assert key is not None
        return key

    def load(self) -> HoneytokenKey | None:
        """Returns the key; None if there is no file.

        Raises:
            DataError: If the file is damaged.
            BackendError: If it cannot be read.
        """
        try:
            stat = self.path.stat()
            state = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if state != self._state:
                self._key, self._state = self._read(), state
        except FileNotFoundError:
            self._key = self._state = None
        except OSError as error:
            raise self._failure("read", error) from error
        return self._key

    def rotate(self) -> HoneytokenKey:
        """Starts the next generation.

        Raises:
            DataError: If the file is damaged.
            BackendError: If it cannot be read or written.
        """
        key = self.load_or_create()
        self._write(replace(key, generation=key.generation + 1))
        return self.load_or_create()

    def _read(self) -> HoneytokenKey:
        try:
            raw = json.loads(self.path.read_text(encoding="utf-8"))
            secret, generation = raw["secret"], raw["generation"]
            valid = raw["format"] == FORMAT and isinstance(secret, str) and len(secret) >= SECRET_CHARACTERS
            if not (valid and type(generation) is int and 1 <= generation < 10_000):
                raise ValueError("unknown format")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"{self.path} is damaged or not a honeytoken key ({type(error).__name__}); restore it from a backup. "
                "If you delete it, tokens planted with it can no longer be recognized"
            ) from error
        return HoneytokenKey(Secret(secret), generation)

    def _write(self, key: HoneytokenKey, exclusive: bool = False) -> None:
        """Writes the file atomically; with ``exclusive`` only if there is none, so the first process wins."""
        text = json.dumps({"format": FORMAT, "secret": str(key.secret), "generation": key.generation})
        name = ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)  # mode 0600
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            if exclusive:
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
            f"cannot {what} the honeytoken key file {self.path}: {why}", backend="honeytoken", retryable=False
        )


def format_credential(form: str, token: str, domain: str) -> str:
    """Formats a watermark as a credential.

    Args:
        form: One of ``FORMS``.
        token: The watermark, three words.
        domain: Of URLs and addresses.

    >>> [format_credential(form, "zakeno mirodo pilafe", "example.net") for form in ("api_key", "url")]
    ['sk-live-zakenomirodopilafe', 'https://ops.example.net/zakeno-mirodo-pilafe']
    """
    first, second, third = token.split()
    return {
        "api_key": f"sk-live-{first}{second}{third}",
        "url": f"https://ops.{domain}/{first}-{second}-{third}",
        "email": f"{first}.{second}{third}@{domain}",
        "sentence": token,
    }[form]


def instruction_lines(key: HoneytokenKey, forms: Sequence[str], domain: str) -> str:
    """Returns the lines to add to the instructions, one for each form."""
    tokens = {form: key.prompt_token(form, key.generation) for form in forms}
    return "\n".join(INSTRUCTION_TEMPLATES[f].format(format_credential(f, tokens[f], domain)) for f in forms)


def record_fields(record: HoneytokenRecord) -> dict[str, Any]:
    """Returns the fields of a record in an event."""
    return {"source": record.source, "generation": record.generation, "number": record.number}
