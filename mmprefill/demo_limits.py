"""What the demo accepts from one user, and the records that a conversation is made of."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from mmprefill.config import MediaLimits
from mmprefill.media import load_picture


class Refused(Exception):
    """A question that was not even begun; the message is for the user."""


@dataclass(frozen=True)
class Limits:
    """What one user may send.

    Attributes:
        upload_bytes: most bytes of one file.
        picture_bytes: most bytes of one picture.
        pixels: most pixels of one picture.
        pictures: most pictures with one question.
        kept_pictures: most pictures in one conversation.
        characters: most characters of a question.
        waiting: most questions of all users that are worked on or wait.
        chats: most conversations kept; the one that was idle longest goes first.
        idle: seconds after which a conversation is forgotten.
    """

    upload_bytes: int = 64 * 2**20
    picture_bytes: int = 16 * 2**20
    pixels: int = 24_000_000
    pictures: int = 6
    kept_pictures: int = 12
    characters: int = 8_000
    waiting: int = 32
    chats: int = 64
    idle: float = 3600.0

    @property
    def media(self) -> MediaLimits:
        """The same for the engine's intake. It reads no file and fetches nothing: pictures come as bytes."""
        return MediaLimits(
            max_pixels=self.pixels, max_side=16_384, max_bytes=self.picture_bytes, max_frames=100, allowed_roots=()
        )

    def check(self, text: str, files: int, kept: int) -> None:
        """Raises `Refused` for a question that is empty, or more than is accepted."""
        if not text.strip():
            raise Refused("Write a question about the picture." if files else "Write a question, or pick an example.")
        if len(text) > self.characters:
            raise Refused(f"The question has {len(text)} characters; {self.characters} are accepted.")
        if files > self.pictures:
            raise Refused(f"{files} pictures with one question; {self.pictures} are accepted.")
        if files + kept > self.kept_pictures:
            raise Refused(f"A conversation may have {self.kept_pictures} pictures: begin a new one for more.")


@dataclass(frozen=True)
class Settings:
    """How one question is run.

    Attributes:
        chunk_tokens: most prompt tokens of a step; None for no bound of its own.
        reuse: whether earlier work of this conversation may be used.
        new_tokens: most tokens of the answer.
    """

    chunk_tokens: int | None = None
    reuse: bool = True
    new_tokens: int = 64


@dataclass(frozen=True)
class Upload:
    """A picture that a user gave: its bytes for the engine, a small copy for the page."""

    name: str
    data: bytes
    shown: Path

    @classmethod
    def read(cls, file: Path, what: str, limits: MediaLimits, folder: Path) -> Upload:
        """Decode the picture once, so that a bad one is told of before anything runs; the copy has no metadata.

        Raises:
            MediaError: if it cannot be used.
        """
        data = file.read_bytes()
        picture = load_picture(data, limits, item=what).to_pil()
        picture.thumbnail((768, 768))
        shown = folder / f"{secrets.token_hex(8)}.png"
        picture.save(shown)
        return cls(file.name, data, shown)


@dataclass
class Turn:
    """One message.

    Attributes:
        role: "user" or "assistant".
        text: what it says.
        uploads: its pictures.
        kind: "said" is part of the conversation; a "note" or a "problem" is only for the reader.
    """

    role: str
    text: str
    uploads: Seq[Upload] = ()
    kind: str = "said"
