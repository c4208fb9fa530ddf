"""The stage times of a job as a picture: an SVG, drawn by hand, that needs no library and no script."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmprefill.job_report import JobReport

WIDTH, LEFT, ROW, TOP = 720, 110, 26, 64
BAR = WIDTH - LEFT - 130  # of the longest stage
WHAT = {
    "queued": "waited at the door",
    "intake": "read, decoded, tokenised",
    "awaited": "waited for a shared beginning",
    "vision": "pictures encoded, waiting included",
    "merge": "put together",
    "prefill": "prefilled, waiting included",
}


def stages_svg(report: JobReport) -> str:
    """Mean seconds of a row by stage, as bars; rows overlap, so that they add up to more than the time that passed."""
    most = max(report.stages.values(), default=0.0)
    shown = list(report.stages.items()) if most and report.ok else []
    height = TOP + ROW * max(1, len(shown)) + 16
    rate = (report.ok + report.failed) / report.seconds if report.seconds else 0.0
    title = f"{report.ok} ok, {report.failed} failed, {report.skipped} skipped"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="16" y="26" font-size="16" fill="#111">{escape(title)}</text>',
        f'<text x="16" y="46" fill="#555">{rate:.1f} rows/s in {report.seconds:.1f} s; mean of a row by stage</text>',
        *(_bar(i, stage, total / report.ok, total / most) for i, (stage, total) in enumerate(shown)),
    ]
    if not shown:
        parts.append(f'<text x="16" y="{TOP + 16}" fill="#555">no row was served in this run</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(number: int, stage: str, seconds: float, share: float) -> str:
    y = TOP + ROW * number
    width = max(1.0, BAR * share)
    return (
        f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end" fill="#111">{escape(stage)}</text>'
        f'<rect x="{LEFT}" y="{y + 2}" width="{width:.1f}" height="{ROW - 8}" rx="2" fill="#4c78a8">'
        f"<title>{escape(WHAT.get(stage, stage))}</title></rect>"
        f'<text x="{LEFT + width + 8:.1f}" y="{y + 15}" fill="#111">{seconds:.3f} s</text>'
    )
