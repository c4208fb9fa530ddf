"""The fused kernel equals exact attention for every shape it says it serves, and its absence changes nothing else."""

import contextlib
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmprefill.encoders import fused_attention, kernels
from mmprefill.encoders.fused_attention import Rows
from mmprefill.pipeline import attention, calibrate
from mmprefill.pipeline.costs import Costs, Curve
from mmprefill.pipeline.kv_cache import LayerPlan, Piece, SequenceKV, StepCache

SHAPES = [(9, 3, 64, 64), (2, 1, 72, 80), (2, 2, 24, 16), (2, 1, 256, 256)]  # heads, groups, width, width of values
PARTS = [(1, 0), (7, 0), (50, 0), (600, 0), (33, 500), (5, 260)]  # rows, tokens before them


def exact(part, causal, window):
    shared = part.query.shape[0] // part.key.shape[0]
    key, value = (t.repeat_interleave(shared, 0).double() for t in (part.key, part.value))
    query_at = torch.arange(part.query.shape[1])[:, None] + part.first
    key_at = torch.arange(key.shape[1])[None]
    seen = torch.ones(part.query.shape[1], key.shape[1], dtype=torch.bool)
    if causal:
        seen &= key_at <= query_at
    if window:
        seen &= key_at > query_at - window
    scores = part.query.double() @ key.transpose(1, 2) * part.query.shape[-1] ** -0.5
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ value


def parts_of(shape, dtype, *, causal):
    heads, groups, width, value_width = shape
    draw = torch.Generator().manual_seed(0)
    for rows, done in PARTS:
        query = torch.randn(rows, heads, width, generator=draw).to(dtype).transpose(0, 1)
        key = torch.randn(rows + done, groups, width, generator=draw).to(dtype).transpose(0, 1)
        value = torch.randn(groups, rows + done, value_width, generator=draw).to(dtype)
        out = torch.full((rows, heads, value_width), math.nan, dtype=dtype).transpose(0, 1)
        if causal or not done:
            yield Rows(query, key, value, out, done)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 40), (True, 300)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_is_exact(shape, causal, window, dtype):
    """Many sequences in one call, grouped heads, odd sizes, windows, stored keys: as in double precision."""
    parts = list(parts_of(shape, dtype, causal=causal))
    if not fused_attention.serves(parts[0].query, parts[0].key, parts[0].value):
        pytest.skip("no kernel for this dtype on this machine")
    fused_attention.attend(parts, causal=causal, window=window)
    for part in parts:
        error = (part.out.double() - exact(part, causal, window)).abs().max()
        assert error <= (3e-6 if dtype == torch.float32 else 2e-2)


def test_large_scores_and_nan():
    """Scores of thousands neither overflow nor vanish; a NaN is not hidden."""
    query = torch.randn(1, 20, 16) * 100
    part = Rows(query, query, torch.randn(1, 20, 16), torch.empty(1, 20, 16))
    if not fused_attention.serves(part.query, part.key, part.value):
        pytest.skip("no kernel on this machine")
    fused_attention.attend([part], causal=True)
    assert (part.out.double() - exact(part, True, None)).abs().max() <= 1e-4
    part.value[0, 3, 0] = math.nan
    fused_attention.attend([part], causal=True)
    assert part.out[0, 3:, 0].isnan().all()
    query[0, 5] = math.nan
    fused_attention.attend([part], causal=True)
    assert part.out[0, 5].isnan().all()


def test_keys_that_nothing_looks_at():
    """Scores of -inf over a whole block of keys leave the maximum to what comes after them."""
    query, key, value = torch.ones(1, 20, 16), torch.full((1, 300, 16), -40.0), torch.randn(1, 300, 16)
    key[:, 290:] += torch.rand(1, 10, 16)
    key[:, :256] = -math.inf
    part = Rows(query, key, value, torch.empty(1, 20, 16))
    if not fused_attention.serves(part.query, part.key, part.value):
        pytest.skip("no kernel on this machine")
    fused_attention.attend([part], causal=False)
    assert (part.out.double() - exact(part, False, None)).abs().max() <= 1e-4


def test_what_it_does_not_serve():
    """Other dtypes, and pairs that would straddle rows."""
    assert not fused_attention.serves(*(torch.randn(2, 4, 16, dtype=torch.float64) for _ in range(3)))
    assert not fused_attention.serves(*(torch.randn(2, 4, 15).bfloat16() for _ in range(3)))
    assert not fused_attention.serves(*(torch.randn(2, 4, 16)[..., ::2] for _ in range(3)))


