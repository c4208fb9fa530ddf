"""URLs: only listed hosts, only public addresses at every hop, within size, time and rate."""

import asyncio
import gc
import io
import ipaddress
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from mmprefill import fetch as fetch_module
from mmprefill.config import MediaLimits
from mmprefill.errors import MediaError, MediaFetchError, MediaForbiddenError, MediaLimitError
from mmprefill.fetch import Fetcher, describe_url, is_public, parse_url
from mmprefill.media import load_picture

HOST = "pictures.test"


def picture_bytes():
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), (10, 20, 30)).save(buffer, "PNG")
    return buffer.getvalue()


PNG = picture_bytes()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.port = self.server_address[1]
        self.seen = []  # (Host header, path)
        self.stop = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.seen.append((self.headers["Host"], self.path))
        self.close_connection = True
        name = self.path.strip("/").split("/")[0].split("?")[0]
        with suppress(OSError):  # the client left
            getattr(self, f"answer_{name}")()

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if "Content_Length" not in headers and "Transfer_Encoding" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer_ok(self):
        self.reply(200, PNG)

    def answer_chunked(self):
        body = b"".join(b"%x\r\n%s\r\n" % (len(PNG[i : i + 9]), PNG[i : i + 9]) for i in range(0, len(PNG), 9))
        self.reply(200, body + b"0\r\n\r\n", Transfer_Encoding="chunked")

    def answer_error(self):
        self.reply(403, b"<html>no")

    def answer_html(self):
        self.reply(200, b"<!DOCTYPE html><p>Sign in")

    def answer_short(self):
        self.reply(200, PNG[:10], Content_Length=str(len(PNG)))

    def answer_cutchunk(self):
        self.reply(200, b"ff\r\nabc", Transfer_Encoding="chunked")

    def answer_large(self):
        self.reply(200, bytes(5000))

    def answer_liar(self):
        self.reply(200, b"400\r\n%s\r\n" % bytes(1024) * 50 + b"0\r\n\r\n", Transfer_Encoding="chunked")

    def answer_endless(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while not self.server.stop.is_set():
            self.wfile.write(bytes(4096))

    def answer_drip(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        self.drip(b"x")

    def answer_headerdrip(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        self.drip(b"x")

    def answer_continues(self):
        self.drip(b"HTTP/1.1 100 Continue\r\n\r\n")

    def answer_silence(self):
        self.server.stop.wait(5)

    def answer_junk(self):
        self.wfile.write(b"\0\1\2\3 not HTTP\r\n\r\n")

    def drip(self, data):
        while not self.server.stop.wait(0.02):
            self.wfile.write(data)

    def answer_to(self):
        """/to/COUNT redirects COUNT times, then to /ok."""
        count = int(self.path.split("/")[2])
        self.reply(302, Location=f"/to/{count - 1}" if count > 1 else "/ok")

    def answer_loop(self):
        self.reply(307, Location="/loop")

    def answer_nowhere(self):
        self.reply(302)

    def answer_away(self):
        """/away?URL redirects to URL."""
        self.reply(301, Location=self.path.partition("?")[2])


@pytest.fixture(scope="module")
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.stop.set()
    server.shutdown()
    server.server_close()


def fetcher(server, *, hosts=None, resolve=None, permits=None, **limits):
    """A fetcher whose names all lead to the test server, and which is allowed there."""
    hosts = (f"{HOST}:{server.port}",) if hosts is None else hosts
    settings = {"url_rate": 1000.0, "url_timeout": 5.0, **limits}
    return Fetcher(
        MediaLimits(allow_urls=True, allowed_hosts=hosts, **settings),
        resolve=resolve or (lambda host: ["127.0.0.1"]),
        permits=permits or (lambda address: True),
    )


def url(server, path="ok", host=HOST):
    return f"http://{host}:{server.port}/{path}"


@contextmanager
def takes_less_than(seconds):
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


# What is fetched


@pytest.mark.parametrize("path", ["ok", "chunked", "to/1", "to/3", "ok?query=1#part", "ok/ä b".replace(" ", "%20")])
def test_bodies_arrive_whole(server, path):
    """Plain, chunked and redirected bodies are the bytes that were sent."""
    assert fetcher(server).fetch(url(server, path)) == PNG


def test_load_picture_fetches(server):
    """A URL through `load_picture` gives the same pixels as its bytes; its query stays out of `source`."""
    fetch = fetcher(server)
    picture = load_picture(url(server, "ok?key=secret"), MediaLimits(), fetcher=fetch)
    assert np.array_equal(picture.pixels, load_picture(PNG, MediaLimits()).pixels)
    assert picture.source == f"URL {url(server)}"
    with pytest.raises(MediaError, match=r"^request 'r1', picture 2 .*HTML"):
        load_picture(url(server, "html"), MediaLimits(), fetcher=fetch, item="request 'r1', picture 2")
    with pytest.raises(MediaFetchError, match=r"^row 3 .*403"):
        load_picture(url(server, "error"), MediaLimits(), fetcher=fetch, item="row 3")


def test_host_header_and_connection_are_apart(server):
    """The connection goes to the resolved address, the Host header names the host."""
    fetcher(server).fetch(url(server, "ok?host"))
    assert (f"{HOST}:{server.port}", "/ok?host") in server.seen


def test_default_fetcher_refuses_loopback(server):
    """The fetcher that `load_picture` makes itself has the whole protection, even for a listed address (I1)."""
    limits = MediaLimits(allow_urls=True, allowed_hosts=(f"127.0.0.1:{server.port}", f"localhost:{server.port}"))
    before = len(server.seen)
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(MediaForbiddenError, match="public"):
            load_picture(url(server, host=host), limits)
    assert len(server.seen) == before


# Where it may go


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.9.1",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.5.5",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd12::1",
        "fec0::1",
        "ff02::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:10.0.0.1",
        "::127.0.0.1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
    ],
)
def test_addresses_that_are_not_public(address):
    """Private, loopback, link-local, multicast, reserved and translated forms of them are not public (I1)."""
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_addresses_that_are_public(address):
    """Ordinary addresses are public."""
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "017700000001", "[::ffff:127.0.0.1]", "[::1]"]
)
def test_odd_spellings_of_loopback(server, host):
    """Decimal, octal, hex, short and mapped spellings are refused by name and, where listed, by address."""
    with pytest.raises(MediaForbiddenError, match="allowed_hosts"):
        fetcher(server).fetch(url(server, host=host))
    limits = MediaLimits(allow_urls=True, allowed_hosts=(f"{host}:{server.port}",))
    before = len(server.seen)
    with pytest.raises((MediaForbiddenError, MediaFetchError)):
        Fetcher(limits).fetch(url(server, host=host))
    assert len(server.seen) == before


