"""The batch job: every row's output is what `Prefiller` gives, in order, once, whatever fails or is killed."""

import csv
import io
import json
import math
import os
import runpy
import subprocess
import sys
import tracemalloc
from pathlib import Path

import checkpoints
import pytest
import torch
from job_checks import NEAR, failures, files, records, same, same_cache, simple, write
from safetensors.torch import load_file

import mmprefill
from mmprefill import job, job_files, job_output, job_rows, job_serve
from mmprefill.cli import main
from mmprefill.config import MediaLimits, PrefillConfig
from mmprefill.errors import EngineClosedError, JobError, MediaFetchError, MMPrefillError
from mmprefill.fetch import Fetcher
from mmprefill.job_settings import EMITS, JobSettings
from mmprefill.job_state import JobFolder, part_name, write_whole
from mmprefill.metrics import Observer
from mmprefill.models import load
from mmprefill.pipeline.kv_read import load as load_kv
from mmprefill.prefiller import Prefiller


class Heard(Observer):
    def __init__(self):
        self.asked, self.running, self.most, self.pictures = [], 0, 0, 0

    def requested(self, request_id):
        self.asked.append(request_id)
        self.running += 1
        self.most = max(self.most, self.running)

    def finished(self, result):
        self.running -= 1

    def failed(self, request_id, error):
        self.running -= 1

    def encoded(self, *, pictures, **_):
        self.pictures += pictures


@pytest.fixture(scope="module")
def bundle():
    with checkpoints.quiet():
        return load(checkpoints.cached("smolvlm"))


@pytest.fixture(scope="module")
def prefiller(bundle):
    media = MediaLimits(allow_urls=True, allowed_hosts=("pictures.example",))
    with Prefiller(bundle, PrefillConfig(media=media, intake_threads=1)) as prefiller:
        yield prefiller


@pytest.fixture
def heard(bundle):
    """An engine that tells what it was asked for."""
    observer = Heard()
    with Prefiller(bundle, PrefillConfig(intake_threads=1), observer=observer) as prefiller:
        prefiller.heard = observer
        yield prefiller


def expected(prefiller, data, row, **fields):
    images = [data / name for name in row.get("images", ())]
    return prefiller.prefill(row["prompt"], images=images, reuse=False, **fields)


# What comes out.


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_every_form_equals_prefiller(prefiller, data, tmp_path, form):
    """Values of every form of output, each row against the same request alone."""
    rows = [
        *simple(5),
        {"id": "text", "prompt": "no picture"},
        {"id": "two", "prompt": "a", "images": ["p0.png", "p1.png"]},
    ]
    report = mmprefill.run_job(
        write(data / "in.jsonl", rows), tmp_path / "out", prefiller=prefiller, format=form, part_rows=3, window=6,
        emit=EMITS, choices=("yes", "no way"), max_new_tokens=3, hidden_layers=(0, -1), layer=1, pooling="mean", top=2,
    )  # fmt: skip
    found = records(tmp_path / "out")
    assert (report.ok, report.failed, report.exit_code) == (7, 0, 0)
    assert [each["id"] for each in found] == [row["id"] for row in rows]
    for row, each in zip(rows, found, strict=True):
        plain = expected(prefiller, data, row, hidden_states=(0, 1, -1))
        tensors = load_file(tmp_path / "out" / each["tensors"])
        top = plain.top_tokens(2)
        assert each["prompt_tokens"] == len(plain.token_ids)
        assert (each["top_ids"], each["top_tokens"]) == ([t.id for t in top], [t.text for t in top])
        assert each["top_logprobs"] == pytest.approx([t.logprob for t in top], abs=1e-4)
        assert each["scores"] == pytest.approx([c.logprob for c in plain.score(["yes", "no way"])], abs=1e-4)
        assert each["best"] == ("yes", "no way")[each["scores"][1] > each["scores"][0]]
        assert each["text"] == plain.generate(3).text
        torch.testing.assert_close(torch.tensor(each["embedding"]), plain.pooled("mean", 1), **NEAR)
        torch.testing.assert_close(tensors[f"{each['index']}.logits"], plain.next_token_logits, **NEAR)
        for layer in (0, -1):
            torch.testing.assert_close(tensors[f"{each['index']}.hidden.{layer}"], plain.hidden_states[layer], **NEAR)
        same_cache(load_kv(tmp_path / "out" / each["kv"]).cache(), plain.cache)


def test_embeddings_per_token(prefiller, data, tmp_path):
    """With pooling "none" every token has its vector, in the tensor files."""
    rows = simple(2)
    mmprefill.run_job(
        write(data / "in.jsonl", rows), tmp_path / "out", prefiller=prefiller, emit=("embeddings",), pooling="none"
    )
    for row, each in zip(rows, records(tmp_path / "out"), strict=True):
        plain = expected(prefiller, data, row, hidden_states=(-1,)).hidden_states[-1]
        torch.testing.assert_close(
            load_file(tmp_path / "out" / each["tensors"])[f"{each['index']}.embeddings"], plain, **NEAR
        )
        assert "embedding" not in each


