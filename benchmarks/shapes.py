"""Random checkpoints at real sizes, made on the spot, with a real tokenizer and processor.

    python benchmarks/shapes.py smolvlm-256m FOLDER        SmolVLM-256M's shape; a picture goes in whole (64 tokens)
    python benchmarks/shapes.py qwen2.5-vl-500m FOLDER     Qwen2.5-VL's architecture at 475 M parameters

The weights are random: what such a model says means nothing, what it costs is real. The same versions of transformers
and Python make the same checkpoint every time.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
)
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

TOKENS = 16_000  # learnt; enough for a few characters per token, as in published tokenizers
SOURCES = 150  # files of the standard library that they are learnt from


def make(name: str, folder: Path, *, layers: int | None = None) -> Path:
    """Write the checkpoint `name` in bf16 into `folder`; `layers` cuts the depth, for a test of what uses it."""
    torch.manual_seed(0)
    SHAPES[name](folder, layers)
    return folder


def library() -> Iterator[str]:
    """Lines of Python's standard library: text that every machine has."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:SOURCES]:
        yield from file.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)


def byte_bpe(specials: list[str]) -> Tokenizer:
    """A byte-level BPE that knows `specials`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(library(), trainer)
    return tokenizer


def smolvlm(folder: Path, layers: int | None) -> None:
    """SmolVLM-256M: a vision tower of 93 M parameters before a language model of 135 M."""
    grid = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    named = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_bpe(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *named.values(), "<video>", *grid]),
        bos_token="<|im_start|>",
        eos_token="<end_of_utterance>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        extra_special_tokens=named,
    )
    ids = tokenizer.convert_tokens_to_ids
    config = SmolVLMConfig(
        text_config={
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": layers or 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49_280,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
            "rms_norm_eps": 1e-5,
            "bos_token_id": ids("<|im_start|>"),
            "eos_token_id": ids("<end_of_utterance>"),
            "pad_token_id": ids("<|im_end|>"),
        },
        vision_config={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": layers or 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
        scale_factor=4,
        image_token_id=ids("<image>"),
        pad_token_id=ids("<|im_end|>"),
    )
    SmolVLMForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "max_image_size": {"longest_edge": 512}}
    SmolVLMProcessor(
        SmolVLMImageProcessor(size={"longest_edge": 2048}, do_image_splitting=False, **half),
        tokenizer,
        SmolVLMVideoProcessor(size={"longest_edge": 512}, **half),
        image_seq_len=64,
        chat_template=(
            "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}: "
            "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
            "{% for part in message['content'] %}"
            "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
            "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
            "{% if add_generation_prompt %}Assistant:{% endif %}"
        ),
    ).save_pretrained(folder)


def qwen(folder: Path, layers: int | None) -> None:
    """Qwen2.5-VL: M-RoPE, a tower with windows, pictures at their own resolution."""
    named = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_bpe(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *named.values()]),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=named,
    )
    ids = tokenizer.convert_tokens_to_ids
    depth = layers or 12
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": layers or 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 32_000,
            "max_position_embeddings": 32_768,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6},
            "bos_token_id": ids("<|endoftext|>"),
            "eos_token_id": ids("<|im_end|>"),
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": depth,
            "hidden_size": 640,
            "intermediate_size": 2560,
            "num_heads": 8,
            "out_hidden_size": 896,
            "patch_size": 14,
            "fullatt_block_indexes": list(range(3, depth, 4)) or [depth - 1],
            "window_size": 112,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=1280 * 28 * 28),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=(
            "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
            "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
            "{% for part in message['content'] %}"
            "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
            "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
            "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    ).save_pretrained(folder)


SHAPES: dict[str, Callable[[Path, int | None], None]] = {"smolvlm-256m": smolvlm, "qwen2.5-vl-500m": qwen}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="cut both models to so many")
    arguments = parser.parse_args()
    print(make(arguments.name, arguments.folder, layers=arguments.layers))
