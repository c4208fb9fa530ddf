"""Which of transformers' image-text-to-text families are packed, generic or refused, by the same tests that loading uses.

Without a checkpoint only what a family's class and default config say can be tested; loading one also runs the probe
(`mmprefill.pipeline.probe`), and `mmprefill models MODEL` shows its answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from mmprefill.encoders.families import objection
from mmprefill.pipeline.kv_cache import LayerPlan

_OTHER_MIXERS = ("conv_", "mamba", "ssm_", "linear_conv", "linear_num")  # settings of layers that are not attention


@dataclass(frozen=True)
class Entry:
    """One family.

    Attributes:
        family: transformers' model type.
        path: "packed", "generic" or "refused".
        reason: why it is not packed, or what it lacks.
    """

    family: str
    path: str
    reason: str = ""


def families() -> list[str]:
    """Model types that transformers maps to an image-text-to-text class."""
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def entries() -> Iterator[Entry]:
    """Judge every family, in alphabetical order; imports its modeling file, which takes a moment each."""
    for family in families():
        try:
            config = AutoConfig.for_model(family)
            yield judge(family, config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)])
        except Exception as error:  # a default config that does not even construct tells nothing about checkpoints
            yield Entry(family, "generic", f"undecided without a checkpoint: {str(error).splitlines()[0][:80]}")


def judge(family: str, config: Any, model_class: Any) -> Entry:
    """What class and config say of one family."""
    if getattr(config, "is_encoder_decoder", False):
        return Entry(family, "refused", "encoder-decoder: no decoder-only KV cache")
    if not hasattr(model_class, "prepare_inputs_for_generation"):
        return Entry(family, "refused", "cannot generate: no KV cache")
    text = config.get_text_config(decoder=True)
    if getattr(text, "cross_attention_layers", None):
        return Entry(family, "refused", "reads pictures by cross-attention: they are not part of the token sequence")
    against = objection(model_class, LayerPlan.of(text).kinds)
    if against:
        return Entry(family, "generic", against)
    other = sorted(name for name in text.to_dict() if name.startswith(_OTHER_MIXERS))
    if other:
        return Entry(
            family, "generic", f"unless the checkpoint's layers are all attention: its config knows {other[0]}"
        )
    return Entry(family, "packed")