def test_the_manifest_says_how(prefiller, data, tmp_path):
    """Model, settings, versions, counts, tables."""
    mmprefill.run_job(write(data / "in.jsonl", simple(5)), tmp_path / "out", prefiller=prefiller, part_rows=2)
    about = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert about["model"]["weights"] == prefiller.session.bundle.fingerprint
    assert about["settings"]["emit"] == ["topk"]
    assert about["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert (about["complete"], about["rows"], about["ok"], about["failed"]) == (True, 5, 5, 0)
    assert [Path(name).name for name in about["tables"]] == [f"part-0000000{i}.jsonl" for i in (0, 2, 4)]


# What goes in.


def as_csv(folder, rows):
    with (folder / "in.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "prompt", "images"])
        writer.writeheader()
        for row in rows:
            images = row.get("images", [])
            writer.writerow({**row, "images": json.dumps(images) if len(images) > 1 else "".join(images)})
    return folder / "in.csv"


def as_parquet(folder, rows):
    import pyarrow
    import pyarrow.parquet

    given = [{**row, "images": [held(folder, i, name) for i, name in enumerate(row.get("images", []))]} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(given), folder / "in.parquet")
    return folder / "in.parquet"


def held(folder, i, name):
    """As Hugging Face stores pictures: by their bytes, or by a path."""
    return {"bytes": (folder / name).read_bytes(), "path": None} if i == 0 else {"bytes": None, "path": name}


def as_dataset(folder, rows):
    import datasets

    given = [{**row, "images": [str(folder / name) for name in row.get("images", [])]} for row in rows]
    features = {
        "id": datasets.Value("string"),
        "prompt": datasets.Value("string"),
        "images": datasets.List(datasets.Image()),
    }
    datasets.Dataset.from_list(given, features=datasets.Features(features)).save_to_disk(folder / "set")
    return folder / "set"


def as_jsonl(folder, rows):
    return write(folder / "in.jsonl", rows)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("kind", [as_jsonl, as_csv, as_parquet, as_dataset])
def test_every_kind_of_input(prefiller, data, tmp_path, kind):
    """Rows with no, one and two pictures give the same from every kind of file."""
    rows = [*simple(3), {"id": "none", "prompt": "hello", "images": []},
            {"id": "two", "prompt": "differ?", "images": ["p0.png", "p1.png"]}]  # fmt: skip
    report = mmprefill.run_job(kind(data, rows), tmp_path / "out", prefiller=prefiller)
    assert (report.ok, report.failed) == (5, 0), failures(tmp_path / "out")
    for row, each in zip(rows, records(tmp_path / "out"), strict=True):
        top = expected(prefiller, data, row).top_tokens(5)
        assert (each["id"], each["top_ids"]) == (row["id"], [t.id for t in top])
        assert each["top_logprobs"] == pytest.approx([t.logprob for t in top], abs=1e-4)


def test_a_folder_of_pictures(prefiller, data, tmp_path):
    """A row per picture, by name; the prompt is a template over what is known of it."""
    (data / "cats").mkdir()
    (data / "p3.png").rename(data / "cats" / "c.png")
    mmprefill.run_job(data, tmp_path / "out", prefiller=prefiller, prompt="Is this {label}? {{yes}}")
    found = records(tmp_path / "out")
    plain = prefiller.prefill("Is this cats? {yes}", images=[data / "cats" / "c.png"], reuse=False)
    assert [each["id"] for each in found] == ["cats/c.png", "p0.png", "p1.png", "p2.png"]
    assert found[0]["top_logprobs"] == pytest.approx([t.logprob for t in plain.top_tokens(5)], abs=1e-4)


def test_a_folder_of_pictures_is_read_in_the_order_of_paths(tmp_path):
    """As it would be sorted, also where a folder and a file begin the same; folders behind links are not entered."""
    for name in ("a/z.png", "a-b/c.png", "a.png", "a/b/c.JPG", "b.txt", "c/d"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "again").symlink_to("a")
    (tmp_path / "one.png").symlink_to("a/z.png")
    found = [tmp_path / each["id"] for each in job_files._read_folder(str(tmp_path))]
    assert len(found) == 5
    assert found == sorted(found)


def test_columns_are_mapped(prefiller, data, tmp_path):
    """Any names; messages as lists or JSON text, with pictures inside or beside them."""
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "look"}]}]
    inside = [{"role": "user", "content": [{"type": "image", "image": "p0.png"}, {"type": "text", "text": "look"}]}]
    rows = [
        {"key": 7, "pic": "p0.png", "chat": turn},
        {"key": 8, "chat": inside},
        {"key": 9, "pic": "p0.png", "chat": json.dumps(turn)},
    ]
    rows[1]["pic"] = None
    report = mmprefill.run_job(
        write(data / "in.jsonl", rows), tmp_path / "out", prefiller=prefiller, image_column="pic", messages_column="chat",
        id_column="key",
    )  # fmt: skip
    found = records(tmp_path / "out")
    assert report.failed == 0, failures(tmp_path / "out")
    assert [each["id"] for each in found] == ["7", "8", "9"]
    plain = prefiller.prefill("look", images=[data / "p0.png"], reuse=False).top_tokens(5)
    for each in found:
        assert each["top_logprobs"] == pytest.approx([t.logprob for t in plain], abs=1e-4)


def test_globs_and_several_files(prefiller, data, tmp_path):
    """Files in the order given, those of a glob by name; positions count over all of them."""
    write(data / "b.jsonl", simple(4)[2:])
    write(data / "a.jsonl", simple(4)[:2])
    write(data / "first.jsonl", [{"prompt": "no id"}])
    mmprefill.run_job([data / "first.jsonl", str(data / "[ab].jsonl")], tmp_path / "out", prefiller=prefiller)
    found = records(tmp_path / "out")
    assert [each["id"] for each in found] == ["row-0", "r0", "r1", "r2", "r3"]
    assert [each["index"] for each in found] == [0, 1, 2, 3, 4]


def test_remote_input(prefiller, data, tmp_path):
    """Any file system of fsspec, with the pictures beside the table and nowhere else."""
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe("/job/p0.png", (data / "p0.png").read_bytes())
    lines = [{"prompt": "what", "images": [name]} for name in ("p0.png", "../p0.png", "gone.png")]
    files.pipe("/job/in.jsonl", "\n".join(map(json.dumps, lines)).encode())
    mmprefill.run_job("memory://job/*.jsonl", tmp_path / "out", prefiller=prefiller)
    plain = prefiller.prefill("what", images=[data / "p0.png"], reuse=False).top_tokens(5)
    assert records(tmp_path / "out")[0]["top_logprobs"] == pytest.approx([t.logprob for t in plain], abs=1e-4)
    assert [each["error"] for each in failures(tmp_path / "out")] == ["MediaForbiddenError", "MediaError"]


