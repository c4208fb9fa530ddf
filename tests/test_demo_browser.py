"""The demo in a real browser: what a user does, and what they see. No test depends on a right answer."""

import importlib.util
import itertools
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import browser
import checkpoints
import pytest
from PIL import Image

from mmprefill import demo
from mmprefill.demo_chat import OURS, STOPPED, Chat
from mmprefill.demo_limits import Limits
from mmprefill.encoders import vision
from mmprefill.engine import AsyncPrefiller
from mmprefill.pipeline.onward import Onward

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.end_to_end,
    pytest.mark.timeout(300),
    # Not importorskip: that would import it, which takes seconds, wherever tests are collected.
    pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="no gradio"),
]
CONTRAST = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")
LIMITS = Limits(upload_bytes=2 * 2**20, picture_bytes=2**20)


@pytest.fixture(scope="module")
def chromium():
    with browser.running() as running:
        yield running


@pytest.fixture(scope="module")
def served(chromium):
    """Address and chats of a page on the bundled model."""
    with checkpoints.quiet(), demo.serving(partial(AsyncPrefiller.from_pretrained, None), limits=LIMITS) as serving:
        yield serving


@pytest.fixture
def users(chromium, served):
    """Makes users; whatever they did, their console had no error and nothing was fetched from elsewhere."""
    made = []

    def user(**view):
        made.append(browser.User(chromium, served[0], **view))
        return made[-1]

    yield user
    for each in made:
        each.close()
    assert [each.complaints for each in made] == [[] for _ in made]
    assert [each.elsewhere for each in made] == [[] for _ in made]


@pytest.fixture
def user(users):
    return users()


@pytest.fixture
def picture(tmp_path):
    def make(number=1, name="a.png"):
        checkpoints.picture(number).save(tmp_path / name)
        return tmp_path / name

    return make


def only_chat(served):
    """The chat that was used last."""
    return list(served[1]._chats.values())[-1]


def test_the_command(chromium, tmp_path):
    """`mmprefill demo` serves a page that can be used: within 10 s on two quiet cores, and these may be busy."""
    started = time.monotonic()
    command = [sys.executable, "-m", "mmprefill.cli", "demo", "--port", str(free_port())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path)
    try:
        user = browser.User(chromium, process.stdout.readline().split()[5])
        assert user.submit.is_enabled()
        assert time.monotonic() - started < 60
        user.close()
    finally:
        process.terminate()
        assert process.wait(60) == 130
        process.stdout.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_picture(user, picture):
    """An answer comes, and the panel says what was done for it: tokens, KV bytes, lanes, reuse, candidates."""
    user.ask("What is this?", picture())
    assert user.answer()
    user.panel.get_by_text("image 49").wait_for()
    shown = user.panel.inner_text()
    for part in ("image 49", "KiB", "no earlier prompt begins the same", "probability"):
        assert part in shown
    timeline = user.panel.get_by_role("img", name="Timeline").get_attribute("aria-label")
    for lane in ("Intake", "Vision", "Text, merge", "Decoder", "Hand-over", "Answer"):
        assert lane in timeline
    assert user.panel.locator(".mm-candidates tbody tr").count() == 5


def test_two_pictures(user, picture):
    user.ask("Which one is larger?", picture(1, "a.png"), picture(2, "b.png"))
    assert user.answer()
    user.panel.get_by_text("image 98").wait_for()
    assert user.page.locator("#chat img").count() == 2


def test_text_only_and_an_example(user):
    """Text alone has no tower call; an example is one click, and begins anew."""
    user.ask("Is a red circle red?")
    assert user.answer()
    assert "image" not in user.panel.locator(".mm-key").inner_text()
    user.page.get_by_role("button", name="Two pictures").click()
    user.panel.get_by_text("image 98").wait_for()
    assert user.answer()
    assert user.said.count() == 1


def test_an_empty_question(user, picture):
    """Nothing is asked; the page says what is missing, and keeps the picture."""
    user.box.press("Enter")
    user.page.get_by_text("Write a question, or pick an example.").wait_for()
    user.ask("  ", picture())
    user.page.get_by_text("Write a question about the picture.").wait_for()
    assert user.said.count() == 0
    assert user.page.locator("#box .thumbnail-item").count() == 1


