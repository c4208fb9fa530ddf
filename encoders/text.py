"""Requests -> token ids and processor tensors, on the host: chat template, placeholders, inert user text.

The checkpoint's own processor does the work, with its defaults untouched. What is added here is provenance: text that
came from a user is inert, so a control or placeholder token typed into it stays text. Two renamings do that:

1. before the chat template and the processor's expansion run, control tokens inside user text become private-use marks;
2. when the processor calls its tokenizer, every control token still readable is live. A copy of the tokenizer whose
   control tokens have unguessable names takes the text with the live ones renamed and the marks turned back.

Text without a control token in it takes neither step and tokenises exactly as transformers does.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Mapping, Sequence as Seq
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mmprefill.config import PrefillConfig
from mmprefill.encoders.families import MEDIA
from mmprefill.errors import MediaError, PlaceholderError, PromptTooLongError, RequestError
from mmprefill.fetch import Fetcher
from mmprefill.media import Picture, load_picture
from mmprefill.types import MediaItem, Prepared, Rendered, Request

_TYPE_IDS = ("mm_token_type_ids", "token_type_ids")
_SCRATCH = ("<placeholder>", "<|placeholder|>")  # strings that some processors use while they expand
_PRIVATE = [chr(code) for code in range(0xE000, 0xE100)]


class Intake:
    """Everything that a request needs before a model sees it. Safe to call from several threads.

    Args:
        processor: the checkpoint's processor.
        placeholders: medium -> placeholder token id, from the model's config.
        config: limits.
        context: most tokens that the model can take.
    """

    def __init__(self, processor: Any, placeholders: Mapping[str, int], config: PrefillConfig, context: int) -> None:
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.placeholders = dict(placeholders)
        self.config, self.context = config, context
        self._fetcher = Fetcher(config.media)

    def prepare(self, request: Request) -> Prepared:
        """Decode the media, render the prompt and run the processor.

        Raises:
            RequestError: naming the request and the item.
        """
        started = time.perf_counter()
        messages = self._messages(request)
        media = _Media(self, request, messages)
        if request.input_ids is not None:
            inputs = self._from_ids(request, media)
        else:
            text, inert = self._text(request, messages)
            self._check_markers(request, text, media)
            inputs = self._process(request, text, media, inert)
        prepared = Prepared(request, inputs, media.items, time.perf_counter() - started)
        self._check_length(prepared)
        return prepared

    # From a request to one string.

    def _messages(self, request: Request) -> Seq[Mapping[str, Any]] | None:
        """The request as chat messages whose contents are lists of parts; None for a prompt that is used as it stands."""
        if request.messages is not None:
            if request.images or request.videos:
                raise RequestError(f"request {request.id!r}: put pictures into the messages, not beside them")
            return [_checked_message(request.id, i, message) for i, message in enumerate(request.messages)]
        if not isinstance(request.prompt, str) or not self.has_template:
            return None
        parts = [{"type": "image", "image": source} for source in request.images]
        parts += [{"type": "video", "video": frames} for frames in request.videos]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": request.prompt}]}]

    def _text(self, request: Request, messages: Seq[Mapping[str, Any]] | None) -> tuple[str, _Inert]:
        """The prompt before placeholders are expanded, with the control tokens of user text hidden."""
        if isinstance(request.prompt, Rendered):
            return request.prompt.text, _Inert(self._controls, [])
        if messages is None:
            if request.messages is not None:
                raise AssertionError("messages are always rendered")
            inert = _Inert(self._controls, [str(request.prompt)])
            return inert.hide(str(request.prompt)), inert
        inert = _Inert(self._controls, [p["text"] for m in messages for p in m["content"] if p["type"] == "text"])
        hidden = [{**m, "content": [_without_source(p, inert) for p in m["content"]]} for m in messages]
        return self._render(request.id, hidden), inert

    @property
    def has_template(self) -> bool:
        """Whether the checkpoint brings a chat template."""
        return bool(getattr(self.processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None))

    def _render(self, name: str, messages: Seq[Mapping[str, Any]]) -> str:
        if not self.has_template:
            raise RequestError(
                f"request {name!r}: this checkpoint has no chat template (chat_template.jinja); pass a plain prompt with "
                "images=, or apply a template yourself and pass Rendered(text)"
            )
        renderer = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
        try:
            text: str = renderer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template raises whatever its author chose
            raise RequestError(f"request {name!r}: the checkpoint's chat template refused the messages: {error}") from error
        return text

    # Placeholders.

    @cached_property
    def markers(self) -> dict[str, str]:
        """Medium -> the string that stands for one item of it in a prompt that is not expanded yet."""
        return {medium: marker for medium in MEDIA if (marker := self._marker(medium))}

    def _marker(self, medium: str) -> str | None:
        names = ("boi_token", f"{medium}_token") if medium == "image" else (f"{medium}_token",)
        found = [t for n in names if isinstance(t := getattr(self.processor, n, None) or getattr(self.tokenizer, n, None), str)]
        if not self.has_template:
            return found[-1] if found else None
        message = {"role": "user", "content": [{"type": medium}, {"type": "text", "text": "x"}]}
        try:
            text = self._render("template probe", [message])
        except RequestError:
            return None
        return next((marker for marker in found if text.count(marker) == 1), found[-1] if found else None)

    def _check_markers(self, request: Request, text: str, media: _Media) -> None:
        for medium, given in (("image", len(media.images)), ("video", len(media.videos))):
            marker = self.markers.get(medium)
            if marker is None:
                if given:
                    raise PlaceholderError(f"request {request.id!r}: this model takes no {medium}s, {given} given")
                continue
            found = text.count(marker)
            implicit = found == 0 and not self.has_template  # PaliGemma: the processor adds them itself
            if found != given and not implicit:
                raise PlaceholderError(
                    f"request {request.id!r}: {found} {medium} placeholder(s) {marker!r} in the prompt, {given} {medium}(s) given"
                )

    # The processor.

    def _process(self, request: Request, text: str, media: _Media, inert: _Inert) -> dict[str, Any]:
        processor = self.processor
        if inert.used:
            processor = copy.copy(processor)
            processor.tokenizer = _InertTokenizer(self.tokenizer, self._renamed, inert)
        try:
            output = processor(text=[text], return_tensors="pt", **self._specials(text), **media.arguments())
        except (ValueError, TypeError, IndexError, RuntimeError, ZeroDivisionError) as error:
            raise RequestError(f"request {request.id!r}: the checkpoint's processor refused it: {error}") from error
        return {name: value for name, value in output.items() if hasattr(value, "shape")}

    def _specials(self, text: str) -> dict[str, bool]:
        """No second BOS behind one that a template wrote; as `ProcessorMixin.apply_chat_template` does."""
        bos = self.tokenizer.bos_token
        return {"add_special_tokens": False} if bos and text.startswith(bos) else {}

    def _from_ids(self, request: Request, media: _Media) -> dict[str, Any]:
        """Inputs for ids that are already expanded: pictures through the processor, type ids as it would set them."""
        import torch

        ids = torch.as_tensor(list(request.input_ids or ()), dtype=torch.long)[None]
        if ids.numel() == 0:
            raise RequestError(f"request {request.id!r}: input_ids is empty")
        size = len(self.tokenizer)
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise RequestError(f"request {request.id!r}: input_ids must lie in [0, {size}), got [{ids.min()}, {ids.max()}]")
        dummy = self.markers.get("image", "") * len(media.images) + self.markers.get("video", "") * len(media.videos)
        inputs = self._process(request, dummy + "x", media, _Inert(self._controls, []))
        for medium, token in self.placeholders.items():
            made, wanted = int((inputs["input_ids"] == token).sum()), int((ids == token).sum())
            if made != wanted:
                raise PlaceholderError(
                    f"request {request.id!r}: input_ids hold {wanted} {medium} placeholder tokens, its {medium}s need {made}"
                )
        for name in _TYPE_IDS:
            if name in inputs:
                inputs[name] = self._type_ids(ids, inputs["input_ids"], inputs[name])
        return {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _type_ids(self, ids: Any, example_ids: Any, example: Any) -> Any:
        """Type ids for `ids`, with the values that the processor gave to text and to each medium in its own output."""
        media = list(self.placeholders.values())
        is_text = ~sum((example_ids == token for token in media), example_ids != example_ids)
        types = ids.new_full(ids.shape, int(example[is_text][0]))
        for token in media:
            if (example_ids == token).any():
                types[ids == token] = example[example_ids == token][0]
        return types

    def _check_length(self, prepared: Prepared) -> None:
        total = len(prepared.input_ids)
        limit = min(self.context, self.config.max_tokens or self.context)
        if total <= limit:
            return
        rows = sum(int((prepared.input_ids == token).sum()) for token in self.placeholders.values())
        source = "the model's context" if limit == self.context else "PrefillConfig.max_tokens"
        raise PromptTooLongError(
            f"request {prepared.id!r}: {total} tokens ({total - rows} text, {rows} picture) are more than {source} of {limit}",
            text_tokens=total - rows,
            media_tokens=rows,
            limit=limit,
        )

    def load(self, request: Request, number: int, source: Any, what: str = "picture") -> Picture:
        """Decode one picture; errors name the request and the item."""
        return load_picture(source, self.config.media, item=f"request {request.id!r}, {what} {number}", fetcher=self._fetcher)

    # Inert text.

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        """Matches every string that the tokenizer, the template or the processor reads as control."""
        added = self.tokenizer.added_tokens_decoder.values()
        names = {token.content for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        names |= {str(self.tokenizer.convert_ids_to_tokens(token)) for token in self.placeholders.values()}
        names |= {value for key, value in vars(self.processor).items() if key.endswith("_token") and isinstance(value, str)}
        names |= set(_SCRATCH)
        return re.compile("|".join(re.escape(name) for name in sorted(names - {""}, key=len, reverse=True)))

    @cached_property
    def _renamed(self) -> _Renamed:
        return _Renamed(self.tokenizer, self._controls)


class _Media:
    """The decoded pictures and videos of one request, in order."""

    def __init__(self, intake: Intake, request: Request, messages: Seq[Mapping[str, Any]] | None) -> None:
        if messages is None:
            images, videos = list(request.images), list(request.videos)
        else:
            parts = [part for message in messages for part in message["content"]]
            images = [part["image"] for part in parts if part["type"] == "image"]
            videos = [part["video"] for part in parts if part["type"] == "video"]
        self.images = [intake.load(request, i + 1, source) for i, source in enumerate(images)]
        self.videos = [_video(intake, request, i + 1, frames) for i, frames in enumerate(videos)]

    @property
    def items(self) -> tuple[MediaItem, ...]:
        pictures = [MediaItem("image", p.digest, (p.height, p.width), source=p.source) for p in self.images]
        return (*pictures, *(_video_item(frames) for frames in self.videos))

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the processor."""
        arguments: dict[str, Any] = {}
        if self.images:
            arguments["images"] = [[picture.to_pil() for picture in self.images]]
        if self.videos:
            arguments["videos"] = [np.stack([frame.pixels for frame in frames]) for frames in self.videos]
            arguments["do_sample_frames"] = False
        return arguments


