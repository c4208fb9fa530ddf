"""A batch job on Ray is the same job."""

import sys

import checkpoints
import pytest
import torch
from job_checks import NEAR, failures, files, records, same, same_cache, simple, write
from safetensors.torch import load_file

import mmprefill
from mmprefill.cli import main
from mmprefill.errors import MMPrefillError
from mmprefill.pipeline.kv_read import load as load_kv


@pytest.fixture
def data(tmp_path):
    """A folder with four pictures."""
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(4):
        checkpoints.picture(i).save(folder / f"p{i}.png")
    return folder


@pytest.fixture(scope="module")
def prefiller():
    with checkpoints.quiet(), mmprefill.Prefiller.from_pretrained(checkpoints.cached("smolvlm")) as prefiller:
        yield prefiller


@pytest.fixture(scope="module")
def cluster():
    """A Ray of this machine, with the folders of the tests on its path."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def test_ray_gives_the_same(cluster, prefiller, data, tmp_path, capsys):
    """On actors: the tables, errors and files of a local job; either goes on with what the other has begun."""
    rows = simple(14)
    rows[5]["images"] = ["missing.png"]
    rows[6]["prompt"] = "word " * 3000
    source = write(data / "in.jsonl", rows)
    settings = {"emit": ("topk", "kv", "logits", "text"), "max_new_tokens": 3, "part_rows": 4, "window": 6}
    mmprefill.run_job(source, tmp_path / "local", prefiller=prefiller, **settings)
    mmprefill.run_job(source, tmp_path / "ray", prefiller=prefiller, limit=4, **settings)
    with checkpoints.quiet():
        model = checkpoints.cached("smolvlm")
        report = mmprefill.run_job(source, tmp_path / "ray", model=model, engine="ray", actors=2, **settings)
        assert (report.ok, report.failed, report.skipped) == (8, 2, 4)
        command = ["batch", str(source), "--out", str(tmp_path / "ray"), "--model", str(model), "--engine", "ray"]
        assert main([*command, "--emit", "topk,kv,logits,text", "--tokens", "3", "--top", "6"]) == 2
        assert "top was 5, is 6" in capsys.readouterr().err
    assert files(tmp_path / "ray") == files(tmp_path / "local")
    assert same(records(tmp_path / "ray"), records(tmp_path / "local"))
    assert failures(tmp_path / "ray") == failures(tmp_path / "local")
    for each in records(tmp_path / "local"):
        folders = tmp_path / "ray", tmp_path / "local"
        same_cache(*(load_kv(folder / each["kv"]).cache() for folder in folders))
        torch.testing.assert_close(*(load_file(folder / each["tensors"]) for folder in folders), **NEAR)


def test_mistakes_with_ray(prefiller, data, tmp_path, monkeypatch):
    """What cannot be is told before anything starts, and a missing Ray says what to install."""
    source = write(data / "in.jsonl", simple(1))
    monkeypatch.setitem(sys.modules, "ray", None)
    for settings, said in (
        ({"engine": "cloud"}, "'local' or 'ray'"),
        ({"engine": "ray", "prefiller": prefiller}, "loads its models itself"),
        ({"engine": "ray", "actors": 0}, "actors must be positive"),
        ({"engine": "ray", "disk_budget": 10}, "local engine only"),
        ({"engine": "ray"}, r"pip install 'mmprefill\[ray\]'"),
    ):
        with pytest.raises((ValueError, MMPrefillError), match=said):
            mmprefill.run_job(source, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()
