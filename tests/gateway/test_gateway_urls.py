"""Media by URL: what is refused before a connection, what is followed, and how long and how much."""

from __future__ import annotations

import ast
import asyncio
import ipaddress
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_fakes import Stack, ask, picture, refused, stack

from services.gateway.allowed_urls import UrlPolicy, UrlRefused, is_public
from services.gateway.config import GatewayConfig
from services.gateway.sampling import read_sampling
from services.gateway.url_fetch import Fetcher, Resolve
from services.gateway.validator import Conversation, MediaPart, Message
from services.models.media import Modality
from triptych.common.v1 import sampling_pb2
from triptych.gateway.v1 import gateway_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
FIELD = "messages[0].parts[0].image"
PNG = picture(40, 24)
GENERIC = "may not be fetched here"
Directory = Callable[[str], Path]


@dataclass
class Site:
    """A web server on loopback that counts connections; a path answers with the bytes that ``pages`` has for it.

    Attributes:
        pages: whole answers by path, head and all; a callable writes as it likes.
        hosts: the Host header of every request.
    """

    pages: dict[str, Any]
    port: int = 0
    connects: int = 0
    hosts: list[str] = field(default_factory=list)

    def url(self, path: str, host: str = "pictures.test") -> str:
        return f"http://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connects += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.hosts += [line[6:] for line in head.split("\r\n") if line.lower().startswith("host: ")]
            answer = self.pages[head.split()[1]]
            if callable(answer):
                await answer(writer)
            else:
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def page(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    fields = {"Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


@asynccontextmanager
async def site(tls: ssl.SSLContext | None = None, **pages: Any) -> AsyncIterator[Site]:
    made = Site({f"/{name.replace('_', '.')}": answer for name, answer in pages.items()})
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()


def resolver(**names: list[str] | list[list[str]]) -> Resolve:
    """Names to addresses; where there are several lists, one after the other."""
    asked: dict[str, int] = {}

    async def resolve(host: str, port: int) -> list[str]:
        known = names[host.replace(".", "_")]
        if isinstance(known[0], str):
            return [str(address) for address in known]
        asked[host] = asked.get(host, -1) + 1
        return list(known[min(asked[host], len(known) - 1)])

    return resolve


LOOPBACK = resolver(pictures_test=["127.0.0.1"], other_test=["127.0.0.1"], evil_test=["127.0.0.1"])


def fetcher(site: Site, resolve: Resolve = LOOPBACK, context: ssl.SSLContext | None = None, **options: Any) -> Fetcher:
    domains = f"pictures.test:{site.port},other.test:{site.port}"
    options = {"allowed_media_domains": domains, "allowed_media_private_networks": "127.0.0.0/8"} | options
    return Fetcher(GatewayConfig(llm="h:1", **options), resolve, context)


async def get(fetching: Fetcher, *urls: str) -> list[bytes]:
    parts = tuple(MediaPart(f"messages[0].parts[{i}].image", Modality.IMAGE, url) for i, url in enumerate(urls))
    sampling = read_sampling(sampling_pb2.SamplingParams(), {}, 1000)
    found, seconds = await fetching.fetched(Conversation((Message("user", parts),), sampling))
    assert seconds > 0
    return [part.source for part in found.messages[0].parts]  # type: ignore[union-attr,misc]


POLICY = UrlPolicy.of("a.org,*.b.org,c.net:8443,93.184.216.34,[2606:2800::1]", "")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("http://a.org", ("http", "a.org", 80, "/")),
        ("HTTPS://A.ORG./x.png?q=1#top", ("https", "a.org", 443, "/x.png?q=1")),
        ("https://a.org:80/", ("https", "a.org", 80, "/")),
        ("http://x.y.b.org/?#", ("http", "x.y.b.org", 80, "/?")),
        ("http://a.org?q=/", ("http", "a.org", 80, "/?q=/")),
        ("https://c.net:8443/a", ("https", "c.net", 8443, "/a")),
        ("http://93.184.216.34/a", ("http", "93.184.216.34", 80, "/a")),
        ("http://[2606:2800:0:0::1]/a", ("http", "2606:2800::1", 80, "/a")),
    ],
)
def test_allowed_urls(url: str, parts: tuple[str, str, int, str]) -> None:
    target = POLICY.target(url)
    assert (target.scheme, target.host, target.port, target.path) == parts
    assert POLICY.target(target.url) == target


