"""timm architectures as PerceptionLM's format can hold them: at most one class token, then a square grid of patches.

No list of names: the architecture is built and run once, and what would be lost is a reason to refuse it.
"""

from __future__ import annotations

import difflib
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.data.config import resolve_data_config
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.image_utils import PILImageResampling

from mmprefill.errors import ModelError, UnsupportedModelError

_HEADS = ("head.", "attn_pool.", "fc_norm.")  # weights that a tower without a classifier may lack


@dataclass(frozen=True)
class Tower:
    """A timm architecture that PerceptionLM's format can hold.

    Attributes:
        name: timm's name.
        args: all arguments that the checkpoint has to remember.
        class_token: whether a class token leads.
        size: side of its picture in pixels.
        patch: side of a patch in pixels.
        normalisation: `image_mean`, `image_std` and `resample` of its pictures.
    """

    name: str
    args: dict[str, Any]
    class_token: bool
    size: int
    patch: int
    normalisation: dict[str, Any]

    @classmethod
    def of(cls, name: str, model_args: Mapping[str, Any], pooling_ratio: int) -> Tower:
        """Build it once and see.

        Raises:
            UnsupportedModelError: with the reason.
        """
        model = _create(name, model_args)
        height, width = _pair(getattr(getattr(model, "patch_embed", None), "img_size", None))
        patch = _pair(getattr(getattr(model, "patch_embed", None), "patch_size", None))
        if not height or height != width or patch[0] != patch[1]:
            raise UnsupportedModelError(
                f"{name}: not a vision transformer with square pictures cut into square patches"
            )
        features = _features(name, model, height)
        prefix = int(getattr(model, "num_prefix_tokens", 0))
        grid = math.isqrt(max(features.shape[1] - prefix, 0))
        if prefix > 1:
            raise UnsupportedModelError(
                f"{name}: {prefix} tokens lead its patches, and PerceptionLM drops one at most"
                + _without_registers(name, model_args)
            )
        if grid * grid + prefix != features.shape[1] or grid != height // patch[0]:
            raise UnsupportedModelError(f"{name}: {features.shape[1]} tokens are not a square grid of its patches")
        if grid < pooling_ratio:
            raise UnsupportedModelError(f"{name}: a grid of {grid} x {grid} cannot be pooled by {pooling_ratio}")
        args = {"embed_dim": int(features.shape[2]), "img_size": height, **model_args}
        if getattr(model, "global_pool", None) == "map":
            args.setdefault("global_pool", "")  # attention pooling only adds weights that nothing reads
        _create(name, args)
        return cls(name, args, prefix == 1, height, patch[0], _normalisation(model))


def _without_registers(name: str, model_args: Mapping[str, Any]) -> str:
    """The argument that leaves register tokens out, if there is one, as the end of a message."""
    for option in ("reg_tokens", "num_reg_tokens"):
        try:
            model = timm.create_model(name, pretrained=False, num_classes=0, **{**model_args, option: 0})
        except (TypeError, ValueError, AssertionError):
            continue
        if int(getattr(model, "num_prefix_tokens", 0)) <= 1:
            return f"; model_args={{{option!r}: 0}} leaves its registers out"
    return ""


def _create(name: str, args: Mapping[str, Any]) -> nn.Module:
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=0, **args)
    except RuntimeError as error:
        if "Unknown model" not in str(error):
            raise
        close = difflib.get_close_matches(name, timm.list_models(), 3)
        raise ModelError(
            f"timm {timm.__version__} has no architecture {name!r}; close to it: {close or 'none'}"
        ) from error
    except (TypeError, ValueError, AssertionError) as error:
        raise UnsupportedModelError(f"{name}: timm does not build it with {dict(args)}: {error}") from error
    return model.eval()


@torch.inference_mode()
def _features(name: str, model: nn.Module, size: int) -> Tensor:
    features: Any = model.forward_features(torch.zeros(1, 3, size, size))  # type: ignore[operator]
    if not isinstance(features, Tensor) or features.dim() != 3:
        shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UnsupportedModelError(f"{name}: its features are {shape}, not [pictures, tokens, width]")
    return features


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, (tuple, list)):
        return int(value[0]), int(value[1])
    return int(value or 0), int(value or 0)


def _normalisation(model: nn.Module) -> dict[str, Any]:
    config: dict[str, Any] = resolve_data_config({}, model=model)  # type: ignore[no-untyped-call]
    resample = getattr(PILImageResampling, config["interpolation"].upper())
    return {"image_mean": list(config["mean"]), "image_std": list(config["std"]), "resample": resample}


def load_tower(tower: nn.Module, weights: nn.Module | Mapping[str, Tensor]) -> None:
    """Put given weights, those of a classifier's head aside, into a tower.

    Raises:
        ModelError: if they are not its own.
    """
    state = weights.state_dict() if isinstance(weights, nn.Module) else dict(weights)
    try:
        missing, unexpected = tower.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ModelError(f"vision_weights do not fit the tower: {error}") from error
    wrong = [*missing, *(name for name in unexpected if not name.startswith(_HEADS))]
    if wrong:
        raise ModelError(f"vision_weights do not fit the tower; missing or unknown: {', '.join(wrong[:5])}")


@torch.inference_mode()
def check_saved_tower(wrapper: PreTrainedModel, tower: Tower) -> None:
    """Save and load a tower: some timm models keep state outside their weights, which loading does not bring back.

    Raises:
        UnsupportedModelError: if it then computes something else.
    """
    picture = torch.linspace(-1, 1, 3 * tower.size**2, dtype=wrapper.dtype).reshape(1, 3, tower.size, tower.size)
    with tempfile.TemporaryDirectory() as folder:
        wrapper.save_pretrained(folder)
        loaded = AutoModel.from_pretrained(folder, dtype=wrapper.dtype).eval()
        before, after = (each(picture).last_hidden_state for each in (wrapper.eval(), loaded))
    if not torch.allclose(before, after, rtol=1e-3, atol=1e-4):
        raise UnsupportedModelError(f"{tower.name}: once saved and loaded by transformers it computes something else")
