"""What `mmprefill kv` says of stored KV: what is in a file, whether it is whole, and how two differ. Loads no model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from torch import Tensor

from mmprefill.errors import ArtefactError
from mmprefill.pipeline.kv_file import MARK
from mmprefill.pipeline.kv_read import Artefact, Shard, load_all
from mmprefill.report import human_bytes

SUFFIX = ".kv.safetensors"


def files_of(paths: Seq[Path]) -> Iterator[Path]:
    """Files as they are, folders as the artefacts in them.

    Raises:
        ValueError: for a folder without any.
    """
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = sorted(path.rglob(f"*{SUFFIX}"))
        if not found:
            raise ValueError(f"{path}: no {SUFFIX} file in it")
        yield from found


def summary(artefact: Artefact) -> dict[str, Any]:
    """What an artefact says about itself, ready for JSON."""
    manifest = artefact.manifest
    identity = manifest.identity
    kinds = [layer.kind for layer in identity.layers]
    return {
        "file": artefact.place,
        "id": manifest.id,
        "model": manifest.model,
        "revision": manifest.revision,
        "model_type": identity.model_type,
        "dtype": identity.dtype,
        "compatibility": manifest.compatibility,
        "tokens": manifest.length,
        "next_position": manifest.positions.next,
        "attention": manifest.attention,
        "media": [{"medium": m.medium, "size": list(m.size), "frames": m.frames} for m in manifest.media],
        "layers": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "hidden_layers": list(manifest.hidden_layers),
        "bytes": artefact.nbytes,
        "producer": manifest.producer,
    }


def show(paths: Seq[Path], *, as_json: bool) -> int:
    """Print the summaries, and in their place what is wrong with those that have none; 1 if there are such."""
    damaged = 0
    for place, found in _requests(paths):
        if isinstance(found, ArtefactError):
            damaged += 1
            if as_json:
                print(json.dumps({"file": place, "damaged": str(found)}))
            else:
                print(f"mmprefill: {found}", file=sys.stderr)
        elif as_json:
            print(json.dumps(summary(found)))
        else:
            print("\n".join(_summary_lines(summary(found))))
    return 1 if damaged else 0


def _summary_lines(about: Mapping[str, Any]) -> Iterator[str]:
    media = ", ".join(f"{m['medium']} {m['size'][1]} x {m['size'][0]}" for m in about["media"]) or "no media"
    layers = ", ".join(f"{count} x {kind}" for kind, count in about["layers"].items())
    size = human_bytes(about["bytes"])
    yield f"{about['file']}: request {about['id']!r}, {about['tokens']} tokens, {media}, {size}"
    yield f"  {about['model']} ({about['model_type']}, {about['dtype']}): {layers}; attention {about['attention']}"
    yield f"  compatibility {about['compatibility']}; written by mmprefill {about['producer'].get('mmprefill')}"


def verify(paths: Seq[Path], *, as_json: bool) -> int:
    """Read every tensor of every file against its checksum; 1 if one is damaged."""
    bad: dict[str, str] = {}
    files, requests = list(files_of(paths)), 0
    for requests, (place, found) in enumerate(_requests(files), 1):  # noqa: B007
        error = found if isinstance(found, ArtefactError) else _fault(found)
        if error is not None:
            bad[place] = str(error)
    if as_json:
        print(json.dumps({"files": len(files), "requests": requests, "damaged": bad}))
    else:
        print("\n".join([*bad.values(), f"{len(files)} files, {requests} requests, {len(bad)} damaged"]))
    return 1 if bad else 0


def _requests(paths: Seq[Path]) -> Iterator[tuple[str, Artefact | ArtefactError]]:
    """Every request by its place, or why it cannot be read; one that is damaged hides no other."""
    for path in files_of(paths):
        try:
            held = load_all(path)
        except ArtefactError as error:
            yield str(path), error
            continue
        for number in range(len(held)):
            yield f"{path}{MARK}{number}" if len(held) > 1 else str(path), _opened(held, number)


def _opened(held: Seq[Artefact] | Shard, number: int) -> Artefact | ArtefactError:
    try:
        return held[number]
    except ArtefactError as error:
        return error


def _fault(artefact: Artefact) -> ArtefactError | None:
    try:
        artefact.verify()
    except ArtefactError as error:
        return error
    return None


def differences(mine: Artefact, theirs: Artefact) -> dict[str, Any]:
    """How two artefacts differ: in words for what they are of, in numbers for each tensor that is not equal."""
    a, b = mine.manifest, theirs.manifest
    words = a.identity.differences(b.identity)
    if a.token_ids != b.token_ids:
        same = next(
            (i for i, pair in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if pair[0] != pair[1]), None
        )
        where = min(a.length, b.length) if same is None else same
        words.append(f"tokens differ from position {where} on ({a.length} and {b.length} tokens)")
    if [m.digest for m in a.media] != [m.digest for m in b.media]:
        words.append("the media are not the same")
    tensors: dict[str, Any] = {}
    for name in dict.fromkeys((*a.tensors, *b.tensors)):
        if name not in a.tensors or name not in b.tensors:
            tensors[name] = "only in the " + ("first" if name in a.tensors else "second")
        elif a.tensors[name].shape != b.tensors[name].shape:
            tensors[name] = f"shapes {list(a.tensors[name].shape)} and {list(b.tensors[name].shape)}"
        else:
            most = _most(mine.tensor(name), theirs.tensor(name))
            if most:
                tensors[name] = most
    return {"what": words, "tensors": tensors}


def _most(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference; NaN where only one of the two is NaN."""
    if not mine.numel():
        return 0.0
    apart = (mine.double() - theirs.double()).abs()
    return float(apart.where(~(mine.isnan() & theirs.isnan()), 0.0).max())


def diff(first: Path, second: Path, *, tolerance: float, as_json: bool) -> int:
    """Print how two files differ, request by request of the same id; 1 if they do by more than the tolerance."""
    mine, theirs = load_all(first), load_all(second)
    if len(mine) == len(theirs) == 1:
        found = {"": differences(mine[0], theirs[0])}
    else:
        named, others = _by_id(mine), _by_id(theirs)
        found = {id: differences(named[id], others[id]) for id in named if id in others}
        gone = {id: "first" if id in named else "second" for id in (named.keys() ^ others.keys())}
        found |= {id: {"what": [f"only in the {where}"], "tensors": {}} for id, where in sorted(gone.items())}
    lines = [f"{id}: {line}" if id else line for id, each in found.items() for line in _lines(each, tolerance)]
    if as_json:
        print(json.dumps(found if found.keys() != {""} else found[""]))
    else:
        print("\n".join(lines) or f"equal within {tolerance:g}")
    return 1 if lines else 0


def _by_id(artefacts: Seq[Artefact] | Shard) -> dict[str, Artefact]:
    found: dict[str, Artefact] = {}
    for artefact in artefacts:
        id, times = artefact.manifest.id, 1
        while (name := id if times == 1 else f"{id} ({times})") in found:  # ids need not be unique
            times += 1
        found[name] = artefact
    return found


def _lines(found: dict[str, Any], tolerance: float) -> list[str]:
    apart = {name: by for name, by in found["tensors"].items() if isinstance(by, str) or not by <= tolerance}
    words = [f"{name}: {by if isinstance(by, str) else f'differs by up to {by:.2g}'}" for name, by in apart.items()]
    return [*found["what"], *words]
