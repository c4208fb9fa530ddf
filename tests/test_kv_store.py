"""The artefact: what was saved comes back, what is damaged or forged is refused, a crash leaves no half file."""

import contextlib
import dataclasses
import functools
import json
import os
import pickle
import random
import shutil
import signal
import struct
import time
import warnings
from pathlib import Path

import checkpoints
import pytest
import safetensors.torch
import torch
from engines import open_prefiller, plain
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer

import mmprefill
from mmprefill import Prefiller
from mmprefill.errors import ArtefactError, UnsupportedModelError
from mmprefill.pipeline import decode, kv_read, kv_store, manifest

FAMILIES = ["smolvlm", "qwen2_5_vl", "gemma3", "kimi_k25", "qwen3_5"]
PROMPT = "What is in this picture? Count 12 cats."
NEW = 12


@pytest.fixture(scope="module")
def engine():
    """Family -> a running engine in float32, started once."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda family: stack.enter_context(open_prefiller(family)))


@pytest.fixture(scope="module")
def result(engine):
    """Family -> one prefilled request."""

    @functools.cache
    def prefilled(family):
        return engine(family).prefill(PROMPT, images=[checkpoints.picture(1)], id="cat", hidden_states=(1, -1))

    return prefilled


@pytest.fixture
def saved(result, tmp_path):
    """An artefact of the smallest model."""
    return result("smolvlm").save(tmp_path / "cat.kv.safetensors")


def same(a, b):
    """Equal to the last bit, also inside dicts."""
    if torch.is_tensor(a):
        return torch.is_tensor(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def content(artefact):
    return artefact.manifest, {name: artefact.tensor(name).clone() for name in artefact.manifest.tensors}


def split(path):
    """Header (a dict) and tensor bytes of a file."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def forged(path, change):
    """Rewrite the manifest with every checksum and hash made right again, as a liar would."""
    header, data = split(path)
    fields = json.loads(header["__metadata__"]["mmprefill"])
    del fields["checksum"]
    change(fields, header)
    with contextlib.suppress(KeyError, TypeError):
        fields["compatibility"] = manifest.digest({"format": 1, **fields["identity"]})
    text = json.dumps({**fields, "checksum": manifest.digest(fields)})
    header["__metadata__"]["mmprefill"] = text
    join(path, header, data)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_result_goes_on_as_the_first_one(family, engine, result, tmp_path):
    """Generation, top tokens and choices after resume equal those before saving; so does everything reported."""
    first = result(family)
    path = first.save(tmp_path / "a")
    again = engine(family).resume(path)
    assert again.generate(NEW) == first.generate(NEW)
    assert len(first.generate(NEW).token_ids) == NEW
    assert again.top_tokens(5) == first.top_tokens(5)
    assert again.score([" yes", " not at all"]) == first.score([" yes", " not at all"])
    for name in ("id", "token_ids", "positions", "next_position", "next_token_logits", "spans", "route", "attention"):
        assert same(getattr(again, name), getattr(first, name)), name
    assert same(again.hidden_states, dict(first.hidden_states))
    for ours, theirs in zip(again.media, first.media, strict=True):
        assert all(getattr(ours, name) == getattr(theirs, name) for name in ("medium", "digest", "size", "frames"))
    assert again.tokens == first.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_layers_come_back_to_the_last_bit(family, result, tmp_path):
    """A loaded cache has the classes, tensors, lengths and flags that the model's own prefill left."""
    first = decode.fresh_cache(result(family).session.family, result(family).emitted)
    loaded = mmprefill.load(result(family).save(tmp_path / "a")).cache()
    assert type(loaded) is DynamicCache
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in first.layers]
    for ours, theirs in zip(loaded.layers, first.layers, strict=True):
        assert same(vars(ours), vars(theirs))


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_generate_needs_no_engine(family, result, tmp_path):
    """A model loaded by transformers goes on from the file with its own generate, to the same tokens."""
    artefact = mmprefill.load(result(family).save(tmp_path / "a"))
    sequence = plain(family)[0].generate(**artefact.inputs(), do_sample=False, max_new_tokens=NEW - 1)[0]
    assert tuple(sequence[artefact.manifest.length :].tolist()) == result(family).generate(NEW).token_ids


