"""Checkpoint -> ModelBundle: model, processor and identity, from a folder or the hub."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mmprefill.errors import ModelError, UnsupportedModelError
from mmprefill.streams import on_a_passing_thread

DTYPES: dict[str, Any] = {
    "auto": "auto", "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
}  # fmt: skip
_loading = threading.Lock()
BUNDLED = Path(__file__).parent / "assets" / "shapes-vlm"


@dataclass(frozen=True)
class ModelBundle:
    """A loaded checkpoint.

    Attributes:
        model: the composite model, in eval mode, without gradients.
        processor: the checkpoint's own processor.
        source: the folder or hub id that it came from.
        revision: the hub revision asked for, if any.
        lock: held by whoever runs the decoder: engines that share a bundle take turns.
    """

    model: Any
    processor: Any
    source: str
    revision: str | None = None
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    @property
    def context(self) -> int:
        """Most tokens that the decoder's positions allow."""
        return int(self.model.config.get_text_config(decoder=True).max_position_embeddings)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the loaded weights (names, shapes, dtypes and values), hex."""
        digest = hashlib.sha256()  # 2.4x blake2b on processors with SHA instructions
        # keep_vars: packed weights as they are, plain again one at a time
        for name, tensor in sorted(self.model.state_dict(keep_vars=True).items()):
            tensor = tensor.to_dense() if tensor.is_mkldnn else tensor
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @cached_property
    def processor_digest(self) -> str:
        """Digest of everything that the processor's settings say, hex."""
        settings = (
            self.processor.to_json_string() if hasattr(self.processor, "to_json_string") else repr(self.processor)
        )
        template = str(getattr(self.processor, "chat_template", ""))
        return hashlib.blake2b(f"{len(settings)}:{settings}{template}".encode(), digest_size=16).hexdigest()


def load(
    source: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    token: str | None = None,
    processor_kwargs: dict[str, Any] | None = None,
) -> ModelBundle:
    """Load a checkpoint; no code from it is ever run.

    Args:
        source: a folder, a hub id, or None for the model that ships in the package.
        device: where to put it; the first CUDA device if there is one, else the CPU.
        dtype: "auto" (the checkpoint's), "bf16", "fp16" or "fp32".
        revision: branch, tag or commit on the hub.
        token: hub token for gated checkpoints.
        processor_kwargs: handed to the checkpoint's processor (`max_pixels=...`, `do_image_splitting=...`).

    Raises:
        ModelError: if it cannot be found, reached or read.
        UnsupportedModelError: if transformers has no class for it without running its own code.
        ValueError: for a dtype that is none of these.
    """
    name, weights = str(source) if source is not None else str(BUNDLED), _dtype(dtype)
    where: dict[str, Any] = {"revision": revision, "token": token, "trust_remote_code": False}
    _check_config(name, where)
    try:
        processor = AutoProcessor.from_pretrained(name, **where, **(processor_kwargs or {}))
        model = on_a_passing_thread(_model, name, weights, where)
    except (OSError, ValueError, TypeError, ImportError, StrictDataclassError, SafetensorError) as error:
        raise ModelError(f"cannot load {name!r}: {_first_line(error)}") from error
    for option in ("min_pixels", "max_pixels"):  # the sizes hold them now; a tokenizer's options go to every call
        getattr(processor.tokenizer, "init_kwargs", {}).pop(option, None)
    _check_sizes(name, processor)
    _agree_on_rows(name, processor, model)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(torch.device(default if device is None else device))
    return ModelBundle(model.eval().requires_grad_(False), processor, name, revision)


def _model(name: str, dtype: Any, where: dict[str, Any]) -> Any:
    """One at a time: transformers patches torch and its own classes while it loads, and takes that back in order."""
    with _loading:
        return AutoModelForImageTextToText.from_pretrained(
            name, dtype=dtype, use_safetensors=True, attn_implementation=None, **where
        )


def _dtype(dtype: str | torch.dtype) -> Any:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)} or a torch.dtype, got {dtype!r}")
    return DTYPES[dtype]


def _check_config(name: str, where: dict[str, Any]) -> None:
    """Refuse early, and with the reason, what transformers cannot load as it is."""
    if Path(name).exists() and not (Path(name) / "config.json").is_file():
        raise ModelError(f"{name!r} holds no config.json; pass the folder of a Hugging Face checkpoint")
    try:
        raw, _ = (
            AutoConfig.get_config_dict(name, **where) if hasattr(AutoConfig, "get_config_dict") else _raw(name, where)
        )
    except (OSError, ValueError) as error:
        if Path(name).is_absolute() or name.startswith((".", "~")):
            raise ModelError(f"{name!r} is not a local folder; pass the folder of a checkpoint, or a hub id") from error
        raise ModelError(
            f"{name!r} is not a local folder, and the hub could not be reached or does not know it: {_first_line(error)}. "
            "Download the checkpoint first and pass its folder, or check the name, revision and token"
        ) from error
    kind = raw.get("model_type")
    if kind in CONFIG_MAPPING:
        return
    if raw.get("auto_map"):
        raise UnsupportedModelError(
            f"{name!r} needs trust_remote_code: its model type {kind!r} is defined by code inside the checkpoint, which is "
            "never run here. Use a checkpoint converted to a class of transformers"
        )
    raise UnsupportedModelError(f"{name!r}: transformers has no model type {kind!r}")


def _raw(name: str, where: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from transformers import PreTrainedConfig

    found: tuple[dict[str, Any], Any] = PreTrainedConfig.get_config_dict(name, **where)
    return found


def _check_sizes(name: str, processor: Any) -> None:
    size = getattr(getattr(processor, "image_processor", None), "size", None) or {}
    shortest, longest = (size.get(edge) for edge in ("shortest_edge", "longest_edge"))
    if shortest and longest and shortest > longest:
        raise ModelError(f"{name!r}: the image processor's smallest size {shortest} is above its largest {longest}")


def _agree_on_rows(name: str, processor: Any, model: Any) -> None:
    """LLaVA's processors count a picture's rows by settings of the model's, which files from before 4.47 leave out."""
    strategy = getattr(model.config, "vision_feature_select_strategy", None)
    if strategy is None or not all(
        hasattr(processor, name) for name in ("patch_size", "vision_feature_select_strategy")
    ):
        return
    extra = sum(key.endswith(("class_embedding", "cls_token")) for key, _ in model.named_parameters())
    if processor.patch_size is None:
        processor.patch_size = model.config.vision_config.patch_size
        processor.vision_feature_select_strategy = None
        processor.num_additional_image_tokens = extra
    if processor.vision_feature_select_strategy is None:
        processor.vision_feature_select_strategy = strategy
    counted = processor.vision_feature_select_strategy
    if extra and counted != strategy:
        raise ModelError(
            f"{name!r}: its processor counts rows for the feature selection {counted!r}, its model's is {strategy!r}"
        )
    if extra and strategy == "full" and getattr(model.config, "image_grid_pinpoints", None):
        raise UnsupportedModelError(
            f"{name!r}: tiles with the tower's class token (feature selection 'full') have no layout"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
