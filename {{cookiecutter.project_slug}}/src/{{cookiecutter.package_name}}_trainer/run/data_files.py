"""The files that a run reads its data from: their sizes and hashes, computed while it trains."""

import os
import stat
import threading
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from ..checkpoint import run_directory
from ..module import DataHooks, is_overridden

_MOST_FILES = 10_000
_MOST_BYTES = 16 * 2**30
_AT_ONCE = 2**20


def list_files(
    owners: Sequence[DataHooks], configuration: str | None, started_in: Path
) -> tuple[list[dict[str, Any]], bool]:
    """The files that data modules and modules name, and whether there are more than 10,000.

    ``configuration``: as YAML; its paths count too, unless the data module names its files. Each
    file has a ``path``, its size in ``bytes``, the time it was ``modified`` in nanoseconds, and no
    ``sha256`` yet. Of a directory, all files in it.
    """
    found: dict[Path, dict[str, Any]] = {}
    named = [Path(each) for owner in owners for each in owner.data_files()]
    if not any(is_overridden(each, DataHooks, "data_files") for each in owners):
        named += _configured(configuration, started_in)
    for given in named:
        for path in _below(started_in / given):
            if len(found) == _MOST_FILES:
                return list(found.values()), True
            try:
                facts = path.stat()
            except OSError:  # a broken link, or removed in the meantime
                continue
            if not stat.S_ISREG(facts.st_mode):
                continue
            sizes = {"bytes": facts.st_size, "modified": facts.st_mtime_ns}
            found[path] = {"path": str(path), **sizes, "sha256": None}
    return list(found.values()), False


def _configured(configuration: str | None, started_in: Path) -> list[Path]:
    """The paths among the arguments of the data module in a configuration."""
    section = (yaml.safe_load(configuration) if configuration else {}).get("data") or {}
    given = (section.get("init_args") or {}).values()
    texts = [each for each in given if isinstance(each, str) and each]
    return [Path(each) for each in texts if os.path.exists(started_in / each)]  # noqa: PTH110


def _below(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
    for folder, folders, names in os.walk(path) if path.is_dir() else ():
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


class Hashing:
    """Hashes files in a thread, and writes the hashes into ``run.json``.

    At most 16 GiB: files beyond that have no hash, only size and time.
    """

    def __init__(self, directory: Path, files: list[dict[str, Any]]) -> None:
        self._directory, self._files = directory, files
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._hash, name="data hashes", daemon=True)
        self._thread.start()

    def _hash(self) -> None:
        left = _MOST_BYTES
        for each in self._files:
            if each["bytes"] <= left and not self._stopped.is_set():
                left -= each["bytes"]
                each["sha256"] = hash_of(Path(each["path"]), self._stopped)
        if self._files:
            run_directory.extend_record(self._directory, {"data": self._files})

    def end(self, *, wait: bool) -> None:
        """Return when the hashes are written; without ``wait`` only of files that are hashed."""
        if not wait:
            self._stopped.set()
        self._thread.join()