def test_limit_and_shards(prefiller, data, tmp_path):
    """Shards have every row once, each in a folder of its own; a limit is of the shard's rows."""
    source = write(data / "in.jsonl", simple(7))
    for i in range(3):
        mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller, shard=(i, 3))
    assert [[r["index"] for r in records(tmp_path / "out" / f"shard-{i}-of-3")] for i in range(3)] == [
        [0, 3, 6],
        [1, 4],
        [2, 5],
    ]
    mmprefill.run_job(source, tmp_path / "few", prefiller=prefiller, limit=2, shard=(1, 3))
    assert [r["index"] for r in records(tmp_path / "few" / "shard-1-of-3")] == [1, 4]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"emit": ("kvv",)}, "emit takes any of kv, topk"),
        ({"emit": ("scores",)}, "list the choices"),
        ({"choices": ("a",)}, "emit scores"),
        ({"prompt": "a {x.y}"}, "plain column names"),
        ({"prompt": "a", "prompt_column": "b"}, "one of prompt and prompt_column"),
        ({"shard": (3, 3)}, "0 <= i < n"),
        ({"part_rows": 0}, "part_rows must be positive"),
        ({"deadline": math.nan}, "deadline must be positive and finite, got nan"),
        ({"deadline": math.inf}, "deadline must be positive and finite, got inf"),
        ({"deadline": -1.0}, "deadline must be positive"),
        ({"prompt": "a {b"}, "prompt 'a {b' is no template: .*single braces"),
        ({"prompt": "{prompt:{width}}"}, "plain column names in braces, got '{width}'"),
        ({"format": "xml"}, "jsonl, parquet"),
        ({"image_column": "nope"}, "no column 'nope'; there are id, prompt, images"),
        ({"prompt": "{nope}"}, "no column 'nope'"),
    ],
)
def test_mistakes_are_told_at_once(prefiller, data, tmp_path, settings, said):
    """A setting or a column that makes no sense ends the job before a row is touched."""
    source = as_csv(data, simple(2))
    with pytest.raises(ValueError, match=said):
        mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller, **settings)


def test_missing_input_and_extras(prefiller, data, tmp_path, monkeypatch):
    """What is not there is named, and a missing extra says what to install."""
    with pytest.raises(ValueError, match=r"nowhere\.jsonl: no such file"):
        mmprefill.run_job("nowhere.jsonl", tmp_path / "out", prefiller=prefiller)
    with pytest.raises(ValueError, match=r"\.jsonl, \.ndjson"):
        mmprefill.run_job(data / "p0.png", tmp_path / "out", prefiller=prefiller)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MMPrefillError, match=r"pip install 'mmprefill\[data\]'"):
        mmprefill.run_job(write(data / "in.jsonl", simple(1)), tmp_path / "out", prefiller=prefiller, format="parquet")


# F1, F2, F11, F12: rows fail alone.


def png(data):
    return (data / "p0.png").read_bytes()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("kind", [as_jsonl, as_parquet, as_dataset])
def test_a_corrupt_picture_costs_its_row(prefiller, data, tmp_path, kind):
    """F1: row 5 of 10 is truncated: 9 results and one error, from undecoded data sets too."""
    (data / "bad.png").write_bytes(png(data)[:200])
    rows = simple(10)
    rows[5]["images"] = ["bad.png"]
    report = mmprefill.run_job(kind(data, rows), tmp_path / "out", prefiller=prefiller)
    assert (report.ok, report.failed, report.exit_code) == (9, 1, 1)
    assert [each["id"] for each in records(tmp_path / "out")] == [f"r{i}" for i in range(10) if i != 5]
    assert [(each["index"], each["id"], each["error"]) for each in failures(tmp_path / "out")] == [
        (5, "r5", "MediaError")
    ]


def bad_rows(data):
    """A dozen kinds of bad row, each with the class of its error."""
    (data / "cut.png").write_bytes(png(data)[:200])
    (data / "empty.png").write_bytes(b"")
    (data / "text.png").write_text("no picture")
    return [
        ({"prompt": "x", "images": ["cut.png"]}, "MediaError"),
        ({"prompt": "x", "images": ["empty.png"]}, "MediaError"),
        ({"prompt": "x", "images": ["text.png"]}, "MediaError"),
        ({"prompt": "x", "images": ["missing.png"]}, "MediaError"),
        ({"prompt": "x", "images": ["http://elsewhere.example/a.png"]}, "MediaForbiddenError"),
        ({"prompt": "x", "images": [5]}, "RequestError"),
        ({"prompt": 5}, "RequestError"),
        ({"nothing": 1}, "RequestError"),
        ({"prompt": "word " * 3000}, "PromptTooLongError"),
        ({"messages": [{"role": "image", "content": "x"}]}, "RequestError"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "RequestError"),
        ({"prompt": "x", "id": "g0"}, "RequestError"),
        ({"prompt": "x", "id": [1]}, "RequestError"),
        ("{torn", "RequestError"),
        ("[1, 2]", "RequestError"),
        ({"prompt": "x", "images": ["data:image/png;base64,%%%"]}, "MediaError"),
    ]


