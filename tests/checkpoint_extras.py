"""More families: rarer packed ones, and the hybrids that take the generic route."""

from typing import Any

import transformers as hf
from checkpoint_families import (
    MROPE,
    QWEN3_TEMPLATE,
    QWEN3_TOWER,
    TURNS_TEMPLATE,
    gemma,
    paligemma_with,
    qwen,
    qwen3_processor,
    qwen_ids,
)
from checkpoint_parts import HALF, Recipe, decoder, ids_of, recipe, tower
from checkpoint_tokenizers import byte_level

INTERLEAVED_MROPE = {**MROPE, "mrope_interleaved": True}
ALTERNATING = ["sliding_attention", "full_attention"] * 2


@recipe
def paligemma2() -> Recipe:
    """PaliGemma 2: two-way prompts, soft-capped scores, every other layer with a window of 16."""
    return paligemma_with(
        "gemma2",
        layers=4,
        sliding_window=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
    )


@recipe
def qwen3_vl_moe() -> Recipe:
    """Qwen3-VL with four experts of which two are used."""
    tokenizer = qwen()
    config = hf.Qwen3VLMoeConfig(
        text_config=decoder(
            tokenizer,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            rope_parameters=INTERLEAVED_MROPE,
        ),
        vision_config={**QWEN3_TOWER, "deepstack_visual_indexes": [0, 1]},
        tie_word_embeddings=False,
        **qwen_ids(tokenizer),
    )
    return Recipe(config, qwen3_processor(tokenizer))


AYA_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}<|START_OF_TURN_TOKEN|>\
{{ {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[message['role']] }}\
{% if message['role'] == 'assistant' %}<|START_RESPONSE|>{% endif %}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}\
{% if message['role'] == 'assistant' %}<|END_RESPONSE|>{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}\
{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{% endif %}"""


@recipe
def aya_vision() -> Recipe:
    """Aya Vision on Cohere 2: named tiles of 4 tokens; full layers without RoPE. "<image>" itself is no placeholder."""
    turns = ["<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"]
    turns += ["<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"]
    marks = ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "<image>"]
    tiles = [*(f"TILE_{i}" for i in range(1, 13)), "TILE_GLOBAL"]
    tokenizer = byte_level(
        ["<PAD>", "<UNK>", "<BOS_TOKEN>", *turns, *marks, *tiles],
        bos="<BOS_TOKEN>",
        eos_token="<|END_OF_TURN_TOKEN|>",
        pad_token="<PAD>",
        unk_token="<UNK>",
    )
    config = hf.AyaVisionConfig(
        vision_config=tower(model_type="siglip_vision_model", image_size=28, patch_size=7, vision_use_head=False),
        text_config=decoder(
            tokenizer,
            layers=4,
            model_type="cohere2",
            head_dim=16,
            sliding_window=16,
            layer_types=ALTERNATING,
            logit_scale=1.0,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
        downsample_factor=2,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    pictures = hf.GotOcr2ImageProcessor(
        size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=4, **HALF
    )
    return Recipe(
        config,
        hf.AyaVisionProcessor(
            pictures, tokenizer, patch_size=7, img_size=28, downsample_factor=2, chat_template=AYA_TEMPLATE
        ),
    )


@recipe
def ovis2() -> Recipe:
    """Ovis 2: rows from a visual vocabulary, 4 a tile; the marks around them get visual rows too."""
    marks = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
    tokenizer = qwen("<image>", "<IMG_ATOM>", *marks, image_token="<image>")
    config = hf.Ovis2Config(
        vision_config=tower(image_size=14, patch_size=7, vocab_size=64, num_visual_indicator_tokens=5),
        text_config=decoder(tokenizer, model_type="qwen2", tie_word_embeddings=False),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_ATOM>"),
        visual_indicator_token_ids=tokenizer.convert_tokens_to_ids(marks),
        vocab_size=decoder(tokenizer)["vocab_size"],
        hidden_size=64,
        tie_word_embeddings=False,
    )
    pictures = hf.Ovis2ImageProcessor(
        size={"height": 14, "width": 14}, crop_to_patches=True, min_patches=1, max_patches=4, **HALF
    )
    template = TURNS_TEMPLATE.replace("IMAGE", "<image>\\n")
    return Recipe(config, hf.Ovis2Processor(pictures, tokenizer, image_seq_length=4, chat_template=template))


GEMMA4_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}\
{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}\
{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}{{ '<|image|>' }}{% elif part['type'] == 'video' %}{{ '<|video|>' }}\
{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}{{ '<turn|>\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"""


@recipe
def gemma4() -> Recipe:
    """Gemma 4: two-way pictures in its sliding layers only, shared K/V, an embedding per layer; 54 to 70 tokens."""
    media = {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    }
    tokenizer = gemma("<|turn>", "<turn|>", *media.values(), "<|video|>", extra_special_tokens=media)
    text = decoder(
        tokenizer,
        layers=4,
        head_dim=16,
        sliding_window=16,
        layer_types=ALTERNATING,
        num_kv_shared_layers=2,
        use_bidirectional_attention="vision",
        hidden_size_per_layer_input=8,
        global_head_dim=32,
    )
    config = hf.Gemma4Config(
        text_config={**text, "vocab_size_per_layer_input": text["vocab_size"]},
        vision_config=tower(
            num_key_value_heads=2, head_dim=16, patch_size=4, pooling_kernel_size=3, position_embedding_size=64
        ),
        audio_config=None,
        **ids_of(
            tokenizer,
            image_token_id="<|image|>",
            video_token_id="<|video|>",
            audio_token_id="<|audio|>",
            boi_token_id="<|image>",
            eoi_token_id="<image|>",
        ),
    )
    return Recipe(
        config,
        hf.Gemma4Processor(
            hf.Gemma4AudioFeatureExtractor(),
            hf.Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70),
            tokenizer,
            hf.Gemma4VideoProcessor(patch_size=4, max_soft_tokens=70),
            image_seq_length=70,
            chat_template=GEMMA4_TEMPLATE,
        ),
    )


