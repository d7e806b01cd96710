"""Upload the checkpoints of a run to a store, such as S3."""

import re
import sys
import tempfile
import threading
from pathlib import Path, PurePosixPath

from ..checkpoint import BEST, DIRECTORY, complete, copy_linked
from ..checkpoint.run_directory import is_run
from ..checkpoint.state_file import FILE
from ..errors import one_line
from ..launch.signals import Preempted
from ..module import Run, TrainingModule
from ..options import redaction
from .callback import Callback, check

# How long the end of a fit waits for the last upload; after a failure, which is reported then.
_LAST_SECONDS = 600.0
_SECONDS_AFTER_FAILURE = 5.0


class UploadCheckpoints(Callback):
    """Upload the newest checkpoint and those of ``BestCheckpoint`` while training continues.

    A thread of rank 0 looks for new checkpoints every ``every_n_seconds``, and at the end of the
    fit, which waits for it for ten minutes at most (after a failure for five seconds). ``url/RUN``
    then has the checkpoints, the configuration without its secrets, and the CSV files of the run
    directory ``RUN``, which rank 0 must see as a whole: a download of it can be resumed.
    Checkpoints that the run directory no longer has are removed there; one is complete when its
    ``state.json``, the last file, is there.

    One line names an upload that fails; training continues, and the next look tries again. Nothing
    is uploaded if a new run finds checkpoints of another run of this name.

    Args:
        url: A folder, by its path or an address of fsspec: ``"s3://bucket/runs"`` (with s3fs
            installed), ``"gs://…"``, ``"file:///…"``. Credentials come from the environment.
        every_n_seconds: Seconds between two looks.

    Source: https://filesystem-spec.readthedocs.io
    """

    def __init__(self, url: str, every_n_seconds: float = 60.0) -> None:
        problem, is_time = _problem(url), 0 < every_n_seconds < threading.TIMEOUT_MAX
        check(
            "UploadCheckpoints",
            (is_time, f"every_n_seconds={every_n_seconds!r}: give a number above 0"),
            (not problem, f"url={redaction.message(url)!r}: {problem}"),
        )
        self.url, self.every_n_seconds = url, every_n_seconds
        self._thread: threading.Thread | None = None
        self._ended: threading.Event  # set when the fit starts: it cannot be pickled
        self._uploaded: set[Path] = set()
        self._is_own = False
        """Whether checkpoints in the store can only be of this run."""

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        if trainer.is_global_zero:
            run = trainer.run_directory
            self._is_own = is_run(run)  # it has no record yet if it is new
            self._ended, self._uploaded = threading.Event(), set()
            self._thread = threading.Thread(target=self._keep_uploading, args=[run], daemon=True)
            self._thread.start()

    def on_fit_end(self, trainer: Run, module: TrainingModule) -> None:
        trainer.save_checkpoint(lambda _: self._end(_LAST_SECONDS))  # when the last one is complete

    def on_exception(self, trainer: Run, module: TrainingModule, error: BaseException) -> None:
        self._end(_LAST_SECONDS if isinstance(error, Preempted) else _SECONDS_AFTER_FAILURE)

    def _end(self, seconds: float) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join(seconds)
            if self._thread.is_alive():
                _warn(f"the last upload is not complete after {seconds:g} s")
            self._thread = None

    def _keep_uploading(self, run: Path) -> None:
        ended, said, is_last = self._ended, "", False
        while not is_last:
            is_last = ended.wait(self.every_n_seconds)
            try:
                self._upload(run)
            except Exception as error:  # a file system may raise anything
                line = f"{self.url}: no upload ({type(error).__name__}: {one_line(error)})"
                if line != said:
                    _warn(redaction.message(f"{line}; training continues"))
                said = line

    def _upload(self, run: Path) -> None:
        """Upload what is new, and remove what the run directory no longer has."""
        import fsspec

        system, root = fsspec.url_to_fs(f"{self.url.rstrip('/')}/{run.name}")
        system.invalidate_cache()
        there = {
            f"{folder}/{PurePosixPath(path).name}"
            for folder in (DIRECTORY, f"{DIRECTORY}/{BEST}")
            for path in system.glob(f"{root}/{folder}/step-*")
        }
        if there and not self._is_own:
            raise FileExistsError("it has checkpoints of another run; choose another run_name")
        newest, best = complete(run / DIRECTORY), complete(run / DIRECTORY / BEST)
        if not newest:
            return
        self._is_own = True
        system.makedirs(root, exist_ok=True)
        # First: they must have the rows of the steps before a checkpoint.
        for file in (each for each in run.iterdir() if each.suffix in (".yaml", ".json", ".csv")):
            text = file.read_text()
            text = redaction.document(text) if file.suffix == ".yaml" else text
            system.pipe_file(f"{root}/{file.name}", text.encode())
        for checkpoint in {newest[-1], *best} - self._uploaded:
            # A copy is not pruned meanwhile. The next start removes what a killed process leaves.
            with tempfile.TemporaryDirectory(prefix=".step-", dir=run / DIRECTORY) as folder:
                try:
                    copy = copy_linked(checkpoint, Path(folder))
                except OSError:
                    if checkpoint.exists():
                        raise
                    continue  # it was pruned: there is a newer one
                target = f"{root}/{checkpoint.relative_to(run)}"
                system.makedirs(target, exist_ok=True)
                for file in sorted(copy.iterdir(), key=lambda each: each.name == FILE):
                    system.put_file(str(file), f"{target}/{file.name}")
            self._uploaded.add(checkpoint)
        kept = {str(each.relative_to(run)) for each in [*newest, *best]}
        for name in there - kept:
            system.rm(f"{root}/{name}", recursive=True)


def _problem(url: str) -> str:
    """Why a URL is not accepted, or an empty text."""
    import fsspec  # in no run that does not use it

    if not url.rpartition("://")[2].strip("/ ") or re.match(r"[\w+.-]+:(?!//|:)", url):
        return "name a folder, as 's3://bucket/runs' or 'file:///home/me/runs'"
    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(url))
    except (ImportError, ValueError) as error:
        return one_line(error)
    return ""


def _warn(line: str) -> None:
    print(f"warning: UploadCheckpoints: {line}", file=sys.stderr, flush=True)
