"""Pickled messages between the processes of one campaign, authenticated with a secret that only these have.

Unpickling runs code that the message names. So a message is unpickled only if its authentication code is that of its
content and purpose: HMAC-SHA256 under the secret of the campaign. No other module unpickles classes that a file names.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.errors import ConfigError, DataError

SECRET_LENGTH = 32  # characters that a secret needs
Handles: TypeAlias = Mapping[str, Any]  # handles of separate messages by name


@dataclass(frozen=True, slots=True)
class Reference:
    """A value whose content is a message of its own, so another message contains only its random name.

    The name is part of the purpose of the separate message, which the transport finds by the handle.
    """

    name: str
    handle: Any = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SealedMessage:
    """A message: bytes and arrays of bytes, so that a transport unpickles nothing else.

    Attributes:
        code: Authentication code of purpose, body and buffers.
        body: The pickled value without its buffers.
        buffers: Contents of large arrays, which a transport need not copy.
        handles: Handles of the separate messages by name. They are not authenticated, but these messages are.
    """

    code: bytes
    body: bytes = field(repr=False)
    buffers: tuple[npt.NDArray[np.uint8], ...] = field(default=(), repr=False)
    handles: Handles = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class MessageSeal:
    """Seals and opens messages with the secret of a campaign."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < SECRET_LENGTH:
            raise ConfigError(f"the secret of a campaign needs at least {SECRET_LENGTH} characters")

    def seal(self, value: Any, purpose: str) -> SealedMessage:
        """Pickles a value, whose classes the receiver can import, and authenticates it.

        ``open`` needs the same purpose, so a message cannot be used for another one.
        """
        body, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        pickler = _Pickler(body, protocol=5, buffer_callback=buffers.append)
        pickler.dump(value)
        parts = tuple(np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers)
        code = self._code(purpose, body.getvalue(), parts)
        return SealedMessage(code, body.getvalue(), parts, pickler.handles)

    def open(self, message: SealedMessage, purpose: str) -> Any:
        """Returns the value of a message.

        Raises:
            DataError: If it was not sealed with this secret for this purpose. Then nothing is unpickled.
            ConfigError: If the value refers to an environment variable that this process lacks.
        """
        if not self._is_authentic(message, purpose):
            raise DataError(f"a message ({purpose}) is not from this campaign, so it was rejected")
        try:
            return _Unpickler(io.BytesIO(message.body), message).load()
        except KeyError as error:
            raise ConfigError(f"a worker lacks the environment variable {error}; set it on every worker") from error

    def proof(self, challenge: str) -> str:
        """Shows knowledge of the secret without sending it: a code of a random text."""
        return self._code("proof", challenge.encode(), ()).hex()

    def _is_authentic(self, message: object, purpose: str) -> bool:
        if not (isinstance(message, SealedMessage) and isinstance(message.code, bytes)):
            return False
        if not (isinstance(message.body, bytes) and all(_is_bytes(part) for part in message.buffers)):
            return False
        return hmac.compare_digest(message.code, self._code(purpose, message.body, message.buffers))

    def _code(self, purpose: str, body: bytes, buffers: tuple[npt.NDArray[np.uint8], ...]) -> bytes:
        code = hmac.new(self.secret, digestmod=hashlib.sha256)
        for part in _parts(purpose, body, buffers):
            code.update(len(part).to_bytes(8, "big"))
            code.update(part)
        return code.digest()


def _parts(purpose: str, body: bytes, buffers: tuple[npt.NDArray[np.uint8], ...]) -> Iterator[bytes | memoryview]:
    yield purpose.encode()
    yield body
    yield from (part.data for part in buffers)


def _is_bytes(part: object) -> bool:
    return type(part) is np.ndarray and part.dtype == np.uint8 and part.ndim == 1 and part.flags.c_contiguous


class _Pickler(pickle.Pickler):
    """Replaces references by their names."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.handles: dict[str, Any] = {}

    def persistent_id(self, value: Any) -> tuple[type, str] | None:
        if not isinstance(value, Reference):
            return None
        self.handles[value.name] = value.handle
        return type(value), value.name


class _Unpickler(pickle.Unpickler):
    """Restores references."""

    def __init__(self, body: io.BytesIO, message: SealedMessage) -> None:
        super().__init__(body, buffers=message.buffers)
        self._handles = message.handles

    def persistent_load(self, found: tuple[type[Reference], str]) -> Reference:
        kind, name = found
        return kind(name, self._handles.get(name))