BAD_URLS = [
    *("http://b.org/", "http://xb.org/", "http://evil.org/", "http://a.org.evil.org/", "http://evil.org/a.org"),
    *("http://a.org:8080/", "http://a.org:22/", "https://c.net/", "http://a.org:0/", "http://a.org:99999/", "http://a.org:/"),
    *("http://user@a.org/", "http://user:pass@a.org/", "http://a.org@127.0.0.1/", "http://127.0.0.1#@a.org/"),
    *("http://a.org\\@127.0.0.1/", "http://a.org/\\..", "http://a.org /", "http://a.org/\r\nHost: x", "http://a.org/\x00"),
    *(
        "http:///a.org",
        "http:a.org",
        "//a.org/",
        "http://",
        "http://.a.org/",
        "http://a..org/",
        "http://-a.org/",
        "http://ä.org/",
    ),
    *("http://[::1]/", "http://[::1%25eth0]/", "http://[a.org]/", "http://[1:2]/", "ftp://a.org/", "gopher://a.org/", ""),
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_refused_urls(url: str) -> None:
    with pytest.raises(UrlRefused):
        POLICY.target(url)


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f000001", "127.1", "0177.0.0.1", "0x7f.0.0.1", "1.2.3.4.5", "0", "127.0.0.0x1"]
)
def test_addresses_in_disguise(host: str) -> None:
    """Resolvers read these as addresses: they are none here, even where every host is allowed."""
    with pytest.raises(UrlRefused, match="malformed address"):
        UrlPolicy.of("*", "0.0.0.0/0").target(f"http://{host}/")


