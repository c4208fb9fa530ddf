"""The batcher: every job finishes once, whatever its size, order, budgets and company."""

import itertools
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmprefill.pipeline.batcher import (
    Batcher,
    Encode,
    Job,
    Picture,
    Step,
    anywhere,
    by_priority,
    first_come,
    shortest_remaining,
    text_first,
)

ORDERS = [first_come, text_first(), text_first(0.5), shortest_remaining(), by_priority]


def ends_outside(spans):
    """Where a chunk may end when it may not end inside these (start, end) spans: the last place that fits, or the next."""

    def legal_end(start, end):
        for low, high in spans:
            if low < end < high:
                return low if low > start else high
        return end

    return legal_end


@dataclass(eq=False)
class Asked:
    """A job as its owner knows it: the place of each picture, and the spans that attend both ways."""

    job: Job
    places: dict[Picture, int]
    spans: list[tuple[int, int]]
    chunks: list[tuple[int, int]] = field(default_factory=list)

    def update(self):
        waiting = [place for picture, place in self.places.items() if picture in self.job.pictures]
        self.job.ready = max(min(waiting, default=self.job.tokens), self.job.done)


@st.composite
def asked(draw, two_way=None):
    """A job with up to four pictures between its texts."""
    place, places, spans = draw(st.integers(1, 30)), {}, []
    for _ in range(draw(st.integers(0, 4))):
        tokens = draw(st.integers(1, 40))
        places[Picture(draw(st.integers(1, 300)), draw(st.sampled_from("ab")))] = place
        spans.append((place, place + tokens))
        place += tokens + draw(st.integers(0, 30))
    two_way = draw(st.booleans()) if two_way is None else two_way
    job = Job(
        place,
        arrived=draw(st.floats(0, 20)),
        media=bool(places),
        priority=draw(st.integers(-1, 1)),
        call=draw(st.sampled_from([None, None, "a call", "another"])),
        pictures=list(places),
        legal_end=ends_outside(spans) if two_way else anywhere,
    )
    found = Asked(job, places, spans if two_way else [])
    found.update()
    return found


@st.composite
def batchers(draw):
    return Batcher(
        draw(st.sampled_from(ORDERS)),
        step_tokens=draw(st.integers(1, 120)),
        chunk_tokens=draw(st.none() | st.integers(1, 60)),
        vision_patches=draw(st.none() | st.integers(1, 500)),
        overhead=draw(st.sampled_from([0.0, 20.0, 256.0, math.inf])),
        patch_tokens=draw(st.sampled_from([0.0, 0.5, 4.0])),
    )


class Driver:
    """Runs a batcher as the engine does, one lane or two, and checks every piece of work that it hands out."""

    def __init__(self, batcher, jobs, shared):
        self.batcher, self.asked = batcher, {each.job: each for each in jobs}
        self.picks = [batcher.next_work] if shared else [batcher.next_encode, batcher.next_step]
        self.busy = [None] * len(self.picks)
        self.now, self.finished = 0.0, []
        for each in jobs:
            batcher.add(each.job)

    def start(self, lane):
        """Give a free lane its next work; whether it got any."""
        work = self.picks[lane](self.now)
        if isinstance(work, Step):
            self.check_step(work)
            for take in work.takes:
                take.job.running = True
        elif isinstance(work, Encode):
            self.check_encode(work)
            for _, picture in work.pictures:
                picture.running = True
        self.busy[lane] = work
        return work is not None

    def finish(self, lane):
        work, self.busy[lane] = self.busy[lane], None
        self.now += 1.0
        for take in work.takes if isinstance(work, Step) else ():
            take.job.running, start, take.job.done = False, take.job.done, take.end
            self.asked[take.job].chunks.append((start, take.end))
            if take.job.remaining == 0:
                self.finished.append(take.job)
                self.batcher.remove(take.job)
        for job, picture in work.pictures if isinstance(work, Encode) else ():
            job.pictures.remove(picture)
            self.asked[job].update()

    def check_step(self, step):
        batcher, jobs = self.batcher, [take.job for take in step.takes]
        assert len(set(jobs)) == len(jobs) > 0
        assert step.tokens <= batcher.step_tokens or len(jobs) == 1
        for take in step.takes:
            job, tokens = take.job, take.end - take.job.done
            assert job in batcher.jobs
            assert not job.running
            assert job.done < take.end <= job.ready
            assert not any(low < take.end < high for low, high in self.asked[job].spans)
            limit = min(batcher.step_tokens, batcher.chunk_tokens or batcher.step_tokens)
            assert tokens <= limit or any(low < job.done + limit < high for low, high in self.asked[job].spans)

    def check_encode(self, encode):
        pictures = [picture for _, picture in encode.pictures]
        assert len(set(pictures)) == len(pictures) > 0
        assert encode.patches <= self.batcher.patches(shared=len(self.picks) == 1) or len(pictures) == 1
        assert len({picture.group for picture in pictures}) == 1
        for job, picture in encode.pictures:
            assert job in self.batcher.jobs
            assert picture in job.pictures
            assert not picture.running

    def run(self):
        """Until nothing is left, with both lanes busy wherever they can be; a turn is a unit of progress."""
        turns = 0
        while self.batcher.jobs:
            started = [self.start(lane) for lane in range(len(self.picks)) if self.busy[lane] is None]
            running = [lane for lane, work in enumerate(self.busy) if work]
            assert any(started) or running, "jobs wait and nothing runs"
            self.finish(running[turns % len(running)])
            turns += 1
        return turns