def _video(intake: Intake, request: Request, number: int, frames: Any) -> list[Picture]:
    if isinstance(frames, (str, bytes, Mapping)) or not hasattr(frames, "__len__") or len(frames) == 0:
        raise MediaError(f"request {request.id!r}, video {number}: a video is a non-empty list of frames")
    pictures = [intake.load(request, i + 1, frame, f"video {number} frame") for i, frame in enumerate(frames)]
    if len({(p.height, p.width) for p in pictures}) > 1:
        raise MediaError(f"request {request.id!r}, video {number}: its frames differ in size")
    return pictures


def _video_item(frames: Seq[Picture]) -> MediaItem:
    import hashlib

    digest = hashlib.blake2b(b"".join(frame.digest for frame in frames), digest_size=32).digest()
    return MediaItem("video", digest, (frames[0].height, frames[0].width), len(frames), frames[0].source)


def _checked_message(name: str, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"request {name!r}, message {index + 1}"
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
        raise RequestError(f"{where}: a message is a mapping with 'role' and 'content'")
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not re.fullmatch(r"[A-Za-z_]+", role):
        raise RequestError(f"{where}: role must be a plain word such as 'user', got {role!r}")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, (list, tuple)) or not content:
        raise RequestError(f"{where}: content must be a string or a non-empty list of parts, got {type(content).__name__}")
    return {"role": role, "content": [_checked_part(where, i, part) for i, part in enumerate(content)]}


