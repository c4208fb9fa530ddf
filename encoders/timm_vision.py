"""Any timm vision transformer + projector + any causal language model, put together with one call.

The result is a folder in PerceptionLM's format, which plain transformers loads (`AutoModelForImageTextToText`,
`AutoProcessor`). What that format takes was tried rather than listed: the tower runs once, the language model's logits
are compared, and whatever the format would silently lose is refused with the reason.

    timm tower     forward_features [B, N, C]: at most one leading class token, then a square grid of patches
    projector      linear, GELU, linear; then patches averaged pooling_ratio x pooling_ratio
    language model a decoder whose logits are a bias-free linear layer of its last hidden state
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from transformers import (
    AddedToken,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PerceptionLMConfig,
    PerceptionLMImageProcessor,
    PerceptionLMProcessor,
    PerceptionLMVideoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import PerceptionLMForConditionalGeneration as Composite

from mmprefill.encoders.timm_tower import Tower, check_saved_tower, load_tower
from mmprefill.errors import ModelError, UnsupportedModelError

MEDIA_TOKENS = {"image_token": "<|image|>", "video_token": "<|video|>"}

_PARTS = """\
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'video' %}VIDEO{% else %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}"""
_BOS = "{{ bos_token if bos_token else '' }}"


@dataclass(frozen=True)
class _Turns:
    """How a conversation is written: `mark` is the token that tells its style."""

    mark: str
    turn: str
    answer: str
    end: str

    def template(self, media: Mapping[str, str]) -> str:
        parts = _PARTS.replace("IMAGE", media["image_token"]).replace("VIDEO", media["video_token"])
        turns = "{% for message in messages %}" + self.turn.replace("PARTS", parts) + "{% endfor %}"
        return _BOS + turns + "{% if add_generation_prompt %}" + self.answer + "{% endif %}"


_CHATML = _Turns(
    "<|im_start|>",
    "{{ '<|im_start|>' + message['role'] + '\n' }}PARTS{{ '<|im_end|>\n' }}",
    "{{ '<|im_start|>assistant\n' }}",
    "<|im_end|>",
)
_LLAMA3 = _Turns(
    "<|start_header_id|>",
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}PARTS{{ '<|eot_id|>' }}",
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
    "<|eot_id|>",
)
_PLAIN = _Turns("", "{{ message['role'] | capitalize + ': ' }}PARTS{{ '\n' }}", "{{ 'Assistant:' }}", "")


def assemble(
    folder: str | Path,
    *,
    vision: str,
    language: str | Path | PreTrainedConfig | PreTrainedModel,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    model_args: Mapping[str, Any] | None = None,
    vision_weights: nn.Module | Mapping[str, Tensor] | None = None,
    pretrained: bool = False,
    pooling_ratio: int = 2,
    tiles: int = 4,
    chat_template: str | None = None,
    seed: int = 0,
) -> Path:
    """Write a vision-language checkpoint in PerceptionLM's format; the projector, at least, is untrained.

    Args:
        folder: where to, created if need be; must be empty.
        vision: a timm architecture.
        language: folder of a causal language model, one in memory (not changed), or the config of a random one.
        tokenizer: its tokenizer or the folder of it; by default that of `language`, if that is a folder.
        model_args: overrides for `timm.create_model`, such as `img_size`, `depth`, `reg_tokens`.
        vision_weights: a timm model of that architecture, or its state dict; by default the tower is random.
        pretrained: download timm's weights for the tower instead.
        pooling_ratio: patches averaged along each side for one token.
        tiles: most tiles that a picture is cut into, beside a thumbnail; 1 shows the whole picture once.
        chat_template: a template of your own; by default one in the style of the tokenizer's role tokens.
        seed: of everything that is random.

    Returns:
        The folder.

    Raises:
        UnsupportedModelError: if the format cannot hold that tower or that language model, with the reason.
        ModelError: for names, weights and folders that cannot be used.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ModelError(f"{str(folder)!r} is not empty")
    if vision_weights is not None and pretrained:
        raise ValueError("pass vision_weights or pretrained=True, not both")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tower = Tower.of(vision, model_args or {}, pooling_ratio)
        causal = _causal(language)
        words = _with_media_tokens(_tokenizer(tokenizer, language))
        _make_room(causal, len(words))
        model = _compose(tower, causal, words, pooling_ratio)
    if pretrained:
        vision_weights = timm.create_model(vision, pretrained=True, num_classes=0, **(model_args or {}))
    if vision_weights is not None:
        load_tower(model.model.vision_tower.timm_model, vision_weights)
    check_saved_tower(model.model.vision_tower, tower)
    turns = next((style for style in (_CHATML, _LLAMA3) if style.mark in words.get_vocab()), _PLAIN)
    model.generation_config = _generation(causal, words, turns)
    processor = _processor(tower, words, pooling_ratio, tiles, chat_template or turns.template(_media(words)))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


# The language model.


def _causal(language: str | Path | PreTrainedConfig | PreTrainedModel) -> Any:
    if isinstance(language, PreTrainedConfig):
        return AutoModelForCausalLM.from_config(copy.deepcopy(language)).eval()
    if isinstance(language, PreTrainedModel):  # anew: `.to(bfloat16)` leaves rotary tables that no file brings back
        causal = AutoModelForCausalLM.from_config(copy.deepcopy(language.config), dtype=language.dtype).eval()
        causal.load_state_dict(language.state_dict())
        causal.generation_config = copy.deepcopy(language.generation_config)
        return causal
    try:
        return AutoModelForCausalLM.from_pretrained(language, trust_remote_code=False).eval()
    except (OSError, ValueError) as error:
        raise ModelError(f"no causal language model can be loaded from {str(language)!r}: {error}") from error


