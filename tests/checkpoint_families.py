"""One recipe per family: the published architecture, tokenizer style, processor and chat template, at toy size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers as hf
from checkpoint_tokenizers import byte_level, sentencepiece_like
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


# Llava

LLAVA_TEMPLATE = """\
{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}\
{% if message['content'] is string %}{{ message['content'] + ' ' }}{% else %}\
{# pictures first, then the text: as published #}\
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}\
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""


def vicuna() -> PreTrainedTokenizerFast:
    """Llama 2's tokenizer with llava's placeholder and padding behind the vocabulary."""
    return sentencepiece_like(
        ["<image>", "<pad>"],
        bos="<s>",
        dummy_prefix=True,
        first=["<unk>", "<s>", "</s>"],
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
    )


@recipe
def llava_clip() -> Recipe:
    """LLaVA 1.5: CLIP tower, class token dropped, 9 tokens a picture."""
    tokenizer = vicuna()
    vision = tower(model_type="clip_vision_model", image_size=42, patch_size=14, projection_dim=32)
    config = hf.LlavaConfig(
        vision_config=vision,
        text_config=decoder(tokenizer, model_type="llama"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        image_seq_length=9,
        tie_word_embeddings=False,
    )
    pictures = hf.CLIPImageProcessor(size={"shortest_edge": 42}, crop_size={"height": 42, "width": 42})
    return Recipe(
        config,
        hf.LlavaProcessor(
            pictures,
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=LLAVA_TEMPLATE,
        ),
    )


# Idefics 3, SmolVLM

IDEFICS_TEMPLATE = """\
<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}\
{% if message['content'] is string %}{{ ': ' + message['content'] }}{% else %}\
{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}\
{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}\
{% elif part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'video' %}{{ '<video>' }}{% endif %}\
{% endfor %}{% endif %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


def smollm() -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer with the picture tokens of SmolVLM."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<fake_token_around_image>", "<image>", "<global-img>"]
    tiles = [f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)]
    return byte_level(
        [*specials, *tiles, "<end_of_utterance>", "<video>"],
        gpt2=True,
        bos_token="<|im_start|>",
        eos_token="<end_of_utterance>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    )


@recipe
def smolvlm() -> Recipe:
    """SmolVLM: a picture is cut into tiles (up to 2 x 2, by shape) and a thumbnail, 4 tokens each."""
    tokenizer = smollm()
    config = hf.SmolVLMConfig(
        text_config=decoder(tokenizer, model_type="llama"),
        vision_config=tower(image_size=28, patch_size=7),
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}, **HALF}
    return Recipe(
        config,
        hf.SmolVLMProcessor(
            hf.SmolVLMImageProcessor(**sizes),
            tokenizer,
            hf.SmolVLMVideoProcessor(**{**sizes, "size": {"longest_edge": 28}}),
            image_seq_len=4,
            chat_template=IDEFICS_TEMPLATE,
        ),
    )


# Qwen-VL

QWEN_TEMPLATE = """\
{% for message in messages %}\
{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def qwen() -> PreTrainedTokenizerFast:
    """Qwen 2's tokenizer: one digit a token, nothing added in front."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"]
    vision = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    return byte_level(
        [*specials, *vision],
        digits="",
        nfc=True,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
        },
    )


def qwen_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """The four token ids that every Qwen-VL config names."""
    return ids_of(
        tokenizer,
        image_token_id="<|image_pad|>",
        video_token_id="<|video_pad|>",
        vision_start_token_id="<|vision_start|>",
        vision_end_token_id="<|vision_end|>",
    )


def qwen_media(patch: int = 14) -> dict[str, Any]:
    """Qwen2-VL's image and video processors: 4 to 36 tokens a picture, as many per two frames of a video."""
    cell = (2 * patch) ** 2
    limits = {"size": {"shortest_edge": 4 * cell, "longest_edge": 36 * cell}, "patch_size": patch}
    return {
        "image_processor": hf.Qwen2VLImageProcessor(**limits),
        "video_processor": hf.Qwen2VLVideoProcessor(**limits, cap_pixels_per_frame=False),
    }


MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}


@recipe
def qwen2_5_vl() -> Recipe:
    """Qwen2.5-VL: windowed tower, M-RoPE, 4 to 36 tokens a picture."""
    tokenizer = qwen()
    config = hf.Qwen2_5_VLConfig(
        text_config=decoder(tokenizer, rope_parameters=MROPE),
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "fullatt_block_indexes": [1],
            "window_size": 56,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        tie_word_embeddings=True,
        **qwen_ids(tokenizer),
    )
    return Recipe(config, hf.Qwen2_5_VLProcessor(tokenizer=tokenizer, chat_template=QWEN_TEMPLATE, **qwen_media()))


# Gemma

GEMMA3_TEMPLATE = """\
{{ bos_token }}\
{%- if messages[0]['role'] == 'system' -%}\
{%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}\
{%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}\
{%- set loop_messages = messages[1:] -%}\
{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}\
{%- for message in loop_messages -%}\
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}\
{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}\
{%- if message['content'] is string -%}{{ message['content'] | trim }}\
{%- else -%}{%- for part in message['content'] -%}\
{%- if part['type'] == 'image' -%}{{ '<start_of_image>' }}\
{%- elif part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}\
{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\n' }}\
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""


def gemma(*specials: str, **settings: Any) -> PreTrainedTokenizerFast:
    """Gemma's tokenizer: spaces become "▁", unknown characters become bytes, <bos> is put in front."""
    return sentencepiece_like(
        specials,
        bos="<bos>",
        dummy_prefix=False,
        first=["<pad>", "<eos>", "<bos>", "<unk>"],
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        **settings,
    )


@recipe
def gemma3() -> Recipe:
    """Gemma 3: two-way pictures of 4 tokens, three layers with a window of 16 and one without."""
    tokenizer = gemma(
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
        extra_special_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    )
    tokens = ids_of(
        tokenizer,
        image_token_id="<image_soft_token>",
        boi_token_index="<start_of_image>",
        eoi_token_index="<end_of_image>",
    )
    config = hf.Gemma3Config(
        text_config=decoder(
            tokenizer,
            layers=4,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        ),
        vision_config=tower(image_size=28, patch_size=7),
        mm_tokens_per_image=4,
        **tokens,
    )
    pictures = hf.Gemma3ImageProcessor(size={"height": 28, "width": 28}, **HALF)
    return Recipe(config, hf.Gemma3Processor(pictures, tokenizer, image_seq_length=4, chat_template=GEMMA3_TEMPLATE))


# PerceptionLM

LLAMA3_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}\
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}{{ '<|image|>' }}{% elif part['type'] == 'video' %}{{ '<|video|>' }}\
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|eot_id|>' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""