def test_any_address_that_is_not_public_refuses_the_host(server):
    """A name with a public and a private address is refused."""
    fetch = fetcher(server, resolve=lambda host: ["8.8.8.8", "10.0.0.1"], permits=is_public)
    with pytest.raises(MediaForbiddenError, match=r"10\.0\.0\.1"):
        fetch.fetch(url(server))


def test_a_name_is_resolved_once_per_hop(server, monkeypatch):
    """The checked address is the connected one: a name server that changes its mind is not asked again (I1)."""
    asked, connected = [], []
    real = socket.create_connection

    def resolve(host):
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["10.0.0.1"]

    def connect(address, **options):
        connected.append(address)
        return real(address, **options)

    monkeypatch.setattr(socket, "create_connection", connect)
    assert fetcher(server, resolve=resolve).fetch(url(server)) == PNG
    assert asked == [HOST] and connected == [("127.0.0.1", server.port)]


def test_every_hop_is_checked(server):
    """A redirect to another host, address, scheme or port passes the same gate as the first URL (I1)."""
    public = {HOST: "127.0.0.1", "inner.test": "127.0.0.2"}
    fetch = fetcher(
        server,
        hosts=(f"{HOST}:{server.port}", "inner.test"),
        resolve=lambda host: [public[host]],
        permits=lambda address: str(address) != "127.0.0.2",
    )
    forbidden = [
        ("http://evil.test/", "allowed_hosts"),
        ("//evil.test/", "allowed_hosts"),
        ("http://inner.test/", "public"),
        ("http://169.254.169.254/latest/meta-data", "allowed_hosts"),
        ("file:///etc/passwd", "file"),
        ("ftp://pictures.test/a", "ftp"),
        ("gopher://pictures.test/a", "gopher"),
        ("data:image/png;base64,AAAA", "data"),
        (f"http://{HOST}:22/", "allowed_hosts"),
        (f"http://{HOST}/", "allowed_hosts"),
        (f"http://user@{HOST}:{server.port}/ok", "user name"),
        (f"http://{HOST}:{server.port}@evil.test/ok", "user name"),
    ]
    for location, reason in forbidden:
        with pytest.raises(MediaForbiddenError, match=reason):
            fetch.fetch(url(server, f"away?{location}"))
    assert fetch.fetch(url(server, f"away?{url(server)}")) == PNG


