"""The connections of a server: accepts them, limits their number, and closes those with long waits for their client.

At the limit, a new connection replaces one that waits for its client: the one with the longest wait, of the address
with most waiting connections. So an address with many connections cannot displace those of others. A rate limit applies
to this address, and to those with more than half as many and more than ``FEW``: together they may replace at most
``REPLACED_PER_S`` a second. Their further connections are reset immediately. Clients that lose a connection often
reopen it at once, and their requests would delay those of others. A trusted proxy has the connections of many clients,
so it may replace any number.

The address of an IPv6 client is its /64 network, which usually belongs to one client.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from ipaddress import ip_address, ip_network
from ssl import SSLContext
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from casemate.config import GatewaySection
from casemate.gateway.admission import HEADERS
from casemate.gateway.errors import invalid_http

BACKLOG, ACCEPTED_AT_ONCE = 2048, 32
"""Connections that may wait to be accepted, and those accepted before running requests continue."""
FEW, REPLACED_PER_S = 8, 50
"""Maximum number of waiting connections of an address without a rate limit; replacements per second of the others."""
ACCEPT_RETRY_S = 1.0
"""Pause after the system had no descriptor or memory for a connection."""
DESCRIPTORS = 32_768
"""Open files that ``serve`` asks for, as far as the system's hard limit permits."""
RESERVED_DESCRIPTORS = 256
"""File descriptors that are kept for indexes, databases and models."""
LOG_INTERVAL_S = 60.0
RESET = struct.pack("ii", 1, 0)
"""Value of SO_LINGER: ``close`` resets the connection, and the kernel keeps nothing of it."""
_log = logging.getLogger(__name__)


