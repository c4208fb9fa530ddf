"""Shards: many artefacts in one file, each as it would be alone; damage and lies are refused, request by request."""

import contextlib
import json
import random
import struct

import checkpoints
import pytest
import torch

import mmprefill
from mmprefill.cli import main
from mmprefill.errors import ArtefactError
from mmprefill.pipeline import kv_file, kv_read, kv_store, manifest
from mmprefill.pipeline.kv_store import ShardWriter


@pytest.fixture(scope="module")
def prefiller():
    with checkpoints.quiet(), mmprefill.Prefiller.from_pretrained(checkpoints.cached("smolvlm")) as prefiller:
        yield prefiller


@pytest.fixture(scope="module")
def results(prefiller):
    """Three requests, one without a picture, two with the same id."""
    found = [
        prefiller.prefill("what", images=[checkpoints.picture(1)], id="a", hidden_states=(0,)),
        prefiller.prefill("only text", id="b"),
        prefiller.prefill("what is it", images=[checkpoints.picture(2)], id="a"),
    ]
    for each in found:
        _ = each.cache
    return found


@pytest.fixture
def shard(results, tmp_path):
    return mmprefill.save_shard(results, tmp_path / "x.kv.safetensors")


def content(artefact):
    return artefact.manifest, {name: artefact.tensor(name).clone() for name in artefact.manifest.tensors}


def same(mine, theirs):
    return mine[0] == theirs[0] and all(torch.equal(mine[1][name], theirs[1][name]) for name in theirs[1])


def test_each_is_as_it_would_be_alone(prefiller, results, shard, tmp_path):
    """Manifests and tensors equal those of files of their own; any of them is loaded and resumed by FILE#N."""
    found = mmprefill.load_shard(shard)
    assert found.ids == ("a", "b", "a") and len(found) == 3
    for number, result in enumerate(results):
        alone = mmprefill.load(result.save(tmp_path / "alone"))
        assert same(content(found[number]), content(alone))
        assert same(content(mmprefill.load(f"{shard}#{number}")), content(alone))
        assert prefiller.resume(f"{shard}#{number}").generate(4) == result.generate(4)
        assert prefiller.resume(found[number]).top_tokens(3) == result.top_tokens(3)
    assert [artefact.manifest.id for artefact in found] == ["a", "b", "a"]
    assert same(content(found[-1]), content(found[2]))
    with pytest.raises(IndexError):
        found[3]


def test_reading_is_lazy(shard, monkeypatch):
    """One layer of one request reads two tensors and parses one manifest, whatever else is in the file."""
    read, parsed = [], []
    get, parse = kv_read.Artefact.tensor, manifest.Manifest.from_json.__func__
    monkeypatch.setattr(kv_read.Artefact, "tensor", lambda self, name: read.append(name) or get(self, name))
    monkeypatch.setattr(
        manifest.Manifest, "from_json", classmethod(lambda cls, text: parsed.append(1) or parse(cls, text))
    )
    found = mmprefill.load_shard(shard)
    assert parsed == []
    found[2].layer(1)
    assert (read, len(parsed)) == (["layers.1.keys", "layers.1.values"], 1)


def test_shards_are_bounded(results, tmp_path):
    """A writer begins a new file where the next result would not fit; one that fits in none is alone."""
    sizes = [sum(t.nbytes for t in kv_store.stored(result)[1].values()) for result in results]
    for most, files in ((sum(sizes), 1), (sizes[0] + sizes[1], 2), (1, 3)):
        writer = ShardWriter(lambda n, most=most: tmp_path / f"{most}-{n}.kv.safetensors", most)
        places = [writer.add(result) for result in results]
        writer.flush()
        assert len(writer.files) == files
        for place, result in zip(places, results, strict=True):
            assert mmprefill.load(place).manifest.token_ids == tuple(result.token_ids.tolist())