def test_a_resumed_artefact_can_be_saved_again(engine, result, tmp_path):
    """Saving what was resumed writes the same bytes: sliding layers lose nothing on the way."""
    first = result("gemma3").save(tmp_path / "a")
    second = engine("gemma3").resume(mmprefill.load(first)).save(tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


def test_bfloat16_comes_back(tmp_path):
    """Tensors keep the model's dtype."""
    with open_prefiller("smolvlm", "bf16") as prefiller:
        first = prefiller.prefill(PROMPT, images=[checkpoints.picture(1)])
        again = prefiller.resume(first.save(tmp_path / "a"))
        assert again.cache.layers[0].keys.dtype == torch.bfloat16
        assert again.generate(NEW) == first.generate(NEW)


def test_the_file_is_plain_safetensors(saved, result):
    """Any safetensors reader gets every tensor, without a batch axis; saving again gives the same bytes."""
    tensors = safetensors.torch.load_file(saved)
    layers = result("smolvlm").cache.layers
    for i, layer in enumerate(layers):
        assert torch.equal(tensors[f"layers.{i}.keys"], layer.keys[0])
        assert torch.equal(tensors[f"layers.{i}.values"], layer.values[0])
    others = {"next_token_logits", "position_ids", "hidden.1", "hidden.-1"}
    assert tensors.keys() == others | {f"layers.{i}.{kv}" for i in range(len(layers)) for kv in ("keys", "values")}
    assert saved.read_bytes() == result("smolvlm").save(saved.with_name("b")).read_bytes()


def test_the_manifest_says_what_it_is(saved, result):
    """Tokens, media with digests and spans, versions and identity are there; no path of this machine is."""
    first, found = result("smolvlm"), mmprefill.load(saved).manifest
    assert found.token_ids == tuple(first.token_ids.tolist())
    assert [item.digest for item in found.media] == [first.media[0].digest.hex()]
    assert found.media[0].spans == first.spans[0]
    assert found.media[0].size == (48, 64)
    assert found.producer.keys() == {"mmprefill", "torch", "transformers"}
    assert found.model == "smolvlm"
    assert found.identity.weights == first.session.bundle.fingerprint
    assert found.quantisation is None and found.shards == "whole" and found.approximations == ()
    header, _ = split(saved)
    assert str(checkpoints.cached("smolvlm").parent) not in json.dumps(header)


def test_sliding_layers_store_their_window(result, tmp_path):
    """Window 16: sliding layers hold the last 15 rows and the manifest says so; `layer` returns them."""
    artefact = mmprefill.load(result("gemma3").save(tmp_path / "a"))
    length = artefact.manifest.length
    assert length > 16
    kinds = [layer.kind for layer in artefact.manifest.identity.layers]
    assert artefact.manifest.rows == tuple(15 if kind == "sliding_attention" else length for kind in kinds)
    assert [artefact.layer(i)[0].shape[1] for i in range(len(kinds))] == list(artefact.manifest.rows)
    assert artefact.manifest.attention == "spans"


def test_layers_without_keys_say_so(result, tmp_path):
    """`layer` of a recurrent layer is refused and names `states`, which has them."""
    artefact = mmprefill.load(result("qwen3_5").save(tmp_path / "a"))
    with pytest.raises(ValueError, match=r"linear_attention.*states\(0\)"):
        artefact.layer(0)
    assert artefact.states(0).keys() == {"conv_states.0", "recurrent_states.0"}
    assert artefact.states(-1).keys() == {"keys", "values"}
    with pytest.raises(IndexError):
        artefact.layer(99)


def test_using_the_cache_changes_nothing_stored(engine, tmp_path):
    """A cache that grew in its user's hands does not change what is saved, nor what the artefact hands out next."""
    first = engine("smolvlm").prefill(PROMPT, images=[checkpoints.picture(1)])
    before = first.save(tmp_path / "a").read_bytes()
    artefact = mmprefill.load(tmp_path / "a")
    for cache in (first.cache, artefact.cache()):
        layer = cache.layers[0]
        layer.keys.add_(0) if cache is first.cache else layer.keys.zero_()
        cache.update(layer.keys[:, :, :1], layer.values[:, :, :1], 0)
    assert first.save(tmp_path / "b").read_bytes() == before
    artefact.verify()


def test_indexed_layers_come_back():
    """Sparse-attention layers keep their indexer keys and positions."""
    layer = DynamicIndexedLayer()
    layer.update(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4))
    layer.update_indexer(torch.randn(1, 5, 3))
    layer.indexer_position_ids = torch.arange(15).reshape(3, 1, 5)
    kind = manifest.LayerKind("indexed_attention")
    again = kv_read._restored(kind, kv_store._states_of(layer, kind), 5)
    assert same(vars(again), vars(layer))


