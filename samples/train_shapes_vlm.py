"""Trains the vision-language model that ships in mmprefill/assets, from scratch, on scenes drawn as it goes.

    python samples/train_shapes_vlm.py WORK --export mmprefill/assets/shapes-vlm

WORK keeps checkpoints: the same command resumes. Batch number i depends on the seed and i alone, so a resumed run sees
what an unbroken one sees. The first steps teach the tower alone, patch by patch, what each patch shows (the scene is
known); then conversations train everything. The heads of the first part are dropped on export.
`--evaluate N` asks the exported model N fresh questions, through plain transformers, and prints the table.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import make_scenes as ms
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForImageTextToText,
    AutoProcessor,
    GenerationConfig,
    PerceptionLMConfig,
    PerceptionLMForConditionalGeneration,
    PerceptionLMImageProcessor,
    PerceptionLMProcessor,
    PerceptionLMVideoProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

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
MIX = {"colour": 10, "shape": 9, "size": 6, "yes/no": 13, "count": 17, "relation": 31, "digit": 7, "letter": 7}


# ----------------------------------------------------------------------------------------------- tokenizer and model
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


# -------------------------------------------------------------------------------------------------- conversations
class Writer:
    """Conversations as token ids, exactly as the chat template and the processor would make them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
        self.picture = [self.ids["image"]] * CELLS**2
        self.words = lru_cache(maxsize=200_000)(lambda text: tokenizer.backend_tokenizer.encode(text).ids)
        self.user = [self.ids["head"], *self.words("user"), self.ids["body"]]
        self.assistant = [self.ids["head"], *self.words("assistant"), self.ids["body"]]

    def start(self, rng: random.Random) -> tuple[list[int], list[int]]:
        """The first tokens: sometimes a system message."""
        tokens = [self.ids["bos"]]
        if rng.random() < 0.06:
            tokens += [
                self.ids["head"],
                *self.words("system"),
                self.ids["body"],
                *self.words(rng.choice(SYSTEM)),
                self.ids["eot"],
            ]
        return tokens, [-1] * len(tokens)

    def turn(self, asked: ms.Asked, pictures: int, text_first: bool) -> tuple[list[int], list[int]]:
        """Token ids and, where the answer is, its kind; elsewhere -1."""
        question, seen = self.words(asked.question), self.picture * pictures
        ask = [
            *self.user,
            *((*question, *seen) if text_first else (*seen, *question)),
            self.ids["eot"],
            *self.assistant,
        ]
        reply = [*self.words(asked.answer), self.ids["eot"]]
        return ask + reply, [-1] * len(ask) + [ms.KINDS.index(asked.kind)] * len(reply)


def _segment(rng: random.Random, kind: str, most: int) -> tuple[list[ms.Scene], "callable"]:
    """Scenes and a function that asks the next question about them."""
    mix = list(MIX), list(MIX.values())
    if kind == "one":
        scene = ms.make_scene(rng, most=most)
        return [scene], lambda: ms.ask(rng, scene, rng.choices(*mix)[0])
    if kind == "two":
        pair = ms.make_pair(rng, most=most)
        return list(
            pair
        ), lambda: ms.ask_pair(rng, *pair) if rng.random() < 0.65 else ms.ask_one_of(rng, pair, rng.choices(*mix)[0])
    scene = ms.make_scene(rng, glyphs=(), most=most)
    words, ordered = ms.told(rng, scene)
    first = [words + " "]

    def ask() -> ms.Asked | None:
        if asked := ms.ask_told(rng, scene, ordered):
            asked.question = (first.pop() if first else "") + asked.question
        return asked

    return [], ask


