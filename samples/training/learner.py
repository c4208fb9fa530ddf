"""The model as it is while it learns: heads on the tower, and attention heads that are shown where to look."""

from collections.abc import Iterable
from functools import partial

import make_scenes as ms
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training.conversations import CHARS, LOOKS, Batch, Pointed
from training.model import CELLS, SPECIAL, WIDTH
from transformers import AttentionInterface, PerceptionLMForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class Attention:
    """Causal attention by two matrix products: on a CPU in bf16 twice as fast as the fused one for 300 tokens.

    Heads that are shown where to look (LOOKS) leave a loss here for each layer that has some.
    """

    def __init__(self) -> None:
        self.looks: dict[int, list[tuple[int, Pointed]]] = {}
        self.losses: list[Tensor] = []

    def begin(self, batch: Batch) -> None:
        """Before each forward pass."""
        self.losses, self.looks = [], {}
        for kind, pointed in (batch.looks or {}).items():
            layer, head = LOOKS[kind]
            self.looks.setdefault(layer, []).append((head, pointed))

    def __call__(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        **_: object,
    ) -> tuple:
        """As transformers calls it."""
        if q.shape[2] > 700:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            return out.transpose(1, 2).contiguous(), None
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q * scaling) @ k.transpose(-2, -1)
        scores = scores + attention_mask
        for head, pointed in self.looks.get(module.layer_idx, ()):
            given = scores[pointed.rows, head, pointed.places].float().log_softmax(-1)
            self.losses.append(-(given * pointed.wanted).sum(-1).mean())
        return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


class Learner(nn.Module):
    """The model with the heads that exist only in training."""

    def __init__(self, model: PerceptionLMForConditionalGeneration, tokenizer: PreTrainedTokenizerFast):
        super().__init__()
        self.model = model
        dim, wide = WIDTH, len(ms.SHAPES) + len(CHARS)
        self.patch_head = nn.Linear(dim, (len(ms.COLOURS) + 2) + (wide + 1) + 4)
        self.cell_head = nn.Linear(dim, 3 + 2 + 2)
        self.words = [self.word_ids(tokenizer, w) for w in (ms.COLOURS, ms.SHAPES, ms.SIZES, CHARS)]
        axis = (torch.arange(CELLS) + 0.5) / (CELLS / 2) - 1  # -1 to 1 from edge to edge
        self.middles = torch.stack([axis.repeat(CELLS), axis.repeat_interleave(CELLS)], -1)  # [cells, 2] x, y
        self.turn_start = [tokenizer.convert_tokens_to_ids(t) for t in (SPECIAL["head"], "user")]
        self.attention = Attention()
        AttentionInterface.register("bmm_training", self.attention)
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
        patches = parts.vision_tower.timm_model.forward_features(pixels)
        return patches, parts.multi_modal_projector(patches)

    def seen_loss(self, patches: Tensor, cells: Tensor, batch: Batch) -> Tensor:
        """How well patches and cells tell what is there."""
        loss = torch.zeros(())
        parts = self.patch_head(patches).float().split((len(ms.COLOURS) + 2, len(ms.SHAPES) + len(CHARS) + 1, 4), -1)
        for out, want in zip(parts, batch.shown_patches.unbind(1), strict=True):
            loss = loss + F.cross_entropy(out.flatten(0, 1), want.flatten())
        centre, offset, place = self.cell_head(cells).float().split((3, 2, 2), -1)
        loss = loss + F.cross_entropy(centre.flatten(0, 1), batch.shown_cells[:, 0].flatten())
        words = self.model.model.language_model.embed_tokens.weight  # cells come to mean what these words mean
        for ids, want in zip(self.words, batch.shown_cells[:, 1:].unbind(1), strict=True):
            here = want >= 0
            for form in ids:
                out = 3 * cells[here] @ words[form].t()
                loss = loss + 0.5 * F.cross_entropy(out.float(), want[here])
        there = (batch.shown_cells[:, 0] > 0).unsqueeze(-1)
        wanted = batch.offsets.transpose(1, 2)
        off = 2 * (offset - wanted).square() + 4 * (place - self.middles - wanted / (CELLS / 2)).square()
        return loss + (off * there).sum() / there.sum().clamp(min=1)

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
        seen = self.seen_loss(patches, cells, batch)
        if batch.tokens is None:
            return seen, None, None
        parts = self.model.model
        rows = parts.language_model.embed_tokens(batch.tokens)
        here = (batch.tokens == self.model.config.image_token_id).unsqueeze(-1)
        rows = rows.masked_scatter(here, cells)
        mask = None if batch.tokens.shape[1] > 700 else self.mask(batch).to(rows.dtype)
        self.attention.begin(batch)
        hidden = parts.language_model(inputs_embeds=rows, use_cache=False, attention_mask=mask).last_hidden_state
        b, t = torch.nonzero(batch.marks[:, 1:] >= 0, as_tuple=True)
        logits = self.model.lm_head(hidden[b, t]).float()
        want = batch.tokens[b, t + 1]
        return seen, F.cross_entropy(logits, want, reduction="none"), logits.argmax(-1) == want
