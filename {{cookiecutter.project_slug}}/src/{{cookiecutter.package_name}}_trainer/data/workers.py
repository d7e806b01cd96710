"""Start the workers of a loader, and limit the time to their first batch."""

import multiprocessing.util
import tempfile
from collections.abc import Iterator
from typing import Any

from ..errors import UserError
from ..launch import collectives, signals

_LONGEST_TMPDIR = 70  # with multiprocessing's names, a socket's path has at most 107 characters


def iterator(loader: Any) -> Iterator[Any]:
    """Iterate over a loader; its workers ignore Ctrl-C, so that the run can save first."""
    if not getattr(loader, "num_workers", 0):
        return iter(loader)
    folder = tempfile.gettempdir()
    if len(folder) > _LONGEST_TMPDIR:  # by a socket with too long a path workers never meet
        tempfile.tempdir = "/tmp"  # noqa: S108 (only this user can open the folder made in it)
        try:
            multiprocessing.util.get_temp_dir()
        finally:
            tempfile.tempdir = folder
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    with signals.block_sigint_in_children(context.get_start_method()):
        batches: Any = iter(loader)
    # 0: the user has set no `timeout`.
    return _limited(batches) if getattr(batches, "_timeout", None) == 0 else batches


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
