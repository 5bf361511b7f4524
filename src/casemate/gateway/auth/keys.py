"""API keys: shown once at creation, stored as hashes in the event store, shared by all gateways on it.

A key is ``cmk_<id>_<secret>``. The id is public: it names the key in events and lists. The secret has 256 random bits;
the store contains SHA-256 over id and secret, so the id salts the hash. A slow hash (scrypt) protects secrets that
people choose; 2^256 values cannot be tried at any speed, and a slow hash per request would help a denial of service.

Events are never changed: a ``key`` event creates a key, a later one revokes it. They may be read in any order.
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

from casemate.errors import ConfigError
from casemate.protocols import EventStore
from casemate.rag.pipeline import require_tenant
from casemate.runtime.events import append_durably
from casemate.text.prefixes import find_by_prefix
from casemate.types import DEFAULT_TENANT, Event, Query, Secret

KIND = "key"
Role: TypeAlias = Literal["client", "admin", "metrics", "traces"]
ASKING_ROLES: tuple[Role, ...] = ("client", "admin")
"""Roles that may ask questions."""
_FORMAT = re.compile(r"cmk_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Grant:
    """The permissions of an API key.

    Attributes:
        role: ``client`` asks; ``admin`` also adds, removes and lists documents, and reads metrics; ``metrics`` only
            reads metrics; ``traces`` only sends traces.
        tenant: The tenant whose documents it reads.
        labels: Labels of a client's key. A document with labels under ``acl`` in its metadata is visible only to client
            keys with one of them. An admin reads all documents of its tenant; the label `all-tenants` of an admin key
            shows every tenant on the dashboard.
        requests_per_minute: Its own rate limit; None: the gateway's.
        tokens_per_day: Its own budget; None: the gateway's.
        trust_user: Whether the field ``user`` of a request identifies the client together with the key. For
            applications that authenticate their users.
        groups: Groups of the client, for the rules of ``guard.audience``.
        retrieve: Whether it may use ``/v1/retrieve``, which returns documents unchanged and bypasses defenses that act
            on the generator or the answer.

    Raises:
        ConfigError: If a value is not allowed.
    """

    name: str
    role: Role = "client"
    tenant: str = DEFAULT_TENANT
    labels: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None
    trust_user: bool = False
    retrieve: bool = False
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named = (*(("label", label) for label in self.labels), *(("group", group) for group in self.groups))
        for what, text in (("name", self.name), *named):
            if not (0 < len(text) <= 200 and text.isprintable()):
                raise ConfigError(f"a key's {what} is {text[:200]!r}; 1 to 200 printable characters are allowed")
        if self.role not in get_args(Role):
            raise ConfigError(f"a key's role is {self.role!r}; known: {', '.join(get_args(Role))}")
        for what, number in (("rate", self.requests_per_minute), ("budget", self.tokens_per_day)):
            if number is not None and number < 1:
                raise ConfigError(f"a key's {what} is {number}; it must be at least 1")
        require_tenant(self.tenant)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored API key, without its secret. The id has 16 hexadecimal digits; ``revoked`` is None while it is valid."""

    id: str
    grant: Grant
    digest: str = field(repr=False)
    created: datetime
    revoked: datetime | None = None


def query_of(key: ApiKey, question: str, client: str, k: int, request: str = "") -> Query:
    """Builds the query of a key. An admin, who may list and remove all documents of the tenant, may also read them.

    ``client`` is the client's name for the guard; without the id of a request, there is a new one.
    """
    grant, admin = key.grant, key.grant.role == "admin"
    labels, groups = (None, None) if admin else (frozenset(grant.labels), frozenset(grant.groups))
    return Query(question, client, grant.tenant, k, request or uuid.uuid4().hex, labels, groups)


_UNKNOWN = ApiKey("", Grant("unknown"), secrets.token_hex(32), datetime.min.replace(tzinfo=UTC))
"""Compared with if the id is unknown, so that the check takes the same time."""


