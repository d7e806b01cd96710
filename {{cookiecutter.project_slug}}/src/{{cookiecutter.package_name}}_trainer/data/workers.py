"""Start the workers of a loader, and limit the time to their first batch."""

import contextlib
import multiprocessing.util
import tempfile
from collections.abc import Iterator
from typing import Any

from ..errors import UserError
from ..launch import collectives, signals

# With the names that multiprocessing adds, the path of a socket has at most 107 characters.
_LONGEST_TMPDIR = 70


def start(loader: Any) -> Iterator[Any]:
    """Iterate over a loader; its workers ignore Ctrl-C, so that the run can save first."""
    if len(tempfile.gettempdir()) > _LONGEST_TMPDIR:
        _keep_sockets_short(tempfile.gettempdir())
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    with signals.block_sigint_in_children(context.get_start_method()):
        batches = iter(loader)
    # 0: the user has set no `timeout`.
    return _limited(batches) if getattr(batches, "_timeout", None) == 0 else batches


def _keep_sockets_short(folder: str) -> None:
    """Let workers meet in /tmp: by the path of a socket that is too long they never would."""
    tempfile.tempdir, short = "/tmp", folder  # noqa: S108 (in a folder that only this user opens)
    with contextlib.suppress(OSError):
        short = multiprocessing.util.get_temp_dir()
    tempfile.tempdir = folder
    if short.startswith(folder):
        raise UserError(
            f"TMPDIR={folder} is too long for the sockets of a loader's workers, which would wait "
            f"forever; set one of at most {_LONGEST_TMPDIR} characters"
        )


def _limited(batches: Any) -> Iterator[Any]:
    """Limit the time to the first batch: nothing else tells of workers that hang."""
    batches._timeout = collectives.timeout_seconds * (1 if collectives.is_active() else 3)
    try:
        first = next(batches)
    except StopIteration:
        return
    except RuntimeError as error:
        if "timed out after" not in str(error):
            raise
        raise UserError(
            f"the loader's workers have read no batch within {batches._timeout:g} s: they hang, or "
            "need a longer `timeout` of the loader; see docs/trouble.md#a-loader-gives-no-batch"
        ) from None
    finally:
        batches._timeout = 0
    yield first
    yield from batches
