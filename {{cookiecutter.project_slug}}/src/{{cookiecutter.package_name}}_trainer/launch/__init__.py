"""How the ranks of a run are started: by an external launcher, or by this process.

``start.py`` starts them, ``watch.py`` watches them, and one process needs neither; ``rank.py`` is
for each rank, ``cluster.py`` reads from the environment which rank this process is, ``devices.py``
which devices it has. Imports ``options`` and ``errors``.
"""

from typing import TYPE_CHECKING, Any

from .rank import drop_inherited_variables, is_interactive, run_external
from .reports import RankError, describe, is_reported, watch_for_hangs

if TYPE_CHECKING:
    from .start import run_in_processes, supervise_copies

__all__ = [
    "RankError",
    "describe",
    "drop_inherited_variables",
    "is_interactive",
    "is_reported",
    "run_external",
    "run_in_processes",
    "supervise_copies",
    "watch_for_hangs",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import start

    return getattr(start, name)
