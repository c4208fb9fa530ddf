"""Requests -> token ids and processor tensors, on the host: chat template, placeholders, inert user text.

The checkpoint's own processor does the work, with its defaults untouched, on decoded RGB. What is added here is
provenance (`mmprefill.encoders.inert`), counts per medium before anything is computed, and where each medium's
placeholders ended up.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

import torch

from mmprefill.config import PrefillConfig
from mmprefill.encoders import pixels
from mmprefill.encoders.families import MEDIA
from mmprefill.encoders.inert import Controls, Inert, RenamedTokenizer
from mmprefill.encoders.media import RequestMedia, join_tiles
from mmprefill.encoders.messages import Message, check_text, checked, parts_of, user_turn
from mmprefill.encoders.template import Template
from mmprefill.errors import MediaLimitError, PlaceholderError, PromptTooLongError, RequestError
from mmprefill.fetch import Fetcher
from mmprefill.types import Prepared, Rendered, Request

Sources = Mapping[str, Seq[Any]]  # medium -> its items, in order

_TYPE_IDS = ("mm_token_type_ids", "token_type_ids")
_NO_SPECIALS = {"add_special_tokens": False}
# What third-party processors and templates raise on input that they cannot take.
_REFUSALS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)


class Intake:
    """Everything that a request needs before a model sees it. Safe to call from several threads.

    Args:
        processor: the checkpoint's processor.
        placeholders: medium -> placeholder token id, from the model's config.
        config: limits.
        context: most tokens that the model can take.
    """

    def __init__(self, processor: Any, placeholders: Mapping[str, int], config: PrefillConfig, context: int) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.template = Template(processor)
        self.placeholders = dict(placeholders)
        self.config, self.context = config, context
        self._fetcher = Fetcher(config.media)
        self._lock = threading.RLock()  # a fast tokenizer raises "Already borrowed" when two threads set it up

    def prepare(self, request: Request) -> Prepared:
        """Decode the media, render the prompt and run the processor.

        Raises:
            RequestError: naming the request and the item.
        """
        started = time.perf_counter()
        _check_types(request)
        messages = self._messages(request)
        sources = _sources(request, messages)
        ids = None if request.input_ids is None else self._checked_ids(request)
        if ids is None:
            text, inert = self._text(request, messages, sources)
            self._check_counts(request, text, sources)
        else:  # the processor sees the media alone
            text, inert = self._media_in_front(request, sources) + "x", None
        media = RequestMedia.load(request.id, sources, self.config.media, self._fetcher)
        inputs, counts = self._process(request, text, media, inert)
        if ids is not None:
            inputs = self._with_ids(request, inputs, ids)
        prepared = Prepared(request, inputs, media.items(self._runs(inputs, counts)), time.perf_counter() - started)
        self._check_length(prepared)
        return prepared

    # From a request to one string.

    def _messages(self, request: Request) -> tuple[Message, ...]:
        """The request as messages; none for a prompt that is used as it stands."""
        if request.messages is not None:
            return checked(request)
        return user_turn(request) if isinstance(request.prompt, str) and self.has_template else ()

    def _text(
        self, request: Request, messages: Seq[Message], sources: Mapping[str, Seq[Any]]
    ) -> tuple[str, Inert | None]:
        """The prompt before placeholders are expanded, with the control tokens of user text hidden."""
        if isinstance(request.prompt, Rendered):
            return request.prompt.text, None
        if messages:
            inert = Inert(self.controls, parts_of(messages, "text"))
            return self.template.render(request.id, messages, inert), inert
        prompt = str(request.prompt)
        inert = Inert(self.controls, [prompt])
        return self._media_in_front(request, sources) + inert.hide(prompt), inert  # as PaliGemma was trained

    @property
    def has_template(self) -> bool:
        """Whether the checkpoint brings a chat template."""
        return bool(self.template)

    @property
    def markers(self) -> dict[str, str]:
        """Medium -> the string that stands for one item of it in a prompt that is not expanded yet."""
        return self.template.markers

    def _media_in_front(self, request: Request, sources: Sources) -> str:
        for medium, items in sources.items():
            self._check_taken(request, medium, items)
        return "".join(self.markers.get(medium, "") * len(items) for medium, items in sources.items())

    def _check_taken(self, request: Request, medium: str, items: Seq[Any]) -> None:
        if items and medium not in self.markers:
            raise PlaceholderError(f"request {request.id!r}: this model takes no {medium}s, {len(items)} given")

    def _check_counts(self, request: Request, text: str, sources: Sources) -> None:
        for medium, items in sources.items():
            self._check_taken(request, medium, items)
            marker = self.markers.get(medium)
            found = text.count(marker) if marker else 0
            if found != len(items):
                raise PlaceholderError(
                    f"request {request.id!r}: {found} {medium} placeholder(s) {marker!r} in the prompt, "
                    f"{len(items)} {medium}(s) given"
                )

    def _runs(self, inputs: Mapping[str, Any], counts: Seq[tuple[str, int]] | None) -> dict[str, list[Any]]:
        """Medium -> runs of placeholder tokens per item, from how many each got in the order of the prompt."""
        if not counts:
            return {}
        ids = inputs["input_ids"][0]
        places = torch.isin(ids, torch.tensor(list(self.placeholders.values()))).nonzero()[:, 0].tolist()
        if sum(count for _, count in counts) != len(places):
            return {}
        runs: dict[str, list[Any]] = {medium: [] for medium in MEDIA}
        start = 0
        for medium, count in counts:
            runs[medium].append(tuple(_consecutive(places[start : start + count])))
            start += count
        return runs

    # The processor.

    def _process(
        self, request: Request, text: str, media: RequestMedia, inert: Inert | None
    ) -> tuple[dict[str, Any], list[tuple[str, int]] | None]:
        """The processor's tensors, and the number of placeholder tokens of each item in the order of the prompt."""
        try:
            output = self._output(text, media, inert)
            replaced = output.pop("text_replacement_offsets", None)
            output.pop("labels", None)
            output.convert_to_tensors("pt", skip_tensor_conversion=["video_metadata"])
        except RequestError:
            raise
        except _REFUSALS as error:
            media.blame(self.processor, error)
            if not (media.images or media.videos) and "images" in str(error):  # PaliGemma
                raise RequestError(
                    f"request {request.id!r}: this model takes no prompt without a picture; give one in images"
                ) from error
            raise RequestError(f"request {request.id!r}: the checkpoint's processor refused it: {error}") from error
        inputs = {name: value for name, value in output.items() if hasattr(value, "shape")}
        if inputs["input_ids"].numel() == 0:
            raise RequestError(f"request {request.id!r}: the prompt is empty")
        return inputs, self._counts(replaced)

    def _output(self, text: str, media: RequestMedia, inert: Inert | None) -> Any:
        try:
            return self._call(text, media, inert, "pt")
        except ValueError:
            if max(len(media.images), len(media.videos)) < 2:
                raise
        output = self._call(text, media, inert, None)  # perhaps it was only that their shapes differ
        join_tiles(output)
        return output

    def _call(self, text: str, media: RequestMedia, inert: Inert | None, tensors: str | None) -> Any:
        processor = copy.copy(self.processor)
        processor.tokenizer = _LockedTokenizer(self, inert)
        arguments = media.arguments(self.processor, tensors)
        if media.images:
            pixels.mark(arguments["images"][0], [picture.digest for picture in media.images])
        bos = self.tokenizer.bos_token  # no second one behind that of a template, as in apply_chat_template
        options = _NO_SPECIALS if bos and text.startswith(bos) else {}
        return processor(
            text=[text],
            text_kwargs={**options, "padding": False, "truncation": False, "verbose": False},
            return_text_replacement_offsets=True,
            **arguments,
        )

    def _counts(self, replaced: Any) -> list[tuple[str, int]] | None:
        if replaced is None:
            return None
        names = [self.tokenizer.convert_ids_to_tokens(token) for token in self.placeholders.values()]
        entries = replaced[0] if replaced else []
        return [(entry["type"], sum(entry["replacement"].count(name) for name in names)) for entry in entries]

    # Token ids.

    def _checked_ids(self, request: Request) -> torch.Tensor:
        try:
            ids = torch.as_tensor(list(() if request.input_ids is None else request.input_ids))
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestError(f"request {request.id!r}: input_ids must be a flat list of integers: {error}") from error
        if ids.dim() != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
            raise RequestError(f"request {request.id!r}: input_ids must be a flat, non-empty list of integers")
        size = len(self.tokenizer)
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise RequestError(
                f"request {request.id!r}: input_ids must lie in [0, {size}), got [{ids.min()}, {ids.max()}]"
            )
        return ids[None].long()

    def _with_ids(self, request: Request, inputs: Mapping[str, Any], ids: torch.Tensor) -> dict[str, Any]:
        """Ids that are already expanded, with the media of `inputs` and type ids as the processor would set them."""
        made = inputs["input_ids"]
        for medium, token in self.placeholders.items():
            wanted, found = int((made == token).sum()), int((ids == token).sum())
            if wanted != found:
                raise PlaceholderError(
                    f"request {request.id!r}: input_ids hold {found} {medium} placeholder tokens, "
                    f"the {medium}s given take {wanted}"
                )
        types = {name: self._type_ids(ids, made, inputs[name]) for name in _TYPE_IDS if name in inputs}
        return {**inputs, **types, "input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _type_ids(self, ids: torch.Tensor, example: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        """By the processor's own function if that made the example, else one value for text and one for each medium."""
        try:
            if self.processor.create_mm_token_type_ids(example.tolist()) == types.tolist():
                return torch.tensor(self.processor.create_mm_token_type_ids(ids.tolist()))
        except _REFUSALS:  # some take more arguments
            pass
        result = torch.full_like(ids, int(types[0, -1]))
        for token in self.placeholders.values():
            if (example == token).any():
                result[ids == token] = types[example == token][0]
        return result

    def _check_length(self, prepared: Prepared) -> None:
        most = self.config.max_picture_tokens
        for number, item in enumerate(prepared.media, 1):
            if (rows := sum(end - start for start, end in item.runs)) > most:
                raise MediaLimitError(
                    f"request {prepared.id!r}, medium {number} ({item.medium}, {item.size[1]} x {item.size[0]}): takes "
                    f"{rows} tokens, more than PrefillConfig.max_picture_tokens of {most}"
                )
        total = len(prepared.input_ids)
        limit = min(self.context, self.config.max_tokens or self.context)
        if total <= limit:
            return
        rows = sum(int((prepared.input_ids == token).sum()) for token in self.placeholders.values())
        source = "PrefillConfig.max_tokens" if limit == self.config.max_tokens else "the model's context"
        split = f"{total} tokens ({total - rows} text, {rows} picture)"
        raise PromptTooLongError(
            f"request {prepared.id!r}: {split} are more than {source} of {limit}",
            text_tokens=total - rows,
            media_tokens=rows,
            limit=limit,
        )

    # Inert text.

    @cached_property
    def controls(self) -> Controls:
        """Special tokens, placeholders, and whatever else marks turns in the template."""
        added = self.tokenizer.added_tokens_decoder.values()
        names = {token.content for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        names |= {str(self.tokenizer.convert_ids_to_tokens(token)) for token in self.placeholders.values()}
        names |= {
            value for key, value in vars(self.processor).items() if key.endswith("_token") and isinstance(value, str)
        }
        frame = self.template.frame
        return Controls(names | {t.content for t in added if t.content in frame and not t.content.isspace()})

    @cached_property
    def renamed(self) -> RenamedTokenizer:
        """Made when the first prompt needs it."""
        return RenamedTokenizer(self.tokenizer, self.controls)

    def tokenize(self, text: Any, inert: Inert | None, **kwargs: Any) -> Any:
        """What the processor gets from its tokenizer."""
        with self._lock:
            if inert is None or not inert.used:
                return self.tokenizer(text, **kwargs)
            return self.renamed(text, inert, **kwargs)


class _LockedTokenizer:
    """Stands in for the processor's tokenizer during one call."""

    def __init__(self, intake: Intake, inert: Inert | None) -> None:
        self._intake, self._inert = intake, inert

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        return self._intake.tokenize(text, self._inert, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._intake.tokenizer, name)


def _check_types(request: Request) -> None:
    name = f"request {request.id!r}"
    if request.prompt is not None and not isinstance(request.prompt, (str, Rendered)):
        raise RequestError(f"{name}: prompt must be a string or Rendered(text), got {type(request.prompt).__name__}")
    if isinstance(request.prompt, Rendered) and not isinstance(request.prompt.text, str):
        raise RequestError(f"{name}: Rendered takes a string, got {type(request.prompt.text).__name__}")
    if request.prompt is not None:
        check_text(f"{name}, prompt", request.prompt if isinstance(request.prompt, str) else request.prompt.text)
    for field in ("images", "videos"):
        if not isinstance(getattr(request, field), (list, tuple)):
            raise RequestError(f"{name}: {field} must be a list, got {type(getattr(request, field)).__name__}")


def _sources(request: Request, messages: Seq[Message]) -> Sources:
    if messages:
        return {medium: list(parts_of(messages, medium)) for medium in MEDIA}
    return {"image": list(request.images), "video": list(request.videos)}


def _consecutive(places: list[int]) -> Iterator[tuple[int, int]]:
    """[start, end) of each run of consecutive numbers: 2 3 4 7 -> (2, 5), (7, 8)."""
    starts = [i for k, i in enumerate(places) if k == 0 or places[k - 1] != i - 1]
    ends = [i + 1 for k, i in enumerate(places) if k == len(places) - 1 or places[k + 1] != i + 1]
    return zip(starts, ends, strict=True)