@settings(deadline=None)
@given(batchers(), st.lists(asked(), max_size=8), st.booleans())
def test_every_job_finishes_once(batcher, jobs, shared):
    """Budgets, legal ends and running jobs are respected at each turn; each token is prefilled once, in order."""
    driver = Driver(batcher, jobs, shared)
    turns = driver.run()
    assert sorted(each.number for each in driver.finished) == sorted(each.job.number for each in jobs)
    for each in jobs:
        edges = [0, *(end for _, end in each.chunks)]
        assert each.chunks == list(itertools.pairwise(edges))
        assert edges[-1] == each.job.tokens
    assert turns <= sum(each.job.tokens + len(each.places) for each in jobs)


@settings(deadline=None)
@given(batchers(), st.lists(asked(), min_size=2, max_size=8), st.booleans(), st.data())
def test_removal_at_any_time(batcher, jobs, shared, data):
    """A removed job, waiting or running, gets no further work, and the others finish as if it had never been there."""
    driver = Driver(batcher, jobs, shared)
    gone = data.draw(st.sampled_from(jobs)).job
    for _ in range(data.draw(st.integers(0, 6))):
        running = [lane for lane in range(len(driver.picks)) if driver.busy[lane] or driver.start(lane)]
        if running:
            driver.finish(running[-1])
    for lane in range(len(driver.picks)):
        _ = driver.busy[lane] or driver.start(lane)
    batcher.remove(gone)
    batcher.remove(gone)
    driver.run()
    assert {each.job for each in jobs} - {gone} <= set(driver.finished)


@settings(deadline=None)
@given(st.sampled_from([1, 7, 10**6]), st.booleans())
def test_larger_than_any_budget(budget, shared):
    """A two-way span and a picture beyond every budget still run, each alone, beside jobs that fit."""
    picture = Picture(10**9)
    huge = Asked(Job(10**9 + 2, 0.0, True, pictures=[picture]), {picture: 1}, [(1, 10**9 + 1)])
    huge.job.legal_end = ends_outside(huge.spans)
    small = Asked(Job(3, 0.0, ready=3), {}, [])
    huge.update()
    driver = Driver(Batcher(step_tokens=budget, chunk_tokens=budget, vision_patches=budget), [huge, small], shared)
    driver.run()
    assert {huge.job, small.job} == set(driver.finished)


@pytest.mark.parametrize("order", [first_come, text_first(10.0), shortest_remaining(100.0)])
def test_nothing_starves(order):
    """Under a stream of texts that takes more than the whole lane, pictures that came earlier finish in bounded time."""
    picture = Picture(1000)
    first = Asked(Job(500, 0.0, True, pictures=[picture]), {picture: 4}, [])
    first.update()
    driver = Driver(Batcher(order, step_tokens=100, overhead=0.0), [first], shared=True)
    while first.job.remaining and driver.now < 60:
        for _ in range(2):
            text = Asked(Job(50, driver.now, ready=50), {}, [])
            driver.asked[text.job] = text
            driver.batcher.add(text.job)
        driver.start(0)
        driver.finish(0)
    assert first.job.remaining == 0


