"""Links in a run directory to some of its checkpoints, and copies of hard links."""

import os
import shutil
from pathlib import Path

from ..errors import ConfigurationError

BEST = "best"
LAST = "last"


def point(link: Path, target: Path) -> None:
    """Make a relative symbolic link, which replaces an older one in one step."""
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target.relative_to(link.parent))
    if link.is_dir() and not link.is_symlink():  # the run was copied by its contents
        shutil.rmtree(link)
    new.replace(link)


def find_link(run: Path, name: str) -> Path:
    """The link to the best or the last checkpoint of a run.

    Raises:
        ConfigurationError: There is none.
    """
    link = run / name
    if link.is_dir():
        return link
    if name == BEST and run.is_dir():
        reason = "the run kept none; train with the callback BestCheckpoint, or use 'last'"
    else:
        reason = "no checkpoint there"
    raise ConfigurationError(f"checkpoint={name!r}: {link}: {reason}")


def copy_linked(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint into a folder, unless it is there; pruning it does not change the copy.

    Files are hard links where the file system supports them, so that nothing is written twice.
    """
    copy = folder / checkpoint.name
    if not copy.exists():
        partial = folder / f".{checkpoint.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(checkpoint, partial, copy_function=_link)
        partial.rename(copy)
    return copy


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # this file system has no hard links
        shutil.copy2(source, target)
