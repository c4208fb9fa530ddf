"""What a job's folder knows: how it was made, which rows are done, and nothing that is half written.

    manifest.json                       how it was made; at the end also the counts
    rows/part-00000256.jsonl            the table, a file per part, named by its first row
    tensors/part-00000256-000.safetensors, kv/part-00000256-000-000.kv.safetensors
    state/part-00000256.json            written last: a part is done when this is there and its files are as it says
    errors.jsonl                        rows that failed; made of the state files

Everything else in the four folders is left from a run that was killed, and removed by the next one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmprefill.errors import JobError
from mmprefill.files import sync_folder, write_atomically
from mmprefill.job_settings import differences

FORMAT = 1
OURS = re.compile(r"part-(\d+)|\.mmprefill-")  # how the names of our files begin
FOLDERS = ("rows", "tensors", "kv", "state")


def write_whole(path: Path, data: bytes) -> None:
    """`write_atomically`, with the folders that it takes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [data])


@dataclass(frozen=True, slots=True)
class Done:
    """What is kept in memory of a part that is done: however many there are, it is little.

    Attributes:
        start: its first row, counted among the rows of this job.
        stop: the row after its last.
        digest: of its rows, hex.
        failed: rows that failed.
    """

    start: int
    stop: int
    digest: str
    failed: int


@dataclass(frozen=True)
class Commit:
    """A part that is done, as its state file has it.

    Attributes:
        start: its first row, counted among the rows of this job.
        stop: the row after its last.
        digest: of its rows, hex.
        files: path in the folder -> [bytes, CRC of tables or None].
        errors: a record per failed row.
    """

    start: int
    stop: int
    digest: str
    files: dict[str, list[int | None]]
    errors: list[dict[str, Any]]

    @property
    def mark(self) -> Done:
        """What is kept of it."""
        return Done(self.start, self.stop, self.digest, len(self.errors))

    @property
    def table(self) -> str:
        """The file of its rows."""
        return next(name for name in self.files if name.startswith("rows/"))

    @property
    def groups(self) -> int:
        """A number above that of every group whose files it has."""
        numbers = (re.match(r"(?:kv|tensors)/part-\d+-(\d+)", name) for name in self.files)
        return max((int(found[1]) + 1 for found in numbers if found), default=0)


def part_name(start: int) -> str:
    """The name under which the files of a part go."""
    return f"part-{start:08d}"


def read_commit(folder: Path, start: int) -> Commit:
    """All that is known of a part that is done."""
    return Commit(**_json(_state(folder, start)))


def _state(folder: Path, start: int) -> Path:
    return folder / "state" / f"{part_name(start)}.json"


