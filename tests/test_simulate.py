"""The simulator: it agrees with queueing theory where there is one, and with the bars of the engine under load."""

import random
from dataclasses import replace

import pytest

from mmprefill.pipeline.batcher import Batcher, first_come, text_first
from mmprefill.pipeline.costs import Costs, Curve
from mmprefill.pipeline.simulate import (
    Arrival,
    Mix,
    as_lines,
    by_class,
    capacity,
    one_by_one,
    simulate,
    variants,
)

# About what SmolVLM-256M costs in bf16 on two cores.
COSTS = Costs(
    Curve.line(0.030, 0.00045), Curve.line(0.010, 0.00026), request=0.004, intake_text=0.003, intake_picture=0.012,
    intake_share=0.5,
)  # fmt: skip
PLAIN = Costs(Curve.line(0.0, 0.001), Curve.line(0.0, 0.001))


def test_a_queue_of_one_equals_the_formula():
    """Poisson arrivals of equal requests, served one by one: the mean wait is that of an M/D/1 queue."""
    draw, now, arrivals = random.Random(1), 0.0, []
    for _ in range(40_000):
        now += draw.expovariate(7.0)
        arrivals.append(Arrival(now, 100))
    expected = 0.1 + 0.7 * 0.1 / (2 * (1 - 0.7))
    assert by_class(one_by_one(arrivals, PLAIN))["all"].mean == pytest.approx(expected, rel=0.05)


def test_first_come_without_packing_is_the_loop():
    """With every saving switched off the batcher on a shared lane serves exactly as the loop does."""
    arrivals = Mix().draw(500, 1.0, seed=2)
    engine = simulate(
        arrivals, PLAIN, Batcher(first_come, overhead=0.0, step_tokens=10**6, vision_patches=1), reuse=False
    )
    waits = by_class(engine), by_class(one_by_one(arrivals, PLAIN))
    for kind in ("all", "text", "pictures"):
        assert waits[0][kind].mean == pytest.approx(waits[1][kind].mean, rel=0.02)


@pytest.mark.parametrize("shared_lane", [True, False])
def test_every_arrival_is_served_once_and_not_before_it_came(shared_lane):
    arrivals = Mix(repeats=0.4, shared=0.5).draw(400, 4.0, seed=3)
    served = simulate(arrivals, COSTS, Batcher(text_first()), shared_lane=shared_lane)
    assert sorted(each.arrival.time for each in served) == [arrival.time for arrival in arrivals]
    assert min(each.waited for each in served) > 0


def test_the_same_seed_gives_the_same_run():
    runs = [by_class(simulate(Mix().draw(200, 2.0, seed=9), COSTS, Batcher(text_first()))) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_picture_in_flight_is_encoded_once():
    """Two requests show the same picture at the same moment: one tower call; with reuse off there are two."""
    arrivals = [Arrival(0.0, 10, ((1000, "cat"),)), Arrival(0.0, 10, ((1000, "cat"),))]
    costs = replace(PLAIN, tower=Curve.line(1.0, 0.0))
    with_reuse = max(each.finished for each in simulate(arrivals, costs, Batcher(vision_patches=1)))
    without = max(each.finished for each in simulate(arrivals, costs, Batcher(vision_patches=1), reuse=False))
    assert with_reuse == pytest.approx(1.02)
    assert without == pytest.approx(2.02)


def test_a_stored_prefix_is_not_prefilled_again():
    first, second = (Arrival(float(time), 150, prefix=("system", 100)) for time in (0, 1))
    served = simulate([first, second], PLAIN, Batcher())
    assert [each.waited for each in served] == pytest.approx([0.150, 0.050])


@pytest.mark.parametrize(("load", "mean"), [(0.7, 0.70), (0.85, 0.60)])
def test_the_default_meets_its_bars(load, mean):
    """Mean time to first token and both P99s against the loop, on costs about those of a 256M model on two cores."""
    arrivals = Mix().draw(6_000, capacity(Mix(), COSTS) * load, seed=4)
    base = by_class(one_by_one(arrivals, COSTS))
    waits = variants(COSTS, vision_patches=1024)[0].serve(arrivals, COSTS)
    assert waits["all"].mean <= mean * base["all"].mean
    assert waits["text"].p99 <= 0.4 * base["text"].p99
    assert waits["pictures"].p99 <= 1.25 * base["pictures"].p99


def test_the_table_compares_with_the_loop():
    arrivals = Mix().draw(50, 1.0)
    base = by_class(one_by_one(arrivals, COSTS))
    lines = as_lines(base, [(each.name, each.serve(arrivals, COSTS)) for each in variants(COSTS)])
    assert len(lines) == 3 + len(variants(COSTS))
    assert "%" not in lines[2]
    assert all("%" in line for line in lines[3:])


def test_curves_interpolate_and_refuse_nonsense():
    curve = Curve(((100, 0.1), (200, 0.3)))
    assert [curve(size) for size in (100, 150, 200, 300)] == pytest.approx([0.1, 0.2, 0.3, 0.5])
    assert curve(0) == 0.0  # never negative
    assert Curve.rising([(1, 0.2), (2, 0.1), (3, 0.4)]).points == ((1, 0.2), (2, 0.2), (3, 0.4))
    assert Curve.line(0.03, 0.001).fixed == pytest.approx(0.03)
    assert Curve(((10, 0.1), (100, 0.2), (1000, 1.9))).efficient(0.9, 5000) == 100
    for points in [((1, 0.1),), ((2, 0.1), (1, 0.2)), ((1, -0.1), (2, 0.2)), ((1, 0.1), (2, float("nan")))]:
        with pytest.raises(ValueError, match="a curve"):
            Curve(points)


def test_costs_round_trip():
    assert Costs.from_dict(COSTS.as_dict()) == COSTS
    assert COSTS.overhead_tokens == pytest.approx(0.030 / 0.00045)
