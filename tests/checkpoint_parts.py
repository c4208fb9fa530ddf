"""What the recipes of checkpoint_families.py and checkpoint_extras.py share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerFast, ProcessorMixin

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CONTEXT = 8192


@dataclass(frozen=True)
class Recipe:
    """What a checkpoint is made of. `gain` scales the random weights (see checkpoints.redraw)."""

    config: PreTrainedConfig
    processor: ProcessorMixin
    gain: float = 1.0


RECIPES: dict[str, Callable[[], Recipe]] = {}


def recipe(make: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Register a recipe under its function's name."""
    RECIPES[make.__name__] = make
    return make


def ids_of(tokenizer: PreTrainedTokenizerFast, **tokens: str) -> dict[str, int]:
    """Config fields that name a token, as ids."""
    return {field: tokenizer.convert_tokens_to_ids(token) for field, token in tokens.items()}


def decoder(tokenizer: PreTrainedTokenizerFast, layers: int = 3, **more: Any) -> dict[str, Any]:
    """A tiny decoder's config; its vocabulary is padded, as published ones are."""
    return {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": -(-len(tokenizer) // 32) * 32,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **more,
    }


def tower(**more: Any) -> dict[str, Any]:
    """A tiny vision transformer's config."""
    return {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, **more}