class JobFolder:
    """The output folder, held by one job at a time.

    Args:
        path: the folder; made if it is not there.
        about: how the output is made: "settings" and "model" must be as before.

    Raises:
        JobError: if it is held by another job, is something else, or was begun with other settings or another model.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(path)
        self._last: Commit | None = None
        try:
            self.about = self._manifest(json.loads(json.dumps(about)))
            self.commits = sorted(self._commits(), key=lambda each: each.start)
            self.clear()
        except BaseException:
            os.close(self._lock)
            raise

    def _manifest(self, about: dict[str, Any]) -> dict[str, Any]:
        file = self.path / "manifest.json"
        if not file.exists():
            strangers = [each.name for each in self.path.iterdir() if not each.name.startswith(".")]
            if strangers:
                raise JobError(
                    f"{self.path} is no folder of a batch job: it holds {sorted(strangers)[0]!r}; use another"
                )
            made = json.dumps([about["model"], about["settings"]], sort_keys=True)
            fingerprint = hashlib.sha256(made.encode()).hexdigest()
            about = {
                "kind": "mmprefill batch",
                "format": FORMAT,
                "fingerprint": fingerprint,
                **about,
                "complete": False,
            }
            write_whole(file, json.dumps(about, indent=1).encode())
            return about
        found = _json(file)
        if not isinstance(found, dict) or found.get("kind") != "mmprefill batch" or found.get("format") != FORMAT:
            raise JobError(f"{file} is not the manifest of a batch job of this version; use another folder")
        changed = [
            each for name in ("model", "settings") for each in differences(found.get(name, {}), about.get(name, {}))
        ]
        if changed:
            raise JobError(f"{self.path} was begun differently: {'; '.join(changed)}. Use another folder, or go back")
        return found

    def _commits(self) -> Iterator[Done]:
        for file in sorted((self.path / "state").glob("part-*.json")):
            found = _json(file)
            try:
                commit = Commit(**found)
                mark, whole = commit.mark, file == self._state(commit.start)
                whole = whole and all(self._as_written(name, *facts) for name, facts in commit.files.items())
            except (TypeError, ValueError, AttributeError):
                continue
            if whole:
                yield mark

    def _as_written(self, name: str, size: int | None, crc: int | None) -> bool:
        file = self.path / name
        if not file.is_file() or file.stat().st_size != size:
            return False
        return crc is None or zlib.crc32(file.read_bytes()) == crc

    def of(self, done: Done) -> Commit:
        """All that is known of a part; the last one is kept, as whoever asks goes through them in order."""
        if self._last is None or self._last.start != done.start:
            self._last = read_commit(self.path, done.start)
        return self._last

    def _state(self, start: int) -> Path:
        return _state(self.path, start)

    def clear(self) -> None:
        """Remove what no finished part owns; only in folders that are ours."""
        parts = {done.start: done for done in self.commits}
        for folder in FOLDERS:
            for file in sorted((self.path / folder).rglob("*"), reverse=True):
                if file.is_dir():
                    if not any(file.iterdir()):
                        file.rmdir()
                elif (ours := OURS.match(file.name)) and not self._owned(file, parts.get(int(ours[1] or -1))):
                    file.unlink()
        for draft in self.path.glob(".mmprefill-*.tmp"):
            draft.unlink()

    def _owned(self, file: Path, part: Done | None) -> bool:
        """Whether a file belongs to the part that its name says."""
        return part is not None and (
            file == self._state(part.start) or file.relative_to(self.path).as_posix() in self.of(part).files
        )

    def amend(self, before: Commit, files: Seq[Path], errors: list[dict[str, Any]]) -> None:
        """Declare that rows of a part which had failed were done again; `files` has its table and what is new."""
        self.commits.remove(before.mark)
        kept = [self.path / name for name in before.files if not name.startswith("rows/")]
        self.commit(before.start, before.stop, before.digest, [*files, *kept], errors)

    def commit(self, start: int, stop: int, digest: str, files: Seq[Path], errors: list[dict[str, Any]]) -> None:
        """Declare a part done; its files are on disk."""
        sizes: dict[str, list[int | None]] = {}
        for file in files:
            name = file.relative_to(self.path).as_posix()
            crc = zlib.crc32(file.read_bytes()) if name.startswith("rows/") else None
            sizes[name] = [file.stat().st_size, crc]
        commit = Commit(start, stop, digest, sizes, errors)
        sync_folder(self.path)  # the folders that the files lie in
        write_whole(self._state(start), json.dumps(asdict(commit)).encode())
        self._last = commit
        self.commits.append(commit.mark)

    @property
    def failed(self) -> int:
        """Rows of finished parts that failed."""
        return sum(done.failed for done in self.commits)

    @property
    def nbytes(self) -> int:
        """Bytes of everything in the folder."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def finish(self, *, complete: bool) -> None:
        """Bring the manifest up to date."""
        parts = sorted(self.commits, key=lambda each: each.start)
        rows, failed = sum(p.stop - p.start for p in parts), self.failed
        tables = [self.of(part).table for part in parts]
        self.about |= {"complete": complete, "rows": rows, "ok": rows - failed, "failed": failed, "tables": tables}
        write_whole(self.path / "manifest.json", json.dumps(self.about, indent=1).encode())

    def close(self) -> None:
        """Let another job have the folder."""
        os.close(self._lock)


def _locked(path: Path) -> int:
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, however it ends
    except OSError as error:
        os.close(lock)
        raise JobError(f"{path}: another job is writing to it") from error
    return lock


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except ValueError:
        return None