@torch.no_grad()
def _make_room(causal: Any, tokens: int) -> None:
    """Rows for new tokens, each the mean of all others: a model hardly ever writes them."""
    size = causal.get_input_embeddings().weight.shape[0]
    if tokens <= size:
        return
    causal.resize_token_embeddings(tokens, mean_resizing=False)
    for table in (causal.get_input_embeddings(), causal.get_output_embeddings()):
        table.weight[size:] = table.weight[:size].mean(0)


def _compose(tower: Tower, causal: Any, words: Any, pooling_ratio: int) -> Composite:
    name = causal.config.model_type
    decoder, head = causal.base_model, causal.get_output_embeddings()
    if not hasattr(decoder, "embed_tokens") or not isinstance(head, nn.Linear) or head.bias is not None:
        raise UnsupportedModelError(
            f"{name}: PerceptionLM's format takes a decoder with `embed_tokens` and a linear head without a bias"
        )
    vision_config = {
        "model_type": "timm_wrapper",
        "architecture": tower.name,
        "model_args": tower.args,
        "do_pooling": False,
    }
    config = PerceptionLMConfig(
        text_config=causal.config,
        vision_config=vision_config,
        vision_use_cls_token=tower.class_token,
        projector_pooling_ratio=pooling_ratio,
        image_token_id=words.image_token_id,
        video_token_id=words.video_token_id,
        tie_word_embeddings=bool(causal.config.tie_word_embeddings),
    )
    model = Composite._from_config(config, dtype=causal.dtype).eval()
    try:
        model.model.language_model.load_state_dict(decoder.state_dict())
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"{name}: transformers' bare model of that config differs from it: {error}"
        ) from error
    model.lm_head.load_state_dict(head.state_dict())
    model.tie_weights()
    _check_language(model, causal)
    return model


@torch.inference_mode()
def _check_language(model: Any, causal: Any) -> None:
    """What a causal model does beyond decoder and head (scaling, soft-capping) the format has no place for."""
    taken = {model.config.image_token_id, model.config.video_token_id}
    ids = torch.tensor([[i for i in range(model.config.text_config.vocab_size) if i not in taken][:32]])
    ours, its = (each(input_ids=ids, use_cache=False).logits.float() for each in (model, causal))
    if not torch.allclose(ours, its, rtol=1e-3, atol=1e-4 * float(its.abs().max())):
        raise UnsupportedModelError(
            f"{causal.config.model_type}: its logits are more than a linear layer of the last hidden state (scaling or "
            "soft-capping, say), which PerceptionLM's format cannot hold"
        )


def _generation(causal: Any, words: Any, turns: _Turns) -> GenerationConfig:
    """Greedy by default; an answer ends with the text or with its turn."""
    own = causal.generation_config
    stop = [words.eos_token_id, words.convert_tokens_to_ids(turns.end) if turns.end else None]
    stop += own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    ends = sorted({token for token in stop if token is not None})
    pad = words.pad_token_id if words.pad_token_id is not None else (ends[0] if ends else None)
    return GenerationConfig(
        bos_token_id=words.bos_token_id, eos_token_id=ends or None, pad_token_id=pad, do_sample=False
    )


# Tokenizer and processor.


def _tokenizer(tokenizer: Any, language: Any) -> PreTrainedTokenizerBase:
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    source = tokenizer if tokenizer is not None else language
    if not isinstance(source, (str, Path)):
        raise ModelError("pass tokenizer=, a tokenizer or its folder: a config or model in memory brings none")
    try:
        words: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer can be loaded from {str(source)!r}: {error}") from error
    return words


def _with_media_tokens(tokenizer: PreTrainedTokenizerBase) -> Any:
    """A copy that knows `image_token` and `video_token`, added where it had none."""
    names = {name: getattr(tokenizer, name, None) or token for name, token in MEDIA_TOKENS.items()}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        words = AutoTokenizer.from_pretrained(folder)
        words.add_tokens([AddedToken(t, special=True, normalized=False) for t in names.values()], special_tokens=True)
        words.save_pretrained(folder)
        words = AutoTokenizer.from_pretrained(folder, extra_special_tokens=names)
    words.chat_template = None  # the processor's stands for both
    return words


def _media(words: Any) -> dict[str, str]:
    return {name: getattr(words, name) for name in MEDIA_TOKENS}


def _processor(tower: Tower, words: Any, pooling_ratio: int, tiles: int, template: str) -> PerceptionLMProcessor:
    size = {"height": tower.size, "width": tower.size}
    pictures = PerceptionLMImageProcessor(
        size=size,
        tile_size=tower.size,
        max_num_tiles=tiles,
        vision_input_type="thumb+tile" if tiles > 1 else "vanilla",
        **tower.normalisation,
    )
    return PerceptionLMProcessor(
        PerceptionLMVideoProcessor(size=size, **tower.normalisation),
        pictures,
        words,
        patch_size=tower.patch,
        pooling_ratio=pooling_ratio,
        chat_template=template,
    )
