"""The demo without a browser: limits, sessions, uploads, and what is said where its extra is missing."""

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import checkpoints
import pytest
from PIL import Image

from mmprefill import demo_resume
from mmprefill.cli import main
from mmprefill.demo_chat import Chat, friendly
from mmprefill.demo_limits import Limits, Refused, Settings, Upload
from mmprefill.demo_sessions import Chats
from mmprefill.errors import MediaError, MediaLimitError
from mmprefill.trace import Trace


def test_the_missing_extra_is_named(monkeypatch, capsys):
    """Before any model is loaded."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gradio" else real(name, *a))
    assert main(["demo"]) == 2
    assert "pip install 'mmprefill[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("question", "message"),
    [(("", 0, 0), "pick an example"), ((" \n", 1, 0), "about the picture"), (("x" * 9000, 0, 0), "9000 characters"),
     (("x", 7, 0), "7 pictures"), (("x", 2, 11), "begin a new one")],
)  # fmt: skip
def test_too_little_and_too_much(question, message):
    with pytest.raises(Refused, match=message):
        Limits().check(*question)
    Limits().check("x", 6, 6)


@pytest.fixture
def chats(tmp_path):
    def make(**limits):
        return Chats(None, Trace(), tmp_path, Limits(**limits))

    return make


def test_each_session_has_its_own_chat(chats, tmp_path):
    """The same page gets the same chat; folders are apart and private; names that salt the caches differ."""
    sessions = chats()
    one, two = sessions.of("one"), sessions.of("two")
    assert sessions.of("one") is one
    assert one._name != two._name
    assert one.folder != two.folder
    assert one.folder.stat().st_mode & 0o777 == 0o700


def test_old_chats_are_forgotten(chats):
    """Beyond their number the one that was idle longest goes, with its files; so does one that is idle too long."""
    sessions = chats(chats=2)
    first = sessions.of("first")
    (first.folder / "kept.png").touch()
    sessions.of("second"), sessions.of("third")
    assert not first.folder.exists()
    assert sessions.of("first") is not first
    brief = chats(idle=0.0)
    old = brief.of("old")
    brief.of("new")
    assert brief.of("old") is not old


def test_a_closed_page_lets_go_of_its_kv(chats):
    sessions = chats()
    chat = sessions.of("one")
    chat.result = object()
    sessions.release("one")
    sessions.release("nobody")
    assert chat.result is None


def test_uploads_are_decoded_once_and_shown_without_metadata(tmp_path):
    """Turned as the camera says, small, without EXIF; what cannot be used is named."""
    picture, exif = checkpoints.picture(1).resize((1600, 900)), Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    picture.save(tmp_path / "a.jpg", exif=exif)
    upload = Upload.read(tmp_path / "a.jpg", "Picture 1, a.jpg", Limits().media, tmp_path)
    with Image.open(upload.shown) as shown:
        assert shown.size == (432, 768)
        assert not shown.getexif()
    assert upload.data == (tmp_path / "a.jpg").read_bytes()
    with pytest.raises(MediaLimitError, match=r"Picture 1, a\.jpg"):
        Upload.read(tmp_path / "a.jpg", "Picture 1, a.jpg", Limits(pixels=1000).media, tmp_path)


def test_messages_for_people():
    """Without the request's made-up name, and beginning as sentences do."""
    assert friendly(MediaError("request 'chat-1': picture 2 is broken")) == "Picture 2 is broken"
    assert friendly(ValueError("too long")) == "Too long"


def test_a_download_is_not_named_by_an_upload(chats, tmp_path):
    """The id of a resumed result was written by whoever made the file; it is no part of a path."""
    chat = chats().of("one")
    for id in ("../../victim", str(tmp_path / "victim"), "a" * 300, "a\0b"):
        chat.result = SimpleNamespace(id=id, save=lambda path: Path(path))
        assert asyncio.run(chat.saved()).resolve().parent == chat.folder.resolve()
        assert asyncio.run(chat.saved()).name.startswith("chat-")


@pytest.fixture
def continued(chats, monkeypatch):
    """A chat that goes on from a KV file, stopped before its answer began; also what was appended to."""
    result, to = SimpleNamespace(id="theirs"), []

    async def resumed(engine, file):
        return result

    async def appended(engine, before, *rest):
        to.append(before)
        return before

    async def stopped(self, *rest):
        raise asyncio.CancelledError

    monkeypatch.setattr(demo_resume, "resumed", resumed)
    monkeypatch.setattr(demo_resume, "appended", appended)
    monkeypatch.setattr(demo_resume, "described", lambda result: "what it holds")
    monkeypatch.setattr(Chat, "_answer", stopped)

    async def begun():
        chat = chats().of("one")
        await drained(chat.go_on_from(Path("a.safetensors"), SETTINGS))
        return chat, result, to

    return begun


SETTINGS = Settings(chunk_tokens=None, reuse=True, new_tokens=4)


async def drained(changes):
    return [each async for each in changes]


def test_a_continued_chat_goes_on_after_a_stop(continued):
    """The file's KV is held from the moment that it is read, answered or not."""

    async def asking():
        chat, result, to = await continued()
        await drained(chat.ask("and now?", [], SETTINGS))
        assert to == [result]

    asyncio.run(asking())


def test_a_continued_chat_without_its_kv_says_what_to_do(continued):
    """A page that was closed let go of it: nothing is begun, and the file is asked for again."""

    async def asking():
        chat, _, to = await continued()
        chat.release()
        turns = list(chat.turns)
        with pytest.raises(Refused, match="upload the file again"):
            await drained(chat.ask("and now?", [], SETTINGS))
        assert (chat.turns, to) == (turns, [])

    asyncio.run(asking())


def test_a_full_server_resumes_nothing(chats, monkeypatch):
    """An uploaded file waits its turn as a question does."""
    gradio = pytest.importorskip("gradio")
    from mmprefill.demo_page import _Events

    said = []
    monkeypatch.setattr(gradio, "Warning", lambda text, **_: said.append(text))
    sessions = chats(waiting=0)
    user = SimpleNamespace(session_hash="one")
    asyncio.run(drained(_Events(sessions).resume("a.safetensors", 0, True, 16, user)))
    assert said and "waiting already" in said[0]
    assert sessions.of("one").turns == []