def rank(order, *jobs, now=0.0):
    return sorted(jobs, key=lambda job: order(job, now))


def test_orders_rank_as_they_say():
    text, early = Job(10, 5.0), Job(400, 1.0, media=True, pictures=[Picture(100)])
    assert rank(first_come, text, early) == [early, text]
    assert rank(text_first(10.0), early, text) == [text, early]
    assert rank(text_first(3.0), text, early) == [early, text]
    assert rank(shortest_remaining(10.0), early, text, now=6.0) == [text, early]
    assert rank(shortest_remaining(200.0), text, early, now=6.0) == [early, text]
    assert rank(by_priority, early, Job(1, 9.0, priority=2), Job(1, 3.0, priority=2))[-1] is early


def test_equal_ranks_go_by_number():
    jobs = [Job(5, 0.0, ready=5) for _ in range(4)]
    batcher = Batcher(overhead=math.inf)
    for job in reversed(jobs):
        batcher.add(job)
    assert [take.job for take in batcher.next_step(0.0).takes] == jobs


def batcher_of(*jobs, **settings):
    batcher = Batcher(text_first(), **settings)
    for job in jobs:
        batcher.add(job)
    return batcher


def test_a_short_queue_is_served_in_short_steps():
    """Two texts of 100 tokens share a step only where starting one costs at least as much as 100 tokens."""
    jobs = [Job(100, 0.0, ready=100) for _ in range(2)]
    assert len(batcher_of(*jobs, overhead=99.0).next_step(0.0).takes) == 1
    assert len(batcher_of(*jobs, overhead=100.0).next_step(0.0).takes) == 2


def test_a_long_queue_fills_its_steps():
    jobs = [Job(100, 0.0, ready=100) for _ in range(40)]
    assert batcher_of(*jobs, overhead=60.0, step_tokens=600).next_step(0.0).tokens == 600


def test_text_does_not_wait_behind_pictures():
    """On a shared lane a text that came during a tower call runs before the next one, and before ready pictures."""
    pictured = [Job(70, float(i), True, pictures=[Picture(1024)]) for i in range(3)]
    ready, text = Job(70, 0.0, True, ready=70), Job(30, 4.0, ready=30)
    work = batcher_of(*pictured, ready, text, overhead=0.0, vision_patches=1024).next_work(4.0)
    assert [take.job for take in work.takes] == [text]


def test_a_text_prefix_waits_for_its_picture_on_a_shared_lane():
    """Beginning a job with a picture to come would take a step more; with lanes apart it uses an idle decoder."""
    job = Job(100, 0.0, True, pictures=[Picture(64)], ready=20)
    assert isinstance(batcher_of(job).next_work(0.0), Encode)
    assert batcher_of(job).next_step(0.0).tokens == 20
    job.pictures[0].running = True  # somewhere else
    assert batcher_of(job).next_work(0.0).tokens == 20


def test_what_waits_for_others_holds_nobody_up():
    """The first job waits for a prefix that is being prefilled: the next one runs."""
    waiting, running, next_one = Job(50, 0.0), Job(50, 0.0, ready=50, running=True), Job(50, 1.0, ready=50)
    work = batcher_of(waiting, running, next_one).next_work(1.0)
    assert [take.job for take in work.takes] == [next_one]


def test_a_long_queue_of_pictures_gathers_before_it_steps():
    """One step for several pictures pays when many wait, and not when nobody does."""
    ready = Job(70, 0.0, True, ready=70)
    others = [Job(70, 1.0 + i, True, pictures=[Picture(100)]) for i in range(30)]
    settings = {"overhead": 64.0, "patch_tokens": 0.5, "vision_patches": 100}
    assert isinstance(batcher_of(ready, others[0], **settings).next_work(40.0), Encode)
    assert isinstance(batcher_of(ready, others[0], **{**settings, "patch_tokens": 1.0}).next_work(40.0), Step)
    assert isinstance(batcher_of(ready, *others, **{**settings, "patch_tokens": 10.0}).next_work(40.0), Encode)
    assert isinstance(batcher_of(ready, *others, **settings, step_tokens=100).next_work(40.0), Step)


