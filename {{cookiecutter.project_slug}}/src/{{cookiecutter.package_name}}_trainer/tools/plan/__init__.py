"""``plan``: what a run needs on devices that one need not have, and which strategies fit.

It traces training steps with fake tensors, which need no memory and no GPU.
"""

from collections.abc import Sequence

HELP = "Plan a fit for other devices: batch, steps, memory under each strategy."


def run(program: str, words: Sequence[str]) -> None:
    """Print the plan of a ``fit`` with these options.

    Raises:
        UserError: One line for each error in the options, and what ``fit`` would refuse.
    """
    import json
    import sys
    from functools import partial

    from ...errors import Problems, UserError
    from . import planning, request, table
    from .isolated import Child, Failure

    if {"-h", "--help"} & set(words):
        lines = [f"usage: {program} plan --config FILE --memory SIZE [OPTION VALUE] … [--json]", ""]
        lines += [f"  --{name:14}{text}" for name, text in request.OWN.items()]
        lines += [f"  {'--json':16}print JSON", "", f"and all options of '{program} fit --help'."]
        sys.stdout.write("\n".join([*lines, ""]))
        return
    problems = Problems()
    asked = request.read(words, problems)
    # Each traced step has a limit of its own; there are a dozen at most.
    work = partial(planning.make, asked, problems, program)
    try:
        planned = Child(work, 12 * asked.seconds).result()
    except Failure as failure:
        raise UserError(f"plan: {failure}") from None
    if asked.as_json:
        sys.stdout.write(json.dumps(planning.as_dict(planned), indent=2) + "\n")
    else:
        sys.stdout.write(table.text(planned) + "\n")
