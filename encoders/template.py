"""What a checkpoint's chat template does: render messages, and the strings that stand for media in what it renders."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

from mmprefill.encoders.families import MEDIA
from mmprefill.encoders.inert import Inert
from mmprefill.encoders.messages import Message
from mmprefill.errors import RequestError


class Template:
    """The chat template of a processor, or of its tokenizer; perhaps none.

    Args:
        processor: the checkpoint's processor.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        owners = (processor, processor.tokenizer)
        self._renderer = next((each for each in owners if getattr(each, "chat_template", None)), None)

    def __bool__(self) -> bool:
        return self._renderer is not None

    def render(self, name: str, messages: Seq[Message], inert: Inert) -> str:
        """Messages as one prompt that ends where an answer begins; control tokens of their texts hidden by `inert`."""
        if not self:
            raise RequestError(
                f"request {name!r}: this checkpoint has no chat template (chat_template.jinja), so it takes no "
                "messages; pass a plain prompt with images=, or apply a template yourself and pass Rendered(text)"
            )
        try:
            return self._apply([m.for_template(inert.hide, self._typed(m)) for m in messages])
        except RequestError:
            raise
        except Exception as error:  # a template raises whatever its author chose
            raise RequestError(f"request {name!r}: the checkpoint's chat template refused it: {error}") from error

    def _apply(self, messages: list[dict[str, Any]], generation: bool = True) -> str:
        renderer: Any = self._renderer
        text: str = renderer.apply_chat_template(messages, add_generation_prompt=generation, tokenize=False)
        return text

    def _probe(self, *messages: dict[str, Any], generation: bool = True) -> str:
        """What the template makes of messages; empty if it refuses them."""
        try:
            return self._apply(list(messages), generation)
        except Exception:  # as in render
            return ""

    def _typed(self, message: Message) -> bool:
        """Whether content goes in as a list of parts: as it was given, unless the template loses text in that form."""
        strings, lists = self._forms
        if message.typed and not lists and [part.kind for part in message.parts] == ["text"]:
            return False
        return message.typed or (lists and not strings)

    @cached_property
    def _forms(self) -> tuple[bool, bool]:
        """Whether content that is a string, and content that is a list with one text, comes out again."""
        probe = "Probe 7 text"
        as_string = self._probe({"role": "user", "content": probe})
        as_list = self._probe({"role": "user", "content": [{"type": "text", "text": probe}]})
        return probe in as_string, probe in as_list

    @cached_property
    def frame(self) -> str:
        """What the template puts around turns."""
        turns = [{"role": role, "content": [{"type": "text", "text": "x"}]} for role in ("user", "assistant", "user")]
        return self._probe(*turns, generation=False) or self._probe(turns[0], generation=False)

    @cached_property
    def markers(self) -> dict[str, str]:
        """Medium -> the string that stands for one item of it in a prompt that is not expanded yet."""
        return {medium: marker for medium in MEDIA if (marker := self._marker(medium))}

    def _marker(self, medium: str) -> str | None:
        """Gemma 3's pictures are a `boi_token`; all others bear the medium's name."""
        processor, tokenizer = self._processor, self._processor.tokenizer
        if getattr(processor, f"{medium}_processor", None) is None:
            return None
        names = ("boi_token", f"{medium}_token") if medium == "image" else (f"{medium}_token",)
        named = [getattr(processor, name, None) or getattr(tokenizer, name, None) for name in names]
        found = [token for token in named if isinstance(token, str)]
        text = self._probe({"role": "user", "content": [{"type": medium}, {"type": "text", "text": "x"}]})
        return next((marker for marker in found if text.count(marker) == 1), found[-1] if found else None)
