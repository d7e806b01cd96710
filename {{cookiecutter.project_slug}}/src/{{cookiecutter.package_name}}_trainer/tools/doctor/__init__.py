"""``doctor``: what this machine can run, and what is wrong with a configuration; nothing is kept.

``checks.py`` runs each check in a process of its own, with a time limit. ``machine.py`` has those
of the machine, ``fit.py`` and ``loading.py`` those of a configuration, for which ``waits.py`` finds
where a step waits for its device.
"""

HELP = "Check what this machine can run; with --config: the model and its data too."


def run(program: str, words: list[str]) -> None:
    """Print the result of each check; exit 1 if a ``fit`` cannot start.

    Args:
        program: The name of the program.
        words: ``--json``, and the options of ``fit``; without options only the machine is checked.

    Raises:
        ConfigurationError: One line per error in the options.
        SystemExit: A check fails; or after ``--help``.
    """
    import sys

    from . import checks, fit, machine

    given = [word for word in words if word != "--json"]
    if set(given) & {"-h", "--help"}:
        print(f"usage: {program} doctor [--json] [--config FILE and all options of fit]\n\n{HELP}")
        return
    # Errors in the configuration are reported before the checks, which take seconds.
    work = fit.read(program, given) if given else None
    found = machine.check(work)
    if work is not None:
        found += fit.check(work, program, given)
    print(checks.as_json(found) if len(given) < len(words) else checks.as_table(found))
    if not checks.can_start(found):
        sys.exit(1)
