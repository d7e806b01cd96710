"""The files that a run reads its data from, as ``run.json`` lists them."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..checkpoint import run_directory

_MOST_FILES, _MOST_BYTES = 10_000, 16 * 2**30


def files_in(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The files of paths, and all in directories: those that can be read to their end.

    Each has a ``path``, its size in ``bytes``, and the time it was ``modified`` in nanoseconds.
    """
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else [path]:
            with contextlib.suppress(OSError):  # it has been removed meanwhile
                if file.is_file():
                    facts = file.stat()
                    yield {"path": str(file), "bytes": facts.st_size, "modified": facts.st_mtime_ns}


def hash_of(path: Path, stopped: threading.Event | None = None) -> str | None:
    """SHA-256 of a file; ``None`` if it cannot be read, or if ``stopped`` is set meanwhile."""
    digest = sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(2**20):
                if stopped is not None and stopped.is_set():
                    return None
                digest.update(chunk)
    except OSError:
        return None
    return digest.hexdigest()


class DataRecord:
    """Lists and hashes files in a thread, and then writes ``data`` into ``run.json``.

    Beyond the limits, and after a stop, ``sha256`` is ``None``; ``data_cut``: a file is left out.
    """

    def __init__(self, directory: Path, paths: Sequence[Path]) -> None:
        self._directory, self._paths, self._stopped = directory, paths, threading.Event()
        self._thread = threading.Thread(target=self._write, name="data record", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        records: list[dict[str, Any]] = []
        is_cut, left = False, _MOST_BYTES
        for record in files_in(self._paths):
            if is_cut := len(records) == _MOST_FILES or self._stopped.is_set():
                break
            records.append(record)
        for record in records:
            is_hashed = record["bytes"] <= left and not self._stopped.is_set()
            record["sha256"] = hash_of(Path(record["path"]), self._stopped) if is_hashed else None
            left -= record["bytes"] * is_hashed
        run_directory.extend_record(self._directory, {"data": records, "data_cut": is_cut})

    def end(self, *, wait: bool) -> None:
        """Return when it is written; without ``wait`` with the hashes that there are by now."""
        if not wait:
            self._stopped.set()
        self._thread.join()
