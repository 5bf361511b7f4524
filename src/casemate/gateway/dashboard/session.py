"""Login sessions: a random id in a cookie, started with an admin's API key, valid at all gateways on one store.

A session ends with its key, after ``MAX_AGE_S``, or after ``IDLE_S`` without use. Event store and memory contain only a
hash of the id, so reading the store does not allow a login. CSRF tokens are derived from the id, and are not stored.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from casemate.gateway.auth.keys import ApiKey, ApiKeyStore
from casemate.protocols import EventStore
from casemate.runtime.bounded_dict import BoundedDict
from casemate.runtime.events import append_durably
from casemate.types import DEFAULT_TENANT, Event, QuotaRequest

KIND = "login"
SESSION_COOKIE, LOGIN_COOKIE, NOTES_COOKIE = "casemate-session", "casemate-login", "casemate-notes"
MAX_AGE_S, IDLE_S = 12 * 3600.0, 3600.0
RECORD_S = 300.0
"""Interval at which use is recorded: another gateway may consider a session idle for this much longer."""
MAX_SESSIONS = 200
"""Sessions at once; a new one ends the oldest."""
TRIES, ALL_TRIES, TRY_S, ALL_TRY_S = 10, 100, 60.0, 6.0
"""Burst of failed logins from one address and from all addresses, and seconds until one more is allowed."""
ALL_TENANTS = "all-tenants"
"""Label of an admin key that manages the whole installation, not one tenant."""


@dataclass(eq=False)
class DashboardSession:
    """A login session, during one request.

    Attributes:
        csrf: Token that every form must contain.
        notes: Messages for this page or the next: tone and text.
    """

    key: ApiKey
    csrf: str = field(repr=False)
    notes: list[tuple[str, str]] = field(default_factory=list)

    @property
    def installation(self) -> bool:
        """Whether it may see what concerns all tenants (canaries, alerts, red team), and change the guard."""
        return self.key.grant.tenant == DEFAULT_TENANT or self.every_tenant

    @property
    def every_tenant(self) -> bool:
        """Whether it may see documents and verdicts of all tenants."""
        return ALL_TENANTS in self.key.grant.labels

    @property
    def name(self) -> str:
        """Name and id of the key, for events."""
        return f"{self.key.grant.name} ({self.key.id[:8]})"


@dataclass(slots=True)
class _StoredSession:
    key: str
    started: float
    used: float
    recorded: float


class SessionStore:
    """All sessions of an event store, which also counts failed logins.

    Its methods block, and raise ``BackendError`` if the store fails.
    """

    def __init__(self, store: EventStore, keys: ApiKeyStore, clock: Callable[[], float] = time.time) -> None:
        self._store, self._keys, self._clock = store, keys, clock
        self._sessions: BoundedDict[str, _StoredSession] = BoundedDict(MAX_SESSIONS)
        self._offset = 0
        self._lock = threading.Lock()

    def start(self, key: ApiKey) -> str:
        """Starts a session; returns the id for the cookie."""
        token = secrets.token_urlsafe(32)
        self._record("begun", _hash(token), key.id)
        return token

    def find(self, token: str, touch: bool) -> DashboardSession | None:
        """Returns the session of a cookie, unless it has ended.

        With ``touch`` this counts as use; automatic updates of a page do not.
        """
        self._sync()
        now = self._clock()
        with self._lock:
            found = self._sessions.get(_hash(token))
            if found is None or now - found.started > MAX_AGE_S or now - found.used > IDLE_S:
                return None
            found.used = now if touch else found.used
            due = now - found.recorded > RECORD_S and touch
            found.recorded = now if due else found.recorded
        if due:
            self._append("used", _hash(token), found.key)
        key = next((k for k in self._keys.all() if k.id == found.key and k.revoked is None), None)
        return DashboardSession(key, _derive(token, "form")) if key else None

    def end(self, token: str) -> None:
        """Ends a session, at all gateways."""
        self._record("ended", _hash(token), "")

    def may_try(self, address: str) -> bool:
        """Whether an address may try to log in now."""
        return self._count(address, 0)

    def record_failure(self, address: str) -> None:
        """Counts a failed login."""
        self._count(address, 1)

    def _count(self, address: str, failures: int) -> bool:
        own, total = self._store.acquire(
            [
                QuotaRequest(f"login:{_hash(address)[:32]}", failures, TRIES, 1 / TRY_S),
                QuotaRequest("login", failures, ALL_TRIES, 1 / ALL_TRY_S),
            ]
        )
        return own.used <= TRIES - 1 and total.used <= ALL_TRIES - 1

    def _record(self, action: str, digest: str, key: str) -> None:
        self._append(action, digest, key)
        append_durably(self._store, (), "the login")
        self._sync()

    def _append(self, action: str, digest: str, key: str) -> None:
        at, body = datetime.fromtimestamp(self._clock(), UTC), {"action": action, "session": digest, "key": key}
        self._store.append(Event(uuid.uuid4().hex, at, KIND, body))

    def _sync(self) -> None:
        since = datetime.fromtimestamp(self._clock() - MAX_AGE_S, UTC)
        with self._lock:
            events, self._offset = self._store.read_since(KIND, self._offset, since)
            for event in events:
                self._apply(str(event.body["session"]), event, event.at.timestamp())

    def _apply(self, digest: str, event: Event, at: float) -> None:
        action, found = event.body["action"], self._sessions.get(digest)
        if action == "begun":
            self._sessions[digest] = _StoredSession(str(event.body["key"]), at, at, at)
        elif action == "ended":
            self._sessions.pop(digest, None)
        elif found is not None:
            found.used, found.recorded = max(found.used, at), max(found.recorded, at)


def login_token(cookie: str) -> str:
    """Returns the CSRF token of the login form: another site can submit the form, but cannot read the cookie."""
    return _derive(cookie, "login")


def equal(given: str, expected: str) -> bool:
    """Compares two texts in constant time."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode(errors="replace"))


def _derive(token: str, purpose: str) -> str:
    return hmac.digest(token.encode(errors="replace"), purpose.encode(), "sha256").hex()


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()
