"""Who is logged in: with a random id in a cookie, begun with an admin's API key, known to all gateways on one store.

A session ends with its key, after ``LONGEST_S``, or when it was not used for ``IDLE_S``. What is kept of its id, in the
event store and in memory, is a hash: whoever reads the store cannot log in with it. What a form must bring along
follows from the id, so nothing else need be kept.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from casemate.errors import BackendError
from casemate.gateway.keys import Key, Keys
from casemate.protocols import EventStore
from casemate.types import DEFAULT_TENANT, Event, Wanted

KIND = "login"
COOKIE, FORM_COOKIE, NOTES_COOKIE = "casemate-session", "casemate-login", "casemate-notes"
LONGEST_S, IDLE_S = 12 * 3600.0, 3600.0
NOTED_S = 300.0
"""Use is noted so often: another gateway may believe that a session was idle for so much longer."""
MOST = 200
"""Sessions at once; the oldest makes room."""
TRIES, ALL_TRIES, TRY_S, ALL_TRY_S = 10, 100, 60.0, 6.0
"""Logins that may fail at once, from one address and from all together, and seconds until one more may."""
ALL_TENANTS = "all-tenants"
"""Label of an admin's key that looks after the whole installation, not after one tenant."""


@dataclass(eq=False)
class Session:
    """Somebody who is logged in, during one request.

    Attributes:
        key: With which key.
        csrf: What every form of his must bring along.
        notes: What he is to be told on this page, or on the next: tone and text.
    """

    key: Key
    csrf: str = field(repr=False)
    notes: list[tuple[str, str]] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether he may see what is not of one tenant: canaries, alerts, red team; and change the guard."""
        return self.key.grant.tenant == DEFAULT_TENANT or self.every_tenant

    @property
    def every_tenant(self) -> bool:
        """Whether he may see all tenants' documents and verdicts."""
        return ALL_TENANTS in self.key.grant.labels

    @property
    def name(self) -> str:
        """Who he is, for the record: name and id of the key."""
        return f"{self.key.grant.name} ({self.key.id[:8]})"


@dataclass(slots=True)
class _Held:
    key: str
    began: float
    used: float
    noted: float


class Sessions:
    """All sessions, as far as they are in the store. Its methods block.

    Args:
        store: Where they are, and where failed logins are counted.
        keys: With which one logs in.
        clock: Seconds since 1970.
    """

    def __init__(self, store: EventStore, keys: Keys, clock: Callable[[], float] = time.time) -> None:
        self._store, self._keys, self._clock = store, keys, clock
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._place = 0
        self._lock = threading.Lock()

    def begin(self, key: Key) -> str:
        """Begins a session; returns the id for the cookie.

        Raises:
            BackendError: If it could not be written.
        """
        token = secrets.token_urlsafe(32)
        self._note("begun", _hash(token), key.id)
        return token

    def find(self, token: str, touch: bool) -> Session | None:
        """The session of a cookie, unless it has ended.

        Args:
            token: The cookie.
            touch: Whether this counts as use: what a page fetches by itself does not.

        Raises:
            BackendError: If the store cannot be read.
        """
        self._follow()
        now = self._clock()
        with self._lock:
            found = self._held.get(_hash(token))
            if found is None or now - found.began > LONGEST_S or now - found.used > IDLE_S:
                return None
            found.used = now if touch else found.used
            late = now - found.noted > NOTED_S and touch
            found.noted = now if late else found.noted
        if late:
            self._append("used", _hash(token), found.key)
        key = next((k for k in self._keys.all() if k.id == found.key and k.revoked is None), None)
        return Session(key, _derived(token, "form")) if key else None

    def end(self, token: str) -> None:
        """Logs somebody out, everywhere.

        Raises:
            BackendError: If it could not be written.
        """
        self._note("ended", _hash(token), "")

    def may_try(self, address: str) -> bool:
        """Whether an address may try to log in now."""
        return self._tries(address, 0)

    def failed(self, address: str) -> None:
        """Counts a login that failed."""
        self._tries(address, 1)

    def _tries(self, address: str, failed: int) -> bool:
        own, together = self._store.take(
            [
                Wanted(f"login:{_hash(address)[:32]}", failed, TRIES, 1 / TRY_S),
                Wanted("login", failed, ALL_TRIES, 1 / ALL_TRY_S),
            ]
        )
        return own.used <= TRIES - 1 and together.used <= ALL_TRIES - 1

    def _note(self, action: str, digest: str, key: str) -> None:
        self._append(action, digest, key)
        if not self._store.flush():
            raise BackendError("the event store does not take the login", backend="store", retryable=True)
        self._follow()

    def _append(self, action: str, digest: str, key: str) -> None:
        at, body = datetime.fromtimestamp(self._clock(), UTC), {"action": action, "session": digest, "key": key}
        self._store.append(Event(uuid.uuid4().hex, at, KIND, body))

    def _follow(self) -> None:
        since = datetime.fromtimestamp(self._clock() - LONGEST_S, UTC)
        with self._lock:
            events, self._place = self._store.follow(KIND, self._place, since)
            for event in events:
                self._take(str(event.body["session"]), event, event.at.timestamp())

    def _take(self, digest: str, event: Event, at: float) -> None:
        action, held = event.body["action"], self._held.get(digest)
        if action == "begun":
            self._held[digest] = _Held(str(event.body["key"]), at, at, at)
            if len(self._held) > MOST:
                self._held.popitem(last=False)
        elif action == "ended":
            self._held.pop(digest, None)
        elif held is not None:
            held.used, held.noted = max(held.used, at), max(held.noted, at)


def form_token(cookie: str) -> str:
    """What the login form must bring along, beside this cookie: others can set up a form, but not read the cookie."""
    return _derived(cookie, "login")


def same(given: str, wanted: str) -> bool:
    """Whether two texts are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode(errors="replace"))


def _derived(token: str, purpose: str) -> str:
    return hmac.digest(token.encode(errors="replace"), purpose.encode(), "sha256").hex()


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()
