"""The command line: what people see, what programs get, and what an error says."""

import json

import checkpoints
import pytest

from mmprefill.cli import main


@pytest.fixture
def smol():
    return str(checkpoints.cached("smolvlm"))


@pytest.fixture(autouse=True)
def quiet():
    with checkpoints.quiet():
        yield


def run(capsys, *arguments):
    code = main(list(arguments))
    return code, capsys.readouterr()


def test_run_as_json(capsys, smol, tmp_path):
    """One JSON object a request: tokens by modality, KV shape and bytes, top tokens, answer, stage times, artefact."""
    checkpoints.picture(1).save(tmp_path / "a.png")
    code, out = run(
        capsys, "run", "hello", "--image", str(tmp_path / "a.png"), "--model", smol, "--json", "--generate", "4",
        "--save", str(tmp_path / "kv"), "--top", "2",
    )  # fmt: skip
    record = json.loads(out.out)
    assert code == 0
    assert record["tokens"]["image"] == 20
    assert record["kv"]["shape"][2] == sum(record["tokens"].values())
    assert record["kv"]["bytes"] == record["kv"]["layers"] * 2 * 4 * 2 * 16 * sum(record["tokens"].values())
    assert len(record["top_tokens"]) == 2
    assert record["answer"]
    assert set(record["seconds"]) >= {"intake", "vision", "merge", "prefill"}
    assert (tmp_path / "kv").glob("*.kv.safetensors")


def test_requests_files_as_people_write_them(tmp_path):
    """A byte order mark, Windows' line ends and U+2028 inside a string are all right; a path where a list belongs is not."""
    from mmprefill.requests_file import read_requests

    file = tmp_path / "requests.jsonl"
    file.write_bytes('\ufeff{"prompt": "one\u2028two"}\r\n\r\n{"prompt": "three"}\r\n'.encode())
    assert [asked.request.prompt for asked in read_requests(file)] == ["one\u2028two", "three"]
    file.write_text('{"prompt": "x", "images": "cat.jpg"}')
    with pytest.raises(ValueError, match=r"line 1.*images must be a list, got str"):
        list(read_requests(file))


@pytest.mark.parametrize(("answer", "said"), [(5, "must be text, got int"), ("\ud800", "half of a surrogate pair")])
def test_answers_are_text(tmp_path, answer, said):
    """What could neither be compared nor printed is told with its line, before anything runs."""
    from mmprefill.requests_file import read_requests

    (tmp_path / "r.jsonl").write_text(json.dumps({"prompt": "x", "answer": answer}))
    with pytest.raises(ValueError, match=f"line 1: not a request: answer.*{said}"):
        list(read_requests(tmp_path / "r.jsonl"))


def test_names_that_are_too_long_are_no_files(tmp_path):
    """Base64 of a small picture, or a name that no file can have, is left to the request that shows it."""
    from mmprefill.requests_file import read_requests

    (tmp_path / "r.jsonl").write_text(json.dumps({"prompt": "x", "images": ["x" * 300]}))
    (asked,) = read_requests(tmp_path / "r.jsonl")
    assert asked.request.images == ["x" * 300]


