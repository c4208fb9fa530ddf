"""A Python that has imported what takes seconds, and forks for each script that needs a process of its own.

A script's process begins with these imports and nothing else, and ends as any interpreter does.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}


class Interpreter:
    """Starts with its first script; one script at a time."""

    def __init__(self):
        self._process = None

    def run(self, code, *arguments, **environment):
        """What `python -c code arguments` would give: exit code, output and errors."""
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("out", "err")]
            order = {"code": code, "arguments": arguments, "environment": environment, "files": [*map(str, files)]}
            status = self._ask(json.dumps(order))
            out, err = (file.read_text(encoding="utf-8") for file in files)
        return subprocess.CompletedProcess(code, os.waitstatus_to_exitcode(status), out, err)

    def _ask(self, order):
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, **SETTINGS}, start_new_session=True,
            )  # fmt: skip
        try:
            print(order, file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())
        except BaseException:  # the test's time is over, say: whoever comes next gets a new one
            self.close()
            raise

    def close(self):
        """End it, and a script that still runs."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None


def next_script():
    """In the child of a fork the order for it, once there is one; None at the end."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return json.loads(line)
        print(os.waitpid(child, 0)[1], flush=True)
    return None


def become(order):
    """Arguments, environment and files of its own."""
    sys.argv = ["-c", *order["arguments"]]
    os.environ.update(order["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(order["files"], 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)


if __name__ == "__main__":
    import mmprefill.job
    import mmprefill.prefiller  # noqa: F401

    script = next_script()
    if script is not None:
        become(script)
        exec(compile(script["code"], "<script>", "exec"), globals())  # which live until the interpreter ends
