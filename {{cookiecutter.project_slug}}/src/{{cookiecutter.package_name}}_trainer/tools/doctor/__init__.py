"""``doctor``: what this machine can run, and what is wrong with a configuration."""

import contextlib
import sys

HELP = "Check what this machine can run; with --config, the model and its data too."


def run(program: str, words: list[str]) -> None:
    """Print what each check finds; exit 1 unless a ``fit`` can start.

    ``words``: ``--json`` and the options of ``fit``; without these, only the machine is checked.
    """
    from ...cli import configuration
    from ...launch import output
    from . import checks, fit, machine

    options = [word for word in words if word != "--json"]
    if {"-h", "--help"} & {*options}:
        output.print_lines(f"usage: {program} doctor [--json] [options of fit]", "", HELP)
        return
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no result
        work = configuration.read_work(program, "fit", options) if options else None
    results = machine.check(work) + (fit.check(work, program, options) if work else [])
    output.print_lines(checks.report(results, is_json=len(options) < len(words)), is_result=True)
    if {"fails", "unknown"} & {check.status for check in results}:
        raise SystemExit(1)
