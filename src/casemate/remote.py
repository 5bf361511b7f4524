"""Systems outside that are asked over HTTP, within limits, and what is known of the answers of any system outside.

An error names the host, what happened and what to do. It never carries a header, the question or the server's own
words, which may repeat either.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urljoin, urlsplit

from casemate.errors import BackendError, ConfigError, needs
from casemate.types import Answer, Background, Document, Hit, Retrieval

OPENAI = "https://api.openai.com/v1"
TELLS = frozenset({"sources", "ids", "scores"})
"""What a target may tell beside its answer."""
BACKOFF_S, WAIT_S = 0.5, 60.0
"""Wait before the second try, doubled each time; and the longest wait that a server may ask for."""
REDIRECTS = 3
_HTML = re.compile(rb"\s*<(?:!doctype|html|head|body|!--)", re.IGNORECASE)
_MOVED = {301, 302, 307, 308}
_PASSING = {429, 500, 502, 503, 504}
_REFUSED = {400, 403, 413, 422}
_SAID: Mapping[int, str] = {
    401: "the key is refused, or there is none; correct the header or option that carries it",
    403: "the key may not do this; use one that may ask",
    404: "there is nothing at this path; correct the address",
    405: "this method is not taken; correct the method",
    413: "the question is too long for it",
    415: "it does not take JSON; correct headers and body",
    422: "it does not take this body; correct the body",
    429: "too many requests; lower requests_per_s, or wait",
}


class Refused(BackendError):
    """A server took a request for none that it answers, as filters of content do: the next one may be answered."""


class Pace:
    """Lets calls begin so many in a second, and not more.

    Args:
        per_s: How many; 0: no limit.
    """

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._free = 0.0  # when the next one may start
        self._lock = threading.Lock()

    async def wait(self) -> None:
        """Waits until the next one may start."""
        while self._per_s:  # no place is kept for who waits: he may be cancelled, and then it were lost
            with self._lock:
                now = time.monotonic()
                wait = self._free - now
                if wait <= 0:
                    self._free = now + 1 / self._per_s
                    return
            await asyncio.sleep(wait)


@dataclass(frozen=True, slots=True)
class Page:
    """What a server sent: its media type in lower case, and the whole body."""

    kind: str
    data: bytes


@dataclass(eq=False)
class Caller:
    """Asks servers, within limits. Each request opens a connection of its own, so any event loop may use it.

    Certificates are always checked. A redirect is followed on the same host only, with the same method and body.

    Attributes:
        backend: Name for errors.
        timeout_s: Longest time for one try, until the last byte.
        retries: Further tries when the server is busy, fails or cannot be reached; not after a try that was too slow.
        requests_per_s: Most requests in a second, tries included; 0: no limit.
        max_bytes: Most bytes that are read of a reply.
        requests: Sent so far, tries included.
    """

    backend: str
    timeout_s: float = 30.0
    retries: int = 2
    requests_per_s: float = 0.0
    max_bytes: int = 1_000_000
    requests: int = field(default=0, init=False)
    _tls: ssl.SSLContext | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        with needs("casemate[http]"):
            import httpx  # noqa: F401
        sound = 0 < self.timeout_s < math.inf and self.retries >= 0 and 0 <= self.requests_per_s < math.inf
        if not sound or self.max_bytes < 1:
            raise ConfigError(
                f"{self.backend}: timeout_s={self.timeout_s}, retries={self.retries}, requests_per_s="
                f"{self.requests_per_s}, max_bytes={self.max_bytes}; timeout_s and max_bytes must be above 0, the "
                "others not below"
            )
        self._pace = Pace(self.requests_per_s)

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Page:
        """Sends a request, again where that may help, and reads the reply.

        Raises:
            BackendError: If there is none within the limits.
        """
        for tried in range(self.retries + 1):
            try:
                return await self._follow(method, url, headers, body)
            except _Busy as busy:
                wait = busy.wait_s if busy.wait_s is not None else BACKOFF_S * 2**tried * (0.5 + random.random())
                if tried == self.retries or wait > WAIT_S:
                    raise self.error(url, busy.what, True) from None
            await asyncio.sleep(wait)
        raise AssertionError  # the last try returns or raises

    def error(self, url: str, what: str, retryable: bool = False) -> BackendError:
        """The error that says where and what."""
        return BackendError(f"{host_of(url)}: {what}", backend=self.backend, retryable=retryable)

    def json(self, url: str, page: Page) -> Any:
        """The JSON of a reply.

        Raises:
            BackendError: If it is an HTML page, or no JSON.
        """
        if "html" in page.kind or _HTML.match(page.data):
            raise self.error(url, "an HTML page came instead of JSON; see that url is that of the API, not of a page")
        try:
            return json.loads(page.data)
        except (ValueError, RecursionError):
            kind = page.kind or "no type"
            raise self.error(url, f"the reply is no JSON ({kind}, {len(page.data)} bytes)") from None

    async def _follow(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Page:
        """One try, over redirects on the same host."""
        for _ in range(REDIRECTS + 1):
            await self._pace.wait()
            self.requests += 1
            found = await self._once(method, url, headers, body)
            if isinstance(found, Page):
                return found
            url = found
        raise self.error(url, "it redirects in circles; set the address it leads to")

    async def _once(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Page | str:
        """One request: the reply, or the address it is redirected to."""
        import httpx

        if self._tls is None:
            self._tls = httpx.create_ssl_context()
        sent = {"accept-encoding": "identity", **headers}  # a compressed reply may hide its size
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                httpx.AsyncClient(verify=self._tls, timeout=self.timeout_s) as client,
                client.stream(method, url, headers=sent, content=body) as response,
            ):
                if response.status_code in _MOVED:
                    return self._next(url, response.headers.get("location", ""))
                self._accept(url, response)
                return Page(response.headers.get("content-type", "").lower(), await self._read(url, response))
        except (TimeoutError, httpx.TimeoutException):
            raise self.error(url, f"no reply within {self.timeout_s:g} s", True) from None
        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as error:
            raise _Busy(f"the connection failed ({type(error).__name__}); see that the server runs") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise self.error(url, f"the request failed ({type(error).__name__})") from None

    def _accept(self, url: str, response: Any) -> None:
        """Refuses replies that hold no answer."""
        status = response.status_code
        if status in _PASSING:
            what = _SAID.get(status, "the server failed; see its log")
            raise _Busy(f"HTTP {status}: {what}", _wait(response.headers.get("retry-after", "")))
        if status in _REFUSED:
            what = f"{host_of(url)}: HTTP {status}: {_SAID.get(status, 'the request is refused')}"
            raise Refused(what, backend=self.backend, retryable=False)
        if not 200 <= status < 300:
            raise self.error(url, f"HTTP {status}: {_SAID.get(status, 'the request is refused')}", status >= 500)
        if response.headers.get("content-encoding", "identity").lower() not in {"identity", ""}:
            raise self.error(url, "the reply is compressed, though plain bytes were asked for")

    async def _read(self, url: str, response: Any) -> bytes:
        """The body, as far as the limit."""
        length = response.headers.get("content-length", "")
        data = bytearray()
        if not (length.isdecimal() and int(length) > self.max_bytes):
            async for piece in response.aiter_raw():
                data += piece
                if len(data) > self.max_bytes:
                    break
            else:
                return bytes(data)
        raise self.error(url, f"the reply has more than {self.max_bytes:,} bytes (max_bytes); the rest was not read")

    def _next(self, url: str, location: str) -> str:
        """Where a redirect leads, on the same host and not out of TLS."""
        to = urljoin(url, location)
        if not location or _place(to) != _place(url):
            raise self.error(url, f"it redirects to another host ({host_of(to)}), which is not followed")
        if url.startswith("https:") and not to.startswith("https:"):
            raise self.error(url, "it redirects out of TLS, which is not followed")
        return urlsplit(to)._replace(netloc=urlsplit(url).netloc).geturl()


class _Busy(Exception):
    """A failure that may pass, and how long the server asks to wait; None: it does not say."""

    def __init__(self, what: str, wait_s: float | None = None) -> None:
        super().__init__(what)
        self.what, self.wait_s = what, wait_s


def host_of(url: str) -> str:
    """Name and port, without user or password.

    >>> host_of("https://ann:secret@rag.example:8443/ask")
    'rag.example:8443'
    """
    return urlsplit(url).netloc.rpartition("@")[2]


def _place(url: str) -> tuple[str | None, int | None]:
    """Host and port; a scheme's usual port counts as none, so that http may lead to https."""
    parts = urlsplit(url)
    return parts.hostname, None if parts.port == {"http": 80, "https": 443}.get(parts.scheme) else parts.port