PRIVATE = [
    *("127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "0.1.2.3"),
    *("224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "192.0.0.170", "192.88.99.1"),
    *("::1", "::", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "fe80::1", "fe80::1%1", "fc00::1", "fd12::1", "fec0::1"),
    *("ff02::1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2001::1", "2001:db8::1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_never_dialled(address: str) -> None:
    """Alone, and among public ones."""
    for found in ([address], ["93.184.216.34", address]):
        with pytest.raises(UrlRefused, match="not public"):
            UrlPolicy.of("*", "").check(found)


def test_public_addresses_and_those_that_the_operator_trusts() -> None:
    for address in ("93.184.216.34", "1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1"):
        UrlPolicy.of("*", "").check([address])
    trusting = UrlPolicy.of("*", "10.1.0.0/16,fd12::/32")
    trusting.check(["10.1.2.3", "fd12::1", "::ffff:10.1.2.3"])
    for address in ("10.2.0.1", "fd13::1", "::ffff:10.2.0.1"):
        with pytest.raises(UrlRefused):
            trusting.check([address])
    with pytest.raises(UrlRefused, match="no address"):
        trusting.check([])
    assert is_public(ipaddress.ip_address("8.8.8.8"))


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"allowed_media_domains": entry}
            for entry in ("a b", "http://a.org", "*.*.org", "a.org:0", "a.org:70000", "127.1", "*a.org")
        ),
        {"allowed_media_private_networks": "10.0.0.1/8"},
        {"allowed_media_private_networks": "home"},
        {"allowed_local_media_path": "/no/such/folder"},
        {"media_fetch_seconds": 0},
        {"media_redirects": -1},
        {"max_video_seconds": 0},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        GatewayConfig(llm="h:1", **options)


@pytest.mark.asyncio
async def test_a_file_is_fetched_with_the_name_in_its_request() -> None:
    async with site(a_png=page(PNG), moved=page(b"", "302 Found", Location="/a.png")) as web:
        assert await get(fetcher(web), web.url("/a.png"), web.url("/moved")) == [PNG, PNG]
        assert web.connects == 3 and set(web.hosts) == {f"pictures.test:{web.port}"}


@pytest.mark.asyncio
async def test_redirects_are_checked_hop_by_hop() -> None:
    async with site() as inner, site() as web:
        hops = {
            "to_address": f"http://127.0.0.1:{inner.port}/",
            "to_metadata": "http://169.254.169.254/latest/",
            "to_mapped": f"http://[::ffff:127.0.0.1]:{inner.port}/",
            "to_other_name": f"http://evil.test:{inner.port}/",
            "to_port": f"http://pictures.test:{inner.port}/",
            "to_file": "file:///etc/hostname",
            "to_data": "data:image/png;base64,AAAA",
            "to_user": f"http://a@pictures.test:{web.port}/",
            "to_backslash": f"http://pictures.test:{web.port}\\@127.0.0.1/",
        }
        web.pages |= {f"/{name}": page(b"", "302 Found", Location=url) for name, url in hops.items()}
        for name in hops:
            with refused(INVALID, GENERIC) as errors:
                await get(fetcher(web), web.url(f"/{name}"))
            assert (errors[0].field, errors[0].reason) == (FIELD, "URL_NOT_ALLOWED")
        assert web.connects == len(hops) and inner.connects == 0


@pytest.mark.asyncio
async def test_so_many_redirects_and_no_more() -> None:
    async with site(a3=page(PNG)) as web:
        web.pages |= {f"/a{i}": page(b"", "307 Temporary Redirect", Location=f"/a{i + 1}") for i in range(3)}
        web.pages |= {"/loop": page(b"", "301 Moved Permanently", Location="/loop")}
        assert await get(fetcher(web), web.url("/a0")) == [PNG]
        with refused(INVALID, "more than 2 redirects"):
            await get(fetcher(web, media_redirects=2), web.url("/a0"))
        before = web.connects
        with refused(INVALID, "more than 3 redirects"):
            await get(fetcher(web), web.url("/loop"))
        assert web.connects == before + 4


@pytest.mark.asyncio
async def test_a_name_that_turns_private_is_not_dialled() -> None:
    """Rebinding: public where it is looked up first, private the next time."""
    async with site(a_png=page(PNG)) as web:
        for answers in ([["10.9.9.9"]], [["93.184.216.34", "127.0.0.1"]], [["169.254.169.254"], ["127.0.0.1"]], [["::1"]]):
            with refused(INVALID, GENERIC):
                await get(fetcher(web, resolver(pictures_test=answers), allowed_media_private_networks=""), web.url("/a.png"))
        assert web.connects == 0
        # what was checked is dialled: a second look would find nobody there
        rebinding = resolver(pictures_test=[["127.0.0.1"], ["10.9.9.9"]])
        assert await get(fetcher(web, rebinding), web.url("/a.png")) == [PNG]
        web.pages["/moved"] = page(b"", "302 Found", Location="/a.png")
        with refused(INVALID, GENERIC):  # each hop is looked up and checked anew
            await get(fetcher(web, resolver(pictures_test=[["127.0.0.1"], ["10.9.9.9"]])), web.url("/moved"))
        assert web.connects == 2


@pytest.mark.asyncio
async def test_the_next_address_where_one_does_not_answer() -> None:
    async with site(a_png=page(PNG)) as web:
        assert await get(fetcher(web, resolver(pictures_test=["127.9.9.9", "127.0.0.1"])), web.url("/a.png")) == [PNG]
        with refused(INVALID, "cannot be reached") as errors:
            await get(fetcher(web, resolver(pictures_test=["127.9.9.9", "127.9.9.8"])), web.url("/a.png"))
        assert errors[0].reason == "URL_FAILED"


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not writer.is_closing():
        writer.write(bytes(65536))
        await writer.drain()


@pytest.mark.asyncio
async def test_bodies_that_are_too_long() -> None:
    sent = 0

    async def counted(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000001\r\n\r\n")
        await writer.drain()
        sent = 1

    async with site(endless=endless, counted=counted, exact=page(bytes(1_000_000))) as web:
        fetching = fetcher(web, max_item_bytes=1_000_000)
        for name in ("endless", "counted"):
            with refused(INVALID, "1000000 bytes, which is the limit") as errors:
                await get(fetching, web.url(f"/{name}"))
            assert (errors[0].field, errors[0].reason) == (FIELD, "MEDIA_TOO_LARGE")
        assert sent and await get(fetching, web.url("/exact")) == [bytes(1_000_000)]


@pytest.mark.asyncio
async def test_a_server_that_drips_is_given_up_and_holds_up_nobody() -> None:
    gone = asyncio.Event()

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        try:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        finally:
            gone.set()

    async def silent(writer: asyncio.StreamWriter) -> None:
        await gone.wait()

    async with site(drip=drip, silent=silent, a_png=page(PNG)) as web:
        fetching = fetcher(web, media_fetch_seconds=0.3)
        slow = asyncio.create_task(get(fetching, web.url("/drip")))
        assert await get(fetching, web.url("/a.png")) == [PNG]
        assert not slow.done()
        started = time.monotonic()
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED, "too slow") as errors:
            await slow
        assert (errors[0].reason, errors[0].field) == ("URL_TIMEOUT", FIELD) and time.monotonic() - started < 2
        await asyncio.wait_for(gone.wait(), 5)
        gone.clear()
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED, "too slow"):
            await get(fetching, web.url("/silent"))
        gone.set()


ODD_ANSWERS = {
    "missing": (page(b"no", "404 Not Found"), "status 404"),
    "broken": (page(b"no", "500 Internal Server Error"), "status 500"),
    "nowhere": (page(b"", "302 Found"), "status 302"),
    "part": (page(PNG, "206 Partial Content"), "status 206"),
    "packed": (page(PNG, Content_Encoding="gzip"), "compressed"),
    "short": (page(PNG, Content_Length="100000"), "cannot be reached, or does not speak HTTP"),
    "negative": (page(PNG, Content_Length="-1"), "does not speak HTTP"),
    "no_http": (b"SSH-2.0-OpenSSH\r\n\r\n", "does not speak HTTP"),
    "long_head": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000, "does not speak HTTP"),
    "empty": (b"", "does not speak HTTP"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ODD_ANSWERS)
async def test_odd_answers(name: str) -> None:
    answer, text = ODD_ANSWERS[name]
    async with site() as web:
        web.pages["/odd"] = answer
        with refused(INVALID, text) as errors:
            await get(fetcher(web), web.url("/odd"))
        assert (errors[0].reason, errors[0].field) == ("URL_FAILED", FIELD)


@pytest.mark.asyncio
async def test_the_certificate_is_that_of_the_name(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=pictures.test -addext subjectAltName=DNS:pictures.test"
    subprocess.run([*make.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=tmp_path, check=True, capture_output=True)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    names: list[str | None] = []
    server.sni_callback = lambda _socket, name, _context: names.append(name)
    client = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    down = page(b"", "302 Found", Location="http://pictures.test/")
    async with site(server, a_png=page(PNG), down=down) as web:
        url = f"https://pictures.test:{web.port}"
        assert await get(fetcher(web, context=client), f"{url}/a.png") == [PNG]
        assert names == ["pictures.test"]
        with refused(INVALID, "cannot be reached"):  # another name's certificate
            await get(fetcher(web, context=client), f"https://other.test:{web.port}/a.png")
        with refused(INVALID, "cannot be reached"):  # a certificate that the system does not trust
            await get(fetcher(web), f"{url}/a.png")
        with refused(INVALID, GENERIC):
            allowed = f"pictures.test:{web.port},pictures.test"
            await get(fetcher(web, context=client, allowed_media_domains=allowed), f"{url}/down")


@pytest.mark.asyncio
async def test_proxies_of_the_environment_play_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(a_png=page(PNG)) as web, site() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert await get(fetcher(web), web.url("/a.png")) == [PNG]
        assert proxy.connects == 0


@pytest.mark.asyncio
async def test_files_below_the_folder_and_nowhere_else(tmp_path: Path) -> None:
    folder, outside = tmp_path / "media", tmp_path / "secret.png"
    (folder / "sub dir").mkdir(parents=True)
    for file in (folder / "a.png", folder / "sub dir" / "ü.png", outside):
        file.write_bytes(PNG)
    (folder / "large.png").write_bytes(bytes(1001))
    (folder / "link.png").symlink_to(outside)
    (folder / "up").symlink_to(tmp_path)
    fetching = Fetcher(GatewayConfig(llm="h:1", allowed_local_media_path=str(folder), max_item_bytes=1000))
    good = [f"file://{folder}/a.png", f"FILE://localhost{folder}/sub%20dir/%C3%BC.png", f"file:{folder}/a.png"]
    assert await get(fetching, *good) == [PNG] * 3
    bad = [
        f"file://{outside}",
        f"file://{folder}/../secret.png",
        f"file://{folder}/%2e%2e/secret.png",
        f"file://{folder}/link.png",
    ]
    bad += [
        f"file://{folder}/up/secret.png",
        f"file://host{folder}/a.png",
        "file:a.png",
        f"file://{folder}",
        f"file://{folder}/none",
    ]
    bad += [
        f"file://{folder}/a.png%00",
        "file:///proc/self/environ",
        f"file:///{folder}/a.png",
        f"file://{folder}x/a.png",
        "file:",
    ]
    for url in bad:
        with refused(INVALID, GENERIC) as errors:
            await get(fetching, url)
        assert errors[0].reason == "URL_NOT_ALLOWED" and str(folder) not in errors[0].message
    with refused(INVALID, "1000 bytes, which is the limit"):
        await get(fetching, f"file://{folder}/large.png")


def asked(*urls: str) -> gateway_pb2.ChatRequest:
    parts = [gateway_pb2.Part(image=gateway_pb2.Media(url=url)) for url in urls]
    return gateway_pb2.ChatRequest(messages=[gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=parts)])


async def both_ways(s: Stack, request: gateway_pb2.ChatRequest) -> tuple[Any, Any]:
    estimate = await s.stub.EstimateTokens(gateway_pb2.EstimateTokensRequest(messages=request.messages))
    request.sampling.max_tokens = 3
    return estimate, [event async for event in s.stub.Chat(request)][-1].done


OFF = [
    *(
        "http://{}/x",
        "http://127.0.0.1:{port}/x",
        "http://2130706433:{port}/",
        "http://[::1]:{port}/",
        "http://[::ffff:7f00:1]:{port}/",
    ),
    *("http://allowed.example\\@127.0.0.1:{port}/x.png", "HTTP://localhost:{port}/", "file:///etc/hostname", "/etc/hostname"),
    "gopher://127.0.0.1:{port}/_INFO",
]


@pytest.mark.asyncio
async def test_nothing_is_fetched_unless_allowed(checkpoint_dir: Directory) -> None:
    """By neither way, and never what text or an SVG names; the listener sees no connection."""
    async with site() as web, stack(checkpoint_dir("qwen2_vl")) as s:
        for url in OFF:
            with refused(INVALID) as errors:
                await both_ways(s, asked(url.format("x", port=web.port)))
            assert errors[0].field == FIELD
        link = web.url("/a.png", "127.0.0.1")
        await both_ways(s, ask(f"what is at {link}? ![picture]({link}) <img src='{link}'>"))
        svg = f"<svg xmlns='http://www.w3.org/2000/svg'><image href='{link}'/></svg>".encode()
        with refused(INVALID, "not a picture"):
            await both_ways(s, ask(svg))
        assert web.connects == 0 and not s.encoder.items


@pytest.mark.asyncio
async def test_an_allowed_url_costs_what_its_bytes_cost(checkpoint_dir: Directory) -> None:
    async with site(a_png=page(PNG)) as web:
        options = {"allowed_media_domains": f"127.0.0.1:{web.port}", "allowed_media_private_networks": "127.0.0.1/32"}
        async with stack(checkpoint_dir("qwen2_vl"), **options) as s:
            estimate, done = await both_ways(s, asked(web.url("/a.png", "127.0.0.1")))
            same, plain = await both_ways(s, ask(PNG))
            assert estimate.cost.encoder_patches > same.cost.encoder_patches == 0  # the encoder has it by now
            estimate.cost.ClearField("encoder_patches")
            assert estimate == same and done.usage.prompt_tokens == plain.usage.prompt_tokens
            assert done.stage_times.fetch > 0 and done.stage_times.probe >= 0 and not plain.stage_times.HasField("fetch")
            assert s.encoder.items[0].data == PNG
            before = web.connects
            with refused(INVALID, GENERIC) as errors:  # one bad URL among good ones ends the request
                await both_ways(s, asked(web.url("/a.png", "127.0.0.1"), web.url("/a.png", "localhost")))
            assert errors[0].field == "messages[0].parts[1].image" and web.connects <= before + 1
            with refused(INVALID, "the limit is 16"):  # counted before any is fetched
                await both_ways(s, asked(*[web.url("/a.png", "127.0.0.1")] * 17))
            await s.idle()


@pytest.mark.asyncio
async def test_a_caller_who_leaves_ends_the_fetch(checkpoint_dir: Directory) -> None:
    came, left = asyncio.Event(), asyncio.Event()

    async def wait(writer: asyncio.StreamWriter) -> None:
        came.set()
        await writer.wait_closed() if writer.is_closing() else None
        while not writer.is_closing():
            writer.write(b"HTTP/1.1 200 OK\r\nX: y\r\n" if not left.is_set() else b"")
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0.01)
        left.set()

    async with site(wait=wait) as web:
        options = {"allowed_media_domains": f"127.0.0.1:{web.port}", "allowed_media_private_networks": "127.0.0.1/32"}
        async with stack(checkpoint_dir("qwen2_vl"), **options) as s:
            call = s.stub.Chat(asked(web.url("/wait", "127.0.0.1")))
            await asyncio.wait_for(came.wait(), 5)
            call.cancel()
            await asyncio.wait_for(left.wait(), 5)
            await s.idle()


def test_nobody_else_in_the_gateway_opens_connections() -> None:
    """But for gRPC channels."""
    clients = {"httpcore2", "httpx2", "httpx", "requests", "aiohttp", "urllib3", "urllib.request", "http.client"}
    folder = Path(__file__).resolve().parents[2] / "services"
    users = set()
    for file in [*(folder / "gateway").rglob("*.py"), *(folder / "models").rglob("*.py"), *(folder / "decoding").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            users |= {file.name for name in names if name in clients}
    assert users == {"url_fetch.py"}