def test_unknown_cache_layers_are_not_stored(result, tmp_path):
    """A layer class whose states are not known here is refused by name, before anything is written."""

    class Strange(DynamicIndexedLayer):
        pass

    cache = decode.fresh_cache(result("qwen3_5").session.family, result("qwen3_5").emitted)
    cache.layers[1] = Strange()
    with pytest.raises(UnsupportedModelError, match=r"layer 1 .*Strange"):
        dataclasses.replace(result("qwen3_5"), emitted=cache).save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


# Another engine.


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "qwen3_5"])
def test_another_model_refuses_it(family, engine, saved):
    """An engine on another checkpoint says which model it was made for, without reading a tensor."""
    raw = bytearray(saved.read_bytes())
    raw[-1] ^= 1  # reading any tensor there would complain about its checksum instead
    saved.write_bytes(raw)
    with pytest.raises(ArtefactError, match=rf"model type smolvlm \(here {engine(family).session.family.name}\)"):
        engine(family).resume(saved)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "bf16"}, r"dtype float32 \(here bfloat16\)"),
        ({"processor_kwargs": {"do_image_splitting": False}}, "processor "),
    ],
)
def test_other_settings_refuse_it(options, words, saved):
    """The same checkpoint in another dtype, or with other processor settings, says so."""
    with checkpoints.quiet():
        other = Prefiller.from_pretrained(checkpoints.cached("smolvlm"), **options)
    with other, pytest.raises(ArtefactError, match=words):
        other.resume(saved)