def test_long_headers_make_another_shard(results, tmp_path, monkeypatch):
    """Manifests count as well: no header grows past what is read back."""
    length = len(kv_store.stored(results[1])[0])
    monkeypatch.setattr(kv_store, "MOST_HEADER", 4 * length + 256 * 40)
    writer = ShardWriter(lambda n: tmp_path / f"{n}.kv.safetensors", 2**40)
    for _ in range(6):
        writer.add(results[1])
    writer.flush()
    assert len(writer.files) > 1
    assert sum(len(mmprefill.load_shard(file)) for file in writer.files) == 6
    assert max(struct.unpack("<Q", file.read_bytes()[:8])[0] for file in writer.files) <= kv_store.MOST_HEADER


def test_what_a_path_means(results, shard, tmp_path):
    """A shard is not taken for one request, nor the other way round; a file that is named so comes first."""
    with pytest.raises(ArtefactError, match=r"a shard of 3 requests: name one as x\.kv\.safetensors#0"):
        mmprefill.load(shard)
    alone = results[1].save(tmp_path / "alone")
    with pytest.raises(ArtefactError, match="of one request, not a shard"):
        mmprefill.load_shard(alone)
    with pytest.raises(ArtefactError, match="holds 3 requests"):
        mmprefill.load(f"{shard}#3")
    with pytest.raises(ArtefactError, match="No such file"):
        mmprefill.load(f"{shard}#-1")
    assert mmprefill.load(results[1].save(tmp_path / "odd#1")).manifest.id == "b"
    assert [len(kv_read.load_all(path)) for path in (shard, alone, f"{shard}#1")] == [3, 1, 1]


# Damage and lies.


def check_damaged(path, original):
    """Whatever loads is as it was; the rest is refused, naming the file."""
    whole = 0
    try:
        found = mmprefill.load_shard(path)
    except ArtefactError as error:
        assert str(path) in str(error)
        return 0
    assert len(found) == len(original)
    for number, expected in enumerate(original):
        try:
            mine = content(found[number])
        except ArtefactError as error:
            assert f"{path}#{number}" in str(error)
            continue
        assert same(mine, expected)
        whole += 1
    return whole


