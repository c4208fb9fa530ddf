"""One user's conversation in the demo, apart from any page: questions in, answers as they grow.

    ask ───> pictures + history ──> engine.watch ──> Onward, token by token ──> the answer
    stop ──> cancels the task that does all this: the engine frees what the request held, at whatever stage

Runs on the page's event loop, but for what is handed to threads and lanes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine
from collections.abc import Sequence as Seq
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmprefill import demo_resume
from mmprefill.demo_limits import Limits, Refused, Settings, Turn, Upload
from mmprefill.demo_report import Report
from mmprefill.engine import AsyncPrefiller
from mmprefill.errors import MMPrefillError
from mmprefill.results import PrefillResult, Progress
from mmprefill.trace import Trace
from mmprefill.types import Request

log = logging.getLogger(__name__)
OURS = "Something went wrong on our side. The server's log has the details; you can go on asking."
STOPPED = "Stopped."
BUSY = "Still answering: stop that first."


@dataclass(eq=False)
class Chat:
    """A conversation, and everything that belongs to its user.

    Attributes:
        engine: shared by all.
        trace: the engine's.
        folder: for what the user uploads and downloads; nobody else's files lie in it.
        limits: what is accepted.
        turns: the conversation, with notes.
        report: what the pipeline did for the last request.
        result: the last result; it can be downloaded.
        seen: when the user last did something.
    """

    engine: AsyncPrefiller
    trace: Trace
    folder: Path
    limits: Limits
    turns: list[Turn] = field(default_factory=list)
    report: Report | None = None
    result: PrefillResult | None = None
    seen: float = field(default_factory=time.monotonic)
    _name: str = field(default_factory=lambda: secrets.token_hex(8))
    _asked: int = 0
    _resumed: bool = False
    _answered: str = ""  # what was said after `result`
    _running: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def busy(self) -> bool:
        """Whether a question is being answered."""
        return self._running is not None and not self._running.done()

    def stop(self) -> None:
        """Cancel the work on a question, wherever it is."""
        if self._running is not None:
            self._running.cancel()

    def release(self) -> None:
        """The user left: stop, and let go of the KV."""
        self.stop()
        self.result = None

    async def clear(self) -> None:
        """Begin anew; whatever runs is stopped."""
        self.stop()
        if self._running is not None:
            with suppress(asyncio.CancelledError):
                await self._running
        self.turns, self.report, self.result, self._resumed, self._answered = [], None, None, False, ""

    # What the page calls; each yields when there is something new to show.

    async def ask(self, text: str, files: Seq[Path], settings: Settings) -> AsyncGenerator[None, None]:
        """Answer a question.

        Raises:
            Refused: if it was not begun; nothing changed then.
        """
        if self.busy:
            raise Refused(BUSY)
        self.limits.check(text, len(files), sum(len(turn.uploads) for turn in self.turns))
        if files and self._resumed:
            raise Refused("A conversation that goes on from a KV file takes text only: begin a new one for pictures.")
        if self._resumed:
            self._held()
        self.turns.append(Turn("user", text))
        async with aclosing(self._watched(self._ask(files, settings))) as changes:
            async for _ in changes:
                yield

    async def go_on_from(self, file: Path, settings: Settings) -> AsyncGenerator[None, None]:
        """Continue from an uploaded KV file: its answer first, then further questions.

        Raises:
            Refused: while a question runs.
        """
        if self.busy:
            raise Refused(BUSY)
        await self.clear()
        self.turns.append(Turn("user", f"Continue from {file.name}", kind="note"))
        async with aclosing(self._watched(self._resume(file, settings))) as changes:
            async for _ in changes:
                yield

    async def saved(self) -> Path:
        """The last result as a KV file, in the chat's own folder.

        Raises:
            Refused: if there is none.
        """
        if self.result is None:
            raise Refused("There is no KV cache yet: ask something first.")
        name = f"chat-{self._name[:6]}-{self._asked}.kv.safetensors"  # never the result's id: an upload chose that one
        return await asyncio.to_thread(self.result.save, self.folder / name)

    def _held(self) -> PrefillResult:
        """The KV that an uploaded file brought; `release` lets go of it."""
        if self.result is None:
            raise Refused("The KV file of this conversation is no longer held: upload the file again.")
        return self.result

    async def _watched(self, work: Coroutine[Any, Any, None]) -> AsyncGenerator[None, None]:
        """Run the work as a task that `stop` can cancel; if the page goes away that cancels it too."""
        self._changed.clear()
        self._running = running = asyncio.create_task(self._guarded(work))
        running.add_done_callback(lambda _: self._changed.set())
        try:
            yield
            while not running.done():
                await self._changed.wait()
                self._changed.clear()
                yield
        finally:
            running.cancel()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Whatever happens becomes a message; nothing of ours is shown."""
        try:
            await work
        except asyncio.CancelledError:
            self._ended(STOPPED, "note")
        except (MMPrefillError, ValueError, Refused) as error:
            self._ended(friendly(error), "problem")
        except Exception:
            log.exception("the demo failed on a question")
            self._ended(OURS, "problem")

    def _ended(self, text: str, kind: str) -> None:
        """An answer that was begun stays in the conversation; a question without one does not."""
        if self.turns and self.turns[-1].role == "assistant" and not self.turns[-1].text:
            self.turns.pop()
        if self.turns and self.turns[-1].role == "user":
            self.turns[-1].kind = "note"
        self.turns.append(Turn("assistant", text, kind=kind))

    # The work.

    async def _ask(self, files: Seq[Path], settings: Settings) -> None:
        question = self.turns[-1]
        question.uploads = [await asyncio.to_thread(self._upload, i + 1, file) for i, file in enumerate(files)]
        self.report = Report(settings.chunk_tokens, settings.reuse)
        self._changed.set()
        self._asked += 1
        id = f"chat-{self._name[:6]}-{self._asked}"
        if self._resumed:
            result = await demo_resume.appended(self.engine, self._held(), self._answered, question.text, id)
        else:
            result = await self._prefilled(id, settings)
        await self._answer(result, settings)

    def _upload(self, number: int, file: Path) -> Upload:
        return Upload.read(file, f"Picture {number}, {file.name}", self.limits.media, self.folder)

    async def _prefilled(self, id: str, settings: Settings) -> PrefillResult:
        assert self.report is not None
        request = Request(
            messages=self._messages(),
            id=id,
            reuse=settings.reuse,
            salt=self._name if settings.reuse else secrets.token_hex(16),  # nobody shares with another user
            chunk_tokens=settings.chunk_tokens,
        )
        last: Progress | PrefillResult | None = None
        async with aclosing(self.engine.watch(request)) as watching:  # type: ignore[type-var]  # an async generator
            async for last in watching:
                if isinstance(last, Progress):
                    self.report.progress = (last.done, last.tokens)
                self._changed.set()
        assert isinstance(last, PrefillResult)
        return last

    def _messages(self) -> list[dict[str, Any]]:
        """The conversation for the model. Pictures are bytes, and text is a text part: it cannot name a file or a URL."""
        messages: list[dict[str, Any]] = []
        for turn in self.turns:
            if turn.kind == "said":
                pictures = [{"type": "image", "image": upload.data} for upload in turn.uploads]
                messages.append({"role": turn.role, "content": [*pictures, {"type": "text", "text": turn.text}]})
        return messages

    async def _resume(self, file: Path, settings: Settings) -> None:
        result = await demo_resume.resumed(self.engine, file)
        self._resumed, self.result = True, result  # together: a stop may come before its answer
        self.turns.append(Turn("assistant", demo_resume.described(result), kind="note"))
        self.report = Report(settings.chunk_tokens, settings.reuse)
        await self._answer(result, settings)

    async def _answer(self, result: PrefillResult, settings: Settings) -> None:
        """Hand the KV over and choose tokens, one lane call each: others' work runs in between."""
        assert self.report is not None
        session, report, turn = self.engine.session, self.report, Turn("assistant", "")
        await asyncio.to_thread(report.prefilled, result, list(self.trace.bars))
        self.result, self._answered = result, ""
        self.turns.append(turn)
        self._changed.set()
        going = demo_resume.onward(result, settings.new_tokens)
        (await session.lane.run(report.handing_over(lambda: going.kv))).take()
        ids: list[int] = []
        while len(ids) < settings.new_tokens:
            token = (await session.lane.run(report.answering(going.choose))).take()
            if token in session.stop_ids:
                break
            ids.append(token)
            self._answered = session.text(ids).strip()
            turn.text = self._answered.rstrip("\ufffd")  # half a character so far
            self._changed.set()
        turn.text = self._answered
        if not turn.text:
            self._ended("The model ended its answer at once.", "note")


def friendly(error: BaseException) -> str:
    """An error's message without the request's made-up name."""
    text = re.sub(r"^request '[^']*'[:,] ", "", str(error))
    return text[:1].upper() + text[1:]