class ApiKeyStore:
    """The API keys of an event store, cached in memory. Thread-safe. Raises ``BackendError`` if the store fails."""

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self._created: dict[str, ApiKey] = {}
        self._revoked: dict[str, datetime] = {}
        self._offset = 0
        self._lock, self._reading = threading.Lock(), threading.Lock()

    def create(self, grant: Grant) -> tuple[ApiKey, Secret]:
        """Creates a key. Returns it with its text, which is stored nowhere."""
        id_, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        digest = _digest(id_, secret)
        allowed = {name: getattr(grant, name) for name in Grant.__slots__}
        allowed |= {"labels": list(grant.labels), "groups": list(grant.groups)}
        self._write({"action": "created", "key": id_, "digest": digest, **allowed})
        return self._created[id_], Secret(f"cmk_{id_}_{secret}")

    def revoke(self, id_: str) -> ApiKey:
        """Revokes a key permanently, by its id or the first characters of it. All gateways then refuse it.

        Raises:
            ConfigError: If there is no such key, or several ids begin so.
        """
        self.sync()
        whole = find_by_prefix(id_, set(self._created), "keys")
        if whole is None:
            raise ConfigError(f"no key has the id {id_[:40]!r}; 'casemate key list' shows them")
        if whole not in self._revoked:
            self._write({"action": "revoked", "key": whole})
        return replace(self._created[whole], revoked=self._revoked.get(whole))

    def all(self) -> list[ApiKey]:
        """Returns all keys, revoked ones included, oldest first."""
        with self._lock:
            found = [replace(key, revoked=self._revoked.get(key.id)) for key in self._created.values()]
        return sorted(found, key=lambda key: key.created)

    def names(self) -> dict[str, str]:
        """Returns the names of all keys by id."""
        return {id_: key.grant.name for id_, key in self._created.copy().items()}

    def find(self, text: str) -> ApiKey | None:
        """Returns the key with this text; None if it is malformed, unknown, wrong or revoked, at the same cost."""
        match = _FORMAT.fullmatch(text)
        id_, secret = match.groups() if match else ("0" * 16, "0" * 43)
        key = self._created.get(id_, _UNKNOWN)
        same = hmac.compare_digest(_digest(id_, secret), key.digest)
        return key if same and id_ not in self._revoked and key is not _UNKNOWN else None

    def named(self, name: str) -> ApiKey:
        """Returns the valid key with this id or name, or the only one whose id or name begins so.

        For the operator, who needs no secret. Reads new events first.

        Raises:
            ConfigError: If there is none, if several have the name or begin so, or if it may not ask.
        """
        valid = self._valid()
        found = [one for one in valid if name in (one.id, one.grant.name)]
        is_revoked = any(name in (one.id, one.grant.name) for one in self.all())
        if not found and name and not is_revoked:
            found = [one for one in valid if one.id.startswith(name) or one.grant.name.startswith(name)]
        if not found:
            raise ConfigError(f"no valid key has the id or name {name[:40]!r}; 'casemate key list' shows the ids")
        if len(found) > 1:
            listed = ", ".join(f"{one.id} ({one.grant.name[:40]})" for one in found[:10])
            raise ConfigError(f"{len(found)} valid keys match {name[:40]!r}: {listed}; give the id of one")
        if found[0].grant.role not in ASKING_ROLES:
            raise ConfigError(f"the key {found[0].id} has the role {found[0].grant.role}; choose a key that may ask")
        return found[0]

    def require_unused_name(self, name: str) -> None:
        """Refuses the name of a new key if a valid key has it: the operator could not tell the two keys apart.

        Keys that two processes create at the same time are not noticed.

        Raises:
            ConfigError: If a valid key has this name or id.
        """
        if found := [one for one in self._valid() if name in (one.id, one.grant.name)]:
            raise ConfigError(
                f"the valid key {found[0].id} has the name {found[0].grant.name[:40]!r} already; no key was created. "
                f"Choose another name, or revoke that key first: casemate key revoke {found[0].id}"
            )

    def _valid(self) -> list[ApiKey]:
        """The valid keys, after new events were read."""
        self.sync()
        return [one for one in self.all() if one.revoked is None]

    def is_revoked(self, id_: str) -> bool:
        """Whether a key is revoked, as of the last ``sync``."""
        return id_ in self._revoked

    def sync(self) -> None:
        """Reads new events; if that fails, the cache is unchanged."""
        with self._reading:
            events, offset = self._store.read_since(KIND, self._offset)
            for event in events:
                self._apply(event)
            self._offset = offset

    def _write(self, body: Mapping[str, Any]) -> None:
        event = Event(uuid.uuid4().hex, datetime.now(UTC), KIND, body)
        append_durably(self._store, [event], "the key", "check the store, and then 'casemate key list'")
        self._apply(event)

    def _apply(self, event: Event) -> None:
        """Applies an event; it may have been applied before."""
        body = event.body
        try:
            id_, action = str(body["key"]), body["action"]
            with self._lock:
                if action == "revoked":
                    self._revoked[id_] = event.at
                elif action == "created" and id_ not in self._created:
                    known = {name: body[name] for name in Grant.__slots__ if name in body}
                    lists = {name: tuple(body.get(name, ())) for name in ("labels", "groups")}
                    grant = Grant(**known | lists)
                    self._created[id_] = ApiKey(id_, grant, str(body["digest"]), event.at)
        except Exception as error:  # one invalid event must not lock out all clients
            _log.warning("the key event %s cannot be read: %s", event.id, type(error).__name__)


def _digest(id_: str, secret: str) -> str:
    return hashlib.sha256(f"{id_}:{secret}".encode()).hexdigest()
