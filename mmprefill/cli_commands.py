"""What each command of `mmprefill` does with its options (`cli.py`); each returns the exit code."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmprefill.cli_checks import check_images, check_outputs, check_plot, reading

if TYPE_CHECKING:
    from mmprefill.prefiller import Prefiller
    from mmprefill.requests_file import Asked


def run(arguments: argparse.Namespace) -> int:
    """Prefill, and show what came out; 1 if a request failed."""
    from mmprefill.report import failure_record, result_record, show_results
    from mmprefill.trace import OFF, Trace

    asked = list(_asked(arguments))
    failed = 0
    if arguments.save:
        _check_names([each.request.id for each in asked])
    check_outputs(arguments.save, arguments.trace)
    check_plot(arguments.plot)
    if not asked:
        print(f"mmprefill: no requests in {arguments.requests}", file=sys.stderr)
        return 0
    trace = Trace() if arguments.trace or arguments.plot else OFF
    with _open(arguments, trace=trace) as prefiller:
        outcomes = prefiller.prefill_many([each.request for each in asked])
        answers = prefiller.decode_many(outcomes, arguments.generate) if arguments.generate else [None] * len(outcomes)
        records = []
        for each, outcome, answer in zip(asked, outcomes, answers, strict=True):
            if isinstance(outcome, BaseException) or isinstance(answer, BaseException):
                failed += 1
                records.append(failure_record(each.request, outcome if isinstance(outcome, BaseException) else answer))
                continue
            saved = _save(arguments.save, outcome) if arguments.save else None
            records.append(result_record(outcome, answer, arguments.top, saved, each.expected))
        if arguments.json:
            for record in records:
                print(json.dumps(record))
        else:
            show_results(prefiller, records)
    if isinstance(trace, Trace) and arguments.trace:
        print(f"mmprefill: trace in {trace.write(arguments.trace)}", file=sys.stderr)
    if isinstance(trace, Trace) and arguments.plot:
        _plot(arguments.plot, "timeline", "What the lanes did", trace.bars)
    return 1 if failed else 0


def _asked(arguments: argparse.Namespace) -> Iterator[Asked]:
    from mmprefill.requests_file import Asked, read_requests
    from mmprefill.types import Request

    if arguments.requests is None and arguments.prompt is None:
        raise ValueError("give a prompt or --requests FILE; see mmprefill run --help")
    check_images(arguments.image)
    if arguments.requests is None:
        yield Asked(Request(prompt=arguments.prompt, images=arguments.image))
        return
    if arguments.prompt is not None or arguments.image:
        raise ValueError("give either a prompt with --image, or --requests")
    with reading("--requests", arguments.requests):
        yield from read_requests(arguments.requests)


def _check_names(ids: Seq[str]) -> None:
    name, count = Counter(map(_name, ids)).most_common(1)[0] if ids else ("", 0)
    if count > 1:
        raise ValueError(f"{count} requests would be saved as {name}: give them ids that differ in letters and digits")


def _save(folder: Path, result: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return str(result.save(folder / _name(result.id)))


def _name(id: str) -> str:
    stem = "".join(c if (c.isascii() and c.isalnum()) or c in "-_." else "_" for c in id)
    return f"{stem[:200]}.kv.safetensors"


def verify(arguments: argparse.Namespace) -> int:
    """The exactness table; 1 if a path is out of its bounds."""
    from mmprefill import verify as exactness
    from mmprefill.models import load
    from mmprefill.report import show_report

    check_images(arguments.image)
    with _open(arguments) as prefiller:
        half = str(prefiller.session.family.dtype) != "torch.float32"
        fp32 = load(arguments.model, **{**_loading(arguments), "dtype": "fp32"}) if half else None
        report = exactness.verify(
            prefiller,
            fp32=fp32,
            requests=exactness.sample_requests(prefiller, arguments.image) if arguments.image else None,
            new_tokens=arguments.tokens,
            threads=arguments.threads,
            on_progress=lambda what: _say(f"running {what}"),
        )
    show_report(report, as_json=arguments.json)
    return 0 if report.passed else 1


def models(arguments: argparse.Namespace) -> int:
    """How one checkpoint is run, or every family that transformers maps."""
    from mmprefill.report import show_entries

    if arguments.model is not None:
        from mmprefill.catalogue import Entry

        with _open(arguments) as prefiller:
            session = prefiller.session
            path = "packed" if session.route.packed else "generic"
            show_entries([Entry(session.family.name, path, session.route.reason)], as_json=arguments.json)
        return 0
    from mmprefill.catalogue import entries, families

    _quiet_transformers()
    found = []
    for entry in entries():
        found.append(entry)
        if sys.stderr.isatty():
            print(f"\rlooking at {len(found)} of {len(families())} families", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    show_entries(found, as_json=arguments.json)
    return 0


def plan(arguments: argparse.Namespace) -> int:
    """Budgets, and what they follow from."""
    from mmprefill.pipeline import calibrate, footprint, memory

    check_plot(arguments.plot)
    given = memory.parse_bytes(arguments.device_memory) if arguments.device_memory else None
    with _open(arguments) as prefiller:
        session = prefiller.session
        context = session.bundle.context
        if arguments.tokens is not None and arguments.tokens > context:
            raise ValueError(f"--tokens {arguments.tokens}: the model's context is {context} tokens")
        bench = calibrate.Bench(session.family, session.route.plan, prefiller.intake)
        needs = session.lane.call(footprint.footprint, bench)
        room = given or memory.device_memory(session.family.device, needs.weights)
        memory.left_by_weights(needs, room)  # refused here, not after minutes of measuring
        costs = session.lane.call(calibrate.costs_of, bench, fresh=arguments.fresh, say=_say)
        budgets = memory.choose(needs, costs, room, arguments.tokens, context)
    if arguments.json:
        print(json.dumps(memory.as_record(needs, costs, budgets)))
    else:
        print("\n".join(memory.as_lines(needs, costs, budgets)))
    if arguments.plot:
        _plot(arguments.plot, "plan", "Memory against length, and speed", needs, costs, budgets, context)
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """The accuracy table (`eval`)."""
    from mmprefill import evaluate as accuracy
    from mmprefill.report import progress, show_evaluation

    with reading("dataset", arguments.dataset):
        questions = accuracy.read_questions(arguments.dataset, arguments.limit)
    with _open(arguments) as prefiller:
        answer = accuracy.answers_alone if arguments.alone else accuracy.answers_together
        ours = list(progress(answer(prefiller, questions, arguments.tokens), "mmprefill", len(questions)))
        plain = None
        if arguments.against:
            theirs = accuracy.plain_answers(prefiller, questions, arguments.tokens)
            plain = list(progress(theirs, "transformers", len(questions)))
    rows, differences = accuracy.tally(questions, ours, plain)
    show_evaluation(rows, differences, as_json=arguments.json)
    return 0


def bench(arguments: argparse.Namespace) -> int:
    """The throughput table, and its one line of JSON."""
    import tempfile

    from mmprefill import bench_workload
    from mmprefill.bench import REQUESTS, Peer, as_lines, compare
    from mmprefill.models import BUNDLED

    check_plot(arguments.plot)
    if arguments.workload is not None:
        bench_workload.check(arguments.workload, arguments.variants, arguments.requests)
    requests = arguments.requests or REQUESTS
    against = [Peer.parse(each) for each in arguments.against.split(",") if each]
    with tempfile.TemporaryDirectory() as scratch:
        workload = arguments.workload or bench_workload.made_up(Path(scratch), requests)
        rows = []
        for row in compare(
            str(arguments.model or BUNDLED), workload, variants=arguments.variants, requests=requests,
            repeats=arguments.repeats, dtype=arguments.dtype, threads=arguments.threads, systems=arguments.systems,
            against=against, split=arguments.split,
        ):  # fmt: skip
            rows.append(row)
            print(f"mmprefill: {row.system}, variant {row.variant}: {row.tokens_per_s} tokens/s", file=sys.stderr)
    lines = as_lines(rows)
    print(lines.rpartition("\n")[2] if arguments.json else lines)
    if arguments.plot:
        _plot(arguments.plot, "throughput", "Prompt tokens per second", rows)
    return 0


def batch(arguments: argparse.Namespace) -> int:
    """A job, or with `--dry-run` a look at it; the code is its report's."""
    from mmprefill import job_report
    from mmprefill.config import MediaLimits, PrefillConfig
    from mmprefill.job import estimate_job, run_job
    from mmprefill.job_files import find
    from mmprefill.job_settings import JobSettings

    if arguments.out is None and not arguments.dry_run:
        raise ValueError("say where the output goes: --out DIR, or look first: --dry-run")
    settings = _batch_settings(arguments)
    JobSettings(**settings), find(arguments.inputs)  # mistakes are told before a model is loaded
    hosts, roots = tuple(arguments.allow_host), tuple(arguments.image_root) or None
    config = PrefillConfig(media=MediaLimits(allow_urls=bool(hosts), allowed_hosts=hosts, allowed_roots=roots))
    if arguments.engine == "ray" and not arguments.dry_run:
        report = run_job(
            arguments.inputs, arguments.out, model=arguments.model, options=_loading(arguments), config=config,
            engine="ray", actors=arguments.actors, progress=not arguments.json, **settings,
        )  # fmt: skip
        job_report.show_report(report, arguments.json)
        return report.exit_code
    with _open(arguments, config=config) as prefiller:
        if arguments.dry_run:
            job_report.show_estimate(estimate_job(arguments.inputs, prefiller=prefiller, **settings), arguments.json)
            return 0
        report = run_job(arguments.inputs, arguments.out, prefiller=prefiller, progress=not arguments.json, **settings)
    job_report.show_report(report, arguments.json)
    return report.exit_code