def test_a_tower_call_is_short_where_texts_wait_for_it():
    """By default a picture at a time on a shared lane, and four where the tower has a lane of its own."""
    jobs = [Job(70, float(i), True, pictures=[Picture(1024)]) for i in range(6)]
    assert batcher_of(*jobs).next_work(0.0).patches == 1024
    assert batcher_of(*jobs).next_encode(0.0).patches == 4096
    assert batcher_of(*jobs, vision_patches=2048).next_work(0.0).patches == 2048


def test_pictures_of_another_group_wait():
    first, other, third = (Job(9, float(i), True, pictures=[Picture(5, group)]) for i, group in enumerate("aba"))
    encode = batcher_of(first, other, third, vision_patches=20).next_encode(0.0)
    assert [job for job, _ in encode.pictures] == [first, third]


def call_of(*tokens, call="a call", **fields):
    """Texts that came together and are only looked at together."""
    return [Job(each, 0.0, ready=each, call=call, **fields) for each in tokens]


def jobs_of(step):
    return [take.job for take in step.takes]


@pytest.mark.parametrize("overhead", [0.0, 60.0, math.inf])
def test_a_call_fills_its_steps(overhead):
    """Whatever starting a step costs: no single result is waited for. The last step takes all that is left."""
    jobs = call_of(*[100] * 12)
    batcher = batcher_of(*jobs, overhead=overhead, step_tokens=1000)
    assert jobs_of(batcher.next_step(0.0)) == jobs[:10]
    for job in jobs[:10]:
        batcher.remove(job)
    assert jobs_of(batcher.next_step(0.0)) == jobs[10:]


def test_nobody_waits_for_a_call():
    """A request that is waited for alone joins the next step before the rest of a call, and then nothing else does."""
    jobs, alone = call_of(*[100] * 9), Job(100, 5.0, ready=100)
    assert jobs_of(batcher_of(*jobs, alone).next_step(5.0)) == [jobs[0], alone]
    alone.arrived = -1.0
    assert jobs_of(batcher_of(*jobs, alone).next_step(5.0)) == [alone]


def test_beside_a_call_others_share_steps_as_without_it():
    """However many jobs a call has, they do not count among those who gain by a fuller step."""
    few = [Job(100, 0.0, ready=100) for _ in range(2)]
    assert jobs_of(batcher_of(*few, *call_of(*[100] * 50), overhead=99.0).next_step(0.0)) == few[:1]
    assert jobs_of(batcher_of(*few, *call_of(*[100] * 50), overhead=100.0).next_step(0.0)) == few


def test_a_call_in_its_turn_is_not_passed_over():
    """The order decides who is first: a call among a stream of others gets on with each of its turns."""
    jobs = call_of(100, 100)
    others = [Job(100, 1.0, ready=100) for _ in range(20)]
    step = batcher_of(*jobs, *others, overhead=math.inf, step_tokens=1000).next_step(2.0)
    assert jobs_of(step) == [jobs[0], *others[:9]]


def test_a_call_encodes_its_pictures_before_a_step_with_room():
    """On a shared lane its steps, texts included, wait for its own pictures, and for those of no other call."""
    settings = {"overhead": 0.0, "vision_patches": 100, "step_tokens": 300}
    pictured = [Job(70, 0.0, True, pictures=[Picture(100)], call="a call") for _ in range(3)]
    text, other = call_of(70), call_of(70, call="another call")
    assert isinstance(batcher_of(*text, *pictured, **settings).next_work(0.0), Encode)
    assert isinstance(batcher_of(*other, *pictured, **settings).next_work(0.0), Step)
    assert isinstance(batcher_of(*text, *pictured, Job(9, 0.0), **settings).next_work(0.0), Step)
    assert isinstance(batcher_of(*call_of(240), *pictured, **settings).next_work(0.0), Step)  # no room


def test_priority_holds_within_calls_and_without():
    """What matters little and is waited for alone does not go before jobs of a call that matter more."""
    batcher, call = Batcher(by_priority, overhead=1e9), object()
    for priority, of in ((10, call), (10, call), (10, call), (0, None)):
        batcher.add(Job(10, 0.0, priority=priority, ready=10, call=of))
    assert [take.job.priority for take in batcher.next_step(0.0).takes][:3] == [10, 10, 10]
