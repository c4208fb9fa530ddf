"""The engine's batcher on a virtual clock, fed with measured costs: tens of thousands of requests in seconds.

`simulate` drives the same `Batcher` as the engine; `one_by_one` is the loop that it is compared with. Pure Python.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from mmprefill.pipeline.batcher import (
    Batcher,
    Encode,
    Job,
    Order,
    Picture,
    Step,
    first_come,
    shortest_remaining,
    text_first,
)
from mmprefill.pipeline.costs import Costs


@dataclass(frozen=True)
class Arrival:
    """A request as the simulator sees it.

    Attributes:
        time: seconds since the start.
        tokens: prompt tokens in all, those of its pictures included.
        pictures: (patches, content) of each; equal content is the same picture.
        prefix: (content, tokens) at the start of the prompt that others may share; None if there is none.
    """

    time: float
    tokens: int
    pictures: tuple[tuple[int, Hashable], ...] = ()
    prefix: tuple[Hashable, int] | None = None


@dataclass(frozen=True)
class Mix:
    """What requests look like.

    Attributes:
        text_share: share of requests without pictures; the others have 1 to `most_pictures`, uniformly.
        text_tokens: least and most tokens of text, drawn uniformly in their logarithm.
        patches: of a picture, one of these.
        patches_per_token: patches that make one token.
        most_pictures: in one request.
        repeats: share of the pictures that were shown before, one of the last `recent` different ones.
        recent: see `repeats`.
        shared: share of the requests that start with the same prefix of `prefix_tokens`.
        prefix_tokens: see `shared`.
    """

    text_share: float = 0.7
    text_tokens: tuple[int, int] = (16, 640)
    patches: tuple[int, ...] = (1024,)
    patches_per_token: int = 16
    most_pictures: int = 4
    repeats: float = 0.0
    recent: int = 64
    shared: float = 0.0
    prefix_tokens: int = 128

    def draw(self, count: int, rate: float, seed: int = 0) -> list[Arrival]:
        """Poisson arrivals at `rate` requests per second."""
        dice, now = random.Random(seed), 0.0  # noqa: S311 - a simulation
        shown: list[tuple[int, int]] = []  # (patches, content)
        arrivals = []
        for _ in range(count):
            now += dice.expovariate(rate)
            arrivals.append(self._one(dice, now, shown))
        return arrivals

    def _one(self, dice: random.Random, now: float, shown: list[tuple[int, int]]) -> Arrival:
        low, high = self.text_tokens
        tokens = round(math.exp(dice.uniform(math.log(low), math.log(high))))
        prefix = ("system", self.prefix_tokens) if dice.random() < self.shared else None
        tokens += self.prefix_tokens if prefix else 0
        count = 0 if dice.random() < self.text_share else dice.randint(1, self.most_pictures)
        pictures = tuple(self._picture(dice, shown) for _ in range(count))
        tokens += sum(patches // self.patches_per_token for patches, _ in pictures)
        return Arrival(now, tokens, pictures, prefix)

    def _picture(self, dice: random.Random, shown: list[tuple[int, int]]) -> tuple[int, int]:
        if shown and dice.random() < self.repeats:
            return dice.choice(shown[-self.recent :])
        shown.append((dice.choice(self.patches), len(shown)))
        return shown[-1]


@dataclass(frozen=True)
class Served:
    """When a request came and when its first token was there, in seconds."""

    arrival: Arrival
    finished: float

    @property
    def waited(self) -> float:
        """Time to first token."""
        return self.finished - self.arrival.time


@dataclass(frozen=True)
class Waits:
    """Times to first token of one class of requests, in seconds."""

    count: int
    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Waits:
        """Summarise; zeros if there are none."""
        rows = sorted(seconds)
        if not rows:
            return cls(0, 0.0, 0.0, 0.0)
        p50, p99 = (rows[min(int(len(rows) * share), len(rows) - 1)] for share in (0.5, 0.99))
        return cls(len(rows), sum(rows) / len(rows), p50, p99)


def by_class(served: Iterable[Served]) -> dict[str, Waits]:
    """Waits of all requests, of those without and of those with pictures."""
    rows = list(served)
    return {
        "all": Waits.of(each.waited for each in rows),
        "text": Waits.of(each.waited for each in rows if not each.arrival.pictures),
        "pictures": Waits.of(each.waited for each in rows if each.arrival.pictures),
    }


# The loop to compare with.


def alone(arrival: Arrival, costs: Costs) -> float:
    """Seconds of a request that has the machine to itself and reuses nothing."""
    tower = sum(costs.tower(patches) for patches, _ in arrival.pictures)
    step = costs.step(arrival.tokens) + costs.attention * _pairs(0, arrival.tokens)
    return costs.intake(len(arrival.pictures)) + tower + step + costs.request


def one_by_one(arrivals: Iterable[Arrival], costs: Costs) -> list[Served]:
    """First come, first served, one request at a time."""
    now, served = 0.0, []
    for arrival in arrivals:
        now = max(now, arrival.time) + alone(arrival, costs)
        served.append(Served(arrival, now))
    return served


def capacity(mix: Mix, costs: Costs, samples: int = 20_000) -> float:
    """Requests per second at which `one_by_one` is busy all the time."""
    return samples / sum(alone(arrival, costs) for arrival in mix.draw(samples, 1.0, seed=1))


# The engine.


def simulate(
    arrivals: Seq[Arrival],
    costs: Costs,
    batcher: Batcher,
    *,
    shared_lane: bool = True,
    reuse: bool = True,
    intake_threads: int = 2,
) -> list[Served]:
    """Serve arrivals, in the order of their times, and return them in the order in which they finished.

    Args:
        arrivals: by rising time.
        costs: of every step.
        batcher: with no jobs in it.
        shared_lane: tower and decoder take turns (a CPU) instead of running at the same time (CUDA streams).
        reuse: whether towers and prefixes that were computed before are reused.
        intake_threads: host threads.
    """
    run = _Run(costs, batcher, shared_lane, reuse)
    for ready, arrival in _intake(arrivals, costs, intake_threads):
        run.at(ready, lambda arrival=arrival: run.admit(arrival))  # type: ignore[misc]
    run.play()
    assert len(run.served) == len(arrivals)
    return run.served


def _intake(arrivals: Iterable[Arrival], costs: Costs, threads: int) -> Iterator[tuple[float, Arrival]]:
    """When each request leaves a pool of host threads."""
    free = [0.0] * threads
    for arrival in arrivals:
        ready = max(heapq.heappop(free), arrival.time) + costs.intake(len(arrival.pictures))
        heapq.heappush(free, ready)
        yield ready, arrival


def _pairs(start: int, end: int) -> float:
    """Pairs of queries [start, end) and the keys that each looks at."""
    return (end * (end + 1) - start * (start + 1)) / 2


@dataclass(eq=False)
class _Request:
    """A request inside the simulator; `missing` are pictures whose rows are not there yet."""

    arrival: Arrival
    job: Job
    missing: set[Hashable] = field(default_factory=set)

    def update(self) -> None:
        """As in the engine, prefilling begins when every picture is there."""
        self.job.ready = 0 if self.missing else self.job.tokens


@dataclass(eq=False)
class _Lane:
    """A thread of compute that asks `pick` for work."""

    pick: Callable[[float], Step | Encode | None]
    busy: bool = False


class _Run:
    """The state of one simulation: a heap of events, the lanes and what is known."""

    def __init__(self, costs: Costs, batcher: Batcher, shared_lane: bool, reuse: bool) -> None:
        self.costs, self.batcher, self.reuse = costs, batcher, reuse
        picks = [batcher.next_work] if shared_lane else [batcher.next_encode, batcher.next_step]
        self.lanes = [_Lane(pick) for pick in picks]
        self.share = costs.intake_share if shared_lane else 0.0
        self.served: list[Served] = []
        self.now, self.debt = 0.0, 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._requests: dict[Job, _Request] = {}
        self._contents: dict[Picture, Hashable] = {}
        self._waiting: dict[Hashable, list[_Request]] = defaultdict(list)
        self._known: set[Hashable] = set()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (time, next(self._numbers), action))

    def play(self) -> None:
        """Run until nothing is left to happen."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
            if not self._events or self._events[0][0] > self.now:
                for lane in self.lanes:
                    self._start(lane)

    def admit(self, arrival: Arrival) -> None:
        """A request leaves intake."""
        self.debt += self.share * self.costs.intake(len(arrival.pictures))
        job = Job(arrival.tokens, arrival.time, bool(arrival.pictures))
        request = self._requests[job] = _Request(arrival, job)
        if self.reuse and arrival.prefix and arrival.prefix in self._known:
            job.done = min(arrival.prefix[1], arrival.tokens - 1)
        for patches, content in arrival.pictures:
            self._picture(request, patches, content)
        request.update()
        self.batcher.add(job)

    def _picture(self, request: _Request, patches: int, content: Hashable) -> None:
        key = ("picture", content) if self.reuse else ("picture", next(self._numbers))
        if key in self._known:
            return
        request.missing.add(key)
        if not self._waiting[key]:
            picture = Picture(patches)
            self._contents[picture] = key
            request.job.pictures.append(picture)
        self._waiting[key].append(request)

    def _start(self, lane: _Lane) -> None:
        work = None if lane.busy else lane.pick(self.now)
        if work is None:
            return
        lane.busy = True
        seconds, finish = self._encode(work) if isinstance(work, Encode) else self._step(work)
        owed, self.debt = self.debt, 0.0

        def done() -> None:
            lane.busy = False
            finish()

        self.at(self.now + seconds + owed, done)

    def _encode(self, work: Encode) -> tuple[float, Callable[[], None]]:
        for _, picture in work.pictures:
            picture.running = True

        def finish() -> None:
            for job, picture in work.pictures:
                job.pictures.remove(picture)
                self._encoded(self._contents.pop(picture))

        return self.costs.tower(work.patches), finish

    def _encoded(self, key: Hashable) -> None:
        if self.reuse:
            self._known.add(key)
        for request in self._waiting.pop(key):
            request.missing.discard(key)
            request.update()

    def _step(self, work: Step) -> tuple[float, Callable[[], None]]:
        seconds = self.costs.step(work.tokens)
        for take in work.takes:
            take.job.running = True
            seconds += self.costs.attention * _pairs(take.job.done, take.end) + self.costs.stored * take.job.done
            seconds += self.costs.request if take.end == take.job.tokens else 0.0

        def finish() -> None:
            for take in work.takes:
                take.job.running, take.job.done = False, take.end
                if take.job.remaining == 0:
                    self._finish(take.job)

        return seconds, finish

    def _finish(self, job: Job) -> None:
        self.batcher.remove(job)
        arrival = self._requests.pop(job).arrival
        if arrival.prefix:
            self._known.add(arrival.prefix)
        self.served.append(Served(arrival, self.now))