def _checked_part(where: str, index: int, part: Any) -> dict[str, Any]:
    where = f"{where}, part {index + 1}"
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", *MEDIA):
        raise RequestError(f"{where}: a part has type 'text', 'image' or 'video', got {kind!r}")
    source = next((part[key] for key in (kind, "url", "path", "base64") if key in part), None)
    if source is None:
        raise RequestError(f"{where}: a part of type {kind!r} needs the key {kind!r}")
    if kind == "text" and not isinstance(source, str):
        raise RequestError(f"{where}: text must be a string, got {type(source).__name__}")
    return {"type": kind, kind: source}


def _without_source(part: Mapping[str, Any], inert: _Inert) -> dict[str, Any]:
    return {"type": "text", "text": inert.hide(part["text"])} if part["type"] == "text" else {"type": part["type"]}


class _Inert:
    """Private-use marks for the control tokens found in user text."""

    def __init__(self, controls: re.Pattern[str], texts: Seq[str]) -> None:
        self._controls = controls
        used = set().union(*map(set, texts)) if texts else set()
        free = [mark for mark in _PRIVATE if mark not in used]
        if len(free) < 4 and any(controls.search(text) for text in texts):
            raise RequestError("a prompt uses nearly every private-use character together with control tokens")
        self.marks = free[:4]
        self.hidden: list[str] = []

    @property
    def used(self) -> bool:
        """Whether anything was hidden."""
        return bool(self.hidden)

    def hide(self, text: str) -> str:
        """User text with each control token replaced by a mark."""
        return self._controls.sub(self._mark, text)

    def _mark(self, match: re.Match[str]) -> str:
        self.hidden.append(match.group())
        return f"{self.marks[0]}{len(self.hidden) - 1}{self.marks[1]}"

    def rename_live(self, text: str, names: Mapping[str, str]) -> str:
        """The expanded prompt with live control tokens under their secret names and hidden ones readable again."""
        live = self._controls.sub(lambda match: names.get(match.group(), match.group()), text)
        return re.sub(f"{self.marks[0]}(\\d+){self.marks[1]}", lambda match: self.hidden[int(match.group(1))], live)