def test_redirects_are_limited(server):
    """`max_redirects` is exact; a loop ends there; a redirect without a target is a failure."""
    assert fetcher(server, max_redirects=2).fetch(url(server, "to/2")) == PNG
    for path, limit in (("to/3", 2), ("to/1", 0), ("loop", 3)):
        with pytest.raises(MediaFetchError, match="max_redirects"):
            fetcher(server, max_redirects=limit).fetch(url(server, path))
    with pytest.raises(MediaFetchError, match="Location"):
        fetcher(server).fetch(url(server, "nowhere"))


@pytest.mark.parametrize(
    ("entry", "target", "allowed"),
    [
        ("example.org", "http://example.org/", True),
        ("example.org", "https://EXAMPLE.org./a", True),
        ("EXAMPLE.org", "https://example.org:443/a", True),
        ("example.org", "http://example.org:8080/", False),
        ("example.org", "http://example.org:443/", False),
        ("example.org:8080", "http://example.org:8080/", True),
        ("example.org:8080", "http://example.org/", False),
        ("example.org", "http://a.example.org/", False),
        ("example.org", "http://example.org.evil.test/", False),
        ("example.org", "http://badexample.org/", False),
        ("*.example.org", "http://a.b.example.org/", True),
        ("*.example.org", "http://example.org/", False),
        ("*.example.org", "http://badexample.org/", False),
        ("*.example.org:81", "http://a.example.org:81/", True),
        ("bücher.example", "http://xn--bcher-kva.example/", True),
        ("xn--bcher-kva.example", "http://BÜCHER.example/", True),
        ("[2606:4700::1111]", "http://[2606:4700:0:0::1111]/", True),
        ("*", "http://example.org/", False),
        ("*.", "http://example.org/", False),
        ("", "http://example.org/", False),
    ],
)
def test_allowed_hosts(entry, target, allowed):
    """Entries match whole names, in any case and alphabet, and only the port that they name or the scheme's own."""
    fetch = Fetcher(MediaLimits(allow_urls=True, allowed_hosts=(entry,)), resolve=lambda host: [])
    with pytest.raises(MediaFetchError if allowed else MediaForbiddenError):
        fetch.fetch(target)


@pytest.mark.parametrize(
    "text",
    [
        "http://",
        "http:///path",
        "http://exa mple.org/",
        "http://example.org/\r\nHost: evil",
        "http://example.org:99999/",
        "http://example.org:port/",
        "http://[::1/",
        "http://exam%70le.org/",
        "http://example.org\\@evil.test/",
        "http://example.org\\.evil.test/",
        "http://-/",
        "http://" + "a" * 70 + ".org/",
        "http://example.org/" + "a" * 9000,
        "http://example。org\x00/",
        "http://example.org／@evil.test/",
    ],
)
def test_malformed_urls(text):
    """What is no URL is the user's mistake, whatever parser it was made for."""
    with pytest.raises(MediaError):
        parse_url(text)


def test_parse_url_takes_apart():
    """Names are normalised, paths are ASCII, fragments are not sent."""
    assert parse_url("HTTP://EXAMPLE.org.:81/ä?b=ö c".replace(" ", "%20") + "#d") == (
        "http", "example.org", 81, "/%C3%A4?b=%C3%B6%20c",
    )  # fmt: skip
    assert parse_url("https://１２７.0.0.1").host == "127.0.0.1"
    assert parse_url("https://[::1]:8/").netloc == "[::1]:8"
    assert parse_url("https://a.org:443/").netloc == "a.org"


def test_describe_url_has_no_secrets():
    """Messages show neither user name, query nor fragment."""
    assert describe_url("https://u:p@example.org/a.png?sig=s#f") == "URL https://example.org/a.png"
    assert len(describe_url("https://example.org/" + "a" * 9000)) < 140
    assert "secret" not in describe_url("http://[secret")


def test_urls_are_off_by_default():
    """A fetcher of default limits fetches nothing (I1)."""
    with pytest.raises(MediaForbiddenError, match="allow_urls"):
        Fetcher(MediaLimits()).fetch("http://example.org/")