def test_damage_never_passes(shard):
    """500 flipped bits, cuts, holes and splices: no request ever comes back as something else."""
    chance = random.Random(11)
    original, raw = [content(each) for each in mmprefill.load_shard(shard)], shard.read_bytes()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    for i in range(500):
        damaged, place, length = bytearray(raw), chance.randrange(len(raw)), chance.randrange(1, 200)
        kind = i % 4
        if kind == 0:
            damaged[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            damaged[chance.randrange(header)] ^= 1 << chance.randrange(8)
        elif kind == 2:
            damaged = damaged[:place] + chance.choice([b"", bytes(length) + raw[place:], raw[place + length :]])
        else:
            source = chance.randrange(len(raw) - length)
            damaged[place : place + length] = raw[source : source + length]
        shard.write_bytes(damaged)
        check_damaged(shard, original)


def test_one_damaged_request_hides_no_other(shard):
    """A damaged tensor costs its request."""
    original, raw = [content(each) for each in mmprefill.load_shard(shard)], bytearray(shard.read_bytes())
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    start = 8 + struct.unpack("<Q", raw[:8])[0] + header["1/layers.0.keys"]["data_offsets"][0]
    raw[start] ^= 1
    shard.write_bytes(raw)
    assert check_damaged(shard, original) == 2
    with pytest.raises(ArtefactError, match=r"x\.kv\.safetensors#1: tensor 'layers.0.keys' does not match"):
        mmprefill.load(f"{shard}#1").verify()


def rewritten(path, change):
    """The header changed, with the index's checksum made right again, as a liar would."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    about = header["__metadata__"]
    index = json.loads(about[kv_file.INDEX])
    del index["checksum"]
    change(header, about, index)
    if kv_file.INDEX in about:
        about[kv_file.INDEX] = json.dumps({**index, "checksum": manifest.digest(index)})
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def swap_manifests(header, about, index):
    about["mmprefill.0"], about["mmprefill.1"] = about["mmprefill.1"], about["mmprefill.0"]


LIES = {
    "format 2": lambda header, about, index: index.update(format=2),
    "format True": lambda header, about, index: index.update(format=True),
    "manifests for 2": lambda header, about, index: index["ids"].pop(),
    "manifests for 4": lambda header, about, index: index["ids"].append("z"),
    "shard.ids": lambda header, about, index: index.update(ids="ab"),
    "fields missing": lambda header, about, index: index.update(more=1),
    "without a manifest": lambda header, about, index: about.pop(kv_file.INDEX),
    "manifests for 3": lambda header, about, index: about.update({"mmprefill.9": "x"}),
    "belongs to none": lambda header, about, index: header.update({"9/x": header.pop("0/layers.0.keys")}),
    "'layers.0.keys' belongs": lambda header, about, index: header.update(
        {"layers.0.keys": header.pop("0/layers.0.keys")}
    ),
    "'00/layers.0.keys' belongs": lambda header, about, index: header.update(
        {"00/layers.0.keys": header.pop("0/layers.0.keys")}
    ),
    "cannot lie": lambda header, about, index: header["0/layers.0.keys"].update(data_offsets=[0, 8]),
}


@pytest.mark.parametrize("words", LIES)
def test_headers_that_lie_are_refused(shard, words):
    """Indices, manifests and tensors that do not belong together."""
    rewritten(shard, LIES[words])
    with pytest.raises(ArtefactError, match=words):
        mmprefill.load_shard(shard)


def test_manifests_in_the_wrong_place(shard):
    """A manifest of another request of the same shard does not fit the tensors there."""
    rewritten(shard, swap_manifests)
    found = mmprefill.load_shard(shard)
    for number in (0, 1):
        with pytest.raises(ArtefactError, match=rf"#{number}: tensor|request"):
            found[number]
    found[2].verify()
    rewritten(shard, lambda header, about, index: index.update(ids=["a", "b", "c"]))
    with pytest.raises(ArtefactError, match="request 'a' where 'c' should be"):
        mmprefill.load_shard(shard)[2]


def test_saving_again_replaces_in_one_step(results, shard):
    """A shard that is open keeps what it had."""
    old = mmprefill.load_shard(shard)
    before = content(old[0])
    mmprefill.save_shard(results[1:2], shard)
    assert same(content(old[0]), before)
    assert mmprefill.load_shard(shard).ids == ("b",)


# The command.


def run(capsys, *arguments):
    code = main(["kv", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_the_command_knows_shards(results, shard, tmp_path, capsys):
    """show lists every request, verify names the one that is damaged, diff compares those of the same id."""
    code, out = run(capsys, "show", shard)
    assert code == 0
    assert [f"#{n}: request '{id}'" in out for n, id in enumerate("aba")] == [True] * 3
    assert run(capsys, "show", f"{shard}#1", "--json")[1].count("\n") == 1
    code, out = run(capsys, "verify", shard, "--json")
    assert (code, json.loads(out)) == (0, {"files": 1, "requests": 3, "damaged": {}})
    other = mmprefill.save_shard(results[:2], tmp_path / "y.kv.safetensors")
    assert run(capsys, "diff", shard, shard)[0] == 0
    code, out = run(capsys, "diff", shard, other)
    assert (code, out.strip()) == (1, "a (2): only in the first")
    raw = bytearray(other.read_bytes())
    raw[-1] ^= 1
    other.write_bytes(raw)
    code, out = run(capsys, "verify", tmp_path)
    assert code == 1
    assert "2 files, 5 requests, 1 damaged" in out
    with contextlib.suppress(ArtefactError):
        run(capsys, "diff", shard, other)
