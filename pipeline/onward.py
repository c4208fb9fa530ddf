"""Onward from emitted KV a few tokens at a time, so that others' work runs in between and a caller may stop at any token.

What was emitted is never changed: the first call copies it, with room for all that is to come.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from mmprefill.encoders.families import Family
from mmprefill.pipeline.decode import Emitted, fresh_cache, plain_logits
from mmprefill.pipeline.head import logits_of
from mmprefill.pipeline.kv_cache import LayerPlan, SequenceKV
from mmprefill.pipeline.prefill import hidden_after


class Onward:
    """A growing copy of emitted KV. Used on the lane that owns the model, one call after another.

    Args:
        family: the loaded model.
        plan: its layers; None on the generic path.
        emitted: KV of a whole prompt.
        logits: next-token logits [V] after it.
        next_position: position of the first token that is appended.
        room: most tokens that will be appended.
    """

    def __init__(
        self, family: Family, plan: LayerPlan | None, emitted: Emitted, logits: Tensor, next_position: int, room: int
    ) -> None:
        self._family, self._plan, self._emitted, self._room = family, plan, emitted, room
        self._grown: Emitted | None = None
        self._chosen: int | None = None
        self.logits, self.position = logits, next_position

    @property
    def kv(self) -> Emitted:
        """The KV with everything appended so far."""
        if self._grown is None:
            packed = isinstance(self._emitted, SequenceKV)
            self._grown = self._emitted.grown(self._room) if packed else fresh_cache(self._family, self._emitted)
        return self._grown

    def append(self, ids: Seq[int]) -> Tensor:
        """Run text tokens; returns the logits [V] after the last of them."""
        if self._plan is not None and isinstance(self.kv, SequenceKV):
            hidden = hidden_after(self._family, self._plan, [(self.kv, ids, self.position)], stored=True)
            self.logits = logits_of(self._family, hidden[:, -1:])[0, -1]
        else:
            self.logits = plain_logits(self._family, self.kv, ids, self.position)[-1].clone()
        self.position += len(ids)
        return self.logits

    def choose(self) -> int:
        """The most probable next token, after the one before it was run. `room` bounds the calls."""
        if self._chosen is not None:
            self.append([self._chosen])
        self._chosen = int(self.logits.argmax())
        return self._chosen