@pytest.mark.parametrize(
    ("key", "value"),
    [((2, 4, 8), (2, 4, 16)), ((3, 4, 16), (3, 4, 16)), ((0, 4, 16), (0, 4, 16)), ((2, 4, 16), (1, 4, 16)),
     ((2, 4, 16), (2, 3, 16))],
)  # fmt: skip
def test_shapes_that_do_not_belong_together(key, value):
    """Widths, head counts or rows that disagree: the kernel would read past the end."""
    assert not fused_attention.serves(torch.randn(4, 4, 16), torch.randn(key), torch.randn(value))


@pytest.mark.parametrize(
    "other",
    [lambda t: t.bfloat16(), lambda t: t[..., :8], lambda t: t[:, :1], lambda t: t[:, :, :20], lambda t: t[:, :0]],
    ids=["dtype", "width", "heads", "rows", "no heads"],
)
def test_stored_keys_that_differ_never_reach_the_kernel(other, monkeypatch):
    """This step's keys are as they should be, those stored before it are not: an error or plain attention, no kernel."""
    keys, values = (other(torch.randn(1, 2, 40, 16)).contiguous() for _ in range(2))
    kv = SequenceKV(40, 24, layers={0: (keys, values)})
    step = StepCache([Piece(0, 16, kv)], LayerPlan(("full_attention",), direct=True))
    called = []
    monkeypatch.setattr(fused_attention, "attend", lambda *a, **b: called.append(a))
    query, key, value = torch.randn(1, 4, 16, 16), torch.randn(1, 2, 16, 16), torch.randn(1, 2, 16, 16)
    with contextlib.suppress(RuntimeError, ZeroDivisionError):
        attention.ragged_attention(step, SimpleNamespace(layer_idx=0), query, key, value)
    assert not called


def test_without_a_compiler_there_is_no_kernel(monkeypatch, tmp_path, caplog):
    """No compiler, one that fails, one that is not there: a line in the log."""
    if not kernels.served():
        pytest.skip("no kernels for this processor")
    monkeypatch.setenv("MMPREFILL_KERNELS", str(tmp_path))
    for compiler in ("/nonexistent", "false"):
        monkeypatch.setenv("CXX", compiler)
        caplog.clear()
        assert kernels._library.__wrapped__() is None
        assert [record.name for record in caplog.records] == ["mmprefill"]
    assert not list(tmp_path.rglob("*.so"))


@pytest.fixture
def one_compiled(monkeypatch, tmp_path):
    """The path of a library just compiled, by a compiler of two words, of an empty source: quick."""
    if not kernels.served() or not shutil.which("g++"):
        pytest.skip("no kernels on this machine")
    source, folder = tmp_path / "kernels.cpp", tmp_path / "kept"
    source.write_text("")
    monkeypatch.setattr(kernels, "SOURCE", source)
    monkeypatch.setattr(kernels, "TAKES", {})
    monkeypatch.setenv("CXX", "env g++")
    monkeypatch.setenv("MMPREFILL_KERNELS", str(folder))
    assert kernels._library.__wrapped__() is not None
    (library,) = folder.glob("*.so")
    return library


def test_a_damaged_library_is_compiled_again(one_compiled, monkeypatch, tmp_path):
    folder = tmp_path / "another"  # what is loaded already is not read again
    damaged = folder / one_compiled.name
    folder.mkdir(mode=0o700)
    damaged.write_bytes(bytes(64))
    damaged.chmod(0o600)
    monkeypatch.setenv("MMPREFILL_KERNELS", str(folder))
    assert kernels._library.__wrapped__() is not None
    assert damaged.stat().st_size > 64


def test_a_library_that_others_could_have_written_is_not_loaded(one_compiled, monkeypatch, caplog):
    for path in (one_compiled, one_compiled.parent):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        assert kernels._library.__wrapped__() is None
        path.chmod(mode)
    assert "may write" in caplog.text
    assert kernels._library.__wrapped__() is not None
    monkeypatch.setattr(kernels.os, "getuid", lambda: one_compiled.stat().st_uid + 1)
    assert kernels._library.__wrapped__() is None


def test_a_library_that_lacks_a_function_is_none(one_compiled, monkeypatch, caplog):
    """An engine opens nevertheless."""
    monkeypatch.setattr(kernels, "TAKES", {"attend": ()})
    assert kernels._library.__wrapped__() is None
    assert "attend_float" in caplog.text


def test_a_user_without_a_home(monkeypatch):
    """Nothing is kept, nothing fails."""

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("MMPREFILL_KERNELS")
    assert kernels._library.__wrapped__() is None
    path = calibrate.cache_path({})
    assert calibrate.read(path, {}) is None
    calibrate.write(path, {}, Costs(Curve(((16, 0.1), (64, 0.2))), Curve(((100, 1.0), (200, 2.0)))))
    assert not path.exists()
