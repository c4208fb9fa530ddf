"""The bundled model before it has learnt: its tokenizer, processor and architecture, in PerceptionLM's format."""

import random

import make_scenes as ms
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PerceptionLMConfig,
    PerceptionLMForConditionalGeneration,
    PerceptionLMImageProcessor,
    PerceptionLMProcessor,
    PerceptionLMVideoProcessor,
    PreTrainedTokenizerFast,
)

SIDE, PATCH, POOL, WIDTH = ms.GRID, 8, 2, 192
CELLS = SIDE // PATCH // POOL  # the decoder sees CELLS x CELLS tokens per picture
ARCHITECTURE = "vit_pe_core_large_patch14_336"
SPECIAL = {
    "bos": "<|begin_of_text|>",
    "end": "<|end_of_text|>",
    "head": "<|start_header_id|>",
    "body": "<|end_header_id|>",
    "eot": "<|eot_id|>",
    "image": "<|image|>",
    "video": "<|video|>",
    "pad": "<|finetune_right_pad_id|>",
}
TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- '<|image|>' }}"
    "{%- elif part['type'] == 'video' %}{{- '<|video|>' }}"
    "{%- elif part['type'] == 'text' %}{{- part['text'] }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>' }}{%- endif %}"
)
SYSTEM = ("You are a helpful assistant.", "Answer briefly.", "You answer questions about pictures.")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(vocabulary: int = 1024) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the words of the questions; any other text still has tokens."""
    rng, texts = random.Random("tokenizer"), list(SYSTEM) + ["user", "assistant", "system"] * 2000
    for _ in range(12000):
        kind = rng.choice(ms.KINDS)
        asked, _ = ms.make_question(rng, kind)
        texts += [asked.question, asked.answer]
    for _ in range(3000):
        if asked := ms.ask_one_of(rng, ms.make_pair(rng), rng.choice(ms.SINGLE)):
            texts.append(asked.question)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL["bos"],
        eos_token=SPECIAL["eot"],
        pad_token=SPECIAL["pad"],
        extra_special_tokens={"image_token": SPECIAL["image"], "video_token": SPECIAL["video"]},
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> PerceptionLMProcessor:
    """One tile per picture, squashed to the tower's square."""
    size = {"height": SIDE, "width": SIDE}
    return PerceptionLMProcessor(
        image_processor=PerceptionLMImageProcessor(
            vision_input_type="vanilla", tile_size=SIDE, max_num_tiles=1, size=size
        ),
        video_processor=PerceptionLMVideoProcessor(size=size),
        tokenizer=tokenizer,
        patch_size=PATCH,
        pooling_ratio=POOL,
        chat_template=TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> PerceptionLMForConditionalGeneration:
    """About 3.5 M parameters: a ViT of 4 blocks and a Llama of 5 layers, equally wide."""
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 448,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": WIDTH // 4,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},  # half of each head hardly turns: it
        # finds things by what they are, however far away
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eot"],
        "pad_token_id": ids["pad"],
    }
    grid = (SIDE // PATCH, SIDE // PATCH)
    tower = {
        "embed_dim": WIDTH,
        "depth": 4,
        "num_heads": 4,
        "mlp_ratio": 3,
        "img_size": (SIDE, SIDE),
        "patch_size": PATCH,
        "ref_feat_shape": grid,
        "global_pool": "",
        "class_token": False,
        "use_post_transformer_norm": True,
    }
    config = PerceptionLMConfig(
        text_config=text,
        vision_config={"model_type": "timm_wrapper", "architecture": ARCHITECTURE, "model_args": tower},
        vision_use_cls_token=False,
        projector_pooling_ratio=POOL,
        image_token_id=ids["image"],
        video_token_id=ids["video"],
        tie_word_embeddings=True,
    )
    model = PerceptionLMForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        bos_token_id=ids["bos"], eos_token_id=[ids["eot"], ids["end"]], pad_token_id=ids["pad"], do_sample=False
    )
    return model