def test_proxies_of_the_environment_are_ignored(server, monkeypatch):
    """A proxy would resolve the name itself."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert fetcher(server).fetch(url(server)) == PNG


# How much, how long, how often


def test_size_is_what_arrives(server):
    """A body over `max_bytes` ends there, whether its length is declared, chunked or endless."""
    assert fetcher(server, max_bytes=5000).fetch(url(server, "large")) == bytes(5000)
    for path in ("large", "liar", "endless"):
        with takes_less_than(4), pytest.raises(MediaLimitError, match="max_bytes"):
            fetcher(server, max_bytes=4999).fetch(url(server, path))


@pytest.mark.parametrize("path", ["drip", "headerdrip", "continues", "silence", "away?/silence"])
def test_time_is_total(server, path):
    """Bodies, headers and interim answers that drip end at the deadline, which redirects share."""
    with takes_less_than(2), pytest.raises(MediaFetchError, match="url_timeout"):
        fetcher(server, url_timeout=0.3).fetch(url(server, path))


def test_slow_names_are_within_the_time(server):
    """A name server that does not answer ends at the deadline too."""
    with takes_less_than(2), pytest.raises(MediaFetchError, match="url_timeout"):
        fetcher(server, url_timeout=0.2, resolve=lambda host: time.sleep(3) or []).fetch(url(server))


@pytest.mark.parametrize("path", ["error", "short", "cutchunk", "junk"])
def test_broken_answers(server, path):
    """An error status, a short body and nonsense are fetch errors."""
    with pytest.raises(MediaFetchError):
        fetcher(server).fetch(url(server, path))


def test_unreachable_hosts(server):
    """A name without an address, or with a closed port, is a fetch error; a second address is tried."""
    with pytest.raises(MediaFetchError, match="no address"):
        fetcher(server, resolve=lambda host: []).fetch(url(server))

    def unknown(host):
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(MediaFetchError, match="not known"):
        fetcher(server, resolve=unknown).fetch(url(server))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(MediaFetchError, match="refused"):
            fetcher(server, hosts=(f"{HOST}:{port}",)).fetch(f"http://{HOST}:{port}/")
    assert fetcher(server, resolve=lambda host: ["127.0.0.9", "127.0.0.1"]).fetch(url(server)) == PNG


def test_tls_is_verified(server):
    """https to a server without TLS fails; nothing falls back to http."""
    with takes_less_than(4), pytest.raises(MediaFetchError):
        fetcher(server, url_timeout=1.0).fetch(f"https://{HOST}:{server.port}/ok")


def test_rate_is_shared_by_threads(server):
    """Eight threads on one fetcher stay together under the host's rate; another host has its own."""
    hosts = (f"{HOST}:{server.port}", f"other.test:{server.port}")
    fetch = fetcher(server, hosts=hosts, url_rate=10.0)
    start = time.monotonic()
    times = []

    def one(_):
        assert fetch.fetch(url(server)) == PNG
        times.append(time.monotonic() - start)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(25)))
        with takes_less_than(1.5):
            fetch.fetch(url(server, host="other.test"))
    times.sort()
    assert all(later - first > 0.5 for first, later in zip(times, times[11:], strict=False))
    assert times[-1] > 1.9


@pytest.mark.parametrize("rate", [0.5, 2.5, 8.0])
def test_rates_that_are_no_whole_numbers(rate):
    """Any positive rate is kept on average."""
    throttler = fetch_module._Turnstile(rate)._throttler
    assert throttler.rate_limit / throttler.period == pytest.approx(rate)


def test_waiting_for_a_turn_is_not_the_servers_time(server):
    """A fetch that waited longer than `url_timeout` for its turn still has its time."""
    fetch = fetcher(server, url_rate=1.0, url_timeout=0.5)
    for _ in range(2):
        assert fetch.fetch(url(server)) == PNG


def test_inside_a_running_event_loop(server):
    """A caller's running event loop is no obstacle."""
    fetch = fetcher(server)

    async def main():
        return fetch.fetch(url(server))

    assert asyncio.run(main()) == PNG


def test_sockets_are_closed(server):
    """Nothing stays open after a fetch, however it ended (ResourceWarnings are errors here)."""
    fetch = fetcher(server, url_timeout=0.3, max_bytes=2000)
    for path in ("ok", "to/1", "large", "error", "short", "drip", "junk"):
        try:
            fetch.fetch(url(server, path))
        except (MediaFetchError, MediaLimitError):
            continue
    gc.collect()
