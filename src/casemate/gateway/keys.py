"""API keys: shown once when they are made, kept as hashes in the event store, followed by every gateway that shares it.

A key is ``cmk_<id>_<secret>``. The id is no secret: it names the key in events and lists. The secret has 256 random
bits, and what is kept is SHA-256 over id and secret. A slow hash (scrypt) protects secrets that people choose, which
can be guessed; 2^256 cannot be tried at any speed, and a slow hash per request would let strangers keep the gateway
busy. The id salts the hash.

Nothing is changed in place: a ``key`` event creates, a later one revokes, in whichever order they are read.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias, get_args

from casemate.errors import BackendError, ConfigError
from casemate.protocols import EventStore
from casemate.rag import require_tenant
from casemate.types import DEFAULT_TENANT, Event, Secret

KIND = "key"
Role: TypeAlias = Literal["client", "admin", "metrics"]
_SHAPE = re.compile(r"cmk_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a key allows.

    Attributes:
        name: For people.
        role: ``client`` asks; ``admin`` also adds, removes and lists documents, and reads metrics; ``metrics`` does
            nothing but that.
        tenant: Whose documents.
        labels: Documents whose metadata names labels under ``acl`` are there for a client's key with one of them, and
            for no other. An admin reads all of his tenant; his label `all-tenants` shows him every tenant on the
            dashboard.
        requests_per_minute: Its own rate; None: the gateway's.
        tokens_per_day: Its own budget; None: the gateway's.
        trust_user: Whether the field ``user`` of a request tells who asks, so that the guard remembers each end user by
            himself. For applications that log their users in.
        retrieve: Whether documents may be had as they are (``/v1/retrieve``). They go round all that a defense does to
            the generator or the answer.
    """

    name: str
    role: Role = "client"
    tenant: str = DEFAULT_TENANT
    labels: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None
    trust_user: bool = False
    retrieve: bool = False

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), *(("label", label) for label in self.labels)):
            if not (0 < len(text) <= 200 and text.isprintable()):
                raise ConfigError(f"a key's {what} is {text[:200]!r}; 1 to 200 printable characters are allowed")
        if self.role not in get_args(Role):
            raise ConfigError(f"a key's role is {self.role!r}; known: {', '.join(get_args(Role))}")
        for what, number in (("rate", self.requests_per_minute), ("budget", self.tokens_per_day)):
            if number is not None and number < 1:
                raise ConfigError(f"a key's {what} is {number}; it must be at least 1")
        require_tenant(self.tenant)


@dataclass(frozen=True, slots=True)
class Key:
    """A key as it is kept: everything but its secret.

    Attributes:
        id: 16 hexadecimal digits.
        grant: What it allows.
        digest: The hash of its secret.
        created: When it was made.
        revoked: When it was taken back.
    """

    id: str
    grant: Grant
    digest: str = field(repr=False)
    created: datetime
    revoked: datetime | None = None


_NOBODY = Key("", Grant("nobody"), secrets.token_hex(32), datetime.min.replace(tzinfo=UTC))
"""Whom an unknown id is compared with, so that it costs the same."""


class Keys:
    """The keys in an event store, as far as they were read. Thread-safe.

    Args:
        store: Where they are.
    """

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self._created: dict[str, Key] = {}
        self._revoked: dict[str, datetime] = {}
        self._place = 0
        self._lock, self._reading = threading.Lock(), threading.Lock()

    def create(self, grant: Grant) -> tuple[Key, Secret]:
        """Makes a key. The text, which is returned beside it, is kept nowhere.

        Raises:
            BackendError: If it could not be written.
        """
        id_, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        digest = _digest(id_, secret)
        allowed = {name: getattr(grant, name) for name in Grant.__slots__}
        self._write({"action": "created", "key": id_, "digest": digest, **allowed, "labels": list(grant.labels)})
        return self._created[id_], Secret(f"cmk_{id_}_{secret}")

    def revoke(self, id_: str) -> Key:
        """Takes a key back, for good. All gateways on the same store refuse it from then on.

        Raises:
            ConfigError: If there is no such key.
            BackendError: If it could not be written.
        """
        self.follow()
        key = self._created.get(id_)
        if key is None:
            raise ConfigError(f"no key has the id {id_[:40]!r}; 'casemate key list' shows them")
        if id_ not in self._revoked:
            self._write({"action": "revoked", "key": id_})
        return replace(key, revoked=self._revoked.get(id_))

    def all(self) -> list[Key]:
        """All keys, the oldest first, those that are revoked among them."""
        with self._lock:
            found = [replace(key, revoked=self._revoked.get(key.id)) for key in self._created.values()]
        return sorted(found, key=lambda key: key.created)

    def find(self, text: str) -> Key | None:
        """The key whose text this is; None if it is malformed, unknown, wrong or revoked, at the same cost."""
        match = _SHAPE.fullmatch(text)
        id_, secret = match.groups() if match else ("0" * 16, "0" * 43)
        key = self._created.get(id_, _NOBODY)
        same = hmac.compare_digest(_digest(id_, secret), key.digest)
        return key if same and id_ not in self._revoked and key is not _NOBODY else None

    def revoked(self, id_: str) -> bool:
        """Whether a key was taken back, as far as is known."""
        return id_ in self._revoked

    def follow(self) -> None:
        """Reads what has been created and revoked since the last time.

        Raises:
            BackendError: If the store cannot be read; what is known stays.
        """
        with self._reading:
            events, place = self._store.follow(KIND, self._place)
            for event in events:
                self._take(event)
            self._place = place

    def _write(self, body: Mapping[str, Any]) -> None:
        event = Event(uuid.uuid4().hex, datetime.now(UTC), KIND, body)
        self._store.append(event)
        if not self._store.flush():
            message = (
                "the key event was not written in time; see that the event store can be reached, and look at the list"
            )
            raise BackendError(message, backend="store", retryable=True)
        self._take(event)

    def _take(self, event: Event) -> None:
        """One event, which may have been seen before."""
        body = event.body
        try:
            id_, action = str(body["key"]), body["action"]
            with self._lock:
                if action == "revoked":
                    self._revoked[id_] = event.at
                elif action == "created" and id_ not in self._created:
                    known = {name: body[name] for name in Grant.__slots__ if name in body}
                    grant = Grant(**known | {"labels": tuple(body.get("labels", ()))})
                    self._created[id_] = Key(id_, grant, str(body["digest"]), event.at)
        except Exception as error:  # one bad row must not lock everybody out
            _log.warning("the key event %s cannot be read: %s", event.id, type(error).__name__)


def _digest(id_: str, secret: str) -> str:
    return hashlib.sha256(f"{id_}:{secret}".encode()).hexdigest()
