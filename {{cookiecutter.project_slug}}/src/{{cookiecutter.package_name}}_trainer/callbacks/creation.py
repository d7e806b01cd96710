"""Create the callbacks of a trainer; all errors in them are reported at once."""

from ..errors import ConfigurationError, Problems, shown
from ..module import problems_of_names, problems_of_signatures
from ..options import class_paths
from .base import Callback
from .built_in import BUILT_IN
from .weight_average import WeightAverage


def create(given: object, problems: Problems) -> tuple[Callback, ...]:
    """Create the callbacks of the trainer's argument.

    Args:
        given: A callback, or a list: callbacks, class paths, names of built-in callbacks, or dicts
            with ``class_path`` and ``init_args``.
        problems: Collects one line per error.
    """
    if isinstance(given, Callback):
        given = [given]
    if not isinstance(given, list | tuple):
        problems.add(f"callbacks={shown(given)}: give a list of callbacks, or of class paths")
        return ()
    made: list[Callback] = []
    for index, each in enumerate(given):
        with problems:
            callback = class_paths.create(f"callbacks[{index}]", each, Callback, BUILT_IN)
            lines = problems_of_names(type(callback), Callback)
            lines += problems_of_signatures(callback, Callback)
            if lines:
                raise ConfigurationError(lines)
            made.append(callback)
    averages = [type(each).__name__ for each in made if isinstance(each, WeightAverage)]
    if len(averages) > 1:
        problems.add(f"callbacks: {' and '.join(averages)}: validations use one average; keep one")
    return tuple(made)
