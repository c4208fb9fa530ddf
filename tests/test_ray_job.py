"""A batch job on Ray is the same job."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import checkpoints
import pytest
import torch
from job_checks import NEAR, failures, files, records, same, same_cache, simple, write
from safetensors.torch import load_file

import mmprefill
from mmprefill import MediaLimits, PrefillConfig, Request, job, ray_job, ray_reader, ray_stages
from mmprefill.cli import main
from mmprefill.errors import DeadlineError, EngineClosedError, MMPrefillError
from mmprefill.pipeline.kv_read import load as load_kv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # Ray Data warns of its own defaults


@pytest.fixture(scope="module")
def prefiller():
    with checkpoints.quiet(), mmprefill.Prefiller.from_pretrained(checkpoints.cached("smolvlm")) as prefiller:
        yield prefiller


@pytest.fixture(scope="module")
def cluster():
    """A Ray of this machine, with the folders of the tests on its path."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def on_ray(source, out, **settings):
    with checkpoints.quiet():
        return mmprefill.run_job(source, out, model=checkpoints.cached("smolvlm"), engine="ray", **settings)


def flawed(count):
    """Rows of which some are bad, each where it is found out: by the reader, a preparer or the engine's limits."""
    rows = simple(count)
    rows[1] = {"id": "r1", "images": ["p1.png"]}
    rows[3]["id"] = "r0"
    rows[5]["images"] = ["missing.png"]
    rows[6]["prompt"] = "word " * 3000
    return rows


def same_output(mine, theirs):
    """Files, rows, errors, KV and tensors of two jobs."""
    assert files(mine) == files(theirs)
    assert same(records(mine), records(theirs))
    for each in records(theirs):
        same_cache(*(load_kv(out / each["kv"]).cache() for out in (mine, theirs)))
        torch.testing.assert_close(*(load_file(out / each["tensors"]) for out in (mine, theirs)), **NEAR)


def test_ray_gives_the_same(cluster, prefiller, data, tmp_path, capsys):
    """The tables, errors and files of a local job; either goes on with what the other has begun."""
    source = write(data / "in.jsonl", flawed(14))
    settings = {"emit": ("topk", "kv", "logits", "text"), "max_new_tokens": 3, "part_rows": 4, "window": 6}
    local = mmprefill.run_job(source, tmp_path / "local", prefiller=prefiller, **settings)
    mmprefill.run_job(source, tmp_path / "ray", prefiller=prefiller, limit=4, **settings)
    report = on_ray(source, tmp_path / "ray", actors=2, **settings)
    assert (report.ok, report.failed, report.skipped) == (8, 2, 4)
    assert report.stages.keys() == local.stages.keys()
    same_output(tmp_path / "ray", tmp_path / "local")
    assert failures(tmp_path / "ray") == failures(tmp_path / "local")
    command = ["batch", str(source), "--out", str(tmp_path / "ray"), "--model", str(checkpoints.cached("smolvlm"))]
    with checkpoints.quiet():
        assert main([*command, "--engine", "ray", "--emit", "topk,kv,logits,text", "--tokens", "3", "--top", "6"]) == 2
    assert "top was 5, is 6" in capsys.readouterr().err


