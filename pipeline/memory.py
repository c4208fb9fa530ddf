"""Bytes and seconds -> budgets, with the reason for each: what `mmprefill plan` prints."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mmprefill.pipeline.costs import Costs, Curve
from mmprefill.pipeline.footprint import Footprint

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
SHARE = 0.25  # of what the weights leave, for the transients of a step, and as much for those of a tower call
LEAST = 256  # tokens or patches that speed alone never goes below: a busy machine measures strange curves
SPEED = 0.9  # of the best measured rate, at which a larger budget is no longer worth its latency
LONG = 8192  # tokens of the prompt that chunks are chosen for, where the model takes so many; longer steps only add latency
KEPT, SMALL = 1 / 12, 32 * 2**20  # of the weights, for a store whose size nobody chose, and its least bytes
PICTURES, PROMPTS = 256 * 2**20, 512 * 2**20  # its most bytes, by what it keeps
LOSS = 0.015  # of its time in one step, which it may take longer in chunks: half a per cent less than the aim


@dataclass(frozen=True)
class Budgets:
    """What to run with, and why.

    Attributes:
        step_tokens: most tokens of a step.
        chunk_tokens: most tokens of one request in a step.
        vision_patches: most patches of a tower call.
        overhead: tokens that take as long as starting a step.
        kv_tokens: tokens whose KV fits beside weights and transients.
        memory: bytes given.
        used: bytes of weights and transients, and of the KV of `kv_tokens` tokens; never above `memory`.
        reasons: a sentence for each choice.
    """

    step_tokens: int
    chunk_tokens: int
    vision_patches: int
    overhead: float
    kv_tokens: int
    memory: int
    used: int
    reasons: tuple[str, ...]


def parse_bytes(text: str) -> int:
    """A size such as "24GiB", "800MB" or "1000000".

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text, re.IGNORECASE)
    if not match or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"a size is a number with a unit such as 24GiB or 800MB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def human(count: float) -> str:
    """A byte count with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def device_memory(device: torch.device, loaded: int) -> int:
    """Bytes that there are for a model: all of a GPU; on a CPU what is free now, and what the loaded weights occupy."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return min([_free() + loaded, *_group_limits()])


def _free() -> int:
    """Bytes that processes can still take: what the kernel says, else all that the machine has."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_limits() -> Iterator[int]:
    """The limit of the control group that this process runs in, if it has one."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            yield int(Path("/sys/fs/cgroup", name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue


def give_back() -> None:
    """Let go of memory that the allocator keeps for later, where it can (glibc): freed tensors lie between kept ones in
    the heaps of several threads, and what is free there grows for as long as a job runs."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def store_bytes(given: int | None, weights: int, most: int) -> int:
    """Limit of a store: what the user gave, else a share of the weights, so that it stays small beside its model."""
    return min(max(int(weights * KEPT), SMALL), most) if given is None else given


def choose(
    needs: Footprint, costs: Costs, memory: int, tokens: int | None = None, context: int | None = None
) -> Budgets:
    """Budgets that fit in `memory` bytes.

    Args:
        needs: of the model.
        costs: measured.
        memory: bytes on the device, weights included.
        tokens: the longest prompt that must fit; None for no such demand.
        context: the longest prompt that the model takes; None for no bound.

    Raises:
        ValueError: if the weights, or the prompt, do not fit; it says what would.
    """
    free, longest = left_by_weights(needs, memory), min(context or LONG, LONG)
    step, why_step = _fitted(step_tokens(costs, longest), needs.step_token, free, ("step", "tokens"))
    patches, why_patches = _fitted(_fast(costs.tower), needs.patch, free, ("tower call", "patches"))
    transient = step * needs.step_token + patches * needs.patch
    kv_tokens = (free - transient) // needs.token if needs.token else 0
    if tokens is not None and tokens > kv_tokens:
        wanted = needs.weights + transient + tokens * needs.token
        raise ValueError(
            f"a prompt of {tokens} tokens needs {human(wanted)} and there are {human(memory)}, which hold {kv_tokens} tokens"
        )
    why_chunk, why_kv = _why_chunk(needs, costs, step, tokens or longest), _why_kv(needs, kv_tokens, tokens)
    reasons = [why_step, why_chunk, why_patches, _why_overhead(costs), why_kv]
    return Budgets(
        step_tokens=step, chunk_tokens=step, vision_patches=patches, overhead=costs.overhead_tokens, kv_tokens=kv_tokens,
        memory=memory, used=needs.weights + transient + kv_tokens * needs.token, reasons=tuple(reasons),
    )  # fmt: skip


def left_by_weights(needs: Footprint, memory: int) -> int:
    """Bytes of `memory` beside the weights; needs no costs, and so can be asked before they are measured.

    Raises:
        ValueError: for less than a step of one token, a patch and that token's KV take; it says what would do.
    """
    least = needs.weights + needs.step_token + needs.patch + needs.token
    if memory < least:
        raise ValueError(f"the weights take {human(needs.weights)} of {human(memory)}: give at least {human(least)}")
    return memory - needs.weights


def step_tokens(costs: Costs, longest: int = LONG) -> tuple[int, str]:
    """The least step that is fast enough for packed requests and for chunks of the longest prompt, and what decided."""
    chunk = LEAST
    while chunk < longest and costs.chunking(longest, chunk) > LOSS:
        chunk *= 2
    packed, why = _fast(costs.step)
    if packed < chunk:
        why = f"the least in which a prompt of {longest} tokens loses at most {LOSS:.1%} to one step over all of it"
    return max(packed, chunk), why


def _fast(curve: Curve) -> tuple[int, str]:
    size = max(int(curve.efficient(SPEED, curve.points[-1][0])), LEAST)
    return size, f"the least that reaches {SPEED:.0%} of the best measured speed"


def _fitted(fast: tuple[int, str], unit: int, free: int, names: tuple[str, str]) -> tuple[int, str]:
    """The size that is fast enough, or what memory allows, with the reason."""
    (size, why), (what, units) = fast, names
    room = max(int(free * SHARE) // unit, 1) if unit else size
    if room < size:
        size, why = room, f"at {human(unit)} each they fill a quarter of what the weights leave"
    return size, f"a {what} takes at most {size} {units}: {why}"


def _why_chunk(needs: Footprint, costs: Costs, chunk: int, tokens: int) -> str:
    held, whole = (human(needs.step_token * min(size, tokens)) for size in (chunk, tokens))
    return (
        f"a prompt is prefilled in chunks of {chunk} tokens, as much as a step: {tokens} tokens are "
        f"{-(-tokens // chunk)} of them, hold {held} at a time instead of {whole}, and take "
        f"{costs.chunking(tokens, chunk):.1%} longer than in one step"
    )


def _why_overhead(costs: Costs) -> str:
    return (
        f"starting a step takes as long as {costs.overhead_tokens:.0f} tokens do "
        f"({costs.step.fixed * 1000:.1f} ms): shorter queues run in shorter steps"
    )


def _why_kv(needs: Footprint, room: int, tokens: int | None) -> str:
    one = "" if tokens is None else f"; a finished prompt of {tokens} tokens keeps {human(needs.kv_bytes(tokens))}"
    return f"KV of {room} tokens fits beside weights and transients, at {human(needs.token)} a token{one}"


def as_record(needs: Footprint, costs: Costs, budgets: Budgets) -> dict[str, Any]:
    """For JSON."""
    return {"needs": asdict(needs), "costs": costs.as_dict(), "budgets": asdict(budgets)}


def as_lines(needs: Footprint, costs: Costs, budgets: Budgets) -> list[str]:
    """For people."""
    windows = sorted({layer.kept for layer in needs.layers if layer.kept is not None})
    kinds = f"{len(needs.layers)} layers" + (f", windows keep {', '.join(map(str, windows))} tokens" if windows else "")
    step, tower = budgets.step_tokens, budgets.vision_patches
    rates = [f"{step / costs.step(step):.0f} tokens/s in steps of {step}"] if costs.step(step) else []
    rates += [f"{tower / costs.tower(tower):.0f} patches/s in the tower"] if costs.tower(tower) else []
    return [
        f"memory    {human(budgets.memory)} given, {human(budgets.used)} planned",
        f"weights   {human(needs.weights)}",
        f"KV        {human(needs.token)} a token, {kinds}",
        f"transient {human(needs.step_token)} a token of a step, {human(needs.patch)} a patch",
        f"measured  {'; '.join(rates) or 'nothing'}",
        "",
        *(f"- {reason}" for reason in budgets.reasons),
        "",
        f"PrefillConfig(step_tokens={step}, chunk_tokens={budgets.chunk_tokens}, vision_patches={tower})",
    ]
