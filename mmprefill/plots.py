"""Charts for `--plot`, as PNG or as a page of HTML with the drawing inside: one function a chart, one to save it.

matplotlib comes with the extra `plot` and is loaded by whoever draws; no state of its pyplot is touched.
"""

from __future__ import annotations

import importlib.util
import io
import statistics
from collections.abc import Sequence as Seq
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmprefill.files import write_atomically
from mmprefill.report import human_bytes
from mmprefill.trace import Bar

if TYPE_CHECKING:
    from mmprefill.bench import Measured
    from mmprefill.pipeline.costs import Costs
    from mmprefill.pipeline.footprint import Footprint
    from mmprefill.pipeline.memory import Budgets

Figure = Any  # matplotlib.figure.Figure
SUFFIXES = (".png", ".html")
INK, GRID = "#1e293b", "#e2e8f0"
COLOURS = {"intake": "#64748b", "vision": "#0d9488", "text": "#b45309", "decoder": "#2563eb"}
_LANES = {"intake": "intake", "vision": "vision", "text": "text, merge", "decoder": "decoder"}


def check(path: Path) -> None:
    """Raises ValueError, before anything is computed, for a file that cannot be drawn."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--plot writes {' or '.join(SUFFIXES)}, got {path.name!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'mmprefill[plot]'")
    if not path.parent.is_dir():
        raise ValueError(f"--plot: there is no folder {path.parent}")


def figure(width: float = 9.0, height: float = 4.0, *, axes: int = 1) -> tuple[Figure, list[Any]]:
    """An empty figure in the style of all charts, and its axes from left to right."""
    from matplotlib.figure import Figure as New

    drawn = New(figsize=(width, height), layout="constrained", facecolor="white")
    made = list(drawn.subplots(1, axes, squeeze=False)[0])
    for each in made:
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color("#94a3b8")
        each.tick_params(colors=INK, labelsize=9)
        each.grid(color=GRID, linewidth=0.8)
        each.set_axisbelow(True)
    return drawn, made


def save(drawn: Figure, path: Path, title: str) -> Path:
    """Write a figure by its suffix, in one move. Returns the path."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    html = path.suffix.lower() == ".html"
    with rc_context({"svg.fonttype": "none"}):  # text stays text: it can be searched, read aloud and scaled
        drawn.savefig(buffer, format="svg" if html else "png", dpi=150)
    data = _page(buffer.getvalue().decode(), title).encode() if html else buffer.getvalue()
    write_atomically(path, [data])
    return path


def _page(svg: str, title: str) -> str:
    drawing = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
    style = "body{margin:2rem;font-family:system-ui,sans-serif;color:#1e293b}svg{max-width:100%;height:auto}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{style}</style><h1>{escape(title)}</h1>{drawing}</html>\n"
    )


def timeline(bars: Seq[Bar]) -> Figure:
    """What each lane did and when: one row a lane, intake threads together.

    Raises:
        ValueError: for no bars.
    """
    if not bars:
        raise ValueError("nothing ran: there is no timeline to draw")
    start, end = min(bar.start for bar in bars), max(bar.end for bar in bars)
    least = max((end - start) / 400, 1e-6)  # what took next to no time is seen too
    drawn, (axis,) = figure(9, 3)
    for row, lane in enumerate(reversed(_LANES)):
        mine = [bar for bar in bars if lane in bar.lane]
        spans = [((bar.start - start) * 1e3, max(bar.end - bar.start, least) * 1e3) for bar in mine]
        axis.broken_barh(spans, (row - 0.36, 0.72), facecolor=COLOURS[lane], edgecolor="white", linewidth=0.3)
        busy = sum(bar.end - bar.start for bar in mine)
        axis.text(
            1.01, row, f"{busy * 1e3:.0f} ms", transform=axis.get_yaxis_transform(), va="center", fontsize=9, color=INK
        )
    axis.text(1.01, 1.02, "busy", transform=axis.transAxes, fontsize=9, color=INK)
    axis.set_yticks(range(len(_LANES)), list(reversed(_LANES.values())))
    axis.grid(visible=False, axis="y")
    axis.set_xlim(left=0)
    axis.set_xlabel("ms since the first request was taken in", fontsize=9, color=INK)
    return drawn