def require_address(name: str, url: str) -> None:
    """Refuses what is no web address.

    Raises:
        ConfigError: If it does not begin with http:// or https:// and a host.
    """
    if not re.match(r"https?://[^/\s]", url):
        raise ConfigError(f"{name} must begin with http:// or https:// and a host; that of {host_of(url)!r} does not")


def openai_server(base_url: str, key: str) -> tuple[str, str]:
    """Address and key of a server that speaks OpenAI's API; what is empty, the environment says.

    The environment's key goes to the environment's address, or to OpenAI's own: nobody else is sent it unasked.

    Args:
        base_url: Empty: ``OPENAI_BASE_URL``, else OpenAI's own.
        key: Empty: ``OPENAI_API_KEY``, if it belongs to the address; else there is none.

    Raises:
        ConfigError: If the key is lacking for OpenAI's own address, or cannot be one.
    """
    told = os.environ.get("OPENAI_BASE_URL", "").strip()
    base = (base_url or told or OPENAI).rstrip("/")
    own = base.startswith("https://") and host_of(base) == host_of(OPENAI)
    if not key and (own or base == told.rstrip("/")):
        key = os.environ.get("OPENAI_API_KEY", "")
    key = key.strip()
    if not key and own:
        raise ConfigError(f"no key for {host_of(base)}: set OPENAI_API_KEY in the environment, or api_key")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the api_key has characters that no key has; copy it again")
    return base, key