@recipe
def perception_lm() -> Recipe:
    """PerceptionLM: a timm tower; a thumbnail and up to 4 tiles, 4 tokens each."""
    headers = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = byte_level(
        [*headers, "<|image|>", "<|video|>", "<|finetune_right_pad_id|>"],
        bos="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        pad_token="<|finetune_right_pad_id|>",
        extra_special_tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
    )
    vit = {
        "embed_dim": 32,
        "img_size": (56, 56),
        "depth": 2,
        "num_heads": 2,
        "global_pool": "",
        "use_post_transformer_norm": False,
        "init_values": 0.1,
        "ref_feat_shape": (4, 4),
    }
    config = hf.PerceptionLMConfig(
        text_config=decoder(tokenizer, model_type="llama"),
        vision_config={"architecture": "vit_pe_core_large_patch14_336", "model_args": vit},
        vision_use_cls_token=True,
        projector_pooling_ratio=2,
        **ids_of(tokenizer, image_token_id="<|image|>", video_token_id="<|video|>"),
    )
    pictures = hf.PerceptionLMImageProcessor(tile_size=56, max_num_tiles=4, size={"height": 56, "width": 56}, **HALF)
    frames = hf.PerceptionLMVideoProcessor(size={"height": 56, "width": 56}, **HALF)
    return Recipe(
        config,
        hf.PerceptionLMProcessor(
            frames, pictures, tokenizer, patch_size=14, pooling_ratio=2, chat_template=LLAMA3_TEMPLATE
        ),
    )
