"""The `mmprefill` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmprefill.errors import MMPrefillError

if TYPE_CHECKING:
    from mmprefill.prefiller import Prefiller
    from mmprefill.requests_file import Asked

DESCRIPTION = "Image+text requests in, KV caches out: exact multimodal prefill on stock Hugging Face models."
EPILOG = """examples:
  mmprefill run "What is in this picture?" --image cat.jpg --generate 32
  mmprefill run --model Qwen/Qwen2.5-VL-3B-Instruct --requests requests.jsonl --json
  mmprefill batch questions.jsonl --out answers --emit topk,text
  mmprefill verify path/to/checkpoint
"""


def main(argv: Seq[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("mmprefill: stopped; a batch job goes on where it was with the same command", file=sys.stderr)
        return 130
    except OSError as error:  # by its file rather than its number, where it is about one
        print(f"mmprefill: {f'{error.filename}: {error.strerror}' if error.filename else error}", file=sys.stderr)
        return 2
    except (MMPrefillError, ValueError) as error:
        print(f"mmprefill: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmprefill", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_verify(commands)
    _add_models(commands)
    _add_plan(commands)
    _add_eval(commands)
    _add_bench(commands)
    _add_batch(commands)
    _add_kv(commands)
    _add_demo(commands)
    return parser


def _add_model_options(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    if positional:
        parser.add_argument("model", nargs="?", help="folder or hub id; default: the bundled model")
    else:
        parser.add_argument("--model", help="folder or hub id; default: the bundled model")
    parser.add_argument("--device", help="torch device; default: the first GPU, else the CPU")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "bf16", "fp16", "fp32"], help="default: the checkpoint's"
    )
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--token", help="hub token for gated checkpoints")


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run", help="prefill pictures and a prompt, or a JSONL of requests, and show what came out"
    )
    parser.add_argument("prompt", nargs="?", help="one user turn; or use --requests")
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help="a picture; repeat for several")
    parser.add_argument(
        "--requests", type=Path, metavar="JSONL", help="one request a line: prompt or messages, images, id"
    )
    parser.add_argument("--generate", type=_positive, default=0, metavar="N", help="also answer with at most N tokens")
    parser.add_argument(
        "--top", type=_positive, default=3, metavar="K", help="likeliest next tokens to show (default 3)"
    )
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write each KV cache there as ID.kv.safetensors")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write what each lane did, for Perfetto or chrome://tracing"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the lanes' timeline as .png or .html (extra 'plot')"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    _add_model_options(parser)
    parser.set_defaults(run=_run)


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify", help="compare every path with plain transformers on a checkpoint; exit code 1 if one is out of bounds"
    )
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="pictures to use instead of made-up ones"
    )
    parser.add_argument(
        "--tokens", type=_positive, default=16, metavar="N", help="length of the greedy continuations (default 16)"
    )
    parser.add_argument(
        "--threads", type=_positive, nargs="+", default=[1, 2], metavar="N", help="torch threads to repeat with"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    _add_model_options(parser, positional=True)
    parser.set_defaults(run=_verify)


def _add_models(commands: Any) -> None:
    parser = commands.add_parser("models", help="which families are packed, generic or refused, and why")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    _add_model_options(parser, positional=True)
    parser.set_defaults(run=_models)


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="bytes per token and per patch, measured speed, and the budgets that follow"
    )
    parser.add_argument("--tokens", type=_positive, metavar="N", help="the longest prompt that must fit")
    parser.add_argument("--device-memory", metavar="SIZE", help="plan for so much, e.g. 24GiB; default: what there is")
    parser.add_argument("--fresh", action="store_true", help="measure again instead of using what was measured before")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw memory against length, and speed, as .png or .html (extra 'plot')",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    _add_model_options(parser, positional=True)
    parser.set_defaults(run=_plan)


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser("eval", help="accuracy by kind of question, beside transformers if asked")
    _add_model_options(parser, positional=True)
    parser.add_argument(
        "dataset", type=Path, help="a JSONL file of questions and answers, or a folder of make_scenes.py"
    )
    parser.add_argument(
        "--against", choices=["transformers"], help="also answer with the plain model and list differences"
    )
    parser.add_argument("--alone", action="store_true", help="one request at a time instead of batches")
    parser.add_argument("--limit", type=_positive, metavar="N", help="only the first N questions")
    parser.add_argument(
        "--tokens", type=_positive, default=96, metavar="N", help="most tokens of an answer (default 96)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.set_defaults(run=_eval)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure throughput beside transformers, interleaved in one run")
    parser.add_argument("what", choices=["prefill"], help="what to measure")
    parser.add_argument("model", nargs="?", help="folder or hub id; default: the bundled model")
    parser.add_argument("--workload", type=Path, metavar="DIR", help="pictures and workload.json; made up if not given")
    parser.add_argument("--variants", nargs="+", default=["a", "b", "c"], choices=["a", "b", "c"],
                        help="a: different pictures, b: 4 pictures x 8 questions, c: text only")  # fmt: skip
    parser.add_argument("--requests", type=_positive, default=32, metavar="N", help="requests per repeat (default 32)")
    parser.add_argument("--repeats", type=_positive, default=3, metavar="N", help="repeats of each system (default 3)")
    parser.add_argument("--threads", type=_positive, default=2, metavar="N", help="torch threads (default 2)")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"], help="default bf16")
    parser.add_argument("--systems", nargs="+", default=["mmprefill", "transformers"],
                        choices=["mmprefill", "transformers"], help="of this environment (default both)")  # fmt: skip
    parser.add_argument("--against", metavar="NAME=PYTHON[@FOLDER],...", default="",
                        help="peers in environments of their own: vllm, openvino (FOLDER is its export)")  # fmt: skip
    parser.add_argument("--split", action="store_true", help="cut pictures into tiles (the processor's "
                        "do_image_splitting); default: as the checkpoint says")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the table as .png or .html (extra 'plot')")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of tables")
    parser.set_defaults(run=_bench)


def _add_batch(commands: Any) -> None:
    parser = commands.add_parser(
        "batch", help="run a dataset of pictures and prompts into tables and KV files; goes on where it was ended",
        epilog="exit code 0: every row has its output, also where there is none; 1: some rows failed; 2: a mistake in the "
        "command; 3: stopped before the end"
    )  # fmt: skip
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="JSONL, CSV or Parquet files, folders of pictures, "
                        "Hugging Face datasets on disk or by their id; globs and fsspec paths too")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the output goes; the same again goes on with it")
    parser.add_argument("--emit", default="topk", metavar="A,B", help="any of kv, topk, logits, scores, embeddings, "
                        "hidden, text (default topk)")  # fmt: skip
    parser.add_argument("--format", default="jsonl", choices=["jsonl", "parquet"], help="of the tables (default jsonl)")
    parser.add_argument("--prompt", metavar="TEXT", help="a prompt made of columns, as 'Is this {label}?'")
    for name in ("image", "prompt", "messages", "id"):
        parser.add_argument(f"--{name}-column", metavar="NAME", help=f"default {name!r}")
    parser.add_argument("--split", help="of a Hugging Face dataset")
    parser.add_argument("--choices", nargs="+", default=[], metavar="TEXT", help="what --emit scores compares")
    parser.add_argument("--top", type=_positive, default=5, metavar="K", help="next tokens of --emit topk (default 5)")
    parser.add_argument(
        "--tokens", type=_positive, default=64, metavar="N", help="most tokens of --emit text (default 64)"
    )
    parser.add_argument("--layer", type=int, default=-1, metavar="N", help="of --emit embeddings (default -1)")
    parser.add_argument("--pooling", default="last", choices=["last", "mean", "none"], help="of --emit embeddings")
    parser.add_argument("--hidden-layers", nargs="+", type=int, default=[-1], metavar="N", help="of --emit hidden")
    parser.add_argument("--limit", type=_positive, metavar="N", help="only the first N rows")
    parser.add_argument("--shard", metavar="I/N", help="only every N-th row, from the I-th on, counted from 0")
    parser.add_argument(
        "--part-rows", type=_positive, default=256, metavar="N", help="rows that are kept or lost together"
    )
    parser.add_argument("--window", type=_positive, default=48, metavar="N", help="most rows in flight (default 48)")
    parser.add_argument("--retries", type=int, default=2, metavar="N", help="when the network fails (default 2)")
    parser.add_argument("--retry-failed", action="store_true", help="do rows again that failed in an earlier run")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="for one row")
    parser.add_argument("--max-errors", type=int, metavar="N", help="stop when more rows than this have failed")
    parser.add_argument(
        "--kv-shard", metavar="SIZE", default="256MiB", help="most of --emit kv in one file (default 256MiB)"
    )
    parser.add_argument("--disk-budget", metavar="SIZE", help="stop before the output is larger, e.g. 20GiB")
    parser.add_argument("--allow-host", action="append", default=[], metavar="HOST", help="fetch pictures from there")
    parser.add_argument("--image-root", action="append", default=[], type=Path, metavar="DIR",
                        help="read pictures from there only")  # fmt: skip
    parser.add_argument("--engine", default="local", choices=["local", "ray"], help="ray: on Ray Data (default local)")
    parser.add_argument(
        "--actors", type=_positive, default=1, metavar="N", help="engines of --engine ray, each with a model"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="run a few rows only; show tokens, bytes and time of all"
    )
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")
    _add_model_options(parser)
    parser.set_defaults(run=_batch)


def _add_kv(commands: Any) -> None:
    parser = commands.add_parser("kv", help="stored KV: show what is in files, verify that they are whole, diff two")
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    for name, text in (("show", "what is in each file"), ("verify", "read all, against the checksums")):
        text += "; exit code 1 if one is damaged"
        command = kinds.add_parser(name, help=text)
        command.add_argument("files", nargs="+", type=Path, metavar="FILE", help="artefacts, or folders of them")
        command.add_argument("--json", action="store_true", help="JSON instead of text")
        command.set_defaults(run=_kv_files, what=name)
    command = kinds.add_parser("diff", help="how two files differ; exit code 1 if they do")
    command.add_argument("first", type=Path)
    command.add_argument("second", type=Path)
    command.add_argument("--tolerance", type=_not_negative, default=0.0, help="largest difference that counts as none")
    command.add_argument("--json", action="store_true", help="JSON instead of text")
    command.set_defaults(run=_kv_diff)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo", help="a page to ask about pictures, and to see what the pipeline does (extra 'demo')"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)"
    )
    parser.add_argument("--port", type=_port, metavar="N", help="default: the first free one from 7860 on")
    parser.add_argument("--max-upload", default="64MiB", metavar="SIZE", help="of one file (default 64MiB)")
    _add_model_options(parser)
    parser.set_defaults(run=_demo)


def _open(arguments: argparse.Namespace, **options: Any) -> Prefiller:
    """Load the model that the command line names."""
    from mmprefill.prefiller import Prefiller

    _quiet_transformers()
    return Prefiller.from_pretrained(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        revision=arguments.revision,
        token=arguments.token,
        **options,
    )


def _quiet_transformers() -> None:
    """Its progress bars and advice would tear the tables; errors still come through."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


