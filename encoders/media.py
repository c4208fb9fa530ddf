"""The decoded pictures and videos of one request, and how its processor takes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmprefill.config import MediaLimits
from mmprefill.errors import MediaError
from mmprefill.fetch import Fetcher
from mmprefill.media import Picture, load_picture
from mmprefill.types import MediaItem

FRAME_RATE = 24.0  # what transformers' processors assume of frames without a rate, with a warning each


@dataclass(frozen=True)
class RequestMedia:
    """Pictures and videos (lists of frames) in the order of their placeholders."""

    request: str
    images: Seq[Picture]
    videos: Seq[Seq[Picture]]

    @classmethod
    def load(cls, request: str, sources: Mapping[str, Seq[Any]], limits: MediaLimits, fetcher: Fetcher) -> RequestMedia:
        """Decode everything; errors name the request and the item."""

        def picture(source: Any, item: str) -> Picture:
            return load_picture(source, limits, item=f"request {request!r}, {item}", fetcher=fetcher)

        def video(frames: Any, item: str) -> list[Picture]:
            if not isinstance(frames, (list, tuple, np.ndarray)) or len(frames) == 0:
                raise MediaError(f"request {request!r}, {item}: a video is a non-empty list of frames")
            pictures = [picture(frame, f"{item}, frame {i + 1}") for i, frame in enumerate(frames)]
            if len({(p.height, p.width) for p in pictures}) > 1:
                raise MediaError(f"request {request!r}, {item}: its frames differ in size")
            return pictures

        images = [picture(source, f"picture {i + 1}") for i, source in enumerate(sources["image"])]
        return cls(request, images, [video(frames, f"video {i + 1}") for i, frames in enumerate(sources["video"])])

    def items(self, runs: Mapping[str, Seq[tuple[tuple[int, int], ...]]]) -> tuple[MediaItem, ...]:
        """What results say about the media: pictures, then videos; `runs` are their placeholders where known."""
        pictures = [MediaItem("image", p.digest, (p.height, p.width), 1, p.source) for p in self.images]
        items = {"image": pictures, "video": [_video_item(frames) for frames in self.videos]}
        return tuple(
            MediaItem(item.medium, item.digest, item.size, item.frames, item.source, run)
            for medium, each in items.items()
            for item, run in zip(each, runs.get(medium) or [()] * len(each), strict=True)
        )

    def arguments(self, processor: Any, tensors: str | None = "pt") -> dict[str, Any]:
        """Keyword arguments for the processor: its defaults, said aloud where it would warn about them."""
        arguments: dict[str, Any] = {}
        if self.images:
            arguments |= {"images": [[p.to_pil() for p in self.images]], "images_kwargs": {"return_tensors": tensors}}
        if self.videos:
            options: dict[str, Any] = {
                "do_sample_frames": False,
                "input_data_format": "channels_last",
                "return_tensors": tensors,
                "video_metadata": [_metadata(frames) for frames in self.videos],
            }
            if getattr(processor.video_processor, "cap_pixels_per_frame", True) is None:
                options["cap_pixels_per_frame"] = False
            arguments |= {"videos": [np.stack([p.pixels for p in f]) for f in self.videos], "videos_kwargs": options}
        return arguments

    def blame(self, processor: Any, error: Exception) -> None:
        """Raise for the picture that the processor refuses on its own; return if there is none."""
        for i, picture in enumerate(self.images):
            try:
                processor.image_processor([picture.to_pil()], return_tensors="pt")
            except Exception as refusal:  # whatever it was, it is this picture's
                raise MediaError(
                    f"request {self.request!r}, picture {i + 1} ({picture.width} x {picture.height}): "
                    f"the checkpoint's image processor refused it: {refusal}"
                ) from error


def join_tiles(output: Any) -> None:
    """Put pictures of unlike numbers of tiles into one row of tiles, which PerceptionLM's processor cannot do itself.

    Its tower flattens [pictures, tiles, 3, H, W] to tiles, so [1, all tiles, 3, H, W] is the same to it. Only for
    processors that say nothing else about a picture; rows are counted later, per medium.
    """
    names = {"pixel_values", "pixel_values_videos"} & set(output)
    if {name for name in output if not name.endswith(("_ids", "_mask", "_offsets"))} != names:
        return
    for name in names:
        parts = [torch.as_tensor(part) for part in output[name]]
        if all(part.dim() == 4 and part.shape[1:] == parts[0].shape[1:] for part in parts):
            output[name] = torch.cat(parts)[None]


def _metadata(frames: Seq[Picture]) -> dict[str, Any]:
    count = len(frames)
    return {
        "total_num_frames": count,
        "fps": FRAME_RATE,
        "frames_indices": list(range(count)),
        "height": frames[0].height,
        "width": frames[0].width,
    }


def _video_item(frames: Seq[Picture]) -> MediaItem:
    digest = hashlib.blake2b(b"".join(frame.digest for frame in frames), digest_size=32).digest()
    return MediaItem("video", digest, (frames[0].height, frames[0].width), len(frames), frames[0].source)
