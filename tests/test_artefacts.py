"""`mmprefill kv`: what stored KV is, whether it is whole, how two files differ."""

import json

import checkpoints
import pytest

from mmprefill.cli import main
from mmprefill.pipeline.kv_read import load
from mmprefill.prefiller import Prefiller


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Artefacts of two requests, and of the first one again."""
    folder = tmp_path_factory.mktemp("stored")
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached("smolvlm")) as prefiller:
        for name, prompt in (("a", "what"), ("b", "who is it"), ("c", "what")):
            result = prefiller.prefill(
                prompt, images=[checkpoints.picture(1)], id=name, reuse=False, hidden_states=(0,)
            )
            result.save(folder / f"{name}.kv.safetensors")
    return folder


def run(capsys, *arguments):
    code = main(["kv", *map(str, arguments)])
    return code, capsys.readouterr()


def damage(path, target):
    """A copy with its last byte changed."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    target.write_bytes(data)


def test_show(capsys, stored):
    """Request, tokens, media, layers and model, for people and for programs."""
    code, out = run(capsys, "show", stored / "a.kv.safetensors", "--json")
    about = json.loads(out.out)
    assert (code, about["id"], about["model_type"], about["hidden_layers"]) == (0, "a", "smolvlm", [0])
    assert about["media"] == [{"medium": "image", "size": [48, 64], "frames": 1}]
    assert sum(about["layers"].values()) > 0
    code, out = run(capsys, "show", stored)
    for word in ("request 'a'", "request 'b'", "image 64 x 48", "full_attention", "float32"):
        assert word in out.out


def test_verify(capsys, stored, tmp_path):
    """Every file of a folder is read; damaged, cut and foreign ones are named, and show in the exit code."""
    assert run(capsys, "verify", stored)[0] == 0
    damage(stored / "a.kv.safetensors", tmp_path / "bad.kv.safetensors")
    (tmp_path / "cut.kv.safetensors").write_bytes((stored / "a.kv.safetensors").read_bytes()[:-1])
    (tmp_path / "else.kv.safetensors").write_bytes(b"PK nothing")
    (tmp_path / "good.kv.safetensors").write_bytes((stored / "b.kv.safetensors").read_bytes())
    code, out = run(capsys, "verify", tmp_path, "--json")
    told = json.loads(out.out)
    assert (code, told["files"], len(told["damaged"])) == (1, 4, 3)
    assert "checksum" in told["damaged"][str(tmp_path / "bad.kv.safetensors")]
    code, out = run(capsys, "verify", tmp_path)
    assert "4 files, 4 requests, 3 damaged" in out.out


def test_diff(capsys, stored):
    """The same request is equal; another differs in tokens and shapes, by name."""
    a, b, c = (stored / f"{name}.kv.safetensors" for name in "abc")
    assert run(capsys, "diff", a, a)[0] == 0
    code, out = run(capsys, "diff", a, c, "--tolerance", "1e-4")
    assert (code, out.out.strip()) == (0, "equal within 0.0001")
    code, out = run(capsys, "diff", a, b)
    assert code == 1
    assert "tokens differ from position" in out.out
    assert "layers.0.keys: shapes" in out.out
    code, out = run(capsys, "diff", a, b, "--json")
    assert "next_token_logits" in json.loads(out.out)["tensors"]


def test_mistakes(capsys, stored, tmp_path):
    """A damaged file is never compared or shown as if it were whole; what is not there is named."""
    damage(stored / "a.kv.safetensors", tmp_path / "bad.kv.safetensors")
    for arguments, said in (
        (["diff", stored / "a.kv.safetensors", tmp_path / "bad.kv.safetensors"], "checksum"),
        (["show", checkpoints.cached("smolvlm")], "no .kv.safetensors file"),
    ):
        code, out = run(capsys, *arguments)
        assert code == 2
        assert said in out.err


def test_show_goes_on_after_a_damaged_file(capsys, stored, tmp_path):
    """What is whole is shown, what is not is named, and the exit code says so."""
    (tmp_path / "a.kv.safetensors").write_bytes((stored / "a.kv.safetensors").read_bytes()[:-1])
    (tmp_path / "b.kv.safetensors").write_bytes((stored / "b.kv.safetensors").read_bytes())
    code, out = run(capsys, "show", tmp_path, stored / "nothing.kv.safetensors")
    assert code == 1
    assert "request 'b'" in out.out
    assert "a.kv.safetensors: " in out.err
    assert "nothing.kv.safetensors: " in out.err
    code, out = run(capsys, "show", tmp_path, "--json")
    told = [json.loads(line) for line in out.out.splitlines()]
    assert (code, [each.get("id") for each in told]) == (1, [None, "b"])
    assert "a.kv.safetensors" in told[0]["damaged"]


def test_headers_of_every_length(tmp_path):
    """A length whose first bytes are those of a pickle or an archive is a length like any other."""
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached("smolvlm")) as prefiller:
        result = prefiller.prefill("what")
    first = set()
    for extra in range(0, 256, 8):
        result.id = "x" * (1 + extra)
        path = result.save(tmp_path / "a.kv.safetensors")
        first.add(path.read_bytes()[0])
        assert load(path).manifest.id == result.id
    assert 0x80 in first
