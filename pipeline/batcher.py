"""Which work runs next: pictures for the tower, or chunks of many sequences for the decoder. Pure Python, no torch.

Ordering and fitting are apart. An order is a function that ranks jobs; the batcher takes them in that order and fits what
it may into a budget. The same batcher drives the engine and the simulator, on whatever clock calls it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

SHARED_PATCHES, OWN_PATCHES = 1024, 4096

_numbers = itertools.count()

LegalEnd = Callable[[int, int], int]


def anywhere(start: int, end: int) -> int:
    """Where a chunk that starts at `start` and wants to end at `end` may end, for causal attention."""
    return end


@dataclass(eq=False)
class Picture:
    """One medium of a job that waits for the tower.

    Attributes:
        patches: its work.
        group: only pictures of one group share a tower call.
        running: on the tower at this moment.
    """

    patches: int
    group: object = None
    running: bool = False


@dataclass(eq=False)
class Job:
    """A request as the batcher sees it; its owner keeps it up to date.

    Attributes:
        tokens: prompt tokens in all.
        arrived: when it came, on the batcher's clock.
        media: whether it has pictures, encoded or not.
        priority: higher runs first, under `by_priority`.
        pictures: those that wait for the tower, in the order of the prompt.
        ready: tokens that may be prefilled now, i.e. up to the first picture or prefix that is not there yet.
        done: tokens prefilled, or taken from a stored prefix.
        running: a chunk of it is in a step at this moment.
        call: what it came with, `prefill_many` or `stream`, where fuller steps matter more than when each is done; None
            where somebody waits for it alone.
        chunk: most tokens of it in a step, where it has a bound of its own.
        legal_end: where a chunk may end; never inside a two-way span.
        number: in the order in which jobs were made; decides where the order does not.
    """

    tokens: int
    arrived: float
    media: bool = False
    priority: int = 0
    pictures: list[Picture] = field(default_factory=list)
    ready: int = 0
    done: int = 0
    running: bool = False
    call: object | None = None
    chunk: int | None = None
    legal_end: LegalEnd = anywhere
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def remaining(self) -> int:
        """Tokens still to prefill."""
        return self.tokens - self.done


Order = Callable[[Job, float], tuple[float, ...]]  # job, now -> rank; the smallest runs first


def first_come(job: Job, now: float) -> tuple[float, ...]:
    """In order of arrival."""
    return (job.arrived,)


def text_first(ageing: float = 10.0) -> Order:
    """A request with pictures goes after the texts that come up to `ageing` seconds later than it; none starves."""

    def order(job: Job, now: float) -> tuple[float, ...]:
        return (job.arrived + ageing * job.media,)

    return order


def shortest_remaining(ageing: float = 1000.0, patch_cost: float = 1.0) -> Order:
    """Least work left first; each second of waiting takes `ageing` tokens off. A patch counts as `patch_cost` tokens."""

    def order(job: Job, now: float) -> tuple[float, ...]:
        patches = sum(picture.patches for picture in job.pictures)
        return (job.remaining + patch_cost * patches - ageing * (now - job.arrived),)

    return order


def by_priority(job: Job, now: float) -> tuple[float, ...]:
    """Highest priority first, then in order of arrival."""
    return (-job.priority, job.arrived)


@dataclass(frozen=True)
class Take:
    """Tokens [job.done, end) of a job."""

    job: Job
    end: int


@dataclass(frozen=True)
class Step:
    """One packed step of the decoder."""

    takes: tuple[Take, ...]

    @property
    def tokens(self) -> int:
        """Rows of the step."""
        return sum(take.end - take.job.done for take in self.takes)


@dataclass(frozen=True)
class Encode:
    """One call of the tower."""

    pictures: tuple[tuple[Job, Picture], ...]

    @property
    def patches(self) -> int:
        """Work of the call."""
        return sum(picture.patches for _, picture in self.pictures)


class Batcher:
    """Jobs waiting for tower and decoder.

    A job joins a step if what that saves everybody who waits (one `overhead`) outweighs what it costs those who are in
    the step already (its tokens). So a short queue is served in short steps, and a long one in full ones.

    Nobody waits for one job of a call by itself: delaying it costs nothing, so among themselves they fill steps. A job that
    is waited for alone joins a step before them, and none of them joins a step that has one.

    Args:
        order: ranks jobs.
        step_tokens: most tokens of a step; a chunk that cannot be smaller still runs, alone.
        chunk_tokens: most tokens of one job in a step; None for no bound but the step's.
        vision_patches: most patches of a tower call; a larger picture still runs, alone. None for `SHARED_PATCHES` where
            tower and decoder share a lane (texts wait until a call ends), else `OWN_PATCHES`.
        overhead: tokens that take as long as starting a step. 0 for one job per step, infinite for steps as full as
            they can be.
        patch_tokens: tokens that the decoder runs in the time of one patch; matters where both share a lane.
    """

    def __init__(
        self,
        order: Order = first_come,
        *,
        step_tokens: int = 1024,
        chunk_tokens: int | None = None,
        vision_patches: int | None = None,
        overhead: float = 256.0,
        patch_tokens: float = 0.5,
    ) -> None:
        self.order = order
        self.step_tokens, self.chunk_tokens, self.vision_patches = step_tokens, chunk_tokens, vision_patches
        self.overhead, self.patch_tokens = overhead, patch_tokens
        self.jobs: list[Job] = []

    def add(self, job: Job) -> None:
        """Admit a job."""
        self.jobs.append(job)

    def remove(self, job: Job) -> None:
        """Forget a job: done, failed or cancelled. Harmless if it is not there."""
        self.jobs = [each for each in self.jobs if each is not job]

    def next_step(self, now: float) -> Step | None:
        """Chunks for the decoder, or None if nothing is ready."""
        return self._step(self._ranked(now))

    def next_encode(self, now: float) -> Encode | None:
        """Pictures for the tower, or None if none waits. The first one's group decides who may join."""
        return self._encode(self._ranked(now), self.patches(shared=False))

    def patches(self, *, shared: bool) -> int:
        """Most patches of a tower call, by whether tower and decoder share a lane."""
        return self.vision_patches or (SHARED_PATCHES if shared else OWN_PATCHES)

    def next_work(self, now: float) -> Step | Encode | None:
        """Where tower and decoder share one lane: what the first job in order needs next.

        A job with pictures to come is not begun here while anything else can run: it would take a step more, and no
        lane is idle. A step of jobs with pictures waits for another picture where filling it pays; a text only for
        those of its own call.
        """
        ranked = self._ranked(now)
        for job in ranked:
            if _whole(job):
                step = self._step([each for each in ranked if _whole(each)])
                return self._gathering(step, ranked) or step
            if any(not picture.running for picture in job.pictures):
                return self._encode(ranked, self.patches(shared=True))
        return self._step(ranked)

    def _ranked(self, now: float) -> list[Job]:
        return sorted(self.jobs, key=lambda job: (*self.order(job, now), job.number))

    def _step(self, ranked: Iterable[Job]) -> Step | None:
        takes: list[Take] = []
        left = self.step_tokens
        for job in self._company([job for job in ranked if not job.running and job.ready > job.done]):
            end = self._end(job, left)
            tokens = end - job.done
            if tokens > 0 and (not takes or (tokens <= left and self._joins(job, tokens, takes))):
                takes.append(Take(job, end))
                left -= tokens
            if left <= 0:
                break
        return Step(tuple(takes)) if takes else None

    def _end(self, job: Job, left: int) -> int:
        """Where the job's next chunk ends: at the budget if it may, else at the next legal place that is ready."""
        room = max(1, min(left, self.chunk_tokens or left, job.chunk or left))
        end = job.legal_end(job.done, min(job.done + room, job.ready))
        return end if end <= job.ready else job.done

    def _encode(self, ranked: Iterable[Job], left: int) -> Encode | None:
        chosen: list[tuple[Job, Picture]] = []
        for job, picture in _waiting_pictures(ranked):
            if not chosen or (picture.patches <= left and picture.group == chosen[0][1].group):
                chosen.append((job, picture))
                left -= picture.patches
        return Encode(tuple(chosen)) if chosen else None

    def _gathering(self, step: Step | None, ranked: Iterable[Job]) -> Encode | None:
        """Pictures to encode before a step that has room for the first one's job, if that pays."""
        encode = self._encode(ranked, self.patches(shared=True))
        if step is None or encode is None or step.tokens + encode.pictures[0][0].remaining > self.step_tokens:
            return None
        if self.only_siblings([*(take.job for take in step.takes), encode.pictures[0][0]]):
            return encode
        if not all(take.job.media for take in step.takes):
            return None
        return encode if self._saves(encode.patches * self.patch_tokens, len(step.takes), len(self.jobs)) else None

    def only_siblings(self, jobs: Seq[Job]) -> bool:
        """Whether jobs are of one call, and nobody is there who is waited for alone: then no one minds a delay."""
        call = jobs[0].call
        return all(job.call is call for job in jobs) and all(job.call is not None for job in self.jobs)

    def _company(self, ready: Seq[Job]) -> Seq[Job]:
        """In the order in which they may join the step of the first: those that are waited for alone before those of calls,
        where no priority says otherwise."""
        strict = self.order is by_priority
        return [*ready[:1], *sorted(ready[1:], key=lambda job: (-job.priority * strict, job.call is not None))]

    def _joins(self, job: Job, tokens: int, takes: Seq[Take]) -> bool:
        delayed = sum(take.job.call is None for take in takes)
        if job.call is not None:
            return not delayed
        return self._saves(tokens, delayed, sum(each.call is None for each in self.jobs))

    def _saves(self, tokens: float, delayed: int, waiting: int) -> bool:
        """Whether delaying some jobs by the time of `tokens` costs less than all others gain by a step that is saved."""
        return delayed * tokens <= self.overhead * (waiting - delayed)


def _whole(job: Job) -> bool:
    """Everything that is left of it can be prefilled."""
    return not job.running and job.done < job.ready == job.tokens


def _waiting_pictures(jobs: Iterable[Job]) -> Iterator[tuple[Job, Picture]]:
    for job in jobs:
        for picture in job.pictures:
            if not picture.running:
                yield job, picture
