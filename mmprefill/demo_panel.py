"""The panel beside the chat: what the pipeline did for the last request, as HTML that needs no script.

Every chart is a picture with a description (`role="img"`), and its numbers stand in a table for those who cannot see it.
"""

from __future__ import annotations

from html import escape
from itertools import groupby

from mmprefill.demo_report import ROWS, Report, Span
from mmprefill.report import human_bytes

_NAMES = {
    "intake": ("Intake", "decode, resize, tokenise"),
    "vision": ("Vision", "pictures through the tower"),
    "text": ("Text, merge", "embedding rows and positions"),
    "decoder": ("Decoder", "the prompt, chunk by chunk"),
    "hand-over": ("Hand-over", "the cache, ready to grow"),
    "answer": ("Answer", "one token after another"),
}
EMPTY = """<section class="mm-panel mm-empty" aria-label="What the pipeline did">
<h2>What the pipeline did</h2>
<p>Ask something: the lanes' timeline, the tokens, the KV cache, what was reused and the next token's candidates
appear here.</p></section>"""


def panel(report: Report | None) -> str:
    """The whole panel."""
    if report is None:
        return EMPTY
    if not report.ready:
        done, total = report.progress
        what = f"prefilling: {done} of {total} tokens" if total else "decoding pictures and encoding them"
        return _section(f"<p>{what} …</p>")
    return _section(_facts(report) + _tokens(report) + _timeline(report) + _reuse(report) + _candidates(report))


def _section(body: str) -> str:
    return (
        f'<section class="mm-panel" aria-label="What the pipeline did"><h2>What the pipeline did</h2>{body}</section>'
    )


def _facts(report: Report) -> str:
    total = sum(report.tokens.values())
    each = human_bytes(report.kv_bytes / total)
    chunks = sum(span.row == "decoder" for span in report.spans)
    facts = [
        ("Prompt", f"{total}", f"tokens in {_count(chunks, 'chunk')}" if chunks else "tokens, none to compute"),
        ("KV cache", human_bytes(report.kv_bytes), f"{each}/token"),
        ("First token", _time(report.first_token), f"{report.route} path"),
        ("Answer", f"{report.answered}", f"token{'s' * (report.answered != 1)}, {_rate(report)}"),
    ]
    cells = "".join(
        f"<div><dt>{name}</dt><dd><b>{escape(value)}</b><small>{escape(more)}</small></dd></div>"
        for name, value, more in facts
    )
    return f'<dl class="mm-facts">{cells}</dl><p class="mm-note">{escape(report.kv_shape)}</p>'


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _rate(report: Report) -> str:
    """Of the tokens after the first, which comes with the prefill."""
    spans = [span for span in report.spans if span.row == "answer"][1:]
    seconds = sum(span.end - span.start for span in spans)
    return f"{len(spans) / seconds:.0f} a second" if seconds else "with the prefill"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _tokens(report: Report) -> str:
    total = sum(report.tokens.values())
    said = ", ".join(f"{count} {medium}" for medium, count in report.tokens.items())
    bars = "".join(
        f'<span class="mm-{escape(medium)}" style="width:{100 * count / total:.2f}%"></span>'
        for medium, count in report.tokens.items()
    )
    key = "".join(
        f'<li><i class="mm-{escape(medium)}"></i>{escape(medium)} <b>{count}</b></li>'
        for medium, count in report.tokens.items()
    )
    sizes = ", ".join(f"{width} x {height}" for height, width in report.media)
    pictures = f'<p class="mm-note">pictures of {sizes} pixels</p>' if sizes else ""
    return (
        f'<h3>Tokens by modality</h3><div class="mm-stack" role="img" aria-label="Prompt tokens: {escape(said)}">{bars}'
        f'</div><ul class="mm-key">{key}</ul>{pictures}'
    )


def _timeline(report: Report) -> str:
    start, whole = report.started, max(report.seconds, 1e-6)
    rows, said = [], []
    for row in ROWS:
        spans = [span for span in report.spans if span.row == row]
        name, what = _NAMES[row]
        busy = sum(span.end - span.start for span in spans)
        said.append(f"{name} {_time(busy)}")
        bars = "".join(_bar(span, start, whole) for span in spans)
        rows.append(
            f'<div class="mm-lane"><span class="mm-name" title="{what}">{name}</span><span class="mm-track">{bars}'
            f'</span><span class="mm-time">{_time(busy) if spans else "–"}</span></div>'
        )
    ticks = "".join(f"<span>{_time(whole * part)}</span>" for part in (0, 1))
    return (
        f'<h3>Timeline of the lanes</h3><div class="mm-lanes" role="img" aria-label="Timeline over {_time(whole)}: '
        f'{escape(", ".join(said))}">{"".join(rows)}<div class="mm-axis" aria-hidden="true">{ticks}</div></div>'
        f"{_table(report, start)}"
    )


def _bar(span: Span, start: float, whole: float) -> str:
    left = 100 * (span.start - start) / whole
    width = 100 * (span.end - span.start) / whole
    title = f"{span.label}: {_time(span.end - span.start)}"
    return f'<span class="mm-bar mm-{span.row}" style="left:{left:.2f}%;width:{width:.2f}%" title="{escape(title)}"></span>'


def _table(report: Report, start: float) -> str:
    """The bars as rows; the tokens of the answer as one."""
    rows = []
    ordered = sorted(report.spans, key=lambda span: (ROWS.index(span.row), span.start))
    for row, group in groupby(ordered, key=lambda span: span.row):
        spans = list(group)
        if row == "answer":
            spans = [Span(row, f"{len(spans)} tokens", spans[0].start, spans[-1].end)]
        rows += [
            f"<tr><th scope=row>{_NAMES[row][0]}</th><td>{escape(span.label)}</td><td>{_time(span.start - start)}</td>"
            f"<td>{_time(span.end - span.start)}</td></tr>"
            for span in spans[:40]
        ]
    return (
        "<details><summary>The timeline as a table</summary><div class=mm-scroll><table><thead><tr><th scope=col>lane</th>"
        "<th scope=col>what</th><th scope=col>from</th><th scope=col>for</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _reuse(report: Report) -> str:
    total, (tokens, pictures) = sum(report.tokens.values()), report.reused
    lines = [f"<b>{tokens}</b> of {total} prompt tokens were there already: {escape(report.why or 'no reason given')}."]
    if report.media:
        why = "their KV or their encoding was kept" if pictures else "none was encoded before"
        lines.append(f"<b>{pictures}</b> of {len(report.media)} picture(s) did not go through the tower: {why}.")
    if not report.reuse:
        lines.append("Reuse is turned off for this request.")
    return f"<h3>Reuse</h3><ul class=mm-list>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def _candidates(report: Report) -> str:
    rows = "".join(
        f"<tr><th scope=row><code>{escape(_visible(text))}</code></th><td>{100 * chance:.1f} %</td>"
        f'<td aria-hidden="true"><span class="mm-chance" style="width:{100 * chance:.1f}%"></span></td></tr>'
        for text, chance in report.candidates
    )
    return (
        "<h3>Next token, most probable first</h3><table class=mm-candidates><thead><tr><th scope=col>token</th>"
        f"<th scope=col>probability</th><td></td></tr></thead><tbody>{rows}</tbody></table>"
    )


def _visible(text: str) -> str:
    """A token as it can be seen: spaces and line ends as signs, nothing as a mark for nothing."""
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or "∅"