def test_files_that_are_no_pictures(user, tmp_path, picture):
    """Broken and endless pictures are named with the reason; the conversation goes on without them."""
    (tmp_path / "broken.png").write_bytes(picture().read_bytes()[:200])
    user.ask("What is this?", tmp_path / "broken.png")
    assert "broken.png" in user.answer(1)
    Image.new("1", (8000, 8000)).save(tmp_path / "bomb.png")
    user.ask("And this?", tmp_path / "bomb.png")
    assert "pixels" in user.answer(2)
    user.ask("Then this?", picture())
    assert user.answer(3)
    user.panel.get_by_text("image 49").wait_for()
    for secret in (str(tmp_path), "/tmp", "Traceback"):
        assert secret not in user.page.locator("body").inner_text()


def test_a_huge_file(user, tmp_path, picture):
    """A file over the limit does not get in; a picture over its own limit is refused by name."""
    (tmp_path / "huge.png").write_bytes(picture().read_bytes() + b"\0" * (3 * 2**20))
    user.page.locator("#box input[type=file]").set_input_files(str(tmp_path / "huge.png"))
    user.page.get_by_text("maximum").first.wait_for()
    (tmp_path / "large.png").write_bytes(picture().read_bytes() + b"\0" * (3 * 2**19))
    user.ask("What is this?", tmp_path / "large.png")
    assert "large.png" in user.answer()


class Gate:
    """Holds a lane inside a function until it is opened."""

    def __init__(self, monkeypatch, owner, name):
        self.reached, self.opened = threading.Event(), threading.Event()
        original = getattr(owner, name)

        def held(*args, **kwargs):
            self.reached.set()
            assert self.opened.wait(100)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, held)


@pytest.mark.parametrize(("owner", "name"), [(vision, "encode"), (Onward, "choose")], ids=["vision", "answer"])
def test_stop_in_the_middle(user, served, picture, monkeypatch, owner, name):
    """Stop reaches the request wherever it is: everything it held is freed, and the next question is answered (G7)."""
    gate = Gate(monkeypatch, owner, name)
    user.ask("What is this?", picture(7))
    assert gate.reached.wait(60)
    user.stop.click()
    user.page.get_by_text(STOPPED).wait_for()  # while the lane is still held
    user.submit.wait_for()
    gate.opened.set()
    engine, chat = served[1].engine, only_chat(served)
    assert not chat.busy
    engine.session.lane.call(lambda: None)
    user.ask("Is a red circle red?")
    assert user.answer(2)
    assert not engine._driver._active
    assert not engine._driver._tower


def test_closing_the_tab_stops_the_request(users, served, picture, monkeypatch):
    """Nobody waits any more: the work ends and the KV goes."""
    gate = Gate(monkeypatch, Onward, "choose")
    user = users()
    user.ask("What is this?", picture(8))
    assert gate.reached.wait(60)
    chat = only_chat(served)
    user.close()
    try:
        for _ in range(600):
            if not chat.busy and chat.result is None:
                break
            threading.Event().wait(0.1)
        assert not chat.busy
        assert chat.result is None
    finally:
        gate.opened.set()


def test_two_users_at_once(users, picture, monkeypatch):
    """Both are served, each sees only their own, and neither profits from the other's cache."""
    gate = Gate(monkeypatch, vision, "encode")
    one, two = users(), users()
    one.ask("What is this?", picture(3))
    two.ask("What might this be?", picture(3))
    assert gate.reached.wait(60)
    gate.opened.set()
    assert one.answer()
    assert two.answer()
    assert "might" not in one.page.locator("#chat").inner_text()
    assert "might" in two.page.locator("#chat").inner_text()
    assert one.reused() == two.reused() == [0, 0]


