"""Real, tiny tokenizers in the styles of the published families, trained in milliseconds on a fixed corpus."""

import json
from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "What is in this picture? The picture shows a cat on a red mat, next to a small dog and two birds.",
    "Describe the image in detail. Describe what is different between the first image and the second image.",
    "A user asks a question and the assistant answers it: yes, no, maybe; the answer is written below the chart.",
    "How many people are there in this photo? There are 12 people, 345 trees and 6789 leaves in the photo.",
    "You are a helpful assistant. Compare the pictures, count the objects, read the text and translate the signs.",
    "It's blue, isn't it? We'll see: they've painted the house green, the door white and the roof dark grey.",
    "def area(width, height):\n    return width * height\n\n\nprint(area(3, 4))\n",
    "Der Hund läuft über die Straße, während die Katze schläft. Où est le château ? ¿Qué ves en la imagen?",
    "画像には何が写っていますか。猫が二匹います。 Привет, что на картинке? На картинке дом и дерево. 😀",
    "The quick brown fox jumps over the lazy dog while the train leaves the station at half past nine.",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(
    specials: Sequence[str],
    *,
    digits: str = "{1,3}",
    nfc: bool = False,
    gpt2: bool = False,
    bos: str | None = None,
    merges: int = 160,
    **settings: object,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE as in Qwen (one digit a token), Llama 3 and Mistral's Tekken (`bos` added), SmolLM (`gpt2`)."""
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    if gpt2:
        split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        split = [
            pre_tokenizers.Split(Regex(WORDS.replace("DIGITS", digits)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=len(alphabet) + merges, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
        ),
    )
    return _finish(tokenizer, specials, bos, settings)


def sentencepiece_like(
    specials: Sequence[str],
    *,
    bos: str,
    dummy_prefix: bool,
    first: Sequence[str],
    merges: int = 160,
    **settings: object,
) -> PreTrainedTokenizerFast:
    """BPE over characters with a fallback to bytes and "▁" for spaces.

    With `dummy_prefix` as in Llama 2 (a space is put before every piece of text between special tokens), without as
    in Gemma. `first` are the tokens whose ids start at 0, as in the published vocabularies.
    """
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    alphabet = sorted({char for line in CORPUS for char in line if char.isascii() and char not in " \n"} | {"▁"})
    trained.train_from_iterator(
        [line for line in CORPUS if line.isascii()],
        trainers.BpeTrainer(
            vocab_size=len(alphabet) + merges, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
        ),
    )
    pieces, pairs = _vocabulary(trained)
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*first, *BYTES, "\n", "\n\n", *pieces]))}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("\n", "\n"), *pairs], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    space = normalizers.Replace(" ", "▁")
    clean = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if dummy_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        clean.append(decoders.Strip(" ", left=1))
    else:
        tokenizer.normalizer = space
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(clean)
    return _finish(tokenizer, [*first, *specials], bos, settings)


def _vocabulary(tokenizer: Tokenizer) -> tuple[list[str], list[tuple[str, str]]]:
    """The trained pieces in order of id, and the merges in order of rank."""
    model = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return pieces, [tuple(pair) for pair in model["merges"]]


def _finish(tokenizer: Tokenizer, specials: Sequence[str], bos: str | None, settings: dict) -> PreTrainedTokenizerFast:
    """Control and placeholder tokens are special added tokens, never split and never normalised."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        settings = {"bos_token": bos, **settings}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=8192, **settings
    )
