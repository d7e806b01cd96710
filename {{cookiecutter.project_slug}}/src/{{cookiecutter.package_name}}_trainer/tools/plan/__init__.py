"""``plan``: what a run needs on devices that one need not have, and which strategies fit."""

import json
from collections.abc import Sequence

HELP = "Plan a fit for other devices: batch, steps, memory under each strategy."


def run(program: str, words: Sequence[str]) -> None:
    """Print the plan of a ``fit``; UserError with all errors in the options, as of ``fit``."""
    from ...errors import Problems
    from ..isolated import Child
    from . import planning, request, table

    problems = Problems()
    asked = request.read(program, words, problems)
    # Each traced step has a limit of its own; there are a dozen at most.
    planned = Child(lambda: planning.make(asked, problems, program), 12 * asked.seconds).result()
    print(json.dumps(planned, indent=2) if asked.as_json else table.text(planned))
