"""The `mmprefill` command: its options and help. What each command does is in `cli_commands.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from mmprefill import cli_commands
from mmprefill.cli_checks import not_negative, port, positive
from mmprefill.errors import MMPrefillError

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
    parser.add_argument("--generate", type=positive, default=0, metavar="N", help="also answer with at most N tokens")
    parser.add_argument(
        "--top", type=positive, default=3, metavar="K", help="likeliest next tokens to show (default 3)"
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
    parser.set_defaults(run=cli_commands.run)


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify", help="compare every path with plain transformers on a checkpoint; exit code 1 if one is out of bounds"
    )
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="pictures to use instead of made-up ones"
    )
    parser.add_argument(
        "--tokens", type=positive, default=16, metavar="N", help="length of the greedy continuations (default 16)"
    )
    parser.add_argument(
        "--threads", type=positive, nargs="+", default=[1, 2], metavar="N", help="torch threads to repeat with"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    _add_model_options(parser, positional=True)
    parser.set_defaults(run=cli_commands.verify)


def _add_models(commands: Any) -> None:
    parser = commands.add_parser("models", help="which families are packed, generic or refused, and why")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    _add_model_options(parser, positional=True)
    parser.set_defaults(run=cli_commands.models)


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="bytes per token and per patch, measured speed, and the budgets that follow"
    )
    parser.add_argument("--tokens", type=positive, metavar="N", help="the longest prompt that must fit")
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
    parser.set_defaults(run=cli_commands.plan)


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
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N questions")
    parser.add_argument(
        "--tokens", type=positive, default=96, metavar="N", help="most tokens of an answer (default 96)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.set_defaults(run=cli_commands.evaluate)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure throughput beside transformers, interleaved in one run")
    parser.add_argument("what", choices=["prefill"], help="what to measure")
    parser.add_argument("model", nargs="?", help="folder or hub id; default: the bundled model")
    parser.add_argument("--workload", type=Path, metavar="DIR", help="pictures and workload.json; made up if not given")
    parser.add_argument("--variants", nargs="+", default=["a", "b", "c"], choices=["a", "b", "c"],
                        help="a: different pictures, b: 4 pictures x 8 questions, c: text only")  # fmt: skip
    parser.add_argument("--requests", type=positive, metavar="N", help="requests per repeat (default 32, or what --workload "
                        "has, if that is less)")  # fmt: skip
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="repeats of each system (default 3)")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="torch threads (default 2)")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"], help="default bf16")
    parser.add_argument("--systems", nargs="+", default=["mmprefill", "transformers"],
                        choices=["mmprefill", "transformers"], help="of this environment (default both)")  # fmt: skip
    parser.add_argument("--against", metavar="NAME=PYTHON[@FOLDER],...", default="",
                        help="peers in environments of their own: vllm, openvino (FOLDER is its export)")  # fmt: skip
    parser.add_argument("--split", action="store_true", help="cut pictures into tiles (the processor's "
                        "do_image_splitting); default: as the checkpoint says")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the table as .png or .html (extra 'plot')")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of tables")
    parser.set_defaults(run=cli_commands.bench)


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
    parser.add_argument("--top", type=positive, default=5, metavar="K", help="next tokens of --emit topk (default 5)")
    parser.add_argument(
        "--tokens", type=positive, default=64, metavar="N", help="most tokens of --emit text (default 64)"
    )
    parser.add_argument("--layer", type=int, default=-1, metavar="N", help="of --emit embeddings (default -1)")
    parser.add_argument("--pooling", default="last", choices=["last", "mean", "none"], help="of --emit embeddings")
    parser.add_argument("--hidden-layers", nargs="+", type=int, default=[-1], metavar="N", help="of --emit hidden")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N rows")
    parser.add_argument("--shard", metavar="I/N", help="only every N-th row, from the I-th on, counted from 0")
    parser.add_argument(
        "--part-rows", type=positive, default=256, metavar="N", help="rows that are kept or lost together"
    )
    parser.add_argument("--window", type=positive, default=48, metavar="N", help="most rows in flight (default 48)")
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
        "--actors", type=positive, default=1, metavar="N", help="engines of --engine ray, each with a model"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="run a few rows only; show tokens, bytes and time of all"
    )
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")
    _add_model_options(parser)
    parser.set_defaults(run=cli_commands.batch)


def _add_kv(commands: Any) -> None:
    parser = commands.add_parser("kv", help="stored KV: show what is in files, verify that they are whole, diff two")
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    for name, text in (("show", "what is in each file"), ("verify", "read all, against the checksums")):
        text += "; exit code 1 if one is damaged"
        command = kinds.add_parser(name, help=text)
        command.add_argument("files", nargs="+", type=Path, metavar="FILE", help="artefacts, or folders of them")
        command.add_argument("--json", action="store_true", help="JSON instead of text")
        command.set_defaults(run=cli_commands.kv_files, what=name)
    command = kinds.add_parser("diff", help="how two files differ; exit code 1 if they do")
    command.add_argument("first", type=Path)
    command.add_argument("second", type=Path)
    command.add_argument("--tolerance", type=not_negative, default=0.0, help="largest difference that counts as none")
    command.add_argument("--json", action="store_true", help="JSON instead of text")
    command.set_defaults(run=cli_commands.kv_diff)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo", help="a page to ask about pictures, and to see what the pipeline does (extra 'demo')"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)"
    )
    parser.add_argument("--port", type=port, metavar="N", help="default: the first free one from 7860 on")
    parser.add_argument("--max-upload", default="64MiB", metavar="SIZE", help="of one file (default 64MiB)")
    _add_model_options(parser)
    parser.set_defaults(run=cli_commands.demo)


if __name__ == "__main__":
    sys.exit(main())
