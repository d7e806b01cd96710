"""The files that a run reads its data from: their sizes and hashes, computed while it trains."""

import itertools
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from ..checkpoint import run_directory
from ..module import DataHooks, is_overridden

_MOST_FILES = 10_000
_MOST_BYTES = 16 * 2**30
_AT_ONCE = 2**20


def named(owners: Sequence[DataHooks], configuration: str | None, started_in: Path) -> list[Path]:
    """The files and directories that data modules and modules name.

    ``configuration``: as YAML; its paths count too, unless one of them overrides ``data_files``.
    """
    found: list[str | os.PathLike[str]] = [each for owner in owners for each in owner.data_files()]
    if configuration and not any(is_overridden(each, DataHooks, "data_files") for each in owners):
        section = yaml.safe_load(configuration).get("data") or {}
        given = (section.get("init_args") or {}).values()
        texts = [each for each in given if isinstance(each, str)]
        found += [each for each in texts if each and os.path.exists(started_in / each)]  # noqa: PTH110
    return [started_in / each for each in found]


def files_in(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The files of paths, and all in directories: those that can be read to their end.

    Each has a ``path``, its size in ``bytes``, the time it was ``modified`` in nanoseconds, and no
    ``sha256`` yet.
    """
    seen: set[Path] = set()
    for path in itertools.chain.from_iterable(map(_below, paths)):
        if path in seen:
            continue
        seen.add(path)
        try:
            facts = path.stat()
        except OSError:  # a broken link, or removed in the meantime
            continue
        if stat.S_ISREG(facts.st_mode):
            sizes = {"bytes": facts.st_size, "modified": facts.st_mtime_ns}
            yield {"path": str(path), **sizes, "sha256": None}


def _below(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
    for folder, folders, names in os.walk(path):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(names))


def hash_of(path: Path, stopped: threading.Event | None = None) -> str | None:
    """SHA-256 of a file; ``None`` if it cannot be read, or if ``stopped`` is set meanwhile."""
    digest = sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(_AT_ONCE):
                if stopped is not None and stopped.is_set():
                    return None
                digest.update(part)
    except OSError:
        return None
    return digest.hexdigest()


class DataRecord:
    """Lists and hashes files in a thread, and writes ``data`` into ``run.json``.

    At most 10,000 files; ``data_cut`` says whether there are more, or the run was stopped before.
    At most 16 GiB are hashed: files beyond that have only size and time.
    """

    def __init__(self, directory: Path, paths: Sequence[Path]) -> None:
        self._directory, self._paths = directory, paths
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._write, name="data record", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        files: list[dict[str, Any]] = []
        is_cut = False
        for each in files_in(self._paths):
            if is_cut := len(files) == _MOST_FILES or self._stopped.is_set():
                break
            files.append(each)
        run_directory.extend_record(self._directory, {"data": files, "data_cut": is_cut})
        left = _MOST_BYTES
        for each in files:
            if each["bytes"] <= left and not self._stopped.is_set():
                left -= each["bytes"]
                each["sha256"] = hash_of(Path(each["path"]), self._stopped)
        if files:
            run_directory.extend_record(self._directory, {"data": files})

    def end(self, *, wait: bool) -> None:
        """Return when all is written; without ``wait`` only of files that are hashed by now."""
        if not wait:
            self._stopped.set()
        self._thread.join()
