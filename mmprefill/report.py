"""Results and reports as tables for people and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from mmprefill.answers import is_right

if TYPE_CHECKING:
    from mmprefill.catalogue import Entry
    from mmprefill.evaluate import Difference, Tally
    from mmprefill.prefiller import Prefiller
    from mmprefill.results import PrefillResult
    from mmprefill.types import Generation, Request
    from mmprefill.verify import Report, Row

T = TypeVar("T")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def _console() -> Console:
    """Standard output; wide enough for a table where it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def human_bytes(count: float) -> str:
    """A byte count with a binary unit."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the last unit takes everything")


def result_record(
    result: PrefillResult, answer: Generation | None, top: int, saved: str | None, expected: str | None = None
) -> dict[str, Any]:
    """What `mmprefill run` says of a result, ready for JSON."""
    keys = next(layer.keys for layer in result.cache.layers if getattr(layer, "keys", None) is not None)
    record: dict[str, Any] = {
        "id": result.id,
        "tokens": dict(result.tokens),
        "route": result.route,
        "kv": {
            "layers": len(result.cache.layers),
            "shape": list(keys.shape),
            "dtype": str(keys.dtype).removeprefix("torch."),
            "bytes": result.kv_bytes,
        },
        "next_position": result.next_position,
        "top_tokens": [{"id": t.id, "text": t.text, "logprob": round(t.logprob, 4)} for t in result.top_tokens(top)],
        "seconds": {stage: round(seconds, 4) for stage, seconds in result.seconds.items()},
    }
    if answer is not None:
        record["answer"] = answer.text.strip()
        if expected is not None:
            record |= {"expected": expected, "right": is_right("", answer.text, expected)}
    if saved is not None:
        record["saved"] = saved
    return record


def failure_record(request: Request, error: Any) -> dict[str, Any]:
    """What `mmprefill run` says of a request that failed."""
    return {"id": request.id, "error": type(error).__name__, "message": str(error)}


def show_results(prefiller: Prefiller, records: Seq[Mapping[str, Any]]) -> None:
    """The table of `mmprefill run`."""
    session = prefiller.session
    console = _console()
    path = "packed" if session.route.packed else f"generic: {session.route.reason}"
    console.print(
        f"{session.family.name} on {session.family.device}, {str(session.family.dtype)[6:]}, {path}", highlight=False
    )
    table = Table("request", "tokens", "KV cache", "next token", "seconds", highlight=False)
    answered = any("answer" in record for record in records)
    if answered:
        table.add_column("answer", style="bold", overflow="fold")
    for record in records:
        table.add_row(*_cells(record, answered))
    console.print(table)
    judged = [record["right"] for record in records if "right" in record]
    if judged:
        console.print(f"{sum(judged)} of {len(judged)} answers are the expected ones", highlight=False)


def _cells(record: Mapping[str, Any], answered: bool) -> list[str]:
    name = escape(record["id"].encode(errors="replace").decode())  # text of users and models is never markup
    if "error" in record:
        return [name, "-", "-", escape(f"{record['error']}: {record['message']}"), "-", *([""] if answered else [])]
    tokens = "\n".join(f"{count} {medium}" for medium, count in record["tokens"].items())
    shape = "x".join(map(str, record["kv"]["shape"]))
    kv = f"{record['kv']['layers']} x 2 x {shape}\n{human_bytes(record['kv']['bytes'])} {record['kv']['dtype']}"
    best = escape("\n".join(f"{t['text']!r} {t['logprob']:.2f}" for t in record["top_tokens"]))
    seconds = "\n".join(f"{stage} {value:.3f}" for stage, value in record["seconds"].items())
    return [name, tokens, kv, best, seconds, *([_answer(record)] if answered else [])]


def _answer(record: Mapping[str, Any]) -> str:
    answer: str = escape(record.get("answer", ""))
    return answer if record.get("right", True) else f"{answer} [red](expected: {escape(record['expected'])})[/red]"


def show_report(report: Report, *, as_json: bool) -> None:
    """The exactness table of `mmprefill verify`."""
    if as_json:
        print(json.dumps({**asdict(report), "passed": report.passed}))
        return
    table = Table("path", "logits max", "rms", "bound", "KV max", "rms", "bound", "greedy", "", padding=0)
    table.columns[0].no_wrap = True
    if report.own is not None:
        table.add_row(*_report_cells(report.own)[:-1], "-")
    for row in report.rows:
        table.add_row(*_report_cells(row))
    console = _console()
    console.print(f"{report.model}: {report.dtype}, {report.route}", highlight=False)
    console.print(table)
    for row in report.rows:
        if not row.passed:
            console.print(f"[red]{row.path}: {'; '.join(row.exceeded)}[/red]", highlight=False)
    console.print("every path within its bounds" if report.passed else "[red]some path is out of bounds[/red]")


def _report_cells(row: Row) -> list[str]:
    numbers = (row.logits.max, row.logits.rms, row.limit_logits, row.kv.max, row.kv.rms, row.limit_kv)
    verdict = "[green]ok[/green]" if row.passed else "[red]no[/red]"
    return [row.path, *(f"{number:.1e}" for number in numbers), f"{row.greedy}/{row.requests}", verdict]


def progress(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """A progress bar on standard error; nothing where that is not a terminal."""
    console = Console(stderr=True)
    yield from track(items, what, total, console=console, disable=not console.is_terminal)


def show_evaluation(rows: Seq[Tally], differences: Seq[Difference], *, as_json: bool) -> None:
    """The accuracy table of `mmprefill eval`."""
    if as_json:
        print(
            json.dumps({"rows": [asdict(row) for row in rows], "differences": [asdict(each) for each in differences]})
        )
        return
    table = Table("kind", "questions", "right", highlight=False)
    compared = rows[-1].plain is not None
    if compared:
        table.add_column("transformers")
        table.add_column("same answer")
    for row in rows:
        cells = [row.kind, str(row.count), _percent(row.right, row.count)]
        table.add_row(*cells, *([_percent(row.plain, row.count), f"{row.same}/{row.count}"] if compared else []))
    console = _console()
    console.print(table)
    for each in differences:
        console.print(f"{each.id}: {each.ours!r}, transformers {each.theirs!r}", highlight=False, markup=False)


def _percent(part: int | None, whole: int) -> str:
    return f"{100 * (part or 0) / max(1, whole):.1f} %"


def show_entries(entries: Seq[Entry], *, as_json: bool) -> None:
    """The table of `mmprefill models`."""
    if as_json:
        for entry in entries:
            print(json.dumps(asdict(entry)))
        return
    table = Table("family", "path", "why", highlight=False)
    for entry in entries:
        table.add_row(entry.family, entry.path, entry.reason)
    console = _console()
    console.print(table)
    counts = {path: sum(entry.path == path for entry in entries) for path in ("packed", "generic", "refused")}
    console.print(", ".join(f"{count} {path}" for path, count in counts.items()), highlight=False)
