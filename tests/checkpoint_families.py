"""The packed families: published architecture, tokenizer style, processor and chat template, at toy size."""

from typing import Any

import transformers as hf
from checkpoint_parts import HALF, Recipe, decoder, ids_of, recipe, tower
from checkpoint_tokenizers import byte_level, sentencepiece_like
from transformers import PreTrainedTokenizerFast

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


TURNS_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@recipe
def llava_siglip() -> Recipe:
    """LLaVA's architecture with SigLIP and Qwen 2: all 16 patches of a picture, parts in the order given."""
    tokenizer = qwen("<image>", image_token="<image>")
    config = hf.LlavaConfig(
        vision_config=tower(model_type="siglip_vision_model", image_size=28, patch_size=7, vision_use_head=False),
        text_config=decoder(tokenizer, model_type="qwen2"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_seq_length=16,
        tie_word_embeddings=True,
    )
    pictures = hf.SiglipImageProcessor(size={"height": 28, "width": 28}, **HALF)
    return Recipe(
        config,
        hf.LlavaProcessor(
            pictures,
            tokenizer,
            patch_size=7,
            vision_feature_select_strategy="full",
            chat_template=TURNS_TEMPLATE.replace("IMAGE", "<image>\n"),
        ),
    )


LLAVA_NEXT_TEMPLATE = """\
{% for message in messages %}{% if message['content'] is string %}{% set text = message['content'] %}\
{% else %}{% set text = message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | join %}\
{% endif %}\
{% if message['role'] == 'system' %}{{ '<<SYS>>\n' + text + '\n<</SYS>>\n\n' }}\
{% elif message['role'] == 'user' %}{{ '[INST] ' }}{% if message['content'] is not string %}\
{# pictures first, then the text: as published #}\
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}{% endif %}\
{{ text + ' [/INST]' }}{% else %}{{ ' ' + text + '</s> ' }}{% endif %}{% endfor %}"""
PINPOINTS = [[42, 84], [84, 42], [84, 84]]


def llava_next_with(window: int | None) -> Recipe:
    """LLaVA-NeXT on Mistral: tiles without their padding, a newline a row, by the picture's shape."""
    tokenizer = vicuna()
    config = hf.LlavaNextConfig(
        vision_config=tower(model_type="clip_vision_model", image_size=42, patch_size=14, projection_dim=32),
        text_config=decoder(tokenizer, layers=4, model_type="mistral", sliding_window=window, head_dim=16),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        image_grid_pinpoints=PINPOINTS,
        image_seq_length=9,
        tie_word_embeddings=False,
    )
    pictures = hf.LlavaNextImageProcessor(
        size={"shortest_edge": 42}, crop_size={"height": 42, "width": 42}, image_grid_pinpoints=PINPOINTS
    )
    return Recipe(
        config,
        hf.LlavaNextProcessor(
            pictures,
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=LLAVA_NEXT_TEMPLATE,
        ),
    )


@recipe
def llava_next() -> Recipe:
    """LLaVA-NeXT on Mistral without a window."""
    return llava_next_with(None)


@recipe
def llava_next_window() -> Recipe:
    """LLaVA-NeXT on Mistral with a window of 8, much shorter than one picture."""
    return llava_next_with(8)


LLAVA_ONEVISION_TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}\
{% if message['content'] is string %}{{ '\n' + message['content'] }}{% else %}\
{# media first, then the text: as published #}\
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>' }}{% endfor %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + part['text'] }}{% endfor %}\
{% endif %}{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@recipe
def llava_onevision() -> Recipe:
    """LLaVA-OneVision: tiles when the picture is alone in its prompt, 10 rows a picture otherwise."""
    tokenizer = qwen("<image>", "<video>", image_token="<image>", video_token="<video>")
    config = hf.LlavaOnevisionConfig(
        vision_config=tower(model_type="siglip_vision_model", image_size=42, patch_size=14, vision_use_head=False),
        text_config=decoder(tokenizer, model_type="qwen2"),
        image_grid_pinpoints=PINPOINTS,
        tie_word_embeddings=True,
        **ids_of(tokenizer, image_token_index="<image>", video_token_index="<video>"),
    )
    size = {"size": {"height": 42, "width": 42}, **HALF}
    return Recipe(
        config,
        hf.LlavaOnevisionProcessor(
            hf.LlavaOnevisionImageProcessor(image_grid_pinpoints=PINPOINTS, **size),
            tokenizer,
            hf.LlavaOnevisionVideoProcessor(**size),
            num_image_tokens=9,
            vision_feature_select_strategy="full",
            chat_template=LLAVA_ONEVISION_TEMPLATE,
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


@recipe
def idefics3() -> Recipe:
    """Idefics 3 on Llama 3, pictures not cut: 4 tokens each between three marks."""
    marks = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    tokenizer = llama3(*marks, eos_token="<end_of_utterance>")
    config = hf.Idefics3Config(
        text_config=decoder(tokenizer, model_type="llama"),
        vision_config=tower(image_size=28, patch_size=7),
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    pictures = hf.Idefics3ImageProcessor(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, do_image_splitting=False, **HALF
    )
    template = IDEFICS_TEMPLATE.replace("<|im_start|>", "<|begin_of_text|>", 1)
    return Recipe(config, hf.Idefics3Processor(pictures, tokenizer, image_seq_len=4, chat_template=template))


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


def qwen(*more: str, **tokens: str) -> PreTrainedTokenizerFast:
    """Qwen 2's tokenizer: one digit a token, nothing added in front. `tokens` are attributes of the tokenizer."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"]
    vision = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    own = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    return byte_level(
        [*specials, *vision, *more],
        digits="",
        nfc=True,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=tokens or own,
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


def qwen_media(patch: int = 14, third: bool = False) -> dict[str, Any]:
    """The image and video processors: 4 to 36 tokens a picture, as many per two frames of a video.

    Qwen3-VL counts a video's pixels over all its frames, Qwen2-VL per frame.
    """
    cell = (2 * patch) ** 2
    limits = {"size": {"shortest_edge": 4 * cell, "longest_edge": 36 * cell}, "patch_size": patch}
    if third:
        frames = {**limits, **HALF, "size": {"shortest_edge": 8 * cell, "longest_edge": 144 * cell}}
        return {
            "image_processor": hf.Qwen2VLImageProcessor(**limits, **HALF),
            "video_processor": hf.Qwen3VLVideoProcessor(**frames, cap_pixels_per_frame=False),
        }
    return {
        "image_processor": hf.Qwen2VLImageProcessor(**limits),
        "video_processor": hf.Qwen2VLVideoProcessor(**limits, cap_pixels_per_frame=False),
    }


MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}


@recipe
def qwen2_vl() -> Recipe:
    """Qwen2-VL: M-RoPE, 4 to 36 tokens a picture."""
    tokenizer = qwen()
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    config = hf.Qwen2VLConfig(
        text_config=decoder(tokenizer, rope_parameters=MROPE),
        vision_config={**vision, "spatial_merge_size": 2, "temporal_patch_size": 2},
        tie_word_embeddings=False,
        **qwen_ids(tokenizer),
    )
    return Recipe(
        config, hf.Qwen2VLProcessor(tokenizer=tokenizer, chat_template=QWEN_TEMPLATE, **qwen_media()), gain=1.3
    )


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


QWEN3_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN3_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
}


def qwen3_processor(tokenizer: PreTrainedTokenizerFast) -> hf.Qwen3VLProcessor:
    """The processor of Qwen3-VL, Qwen3-VL-MoE and Qwen3.5."""
    return hf.Qwen3VLProcessor(tokenizer=tokenizer, chat_template=QWEN3_TEMPLATE, **qwen_media(patch=16, third=True))


@recipe
def qwen3_vl() -> Recipe:
    """Qwen3-VL: interleaved M-RoPE, features of two tower layers added to the first two decoder layers."""
    tokenizer = qwen()
    config = hf.Qwen3VLConfig(
        text_config=decoder(tokenizer, head_dim=16, rope_parameters={**MROPE, "mrope_interleaved": True}),
        vision_config={**QWEN3_TOWER, "deepstack_visual_indexes": [0, 1]},
        tie_word_embeddings=True,
        **qwen_ids(tokenizer),
    )
    return Recipe(config, qwen3_processor(tokenizer))


# GLM-4V

GLM4V_TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages %}\
{{- '<|' + message['role'] + '|>\n' }}\
{%- if message['content'] is string %}{{ message['content'] }}{% else %}\
{%- for part in message['content'] %}\
{%- if part['type'] == 'image' %}<|begin_of_image|><|image|><|end_of_image|>\
{%- elif part['type'] == 'video' %}<|begin_of_video|><|video|><|end_of_video|>\
{%- elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""


@recipe
def glm4v() -> Recipe:
    """GLM-4.1V: M-RoPE, 4 to 36 tokens a picture; a video's frames use the picture's placeholder."""
    roles = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    marks = ["<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"]
    tokenizer = byte_level(
        [*roles, *marks, "<|image|>", "<|video|>"],
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
    )
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    sizes = {"patch_size": 14, "image_size": 56, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = hf.Glm4vConfig(
        text_config=decoder(tokenizer, rope_parameters={**MROPE, "partial_rotary_factor": 1.0}),
        vision_config={**vision, **sizes},
        tie_word_embeddings=False,
        **ids_of(
            tokenizer,
            image_token_id="<|image|>",
            video_token_id="<|video|>",
            image_start_token_id="<|begin_of_image|>",
            image_end_token_id="<|end_of_image|>",
            video_start_token_id="<|begin_of_video|>",
            video_end_token_id="<|end_of_video|>",
        ),
    )
    limits = {"shortest_edge": 8 * 28 * 28, "longest_edge": 72 * 28 * 28}  # over two equal frames
    return Recipe(
        config,
        hf.Glm4vProcessor(
            hf.Glm4vImageProcessor(size=limits),
            tokenizer,
            hf.Glm4vVideoProcessor(size=limits, max_image_size={"longest_edge": 72 * 28 * 28}),
            chat_template=GLM4V_TEMPLATE,
        ),
    )


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


def paligemma_with(text: str, **more: Any) -> Recipe:
    """PaliGemma has no chat template: its processor puts <image>s and <bos> before the prompt. 16 tokens a picture."""
    tokenizer = gemma("<image>", extra_special_tokens={"image_token": "<image>"})
    pictures = hf.SiglipImageProcessor(size={"height": 28, "width": 28}, **HALF)
    pictures.image_seq_length = 16
    processor = hf.PaliGemmaProcessor(pictures, tokenizer)  # adds 1152 tokens for places and shapes
    vision = tower(model_type="siglip_vision_model", image_size=28, patch_size=7, vision_use_head=False)
    config = hf.PaliGemmaConfig(
        vision_config={**vision, "projection_dim": 64},
        text_config=decoder(tokenizer, model_type=text, head_dim=16, **more),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=64,
        hidden_size=64,
        tie_word_embeddings=True,
    )
    return Recipe(config, processor)


@recipe
def paligemma() -> Recipe:
    """PaliGemma: the whole prompt is two-way, positions start at 1."""
    return paligemma_with("gemma")


# InternVL


@recipe
def internvl() -> Recipe:
    """InternVL: up to 4 tiles by the picture's shape and a thumbnail, 4 tokens each."""
    tokens = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = qwen(*tokens.values(), **tokens)
    config = hf.InternVLConfig(
        text_config=decoder(tokenizer, model_type="qwen2", tie_word_embeddings=False),
        vision_config=tower(image_size=28, patch_size=7),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    size = {"height": 28, "width": 28}
    return Recipe(
        config,
        hf.InternVLProcessor(
            hf.GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=4),
            tokenizer,
            hf.InternVLVideoProcessor(size=size),
            image_seq_length=4,
            chat_template=TURNS_TEMPLATE.replace("IMAGE", "<IMG_CONTEXT>\n{% elif part['type'] == 'video' %}<video>\n"),
        ),
    )


# Mistral 3

MISTRAL_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'system' %}{{ '[SYSTEM_PROMPT]' }}\
{% elif message['role'] == 'user' %}{{ '[INST]' }}{% endif %}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}{{ '[IMG]' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}\
{% if message['role'] == 'system' %}{{ '[/SYSTEM_PROMPT]' }}{% elif message['role'] == 'user' %}{{ '[/INST]' }}\
{% else %}{{ eos_token }}{% endif %}{% endfor %}"""


@recipe
def mistral3() -> Recipe:
    """Mistral 3: a Pixtral tower at the picture's own shape, a mark after each row; 1 to 16 rows."""
    roles = ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
    tokenizer = byte_level(
        ["<unk>", "<s>", "</s>", *roles, "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"],
        bos="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    )
    config = hf.Mistral3Config(
        text_config=decoder(tokenizer, model_type="mistral", sliding_window=None, head_dim=16),
        vision_config=tower(model_type="pixtral", image_size=56, patch_size=7),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    pictures = hf.PixtralImageProcessor(size={"longest_edge": 56}, patch_size={"height": 7, "width": 7})
    return Recipe(
        config,
        hf.PixtralProcessor(pictures, tokenizer, patch_size=7, spatial_merge_size=2, chat_template=MISTRAL_TEMPLATE),
    )


# PerceptionLM

LLAMA3_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}\
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}{{ '<|image|>' }}{% elif part['type'] == 'video' %}{{ '<|video|>' }}\
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|eot_id|>' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""


def llama3(*specials: str, eos_token: str = "<|eot_id|>", **settings: Any) -> PreTrainedTokenizerFast:
    """Llama 3's tokenizer: <|begin_of_text|> is put in front, though templates write it too."""
    headers = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return byte_level(
        [*headers, *specials, "<|finetune_right_pad_id|>"],
        bos="<|begin_of_text|>",
        eos_token=eos_token,
        pad_token="<|finetune_right_pad_id|>",
        **settings,
    )


@recipe
def perception_lm() -> Recipe:
    """PerceptionLM: a timm tower; a thumbnail and up to 4 tiles, 4 tokens each."""
    media = {"image_token": "<|image|>", "video_token": "<|video|>"}
    tokenizer = llama3(*media.values(), extra_special_tokens=media)
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
