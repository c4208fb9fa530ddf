"""The records that flow from intake to result.

Shape legend, used in names and comments throughout:
    T  tokens of one sequence            N  tokens of one packed step
    D  hidden size of the decoder        P  rows of positions (1, or 3/4 under M-RoPE)
    H  attention heads  G  K/V heads     W  width of one head        V  vocabulary
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


_ids = itertools.count(1)


@dataclass(frozen=True)
class Rendered:
    """A prompt that already went through a chat template: control and placeholder tokens in it are live."""

    text: str


@dataclass(frozen=True)
class Request:
    """One prompt with its pictures, and what is wanted from it.

    Exactly one of `prompt`, `messages` and `input_ids` is given.

    Attributes:
        prompt: a `str` is one user turn after `images`, and inert (a control token in it stays text);
            `Rendered` is used as it stands, its placeholders taking `images` in order.
        messages: chat messages, `{"role": ..., "content": str | [parts]}` with parts `{"type": "text", "text": ...}`,
            `{"type": "image", "image": source}` and `{"type": "video", "video": [frame sources]}`.
        input_ids: token ids with every placeholder already expanded.
        images: picture sources, whatever `mmprefill.media.load_picture` takes.
        videos: one list of frame sources per video.
        id: names the request in errors and results; made up if not given.
        hidden_states: layers whose hidden states are wanted, numbered as transformers' `output_hidden_states`
            (0: embeddings, -1: after the last norm).
        all_logits: logits of every position instead of the last one only.
        priority: higher runs first, under the policy "priority".
        deadline: seconds after which it fails with `DeadlineError`, whatever stage it is in.
        reuse: whether KV of earlier prompts may be used for it, and its own for later ones.
        salt: keeps its KV and pictures apart from those of requests with another salt (a tenant's name, say).
        chunk_tokens: most tokens of it in one step; None leaves it to `PrefillConfig`, whose own bound holds too.
    """

    prompt: str | Rendered | None = None
    messages: Seq[Mapping[str, Any]] | None = None
    input_ids: Seq[int] | None = None
    images: Seq[Any] = ()
    videos: Seq[Seq[Any]] = ()
    id: str = ""
    hidden_states: tuple[int, ...] = ()
    all_logits: bool = False
    priority: int = 0
    deadline: float | None = None
    reuse: bool = True
    salt: str = ""
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("prompt", "messages", "input_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a request takes exactly one of prompt, messages and input_ids; got {given or 'none'}")
        if self.id is None or self.id == "":
            object.__setattr__(self, "id", f"request-{next(_ids)}")
        if isinstance(self.id, Integral) and not isinstance(self.id, bool):  # as tables have them
            object.__setattr__(self, "id", str(self.id))
        if not isinstance(self.id, str):
            raise ValueError(f"a request's id must be text, got {self.id!r}")
        if not isinstance(self.priority, Integral):
            raise ValueError(f"request {self.id!r}: priority must be an integer, got {self.priority!r}")
        if self.deadline is not None and not (isinstance(self.deadline, Real) and self.deadline == self.deadline):
            raise ValueError(f"request {self.id!r}: deadline must be seconds or None, got {self.deadline!r}")
        if not isinstance(self.salt, str):
            raise ValueError(f"request {self.id!r}: salt must be a string, got {type(self.salt).__name__}")
        try:
            self.salt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"request {self.id!r}: salt must be text, got {self.salt!r}: {error.reason}") from error
        chunk = self.chunk_tokens
        if chunk is not None and not (isinstance(chunk, Integral) and chunk > 0):
            raise ValueError(f"request {self.id!r}: chunk_tokens must be a positive integer or None, got {chunk!r}")
        layers = self.hidden_states
        if not isinstance(layers, Iterable) or not all(isinstance(layer, Integral) for layer in layers):
            raise ValueError(f"request {self.id!r}: hidden_states must be layer numbers, as (-1,), got {layers!r}")
        object.__setattr__(self, "hidden_states", tuple(layers))


@dataclass(frozen=True)
class MediaItem:
    """One picture or video of a request, as the model will see it."""

    medium: str  # "image" or "video"
    digest: bytes  # of the decoded pixels
    size: tuple[int, int]  # height, width of the decoded picture
    frames: int = 1
    source: str = ""
    runs: tuple[tuple[int, int], ...] = ()  # [start, end) of its placeholder tokens; empty where that cannot be known


@dataclass(frozen=True)
class Prepared:
    """A request after intake: everything that needs no model, in host memory.

    Attributes:
        inputs: what the processor returned, every tensor with a leading batch axis of 1 where it has one.
        media: pictures, then videos, each in the order of their placeholders.
        seconds: time that intake took.
    """

    request: Request
    inputs: dict[str, torch.Tensor]
    media: tuple[MediaItem, ...]
    seconds: float = 0.0

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def input_ids(self) -> torch.Tensor:
        """Token ids [T], placeholders expanded."""
        return self.inputs["input_ids"][0]


MaskFunction = Callable[[Any, Any, Any, Any], "torch.Tensor"]


@dataclass(frozen=True)
class Sequence:
    """A request as the decoder would receive it, alone.

    Attributes:
        embeds: [1, T, D].
        positions: [P, 1, T] or [1, T], int64.
        places: the same as [P, T] in host memory, from the first step that has ended on.
        extras: further decoder arguments (deepstack, per-layer inputs), as the composite model made them.
        rules: attention masks that are not plain causal, by layer kind ("" for all layers), as transformers mask functions.
        edges: bool [T + 1]; edges[i] is true where a chunk may end before token i (host memory).
    """

    prepared: Prepared
    embeds: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    extras: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, MaskFunction] = field(default_factory=dict)
    edges: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens in the sequence."""
        return int(self.embeds.shape[1])

    def legal_end(self, start: int, end: int) -> int:
        """Where a chunk from `start` that wants to end at `end` may end: there or before, else at the next legal place."""
        if self.edges is None or self.edges[end]:
            return end
        before = self.edges[start + 1 : end].nonzero()
        if len(before):
            return start + 1 + int(before[-1])
        return end + 1 + int(self.edges[end + 1 :].nonzero()[0])

    def legal_start(self, tokens: int) -> int:
        """The most leading tokens, up to `tokens`, that may come from elsewhere: no span is cut."""
        return tokens if self.edges is None else int(self.edges[: tokens + 1].nonzero()[-1])


@dataclass(frozen=True)
class Reuse:
    """What a request did not have to compute.

    Attributes:
        tokens: prompt tokens whose KV came from an earlier prompt.
        pictures: pictures and videos whose encoder output was there or on its way.
        why: where the tokens came from or, if none, why not.
    """

    tokens: int = 0
    pictures: int = 0
    why: str = ""


@dataclass(frozen=True)
class Choice:
    """One candidate continuation and its log-probability.

    Attributes:
        text: the choice as given.
        token_ids: its tokens.
        token_logprobs: natural-log probability of each token given the prompt and the tokens before it.
    """

    text: str
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]

    @property
    def logprob(self) -> float:
        """Log-probability of the whole choice."""
        return sum(self.token_logprobs)