@pytest.mark.parametrize(("name", "value"), [("sliding_window", 8), ("rms_norm_eps", 0.1)])
def test_another_config_refuses_it(name, value, result, tmp_path):
    """The same weights under another window or norm are another model."""
    path = result("gemma3").save(tmp_path / "a")
    folder = shutil.copytree(checkpoints.cached("gemma3"), tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    settings["text_config"][name] = value
    (folder / "config.json").write_text(json.dumps(settings))
    with checkpoints.quiet():
        other = Prefiller.from_pretrained(folder)
    with other, pytest.raises(ArtefactError, match="config "):
        other.resume(path)


def test_the_same_checkpoint_elsewhere_takes_it(result, saved, tmp_path):
    """A copy of the checkpoint in another folder is the same model."""
    folder = shutil.copytree(checkpoints.cached("smolvlm"), tmp_path / "moved")
    with checkpoints.quiet(), Prefiller.from_pretrained(folder) as other:
        assert other.resume(saved).generate(NEW) == result("smolvlm").generate(NEW)


# Damage.


def check_damaged(path, original):
    """Refused, or every meaning intact."""
    try:
        artefact = mmprefill.load(path)
        artefact.verify()
        found = content(artefact)
    except ArtefactError as error:
        assert str(path) in str(error)
        return False
    assert found[0] == original[0] and same(found[1], original[1])
    return True


def test_flipped_bytes_are_noticed(saved):
    """Of 600 changed bits, half of them in the header, none loads as something else; next to none loads at all."""
    chance = random.Random(1)
    original, raw = content(mmprefill.load(saved)), saved.read_bytes()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    harmless = 0
    for i in range(600):
        place = chance.randrange(header) if i % 2 else chance.randrange(len(raw))
        damaged = bytearray(raw)
        damaged[place] ^= 1 << chance.randrange(8)
        saved.write_bytes(damaged)
        harmless += check_damaged(saved, original)
    assert harmless <= 6  # such as a space of the padding that became a line break


def test_missing_and_added_bytes_are_noticed(saved):
    """A file cut anywhere, with a hole, or with bytes put in or appended, is refused."""
    chance = random.Random(2)
    original, raw = content(mmprefill.load(saved)), saved.read_bytes()
    places = [0, 1, 7, 8, 9, len(raw) - 1, *(chance.randrange(len(raw)) for _ in range(100))]
    for place in places:
        length = chance.randrange(1, 64)
        damages = [raw[:place], raw[:place] + raw[place + length :], raw[:place] + bytes(length) + raw[place:]]
        for damaged in [*damages, raw + bytes(length)]:
            saved.write_bytes(damaged)
            assert not check_damaged(saved, original), place


def test_random_splices_are_noticed(saved):
    """Runs of the file copied over other places, and random bytes, never load as something else."""
    chance = random.Random(3)
    original, raw = content(mmprefill.load(saved)), saved.read_bytes()
    for _ in range(200):
        damaged, length = bytearray(raw), chance.randrange(1, 200)
        source, target = (chance.randrange(len(raw) - length) for _ in range(2))
        damaged[target : target + length] = chance.choice([raw[source : source + length], chance.randbytes(length)])
        saved.write_bytes(damaged)
        check_damaged(saved, original)


# Foreign and hostile files.


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "cut short"),
        (b"\x00" * 7, "cut short"),
        (b"\x00" * 64, "JSON|Expecting"),
        (struct.pack("<Q", (1 << 64) - 1) + b"{}", "18446744073709551615 bytes"),
        (struct.pack("<Q", 1 << 40) + b"{}" * 9, "1099511627776 bytes"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 4) + b"null", "not a JSON object"),
        (struct.pack("<Q", 2) + b"{}", "without a manifest"),
        (struct.pack("<Q", 3) + b"NaN", "NaN"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "decode"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "nested too deeply"),
        (struct.pack("<Q", 13) + b'{"a":1,"a":1}', "duplicate key 'a'"),
        (pickle.dumps({"keys": [1, 2]}), "pickle"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(raw, words, tmp_path):
    """Every start of a file that is none of ours is refused, without allocating what it claims."""
    path = tmp_path / "x"
    path.write_bytes(raw)
    with pytest.raises(ArtefactError, match=words) as caught:
        mmprefill.load(path)
    assert str(path) in str(caught.value)


def test_a_model_and_a_pt_file_are_refused(tmp_path):
    """A checkpoint's weights and a torch.save file are named as what they look like; nothing is unpickled."""
    with pytest.raises(ArtefactError, match="without a manifest"):
        mmprefill.load(checkpoints.cached("smolvlm") / "model.safetensors")
    torch.save({"keys": torch.zeros(3)}, tmp_path / "cache.pt")
    with pytest.raises(ArtefactError, match="pickle or an archive"):
        mmprefill.load(tmp_path / "cache.pt")


def test_special_files_are_refused(tmp_path):
    """A folder, a pipe without a writer, a loop of links, a device and a missing file are errors that do not hang."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    paths = [tmp_path, tmp_path / "pipe", tmp_path / "loop", Path("/dev/zero"), tmp_path / "none", tmp_path / "a\0b"]
    for path in paths:
        with pytest.raises(ArtefactError):
            mmprefill.load(path)


def header_lies(header):
    """Headers that differ from a right one in one entry."""
    name = "layers.0.keys"
    slot = header[name]
    start, end = slot["data_offsets"]
    other = header["layers.1.keys"]["data_offsets"]
    changes = [
        {"data_offsets": [start + 8, end + 8]},
        {"data_offsets": other},
        {"data_offsets": [-8, end - start - 8]},
        {"data_offsets": [end, start]},
        {"data_offsets": [start, end + (1 << 62)]},
        {"data_offsets": [start]},
        {"data_offsets": [float(start), end]},
        {"shape": [*slot["shape"], 1]},
        {"shape": slot["shape"][::-1]},
        {"shape": [1 << 31, 1 << 31, 1 << 31]},
        {"shape": [1] * 5000},
        {"shape": None},
        {"dtype": "I32"},
        {"dtype": "F4"},
        {"dtype": 7},
        {"more": 1},
    ]
    for change in changes:
        yield {**header, name: {**slot, **change}}
    yield {key: value for key, value in header.items() if key != name}
    yield {**header, "layers.9.keys": slot}
    yield {**header, name: None}
    yield {**header, "__metadata__": {}}
    yield {**header, "__metadata__": {**header["__metadata__"], "format": "pt"}}
    yield {**header, "__metadata__": {"mmprefill": 3}}
    yield {**header, "__metadata__": {"mmprefill": "[]"}}


def test_headers_that_lie_are_refused(saved):
    """Offsets that overlap, are negative or leave holes, wrong shapes and dtypes, foreign entries: all refused."""
    header, data = split(saved)
    for lie in header_lies(header):
        join(saved, lie, data)
        with pytest.raises(ArtefactError):
            mmprefill.load(saved)


def set_at(*path):
    """A change of one field, the last argument being its new value."""
    *way, last, value = path

    def change(fields, _):
        for step in way:
            fields = fields[step]
        fields[last] = value

    return change


def drop_layer(fields, _):
    fields["identity"]["layers"].pop()


def swap_tensors(fields, header):
    for table in (fields["tensors"], header):
        table["layers.0.keys"], table["layers.9.keys"] = None, table.pop("layers.0.keys")
        del table["layers.0.keys"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_at("format", 2), "format version 2"),
        (set_at("format", True), "format version True"),
        (set_at("format", 1.0), "format version 1.0"),
        (set_at("format", None), "format version None"),
        (set_at("identity", "layers", 0, "kind", "mamba"), "unknown kind 'mamba'"),
        (set_at("identity", "layers", 0, "kind", "sliding_attention"), "with window None"),
        (set_at("identity", "layers", 0, "kind", "dummy"), "rows per layer"),
        (set_at("identity", "layers", 0, "window", 5), "with window 5"),
        (set_at("identity", "layers", 0, {"kind": "sliding_attention", "window": 9, "states": None}), "rows per layer"),
        (drop_layer, "rows per layer"),
        (set_at("rows", 0, 3), "rows per layer"),
        (set_at("token_ids", []), "no tokens"),
        (set_at("token_ids", [1, 2, 3]), "lie outside"),
        (set_at("token_ids", 0, -1), "token_ids"),
        (set_at("token_ids", 0, "1"), "token_ids"),
        (set_at("token_ids", 0, True), "token_ids"),
        (set_at("media", 0, "spans", [[3, 10**6]]), "lie outside"),
        (set_at("media", 0, "digest", "xyz"), "hexadecimal"),
        (set_at("positions", "rows", 9), "position scheme"),
        (set_at("tensors", "layers.0.keys", "shape", [1, 2, 3]), "layers.0.keys"),
        (set_at("tensors", "layers.0.keys", "dtype", "F16"), "layers.0.keys"),
        (set_at("tensors", "hidden.x", {"dtype": "F32", "shape": [1], "crc32": 0}), "invalid literal"),
        (set_at("tensors", "more", {"dtype": "F32", "shape": [1], "crc32": 0}), "unexpected tensors"),
        (swap_tensors, "layers.0.keys.* missing"),
        (set_at("quantisation", "int8"), "quantisation 'int8'"),
        (set_at("shards", "1/2"), "shards '1/2'"),
        (set_at("identity", None), "identity cannot be|fields missing"),
        (set_at("new", 1), "new"),
    ],
)
def test_manifests_that_lie_are_refused(change, words, saved):
    """Also where every checksum was made right again, what does not follow from the rest is refused by name."""
    forged(saved, change)
    with pytest.raises(ArtefactError, match=words):
        mmprefill.load(saved)


def test_a_wrong_next_position_is_refused(engine, saved):
    """The next position must follow from the positions stored, or decoding would go on at the wrong place."""
    forged(saved, set_at("positions", "next", 5))
    with pytest.raises(ArtefactError, match="next position 5"):
        engine("smolvlm").resume(saved)


def resaved(path, change):
    """The file with other tensors, every shape, checksum and hash of them right."""
    header, _ = split(path)
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    fields = json.loads(header["__metadata__"]["mmprefill"])
    del fields["checksum"]
    entries = {name: dataclasses.asdict(kv_store.entry_of(t)) for name, t in tensors.items()}
    fields = json.loads(json.dumps({**fields, "tensors": entries}))
    text = json.dumps({**fields, "checksum": manifest.digest(fields)})
    path.unlink()
    safetensors.torch.save_file(tensors, path, metadata={"mmprefill": text})


def swapped(name, to):
    """A change of one tensor."""

    def change(tensors):
        tensors[name] = to(tensors[name]).contiguous()

    return change


def both(change):
    """A change of a layer's keys and values."""

    def changed(tensors):
        for name in ("layers.1.keys", "layers.1.values"):
            tensors[name] = change(tensors[name]).contiguous()

    return changed


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("smolvlm", both(torch.Tensor.bfloat16), r"layers\.1\.keys BF16 .*\(here F32 "),
        ("smolvlm", swapped("layers.0.values", torch.Tensor.double), r"layers\.0\.values F64 .*\(here F32 "),
        ("smolvlm", both(lambda t: t[..., :-2]), r"layers\.1\.keys F32 .*\(here F32 "),
        ("smolvlm", swapped("layers.0.values", lambda t: t[..., :1]), r"layers\.0\.values F32 \d+x\*x1 "),
        ("smolvlm", both(lambda t: t.repeat(7, 1, 1)), r"layers\.1\.keys F32 .*\(here F32 "),
        ("smolvlm", swapped("next_token_logits", lambda t: t[:-1]), "next_token_logits F32 "),
        ("kimi_k25", swapped("layers.1.keys", lambda t: t[..., :-1]), r"layers\.1\.keys F32 "),
        ("gemma3", both(lambda t: t.repeat(2, 1, 1)), r"layers\.1\.keys F32 "),
        ("qwen3_5", swapped("layers.0.recurrent_states.0", lambda t: t[..., :1]), r"layers\.0\.recurrent_states\.0 "),
        ("qwen3_5", lambda tensors: tensors.pop("layers.0.conv_states.0"), "conv_states.0 missing"),
    ],
)
def test_states_of_another_form_are_refused(family, change, words, engine, result, tmp_path):
    """A manifest that claims this model does not make its tensors this model's: no kernel may ever read past them."""
    path = result(family).save(tmp_path / "a")
    resaved(path, lambda tensors: None)
    engine(family).resume(path)
    resaved(path, change)
    mmprefill.load(path)
    with pytest.raises(ArtefactError, match=words):
        engine(family).resume(path)