KIMI_TEMPLATE = """\
{% for message in messages %}<|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>\
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\
{% elif part['type'] == 'video' %}<|kimi_k25_video_placeholder|>\
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}\
{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""


@recipe
def kimi_k25() -> Recipe:
    """Kimi K2.5 on DeepSeek 3: latent attention (the cache holds latents of 16 + 16), experts; 1 to 24 tokens."""
    turns = ["[BOS]", "[EOS]", "[PAD]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"]
    marks = ["<|im_end|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>"]
    media = {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"}
    tokenizer = byte_level(
        [*turns, *marks, *media.values()],
        bos_token="[BOS]",
        eos_token="<|im_end|>",
        pad_token="[PAD]",
        extra_special_tokens=media,
    )
    config = hf.Kimi_K25Config(
        text_config=decoder(
            tokenizer,
            layers=4,
            model_type="deepseek_v3",
            num_key_value_heads=4,
            moe_intermediate_size=32,
            n_shared_experts=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=32,
            v_head_dim=24,
        ),
        vision_config=tower(patch_size=8, pos_emb_height=4, pos_emb_width=4, pos_emb_time=4, merge_kernel_size=(2, 2)),
        projection_hidden_size=32,
        tie_word_embeddings=False,
        **ids_of(tokenizer, image_token_id=media["image_token"], video_token_id=media["video_token"]),
    )
    limits = {"size": {"max_height": 64, "max_width": 64}, "patch_size": 8, "max_patches": 64}
    return Recipe(
        config,
        hf.Kimi_K25Processor(
            hf.Kimi_K25ImageProcessor(**limits),
            tokenizer,
            hf.Kimi_K25VideoProcessor(**limits),
            chat_template=KIMI_TEMPLATE,
        ),
    )


GRANITE_TEMPLATE = """\
{% for message in messages %}<|start_of_role|>{{ message['role'] }}<|end_of_role|>\
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}{{ '<image>\n' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<|end_of_text|>
{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""


@recipe
def granite4_vision() -> Recipe:
    """Granite 4 Vision: picture rows start as zeros and are added at several layers; 4 rows a tile and newlines."""
    tokenizer = byte_level(
        ["<|end_of_text|>", "<|pad|>", "<|start_of_role|>", "<|end_of_role|>", "<image>"],
        gpt2=True,
        bos_token="<|end_of_text|>",
        eos_token="<|end_of_text|>",
        pad_token="<|pad|>",
        extra_special_tokens={"image_token": "<image>"},
    )
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    config = hf.Granite4VisionConfig(
        vision_config=tower(
            model_type="clip_vision_model", hidden_size=64, image_size=28, patch_size=7, projection_dim=64
        ),
        text_config=decoder(
            tokenizer,
            layers=4,
            attention_multiplier=0.25,
            embedding_multiplier=2.0,
            logits_scaling=1.0,
            residual_multiplier=0.5,
        ),
        qformer_config={
            "model_type": "blip_2_qformer",
            "num_hidden_layers": 1,
            "intermediate_size": 64,
            "cross_attention_frequency": 1,
            "max_position_embeddings": 64,
            "use_qformer_text_input": False,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=pinpoints,
        image_seq_length=4,
        downsample_rate="1/2",
        deepstack_layer_map=[[1, 0], [-1, 2]],
        spatial_target_layers=[0, 1, 2, 3],
        projector_dropout=0.0,
        tie_word_embeddings=False,
    )
    pictures = hf.LlavaNextImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints
    )
    return Recipe(
        config,
        hf.Granite4VisionProcessor(
            pictures,
            tokenizer,
            patch_size=7,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            downsample_rate="1/2",
            chat_template=GRANITE_TEMPLATE,
        ),
        gain=1.3,
    )


# Hybrids


def delta_net(tokenizer: hf.PreTrainedTokenizerFast, **more: Any) -> dict[str, Any]:
    """Qwen3.5's decoder: gated delta-net layers between attention layers."""
    return decoder(
        tokenizer,
        layers=4,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        rope_parameters={**INTERLEAVED_MROPE, "partial_rotary_factor": 1.0},
        **more,
    )


@recipe
def qwen3_5() -> Recipe:
    """Qwen3.5: a delta-net hybrid with Qwen3-VL's processor."""
    tokenizer = qwen()
    config = hf.Qwen3_5Config(
        text_config=delta_net(tokenizer, tie_word_embeddings=False),
        vision_config=QWEN3_TOWER,
        tie_word_embeddings=False,
        **qwen_ids(tokenizer),
    )
    return Recipe(config, qwen3_processor(tokenizer), gain=0.7)


@recipe
def lfm2_vl() -> Recipe:
    """LFM2-VL: short convolutions between attention layers; 2 to 8 tokens a picture, and 4 a tile."""
    tiles = [f"<|img_row_{row}_col_{col}|>" for row in range(1, 5) for col in range(1, 5)]
    marks = {
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    }
    tokenizer = byte_level(
        ["<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", *marks.values(), *tiles],
        bos="<|startoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        extra_special_tokens=marks,
    )
    config = hf.Lfm2VlConfig(
        text_config=decoder(
            tokenizer,
            layers=4,
            model_type="lfm2",
            conv_L_cache=3,
            block_multiple_of=2,
            layer_types=["conv", "full_attention"] * 2,
        ),
        vision_config=tower(model_type="siglip2_vision_model", num_patches=64, patch_size=4, vision_use_head=False),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        downsample_factor=2,
        projector_hidden_size=32,
        tie_word_embeddings=True,
    )
    pictures = hf.Lfm2VlImageProcessor(
        encoder_patch_size=4,
        tile_size=16,
        size={"height": 16, "width": 16},
        min_image_tokens=2,
        max_image_tokens=8,
        max_tiles=4,
    )
    template = "{{ bos_token }}" + TURNS_TEMPLATE.replace("IMAGE", "<image>")
    return Recipe(config, hf.Lfm2VlProcessor(pictures, tokenizer, chat_template=template), gain=0.7)


@recipe
def minicpmv4_6() -> Recipe:
    """MiniCPM-V 4.6 on Qwen3.5: numbered pictures cut into slices; 4 tokens for the whole and for each slice."""
    marks = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    }
    tokenizer = qwen(*list(marks.values())[2:], **marks)
    config = hf.MiniCPMV4_6Config(
        text_config=delta_net(tokenizer, model_type="qwen3_5_text", tie_word_embeddings=False),
        vision_config=tower(image_size=32, patch_size=4),
        insert_layer_id=0,
        image_size=32,
        tie_word_embeddings=False,
        **ids_of(tokenizer, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>"),
    )
    sizes = {"scale_resolution": 32, "patch_size": 4, "max_slice_nums": 4}
    template = QWEN3_TEMPLATE.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    return Recipe(
        config,
        hf.MiniCPMV4_6Processor(
            hf.MiniCPMV4_6ImageProcessor(**sizes),
            hf.MiniCPMV4_6VideoProcessor(**sizes),
            tokenizer,
            chat_template=template,
        ),
        gain=0.7,
    )
