"""What steps of the pipeline cost in seconds: measured by `calibrate`, planned with by `memory`, replayed by `simulate`.

Pure Python, no torch.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Curve:
    """Seconds over a size, straight between measured points; beyond the last point, on along the last two.

    Attributes:
        points: (size, seconds), sizes strictly rising, at least two.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if len(sizes) < 2 or any(a >= b for a, b in itertools.pairwise(sizes)):
            raise ValueError(f"a curve needs two or more points of rising size, got {self.points!r}")
        if not all(math.isfinite(size) and math.isfinite(seconds) and seconds >= 0 for size, seconds in self.points):
            raise ValueError(f"a curve is made of finite sizes and seconds, got {self.points!r}")

    def __call__(self, size: float) -> float:
        """Seconds at a size; never negative."""
        right = min(max(bisect_left(self.points, (size,)), 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[right - 1], self.points[right]
        return max(y0 + (y1 - y0) * (size - x0) / (x1 - x0), 0.0)

    @classmethod
    def line(cls, fixed: float, per_unit: float) -> Curve:
        """`fixed` seconds and `per_unit` seconds for each unit of size."""
        return cls(((0.0, fixed), (1024.0, fixed + 1024 * per_unit)))

    @classmethod
    def rising(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Through measured points; a larger size that was measured faster than a smaller one is noise, and is lifted."""
        lifted: list[tuple[float, float]] = []
        for size, seconds in sorted(points):
            lifted.append((size, max(seconds, lifted[-1][1] if lifted else 0.0)))
        return cls(tuple(lifted))

    @property
    def slope(self) -> float:
        """Seconds per unit on the way from the first point to the one with the best rate."""
        (x0, y0), *others = self.points
        x1, y1 = max(others, key=lambda point: point[0] / point[1] if point[1] else math.inf)
        return (y1 - y0) / (x1 - x0)

    @property
    def fixed(self) -> float:
        """Seconds of the least work: what a call costs however small it is."""
        return max(self.points[0][1] - self.slope * self.points[0][0], 0.0)

    def efficient(self, share: float, limit: float) -> float:
        """The smallest measured size, at most `limit`, whose units per second reach `share` of the best measured."""
        rates = [(size, size / seconds if seconds else math.inf) for size, seconds in self.points if 0 < size <= limit]
        best = max((rate for _, rate in rates), default=0.0)
        return next((size for size, rate in rates if rate >= share * best), limit)


@dataclass(frozen=True)
class Costs:
    """Seconds of everything that happens to a request on one machine with one model.

    Attributes:
        step: a decoder step, by its tokens, without earlier context.
        tower: a call of the vision tower, by its patches.
        attention: seconds per pair of a query and a key that it looks at, beyond what `step` has.
        stored: seconds per stored key that a step looks at again, however few its queries: the kernel packs it anew.
        request: on the compute lane once per request: merging, logits, handing over.
        intake_text: host seconds of a request without pictures.
        intake_picture: host seconds for each picture.
        intake_share: share of the host seconds that is lost to a compute lane on the same cores.
    """

    step: Curve
    tower: Curve
    attention: float = 0.0
    stored: float = 0.0
    request: float = 0.0
    intake_text: float = 0.0
    intake_picture: float = 0.0
    intake_share: float = 0.0

    def intake(self, pictures: int) -> float:
        """Host seconds of a request."""
        return self.intake_text + self.intake_picture * pictures

    @property
    def overhead_tokens(self) -> float:
        """Tokens that take as long as starting a step does."""
        return self.step.fixed / self.step.slope if self.step.slope else math.inf

    def chunking(self, tokens: int, chunk: int) -> float:
        """What a prompt of so many tokens, alone, takes longer in chunks than in one step, as a share of that step.

        From the straight line through the curve: single points are not measured to a per cent.
        """
        chunks = math.ceil(tokens / chunk)
        starts = sum(range(0, tokens, chunk))  # of all chunks: keys that are stored when they run
        once = self.step.fixed + self.step.slope * tokens + self.attention * tokens * (tokens + 1) / 2
        return ((chunks - 1) * self.step.fixed + self.stored * starts) / once if once else 0.0

    @property
    def patch_tokens(self) -> float:
        """Tokens that the decoder runs in the time of one patch."""
        return self.tower.slope / self.step.slope if self.step.slope else 1.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "step": self.step.points, "tower": self.tower.points}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Costs:
        """Back from `as_dict`.

        Raises:
            ValueError, TypeError or KeyError: for anything else.
        """
        curves = {name: Curve(tuple((float(x), float(y)) for x, y in record[name])) for name in ("step", "tower")}
        others = {name: float(value) for name, value in record.items() if name not in curves}
        return cls(step=curves["step"], tower=curves["tower"], **others)
