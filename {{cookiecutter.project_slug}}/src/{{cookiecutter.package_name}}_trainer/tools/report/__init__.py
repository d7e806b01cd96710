"""The command ``report``: one HTML page about one or several runs, which needs no network."""

from collections.abc import Sequence

HELP = "Write a page about runs: curves, speed, where the time goes, restarts."
AFTER_FIT = "report: {program} report {run}"
"""The line that ``fit`` prints at its end."""


def run(program: str, words: Sequence[str]) -> None:
    """Run the command with the words after it; ``program`` is for its help.

    Raises:
        ConfigurationError: One line per error.
    """
    from . import command

    command.run(program, words, HELP)