def test_a_prompt_beyond_the_context_is_refused(engine, saved, monkeypatch):
    """Nothing is allocated for it."""
    monkeypatch.setattr(type(engine("smolvlm").session.bundle), "context", 3)
    with pytest.raises(ArtefactError, match=r"\d+ tokens \(the model takes 3\)"):
        engine("smolvlm").resume(saved)


def test_a_file_cut_short_while_open_is_an_error(saved):
    """A memory map of it would kill the process."""
    artefact = mmprefill.load(saved)
    os.truncate(saved, 5000)
    with pytest.raises(ArtefactError, match="changed while open"):
        artefact.layer(0)


# Writing.


def test_saving_again_replaces_in_one_step(engine, result, saved):
    """A handle opened before still reads the old content, a new one the new; nothing else is left in the folder."""
    old = mmprefill.load(saved)
    expected = content(old)
    engine("smolvlm").prefill("Something else entirely").save(saved)
    assert content(old)[0] == expected[0] and same(content(old)[1], expected[1])
    assert mmprefill.load(saved).manifest.media == ()
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(call, saved, result, monkeypatch):
    """A full disk is the caller's OSError; the file that was there stays, the draft goes."""
    before = saved.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        result("qwen2_5_vl").save(saved)
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_only_regular_files_are_written(result, tmp_path):
    """A folder, a pipe or a link in the place of the file is refused and stays; a missing folder is an OSError."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path, words in (
        (tmp_path, "a directory"),
        (tmp_path / "pipe", "a pipe"),
        (tmp_path / "link", "a symbolic link"),
    ):
        with pytest.raises(ArtefactError, match=words):
            result("smolvlm").save(path)
    with pytest.raises(FileNotFoundError):
        result("smolvlm").save(tmp_path / "none" / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


def test_new_files_follow_the_umask(result, tmp_path):
    """A colleague may read the file if the umask lets them, as any other file."""
    (tmp_path / "plain").touch()
    path = result("smolvlm").save(tmp_path / "a")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_kill_during_writes(result, tmp_path):
    """Killed 20 times while it saves, now one result, now another: the name always holds one of the two, whole."""
    first = result("smolvlm")
    rows = len(first.token_ids)  # a few MB of hidden states, so that most of the time is writing
    results = [dataclasses.replace(first, hidden_states={1: torch.randn(rows, 20_000)}, id=name) for name in "ab"]
    path = tmp_path / "x"
    expected = {each.id: content(mmprefill.load(each.save(path))) for each in results}
    chance, drafts = random.Random(4), 0
    for _ in range(20):
        child = forked_saver(results, path)
        time.sleep(chance.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])  # it was still saving
        found = content(mmprefill.load(path))
        assert found[0] == expected[found[0].id][0]
        assert same(found[1], expected[found[0].id][1])
        left = [each for each in tmp_path.iterdir() if each != path]
        drafts += len(left)
        for each in left:
            each.unlink()
    assert drafts > 0  # some kills came in the middle of a write


def forked_saver(results, path):
    """A child process that saves until it is killed; returns when it has saved once."""
    before = path.stat().st_ino
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the engines' threads are idle, and the child needs none
        child = os.fork()
    if child == 0:
        try:
            for i in range(10_000):
                results[i % 2].save(path)
        finally:
            os._exit(1)
    while path.stat().st_ino == before:
        time.sleep(0.001)
    return child