def make_row(
    rng: random.Random, writer: Writer, length: int, long: bool, kind: str = "", most: int = 6
) -> tuple[list[int], list[int], list[ms.Scene]]:
    """One conversation of at most `length` tokens; a long one brings new pictures every few turns."""
    tokens, marks = writer.start(rng)
    scenes: list[ms.Scene] = []
    while True:
        current = kind or rng.choices(("one", "two", "text"), (70, 22, 8))[0]
        seen, ask = _segment(rng, current, most)
        turns = rng.choice((1, 1, 2, 3, 5, 8)) if long else 10**6
        describes = rng.random() < (0.15 if long else 0.6)
        asked_before: set[str] = set()
        pending, tries = len(seen), 0
        while turns and tries < 60:
            tries += 1
            last = describes and current == "one" and (turns == 1 or len(tokens) > length - 75)
            asked = ms.ask(rng, seen[0], "describe") if last and pending == 0 else ask()
            if asked is None or asked.question in asked_before:
                continue
            if asked.kind in ("digit", "letter") and not asked.question.startswith("In the"):
                if asked.kind in asked_before:  # a second time it could be copied from the first
                    continue
                asked_before.add(asked.kind)
            new, mark = writer.turn(asked, pending, bool(pending) and rng.random() < 0.1)
            if len(tokens) + len(new) > length:
                return tokens, marks, scenes
            if pending:
                scenes += seen
            asked_before.add(asked.question)
            tokens, marks, pending, turns = tokens + new, marks + mark, 0, turns - 1
            if last and asked.kind == "describe":
                describes = False
                if not long:
                    return tokens, marks, scenes
        if not long:
            return tokens, marks, scenes


# --------------------------------------------------------------------------------------------------------- batches
@dataclass
class Batch:
    """One step's input. `shown_*` say what patches and cells show, for the heads that exist only in training."""

    pixels: Tensor  # [P, 3, SIDE, SIDE] uint8
    shown_patches: Tensor  # [P, 3, patches] colour, shape or character, size; -100 where unclear
    shown_cells: Tensor  # [P, 6, cells] centre here, colour, shape, size, character, (unused)
    offsets: Tensor  # [P, 2, cells] from the middle of the cell to the centre, in cells
    tokens: Tensor | None = None  # [B, T]
    marks: Tensor | None = None  # [B, T] kind where an answer is, else -1
    alone: Tensor | None = None  # [B] whether a row's turns see the pictures only, not each other


CHARS = ms.DIGITS + ms.LETTERS