@dataclass(frozen=True)
class Generation:
    """Newly generated tokens (without the prompt) and their text (special tokens removed)."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Token:
    """One candidate for the next token."""

    id: int
    text: str
    logprob: float


def as_request(prompt: Any, **fields: Any) -> Request:
    """A `Request` from what callers pass: itself, a string, `Rendered`, chat messages, token ids or a mapping of fields.

    Raises:
        ValueError: for anything else, and for fields that a request does not have.
    """
    if isinstance(prompt, Request):
        if fields:
            raise ValueError(f"a Request is complete; {sorted(fields)} cannot be added to it")
        return prompt
    if isinstance(prompt, Mapping):
        fields = {**prompt, **fields}
    elif isinstance(prompt, (str, Rendered)):
        fields["prompt"] = prompt
    elif isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, bytearray)):
        items = list(prompt)
        fields["messages" if items and isinstance(items[0], Mapping) else "input_ids"] = items
    else:
        raise ValueError(
            f"a request is a string, Rendered(text), chat messages, token ids, a mapping of fields or a Request; "
            f"got {type(prompt).__name__}"
        )
    unknown = sorted(map(str, set(fields) - set(Request.__dataclass_fields__)))
    if unknown:
        known = ", ".join(Request.__dataclass_fields__)
        raise ValueError(f"a request has no {', '.join(unknown)}; its fields are {known}")
    return Request(**fields)
