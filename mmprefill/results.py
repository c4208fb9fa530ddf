"""What a prefill hands out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from mmprefill.models import ModelBundle
from mmprefill.pipeline import decode
from mmprefill.pipeline.kv_cache import SequenceKV
from mmprefill.scoring import score_together
from mmprefill.types import Choice, Generation, MediaItem, Reuse, Token

if TYPE_CHECKING:
    from mmprefill.encoders.families import Family
    from mmprefill.pipeline.probe import Route
    from mmprefill.streams import Lane


@dataclass(frozen=True)
class Session:
    """What results need of the engine that made them: the model, and the lane on which it may be used."""

    bundle: ModelBundle
    family: Family
    route: Route
    lane: Lane

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""
        return self.bundle.processor.tokenizer

    def text(self, ids: Seq[int]) -> str:
        """Tokens as text, special ones removed."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation, from the checkpoint's generation config."""
        stops: Any = self.family.model.generation_config.eos_token_id
        if stops is None:
            return ()
        return (stops,) if isinstance(stops, int) else tuple(stops)


@dataclass(frozen=True)
class Progress:
    """One request part of the way.

    Attributes:
        id: the request's id.
        done: tokens whose KV is there.
        tokens: prompt tokens in all.
        kv: the KV so far; a view, without a copy.
    """

    id: str
    done: int
    tokens: int
    kv: SequenceKV = field(repr=False)
    session: Session = field(repr=False)

    @property
    def cache(self) -> Any:
        """The KV so far as a transformers `DynamicCache`, of its own tensors."""
        return decode.fresh_cache(self.session.family, self.kv, own=True)


@dataclass
class PrefillResult:
    """The KV cache of one request, and what else was asked for.

    Attributes:
        id: the request's id.
        token_ids: prompt token ids [T], placeholders expanded; host memory.
        positions: [P, T] int64; host memory.
        next_position: position of the token after the prompt (under M-RoPE not T).
        next_token_logits: [V] float32, on the model's device.
        logits: [T, V] float32 where `all_logits` was asked, else None.
        hidden_states: layer -> [T, D], for the layers asked for.
        media: pictures and videos, in order.
        spans: per media item the runs of its placeholder tokens, as (start, end).
        seconds: time by stage.
        reuse: what did not have to be computed.
        route: "packed" or "generic".
        attention: "causal", "spans" (media spans that attend both ways) or "model" (the model's own forward decided).
    """

    id: str
    token_ids: Tensor
    positions: Tensor
    next_position: int
    next_token_logits: Tensor
    emitted: decode.Emitted = field(repr=False)
    session: Session = field(repr=False)
    logits: Tensor | None = field(default=None, repr=False)
    hidden_states: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
    media: tuple[MediaItem, ...] = ()
    spans: tuple[tuple[tuple[int, int], ...], ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    reuse: Reuse = field(default_factory=Reuse)
    route: str = "packed"
    attention: str = "causal"

    @cached_property
    def cache(self) -> Any:
        """A transformers `DynamicCache` of batch 1, without padding, ready for `model.generate(cache=...)`.

        It is yours: whatever grows or crops it does not change what this result stores.
        """
        return decode.fresh_cache(self.session.family, self.emitted, own=getattr(self.emitted, "shared", False))

    @property
    def tokens(self) -> Mapping[str, int]:
        """Prompt tokens by modality."""
        counts = {
            medium: int((self.token_ids == token).sum()) for medium, token in self.session.family.placeholders.items()
        }
        counts = {medium: count for medium, count in counts.items() if count}
        return {"text": len(self.token_ids) - sum(counts.values()), **counts}

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys, values and other state in the cache that this result hands out."""
        cache = decode.fresh_cache(self.session.family, self.emitted) if self.route == "packed" else self.emitted
        return sum(t.numel() * t.element_size() for layer in cache.layers for t in _layer_tensors(layer))

    def top_tokens(self, k: int = 5) -> list[Token]:
        """The k most probable next tokens, most probable first; of equal ones the smaller id, as greedy decoding has it."""
        if k < 1:
            raise ValueError(f"k must be positive, got {k}")
        logprobs = self.next_token_logits.log_softmax(-1)
        least = logprobs.topk(min(k, len(logprobs))).values[-1]
        ids = (~(logprobs < least)).nonzero()[:, 0]  # in bf16 several are equal, and `topk` takes any of them
        values, order = logprobs[ids].sort(descending=True, stable=True)
        pairs = zip(ids[order][:k].tolist(), values[:k].tolist(), strict=True)
        return [Token(i, self.session.tokenizer.decode([i]), logprob) for i, logprob in pairs]

    def generate(self, max_new_tokens: int = 64, **arguments: Any) -> Generation:
        """Continue with transformers' `generate` (greedy unless told otherwise); the stored cache does not change.

        Args:
            max_new_tokens: most tokens.
            arguments: anything that `generate` takes (`do_sample`, `temperature`, `streamer`, ...); one sequence only.
        """
        if arguments.get("num_return_sequences", 1) > 1:
            raise ValueError("generate returns one sequence; call model.generate(cache=result.cache, ...) for several")
        arguments = {"do_sample": False, "max_new_tokens": max_new_tokens, **arguments}
        sequences = self._on_lane(
            decode.generate,
            self.session.family,
            self.emitted,
            self.token_ids,
            self.next_token_logits,
            self.next_position,
            arguments,
        )
        ids = tuple(sequences[0, len(self.token_ids) :].tolist())
        return Generation(ids, self.session.text(ids))

    def score(self, choices: Seq[str]) -> list[Choice]:
        """Log-probability of each choice as the continuation of the prompt, in the order given.

        A choice is tokenised on its own, without special tokens; give the leading space if the prompt wants one.
        """
        return score_together([self], choices)[0]

    def pooled(self, pooling: str = "last", layer: int = -1) -> Tensor:
        """One vector [D] from the hidden states of a layer that the request asked for: "last" or "mean" over tokens."""
        if layer not in self.hidden_states:
            raise ValueError(
                f"ask for the layer first: Request(hidden_states=({layer},)); have {sorted(self.hidden_states)}"
            )
        states = self.hidden_states[layer]
        if pooling not in ("last", "mean"):
            raise ValueError(f"pooling must be 'last' or 'mean', got {pooling!r}")
        return states[-1] if pooling == "last" else states.float().mean(0).to(states.dtype)

    def save(self, path: str | Path) -> Path:
        """Write the KV artefact (`.safetensors`): atomic, with a manifest and checksums. Returns the path."""
        from mmprefill.pipeline import kv_store

        return kv_store.save(self, Path(path))

    def __copy__(self) -> PrefillResult:
        return replace(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a PrefillResult belongs to the engine that made it and cannot be pickled or deep-copied: save(path) it and "
            "resume it with prefiller.resume(path), or read it with mmprefill.load(path); result.cache can be copied"
        )

    def _on_lane(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.session.lane.call(function, *args)


def _layer_tensors(layer: Any) -> list[Tensor]:
    """Every tensor that a cache layer holds: keys and values, or a hybrid's other states."""
    found: list[Tensor] = []
    for name, value in vars(layer).items():
        if name.startswith("_"):
            continue
        parts = value if isinstance(value, (list, tuple)) else [value]
        found += [part for part in parts if isinstance(part, Tensor)]
    return found


def unwrap(outcome: PrefillResult | BaseException) -> PrefillResult:
    """The result, or its failure raised."""
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
