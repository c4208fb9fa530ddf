"""Inputs of batch jobs, and what came out of them."""

import json

import pytest
import torch

NEAR = {"rtol": 1e-4, "atol": 1e-4}


def simple(count):
    return [{"id": f"r{i}", "prompt": f"what is {i % 3}", "images": [f"p{i % 4}.png"]} for i in range(count)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def records(out):
    """The whole table, by whatever format."""
    found = []
    for file in sorted((out / "rows").iterdir()):
        if file.suffix == ".parquet":
            import pyarrow.parquet

            found += pyarrow.parquet.read_table(file).to_pylist()
        else:
            found += [json.loads(line) for line in file.read_text().splitlines()]
    return found


def failures(out):
    return [json.loads(line) for line in (out / "errors.jsonl").read_text().splitlines()]


def same_cache(mine, theirs):
    for a, b in zip(mine.layers, theirs.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, **NEAR)
        torch.testing.assert_close(a.values, b.values, **NEAR)


def same(mine, theirs):
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == (pytest.approx(b[name], abs=1e-4) if name in ("top_logprobs", "scores") else b[name])
    return True


def files(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
