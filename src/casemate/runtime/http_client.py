"""HTTP client for external systems, with timeout, retries, rate limit and size limit.

An error contains the host, the failure and the remedy. It never contains a header, the query or the server's own text,
which may repeat either.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any
from urllib.parse import urljoin, urlsplit

from casemate.errors import BackendError, BudgetExhausted, ConfigError, needs, require_range
from casemate.runtime.retry import MAX_RETRY_AFTER_S, RateLimiter, exponential_backoff, retry

MAX_REDIRECTS = 3
_HTML = re.compile(rb"\s*<(?:!doctype|html|head|body|!--)", re.IGNORECASE)
_REDIRECT = {301, 302, 307, 308}
_TRANSIENT = {429, 500, 502, 503, 504}
_REJECTED = {400, 403, 413, 422}
_REMEDIES: Mapping[int, str] = {
    401: "the key is missing or rejected; correct the header or option that contains it",
    403: "the key has no permission; use one that may query",
    404: "there is nothing at this path; correct the address",
    405: "the method is not allowed; correct the method",
    413: "the query is too long for the server",
    415: "the server does not accept JSON; correct headers and body",
    422: "the server does not accept this body; correct the option body (casemate try: --body)",
    429: "too many requests; lower requests_per_s (casemate try: --requests-per-s), or wait",
}


class RequestRefused(BackendError):
    """The server rejected this request or answered nothing, as content filters do; it may answer the next one."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A whole response: media type in lower case, and body."""

    content_type: str
    data: bytes