def _batch_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    from mmprefill.pipeline.memory import parse_bytes

    names = (
        "format", "prompt", "image_column", "prompt_column", "messages_column", "id_column", "split", "choices", "top",
        "layer", "pooling", "hidden_layers", "limit", "part_rows", "window", "retries", "deadline", "max_errors",
        "retry_failed",
    )  # fmt: skip
    settings = {name: getattr(arguments, name) for name in names}
    settings["emit"] = [each.strip() for each in arguments.emit.split(",")]
    settings["max_new_tokens"] = arguments.tokens
    settings["kv_shard"] = parse_bytes(arguments.kv_shard)
    settings["disk_budget"] = parse_bytes(arguments.disk_budget) if arguments.disk_budget else None
    if arguments.shard:
        numbers = arguments.shard.split("/")
        if len(numbers) != 2 or not all(each.isdecimal() for each in numbers):
            raise ValueError(f"--shard takes I/N such as 0/4, got {arguments.shard!r}")
        settings["shard"] = (int(numbers[0]), int(numbers[1]))
    return settings


def kv_files(arguments: argparse.Namespace) -> int:
    """`kv show` and `kv verify`; 1 if a file is damaged."""
    from mmprefill import artefacts

    run = artefacts.show if arguments.what == "show" else artefacts.verify
    return run(arguments.files, as_json=arguments.json)


