"""Fetching media: what is followed, dialled and given up, against a server that counts connections."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import grpc
import pytest
from gateway_fakes import refused
from web_fakes import FIELD, GENERIC, INVALID, PNG, fetcher, get, page, resolver, site

from services.gateway.config import GatewayConfig
from services.gateway.url_fetch import Fetcher
from tests.patience import PATIENCE


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
            "to_nothing": "http://[::1",
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


async def endless(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not writer.is_closing():
        writer.write(bytes(65536))
        await writer.drain()


@pytest.mark.asyncio
async def test_bodies_that_are_too_long() -> None:
    sent = 0

    async def counted(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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

    async def drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        try:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        finally:
            gone.set()

    async def silent(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await gone.wait()

    async with site(drip=drip, silent=silent, a_png=page(PNG)) as web:
        fetching = fetcher(web, media_fetch_seconds=2)
        slow = asyncio.create_task(get(fetching, web.url("/drip")))
        assert await get(fetching, web.url("/a.png")) == [PNG]
        assert not slow.done()
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED, "too slow") as errors:
            await slow
        assert (errors[0].reason, errors[0].field) == ("URL_TIMEOUT", FIELD)
        await asyncio.wait_for(gone.wait(), PATIENCE)
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
