"""The command ``reproduce``: run a recorded run again, and find the first thing that differs."""

from collections.abc import Sequence

HELP = "Run a recorded run again, and say what differs first."


def run(program: str, words: Sequence[str]) -> None:
    """Run the command with the words after it; exit 0 only if the runs are bit-equal."""
    from .command import reproduce

    reproduce(program, words, HELP)
