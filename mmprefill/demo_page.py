"""The demo's page: what is where, and which event calls what. What is said and done lies in `demo_chat`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio import processing_utils

from mmprefill.demo_chat import Chat
from mmprefill.demo_limits import Refused, Settings, Turn
from mmprefill.demo_panel import panel
from mmprefill.demo_sessions import Chats

ASSETS = Path(__file__).parent / "assets"
EXAMPLES = ASSETS / "examples"
CHUNKS = [("the whole prompt", 0), *((f"{size} tokens", size) for size in (16, 32, 64, 128, 256, 512))]
ANSWERS = [(f"{size} tokens", size) for size in (1, 16, 64, 256)]
REUSE = [("is reused", True), ("is done again", False)]
SUFFIX = ".safetensors"
# A visible link would have to be rewritten after each answer; the file is written when it is asked for.
FETCH = "() => setTimeout(() => document.querySelector('#kv-file a, a#kv-file, #kv-file')?.click(), 50)"


class NothingFetched:
    """ASGI middleware: gradio serves remote files through `file=http...`; this page has none."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Refuse paths that name a URL."""
        path = scope.get("path", "").lower()
        if scope["type"] == "http" and ("file=http" in path or "/proxy=" in path):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"not served here"})
            return
        await self.app(scope, receive, send)


async def _never(url: str) -> Any:
    """Stands in for gradio's download of URLs that a client names in the place of an upload."""
    raise gr.Error("Only uploaded files are accepted.", print_exception=False)


def _theme() -> Any:
    system = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif"]  # nothing is downloaded
    mono = ["ui-monospace", "SFMono-Regular", "Menlo", "DejaVu Sans Mono", "monospace"]
    return gr.themes.Base(
        primary_hue="teal", neutral_hue="slate", radius_size="lg", font=system, font_mono=mono
    ).set(body_background_fill="#f6f7f9", block_border_width="1px", block_shadow="none", input_shadow="none")  # fmt: skip


LAUNCH = {
    "prevent_thread_lock": True,
    "quiet": True,
    "show_error": False,
    "ssr_mode": False,
    "footer_links": [],
    "run_history": False,  # no trace of what was asked in the browser's storage either
    "theme": _theme(),
    "css_paths": ASSETS / "demo.css",
    "app_kwargs": {"middleware": [(NothingFetched, (), {})]},
}


def build(chats: Chats) -> Any:
    """The page."""
    processing_utils.async_ssrf_protected_get = _never
    events = _Events(chats)
    with gr.Blocks(title="mmprefill", analytics_enabled=False, delete_cache=(3600, 24 * 3600), fill_width=True) as page:
        gr.HTML(_heading(chats), elem_id="heading", js_on_load=None)
        with gr.Row(elem_id="columns"):
            with gr.Column(scale=3, min_width=320, elem_id="talk"):
                chat = gr.Chatbot(
                    label="Conversation", elem_id="chat", height="clamp(300px, 46vh, 560px)", render_markdown=False,
                    buttons=[], allow_tags=False, placeholder="Ask about a picture, or pick an example below.",
                    allow_file_downloads=False, layout="bubble", group_consecutive_messages=False,
                )  # fmt: skip
                box = gr.MultimodalTextbox(
                    label="Your question", placeholder="Ask about your pictures", file_count="multiple",
                    file_types=["image"], sources=["upload"], show_label=False, elem_id="box", max_lines=6,
                    max_plain_text_length=100_000, stop_btn=False, submit_btn=True,
                )  # fmt: skip
                examples = _examples()
                chunk, reuse, tokens = _controls()
                with gr.Row(elem_id="actions"):
                    fresh = gr.Button("New conversation", size="sm", min_width=120)
                    save = gr.Button("Download the KV cache", size="sm", min_width=120)
                    upload = gr.UploadButton(
                        "Continue from a KV file", file_types=[SUFFIX], size="sm", min_width=120, elem_id="kv-upload"
                    )
                    file = gr.DownloadButton("KV file", visible="hidden", elem_id="kv-file")
            with gr.Column(scale=2, min_width=320, elem_id="side"):
                side = gr.HTML(panel(None), elem_id="panel", js_on_load=None)

        settings, shown = [chunk, reuse, tokens], [chat, box, side]
        streaming: dict[str, Any] = {"concurrency_limit": None, "show_progress": "hidden", "api_visibility": "private"}
        box.submit(events.ask, [box, *settings], shown, **streaming)
        for number, button in enumerate(examples):
            button.click(events.example(number), settings, shown, **streaming)
        upload.upload(events.resume, [upload, *settings], shown, **streaming)
        quick: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        box.stop(events.stop, None, None, **quick)
        fresh.click(events.fresh, None, shown, **quick)
        saving = save.click(events.save, None, file, concurrency_limit=None, api_visibility="private")
        saving.success(None, None, None, js=FETCH)
        page.unload(events.leave)
        page.load(None, None, None, js=(ASSETS / "demo.js").read_text(encoding="utf-8"))
    page.queue(max_size=4 * chats.limits.waiting, api_open=False)
    return page


def _heading(chats: Chats) -> str:
    session = chats.engine.session
    model = Path(str(session.bundle.source)).name
    where = f"{model} · {session.family.device} · {str(session.family.dtype)[6:]}"
    return (
        "<header class=mm-heading><h1>mmprefill</h1>"
        "<p>Pictures and a question in, a KV cache out: ask, and see what the pipeline did.</p>"
        f"<p class=mm-model>{where}</p></header>"
    )