# Tables.


@dataclass(frozen=True)
class Variant:
    """A way to serve the same arrivals.

    Attributes:
        name: in the table.
        order: ranks jobs.
        settings: further arguments of the `Batcher`.
        reuse: see `simulate`.
    """

    name: str
    order: Order
    settings: Mapping[str, float]
    reuse: bool = True

    def serve(self, arrivals: Seq[Arrival], costs: Costs, *, shared_lane: bool = True) -> dict[str, Waits]:
        """Times to first token by class."""
        batcher = Batcher(self.order, **self.settings)  # type: ignore[arg-type]
        return by_class(simulate(arrivals, costs, batcher, shared_lane=shared_lane, reuse=self.reuse))


def variants(costs: Costs, **settings: float) -> list[Variant]:
    """The engine's default, each of its parts alone, and the default without reuse."""
    tuned = {"overhead": costs.overhead_tokens, "patch_tokens": costs.patch_tokens, **settings}
    single, full = {**tuned, "overhead": 0.0}, {**tuned, "overhead": math.inf}
    return [
        Variant("default: text first, steps as the queue asks", text_first(), settings),
        Variant("the same, with the measured cost of a step", text_first(), tuned),
        Variant("default, reuse off", text_first(), settings, reuse=False),
        Variant("ordering only: text first, one request a step", text_first(), single, reuse=False),
        Variant("packing only: first come", first_come, tuned, reuse=False),
        Variant(
            "packing only: first come, steps as full as they can be",
            first_come,
            {**tuned, "overhead": math.inf},
            reuse=False,
        ),
        Variant("text first, steps as full as they can be", text_first(), full, reuse=False),
        Variant("shortest first, ageing", shortest_remaining(100.0, costs.patch_tokens), tuned, reuse=False),
    ]


def as_lines(base: dict[str, Waits], rows: Iterable[tuple[str, dict[str, Waits]]]) -> list[str]:
    """A Markdown table of one cell; `base` is what the percentages compare with."""
    lines = [
        "| served | mean, s | P50, s | P99, s | text mean, s | text P99, s | pictures mean, s | pictures P99, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, waits in [("one request at a time, first come", base), *rows]:
        cells = [_cell(waits[kind], base[kind], what) for kind, what in _COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


_COLUMNS = (
    *(("all", what) for what in ("mean", "p50", "p99")),
    *((kind, what) for kind in ("text", "pictures") for what in ("mean", "p99")),
)


def _cell(waits: Waits, base: Waits, what: str) -> str:
    mine, other = getattr(waits, what), getattr(base, what)
    change = f" ({(mine / other - 1) * 100:+.0f} %)" if waits is not base and other else ""
    return f"{mine:.3f}{change}"
