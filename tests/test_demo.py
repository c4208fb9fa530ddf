"""The demo without a browser: limits, sessions, uploads, and what is said where its extra is missing."""

import importlib.util

import checkpoints
import pytest
from PIL import Image

from mmprefill.cli import main
from mmprefill.demo_chat import friendly
from mmprefill.demo_limits import Limits, Refused, Upload
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
