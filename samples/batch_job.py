"""A batch job over the held-out questions, on this machine or on Ray Data, and how many of its answers are right.

python samples/batch_job.py answers                      # the bundled model; the same again goes on where it was ended
python samples/batch_job.py answers-ray --engine ray --actors 2
"""

import argparse
import json
from pathlib import Path

from mmprefill import run_job
from mmprefill.answers import is_right

QUESTIONS = Path(__file__).with_name("heldout") / "questions.jsonl"


def read(path):
    """A JSONL file's rows; a line ends at a line feed and nowhere else."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def main(argv=None):
    """Run the job, then read its table beside the questions: rows carry their position in the input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", help="default: the bundled one")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--engine", default="local", choices=["local", "ray"])
    parser.add_argument("--actors", type=int, default=1)
    arguments = parser.parse_args(argv)
    report = run_job(
        QUESTIONS, arguments.out, model=arguments.model, limit=arguments.limit, engine=arguments.engine,
        actors=arguments.actors, prompt_column="question", emit=("text", "topk"), max_new_tokens=96, progress=True,
    )  # fmt: skip
    print("\n".join(report.lines()))

    questions = read(QUESTIONS)
    rows = [row for table in sorted((arguments.out / "rows").glob("*.jsonl")) for row in read(table)]
    asked = [questions[row["index"]] for row in rows]
    right = sum(is_right(q["kind"], row["text"], q["answer"]) for q, row in zip(asked, rows, strict=True))
    print(f"{right} of {len(rows)} answers are right")
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
