"""Bytes behind an http(s) URL, without letting the URL's author reach anything that is not public.

Each hop of a redirect passes the same gate: a listed host, a resolved address that is public, and a connection to that
very address (resolving again would let a rebinding name server answer differently). Proxy variables of the environment
are ignored, since a proxy would resolve the name for itself.
"""

from __future__ import annotations

import asyncio
import functools
import http.client
import io
import ipaddress
import math
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import quote, urljoin, urlsplit

from asyncio_throttle.throttler import Throttler

from mmprefill.config import MediaLimits
from mmprefill.errors import MediaError, MediaFetchError, MediaForbiddenError, MediaLimitError

T = TypeVar("T")
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str], Sequence[str]]  # host name -> numeric addresses
AddressCheck = Callable[[IPAddress], bool]

_DEFAULT_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_URL = 8_192
_READ_SIZE = 64 * 1024
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_ALLOWED_ENTRY = re.compile(r"(?P<host>\[[^]]*\]|[^:]*)(:(?P<port>\d+))?")


class Target(NamedTuple):
    """A URL taken apart once, so that what is checked is what is connected to."""

    scheme: str
    host: str  # lower-case ASCII; an IPv6 literal has no brackets
    port: int
    resource: str  # path and query, ASCII

    @property
    def netloc(self) -> str:
        """Host as a URL writes it, with the port where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


class Fetcher:
    """Fetches from listed hosts, at a limited rate per host that all threads share.

    Args:
        limits: hosts, size, time, rate and redirects that are allowed. An entry of `allowed_hosts` may name a port
            ("example.org:8443"); without one only the scheme's own port is allowed.
        resolve: host name to numeric addresses. For tests and for name servers of one's own.
        permits: whether an address may be connected to. Replacing it removes the protection of private networks.
    """

    def __init__(
        self, limits: MediaLimits, *, resolve: Resolver | None = None, permits: AddressCheck | None = None
    ) -> None:
        self._limits = limits
        self._resolve = resolve or resolve_host
        self._permits = permits or is_public
        self._turnstiles: dict[str, _Turnstile] = {}
        self._guard = threading.Lock()  # of _turnstiles

    def fetch(self, url: str) -> bytes:
        """The body behind `url`, from any thread; blocks.

        The time limit covers names, connections, redirects and the body, but not the wait for this host's turn.

        Raises:
            MediaError: not a URL.
            MediaForbiddenError: URLs are off, or a hop's scheme, host, port or address is not allowed.
            MediaLimitError: the body is larger than `max_bytes`.
            MediaFetchError: the network or the server failed, or took too long.
        """
        if not self._limits.allow_urls:
            raise MediaForbiddenError("URLs are off; MediaLimits(allow_urls=True, allowed_hosts=...) turns them on")
        deadline = _Deadline(self._limits.url_timeout)
        try:
            return self._follow(url, deadline)
        except TimeoutError as error:
            raise MediaFetchError(
                f"no complete answer within {self._limits.url_timeout:g} s (MediaLimits.url_timeout)"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise MediaFetchError(f"the fetch failed: {type(error).__name__}: {error}") from error

    def _follow(self, url: str, deadline: _Deadline) -> bytes:
        for _ in range(self._limits.max_redirects + 1):
            target = parse_url(url)
            self._check_host(target)
            deadline.extend(self._turnstile(target.host).wait())
            answer = self._get(target, deadline)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer.location)
        raise MediaFetchError(f"more than {self._limits.max_redirects} redirects (MediaLimits.max_redirects)")

    def _check_host(self, target: Target) -> None:
        if not any(_entry_covers(entry, target) for entry in self._limits.allowed_hosts):
            allowed = ", ".join(self._limits.allowed_hosts)
            raise MediaForbiddenError(f"host {target.netloc!r} is not among MediaLimits.allowed_hosts ({allowed})")

    def _turnstile(self, host: str) -> _Turnstile:
        with self._guard:
            return self._turnstiles.setdefault(host, _Turnstile(self._limits.url_rate))

    def _get(self, target: Target, deadline: _Deadline) -> bytes | _Redirect:
        with closing(self._connect(target, deadline)) as sock:
            connection = http.client.HTTPConnection(target.host, target.port)
            connection.sock = cast(socket.socket, _TimedSocket(sock, deadline))
            connection.request("GET", target.resource, headers=_headers(target))
            with connection.getresponse() as response:
                if response.status in _REDIRECTS:
                    return _redirect(response)
                if response.status != http.client.OK:
                    raise MediaFetchError(f"{target.netloc} answered {response.status} {response.reason[:60]}")
                return _read_body(response, self._limits.max_bytes)

    def _connect(self, target: Target, deadline: _Deadline) -> socket.socket:
        sock = _first_connection(self._addresses(target, deadline), target.port, deadline)
        if target.scheme == "http":
            return sock
        try:
            sock.settimeout(deadline.left())
            return self._tls.wrap_socket(sock, server_hostname=target.host)
        except BaseException:
            sock.close()
            raise

    def _addresses(self, target: Target, deadline: _Deadline) -> list[str]:
        # getaddrinfo has no timeout of its own
        found = list(_in_thread(lambda: self._resolve(target.host), deadline.left()))
        if not found:
            raise MediaFetchError(f"host {target.host!r} has no address")
        for address in found:
            if not self._permits(ipaddress.ip_address(address)):
                raise MediaForbiddenError(f"host {target.host!r} resolves to {address}, which is not a public address")
        return found

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()


def parse_url(url: str) -> Target:
    """Take an http(s) URL apart.

    Raises:
        MediaError: malformed.
        MediaForbiddenError: another scheme, or a user name in the host part.
    """
    if len(url) > _MAX_URL:
        raise MediaError(f"a URL of {len(url)} characters; at most {_MAX_URL} are accepted")
    if any(ord(c) <= 0x20 or ord(c) == 0x7F for c in url):
        raise MediaError("the URL has white space or control characters in it")
    scheme = url.partition(":")[0].lower()
    if scheme not in _DEFAULT_PORTS:
        raise MediaForbiddenError(f"scheme {scheme[:20]!r} is not accepted; http and https are")
    try:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise MediaForbiddenError("a URL with a user name or password is not accepted")
        host, port = _normal_host(parts.hostname or ""), parts.port
    except MediaError:
        raise
    except ValueError as error:
        raise MediaError(f"not a valid URL: {error}") from error
    query = f"?{parts.query}" if parts.query else ""
    resource = quote((parts.path or "/") + query, safe="/?:@!$&'()*+,;=~%[]-._")
    return Target(scheme, host, _DEFAULT_PORTS[scheme] if port is None else port, resource)


def describe_url(url: str) -> str:
    """The URL for messages, without user name, query and fragment: those carry keys and signatures."""
    try:
        parts = urlsplit(url[:_MAX_URL])
    except ValueError:
        return "a malformed URL"
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return f"URL {shown if len(shown) <= 120 else shown[:119] + '…'}"


def resolve_host(host: str) -> list[str]:
    """Numeric addresses of a host name, in the system's order."""
    return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))