# run


def _run(arguments: argparse.Namespace) -> int:
    from mmprefill.report import failure_record, result_record, show_results
    from mmprefill.trace import OFF, Trace

    asked = list(_asked(arguments))
    failed = 0
    if arguments.save:
        _check_names([each.request.id for each in asked])
    _check_outputs(arguments.save, arguments.trace)
    _check_plot(arguments.plot)
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


def _check_outputs(save: Path | None, trace: Path | None) -> None:
    """Mistakes are told before anything runs."""
    if save is not None and save.exists() and not save.is_dir():
        raise ValueError(f"--save {save}: a file; give a folder, which need not be there yet")
    if trace is not None and (trace.is_dir() or not trace.parent.is_dir()):
        raise ValueError(
            f"--trace {trace}: {'a folder' if trace.is_dir() else 'in no folder that is there'}; give a file"
        )


def _check_plot(path: Path | None) -> None:
    """Mistakes are told before anything runs."""
    if path is not None:
        from mmprefill import plots

        plots.check(path)


def _plot(path: Path, chart: str, title: str, *data: Any) -> None:
    """Draw a chart of `mmprefill.plots` into a file."""
    from mmprefill import plots

    print(f"mmprefill: chart in {plots.save(getattr(plots, chart)(*data), path, title)}", file=sys.stderr)


