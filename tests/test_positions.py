"""Positions worked out by hand: where each family counts from, and what pictures and videos do to the count (C6, C7).

Every table below was written down, not computed: rows are time, height and width; the first column is the token before
the medium, the last two are those behind it; numbers count from that first token.
"""

import checkpoints
import pytest
import torch
from engines import open_prefiller

from mmprefill import Request

MROPE = {"qwen2_vl": 28, "qwen2_5_vl": 28, "qwen3_vl": 32, "qwen3_vl_moe": 32, "glm4v": 28}  # pixels a token is wide
WIDE = [  # 3 tokens wide, 2 high: the text goes on at 1 + 3
    [0, 1, 1, 1, 1, 1, 1, 4, 5],
    [0, 1, 1, 1, 2, 2, 2, 4, 5],
    [0, 1, 2, 3, 1, 2, 3, 4, 5],
]
TALL = [  # 2 wide, 3 high: at 1 + 3 again
    [0, 1, 1, 1, 1, 1, 1, 4, 5],
    [0, 1, 1, 2, 2, 3, 3, 4, 5],
    [0, 1, 2, 1, 2, 1, 2, 4, 5],
]
# Two frames in one grid, four grids of 3 wide and 2 high.
ROWS, COLUMNS = [1, 1, 1, 2, 2, 2] * 4, [1, 2, 3, 1, 2, 3] * 4
# Qwen2-VL: a grid is one further in time. The text goes on behind the longer side, at 1 + 3, where the fourth grid lies
# already: so transformers 5.24 has it (as published it would be 5); should a later version differ, this says so.
FRAMES_COUNT = [
    [0, *[1] * 6, *[2] * 6, *[3] * 6, *[4] * 6, 4, 5],
    [0, *ROWS, 4, 5],
    [0, *COLUMNS, 4, 5],
]
SECONDS_COUNT = [  # Qwen2.5-VL: 24 frames a second, 4 positions a second: the fourth grid begins 6/24 s = 1 position later
    [0, *[1] * 6, *[1] * 6, *[1] * 6, *[2] * 6, 4, 5],
    [0, *ROWS, 4, 5],
    [0, *COLUMNS, 4, 5],
]
FRAME = WIDE  # Qwen3-VL, GLM-4V: time is written into the text, and each grid counts as a picture


def message(*parts):
    kinds = ["text" if isinstance(part, str) else "video" if isinstance(part, list) else "image" for part in parts]
    content = [{"type": kind, kind: part} for kind, part in zip(kinds, parts, strict=True)]
    return Request(messages=[{"role": "user", "content": content}])


def around(result, run):
    """Positions from the token before a run to the second behind it, counted from the first."""
    start, end = run
    rows = result.positions[:, start - 1 : end + 2]
    return (rows - rows[:, :1]).tolist()


def assert_text_counts(result, start, end):
    """In [start, end) every row goes up by one."""
    steps = result.positions[:, start:end].diff(dim=-1)
    assert (steps == 1).all()
    assert (result.positions[:, start] == result.positions[0, start]).all()


@pytest.mark.parametrize("family", MROPE)
def test_pictures_count_as_their_longer_side(family):
    """A picture stands still in time, whatever the model's clock for videos; its rows and columns count from its start."""
    unit = MROPE[family]
    wide, tall = checkpoints.picture(1, (3 * unit, 2 * unit)), checkpoints.picture(2, (2 * unit, 3 * unit))
    with open_prefiller(family) as prefiller:
        result = prefiller.prefill(message("one", wide, "and two", tall, "what?"))
    (first,), (second,) = result.spans
    assert result.positions[:, 0].tolist() == [0, 0, 0]
    assert_text_counts(result, 0, first[0])
    assert around(result, first) == WIDE
    assert_text_counts(result, first[1], second[0])
    assert around(result, second) == TALL
    assert_text_counts(result, second[1], len(result.token_ids))
    assert result.next_position == len(result.token_ids) - 2 * (6 - 3)  # six tokens each, three positions each


@pytest.mark.parametrize(
    ("family", "table"),
    [
        ("qwen2_vl", FRAMES_COUNT),
        ("qwen2_5_vl", SECONDS_COUNT),
        ("qwen3_vl", FRAME),
        ("qwen3_vl_moe", FRAME),
        ("glm4v", FRAME),
    ],
)
def test_videos_count_as_the_family_says(family, table):
    unit = MROPE[family]
    frames = [checkpoints.picture(i, (3 * unit, 2 * unit)) for i in range(8)]
    with open_prefiller(family) as prefiller:
        result = prefiller.prefill(message("see", frames, "what?"))
    (runs,) = result.spans
    assert len(runs) == (4 if table is FRAME else 1)
    for run in runs:
        assert around(result, run) == table
    assert result.next_position == int(result.positions[0, -1]) + 1


@pytest.mark.parametrize("family", MROPE)
def test_text_alone_counts_tokens(family):
    with open_prefiller(family) as prefiller:
        prefiller.prefill(message("first", checkpoints.picture(1), "leaves no offset on the model"))
        result = prefiller.prefill("only words here")
    assert result.positions.tolist() == [list(range(len(result.token_ids)))] * len(result.positions)
    assert result.next_position == len(result.token_ids)


@pytest.mark.parametrize("family", [name for name in checkpoints.FAMILIES if name not in MROPE])
def test_where_the_count_begins(family):
    """One row that counts tokens: from one in PaliGemma, whose rule once leaked into Gemma 3, and from nought elsewhere."""
    with open_prefiller(family) as prefiller:
        result = prefiller.prefill("what is it?", images=[checkpoints.picture(1)])
    origin = 1 if family.startswith("paligemma") else 0
    count = len(result.token_ids)
    assert torch.equal(result.positions, torch.arange(origin, origin + count)[None])
    assert result.next_position == origin + count