def test_requests_file(capsys, smol, tmp_path):
    """A JSONL of requests: pictures relative to it; a bad request fails alone and shows in the exit code."""
    checkpoints.picture(1).save(tmp_path / "a.png")
    rows = [
        {"id": "good", "prompt": "look", "images": ["a.png"]},
        {"id": "bad", "prompt": "look", "images": ["missing.png"]},
        {"id": "chat", "messages": [{"role": "user", "content": "hello"}]},
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, out = run(capsys, "run", "--requests", str(tmp_path / "r.jsonl"), "--model", smol, "--json")
    records = [json.loads(line) for line in out.out.splitlines()]
    assert code == 1
    assert [record["id"] for record in records] == ["good", "bad", "chat"]
    assert records[1]["error"] == "MediaError"
    assert "missing.png" in records[1]["message"]


def test_expected_answers(capsys, smol, tmp_path):
    """A request with an `answer` is judged; unknown fields and broken lines are named with their line."""
    (tmp_path / "r.jsonl").write_text('{"prompt": "hello", "answer": "blue"}\n')
    _, out = run(capsys, "run", "--requests", str(tmp_path / "r.jsonl"), "--model", smol, "--generate", "1", "--json")
    record = json.loads(out.out)
    assert record["expected"] == "blue"
    assert record["right"] is False
    (tmp_path / "r.jsonl").write_text('{"prompt": "hello"}\n{"promt": "hello"}\n')
    code, out = run(capsys, "run", "--requests", str(tmp_path / "r.jsonl"), "--model", smol)
    assert code == 2
    assert "line 2" in out.err
    assert "promt" in out.err


def test_markup_in_data_is_text(capsys, smol, tmp_path):
    """Ids and messages that look like the table library's markup are shown as they are."""
    rows = [{"id": "[/red]", "prompt": "a", "images": ["[bold]missing.png"]}, {"id": "[red]", "prompt": "[/INST]"}]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, out = run(capsys, "run", "--requests", str(tmp_path / "r.jsonl"), "--model", smol, "--generate", "2")
    assert code == 1
    for text in ("[/red]", "[red]", "[bold]"):
        assert text in out.out


def test_the_table_for_people(capsys, smol):
    """The table names the model's path, tokens, KV and the answer."""
    code, out = run(capsys, "run", "hello", "--model", smol, "--generate", "2")
    assert code == 0
    for word in ("smolvlm", "packed", "KV cache", "float32", "answer"):
        assert word in out.out


def test_run_writes_a_trace(capsys, smol, tmp_path):
    """The trace has a row per lane, with the merge and the step in them."""
    code, _ = run(capsys, "run", "hello", "--model", smol, "--json", "--trace", str(tmp_path / "t.json"))
    names = {event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert code == 0
    assert {"intake", "merge", "step"} <= names


def test_verify(capsys, smol):
    """The exactness table passes on a tiny checkpoint, and says so to programs too."""
    code, out = run(capsys, "verify", smol, "--threads", "1", "--tokens", "4", "--json")
    assert code == 0
    assert json.loads(out.out)["passed"]


def test_models_of_a_checkpoint(capsys, smol):
    """A checkpoint's path comes from running the probe on it."""
    code, out = run(capsys, "models", smol, "--json")
    assert code == 0
    assert json.loads(out.out) == {"family": "smolvlm", "path": "packed", "reason": ""}


@pytest.mark.end_to_end
@pytest.mark.timeout(240)
def test_models_catalogue(capsys):
    """Every mapped family is packed, generic or refused, with a reason where it is not packed."""
    code, out = run(capsys, "models", "--json")
    rows = {record["family"]: record for record in map(json.loads, out.out.splitlines())}
    assert code == 0
    assert len(rows) > 90
    assert rows["qwen2_5_vl"]["path"] == rows["gemma3"]["path"] == "packed"
    assert rows["lfm2_vl"]["path"] == rows["qwen3_5"]["path"] == "generic"
    assert rows["florence2"]["path"] == rows["mllama"]["path"] == "refused"
    assert all(record["reason"] for record in rows.values() if record["path"] != "packed")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "give a prompt"),
        (["run", "x", "--requests", "y"], "either"),
        (["run", "x", "--model", "/nowhere/at/all"], "not a local folder"),
        (["run", "--requests", "/nowhere.jsonl"], "--requests /nowhere.jsonl: no such file or directory; give a JSONL"),
        (["run", "--requests", "samples"], "--requests samples: is a directory; give a JSONL"),
        (["run", "--requests", "/proc/self/mem"], "--requests /proc/self/mem: input/output error; give a JSONL"),
        (["run", "--requests", "samples/photos/cat.jpg"], "--requests samples/photos/cat.jpg: not UTF-8; give a JSONL"),
        (["run", "x", "--save", "README.md"], "--save README.md: a file; give a folder"),
        (["run", "x", "--save", "README.md/kv"], "mmprefill: README.md/kv: Not a directory"),
        (["run", "x", "--trace", "samples"], "--trace samples: a folder; give a file"),
        (["run", "x", "--trace", "no/where.json"], "--trace no/where.json: in no folder that is there"),
        (["eval", "model", "/nowhere"], "dataset /nowhere: no such file or directory; give a JSONL"),
        (["eval", "model", "samples/photos"], "dataset samples/photos/questions.jsonl: no such file"),
        (["eval", "model", "samples/photos/cat.jpg"], "dataset samples/photos/cat.jpg: not UTF-8"),
        (["bench", "prefill", "--workload", "/nowhere"], "--workload /nowhere: no workload.json in it"),
        (["run", "x", "--image", "missing.png"], "--image missing.png: no such file"),
        (["run", "x", "--image", "x" * 300], "no such file"),
        (["verify", "--image", "missing.png"], "--image missing.png: no such file"),
        (["batch", "samples", "--out", "out", "--prompt", "a {b"], "prompt 'a {b' is no template"),
        (["batch", "samples", "--out", "out", "--deadline", "nan"], "deadline must be positive and finite"),
    ],
)
def test_mistakes_are_explained(capsys, arguments, said):
    """A mistake gives one line that says what to do, and exit code 2; no traceback."""
    code, out = run(capsys, *arguments)
    assert code == 2
    assert said in out.err
    assert "Traceback" not in out.err
    assert len(out.err.strip().splitlines()) == 1