def told(
    text: str,
    ids: Sequence[str] | None = None,
    sources: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
) -> Answer:
    """An answer of which only this is known: texts of documents are empty, and what was not told is made plain.

    A document whose id is not told is called ``unknown-1`` and so on; a score is nan, and so is the background's law,
    with n = 0, because nobody but the system itself knows them.

    Args:
        text: The answer.
        ids: Of the documents in the context, best first; None: not told.
        sources: Theirs.
        scores: Theirs.

    Raises:
        ValueError: If the lists are of different lengths.

    >>> told("It is 7.", sources=("tolls.md",)).retrieval.hits[0].document
    Document(id='unknown-1', text='', title='', source='tolls.md', digest='', metadata={})
    """
    counts = [len(part) for part in (ids, sources, scores) if part is not None]
    if len(set(counts)) > 1:
        raise ValueError(f"ids, sources and scores are not equally many: {', '.join(map(str, counts))}")
    hits = []
    for i in range(max(counts, default=0)):
        document = Document(ids[i] if ids else f"unknown-{i + 1}", "", source=sources[i] if sources else "")
        hits.append(Hit(document, scores[i] if scores else math.nan))
    return Answer(text, Retrieval(tuple(hits), Background(0, math.nan, math.nan), exhausted=True))


def listed(values: Sequence[Any]) -> list[Any]:
    """Some values in one row; those that are lists are laid out in it."""
    return [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]


def names(values: Sequence[Any] | None) -> tuple[str, ...] | None:
    """Texts or whole numbers as names; None stays None.

    Raises:
        ValueError: If there is anything else among them.
    """
    if values is None:
        return None
    if any(isinstance(v, bool) or not isinstance(v, str | int) for v in values):
        raise ValueError("ids and sources must be texts or whole numbers")
    return tuple(map(str, values))


def figures(values: Sequence[Any] | None) -> tuple[float, ...] | None:
    """Finite numbers; None stays None.

    Raises:
        ValueError: If there is anything else among them.
    """
    if values is None:
        return None
    if any(isinstance(v, bool) or not isinstance(v, int | float) or not math.isfinite(v) for v in values):
        raise ValueError("scores must be finite numbers")
    return tuple(map(float, values))


def _wait(said: str) -> float | None:
    """Seconds that a Retry-After header asks for; None if it cannot be read."""
    if said.strip().isdecimal():
        return float(said)
    try:
        return max((parsedate_to_datetime(said) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None