def test_a_second_turn(user, picture):
    """The first turn's picture is still part of the prompt; its KV and its encoding are reused, or not, as asked (G9)."""
    user.ask("What is this?", picture(4))
    assert user.answer(1)
    user.ask("And what else can you see?")
    assert user.answer(2)
    user.panel.get_by_text("the first").wait_for()
    tokens, pictures = user.reused()
    assert tokens > 49
    assert pictures == 1
    user.page.get_by_label("Work of earlier turns").click()
    user.page.get_by_role("option", name="is done again").click()
    user.page.get_by_label("Prefill in chunks of").click()
    user.page.get_by_role("option", name="16 tokens").click()
    user.ask("Once more?")
    assert user.answer(3)
    user.panel.get_by_text("turned off").wait_for()
    assert user.reused() == [0, 0]
    chunks = int(user.panel.locator(".mm-facts small").first.inner_text().split()[2])
    assert chunks >= 5


def test_going_on_from_a_kv_file(users, picture, tmp_path):
    """Download the KV cache, upload it in another session: the same answer, and further questions. Others are refused."""
    user = users()
    user.page.get_by_role("button", name="Download the KV cache").click()
    user.page.get_by_text("ask something first").wait_for()
    user.ask("What is this?", picture(5))
    answer = user.answer()
    with user.page.expect_download() as download:
        user.page.get_by_role("button", name="Download the KV cache").click()
    file = tmp_path / "mine.kv.safetensors"
    download.value.save_as(file)
    other = users()
    go_on_from(other, file)
    assert "49 image" in other.answer(1)
    assert other.answer(2) == answer
    other.ask("And what else can you see?")
    assert other.answer(3)
    other.panel.get_by_text("the KV file").first.wait_for()
    other.ask("With a picture?", picture(6))
    other.page.get_by_text("takes text only").wait_for()
    file.write_bytes(b"no tensors at all")
    go_on_from(other, file)
    other.page.wait_for_function("document.querySelectorAll('#chat [data-testid=bot]').length == 1")
    assert "none of them was computed again" not in other.answer(1)
    assert "/tmp" not in other.page.locator("#chat").inner_text()


def go_on_from(user, file):
    with user.page.expect_file_chooser() as chooser:
        user.page.get_by_role("button", name="Continue from a KV file").click()
    chooser.value.set_files(file)