def test_bad_rows_of_every_kind(prefiller, data, tmp_path):
    """F2, F8: 5 % bad rows of a dozen kinds, too long ones among them: every good row comes out, in order."""
    bad = bad_rows(data)
    lines, wanted, errors = [], [], []
    for i in range(20 * len(bad)):
        if i % 20 == 13:
            row, error = bad[i // 20]
            errors.append((i, error))
            lines.append(row if isinstance(row, str) else json.dumps(row))
        else:
            wanted.append(f"g{i}")
            row = {"id": f"g{i}", "prompt": f"n {i % 7}"} | ({"images": [f"p{i % 4}.png"]} if i % 5 == 0 else {})
            lines.append(json.dumps(row))
    (data / "in.jsonl").write_text("\n".join(lines))
    report = mmprefill.run_job(data / "in.jsonl", tmp_path / "out", prefiller=prefiller, part_rows=50)
    assert (report.ok, report.failed, report.exit_code) == (len(wanted), len(bad), 1)
    assert [each["id"] for each in records(tmp_path / "out")] == wanted
    found = failures(tmp_path / "out")
    assert [(each["index"], each["error"]) for each in found] == errors
    assert all(each["message"] for each in found)
    assert sum(report.errors.values()) == len(bad)


def test_summary_and_exit_code(prefiller, data, tmp_path):
    """F11: ok, failed and skipped are counted; more failures than allowed stop the job, and a higher bound goes on."""
    rows = simple(12)
    for i in (1, 3, 5):
        rows[i]["images"] = ["missing.png"]
    source = write(data / "in.jsonl", rows)
    first = mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller, part_rows=4, window=3, max_errors=1)
    assert (first.exit_code, first.skipped) == (3, 0)
    assert "2 rows have failed, more than the 1" in first.stopped
    assert not json.loads((tmp_path / "out" / "manifest.json").read_text())["complete"]
    assert [each["index"] for each in failures(tmp_path / "out")] == [1, 3]
    again = mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller, max_errors=1)
    assert (again.ok, again.failed, again.exit_code) == (0, 0, 3)
    last = mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller, max_errors=3)
    assert (last.ok, last.failed, last.skipped, last.exit_code) == (7, 1, 4, 1)
    done = mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller)
    assert (done.ok, done.failed, done.skipped, done.exit_code) == (0, 0, 12, 1)


def test_fetches_are_tried_again(prefiller, data, tmp_path, monkeypatch):
    """F12: what fails for the network is fetched again, so often and no more; then the row alone fails."""
    asked = []

    def fetch(self, url):
        asked.append(url)
        if url.endswith("never.png") or asked.count(url) < 3:
            raise MediaFetchError("timed out")
        return png(data)

    monkeypatch.setattr(Fetcher, "fetch", fetch)
    monkeypatch.setattr(job_serve, "BACKOFF", 0.0)
    rows = [{"prompt": "x", "images": [f"https://pictures.example/{name}"]} for name in ("slow.png", "never.png")]
    report = mmprefill.run_job(write(data / "in.jsonl", rows), tmp_path / "out", prefiller=prefiller, retries=2)
    assert (report.ok, report.failed) == (1, 1)
    assert [each["error"] for each in failures(tmp_path / "out")] == ["MediaFetchError"]
    assert len(asked) == 6


def test_a_row_that_cannot_be_written_out_fails_alone(prefiller, data, tmp_path, monkeypatch):
    """An error in scoring or generating is the row's; a full disk is the job's."""
    small = job_output.Output._small

    def failing(self, result, choices):
        if result.id == "r1":
            raise RuntimeError("no score")
        if result.id == "r3" and full:
            raise OSError(28, "No space left on device")
        return small(self, result, choices)

    full = False
    monkeypatch.setattr(job_output.Output, "_small", failing)
    source = write(data / "in.jsonl", simple(4))
    assert mmprefill.run_job(source, tmp_path / "a", prefiller=prefiller).failed == 1
    full = True
    with pytest.raises(OSError, match="No space left"):
        mmprefill.run_job(source, tmp_path / "b", prefiller=prefiller, part_rows=2, window=3)
    full = False
    report = mmprefill.run_job(source, tmp_path / "b", prefiller=prefiller)
    assert (report.ok, report.failed, report.skipped) == (2, 0, 2)


@pytest.mark.parametrize("error", [EngineClosedError("the engine died"), getattr(torch, "AcceleratorError", None)])
def test_a_lost_device_ends_the_job(prefiller, data, tmp_path, monkeypatch, error):
    """F2: what no further row would survive is no row's error: the job ends, and the rows are there to be done."""
    if isinstance(error, type):
        error = error("CUDA error: device lost")
    source, prefill = write(data / "in.jsonl", simple(6)), prefiller.prefill_many
    with monkeypatch.context() as patch:
        lost = [error]
        patch.setattr(prefiller, "prefill_many", lambda them: [lost.pop() if lost else each for each in prefill(them)])
        with pytest.raises(type(error)):
            mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller, part_rows=2)
    assert failures(tmp_path / "out") == []
    assert mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller).failed == 0
    assert len(records(tmp_path / "out")) == 6