def kv_diff(arguments: argparse.Namespace) -> int:
    """1 if the two differ."""
    from mmprefill.artefacts import diff

    return diff(arguments.first, arguments.second, tolerance=arguments.tolerance, as_json=arguments.json)


def demo(arguments: argparse.Namespace) -> int:
    """Serve the page until it is interrupted."""
    from mmprefill import demo as page
    from mmprefill.demo_limits import Limits
    from mmprefill.engine import AsyncPrefiller
    from mmprefill.pipeline.memory import parse_bytes

    page.check_extra()
    limits = Limits(upload_bytes=parse_bytes(arguments.max_upload))
    _quiet_transformers()
    open_engine = partial(AsyncPrefiller.from_pretrained, arguments.model, **_loading(arguments))
    return page.run(open_engine, host=arguments.host, port=arguments.port, limits=limits)


def _open(arguments: argparse.Namespace, **options: Any) -> Prefiller:
    """Load the model that the command line names."""
    from mmprefill.prefiller import Prefiller

    _quiet_transformers()
    return Prefiller.from_pretrained(arguments.model, **_loading(arguments), **options)


def _loading(arguments: argparse.Namespace) -> dict[str, Any]:
    """How to load the model that the command line names."""
    return {name: getattr(arguments, name) for name in ("device", "dtype", "revision", "token")}


def _quiet_transformers() -> None:
    """Its progress bars and advice would tear the tables; errors still come through."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def _plot(path: Path, chart: str, title: str, *data: Any) -> None:
    """Draw a chart of `mmprefill.plots` into a file."""
    from mmprefill import plots

    print(f"mmprefill: chart in {plots.save(getattr(plots, chart)(*data), path, title)}", file=sys.stderr)


def _say(what: str) -> None:
    """One line for whoever waits."""
    print(f"mmprefill: {what} ...", file=sys.stderr)