@dataclass(eq=False)
class HttpClient:
    """Sends requests within limits. Each request opens a connection of its own, so any event loop may use the client.

    Certificates are always checked. A redirect is followed on the same host only, with the same method and body.

    Attributes:
        timeout_s: Longest time of one attempt, until the last byte.
        retries: Further attempts if the server is busy, fails or cannot be reached; none after a timeout.
        requests_per_s: Requests a second, retries included; 0: no limit.
        max_bytes: Bytes of a response beyond which reading stops with an error.
        max_requests: Requests, retries and redirects included, after which none is sent; 0: no limit.
    """

    backend: str
    timeout_s: float = 30.0
    retries: int = 2
    requests_per_s: float = 0.0
    max_bytes: int = 1_000_000
    max_requests: int = 0
    requests: int = field(default=0, init=False)
    _tls: ssl.SSLContext | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        with needs("casemate[http]"):
            import httpx  # noqa: F401
        require_range(self.backend, self, "timeout_s max_bytes", above=0)
        require_range(self.backend, self, "retries requests_per_s max_requests", at_least=0)
        self._rate_limiter = RateLimiter(self.requests_per_s)

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> HttpResponse:
        """Sends a request and reads the response; retries transient failures.

        Raises:
            RequestRefused: If the server rejects this request.
            BackendError: If there is no response within the limits.
            BudgetExhausted: If `max_requests` were sent.
        """
        try:
            return await retry(partial(self._follow, method, url, headers, body), self.retries, _delay)
        except _Transient as failure:
            raise self.error(url, failure.what, True) from None

    def error(
        self, url: str, what: str, retryable: bool = False, kind: type[BackendError] = BackendError
    ) -> BackendError:
        """An error with the host's name."""
        return kind(f"{host_of(url)}: {what}", backend=self.backend, retryable=retryable)

    def json(self, url: str, page: HttpResponse) -> Any:
        """Parses the body of a response as JSON; ``BackendError``: it is an HTML page or not JSON."""
        if "html" in page.content_type or _HTML.match(page.data):
            raise self.error(url, "the response is an HTML page instead of JSON; set the address of the API")
        try:
            return json.loads(page.data)
        except (ValueError, RecursionError):
            about = f"{page.content_type or 'no type'}, {len(page.data)} bytes"
            raise self.error(url, f"the response is not JSON ({about})") from None

    async def _follow(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> HttpResponse:
        """One attempt, over redirects on the same host."""
        for _ in range(MAX_REDIRECTS + 1):
            await self._rate_limiter.acquire()
            if self.max_requests and self.requests >= self.max_requests:
                raise BudgetExhausted(f"all {self.max_requests} requests to {host_of(url)} are sent, retries included")
            self.requests += 1
            found = await self._once(method, url, headers, body)
            if isinstance(found, HttpResponse):
                return found
            url = found
        raise self.error(url, "the server redirects in circles; set the address that it leads to")

    async def _once(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> HttpResponse | str:
        """One request: the response, or the address that it redirects to."""
        import httpx

        if self._tls is None:
            self._tls = httpx.create_ssl_context()
        sent = {"accept-encoding": "identity", **headers}  # a compressed body may hide its size
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                httpx.AsyncClient(verify=self._tls, timeout=self.timeout_s) as client,
                client.stream(method, url, headers=sent, content=body) as response,
            ):
                if response.status_code in _REDIRECT:
                    return self._redirect(url, response.headers.get("location", ""))
                self._require_success(url, response)
                return HttpResponse(response.headers.get("content-type", "").lower(), await self._read(url, response))
        except (TimeoutError, httpx.TimeoutException):
            raise self.error(url, f"no response within {self.timeout_s:g} s", True) from None
        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as error:
            raise _Transient(f"the connection failed ({type(error).__name__}); check that the server runs") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise self.error(url, f"the request failed ({type(error).__name__})") from None

    def _require_success(self, url: str, response: Any) -> None:
        status = response.status_code
        if status in _TRANSIENT:
            what = _REMEDIES.get(status, "the server failed; read its log")
            raise _Transient(f"HTTP {status}: {what}", _retry_after(response.headers.get("retry-after", "")))
        if status in _REJECTED:
            what = f"{host_of(url)}: HTTP {status}: {_REMEDIES.get(status, 'the request is rejected')}"
            raise RequestRefused(what, backend=self.backend, retryable=False)
        if not 200 <= status < 300:
            raise self.error(url, f"HTTP {status}: {_REMEDIES.get(status, 'the request is rejected')}", status >= 500)
        if response.headers.get("content-encoding", "identity").lower() not in {"identity", ""}:
            raise self.error(url, "the response is compressed, although the request allows identity encoding only")

    async def _read(self, url: str, response: Any) -> bytes:
        length = response.headers.get("content-length", "")
        data = bytearray()
        if not (length.isdecimal() and int(length) > self.max_bytes):
            async for block in response.aiter_raw():
                data += block
                if len(data) > self.max_bytes:
                    break
            else:
                return bytes(data)
        raise self.error(url, f"the response has more than {self.max_bytes:,} bytes (max_bytes), the rest was not read")

    def _redirect(self, url: str, location: str) -> str:
        """The target of a redirect, on the same host and not out of TLS."""
        to = urljoin(url, location)
        if not location or _origin(to) != _origin(url):
            raise self.error(url, f"the server redirects to another host ({host_of(to)}), which is not followed")
        if url.startswith("https:") and not to.startswith("https:"):
            raise self.error(url, "the server redirects out of TLS, which is not followed")
        return urlsplit(to)._replace(netloc=urlsplit(url).netloc).geturl()


class _Transient(Exception):
    """A failure that a retry may cure, and the wait that the server asks for; None: it names none."""

    def __init__(self, what: str, retry_after_s: float | None = None) -> None:
        super().__init__(what)
        self.what, self.retry_after_s = what, retry_after_s


def _delay(error: Exception, attempt: int) -> float | None:
    if not isinstance(error, _Transient):
        return None
    seconds = exponential_backoff(attempt) if error.retry_after_s is None else error.retry_after_s
    return seconds if seconds <= MAX_RETRY_AFTER_S else None


def host_of(url: str) -> str:
    """Host name and port of a URL, without user and password.

    >>> host_of("https://ann:secret@rag.example:8443/ask")
    'rag.example:8443'
    """
    return urlsplit(url).netloc.rpartition("@")[2]


def _origin(url: str) -> tuple[str | None, int | None]:
    """Host and port; a scheme's default port counts as none, so that http may redirect to https."""
    parts = urlsplit(url)
    return parts.hostname, None if parts.port == {"http": 80, "https": 443}.get(parts.scheme) else parts.port


def require_address(name: str, url: str) -> None:
    """Raises ``ConfigError`` if a configured address does not begin with http:// or https:// and a host."""
    if not re.match(r"https?://[^/\s]", url):
        raise ConfigError(f"{name} must begin with http:// or https:// and a host; that of {host_of(url)!r} does not")


def _retry_after(header: str) -> float | None:
    """Seconds of a Retry-After header; None if it cannot be parsed."""
    if header.strip().isdecimal():
        return float(header)
    try:
        return max((parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None