@pytest.mark.parametrize(("choice", "said"), [("", "at least one token"), ("\ud800", "choice 2: not text")])
def test_choices_are_checked_before_anything_runs(prefiller, data, tmp_path, choice, said):
    with pytest.raises(ValueError, match=said):
        mmprefill.run_job(
            write(data / "in.jsonl", [{"prompt": "x"}]), tmp_path / "out", prefiller=prefiller, emit=["scores"],
            choices=["yes", choice],
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_the_error_table_as_parquet(prefiller, data, tmp_path):
    """The same columns as in JSONL; text that is no Unicode is made printable."""
    import pyarrow.parquet

    rows = [{"id": "\ud800", "prompt": "x"}, {"id": "b", "prompt": "\ud800"}]
    report = mmprefill.run_job(write(data / "in.jsonl", rows), tmp_path / "out", prefiller=prefiller, format="parquet")
    (found,) = pyarrow.parquet.read_table(tmp_path / "out" / "errors.parquet").to_pylist()
    assert (found["index"], found["id"], found["error"]) == (1, "b", "RequestError")
    assert (report.ok, records(tmp_path / "out")[0]["id"]) == (1, "?")


def test_tables_with_bad_lines(prefiller, data, tmp_path):
    """A line of a CSV with too many fields, too few, or bytes that are no text costs its row."""
    (data / "in.csv").write_bytes(
        b"prompt,image\nfine,p0.png\nx,p0.png,more\nx\n\xff\xfe,p0.png\n\xc3\xa9,\n[1].png,[1].png\n"
    )
    report = mmprefill.run_job(data / "in.csv", tmp_path / "out", prefiller=prefiller)
    assert [each["index"] for each in records(tmp_path / "out")] == [0, 4]
    assert [each["error"] for each in failures(tmp_path / "out")] == [*["RequestError"] * 3, "MediaError"]
    assert "not UTF-8" in failures(tmp_path / "out")[2]["message"]
    assert report.exit_code == 1


def test_quotes_that_are_not_closed(prefiller, data, tmp_path):
    """They cost the rows that they swallow, by their lines; those after them are read where the quoting is right again."""
    lines = ["prompt,image", "fine,p0.png", '"he said "hi" to me",p0.png', '"one', 'two",p0.png', '"open,p0.png']
    lines += ['"closed",p0.png', "x,p0.png", '"open to the end,p0.png', "x,p0.png"]
    (data / "in.csv").write_text("\n".join(lines))
    report = mmprefill.run_job(data / "in.csv", tmp_path / "out", prefiller=prefiller)
    assert (report.exit_code, [each["index"] for each in records(tmp_path / "out")]) == (1, [0, 2, 4])
    for each, where in zip(failures(tmp_path / "out"), ("line 3", "lines 6 to 7", "lines 9 to 10"), strict=True):
        assert each["error"] == "RequestError"
        assert f"in.csv, {where}: not CSV" in each["message"]
    (data / "header.csv").write_text('"prompt,image\nfine,p0.png\n')
    with pytest.raises(ValueError, match=r"header\.csv, lines 1 to 2: not CSV"):
        mmprefill.run_job(data / "header.csv", tmp_path / "other", prefiller=prefiller)


# F4, F5, F6: resume.


def test_resume_does_exactly_the_rest(heard, data, tmp_path):
    """F6: stopped and gone on with twice: no row is asked for twice, none is missing; grown input is gone on with."""
    rows = simple(11)
    source = write(data / "in.jsonl", rows[:9])
    for limit, skipped in ((4, 0), (7, 4), (None, 7)):
        report = mmprefill.run_job(source, tmp_path / "out", prefiller=heard, limit=limit, part_rows=3)
        assert report.skipped == skipped
    write(data / "in.jsonl", rows)
    assert mmprefill.run_job(source, tmp_path / "out", prefiller=heard).skipped == 9
    assert sorted(heard.heard.asked) == sorted(row["id"] for row in rows)
    assert [each["id"] for each in records(tmp_path / "out")] == [row["id"] for row in rows]


def test_interrupted_in_the_middle(heard, data, tmp_path, monkeypatch):
    """F4: Ctrl-C leaves whole parts and a table of errors, nothing else; the same again does the rest."""
    rows = simple(12)
    rows[1]["images"] = ["missing.png"]
    source, settings = write(data / "in.jsonl", rows), {"part_rows": 4, "window": 3, "emit": ("kv", "logits")}
    land, calls = job._Job._land, []

    def landing(self, *landed):
        calls.append(landed)
        if len(calls) == 6:
            raise KeyboardInterrupt
        land(self, *landed)

    with monkeypatch.context() as patch:
        patch.setattr(job._Job, "_land", landing)
        with pytest.raises(KeyboardInterrupt):
            mmprefill.run_job(source, tmp_path / "out", prefiller=heard, **settings)
    assert [each.name for each in (tmp_path / "out" / "state").iterdir()] == ["part-00000000.json"]
    assert {each[:13] for each in files(tmp_path / "out" / "kv")} == {"part-00000000"}
    assert [each["index"] for each in failures(tmp_path / "out")] == [1]
    report = mmprefill.run_job(source, tmp_path / "out", prefiller=heard, **settings)
    assert (report.ok, report.failed, report.skipped) == (8, 0, 4)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_failed_rows_are_done_again(heard, data, tmp_path, form):
    """`retry_failed` asks for those rows and no others; the output is then that of a job in which nothing had failed."""
    rows = simple(11)
    for i in (1, 2, 9):
        rows[i]["images"] = [f"late{i}.png"]
    source, emit = write(data / "in.jsonl", rows), ("topk", "kv", "logits")
    settings = {"prefiller": heard, "part_rows": 4, "window": 6, "emit": emit, "format": form}
    first = mmprefill.run_job(source, tmp_path / "out", limit=8, **settings)
    assert (first.ok, first.failed) == (6, 2)
    (data / "late1.png").write_bytes(png(data))
    (data / "late9.png").write_bytes(png(data))
    heard.heard.asked.clear()
    again = mmprefill.run_job(source, tmp_path / "out", retry_failed=True, max_errors=1, **settings)
    assert (again.ok, again.failed, again.skipped, again.failed_before) == (4, 1, 6, 0)
    assert sorted(heard.heard.asked) == ["r1", "r10", "r2", "r8", "r9"]
    (data / "late2.png").write_bytes(png(data))
    last = mmprefill.run_job(source, tmp_path / "out", retry_failed=True, **settings)
    assert (last.ok, last.failed, last.skipped, last.exit_code) == (1, 0, 10, 0)
    mmprefill.run_job(source, tmp_path / "clean", **settings)
    found, clean = records(tmp_path / "out"), records(tmp_path / "clean")
    assert [each["id"] for each in found] == [row["id"] for row in rows]
    for mine, theirs in zip(found, clean, strict=True):
        assert mine["top_ids"] == theirs["top_ids"]
        same_cache(load_kv(tmp_path / "out" / mine["kv"]).cache(), load_kv(tmp_path / "clean" / theirs["kv"]).cache())
        pair = [
            load_file(out / each["tensors"]) for out, each in ((tmp_path / "out", mine), (tmp_path / "clean", theirs))
        ]
        torch.testing.assert_close(*(each[f"{mine['index']}.logits"] for each in pair), **NEAR)
    done = mmprefill.run_job(source, tmp_path / "out", retry_failed=True, **settings)
    assert (done.ok, done.failed, done.skipped) == (0, 0, 11)


def test_rows_to_be_done_again_have_not_failed_yet(heard, data, tmp_path):
    """`max_errors` counts what fails in this run where rows of earlier ones are done again."""
    rows = simple(8)
    for i, row in enumerate(rows):
        row["images"] = [f"soon{i}.png"]
    settings = {"prefiller": heard, "part_rows": 2, "emit": ("topk",)}
    source = write(data / "in.jsonl", rows)
    assert mmprefill.run_job(source, tmp_path / "out", **settings).failed == 8
    for i in range(8):
        (data / f"soon{i}.png").write_bytes(png(data))
    again = mmprefill.run_job(source, tmp_path / "out", retry_failed=True, max_errors=1, **settings)
    assert (again.ok, again.failed, again.stopped) == (8, 0, "")


def test_kv_goes_into_shards(prefiller, data, tmp_path):
    """Rows of a group share a file, up to a size; each row's record says where it is."""
    source = write(data / "in.jsonl", simple(12))
    settings = {"prefiller": prefiller, "emit": ("kv",), "window": 18}
    mmprefill.run_job(source, tmp_path / "few", **settings)
    mmprefill.run_job(source, tmp_path / "many", kv_shard=1, **settings)
    assert (len(files(tmp_path / "few" / "kv")), len(files(tmp_path / "many" / "kv"))) == (2, 12)
    for mine, theirs in zip(records(tmp_path / "few"), records(tmp_path / "many"), strict=True):
        pair = [load_kv(out / each["kv"]) for out, each in ((tmp_path / "few", mine), (tmp_path / "many", theirs))]
        assert [each.manifest.id for each in pair] == [mine["id"]] * 2
        same_cache(*(each.cache() for each in pair))


def test_a_dataset_of_the_hub(prefiller, data, tmp_path, monkeypatch):
    """An id is one where no file or folder is; what the hub says is told. Nothing is asked for paths that are none."""
    import datasets

    asked = []

    def load_dataset(name, config):
        asked.append((name, config))
        if name != "some-one/questions":
            raise ConnectionError("Couldn't reach the Hub\nmore")
        return datasets.DatasetDict(test=datasets.Dataset.from_list([{"id": "a", "prompt": "hello"}]))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    mmprefill.run_job("some-one/questions:easy", tmp_path / "out", prefiller=prefiller)
    assert [each["id"] for each in records(tmp_path / "out")] == ["a"]
    assert set(asked) == {("some-one/questions", "easy")}
    with pytest.raises(
        ValueError, match=r"no/where: no such file or folder here, and no dataset .* Couldn't reach the Hub$"
    ):
        mmprefill.run_job("no/where", tmp_path / "other", prefiller=prefiller)
    asked.clear()
    monkeypatch.chdir(data.parent)
    for path in ("data/questions", "./no/where", "no/where/else", "no/where.jsonl", "/no/where"):
        with pytest.raises(ValueError, match="no such file or folder, and no glob"):
            mmprefill.run_job(path, tmp_path / "other", prefiller=prefiller)
    assert asked == []


def test_the_report_is_a_picture_too(prefiller, data, tmp_path):
    """Stage times as an SVG beside the manifest, whatever was served."""
    from xml.etree import ElementTree

    source = write(data / "in.jsonl", simple(3))
    for wanted in ("intake", "no row was served"):
        mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller)
        text = (tmp_path / "out" / "report.svg").read_text()
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert wanted in text