def label(scene: ms.Scene) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What every patch and every cell shows."""
    n = SIDE // PATCH
    centres = (np.arange(n) + 0.5) * PATCH
    patches = np.zeros((3, n, n), np.int64)
    cells, offsets = np.full((5, CELLS, CELLS), -100, np.int64), np.zeros((2, CELLS, CELLS), np.float32)
    cells[0] = 0
    sx, sy = scene.width / SIDE, scene.height / SIDE
    unit = math.sqrt(sx * sy)
    for item in (*scene.things, *scene.glyphs):
        thing = isinstance(item, ms.Thing)
        r = item.r if thing else item.height * 0.6
        d = np.hypot((centres[None, :] - item.x) * sx / unit, (centres[:, None] - item.y) * sy / unit)
        inside, near = d < max(r * 0.75, 6.0), d < r + 5
        hole = thing and item.shape == "ring"
        if thing:
            colour, shape = list(ms.COLOURS).index(item.colour), ms.SHAPES.index(item.shape)
            values = (colour + 1, shape + 1, ms.SIZES.index(item.size) + 1)
        else:
            values = (len(ms.COLOURS) + 1, len(ms.SHAPES) + 1 + CHARS.index(item.char), 3)
        for plane, value in zip(patches, values, strict=True):
            plane[near & ~inside] = -100
            plane[inside] = value
        if hole and r > 10:
            patches[0][d < r * 0.4] = -100
        size = PATCH * POOL
        i, j = min(CELLS - 1, int(item.y / size)), min(CELLS - 1, int(item.x / size))
        cells[:, i, j] = (
            (1, colour, shape, values[2] - 1, -100) if thing else (2, -100, -100, -100, CHARS.index(item.char))
        )
        offsets[:, i, j] = item.x / size - j - 0.5, item.y / size - i - 0.5
    return patches.reshape(3, -1), cells.reshape(5, -1), offsets.reshape(2, -1)


class Batches:
    """A process's share of batch i of the run, from the seed, i and the process's number alone."""

    def __init__(self, args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, rank: int):
        self.args, self.rank = args, rank
        self.writer, self.shrink = Writer(tokenizer), build_processor(tokenizer).image_processor

    def __getitem__(self, i: int) -> Batch:
        args = self.args
        rng = random.Random(f"train {args.seed} {i} {self.rank}")
        if i < args.seeing:
            return self.see(rng, [self.crowded(rng) for _ in range(args.pictures // args.processes)])
        long = (i - args.seeing) > 0.3 * (args.steps - args.seeing) and i % 8 == 0
        length = args.long if long else args.length
        budget = args.rows * args.length // length // args.processes
        most = min(ms.MAX_OBJECTS, 4 + int(14 * (i - args.seeing) / (args.steps - args.seeing)))  # few objects at first
        rows = [
            make_row(rng, self.writer, length, long, "" if long else self.kind(k, budget), most) for k in range(budget)
        ]
        batch = self.see(rng, [s for row in rows for s in row[2]])
        width = max(len(r[0]) for r in rows)
        share = 0.9 if i - args.seeing < 0.5 * (args.steps - args.seeing) else 0.5  # as if asked alone: learnt sooner
        batch.alone = torch.tensor([not long and rng.random() < share for _ in rows])
        pad = self.writer.ids["pad"]
        batch.tokens = torch.tensor([r[0] + [pad] * (width - len(r[0])) for r in rows])
        batch.marks = torch.tensor([r[1] + [-1] * (width - len(r[1])) for r in rows])
        return batch

    def kind(self, k: int, rows: int) -> str:
        """What the k-th conversation is about."""
        return "text" if k < rows * 0.06 else "two" if k < rows * 0.31 else "one"

    def crowded(self, rng: random.Random) -> ms.Scene:
        """As much to see as fits: the tower learns twice as fast from it."""
        return ms.make_scene(rng, count=rng.choice((5, 6)), glyphs=tuple(rng.choices(CHARS, k=rng.choice((2, 3, 4)))))

    def see(self, rng: random.Random, scenes: list[ms.Scene]) -> Batch:
        """Pictures as the processor makes them, and what they show."""
        pixels, labels = np.empty((len(scenes), SIDE, SIDE, 3), np.uint8), [label(s) for s in scenes]
        for k, scene in enumerate(scenes):
            image = ms.draw(scene, rng.getrandbits(48))
            if image.size != (SIDE, SIDE):
                made = self.shrink(image, do_rescale=False, do_normalize=False, return_tensors="pt").pixel_values
                pixels[k] = made[0, 0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8).numpy()
            else:
                pixels[k] = np.asarray(image)
        shown = [torch.from_numpy(np.stack([x[j] for x in labels])) for j in range(3)]
        return Batch(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), *shown)


# -------------------------------------------------------------------------------------------------------- training
def bmm_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scaling: float, **_: object
) -> tuple:
    """Causal attention by two matrix products: on a CPU in bf16 twice as fast as the fused one for 300 tokens."""
    if q.shape[2] > 700:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q * scaling) @ k.transpose(-2, -1)
    return ((scores + attention_mask).softmax(-1) @ v).transpose(1, 2).contiguous(), None


class Learner(nn.Module):
    """The model with the heads that exist only in training."""

    def __init__(self, model: PerceptionLMForConditionalGeneration, tokenizer: PreTrainedTokenizerFast):
        super().__init__()
        self.model, self.frozen = model, False
        dim, wide = WIDTH, len(ms.SHAPES) + len(CHARS)
        self.patch_head = nn.Linear(dim, (len(ms.COLOURS) + 2) + (wide + 1) + 4)
        self.cell_head = nn.Linear(dim, 3 + 2)
        self.words = [self.word_ids(tokenizer, w) for w in (ms.COLOURS, ms.SHAPES, ms.SIZES, CHARS)]
        self.turn_start = [tokenizer.convert_tokens_to_ids(t) for t in (SPECIAL["head"], "user")]
        AttentionInterface.register("bmm_training", bmm_attention)
        model.model.language_model.config._attn_implementation = "bmm_training"
        for block in model.model.vision_tower.timm_model.blocks:
            block.attn.fused_attn = False
        for module in model.model.language_model.modules():
            if isinstance(module, LlamaRMSNorm):  # one operation for six: a tenth of the decoder's time
                module.forward = partial(
                    F.rms_norm, normalized_shape=(dim,), weight=module.weight, eps=module.variance_epsilon
                )

    @staticmethod
    def word_ids(tokenizer: PreTrainedTokenizerFast, words: Iterable[str]) -> Tensor:
        """Each word's token, at the beginning of a text and within."""
        ids = [[tokenizer.backend_tokenizer.encode(space + w).ids for w in words] for space in ("", " ")]
        return torch.tensor([[one[0] if len(one) == 1 else one[-1] for one in row] for row in ids])

    def see(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The tower's patches and the cells that the decoder sees."""
        parts = self.model.model
        pixels = (pixels.float() / 127.5 - 1).to(self.patch_head.weight.dtype)
        with torch.set_grad_enabled(not self.frozen and torch.is_grad_enabled()):
            patches = parts.vision_tower.timm_model.forward_features(pixels)
        return patches, parts.multi_modal_projector(patches)

    def seen_loss(self, patches: Tensor, cells: Tensor, batch: Batch) -> Tensor:
        """How well patches and cells tell what is there."""
        loss = torch.zeros(())
        parts = self.patch_head(patches).float().split((len(ms.COLOURS) + 2, len(ms.SHAPES) + len(CHARS) + 1, 4), -1)
        for out, want in zip(parts, batch.shown_patches.unbind(1), strict=True):
            loss = loss + F.cross_entropy(out.flatten(0, 1), want.flatten())
        centre, offset = self.cell_head(cells).float().split((3, 2), -1)
        loss = loss + F.cross_entropy(centre.flatten(0, 1), batch.shown_cells[:, 0].flatten())
        words = self.model.model.language_model.embed_tokens.weight  # cells come to mean what these words mean
        for ids, want in zip(self.words, batch.shown_cells[:, 1:].unbind(1), strict=True):
            here = want >= 0
            for form in ids:
                out = 3 * cells[here] @ words[form].t()
                loss = loss + 0.5 * F.cross_entropy(out.float(), want[here])
        there = (batch.shown_cells[:, 0] > 0).unsqueeze(-1)
        return loss + 2 * ((offset - batch.offsets.transpose(1, 2)).square() * there).sum() / there.sum().clamp(min=1)

    def mask(self, batch: Batch) -> Tensor:
        """[B, 1, T, T] what is added to the scores: causal, and in some rows each turn by itself with the pictures."""
        tokens, seen = batch.tokens, batch.tokens == self.model.config.image_token_id
        starts = (tokens == self.turn_start[0]) & (tokens.roll(-1, 1) == self.turn_start[1])
        turn = starts.cumsum(1)
        common = (turn == 0) | seen | ((turn == 1) & ~seen.any(1, keepdim=True))
        together = common[:, None, :] | (turn[:, :, None] == turn[:, None, :]) | ~batch.alone[:, None, None]
        return torch.full(together.shape, -3e4).masked_fill_(together.tril(), 0.0).unsqueeze(1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The heads' loss; per answer token its loss and whether it was right."""
        patches, cells = self.see(batch.pixels)
        seen = torch.zeros(()) if self.frozen else self.seen_loss(patches, cells, batch)
        if batch.tokens is None:
            return seen, None, None
        parts = self.model.model
        rows = parts.language_model.embed_tokens(batch.tokens)
        here = (batch.tokens == self.model.config.image_token_id).unsqueeze(-1)
        rows = rows.masked_scatter(here, cells)
        mask = None if batch.tokens.shape[1] > 700 else self.mask(batch).to(rows.dtype)
        hidden = parts.language_model(inputs_embeds=rows, use_cache=False, attention_mask=mask).last_hidden_state
        b, t = torch.nonzero(batch.marks[:, 1:] >= 0, as_tuple=True)
        logits = self.model.lm_head(hidden[b, t]).float()
        want = batch.tokens[b, t + 1]
        return seen, F.cross_entropy(logits, want, reduction="none"), logits.argmax(-1) == want


def shared(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """Their mean over the processes, in fp32; every process has the same ones missing."""
    there = [t for t in tensors if t is not None]
    flat = torch.cat([t.float().flatten() for t in there])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(flat)
        flat /= torch.distributed.get_world_size()
    parts = iter(flat.split([t.numel() for t in there]))
    return [None if t is None else next(parts).view_as(t) for t in tensors]


def orthogonal(g: Tensor) -> Tensor:
    """Newton-Schulz: the nearest matrices with equal singular values, roughly (Muon)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() / (g.flatten(1).norm(dim=1).view(-1, 1, 1) + 1e-7)
    if tall := x.shape[1] > x.shape[2]:
        x = x.transpose(1, 2)
    for _ in range(5):
        s = x @ x.transpose(1, 2)
        x = a * x + (b * s + c * s @ s) @ x
    return (x.transpose(1, 2) if tall else x).float()


class Optimizer:
    """Muon for the matrices inside the blocks, Adam for the rest; fp32 masters of bf16 weights and their mean."""

    def __init__(self, learner: Learner):
        self.names, self.params = zip(*learner.named_parameters(), strict=True)
        self.master = [p.detach().float().clone() for p in self.params]
        self.mean = [m.clone() for m in self.master]
        self.first = [torch.zeros_like(m) for m in self.master]
        self.second = [torch.zeros_like(m) if not self.is_matrix(i) else None for i, m in enumerate(self.master)]
        self.sees = ["vision_tower" in n or "projector" in n for n in self.names]
        self.groups: dict[tuple, list[int]] = {}
        for i, p in enumerate(self.params):
            if self.is_matrix(i):
                self.groups.setdefault(tuple(p.shape), []).append(i)

    def is_matrix(self, i: int) -> bool:
        """Whether Muon updates it."""
        name = self.names[i]
        return self.params[i].ndim >= 2 and any(
            part in name for part in (".blocks.", ".layers.", "projector", "patch_embed")
        )

    @torch.no_grad()
    def step(self, n: int, rates: tuple[float, float]) -> float:
        """One update; `rates` of the tower and of the rest are relative to the peak."""
        grads = shared([p.grad for p in self.params])
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads if g is not None))
        clip = min(1.0, 2.0 / (norm + 1e-6))
        turns = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        mine = torch.distributed.get_rank() if turns > 1 else 0
        updates: list[Tensor | None] = [None] * len(grads)
        for shape, members in self.groups.items():
            members = [i for i in members if grads[i] is not None]
            for i in members:
                self.first[i].lerp_(grads[i], 0.05)
                updates[i] = torch.zeros(shape)
            here = members[mine::turns]  # each process makes its share of the updates
            if not here:
                continue
            pushed = torch.stack([grads[i].lerp(self.first[i], 0.95) for i in here])
            split = shape[0] // WIDTH if "qkv" in self.names[here[0]] else 1  # q, k and v are three matrices
            pushed = orthogonal(pushed.view(len(here) * split, shape[0] // split, -1))
            pushed *= turns * 0.02 * max(1.0, pushed.shape[1] / pushed.shape[2]) ** 0.5
            for i, update in zip(here, pushed.view(len(here), *shape), strict=True):
                updates[i] = update
        for i, update in enumerate(shared(updates)):
            if update is not None:
                rate = rates[0] if self.sees[i] else rates[1]
                self.master[i].mul_(1 - rate * 0.001).add_(update, alpha=-rate)
        for i, g in enumerate(grads):
            if g is None or self.second[i] is None:
                continue
            g = g * clip
            self.first[i].lerp_(g, 0.1)
            self.second[i].lerp_(g.square(), 0.02)
            k = n + 1
            update = (self.first[i] / (1 - 0.9**k)) / ((self.second[i] / (1 - 0.98**k)).sqrt() + 1e-8)
            if "embed_tokens" in self.names[i]:  # all rows drift together, which would make the words look alike; the
                self.master[i].add_(
                    update, alpha=-1e-3 * rates[1]
                )  # logits do not change when their mean is taken away
                self.master[i].sub_(self.master[i].mean(0))
            else:
                self.master[i].add_(update, alpha=-3e-3 * (rates[0] if self.sees[i] else rates[1]))
        keep = min(0.99, (n + 1) / (n + 20))
        torch._foreach_lerp_(self.mean, self.master, 1 - keep)
        for p, m in zip(self.params, self.master, strict=True):
            p.copy_(m)
            p.grad = None
        return norm

    def state(self) -> dict:
        """What a checkpoint keeps."""
        return {"master": self.master, "mean": self.mean, "first": self.first, "second": self.second}

    def begin(self, weights: list[Tensor]) -> None:
        """Weights of another run, nothing else of it."""
        weights = [w if w.shape == m.shape else m for w, m in zip(weights, self.master, strict=True)]
        self.load(self.state() | {"master": weights, "mean": [w.clone() for w in weights]})

    @torch.no_grad()
    def freeze(self) -> None:
        """Ends the tower's training, at the mean of its weights; the projector learns with the decoder from then on."""
        for name, p, master, mean, sees in zip(self.names, self.params, self.master, self.mean, self.sees, strict=True):
            if sees and "projector" not in name:
                master.copy_(mean)
                p.copy_(mean)
                p.requires_grad_(False)
        self.sees = ["vision_tower" in name for name in self.names]

    def load(self, state: dict) -> None:
        """A checkpoint, back."""
        self.master, self.mean, self.first, self.second = (state[k] for k in ("master", "mean", "first", "second"))
        with torch.no_grad():
            for p, m in zip(self.params, self.master, strict=True):
                p.copy_(m)


@torch.no_grad()
def like_to_like(learner: Learner, optimizer: Optimizer, batch: Batch) -> None:
    """Lets a word attend, from the first step, to the cells that show what it means.

    A cell resembles the words for what it shows. It gets a second, turned copy of itself (R), and the second key head of the
    first three layers looks for words through that copy: without it, a word would find itself. Only the slowly turning
    dimensions of RoPE take part, so that distance does not matter. What all empty cells share is taken away.
    """
    generator = torch.Generator().manual_seed(1)
    names, master = optimizer.names, optimizer.master
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
    both = torch.eye(WIDTH) + turn
    empty = learner.see(batch.pixels)[1].float()[batch.shown_cells[:, 0] == 0].mean(0)
    weight, bias = (next(i for i, n in enumerate(names) if n.endswith(f"linear_2.{x}")) for x in ("weight", "bias"))
    master[bias].copy_(both @ (master[bias] - empty))
    master[weight].copy_(both @ master[weight])
    width = WIDTH // 4
    slow = [d for d in range(width) if d % (width // 2) >= width // 6]
    for i, name in enumerate(names):
        if any(f"layers.{layer}.self_attn.k_proj" in name for layer in range(3)):
            query = names.index(name.replace("k_proj", "q_proj"))
            look = 2.4 * torch.linalg.qr(torch.randn(WIDTH, len(slow), generator=generator))[0].t()
            for d, row in zip(slow, look, strict=True):
                master[query][2 * width + d] = row
                master[query][3 * width + d] = row
                master[i][width + d] = turn @ row
    optimizer.mean = [m.clone() for m in master]
    optimizer.load(optimizer.state())


def rates_at(i: int, args: argparse.Namespace) -> tuple[float, float]:
    """Relative to the peak, for the tower and for the rest: two times warm-up, a flat part, then straight down.

    Once conversations begin the tower moves slowly: the decoder's early gradients would make it forget what it sees.
    """
    if i < args.seeing:
        rate = min(1.0, (i + 1) / 40, max(0.15, 2 - 2 * i / args.seeing))
        return rate, rate
    done = (i - args.seeing) / (args.steps - args.seeing)
    rate = min(1.0, (i + 1 - args.seeing) / 60, max(0.02, (1 - done) / 0.65))
    return 0.1 * rate, 0.5 * rate


class Report:
    """Progress by kind of question, as running means."""

    def __init__(self) -> None:
        self.loss, self.right, self.start, self.done = {}, {}, time.time(), 0

    def note(self, marks: Tensor, loss: Tensor, right: Tensor) -> None:
        """Adds a step."""
        kinds = marks[:, 1:][marks[:, 1:] >= 0]
        for k in kinds.unique().tolist():
            at = kinds == k
            for store, value in ((self.loss, loss[at].mean()), (self.right, right[at].float().mean())):
                store[k] = float(value) if k not in store else 0.9 * store[k] + 0.1 * float(value)

    def line(self, step: int, steps: int, seen: float, norm: float) -> str:
        """One line for the log."""
        self.done += 1
        eta = (time.time() - self.start) / self.done * (steps - step) / 60
        kinds = " ".join(f"{ms.KINDS[k]} {v:.3f}/{100 * self.right[k]:.0f}" for k, v in sorted(self.loss.items()))
        return f"{step}/{steps} eta {eta:.0f} min seen {seen:.3f} norm {norm:.1f} {kinds}"


def train(rank: int, args: argparse.Namespace) -> None:
    """One process's part of the run, from the newest checkpoint if there is one.

    Each process has one thread: two threads of one process wait for each other at every operation, which is slow where
    the cores are shared with anything else; two processes meet twice a step.
    """
    torch.set_num_threads(max(1, args.threads // args.processes))
    if args.processes > 1:
        meet = f"file://{(args.work / 'meet').resolve()}"
        torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=args.processes)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    learner = Learner(build_model(tokenizer), tokenizer).to(torch.bfloat16)
    optimizer, start, kept = Optimizer(learner), 0, args.work / "checkpoint.pt"
    spent = 0.0
    if kept.exists():
        saved = torch.load(kept, weights_only=True)
        optimizer.load(saved["optimizer"])
        start, spent = saved["step"], saved["seconds"]
    else:
        if args.start:
            optimizer.begin(torch.load(args.start, weights_only=True)["optimizer"]["mean"])
        like_to_like(
            learner,
            optimizer,
            Batches(args, tokenizer, 0).see(random.Random(1), [ms.make_scene(random.Random(k)) for k in range(24)]),
        )
    say = print if rank == 0 else lambda *_, **__: None
    say(f"{sum(p.numel() for p in learner.model.parameters()) / 1e6:.2f} M parameters, from step {start}", flush=True)
    batches, report, began = Batches(args, tokenizer, rank), Report(), time.time()
    for step in range(start, args.steps):
        if step >= args.frozen and not learner.frozen:
            learner.frozen = True
            optimizer.freeze()
        batch = batches[step]
        seen, loss, right = learner(batch)
        total = seen if loss is None else loss.mean() + args.seen_weight * seen
        total.backward()
        norm = optimizer.step(step, rates_at(step, args))
        if loss is not None:
            report.note(batch.marks, loss.detach(), right)
        line = report.line(step + 1, args.steps, float(seen.detach()), norm)
        if (step + 1) % 10 == 0:
            say(line, flush=True)
        if rank == 0 and ((step + 1) % args.save_every == 0 or step + 1 == args.seeing or step + 1 == args.steps):
            seconds = spent + time.time() - began
            part = kept.with_suffix(".part")
            torch.save({"optimizer": optimizer.state(), "step": step + 1, "seconds": seconds}, part)
            part.replace(kept)
            export(args.work / "export", learner, optimizer, tokenizer)
            say(f"saved at step {step + 1} after {seconds / 60:.1f} min", flush=True)


def export(folder: Path, learner: Learner, optimizer: Optimizer, tokenizer: PreTrainedTokenizerFast) -> None:
    """What plain transformers loads: the running mean of the weights, in bf16."""
    model = build_model(tokenizer)
    state = {
        n.removeprefix("model."): m
        for n, m in zip(optimizer.names, optimizer.mean, strict=True)
        if n.startswith("model.")
    }
    model.load_state_dict(state, strict=False)  # lm_head is the embedding
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    build_processor(tokenizer).save_pretrained(folder)


# ------------------------------------------------------------------------------------------------------ evaluation
@torch.inference_mode()
def answers(
    model: nn.Module, processor: PerceptionLMProcessor, questions: list[tuple[str, list]], batch: int = 32
) -> list[str]:
    """Greedy answers through plain transformers, batched by equal length so that nothing is padded."""
    inputs = []
    for text, images in questions:
        content = [{"type": "image"} for _ in images] + [{"type": "text", "text": text}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs.append(processor(text=prompt, images=images or None, return_tensors="pt"))
    lengths: dict[tuple, list[int]] = {}
    for i, one in enumerate(inputs):
        lengths.setdefault((one.input_ids.shape[1], len(questions[i][1])), []).append(i)
    out = [""] * len(inputs)
    for members in lengths.values():
        for k in range(0, len(members), batch):
            some = members[k : k + batch]
            fed = {"input_ids": torch.cat([inputs[i].input_ids for i in some])}
            if questions[some[0]][1]:
                fed["pixel_values"] = torch.cat([inputs[i].pixel_values for i in some]).to(model.dtype)
            made = model.generate(
                **fed, attention_mask=torch.ones_like(fed["input_ids"]), max_new_tokens=64, do_sample=False
            )
            for i, row in zip(some, made[:, fed["input_ids"].shape[1] :], strict=True):
                out[i] = processor.tokenizer.decode(row, skip_special_tokens=True)
    return out


def evaluate(folder: Path, number: int, held_out: int, seed: int, dtype: torch.dtype, show: int) -> dict:
    """Accuracy by kind on fresh questions; those about held-out pairs apart."""
    from mmprefill.answers import is_right

    rng = random.Random(f"evaluate {seed}")
    asked = [ms.make_question(rng, kind) for kind in ms.kinds_of(rng, number)]
    asked += [ms.make_question(rng, "", held_out=True) for _ in range(held_out)]
    questions = [(a.question, [ms.draw(s, rng.getrandbits(48)) for s in scenes]) for a, scenes in asked]
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
    replies = answers(model, AutoProcessor.from_pretrained(folder), questions)
    table: dict[str, list[int]] = {}
    for (a, _), reply in zip(asked, replies, strict=True):
        right = is_right(a.kind, reply, a.answer)
        for row in ("held-out pairs",) if a.held_out else (a.kind, "overall"):
            table.setdefault(row, [0, 0])
            table[row][0] += right
            table[row][1] += 1
        if not right and show:
            show -= 1
            print(f"{a.kind}: {a.question} -> {reply!r}, not {a.answer!r}")
    for row in (*ms.KINDS, "overall", "held-out pairs"):
        if row in table:
            print(f"{row:15} {100 * table[row][0] / table[row][1]:5.1f} %  of {table[row][1]}")
    print(json.dumps({row: [right, of] for row, (right, of) in table.items()}))
    return table


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder of the checkpoints, or of the model to evaluate")
    parser.add_argument("--export", type=Path, help="where the finished model goes [WORK/export]")
    parser.add_argument("--steps", type=int, default=1650, help="updates in all [%(default)s]")
    parser.add_argument("--seeing", type=int, default=400, help="of which the tower alone [%(default)s]")
    parser.add_argument("--pictures", type=int, default=64, help="pictures per step for the tower alone [%(default)s]")
    parser.add_argument("--rows", type=int, default=24, help="conversations per step [%(default)s]")
    parser.add_argument("--length", type=int, default=320, help="their length in tokens [%(default)s]")
    parser.add_argument(
        "--long", type=int, default=2304, help="length of the long ones, one step in eight later on [%(default)s]"
    )
    parser.add_argument(
        "--seen-weight", type=float, default=1.0, help="weight of the tower's own loss in conversations [%(default)s]"
    )
    parser.add_argument("--frozen", type=int, default=10**9, help="step from which the tower stays as it is [never]")
    parser.add_argument("--start", type=Path, metavar="CHECKPOINT", help="begin with the mean weights of another run")
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="[%(default)s]")
    parser.add_argument("--processes", type=int, default=2, help="that share a batch and the threads [%(default)s]")
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints [%(default)s]")
    parser.add_argument("--evaluate", type=int, metavar="N", help="no training: ask the model in WORK N questions")
    parser.add_argument("--held-out", type=int, default=300, help="and so many about held-out pairs [%(default)s]")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="for --evaluate [%(default)s]"
    )
    parser.add_argument("--show", type=int, default=0, metavar="N", help="list the first N wrong answers")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.evaluate:
        evaluate(args.work, args.evaluate, args.held_out, args.seed, getattr(torch, args.dtype), args.show)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    (args.work / "meet").unlink(missing_ok=True)
    torch.multiprocessing.spawn(train, (args,), nprocs=args.processes)
    if args.export:
        args.export.mkdir(parents=True, exist_ok=True)
        for file in (args.work / "export").iterdir():
            (args.export / file.name).write_bytes(file.read_bytes())


if __name__ == "__main__":
    main()