def test_no_requests_are_told(capsys, tmp_path):
    """An empty file is no failure, and not silent."""
    (tmp_path / "r.jsonl").write_text("\n")
    code, out = run(capsys, "run", "--requests", str(tmp_path / "r.jsonl"), "--json")
    assert (code, out.out) == (0, "")
    assert "no requests in" in out.err


def test_too_little_memory_is_refused_before_measuring(capsys, smol, monkeypatch):
    """It says what the weights take; nothing was timed."""
    monkeypatch.setattr("mmprefill.pipeline.calibrate.costs_of", lambda *_, **__: pytest.fail("measured"))
    code, out = run(capsys, "plan", smol, "--device-memory", "1KB")
    assert code == 2
    assert "the weights take" in out.err


def test_help_helps(capsys):
    """Every command has help with its options."""
    for command in ("run", "verify", "models", "eval", "bench", "batch"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert "--help" in capsys.readouterr().out


def test_ids_that_are_odd(tmp_path, capsys):
    """Numbers are ids as tables have them; two that would be one file are refused before anything runs."""
    requests = tmp_path / "requests.jsonl"
    requests.write_text(
        '{"id": 5, "prompt": "one"}\n{"id": "a/b", "prompt": "two"}\n{"id": "a_b", "prompt": "three"}\n'
    )
    assert main(["run", "--requests", str(requests), "--save", str(tmp_path / "kv")]) == 2
    assert "2 requests would be saved as a_b.kv.safetensors" in capsys.readouterr().err
    assert main(["run", "--requests", str(requests), "--json"]) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == ["5", "a/b", "a_b"]


@pytest.mark.parametrize(
    "arguments",
    [
        *(["run", "hi", "--top", each] for each in ("0", "-1", "1.5", "many", "")),
        *(["run", "hi", "--generate", each] for each in ("0", "-1")),
        *(["verify", option, "0"] for option in ("--tokens", "--threads")),
        *(["plan", "--tokens", each] for each in ("0", "-5")),
        *(["eval", "model", "samples", option, "0"] for option in ("--limit", "--tokens")),
        *(["bench", "prefill", option, "-1"] for option in ("--requests", "--repeats", "--threads")),
        *(["batch", "in", option, "0"] for option in ("--top", "--tokens", "--limit", "--part-rows", "--window")),
        ["batch", "in", "--actors", "0"],
    ],
    ids=" ".join,
)
def test_numbers_of_nothing_are_refused(capsys, arguments):
    """By the option's name, before anything is loaded; `--generate 0` is not the same as no `--generate`."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert f"argument {arguments[-2]}: must be positive and whole, got {arguments[-1]!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--port", "-1"], "--port: must be a port"),
        (["demo", "--port", "99999"], "--port: must be a port"),
        (["kv", "diff", "a", "b", "--tolerance", "-1"], "--tolerance: must not be negative"),
        (["kv", "diff", "a", "b", "--tolerance", "nan"], "--tolerance: must not be negative"),
    ],
)
def test_numbers_out_of_bounds_are_refused(capsys, arguments, said):
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err