def _save(folder: Path, result: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return str(result.save(folder / _name(result.id)))


def _name(id: str) -> str:
    stem = "".join(c if (c.isascii() and c.isalnum()) or c in "-_." else "_" for c in id)
    return f"{stem[:200]}.kv.safetensors"


def _check_names(ids: Seq[str]) -> None:
    name, count = Counter(map(_name, ids)).most_common(1)[0] if ids else ("", 0)
    if count > 1:
        raise ValueError(f"{count} requests would be saved as {name}: give them ids that differ in letters and digits")


# Numbers, as argparse takes them: it names the option in front of what these say.


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be positive and whole, got {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}")
    return int(text)


def _not_negative(text: str) -> float:
    with suppress(ValueError):
        if (number := float(text)) >= 0:  # nor NaN
            return number
    raise argparse.ArgumentTypeError(f"must not be negative, got {text!r}")


def _asked(arguments: argparse.Namespace) -> Iterator[Asked]:
    from mmprefill.requests_file import Asked, read_requests
    from mmprefill.types import Request

    if arguments.requests is None and arguments.prompt is None:
        raise ValueError("give a prompt or --requests FILE; see mmprefill run --help")
    _check_images(arguments.image)
    if arguments.requests is None:
        yield Asked(Request(prompt=arguments.prompt, images=arguments.image))
        return
    if arguments.prompt is not None or arguments.image:
        raise ValueError("give either a prompt with --image, or --requests")
    with _reading("--requests", arguments.requests):
        yield from read_requests(arguments.requests)


@contextmanager
def _reading(option: str, path: Path) -> Iterator[None]:
    """A file of JSON that cannot be read is told by the option that named it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path}: not UTF-8; give a JSONL file, one JSON object a line") from error
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ValueError(
            f"{option} {error.filename or path}: {why}; give a JSONL file, one JSON object a line"
        ) from error


def _check_images(given: Seq[str]) -> None:
    """Files that are not there are told by the option's name before a model is loaded."""
    from mmprefill.sources import is_base64_picture

    for each in given:
        elsewhere = "://" in each or each[:5].lower() in ("data:", "file:") or is_base64_picture(each)
        if not elsewhere and not os.path.exists(each):  # noqa: PTH110  Path.exists raises for names that are too long
            shown = each if len(each) <= 120 else f"{each[:40]}…"
            raise ValueError(f"--image {shown}: no such file")


# verify and models


def _say(what: str) -> None:
    """One line for whoever waits."""
    print(f"mmprefill: {what} ...", file=sys.stderr)


def _verify(arguments: argparse.Namespace) -> int:
    from mmprefill.models import load
    from mmprefill.report import show_report
    from mmprefill.verify import sample_requests, verify

    _check_images(arguments.image)
    with _open(arguments) as prefiller:
        half = str(prefiller.session.family.dtype) != "torch.float32"
        fp32 = (
            load(
                arguments.model,
                device=arguments.device,
                dtype="fp32",
                revision=arguments.revision,
                token=arguments.token,
            )
            if half
            else None
        )
        report = verify(
            prefiller,
            fp32=fp32,
            requests=sample_requests(prefiller, arguments.image) if arguments.image else None,
            new_tokens=arguments.tokens,
            threads=arguments.threads,
            on_progress=lambda what: _say(f"running {what}"),
        )
    show_report(report, as_json=arguments.json)
    return 0 if report.passed else 1


def _eval(arguments: argparse.Namespace) -> int:
    from mmprefill import evaluate
    from mmprefill.report import progress, show_evaluation

    with _reading("dataset", arguments.dataset):
        questions = evaluate.read_questions(arguments.dataset, arguments.limit)
    with _open(arguments) as prefiller:
        answer = evaluate.answers_alone if arguments.alone else evaluate.answers_together
        ours = list(progress(answer(prefiller, questions, arguments.tokens), "mmprefill", len(questions)))
        plain = None
        if arguments.against:
            theirs = evaluate.plain_answers(prefiller, questions, arguments.tokens)
            plain = list(progress(theirs, "transformers", len(questions)))
    rows, differences = evaluate.tally(questions, ours, plain)
    show_evaluation(rows, differences, as_json=arguments.json)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    import tempfile

    from PIL import Image

    from mmprefill.bench import Peer, as_lines, compare, make_workload
    from mmprefill.models import BUNDLED
    from mmprefill.verify import pictures

    _check_plot(arguments.plot)
    if arguments.workload is not None and not (arguments.workload / "workload.json").is_file():
        raise ValueError(f"--workload {arguments.workload}: no workload.json in it; without the option one is made up")
    against = [Peer.parse(each) for each in arguments.against.split(",") if each]
    with tempfile.TemporaryDirectory() as scratch:
        workload = arguments.workload
        if workload is None:
            sources = [Path(scratch) / f"source{i}.png" for i in range(6)]
            for path, picture in zip(sources, pictures(6, sizes=((480, 640),)), strict=True):
                Image.fromarray(picture).save(path)
            workload = make_workload(Path(scratch) / "workload", sources)
        rows = []
        for row in compare(
            str(arguments.model or BUNDLED), workload, variants=arguments.variants, requests=arguments.requests,
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


def _demo(arguments: argparse.Namespace) -> int:
    from mmprefill import demo
    from mmprefill.demo_limits import Limits
    from mmprefill.pipeline.memory import parse_bytes

    demo.check_extra()
    limits = Limits(upload_bytes=parse_bytes(arguments.max_upload))
    return demo.run(_opener(arguments), host=arguments.host, port=arguments.port, limits=limits)


def _opener(arguments: argparse.Namespace) -> Any:
    from mmprefill.engine import AsyncPrefiller

    _quiet_transformers()
    names = ("device", "dtype", "revision", "token")
    given = {name: getattr(arguments, name) for name in names}
    return partial(AsyncPrefiller.from_pretrained, arguments.model, **given)


def _kv_files(arguments: argparse.Namespace) -> int:
    from mmprefill import artefacts

    run = artefacts.show if arguments.what == "show" else artefacts.verify
    return run(arguments.files, as_json=arguments.json)


def _kv_diff(arguments: argparse.Namespace) -> int:
    from mmprefill.artefacts import diff

    return diff(arguments.first, arguments.second, tolerance=arguments.tolerance, as_json=arguments.json)


def _batch(arguments: argparse.Namespace) -> int:
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
        options = {name: getattr(arguments, name) for name in ("device", "dtype", "revision", "token")}
        report = run_job(
            arguments.inputs, arguments.out, model=arguments.model, config=config, engine="ray", options=options,
            actors=arguments.actors, progress=not arguments.json, **settings,
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


def _plan(arguments: argparse.Namespace) -> int:
    from mmprefill.pipeline import calibrate, footprint, memory

    _check_plot(arguments.plot)
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


def _models(arguments: argparse.Namespace) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