def test_torn_files_are_repaired(heard, data, tmp_path):
    """F4: a part whose files are not as they were written is done again, and nothing else is."""
    source = write(data / "in.jsonl", simple(8))
    mmprefill.run_job(source, tmp_path / "out", prefiller=heard, part_rows=2, emit=("topk", "kv"))
    before = records(tmp_path / "out")
    heard.heard.asked.clear()
    table = tmp_path / "out" / "rows" / "part-00000002.jsonl"
    table.write_bytes(table.read_bytes()[:-10])
    table = tmp_path / "out" / "rows" / "part-00000004.jsonl"
    table.write_bytes(table.read_bytes().replace(b"r5", b"r9"))
    lost = tmp_path / "out" / before[7]["kv"].partition("#")[0]
    lost.unlink()
    (tmp_path / "out" / "rows" / "part-00000003.jsonl").write_text("left over")
    report = mmprefill.run_job(source, tmp_path / "out", prefiller=heard, part_rows=2, emit=("topk", "kv"))
    assert (report.ok, report.skipped) == (6, 2)
    assert sorted(heard.heard.asked) == [f"r{i}" for i in range(2, 8)]
    assert same(records(tmp_path / "out"), before)
    assert lost.exists()


def test_changed_settings_are_refused(prefiller, bundle, data, tmp_path):
    """F5: another prompt, output, model or input is refused, saying what changed; nothing is touched."""
    source = write(data / "in.jsonl", simple(4))
    mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller, limit=2)
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    with pytest.raises(JobError, match=r"top was 5, is 6"):
        mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller, top=6)
    with pytest.raises(JobError, match=r"prompt was None, is 'Is it\?'"):
        mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller, prompt="Is it?")
    with checkpoints.quiet(), pytest.raises(JobError, match="model_type was 'smolvlm', is 'gemma3'"):
        mmprefill.run_job(source, tmp_path / "out", model=checkpoints.cached("gemma3"))
    assert before == {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    write(data / "in.jsonl", [{**row, "prompt": "other"} for row in simple(4)])
    with pytest.raises(JobError, match="rows 0 to 1 of the input are not those"):
        mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller)
    write(data / "in.jsonl", simple(1))
    with pytest.raises(JobError, match="the input has 1 rows, 2 were done"):
        mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller)