def test_stopped_and_gone_on_with(cluster, prefiller, data, tmp_path, monkeypatch):
    """Of a shard: an engine is killed, another run stops at its errors; each time whole parts are left and nothing else."""
    rows = flawed(40)
    for i in (20, 22):
        rows[i]["images"] = ["missing.png"]
    source = write(data / "in.jsonl", rows)
    settings = {"emit": ("kv", "logits", "scores"), "choices": ("yes", "no"), "part_rows": 4, "window": 3}
    settings |= {"shard": (0, 2), "format": "parquet"}
    stream, land, gates = ray_job.RayWorkers._stream, job._Job._land, []

    def streaming(self, plan, gate):
        gates.append(gate)
        return stream(self, plan, gate)

    def landing(self, group, served):
        land(self, group, served)
        if group.start == 4:
            [engine] = cluster.get(gates[0].engines.remote())
            cluster.kill(engine, no_restart=False)

    with monkeypatch.context() as patch, pytest.raises(EngineClosedError, match="a Ray actor was lost"):
        patch.setattr(ray_job.RayWorkers, "_stream", streaming)
        patch.setattr(job._Job, "_land", landing)
        on_ray(source, tmp_path / "ray", **settings)
    folder = tmp_path / "ray" / "shard-0-of-2"
    parts = {each.stem for each in (folder / "state").iterdir()}
    assert "part-00000000" in parts
    assert {each.name[:13] for name in ("kv", "rows", "tensors") for each in (folder / name).iterdir()} == parts
    stopped = on_ray(source, tmp_path / "ray", max_errors=1, **settings)
    assert (stopped.exit_code, stopped.skipped) == (3, 4 * len(parts))
    assert "rows have failed" in stopped.stopped
    for out in ("ray", "local"):
        mmprefill.run_job(source, tmp_path / out, prefiller=prefiller, **settings)
    same_output(folder, tmp_path / "local" / "shard-0-of-2")


def test_what_another_intake_prepared(prefiller, data):
    """An engine takes it as it would take the request; the time it took counts towards the deadline."""
    request = Request(prompt="what is it?", images=[data / "p1.png"], deadline=60, reuse=False)
    prepared = prefiller.intake.prepare(request)
    here, late = prefiller.prefill_many([prepared, replace(prepared, seconds=61.0)])
    torch.testing.assert_close(here.next_token_logits, prefiller.prefill(request).next_token_logits, **NEAR)
    assert isinstance(late, DeadlineError)


def test_the_reader_waits_for_room():
    """So many groups are under way and no more; one that begins anew after it was lost passes where it did before."""

    async def reading():
        gate = ray_reader.Gate(2)
        await gate.enter(0)
        await gate.enter(1)
        third = asyncio.ensure_future(gate.enter(2))
        await asyncio.sleep(0.01)
        assert not third.done()
        await gate.leave()
        await third
        for number in range(3):
            await asyncio.wait_for(gate.enter(number), 1)

    asyncio.run(reading())


def test_a_picture_goes_to_an_engine_once(prefiller, data):
    """However many rows of a group show it; rows that show others keep their own."""
    asked = [Request(prompt=f"{i}", images=[data / f"p{each}.png"]) for i, each in enumerate((1, 1, 1, 2))]
    pictures = {}
    sent = [ray_stages._sharing(prefiller.intake.prepare(each), pictures) for each in asked]
    pixels = [each.inputs["pixel_values"] for each in sent]
    assert [each is pixels[0] for each in pixels] == [True, True, True, False]
    assert not torch.equal(sent[0].input_ids, sent[1].input_ids)
    torch.testing.assert_close(pixels[3], prefiller.intake.prepare(asked[3]).inputs["pixel_values"])


@pytest.mark.parametrize(
    "nodes, engines, given",
    [
        ([{"CPU": 2}], 1, (1, 0, {"num_cpus": 2})),
        ([{"CPU": 2}], 4, (4, 0, {"num_cpus": 1})),
        ([{"CPU": 8}, {"CPU": 8}], 3, (3, 0, {"num_cpus": 4})),
        ([{"CPU": 16, "GPU": 2}, {"CPU": 8}], 2, (8, 1, {"num_gpus": 1})),
        ([{"CPU": 2, "GPU": 2}], 2, (1, 0, {"num_gpus": 1})),
    ],
)
def test_shares_fit_the_machines(nodes, engines, given):
    """An engine lies on one machine; nobody waits for a CPU that there is none of."""
    preparers, preparer, engine = ray_job.shares(nodes, engines)
    assert (preparers, preparer["num_cpus"], engine) == given


def test_folders_are_meant_from_here():
    """Wherever a process of the cluster is."""
    config = PrefillConfig(media=MediaLimits(allowed_roots=(Path("pictures"),)))
    assert ray_job._anywhere(config).media.allowed_roots == (Path("pictures").absolute(),)
    assert ray_job._anywhere(PrefillConfig()) == PrefillConfig()


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
