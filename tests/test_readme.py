"""Every block of code in the README runs as it stands there, and whatever it names exists."""

import itertools
import re
import shlex
import subprocess
from pathlib import Path

import checkpoints
import pytest
import tomllib

from mmprefill import cli, demo, verify

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
LINES = [line.split("  #")[0].strip() for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("mmprefill ")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a reader would be: beside `samples`; what is written goes elsewhere."""
    (tmp_path / "samples").symlink_to(ROOT / "samples")
    monkeypatch.chdir(tmp_path)
    with checkpoints.quiet():
        yield tmp_path


def test_every_block_is_of_a_kind_that_is_run():
    assert {kind for kind, _ in BLOCKS} == {"python", "sh", ""}
    assert all(line.split()[0] in ("make", "mmprefill") for line in LINES if line)


@pytest.mark.parametrize("code", [block for kind, block in BLOCKS if kind == "python"])
def test_python(folder, code):
    exec(compile(code, "README.md", "exec"), {})
    assert list(folder.glob("*.kv.safetensors"))


@pytest.mark.parametrize("target", [line.split()[1] for line in LINES if line.startswith("make ")])
def test_make_targets(target):
    """They exist; `make test` cannot be run by a test, and CI runs it."""
    run = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


@pytest.mark.end_to_end
@pytest.mark.timeout(240)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(folder, command, monkeypatch, capsys):
    """With a tiny checkpoint in the place of MODEL, and two requests where all are compared; both are tested elsewhere,
    as is the page of `demo`."""
    shown, sample = [], verify.sample_requests
    monkeypatch.setattr(verify, "sample_requests", lambda *a: sample(*a)[1:3])
    monkeypatch.setattr(demo, "run", lambda open_engine, **_: shown.append(open_engine) or 0)
    if command.startswith("mmprefill kv "):
        first = next(line for line in COMMANDS if "--emit" in line and "kv" in line)
        assert cli.main(shlex.split(first)[1:]) == 0
    arguments = shlex.split(command.replace("MODEL", str(checkpoints.cached("smolvlm"))))[1:]
    if arguments[0] == "bench":  # minutes, in processes of its own: that it is understood must do here
        assert cli._parser().parse_args(arguments).run
        return
    assert cli.main(arguments) == 0, capsys.readouterr().err
    assert bool(shown) == (arguments[0] == "demo")
    for option, value in itertools.pairwise(arguments):
        if option in ("--plot", "--out"):
            assert (folder / value).exists()


def test_what_it_names_exists():
    """Files of the tree, pictures, links and extras."""
    for name in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / name).exists(), name
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"mmprefill\[([\w,]+)\]|'\.\[([\w,]+)\]'", README):
        assert set("".join(names).split(",")) <= set(extras)
    current = ROOT
    for line in next(block for kind, block in BLOCKS if not kind and "engine.py" in block).splitlines():
        for name in re.findall(r"[\w/*{},]+(?:\.py\b|/(?=\s))", line):
            if name.endswith("/"):
                current = ROOT / name
                assert current.is_dir(), name
            else:
                assert all(list(current.glob(each)) for each in spelled_out(name)), f"{current.name}/{name}"


def spelled_out(name):
    """job_{a,b}.py -> job_a.py, job_b.py"""
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    return [f"{found[1]}{part}{found[3]}" for part in found[2].split(",")] if found else [name]