def test_a_folder_that_is_not_ours(prefiller, data, tmp_path):
    """A folder with other things, or one that another job writes to, is left alone."""
    source = write(data / "in.jsonl", simple(1))
    with pytest.raises(JobError, match="no folder of a batch job"):
        mmprefill.run_job(source, data, prefiller=prefiller)
    script = (
        "import fcntl, os, sys; lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT);"
        "fcntl.flock(lock, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    )
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-S", "-c", script, str(tmp_path / "out" / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(JobError, match="another job is writing"):
            mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller)
        other.stdin.close()
    assert mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller).ok == 1


@pytest.mark.end_to_end
@pytest.mark.timeout(900)  # seconds of work, minutes where others have the processors
def test_killed_at_any_instant(data, tmp_path):
    """F4: after 20 kills the output is that of a clean run: the same files, rows and values, nothing left over."""
    rows = simple(18)
    rows[7]["images"] = ["missing.png"]
    source = write(data / "in.jsonl", rows)
    script = Path(__file__).with_name("job_killed.py")
    command = [sys.executable, str(script), str(checkpoints.cached("smolvlm")), str(source), str(tmp_path), "20", "7"]
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(script.parent.parent),
                "JOB_KILLED_PATIENCE": "200"}  # fmt: skip
    run = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=880)
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["killed"] == 20
    clean = tmp_path / "clean"
    for number in range(told["folders"]):
        killed = tmp_path / str(number)
        assert files(killed) == files(clean)
        assert same(records(killed), records(clean))
        assert failures(killed) == failures(clean)
        for each in records(clean):
            same_cache(load_kv(killed / each["kv"]).cache(), load_kv(clean / each["kv"]).cache())
            torch.testing.assert_close(load_file(killed / each["tensors"]), load_file(clean / each["tensors"]), **NEAR)


# Bounds.


def test_rows_in_flight_are_bounded(heard, data, tmp_path, monkeypatch):
    """However long the input, no more rows are with the engine than the window, none is kept, and reading waits."""
    taken, ahead = [], []

    def reading(*args):
        for row in job_rows.rows(*args):
            taken.append(row)
            ahead.append(len(taken) - len(heard.heard.asked))
            yield row

    monkeypatch.setattr(job, "rows", reading)
    source = write(data / "in.jsonl", simple(120))
    report = mmprefill.run_job(source, tmp_path / "out", prefiller=heard, part_rows=10, window=6)
    assert report.ok == 120
    assert heard.heard.most <= 6
    assert max(ahead) <= 10 + 6 + 1


def test_ids_are_kept_in_bounded_memory():
    """Ids that were used are known however many there are; beyond a number they are on disk."""
    with job_rows._Seen(most=10) as seen:
        assert all(seen.add(f"r{i}") for i in range(1000))
        assert not any(seen.add(f"r{i}") for i in range(1000))
        assert seen.add("\ud800")
        assert len(seen._marks) == 10


def test_parts_that_are_done_take_little_memory(tmp_path):
    """However many rows have failed, and however many files there are: both stay in the state files."""
    errors = [
        {"index": i, "id": f"r{i}", "error": "MediaError", "message": f"{i}: " + "long " * 40} for i in range(100)
    ]
    folder = JobFolder(tmp_path / "out", {"model": {}, "settings": {}})
    tracemalloc.start()
    for start in range(0, 6000, 100):
        if start == 1000:
            before = tracemalloc.get_traced_memory()[0]
        table = tmp_path / "out" / "rows" / f"{part_name(start)}.jsonl"
        write_whole(table, b"{}")
        found = [{**each, "message": f"{start} {each['message']}"} for each in errors]
        folder.commit(start, start + 100, "", [table], found)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    folder.close()
    assert grown < 50_000
    assert folder.failed == 6000
    assert folder.of(folder.commits[7]).errors[3]["message"].startswith("700 3: ")


def test_shared_pictures_are_encoded_once(heard, data, tmp_path):
    """Over the whole input, however far apart the rows that show them; the output keeps its order."""
    source = write(data / "in.jsonl", simple(40))
    report = mmprefill.run_job(source, tmp_path / "out", prefiller=heard, part_rows=10, window=6)
    assert (report.pictures, heard.heard.pictures) == (40, 4)
    assert [each["index"] for each in records(tmp_path / "out")] == list(range(40))


def test_a_budget_that_is_enough_is_enough(prefiller, data, tmp_path):
    """What was reserved for a shard and is not in it can be used by the next."""
    source = write(data / "in.jsonl", simple(24))
    settings = {"prefiller": prefiller, "emit": ("kv",), "part_rows": 2, "window": 3}
    whole = mmprefill.run_job(source, tmp_path / "free", **settings)
    report = mmprefill.run_job(source, tmp_path / "out", disk_budget=whole.nbytes + 500_000, **settings)
    assert (report.ok, report.stopped) == (24, "")