class _Renamed:
    """A copy of a fast tokenizer whose control tokens have unguessable names, ids unchanged."""

    def __init__(self, tokenizer: Any, controls: re.Pattern[str]) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError("this checkpoint's tokenizer cannot keep control tokens in user text apart; pass Rendered(text)")
        import secrets

        nonce = secrets.token_hex(8)
        spec = json.loads(backend.to_str())
        self.names: dict[str, str] = {}
        for token in spec["added_tokens"]:
            if controls.fullmatch(token["content"]):
                self.names[token["content"]] = f"\U000f0000{nonce}-{token['id']}\U000f0001"
        for token in spec["added_tokens"]:
            token["content"] = self.names.get(token["content"], token["content"])
        _rename_vocabulary(spec["model"], self.names)
        self.tokenizer = copy.deepcopy(tokenizer)
        self.tokenizer._tokenizer = Tokenizer.from_str(json.dumps(spec))


def _rename_vocabulary(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Tokens that are also part of the base vocabulary keep their ids only if they are renamed there too."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): index for token, index in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]


class _InertTokenizer:
    """Stands in for the processor's tokenizer during one call."""

    def __init__(self, tokenizer: Any, renamed: _Renamed, inert: _Inert) -> None:
        self._tokenizer, self._renamed, self._inert = tokenizer, renamed, inert

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        texts = [text] if isinstance(text, str) else list(text)
        renamed = [self._inert.rename_live(each, self._renamed.names) for each in texts]
        return self._renamed.tokenizer(renamed[0] if isinstance(text, str) else renamed, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

