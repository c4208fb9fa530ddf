"""The conversations of all users of the demo, by the session of their page."""

from __future__ import annotations

import secrets
import shutil
import time
from pathlib import Path

from mmprefill.demo_chat import Chat
from mmprefill.demo_limits import Limits, Refused
from mmprefill.engine import AsyncPrefiller
from mmprefill.trace import Trace


class Chats:
    """Makes, finds and forgets chats; used on the page's event loop alone.

    Args:
        engine: shared by all.
        trace: the engine's.
        folder: each chat gets a folder of its own in it.
        limits: for each of them.
    """

    def __init__(self, engine: AsyncPrefiller, trace: Trace, folder: Path, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self._trace, self._folder = trace, folder
        self._chats: dict[str, Chat] = {}

    def of(self, session: str) -> Chat:
        """The session's own chat, made when it is first asked for."""
        chat = self._chats.pop(session, None)
        if chat is None:
            folder = self._folder / secrets.token_hex(16)
            folder.mkdir(mode=0o700, parents=True)
            chat = Chat(self.engine, self._trace, folder, self.limits)
        self._chats[session] = chat  # the last to be forgotten
        chat.seen = time.monotonic()
        self._forget()
        return chat

    def check_room(self) -> None:
        """Raises `Refused` where too many questions wait already."""
        if sum(chat.busy for chat in self._chats.values()) >= self.limits.waiting:
            raise Refused(f"{self.limits.waiting} questions are waiting already: try again in a moment.")

    def stop(self, session: str) -> None:
        """Cancel what runs for a session."""
        if session in self._chats:
            self._chats[session].stop()

    def release(self, session: str) -> None:
        """The page was closed: its work ends and its KV is freed. Its turns stay for a while, should it come back."""
        if session in self._chats:
            self._chats[session].release()

    def _forget(self) -> None:
        spare, now = len(self._chats) - self.limits.chats, time.monotonic()
        for session, chat in list(self._chats.items())[:-1]:
            if not chat.busy and (spare > 0 or now - chat.seen > self.limits.idle):
                spare -= 1
                del self._chats[session]
                chat.release()
                shutil.rmtree(chat.folder, ignore_errors=True)
