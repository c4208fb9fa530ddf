"""Settings, frozen; a contradiction is a ValueError when it is written, not when it bites."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

POLICIES = ("text_first", "first_come", "shortest", "priority")


def _check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value <= 0:
            raise ValueError(f"{type(owner).__name__}.{name} must be positive, got {value!r}")


@dataclass(frozen=True)
class MediaLimits:
    """What media intake accepts.

    Attributes:
        max_pixels: most pixels in one picture, checked from its header before any decode.
        max_side: longest side in pixels.
        max_bytes: most encoded bytes of one picture, from a file, memory or the network.
        max_frames: most frames or pages in one file (only the first is used).
        background: RGB colour under transparent pixels.
        allowed_roots: folders that files may come from; None allows any regular file.
        allow_urls: whether http(s) URLs are fetched at all.
        allowed_hosts: host names that URLs may name (also after a redirect); "*.example.org" covers subdomains.
        url_timeout: seconds for one fetch, redirects included.
        url_rate: fetches per second and host.
        max_redirects: redirects followed per fetch, each checked like the first URL.
    """

    max_pixels: int = 64_000_000
    max_side: int = 32_768
    max_bytes: int = 64 * 2**20
    max_frames: int = 1_000
    background: tuple[int, int, int] = (255, 255, 255)
    allowed_roots: tuple[Path, ...] | None = None
    allow_urls: bool = False
    allowed_hosts: tuple[str, ...] = ()
    url_timeout: float = 10.0
    url_rate: float = 8.0
    max_redirects: int = 3

    def __post_init__(self) -> None:
        _check_positive(self, "max_pixels", "max_side", "max_bytes", "max_frames", "url_timeout", "url_rate")
        if self.max_redirects < 0:
            raise ValueError(f"MediaLimits.max_redirects must not be negative, got {self.max_redirects!r}")
        if len(self.background) != 3 or not all(0 <= c <= 255 for c in self.background):
            raise ValueError(f"MediaLimits.background must be three values of 0..255, got {self.background!r}")
        if self.allow_urls and not self.allowed_hosts:
            raise ValueError("MediaLimits.allow_urls needs allowed_hosts: list the hosts that may be fetched from")
        if self.allowed_hosts and not self.allow_urls:
            raise ValueError("MediaLimits.allowed_hosts has no effect without allow_urls=True")


@dataclass(frozen=True)
class PrefillConfig:
    """How the engine runs.

    Attributes:
        media: limits of media intake.
        policy: who runs first: "text_first" (text before pictures, with ageing), "first_come", "shortest" (least work
            left, with ageing) or "priority" (`Request.priority`).
        ageing: under "text_first" a request with pictures goes after the texts that come up to so many seconds later.
        step_tokens: most tokens in one packed prefill step; a longer chunk still runs, alone. None takes
            what is fast by the measurements of `mmprefill plan` on this machine, or 1024 where it never ran; where memory
            is short, pass the smaller one that it prints.
        chunk_tokens: most tokens of one request in a step; None for no bound but the step's.
        early_tokens: a text of at least this many tokens before the first picture starts while pictures are encoded.
        vision_patches: most patches in one vision micro-batch; a larger picture still runs, alone. None chooses by
            device: 1024 where texts wait until a tower call ends (a CPU), else 4096.
        intake_threads: host threads that decode, resize and tokenise.
        max_waiting: requests admitted at once; further ones wait at the door.
        admission_rate: requests admitted per second; None for no bound.
        encoder_bytes: encoder outputs kept for pictures that come back; 0 keeps none. None chooses by model: a twelfth of
            its weights, at least 32 and at most 256 MiB.
        prefix_bytes: KV and logits kept for prompts that share a beginning; 0 keeps none. None chooses likewise, at most
            512 MiB.
        max_tokens: most prompt tokens of one request; None takes the model's context.
        max_picture_tokens: most of them that one picture or video may take.
        pack_weights: on a CPU, large linear layers are computed the fastest way there is (`pipeline/linear.py`), which may
            keep their weights in oneDNN's layout in place of the plain ones, and RMS norms run in one pass. The model is
            the bundle's: engines that share it share this.
    """

    media: MediaLimits = field(default_factory=MediaLimits)
    policy: str = "text_first"
    ageing: float = 10.0
    step_tokens: int | None = None
    chunk_tokens: int | None = None
    early_tokens: int = 128
    vision_patches: int | None = None
    intake_threads: int = 2
    max_waiting: int = 256
    admission_rate: float | None = None
    encoder_bytes: int | None = None
    prefix_bytes: int | None = None
    max_tokens: int | None = None
    max_picture_tokens: int = 16_384
    pack_weights: bool = True

    def __post_init__(self) -> None:
        _check_positive(self, "early_tokens", "intake_threads", "max_waiting", "ageing", "max_picture_tokens")
        _check_positive(
            self,
            *(
                name
                for name in ("step_tokens", "chunk_tokens", "vision_patches", "admission_rate", "max_tokens")
                if getattr(self, name) is not None
            ),
        )
        if self.policy not in POLICIES:
            raise ValueError(f"PrefillConfig.policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        for name in ("encoder_bytes", "prefix_bytes"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"PrefillConfig.{name} must not be negative, got {getattr(self, name)!r}")