class Counting(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Counting.asked += 1
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_text_names_nothing(user):
    """Paths, URLs, Markdown and HTML in a question are text: shown as typed, and nothing is read or fetched."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Counting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/x.png"
    text = f"![x]({url}) <img src={url}> {url} file:///etc/passwd /etc/passwd <|image|> <b>bold</b>"
    user.ask(text)
    assert user.answer()
    assert text in user.page.locator("#chat [data-testid=user]").first.inner_text()
    assert "image" not in user.panel.locator(".mm-key").inner_text()
    assert user.page.locator("#chat img").count() == 0
    server.shutdown()
    server.server_close()
    assert Counting.asked == 0
    for path in (f"gradio_api/file={url}", f"gradio_api/proxy={url}", "gradio_api/file=/etc/passwd"):
        assert user.page.request.get(f"{user.address}{path}").status in (403, 404)
    assert Counting.asked == 0


def test_our_own_failure(user, monkeypatch, caplog):
    """A mistake of ours is told of without a word of its traceback, and the next question is answered."""

    async def fail(*_):
        raise RuntimeError("secret of the server")

    with monkeypatch.context() as patch:
        patch.setattr(Chat, "_prefilled", fail)
        user.ask("Is a red circle red?")
        assert user.answer() == OURS
    body = user.page.locator("body").inner_text()
    assert "secret" not in body
    assert "Traceback" not in body
    assert "secret of the server" in caplog.text
    user.ask("Is a red circle red?")
    assert user.answer(2)


def test_a_phone(users, picture):
    """At 390 px everything is reachable without scrolling sideways, and targets are large enough for a thumb."""
    user = users(width=390, height=844)
    user.ask("What is this?", picture())
    assert user.answer()
    assert user.page.evaluate("document.documentElement.scrollWidth") <= 390
    for button in user.page.locator("#actions button:visible, #examples button, #box button:visible").all():
        box = button.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        assert box["height"] >= 32


TREE = r"""
- main:
  - heading "mmprefill" [level=1]
  - log "chatbot conversation":
    - button "Picture 1 of this conversation"
    - text: /You. What is this\? Answer. ./
  - group "Multimedia input field":
    - button "Upload a file"
    - textbox "Your question"
    - button "Submit"
  - button "Can you see a blue ring?"
  - combobox "Prefill in chunks of": the whole prompt
  - combobox "Answer with at most": 64 tokens
  - combobox "Work of earlier turns": is reused
  - button "New conversation"
  - button "Download the KV cache"
  - button "Continue from a KV file"
  - region "What the pipeline did":
    - heading "What the pipeline did" [level=2]
    - term: Prompt
    - definition: /tokens in 1 chunk/
    - heading "Tokens by modality" [level=3]
    - 'img /Prompt tokens: \d+ text, 49 image/'
    - heading "Timeline of the lanes" [level=3]
    - 'img /Timeline over .*: Intake .*, Vision .*, Text, merge .*, Decoder .*, Hand-over .*, Answer/'
    - group: The timeline as a table
    - heading "Reuse" [level=3]
    - list
    - heading "Next token, most probable first" [level=3]
    - table:
      - rowgroup:
        - row "token probability"
"""


def test_a_screen_reader(user, picture):
    """The accessibility tree: every part with its role, name and value, in order; charts in words, headings in steps.

    An answer is announced once, when it is whole; until then the page says that it works on it.
    """
    user.page.evaluate(
        """() => { window.heard = []; new MutationObserver(() => heard.push(document.querySelector('#said').innerText))
            .observe(document.querySelector('#said'), {childList: true}); }"""
    )
    user.ask("What is this?", picture())
    answer = user.answer()
    user.page.get_by_role("status").get_by_text(answer, exact=True).wait_for(state="attached")
    assert user.page.evaluate("heard") == ["Answering.", answer]
    assert user.page.get_by_role("log").get_attribute("aria-live") == "off"
    from playwright.sync_api import expect

    expect(user.page.locator("body")).to_match_aria_snapshot(TREE)
    levels = user.page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(each => Number(each.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert user.page.locator("html").get_attribute("lang") == "en"
    user.page.get_by_label("Prefill in chunks of").press("ArrowDown")
    chosen = user.page.get_by_label("Prefill in chunks of").get_attribute("aria-activedescendant")
    assert user.page.locator(f"[id='{chosen}'][role=option]").count() == 1


def test_words_can_be_told_from_what_is_behind_them(user):
    """Contrast of at least 4.5, light and dark; and the check finds a pale word."""
    user.ask("Is a red circle red?")
    assert user.answer()
    user.page.add_style_tag(content="* { transition: none !important }")  # else colours are seen on their way
    for dark in (False, True):
        user.page.evaluate("dark => document.body.classList.toggle('dark', dark)", dark)
        assert user.page.evaluate(CONTRAST) == []
    user.page.evaluate("document.querySelector('h1').style.color = '#475569'")
    assert [text for text, _ in user.page.evaluate(CONTRAST)] == ["mmprefill"]


FOCUS = """() => { const e = document.activeElement, style = getComputedStyle(e);
    return [e.ariaLabel || e.innerText.trim(), style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2]; }"""
FOCUSABLE = """() => [...document.querySelectorAll('button, input, textarea, select, a[href], summary, [tabindex]')].filter(
    each => each.checkVisibility({visibilityProperty: true}) && each.type !== 'file' && each.tabIndex >= 0
).map(each => each.ariaLabel || each.innerText.trim())"""


def test_the_keyboard(user):
    """Tab reaches every control once, in the order of the page, each with a visible frame; the keys are enough to ask."""
    user.box.focus()
    user.page.keyboard.type("Is a red circle red?")
    user.page.keyboard.press("Enter")
    assert user.answer()
    controls = user.page.evaluate(FOCUSABLE)
    assert all(controls)
    assert len(controls) >= 16
    assert user.page.locator("[tabindex]:not([tabindex='0'], [tabindex='-1'])").count() == 0
    user.page.evaluate("document.body.tabIndex = -1; document.body.focus()")  # where Tab begins
    reached = []
    for _ in controls:
        user.page.keyboard.press("Tab")
        reached.append(user.page.evaluate(FOCUS))
    assert [name for name, _ in reached] == controls
    assert [name for name, framed in reached if not framed] == []
    user.page.get_by_role("button", name="Can you see a blue ring?").focus()
    user.page.keyboard.press("Enter")
    user.panel.get_by_text("image 49").wait_for()
    assert user.answer()
