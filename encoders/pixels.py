"""Pictures that are shown by several requests at the same time go through the image processor once.

Nothing is kept for later: a tensor is shared for as long as somebody else holds it. (What a tower made of it outlives
it, in `mmprefill.encoders.cache`.)
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from PIL import Image

_MARK = "_mmprefill_digest"  # attribute of an image


class SharedPixels:
    """Stands in for a checkpoint's image processor, with its attributes. Safe to call from several threads.

    What it returns belongs to others too: tensors are read, never written. Settings stay as they are, since pictures that
    were encoded with them are kept; a copy is one of the checkpoint's own, whose settings are the caller's.
    """

    _processor: Any
    _outputs: dict[bytes, _Output]

    def __init__(self, image_processor: Any) -> None:
        vars(self).update(_processor=image_processor, _outputs={})

    def __getattr__(self, name: str) -> Any:
        if "_processor" not in self.__dict__:  # one that is being unpickled
            raise AttributeError(name)
        return getattr(self._processor, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"the image processor of an engine keeps its settings; give {name} to from_pretrained, in processor_kwargs, "
            "or set it on a copy"
        )

    def __copy__(self) -> Any:
        return copy.copy(self._processor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._processor, memo)

    def __call__(self, images: Any, **kwargs: Any) -> Any:
        """As the image processor's own, for the same pictures in the same order with the same arguments."""
        key = _key(images, kwargs)
        earlier = self._outputs.get(key) if key else None
        output = earlier.again() if earlier else None
        if output is None:
            output = self._processor(images, **kwargs)
            if key and _sharable(output):
                self._outputs[key] = _Output(output, lambda _: self._outputs.pop(key, None))
        return output


class _Output:
    """A processor's output without its tensors, which others hold."""

    def __init__(self, output: Any, gone: Any) -> None:
        self._frame = copy.copy(output)
        self._frame.data = {name: value for name, value in output.items() if not isinstance(value, torch.Tensor)}
        self._tensors = {name: weakref.ref(value, gone) for name, value in output.items() if name not in self._frame}

    def again(self) -> Any | None:
        """The same output, or None if a tensor of it is gone."""
        tensors = {name: reference() for name, reference in self._tensors.items()}
        if any(tensor is None for tensor in tensors.values()):
            return None
        output = copy.copy(self._frame)
        output.data = {**copy.deepcopy(self._frame.data), **tensors}
        return output


def shared(processor: Any) -> Any:
    """The checkpoint's processor, with pictures shared; the one that is given stays as it is."""
    if not hasattr(processor, "image_processor"):
        return processor
    processor = copy.copy(processor)
    processor.image_processor = SharedPixels(processor.image_processor)
    return processor


def mark(images: Seq[Image.Image], digests: Seq[bytes]) -> None:
    """Say what images hold, by the digests of the pictures that they were just made of, so that they are not hashed again.

    Nobody may write to them any more. Whatever Pillow makes of them bears no mark.
    """
    for image, digest in zip(images, digests, strict=True):
        setattr(image, _MARK, digest)


def _key(images: Any, kwargs: Mapping[str, Any]) -> bytes | None:
    """32 bytes over pictures and arguments; None where something has no value of its own."""
    arguments = repr(sorted(kwargs.items()))
    pictures = list(_flat(images))
    if " at 0x" in arguments or not all(isinstance(each, Image.Image) for each in pictures):
        return None
    digest = hashlib.blake2b(f"{arguments}|{_nesting(images)}".encode(), digest_size=32)
    for picture in pictures:
        known = getattr(picture, _MARK, None)
        digest.update(f"|{picture.mode} {picture.size} {known is None}|".encode())
        digest.update(picture.tobytes() if known is None else known)
    return digest.digest()


def _flat(images: Any) -> Iterator[Any]:
    for each in images if isinstance(images, (list, tuple)) else [images]:
        yield from _flat(each) if isinstance(each, (list, tuple)) else [each]


def _nesting(images: Any) -> Any:
    return [_nesting(each) for each in images] if isinstance(images, (list, tuple)) else 0


def _sharable(output: Any) -> bool:
    """Tensors, and plain values beside them."""
    tensors = [value for value in output.values() if isinstance(value, torch.Tensor)]
    return bool(tensors) and all(isinstance(value, torch.Tensor) or _plain(value) for value in output.values())


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