def plan(needs: Footprint, costs: Costs, budgets: Budgets, context: int) -> Figure:
    """Memory against the length of one prompt of at most `context` tokens, and measured speed against a step's size."""
    drawn, (memory, speed) = figure(11, 4, axes=2)
    _memory(memory, needs, budgets, context)
    sizes = [size for size, seconds in costs.step.points if size and seconds]
    rates = [size / costs.step(size) for size in sizes]
    speed.plot(sizes, rates, color=COLOURS["decoder"], marker="o", markersize=4)
    speed.axvline(budgets.step_tokens, color=INK, linestyle="--", linewidth=1)
    speed.annotate(
        f"step of {budgets.step_tokens} ", (budgets.step_tokens, 0), fontsize=9, color=INK, va="bottom", ha="right"
    )
    speed.set_xscale("log", base=2)
    speed.set_xticks(sizes, [_thousands(size) for size in sizes])
    speed.minorticks_off()
    speed.set_ylim(0, 1.1 * max(rates, default=1.0))
    speed.set_xlabel("tokens in a step", fontsize=9, color=INK)
    speed.set_title("prefill, tokens per second", fontsize=10, color=INK, loc="left")
    for axis in (memory.xaxis, speed.yaxis):
        axis.set_major_formatter(lambda value, _: _thousands(value))
    return drawn


def _memory(axis: Any, needs: Footprint, budgets: Budgets, context: int) -> None:
    longest = max(min(budgets.kv_tokens, context), 2)
    lengths = [longest * i / 64 for i in range(65)]
    transient = budgets.step_tokens * needs.step_token + budgets.vision_patches * needs.patch
    kv = [length * needs.token for length in lengths]
    unit, name = _unit(needs.weights + transient + max(kv))
    parts = [[each / unit for each in part] for part in ([needs.weights] * 65, [transient] * 65, kv)]
    labels = [f"weights, {human_bytes(needs.weights)}", f"a step and a tower call, {human_bytes(transient)}",
              f"KV, {human_bytes(needs.token)} a token"]  # fmt: skip
    axis.stackplot(lengths, *parts, labels=labels, colors=["#94a3b8", COLOURS["vision"], COLOURS["decoder"]])
    total = sum(part[-1] for part in parts)
    if budgets.memory / unit < 1.5 * total:
        axis.axhline(budgets.memory / unit, color=INK, linestyle="--", linewidth=1)
        axis.annotate(
            "all that there is ", (longest, budgets.memory / unit), fontsize=9, color=INK, va="bottom", ha="right"
        )
    axis.legend(loc="upper left", fontsize=8, frameon=False, reverse=True)  # as they lie
    axis.set_xlim(0, longest)
    axis.set_ylim(0, 1.5 * total)
    axis.set_xlabel(
        "tokens of one prompt" + (", up to the model's most" if longest == context else ""), fontsize=9, color=INK
    )
    axis.set_title(f"memory, {name}", fontsize=10, color=INK, loc="left")


def _thousands(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"


def _unit(count: float) -> tuple[float, str]:
    """The largest binary unit that is not above a byte count."""
    return next(
        (2.0**power, name) for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B")) if count >= 2**power
    )


def throughput(rows: Seq[Measured]) -> Figure:
    """Prompt tokens per second of each system, one panel a workload, under what the machine's matrix rate allows at most.

    Beside each bar: the figure, the multiple of transformers', the share of that rate.
    """
    variants = list(dict.fromkeys(row.variant for row in rows))
    drawn, axes = figure(4.2 * len(variants), 1.5 + 0.45 * len({row.system for row in rows}), axes=len(variants))
    for axis, variant in zip(axes, variants, strict=True):
        mine = [row for row in rows if row.variant == variant][::-1]
        base = next((row.tokens_per_s for row in mine if row.system == "transformers"), None)
        colours = [COLOURS["vision" if row.system == "mmprefill" else "intake"] for row in mine]
        bars = axis.barh([row.system for row in mine], [row.tokens_per_s for row in mine], color=colours, height=0.64)
        axis.bar_label(bars, [_beside(row, base) for row in mine], padding=3, fontsize=8, color=INK)
        most = max(row.tokens_per_s for row in mine)
        roofs = [row.tokens_per_s / row.fraction for row in mine if row.fraction]  # each at the rate beside it
        roof = statistics.median(roofs) if roofs else 0.0
        if roof:
            axis.axvline(roof, color=INK, linestyle="--", linewidth=1, zorder=0)
        axis.set_xlim(0, max(1.5 * most, 1.05 * roof))
        axis.set_title(mine[0].workload, fontsize=10, color=INK, loc="left")
        axis.set_xlabel(
            "prompt tokens per second" + (", - - all of the matrix rate" if roof else ""), fontsize=9, color=INK
        )
        axis.grid(visible=False, axis="y")
    return drawn


def _beside(row: Measured, base: float | None) -> str:
    parts = [f"{row.tokens_per_s:.0f}"]
    parts += [f"{row.tokens_per_s / base:.2f}x"] if base else []
    parts += [f"{row.fraction:.0%}"] if row.fraction else []
    return ", ".join(parts)
