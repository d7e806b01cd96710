"""Upload the checkpoints of a run to a store, such as S3."""

import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from ..checkpoint import BEST, DIRECTORY, complete, copy_linked, run_directory, step_of
from ..checkpoint.state_file import FILE
from ..errors import ConfigurationError, one_line
from ..module import Run, TrainingModule
from ..options import redaction
from .base import Callback

T = TypeVar("T")
_RECORDS = ("*.yaml", "*.json", "*.csv")


class UploadCheckpoints(Callback):
    """Upload the newest checkpoint and those of ``BestCheckpoint`` while training continues.

    A thread of rank 0 looks for new checkpoints every ``every_n_seconds``, and at the end of the
    fit. ``url/RUN`` then has the checkpoints, the configuration without its secrets, and the CSV
    files of the run directory ``RUN``, which rank 0 must see as a whole: a download of it can be
    resumed. What the run directory no longer has is removed there. A checkpoint is complete there
    when its ``state.json``, the last file, is.

    An upload that fails is tried again; if that fails too, one line says so, training continues,
    and the next checkpoint is tried. Nothing is uploaded if a new run finds checkpoints of another
    run of this name.

    Args:
        url: A folder, by its path or an address of fsspec: ``"s3://bucket/runs"`` (with s3fs
            installed), ``"gs://…"``, ``"file:///…"``. Credentials come from the environment.
        every_n_seconds: Seconds between two looks.
        attempts: Attempts to upload a file, with pauses of 1, 2, 4, … seconds between them.
        timeout_seconds: How long the end of the fit waits for the last upload.

    Raises:
        ConfigurationError: An argument is out of range, the URL names no folder, or fsspec has no
            file system for it.

    Source: https://filesystem-spec.readthedocs.io
    """

    def __init__(
        self,
        url: str,
        every_n_seconds: float = 60.0,
        attempts: int = 5,
        timeout_seconds: float = 600.0,
    ) -> None:
        import fsspec  # in no run that does not use it

        problems = [
            f"UploadCheckpoints: {name}={value!r}: give a number above 0"
            for name, value in (
                ("every_n_seconds", every_n_seconds),
                ("timeout_seconds", timeout_seconds),
            )
            if not 0 < value < threading.TIMEOUT_MAX
        ]
        if attempts < 1:
            problems.append(f"UploadCheckpoints: attempts={attempts!r}: give at least 1")
        try:
            _check_url(url)
            fsspec.get_filesystem_class(fsspec.utils.get_protocol(url))
        except (ImportError, ValueError) as error:
            problems.append(f"UploadCheckpoints: url={redaction.message(url)!r}: {one_line(error)}")
        if problems:
            raise ConfigurationError(problems)
        self.url, self.every_n_seconds = url, every_n_seconds
        self.attempts, self.timeout_seconds = attempts, timeout_seconds
        self._thread: _Uploader | None = None

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        self._thread = None
        if trainer.is_global_zero:
            store = _Store(f"{self.url.rstrip('/')}/{trainer.run_directory.name}", self.attempts)
            self._thread = _Uploader(trainer.run_directory, store, self.every_n_seconds)
            self._thread.start()

    def on_fit_end(self, trainer: Run, module: TrainingModule) -> None:
        trainer.save_checkpoint(lambda _: self._end())  # when the last one is complete

    def on_exception(self, trainer: Run, module: TrainingModule, error: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        if self._thread is not None and not self._thread.end(self.timeout_seconds):
            _warn(f"the last upload is not complete after {self.timeout_seconds:g} s")
        self._thread = None


class _Store:
    """A folder of a file system of fsspec, which is connected to when it is first used.

    Args:
        url: The folder.
        attempts: Attempts for each operation.
    """

    def __init__(self, url: str, attempts: int) -> None:
        self.url = url
        self._attempts = attempts

    def put(self, file: Path, name: str) -> None:
        """Upload a file; on a local file system with its permissions, YAML without secrets."""
        from fsspec.implementations.local import LocalFileSystem

        def put(system: Any, root: str) -> None:
            system.makedirs(str(PurePosixPath(root, name).parent), exist_ok=True)
            if isinstance(system, LocalFileSystem):
                Path(root, name).touch(stat.S_IMODE(file.stat().st_mode))
            if file.suffix == ".yaml":
                system.pipe_file(f"{root}/{name}", redaction.document(file.read_text()).encode())
            else:
                system.put_file(str(file), f"{root}/{name}")

        self._try(put)

    def checkpoints(self, folder: str) -> list[str]:
        """Names of the checkpoints in a folder, complete or not."""

        def names(system: Any, root: str) -> list[str]:
            system.invalidate_cache()
            if not system.isdir(f"{root}/{folder}"):
                return []
            found = (PurePosixPath(each).name for each in system.ls(f"{root}/{folder}", False))
            return [f"{folder}/{name}" for name in found if step_of(Path(name)) >= 0]

        return self._try(names)

    def remove(self, name: str) -> None:
        """Remove a folder."""
        self._try(lambda system, root: system.rm(f"{root}/{name}", recursive=True))

    def _try(self, action: Callable[[Any, str], T]) -> T:
        import fsspec

        for attempt in range(self._attempts):
            if attempt:
                time.sleep(2 ** (attempt - 1))
            try:
                return action(*fsspec.url_to_fs(self.url))
            except Exception as error:  # a file system may raise anything
                failure = error
        raise failure


class _Uploader(threading.Thread):
    """Uploads what is new, until it is ended.

    Args:
        run: The run directory.
        store: Its counterpart.
        every_n_seconds: Seconds between two looks.
    """

    def __init__(self, run: Path, store: _Store, every_n_seconds: float) -> None:
        super().__init__(name="upload-checkpoints", daemon=True)
        self._run, self._store, self._every_n_seconds = run, store, every_n_seconds
        # Of a run of this name that is not in this directory.
        is_known = complete(run / DIRECTORY) or (run / run_directory.OVERWRITTEN).exists()
        self._may_be_others = not is_known
        self._ended = threading.Event()
        self._uploaded: set[str] = set()
        self._has_warned = False

    def run(self) -> None:
        while not self._ended.wait(self._every_n_seconds):
            self._upload()
        self._upload()

    def end(self, timeout: float) -> bool:
        """Upload what is new now; return whether this is done in time."""
        self._ended.set()
        self.join(timeout)
        return not self.is_alive()

    def _upload(self) -> None:
        try:
            self._upload_new()
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                line = (
                    f"{self._store.url}: cannot be uploaded to ({type(error).__name__}: "
                    f"{one_line(error)}); training continues, and later checkpoints are tried"
                )
                _warn(redaction.message(line))

    def _upload_new(self) -> None:
        folders = (DIRECTORY, f"{DIRECTORY}/{BEST}")
        if self._may_be_others and any(self._store.checkpoints(each) for each in folders):
            raise FileExistsError("it has checkpoints of another run; choose another run_name")
        newest = complete(self._run / DIRECTORY)[-1:]
        if not newest:
            return
        self._may_be_others = False
        best = complete(self._run / DIRECTORY / BEST)
        for pattern in _RECORDS:  # first: they must have the rows of the steps before a checkpoint
            for file in self._run.glob(pattern):
                self._store.put(file, file.name)
        for checkpoint in [*newest, *best]:
            self._upload_checkpoint(checkpoint)
        for folder in folders:
            kept = {f"{folder}/{each.name}" for each in complete(self._run / folder)}
            for name in self._store.checkpoints(folder):
                if name not in kept:
                    self._store.remove(name)

    def _upload_checkpoint(self, checkpoint: Path) -> None:
        name = checkpoint.relative_to(self._run).as_posix()
        if name in self._uploaded:
            return
        folder = self._run / DIRECTORY / ".upload"
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        folder.mkdir()
        try:
            copy = copy_linked(checkpoint, folder)
        except OSError:
            if checkpoint.exists():
                raise
            return  # pruned: there is a newer one
        for file in sorted(copy.iterdir(), key=lambda each: each.name == FILE):
            self._store.put(file, f"{name}/{file.name}")
        shutil.rmtree(folder)
        self._uploaded.add(name)


def _warn(line: str) -> None:
    print(f"warning: UploadCheckpoints: {line}", file=sys.stderr, flush=True)


def _check_url(url: str) -> None:
    """Raise ValueError if a URL names no folder below the root, or is neither URL nor path."""
    path = url.rpartition("://")[2]
    if not path.strip("/ ") or re.match(r"[\w+.-]+:(?!//|:)", url):
        raise ValueError("name a folder, as 's3://bucket/runs', 'file:///home/me/runs' or a path")