def questions() -> list[dict[str, Any]]:
    """The bundled examples."""
    found: list[dict[str, Any]] = json.loads((EXAMPLES / "examples.json").read_text(encoding="utf-8"))
    return found


def _examples() -> list[Any]:
    with gr.Row(elem_id="examples"):
        return [
            gr.Button(
                each["label"], icon=EXAMPLES / each["pictures"][0] if each["pictures"] else None, size="sm", min_width=100
            )
            for each in questions()
        ]  # fmt: skip


def _controls() -> tuple[Any, Any, Any]:
    with gr.Row(elem_id="controls"):
        chunk = gr.Dropdown(CHUNKS, value=0, label="Prefill in chunks of", min_width=100, filterable=False)
        tokens = gr.Dropdown(ANSWERS, value=64, label="Answer with at most", min_width=100, filterable=False)
        reuse = gr.Dropdown(REUSE, value=True, label="Work of earlier turns", min_width=100, filterable=False)
    return chunk, reuse, tokens


class _Events:
    """What the page's events call. Everything that a handler raises would reach the page, so none raises."""

    def __init__(self, chats: Chats) -> None:
        self._chats = chats

    async def ask(
        self, box: Any, chunk: int, reuse: bool, tokens: int, request: gr.Request
    ) -> AsyncGenerator[Any, None]:
        """A question from the box."""
        chat = self._chats.of(request.session_hash)
        files = [Path(file) for file in (box or {}).get("files", [])]
        asking = chat.ask((box or {}).get("text", ""), files, _settings(chunk, reuse, tokens))
        async with aclosing(self._shown(chat, self._with_room(asking))) as updates:
            async for update in updates:
                yield update

    def example(self, number: int) -> Callable[..., AsyncGenerator[Any, None]]:
        """The handler of an example's button: a conversation that begins with it."""

        async def ask(chunk: int, reuse: bool, tokens: int, request: gr.Request) -> AsyncGenerator[Any, None]:
            chat, example = self._chats.of(request.session_hash), questions()[number]
            await chat.clear()
            files = [EXAMPLES / name for name in example["pictures"]]
            asking = chat.ask(example["question"], files, _settings(chunk, reuse, tokens))
            async with aclosing(self._shown(chat, self._with_room(asking))) as updates:
                async for update in updates:
                    yield update

        return ask

    async def resume(
        self, file: str, chunk: int, reuse: bool, tokens: int, request: gr.Request
    ) -> AsyncGenerator[Any, None]:
        """An uploaded KV file."""
        chat = self._chats.of(request.session_hash)
        going = chat.go_on_from(Path(file), _settings(chunk, reuse, tokens))
        async with aclosing(self._shown(chat, self._with_room(going))) as updates:
            async for update in updates:
                yield update

    def stop(self, request: gr.Request) -> None:
        """The stop button. The handler that runs sees its own work end, and tidies the page."""
        self._chats.stop(request.session_hash)

    async def fresh(self, request: gr.Request) -> Any:
        """A new conversation."""
        chat = self._chats.of(request.session_hash)
        await chat.clear()
        return [], _box(busy=False, cleared=True), panel(None)

    async def save(self, request: gr.Request) -> Any:
        """The last result's KV as a file."""
        try:
            return str(await self._chats.of(request.session_hash).saved())
        except Refused as refusal:
            raise gr.Error(str(refusal), title="Nothing to download", print_exception=False) from None

    def leave(self, request: gr.Request) -> None:
        """The page was closed."""
        self._chats.release(request.session_hash)

    async def _with_room(self, work: AsyncGenerator[None, None]) -> AsyncGenerator[None, None]:
        """Begin only if the server is not full; refused in here, so that the page shows why."""
        async with aclosing(work) as changes:
            self._chats.check_room()
            async for _ in changes:
                yield

    async def _shown(self, chat: Chat, changes: AsyncGenerator[None, None]) -> AsyncGenerator[Any, None]:
        """The page after each change; a page that goes away closes the changes, which cancels the work."""
        begun = False
        try:
            async with aclosing(changes):
                async for _ in changes:
                    yield messages(chat), gr.skip() if begun else _box(busy=True, cleared=True), panel(chat.report)
                    begun = True
        except Refused as refusal:
            gr.Warning(str(refusal), title="Not yet")
            yield gr.skip(), gr.skip(), gr.skip()
            return
        yield messages(chat), _box(busy=False), panel(chat.report)


def _settings(chunk: int, reuse: bool, tokens: int) -> Settings:
    return Settings(chunk_tokens=int(chunk) or None, reuse=bool(reuse), new_tokens=min(max(int(tokens), 1), 256))


def _box(*, busy: bool, cleared: bool = False) -> Any:
    value: dict[str, Any] = {"value": {"text": "", "files": []}} if cleared else {}
    return gr.MultimodalTextbox(submit_btn=not busy, stop_btn=busy, **value)


def messages(chat: Chat) -> list[dict[str, Any]]:
    """The conversation as the chat shows it. Without Markdown its text still is HTML to gradio: it is escaped here."""
    return [{"role": turn.role, "content": _content(turn)} for turn in chat.turns]


def _content(turn: Turn) -> list[Any]:
    pictures = [{"path": str(upload.shown), "alt_text": f"Picture: {upload.name}"} for upload in turn.uploads]
    return [*pictures, {"type": "text", "text": escape(turn.text or "…", quote=False)}]
