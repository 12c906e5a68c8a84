"""Both clients' answers about pages, against a real server; PDFs; `triptych ask --pages`."""

import asyncio
import io
import pathlib
import re
import sys
import threading

import pytest
from pdf_files import pdf_file
from PIL import Image

import triptych
from tests.patience import PATIENCE
from triptych import errors
from triptych.cli import main
from triptych.pages_base import AHEAD

RED, GREEN, BLUE = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)


def test_answers_come_page_after_page(gateway):
    pages = [triptych.image(b"one"), ["text", triptych.image(b"two")], triptych.page("three", question="Who?"), "four"]
    instructions = [triptych.system("Be brief.")]
    options = {"messages": instructions, "remember": 2, "max_tokens": 9, "request_id": "doc"}
    with triptych.Client(gateway.address) as client, client.pages("What?", pages, **options) as answers:
        seen = [(answer.index, list(answer), answer.result) for answer in answers]
    assert [index for index, _, _ in seen] == [0, 1, 2, 3] and gateway.request_ids == ["doc"]
    assert all("".join(deltas) == result.text == "It is ein Kätzchen." for _, deltas, result in seen)
    assert seen[0][2].usage.prompt_tokens == 57 and len(seen[0][1]) == 3
    start, *sent = gateway.requests
    assert (start.start.question, start.start.remember, start.start.sampling.max_tokens) == ("What?", 2, 9)
    assert start.start.messages[0].parts[0].text == "Be brief." and start.start.model == "default"
    assert [[p.WhichOneof("content") for p in r.page.parts] for r in sent] == [["image"], ["text", "image"], ["text"], ["text"]]
    assert [r.page.question for r in sent] == ["", "", "Who?", ""]
    assert 3500 < gateway.remaining[0] < 3601


def test_a_page_s_error_is_its_own(gateway):
    with triptych.Client(gateway.address) as client, client.pages("What?", ["fine", "bad", "fine"]) as answers:
        results = []
        for answer in answers:
            try:
                results.append(answer.read().text)
            except errors.InvalidArgument as error:
                assert error is answer.error and "page.parts[0]: bad" in str(error)
                with pytest.raises(errors.InvalidArgument):
                    _ = answer.result
                results.append(None)
    assert results == ["It is ein Kätzchen.", None, "It is ein Kätzchen."]


def test_what_is_not_read_is_skipped(gateway):
    with triptych.Client(gateway.address) as client, client.pages("What?", ["a", "bad", "b"]) as answers:
        firsts = [next(answer) if answer.index != 1 else None for answer in answers]
    assert firsts == ["It is ", None, "It is "]


@pytest.mark.parametrize("lazy", [True, False])
def test_pages_are_taken_when_it_is_their_turn(gateway, lazy):
    """At most AHEAD pages are taken whose answers are not complete, however many there are."""
    taken = 0
    most = threading.Semaphore(0)

    def pages():
        nonlocal taken
        for number in range(300):
            taken += 1
            most.release()
            yield f"page {number}"

    with triptych.Client(gateway.address) as client, client.pages("What?", pages()) as answers:
        for _ in range(AHEAD):
            assert most.acquire(timeout=PATIENCE)
        for done, answer in enumerate(answers):
            assert taken <= done + AHEAD
            if lazy:
                answer.read()
                assert taken <= done + 1 + AHEAD
    assert taken == 300 == len(gateway.requests) - 1


def test_a_wrong_question_is_told_before_any_page_is_taken(gateway):
    def pages():
        raise AssertionError("taken")
        yield

    with triptych.Client(gateway.address) as client:
        with pytest.raises(errors.InvalidArgument, match="question: bad"), client.pages("bad", pages()):
            pass
        with pytest.raises(TypeError, match="unknown option 'media'"):
            client.pages("x", [], media=triptych.image(b"x"))
        with pytest.raises(errors.InvalidArgument, match="remember"):
            client.pages("x", [], remember=-1)
        with pytest.raises(errors.InvalidArgument, match="temperature"):
            client.pages("x", [], temperature="hot")
        with pytest.raises(RuntimeError, match="open the pages first"):
            next(client.pages("x", []))
    assert len(gateway.requests) == 1


def test_only_the_start_is_tried_again(gateway, monkeypatch):
    monkeypatch.setattr("triptych.attempts.FIRST_BACKOFF", 0.01)
    gateway.refusals = 2
    with triptych.Client(gateway.address) as client, client.pages("What?", iter(["a", "b"])) as answers:
        assert [answer.read().text for answer in answers] == ["It is ein Kätzchen."] * 2
    assert [r.WhichOneof("event") for r in gateway.requests] == ["start", "start", "start", "page", "page"]
    assert len(set(gateway.request_ids)) == 1
    gateway.refusals = 3
    with triptych.Client(gateway.address) as client, pytest.raises(errors.Unavailable), client.pages("What?", ["a"]):
        pass