def is_public(address: IPAddress) -> bool:
    """Whether an address, or the IPv4 address that it stands for, belongs to the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return _is_routable(address.ipv4_mapped)
        if address in _NAT64:
            return _is_routable(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if address.sixtofour is not None and not _is_routable(address.sixtofour):
            return False
    return _is_routable(address)


def _is_routable(address: IPAddress) -> bool:
    special = address.is_multicast or address.is_reserved or address.is_link_local or address.is_loopback
    return address.is_global and not special and not getattr(address, "is_site_local", False)


def _normal_host(host: str) -> str:
    """Lower-case ASCII without a final dot; raises ValueError for what is neither a name nor an address."""
    if ":" in host:
        return str(ipaddress.IPv6Address(host))
    name = host.encode("idna").decode("ascii").lower().rstrip(".") if host else ""
    if not _HOST_NAME.fullmatch(name):
        raise ValueError(f"host {host[:60]!r} is not a host name")
    return name


def _entry_covers(entry: str, target: Target) -> bool:
    match = _ALLOWED_ENTRY.fullmatch(entry.strip())
    if match is None:
        return False
    port = int(match["port"]) if match["port"] else _DEFAULT_PORTS[target.scheme]
    if port != target.port:
        return False
    host, subdomains = match["host"].strip("[]"), False
    if host.startswith("*."):
        host, subdomains = host[2:], True
    try:
        host = _normal_host(host)
    except ValueError:
        return False
    return target.host.endswith(f".{host}") if subdomains else target.host == host


def _headers(target: Target) -> dict[str, str]:
    return {
        "Host": target.netloc,
        "User-Agent": "mmprefill",
        "Accept": "image/*",
        "Accept-Encoding": "identity",  # a compressed body could be larger than it says
        "Connection": "close",
    }


class _Redirect(NamedTuple):
    location: str


def _redirect(response: http.client.HTTPResponse) -> _Redirect:
    location = response.getheader("Location")
    if not location:
        raise MediaFetchError(f"the server answered {response.status} without a Location")
    return _Redirect(location.strip())


def _read_body(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    """The whole body; its declared length only ever makes it refused sooner."""
    too_large = MediaLimitError(f"the answer is larger than {max_bytes} bytes (MediaLimits.max_bytes)")
    if response.length is not None and response.length > max_bytes:
        raise too_large
    body = bytearray()
    while chunk := response.read(_READ_SIZE):
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    if response.length:
        raise MediaFetchError(f"the connection ended {response.length} bytes early, after {len(body)}")
    return bytes(body)


def _first_connection(addresses: Sequence[str], port: int, deadline: _Deadline) -> socket.socket:
    """The first address that answers, each given its share of the time."""
    for rest in range(len(addresses), 1, -1):
        try:
            return socket.create_connection((addresses[-rest], port), timeout=deadline.left() / rest)
        except OSError:
            continue
    return socket.create_connection((addresses[-1], port), timeout=deadline.left())


class _Deadline:
    """One limit over many blocking calls: a socket's own timeout starts again with each byte."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def extend(self, seconds: float) -> None:
        self._end += seconds

    def left(self) -> float:
        """Seconds left, more than 0; raises TimeoutError when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _TimedSocket:
    """What http.client uses of a socket, every call within the deadline."""

    def __init__(self, sock: socket.socket, deadline: _Deadline) -> None:
        self._sock, self._deadline = sock, deadline

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self._deadline.left())
        self._sock.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._sock, self._deadline))

    def close(self) -> None:
        """Nothing: http.client closes before the body is read; the socket's owner closes it after."""


class _TimedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: _Deadline) -> None:
        self._sock, self._deadline = sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._deadline.left())
        return self._sock.recv_into(buffer)


class _Turnstile:
    """The rate of one host, for all threads."""

    def __init__(self, rate: float) -> None:
        count = math.ceil(rate)
        self._throttler: Any = Throttler(rate_limit=count, period=count / rate)
        self._lock = threading.Lock()  # a Throttler is not thread-safe: one thread waits in it, the others here

    def wait(self) -> float:
        """Blocks until it is this caller's turn; returns the seconds waited."""
        start = time.monotonic()
        with self._lock:
            # a thread of its own: the caller's may already run an event loop
            _in_thread(lambda: asyncio.run(self._throttler.acquire()))
        return time.monotonic() - start


def _in_thread(call: Callable[[], T], timeout: float | None = None) -> T:
    """Result of `call` from a thread that is left behind when `timeout` passes; raises TimeoutError then."""
    results: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:  # handed to the caller below
            results.put((None, error))

    threading.Thread(target=run, name="mmprefill-fetch", daemon=True).start()
    try:
        result, error = results.get(timeout=timeout)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return cast(T, result)