class OpenConnections:
    """The connections of a server, from their acceptance on, and those of each address that wait for their client.

    A connection waits while it has no complete request: during the TLS handshake, while it is idle, and while a body
    arrives. It also waits while it closes, until the client has read the rest and answered the end of TLS.

    ``limit`` connections may be open. The proxies are addresses and networks of trusted ones; ``*``: every address.
    """

    def __init__(self, limit: int, proxies: Collection[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._proxies, self._clock = proxies, clock
        self._addresses: dict[HttpConnection, str] = {}
        self._waiting: dict[str, dict[HttpConnection, None]] = {}  # by address, longest first
        self._by_number: dict[int, dict[str, None]] = {}  # addresses by the number of their waiting connections
        self._most = 0  # largest key of `_by_number`
        self._allowance, self._counted = float(REPLACED_PER_S), clock()
        self._closed, self._logged = 0, -math.inf

    def admits(self, host: str) -> bool:
        """Whether a new connection of an address may be opened. Charges the limit of replacements; counts a refusal."""
        waiting = len(self._waiting.get(_address(host), ()))
        if len(self._addresses) < self.limit or waiting <= max(FEW, self._most // 2):
            return True
        is_proxy = "*" in self._proxies or any(_contains(proxy, host) for proxy in self._proxies)
        if is_proxy or self._may_replace():
            return True
        self._report_closed()
        return False

    def _may_replace(self) -> bool:
        now = self._clock()
        earned = REPLACED_PER_S * (now - self._counted)
        self._allowance, self._counted = min(REPLACED_PER_S, self._allowance + earned), now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def open(self, connection: HttpConnection, host: str) -> None:
        """Counts a new connection, which waits for its client; closes another one, or this one, at the limit."""
        self._addresses[connection] = _address(host)
        self.wait(connection)
        if len(self._addresses) > self.limit:
            address = next(iter(self._by_number[self._most]))
            longest = next(iter(self._waiting[address]))
            self.close(longest)
            longest.abort()
            self._report_closed()

    def wait(self, connection: HttpConnection) -> None:
        """Counts a connection as one that waits for its client from now on, unless it is closed."""
        address = self._addresses.get(connection)
        if address is not None:
            waiting = self._waiting.setdefault(address, {})
            before = len(waiting)
            waiting.pop(connection, None)
            waiting[connection] = None
            self._count(address, before, len(waiting))

    def work(self, connection: HttpConnection) -> None:
        """Counts a connection as one that does not wait for its client."""
        address = self._addresses.get(connection, "")
        waiting = self._waiting.get(address, {})
        if connection in waiting:
            del waiting[connection]
            self._count(address, len(waiting) + 1, len(waiting))
            if not waiting:
                del self._waiting[address]

    def close(self, connection: HttpConnection) -> None:
        """Forgets a connection."""
        self.work(connection)
        self._addresses.pop(connection, None)

    def _count(self, address: str, before: int, after: int) -> None:
        """Records how many connections of an address wait; the numbers differ by at most one."""
        if before == after:
            return
        if before:
            del self._by_number[before][address]
            if not self._by_number[before]:
                del self._by_number[before]
        if after:
            self._by_number.setdefault(after, {})[address] = None
        if after > self._most or self._most not in self._by_number:
            self._most = after

    def _report_closed(self) -> None:
        """Logs at most once a minute that connections were closed for lack of room."""
        self._closed += 1
        if self._clock() - self._logged > LOG_INTERVAL_S:
            _log.warning(
                "%d connections closed: more than gateway.max_connections=%d are open", self._closed, self.limit
            )
            self._closed, self._logged = 0, self._clock()


def _address(host: str) -> str:
    """What counts as one address: of IPv6, the /64 network."""
    if ":" not in host or host.startswith("::ffff:"):
        return host
    return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8].hex()


def _contains(network: str, host: str) -> bool:
    try:
        return ip_address(host.removeprefix("::ffff:")) in ip_network(network, strict=False)
    except ValueError:  # a name, which uvicorn compares as it is
        return network == host


class _Transport:
    """A transport that reports when it begins to close. How long that takes may depend on the client."""

    def __init__(self, transport: asyncio.Transport, on_close: Callable[[], None]) -> None:
        self._transport, self._on_close = transport, on_close

    def close(self) -> None:
        """Begins to close, once: after a second call, TLS of asyncio could not be aborted."""
        if not self._transport.is_closing():
            self._transport.close()
            self._on_close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class HttpConnection(H11Protocol):
    """An HTTP/1.1 connection with time limits and JSON errors for invalid HTTP.

    Without the limits, a client that sends its headers byte by byte, or does not read its answer, would keep a
    connection forever.

    Attributes:
        timeout_s: Time for the TLS handshake, for request line and headers, for reading a full output buffer, and for
            the client's part in closing.
        opening: The accepted socket while the connection is opened, which includes the TLS handshake; else None.
    """

    timeout_s: float = 30.0
    open_connections: OpenConnections

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.opening: socket.socket | None = None
        self._aborted = False
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer. Aborts a connection that was to be closed while it was opened: its data had arrived."""
        super().connection_made(transport)
        if self._aborted:
            transport.abort()
            return
        self.transport = cast(asyncio.Transport, _Transport(transport, self._await_close))
        if self.opening is None:  # asyncio has accepted it
            self.open_connections.open(self, (self.client or ("",))[0])
        self._restart_timer()

    def abort(self) -> None:
        """Closes the connection at once, also while it is opened."""
        if self.transport is not None:
            self.transport.abort()
        elif self.opening is not None:
            self._aborted = True
            with suppress(OSError):  # the client has closed it
                self.opening.shutdown(socket.SHUT_RDWR)  # a cancelled task would leave open what it has begun

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers."""
        super().connection_lost(exc)
        self._stop_timer()
        self.open_connections.close(self)
        self.resume_writing()

    def pause_writing(self) -> None:
        """The client reads too slowly: it has ``timeout_s`` to empty the buffer."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read enough."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._write_timer = None

    def data_received(self, data: bytes) -> None:
        """Feeds the parser; stops the timer once a request starts."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._idle:
            self._stop_timer()
        elif self._timer is None:
            self._restart_timer()
        if not (self._idle or self.cycle.more_body):
            self.open_connections.work(self)

    def eof_received(self) -> None:
        """The client sends no more: the event loop closes the connection after this call."""
        if not self.transport.is_closing():
            self._await_close()

    def on_response_complete(self) -> None:
        """The connection is idle until the next request."""
        super().on_response_complete()
        if self._idle and not self.transport.is_closing():
            self.open_connections.wait(self)

    def send_400_response(self, msg: str) -> None:
        """Reports invalid HTTP, unless a response has started."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = invalid_http()
            content = bytes(error.response().body)
            named = {**HEADERS, "Content-Type": "application/json", **(error.headers or {})}
            headers = [(name.encode(), value.encode()) for name, value in named.items()]
            headers.append((b"Content-Length", str(len(content)).encode()))
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=content),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _restart_timer(self) -> None:
        self._stop_timer()
        self.open_connections.wait(self)
        self._timer = self.loop.call_later(self.timeout_s, self._close_if_idle)

    def _await_close(self) -> None:
        """The connection is closing: the client has ``timeout_s`` for its part, and a new connection may replace it."""
        self._stop_timer()
        self.open_connections.wait(self)
        self._timer = self.loop.call_later(self.timeout_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _close_if_idle(self) -> None:
        if self._idle:
            self.transport.close()


class Listener:
    """Accepts the connections of a bound socket, which it closes, and opens those that there is room for.

    asyncio would open every one, and count none before its TLS handshake.
    """

    def __init__(
        self,
        listening: socket.socket,
        make_connection: Callable[[], HttpConnection],
        open_connections: OpenConnections,
        tls: SSLContext | None,
    ) -> None:
        self._listening, self._make_connection, self._tls = listening, make_connection, tls
        self._open_connections = open_connections
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._logged = -math.inf
        self._opening: dict[asyncio.Task[None], HttpConnection] = {}
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Accepts no more connections, and closes those that are not open yet. Open ones stay open."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()
        for connection in self._opening.values():
            if connection.transport is None:
                connection.abort()

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening.fileno(), self._accept_some)

    def _accept_some(self) -> None:
        """Accepts some of the connections that wait. The loop calls it again while there are more."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # no descriptor or no memory
                if self._loop.time() - self._logged > LOG_INTERVAL_S:
                    _log.error("connections cannot be accepted at the moment: %s", error.strerror)
                    self._logged = self._loop.time()
                self._loop.remove_reader(self._listening.fileno())
                self._retry = self._loop.call_later(ACCEPT_RETRY_S, self._resume)
                return
            self._open(accepted, str(peer[0]))

    def _open(self, accepted: socket.socket, host: str) -> None:
        if not self._open_connections.admits(host):
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            accepted.close()
            return
        accepted.setblocking(False)
        connection = self._make_connection()
        connection.opening = accepted
        self._open_connections.open(connection, host)
        task = self._loop.create_task(self._connect(connection, accepted))
        self._opening[task] = connection
        task.add_done_callback(self._opening.pop)

    async def _connect(self, connection: HttpConnection, accepted: socket.socket) -> None:
        """Opens a connection, or forgets it if its TLS handshake failed, took too long, or was aborted."""
        limit = connection.timeout_s if self._tls else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=limit,
                ssl_shutdown_timeout=limit,
            )
        except OSError as error:
            _log.debug("a connection was not opened: %s", type(error).__name__)
        finally:
            connection.opening = None
            if connection.transport is None:
                self._open_connections.close(connection)
                accepted.close()


def connection_options(section: GatewaySection) -> dict[str, Any]:
    """Class attributes of the connections of one server."""
    limit = section.max_connections or max(1, _descriptors() - RESERVED_DESCRIPTORS)
    return {
        "timeout_s": section.body_timeout_s,
        "open_connections": OpenConnections(limit, section.trusted_proxies),
    }


def _descriptors() -> int:
    """The limit of open files of this process; 1,024 if the system reports none."""
    try:
        import resource
    except ImportError:  # Windows
        return 1024
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20)


def raise_descriptor_limit() -> None:
    """Raises this process's limit of open files to ``DESCRIPTORS``, or as near as the system permits.

    The usual limit of 1,024 would let few idle connections close one another again and again.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