def test_what_the_iterator_raises_comes_after_the_answers(gateway):
    def pages():
        yield "fine"
        raise OSError("the scanner is on fire")

    with triptych.Client(gateway.address) as client, client.pages("What?", pages()) as answers:
        assert next(answers).read().text == "It is ein Kätzchen."
        with pytest.raises(OSError, match="on fire"):
            next(answers)
    with triptych.Client(gateway.address) as client, client.pages("What?", ["fine", 7]) as answers:
        next(answers)
        with pytest.raises(errors.InvalidArgument, match=r"pages\[1\]"):
            next(answers)


def test_an_answer_that_breaks_off_is_an_error(gateway, events):
    gateway.script = lambda context: iter(events[:2])
    with triptych.Client(gateway.address) as client, client.pages("What?", ["a", "b"]) as answers:
        answer = next(answers)
        with pytest.raises(errors.StreamTruncated):
            answer.read()


def test_leaving_pages_cancels_them(gateway):
    gateway.script = gateway.wait_for_cancel
    with triptych.Client(gateway.address) as client:
        with client.pages("What?", (f"{n}" for n in range(9))) as answers:
            assert next(next(answers)) == "It is "
        assert gateway.cancelled.wait(PATIENCE)
    assert len(gateway.requests) == 2  # the start and the page that was being answered


@pytest.mark.asyncio
@pytest.mark.parametrize("asynchronous", [True, False])
async def test_the_async_client_does_the_same_with_pages(gateway, asynchronous):
    taken = 0

    def pages():
        nonlocal taken
        for number in range(50):
            taken += 1
            yield "bad" if number == 1 else f"page {number}"

    async def slowly():
        for item in pages():
            await asyncio.sleep(0)
            yield item

    async with triptych.AsyncClient(gateway.address) as client:
        async with client.pages("What?", slowly() if asynchronous else pages()) as answers:
            async for answer in answers:
                assert taken <= answer.index + AHEAD
                match answer.index:
                    case 0:
                        assert [delta async for delta in answer] == ["It is ", "", "ein Kätzchen."]
                    case 1:
                        with pytest.raises(errors.InvalidArgument):
                            await answer.read()
                    case 2:
                        continue
                    case _:
                        assert (await answer.read()).text == "It is ein Kätzchen."
        assert answer.index == 49 and taken == 50
        with pytest.raises(errors.InvalidArgument, match="question: bad"):
            async with client.pages("bad", []):
                pass
        async with client.pages("What?", ["a", 7]) as answers:
            assert (await (await anext(answers)).read()).text
            with pytest.raises(errors.InvalidArgument, match=r"pages\[1\]"):
                await anext(answers)


@pytest.mark.asyncio
async def test_leaving_async_pages_cancels_them(gateway):
    gateway.script = gateway.wait_for_cancel
    async with triptych.AsyncClient(gateway.address) as client:
        async with client.pages("What?", ["a", "b"]) as answers:
            assert await anext(await anext(answers)) == "It is "
        assert await asyncio.to_thread(gateway.cancelled.wait, 5)


def drawn(page):
    return Image.open(io.BytesIO(page.data))


def test_a_pdf_s_pages_are_pictures(tmp_path):
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf_file([RED, GREEN, BLUE]))
    document = triptych.pdf(path)
    assert len(document) == 3
    pictures = [drawn(page) for page in document]
    assert [p.size for p in pictures] == [(150, 75)] * 3  # an inch by half an inch
    assert [p.getpixel((70, 30)) for p in pictures] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    assert document[1] == document[1] != document[2]  # the same bytes every time, so that caches find them
    assert drawn(triptych.pdf(path, dpi=72)[0]).size == (72, 36)
    width, height = drawn(triptych.pdf(pdf_file([RED], size=(7200, 3600)), max_pixels=20_000)[0]).size
    assert width == 2 * height == 200
    odd = drawn(triptych.pdf(pdf_file([RED], size=(73, 36)))[0])  # rows are padded in memory
    assert odd.getpixel((0, odd.height - 1)) == odd.getpixel((odd.width - 2, 1)) == (255, 0, 0)
    with pytest.raises(IndexError):
        document[3]
    with pytest.raises(errors.InvalidArgument, match="dpi"):
        triptych.pdf(path, dpi=0)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b"no PDF", "no PDF, damaged"),
        (pdf_file([RED])[:150], "no PDF, damaged"),
        (pdf_file([]), "without pages"),
        (pdf_file([RED], password="secret"), "is encrypted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_why_a_pdf_cannot_be_used(tmp_path, data, why):
    path = tmp_path / "a.pdf"
    path.write_bytes(data)
    for source in (path, data):
        with pytest.raises(errors.MediaFileError, match=why):
            triptych.pdf(source)
    with pytest.raises(errors.MediaFileError, match=r"gone\.pdf.*No such file"):
        triptych.pdf(tmp_path / "gone.pdf")


def test_an_encrypted_pdf_opens_with_its_password():
    locked = pdf_file([RED], password="secret")
    assert len(triptych.pdf(locked, password="secret")[0].data) > 100
    with pytest.raises(errors.MediaFileError, match="password is wrong"):
        triptych.pdf(locked, password="guess")


def test_a_damaged_page_is_named():
    damaged = pdf_file([RED, GREEN]).replace(b"5 0 R]", b"9 0 R]")
    document = triptych.pdf(damaged)
    assert document[0].data
    with pytest.raises(errors.MediaFileError, match="page 2 of 'the PDF'"):
        document[1]


def test_without_pdfium_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    with pytest.raises(errors.MediaFileError, match=re.escape("pip install 'triptych[pdf]'")):
        triptych.pdf(pdf_file([RED]))


@pytest.fixture
def scans(tmp_path):
    """A folder with pictures and a PDF of two pages, the second damaged."""
    folder = tmp_path / "scans"
    folder.mkdir()
    for name in ("p10.png", "p2.png", "notes.txt"):
        (folder / name).write_text(name)
    (folder / "z.pdf").write_bytes(pdf_file([RED, GREEN, BLUE]).replace(b"5 0 R ", b"9 0 R "))
    return folder


def test_ask_prints_every_page_under_its_title(gateway, tmp_path, capsys):
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf_file([RED, GREEN]))
    command = ["ask", "what?", "--pages", str(path), "--system", "Be brief.", "--max-tokens", "9", "--remember", "1"]
    assert main([*command, "--address", gateway.address]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"== {path}, page 1 (1 of 2)", "It is ein Kätzchen.", f"== {path}, page 2 (2 of 2)", "It is ein Kätzchen."
    ]  # fmt: skip
    assert len(re.findall(r"^prompt 57 tokens .*, \d+\.\d\d s$", err, re.MULTILINE)) == 2
    start = gateway.requests[0].start
    assert (start.question, start.remember, start.sampling.max_tokens) == ("what?", 1, 9)
    assert start.messages[0].parts[0].text == "Be brief." and 230 < gateway.remaining[0] < 241
    assert main([*command, "--quiet", "--address", gateway.address]) == 0
    assert capsys.readouterr().err == ""


