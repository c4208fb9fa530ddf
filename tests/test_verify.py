"""A row of the exactness table says what of it is out of bounds."""

import math

import pytest

from mmprefill.verify import Error, Row


@pytest.mark.parametrize(
    ("logits", "kv", "greedy", "named"),
    [
        (Error(1e-5, 1e-6), Error(1e-5, 1e-6), 8, ()),
        (Error(2e-4, 1e-6), Error(1e-5, 1e-6), 8, ("logits max",)),
        (Error(1e-5, 3e-5), Error(1e-5, 3e-5), 8, ("logits rms", "KV rms")),
        (Error(1e-5, 1e-6), Error(math.nan, 1e-6), 7, ("KV max", "other greedy tokens")),
    ],
)
def test_what_is_out_of_bounds_is_named(logits, kv, greedy, named):
    """Every bound, that of the RMS too; a NaN is within none."""
    row = Row("alone", logits, kv, greedy, 8, 1e-4, 1e-4, (2e-5, 2e-5))
    assert row.passed is not bool(named)
    assert [text.startswith(name) for text, name in zip(row.exceeded, named, strict=True)] == [True] * len(named)
