"""Log-probabilities of choices that go on from prefilled prompts: many prompts and many choices in packed steps.

The first token of a choice needs no computation, the prompt's next-token logits answer it. The others do: what several
choices begin with is computed once per prompt, whatever follows it. Stored KV is read and never changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mmprefill.encoders.families import Family
from mmprefill.pipeline.decode import Emitted, fresh_cache, plain_logits
from mmprefill.pipeline.head import logits_of
from mmprefill.pipeline.kv_cache import LayerPlan, SequenceKV
from mmprefill.pipeline.prefill import hidden_after

Ids = tuple[int, ...]
STEP_ROWS = 1024  # tokens of a step
STEP_CONTEXT = 2**16  # stored tokens that a step looks at: a layer's are put side by side where it cannot read in place
HEAD_ROWS = 64  # logits in memory at once


@dataclass(frozen=True)
class Run:
    """Tokens to compute after every prompt.

    Attributes:
        ids: the tokens.
        ends: beginnings of choices, of two tokens or more, whose last token is read off this run.
    """

    ids: Ids
    ends: tuple[Ids, ...]


def runs_of(choices: Seq[Ids]) -> list[Run]:
    """The fewest runs that answer all choices: one that begins another comes with it."""
    begun = sorted({ids[:-1] for ids in choices if len(ids) > 1})
    longest = [a for a, b in pairwise([*begun, ()]) if b[: len(a)] != a]
    ends: list[list[Ids]] = [[] for _ in longest]
    for end in dict.fromkeys(ids[:stop] for ids in choices for stop in range(2, len(ids) + 1)):
        ends[bisect_left(longest, end[:-1])].append(end)  # the first that begins so
    return [Run(ids, tuple(each)) for ids, each in zip(longest, ends, strict=True)]


def logprobs_after(
    family: Family, plan: LayerPlan | None, starts: Seq[tuple[Emitted, int]], choices: Seq[Ids]
) -> list[dict[Ids, float]]:
    """Log-probabilities of the second and later tokens of choices, after each of several prompts.

    Args:
        family: the loaded model.
        plan: its layers; None on the generic path.
        starts: per prompt its emitted KV and its next position.
        choices: token ids.

    Returns:
        Per prompt: beginning of a choice -> log-probability of that beginning's last token.
    """
    runs, found = runs_of(choices), [dict[Ids, float]() for _ in starts]
    work = [(start, run) for start in range(len(starts)) for run in runs]
    packed = plan is not None and all(isinstance(kv, SequenceKV) for kv, _ in starts)
    for step in _steps(starts, work) if packed else [[each] for each in work]:
        if packed and plan is not None:
            parts = [(starts[start][0], run.ids, starts[start][1]) for start, run in step]
            values = _read(family, hidden_after(family, plan, parts, stored=False), step)
        else:
            (kv, position), run = starts[step[0][0]], step[0][1]
            logprobs = plain_logits(family, fresh_cache(family, kv), run.ids, position).log_softmax(-1)
            values = [float(logprobs[len(end) - 2, end[-1]]) for end in run.ends]
        for (start, end), value in zip(((s, end) for s, run in step for end in run.ends), values, strict=True):
            found[start][end] = value
    return found


def _steps(starts: Seq[tuple[Emitted, int]], work: Seq[tuple[int, Run]]) -> Iterator[list[tuple[int, Run]]]:
    """Work in order, in steps within both bounds; what exceeds them alone runs alone."""
    step: list[tuple[int, Run]] = []
    rows = context = 0
    for start, run in work:
        more, seen = len(run.ids), starts[start][0].length + len(run.ids)
        if step and (rows + more > STEP_ROWS or context + seen > STEP_CONTEXT):
            yield step
            step, rows, context = [], 0, 0
        step.append((start, run))
        rows, context = rows + more, context + seen
    if step:
        yield step


def _read(family: Family, hidden: Tensor, step: Seq[tuple[int, Run]]) -> list[float]:
    """Log-probabilities of every end of a step, from its hidden states [1, N, D]."""
    rows, tokens, first = list[int](), list[int](), 0
    for _, run in step:
        rows += [first + len(end) - 2 for end in run.ends]
        tokens += [end[-1] for end in run.ends]
        first += len(run.ids)
    values: list[float] = []
    for at in range(0, len(rows), HEAD_ROWS):
        logprobs = logits_of(family, hidden[:, rows[at : at + HEAD_ROWS]])[0].log_softmax(-1)
        chosen = torch.tensor(tokens[at : at + HEAD_ROWS], device=logprobs.device)
        values += logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    return values