def test_ask_goes_on_behind_what_it_cannot_read(gateway, scans, picture, capsys):
    assert main(["ask", "what?", "--quiet", "--pages", str(scans), str(picture), "--address", gateway.address]) == 1
    out, err = capsys.readouterr()
    titles = [line for line in out.splitlines() if line.startswith("==")]
    z = scans / "z.pdf"
    assert titles == [
        f"== {scans / 'p2.png'} (1 of 6)", f"== {scans / 'p10.png'} (2 of 6)", f"== {z}, page 1 (3 of 6)",
        f"== {z}, page 3 (5 of 6)", f"== {picture} (6 of 6)",
    ]  # fmt: skip
    assert err.splitlines() == [
        f"triptych: error: cannot draw page 2 of {str(z)!r}: it is damaged", "5 of 6 pages were answered"
    ]  # fmt: skip


def test_ask_tells_what_was_wrong_with_a_page(gateway, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("triptych.cli.document._READERS", {".txt": lambda file: pathlib.Path(file).read_text()})
    (tmp_path / "a.txt").write_text("bad")
    (tmp_path / "b.txt").write_text("fine")
    assert main(["ask", "what?", "--quiet", "--pages", str(tmp_path), "--address", gateway.address]) == 1
    out, err = capsys.readouterr()
    assert out.count("==") == 2 and out.endswith("It is ein Kätzchen.\n")
    assert err.splitlines() == [f"triptych: error: {tmp_path / 'a.txt'}: page.parts[0]: bad", "1 of 2 pages were answered"]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["gone.pdf"], "no such file"),
        (["empty"], "the folder has no PDF"),
        (["a.txt"], "cannot tell what"),
        (["a.pdf"], "no PDF, damaged"),
    ],
)
def test_ask_refuses_files_that_cannot_be_pages(gateway, tmp_path, capsys, names, why):
    (tmp_path / "empty").mkdir()
    for name in ("a.txt", "a.pdf"):
        (tmp_path / name).write_text("text")
    assert main(["ask", "what?", "--pages", *(str(tmp_path / n) for n in names), "--address", gateway.address]) == 2
    assert why in capsys.readouterr().err and gateway.requests == []


def test_pages_cannot_go_with_other_media(gateway, picture, capsys):
    assert main(["ask", "what?", "--image", str(picture), "--pages", str(picture), "--address", gateway.address]) == 2
    assert "cannot go with --image" in capsys.readouterr().err


@pytest.mark.parametrize("pages", ["report.pdf", b"%PDF-", triptych.image(b"x")])
def test_what_is_not_several_pages_is_not_taken_for_its_letters(gateway, pages):
    with triptych.Client(gateway.address) as client, pytest.raises(errors.InvalidArgument, match=r"^pages: must be several"):
        client.pages("what?", pages)

    async def other():
        async with triptych.AsyncClient(gateway.address) as client:
            client.pages("what?", pages)

    with pytest.raises(errors.InvalidArgument, match=r"triptych\.pdf"):
        asyncio.run(other())
    assert not gateway.requests