def test_the_disk_budget_is_kept(prefiller, data, tmp_path):
    """The job stops before it writes more than it may; with more room it goes on."""
    source = write(data / "in.jsonl", simple(20))
    settings = {"prefiller": prefiller, "emit": ("kv", "logits"), "part_rows": 4, "window": 3}
    stopped = mmprefill.run_job(source, tmp_path / "out", disk_budget=900_000, **settings)
    size = sum(file.stat().st_size for file in (tmp_path / "out").rglob("*") if file.is_file())
    assert stopped.exit_code == 3
    assert "disk budget" in stopped.stopped
    assert stopped.ok > 0
    assert size <= 900_000
    assert len(files(tmp_path / "out" / "kv")) % 4 == 0
    report = mmprefill.run_job(source, tmp_path / "out", disk_budget=2**30, **settings)
    assert report.skipped + report.ok == 20
    assert len(records(tmp_path / "out")) == 20


# The command.


def batch(*arguments):
    with checkpoints.quiet():
        return main(["batch", *map(str, arguments), "--model", str(checkpoints.cached("smolvlm"))])


def test_the_command(data, tmp_path, capsys):
    """One command runs, goes on and reports, for people and for programs; the exit code tells of failed rows."""
    rows = simple(6)
    rows[2]["images"] = ["missing.png"]
    source = write(data / "in.jsonl", rows)
    options = ("--out", tmp_path / "out", "--emit", "scores,text", "--choices", "yes", "no", "--tokens", "2")
    assert batch(source, *options, "--limit", "2") == 0
    assert "2 ok, 0 failed, 0 skipped" in capsys.readouterr().out
    assert batch(source, "--out", tmp_path / "no", "--prompt-column", "text", "--limit", "2") == 1
    assert "2 x RequestError: row 'r0': no column 'text'; there are id, prompt, images" in capsys.readouterr().out
    assert batch(source, *options, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["failed"], told["skipped"], told["exit_code"]) == (3, 1, 2, 1)
    assert batch(source, *options, "--top", "9") == 2
    assert "top was 5, is 9" in capsys.readouterr().err
    assert batch(source, "--shard", "1:2", "--out", tmp_path / "x") == 2


def test_no_rows_are_told(data, tmp_path, capsys):
    """Nothing to do is no failure, and not silent: an empty input, and a shard that none of it falls into."""
    source = write(data / "in.jsonl", [])
    assert batch(source, "--out", tmp_path / "a") == 0
    assert "mmprefill: no rows" in capsys.readouterr().err
    assert batch(source, "--dry-run") == 0
    assert "mmprefill: no rows" in capsys.readouterr().err
    write(data / "in.jsonl", simple(1))
    assert batch(source, "--out", tmp_path / "b", "--shard", "1/2") == 0
    assert "mmprefill: no rows" in capsys.readouterr().err
    assert batch(source, "--out", tmp_path / "b", "--shard", "0/2") == 0
    assert batch(source, "--out", tmp_path / "b", "--shard", "0/2") == 0  # done before
    assert "no rows" not in capsys.readouterr().err


def test_a_prompt_that_cannot_be_filled(prefiller, data, tmp_path):
    """A format that does not suit a row's value costs that row; the template is shown."""
    source = write(data / "in.jsonl", [{"n": "x", "image": "p0.png"}, {"n": 2, "image": "p0.png"}])
    report = mmprefill.run_job(source, tmp_path / "out", prefiller=prefiller, prompt="is it {n:d}")
    assert (report.ok, report.failed) == (1, 1)
    assert "prompt 'is it {n:d}' cannot be filled" in failures(tmp_path / "out")[0]["message"]


def test_dry_run(data, tmp_path, capsys):
    """Tokens, bytes and time from a few rows; nothing is written where the output would go."""
    source = write(data / "in.jsonl", simple(40))
    assert batch(source, "--emit", "kv", "--dry-run", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached("smolvlm")) as prefiller:
        tokens = len(prefiller.prefill("what is 0", images=[data / "p0.png"]).token_ids)
    assert told["rows"] == 40
    assert told["tokens"] == pytest.approx(40 * tokens, rel=0.1)
    assert told["seconds"] > 0
    assert told["nbytes"] > 40 * 10_000
    assert not (tmp_path / "out").exists()


def test_the_sample(tmp_path, capsys):
    """`samples/batch_job.py` runs, and finds its rows again beside the questions."""
    sample = runpy.run_path(str(Path(__file__).parent.parent / "samples" / "batch_job.py"))
    with checkpoints.quiet():
        code = sample["main"]([str(tmp_path / "out"), "--limit", "3", "--model", str(checkpoints.cached("smolvlm"))])
    assert code == 0
    assert "of 3 answers are right" in capsys.readouterr().out


def test_progress(capsys):
    """Lines where there is no terminal, with rows, rates, time left, reuse and errors."""
    from rich.console import Console

    from mmprefill.job_report import Bar, JobReport, Lines

    report = JobReport(Path("out"), ok=8, failed=2, tokens=100, pictures=10, reused_pictures=5)
    told = io.StringIO()
    with Lines(Console(file=told, width=160), every=0.0) as lines:
        lines.update(report, 20)
    for word in ("10 of 20 rows", "rows/s", "tokens/s", "50 % of pictures reused", "2 failed", "s left"):
        assert word in told.getvalue()
    told = io.StringIO()
    with Bar(Console(file=told, width=160, force_terminal=True)) as bar:
        bar.update(report, 20)
    assert "10/20" in told.getvalue()


def test_settings_are_frozen_names():
    """An option that does not exist is refused."""
    with pytest.raises(TypeError, match="colour"):
        JobSettings(colour=1)
