"""No test waits for less than ten minutes, except where it is tested that a wait expires.

A busy machine would break it. Such a wait has ``# expires`` on its line, or on the one above.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain

from rendering import ROOT, TEMPLATE

PATIENCE = 600
MARK = "# expires"
# Arguments, items and variables.
NAMES = {"timeout", "TIMEOUT", "timeout_seconds", "PATIENCE", "deadline"}
# Calls with an argument without a name; `timeout` is pytest's mark.
CALLS = {"wait", "join", "communicate", "until", "timeout", "dump_traceback_later"}
IN_TEXT = re.compile(r"timeout_seconds[=: '\"]+(\d[\d.e]*)")
# The texts of its own test.
LEFT_OUT = {"test_patience.py"}


def named(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names and values that a node gives, and what it adds to a clock."""
    match node:
        case ast.Call(func=function, args=arguments, keywords=keywords):
            yield from ((keyword.arg or "", keyword.value) for keyword in keywords)
            if getattr(function, "attr", getattr(function, "id", "")) in CALLS:
                yield from (("timeout", argument) for argument in arguments)
        case ast.Dict(keys=keys, values=values):
            yield from zip((getattr(key, "value", "") for key in keys), values, strict=True)
        case ast.arguments(defaults=defaults, kwonlyargs=only, kw_defaults=only_defaults):
            every = [*node.posonlyargs, *node.args]
            last = every[len(every) - len(defaults) :]
            names = (argument.arg for argument in chain(last, only))
            yield from zip(names, [*defaults, *only_defaults], strict=True)
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value
        case ast.AnnAssign(target=ast.Name(id=name), value=annotated):
            yield name, annotated
        case ast.BinOp(left=ast.Call(func=ast.Attribute(attr="monotonic" | "time")), right=value):
            yield "deadline", value


def number(node: ast.expr | None) -> float | None:
    """Return the number that an expression is."""
    is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
    return float(ast.literal_eval(node)) if node and is_number else None


def waits(tree: ast.Module) -> Iterator[tuple[int, float]]:
    """Yield the line and the seconds of each wait in a file, also of those that have a name."""
    pairs = (pair for statement in tree.body for pair in named(statement))
    constants = {name: limit for name, value in pairs if (limit := number(value)) is not None}
    for node in ast.walk(tree):
        for name, value in named(node):
            seconds = number(value) or constants.get(getattr(value, "id", ""))
            if name in NAMES and value is not None and seconds is not None:
                yield value.lineno, seconds
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, float(text)) for text in IN_TEXT.findall(node.value))


def test_no_test_breaks_on_a_busy_machine() -> None:
    short = []
    for file in chain((ROOT / "tests").rglob("*.py"), (TEMPLATE / "tests").rglob("*.py")):
        if LEFT_OUT.intersection(file.parts):
            continue
        text = file.read_text(encoding="utf-8")
        lines = ["", *text.splitlines()]
        for line, seconds in waits(ast.parse(text)):
            if seconds < PATIENCE and MARK not in lines[line] + lines[line - 1]:
                short.append(f"{file.relative_to(ROOT)}:{line}: {seconds:g} s")
    assert short == []


def test_the_rule_can_fail() -> None:
    text = """
SECONDS = 5
run(timeout=SECONDS, other=3)
process.wait(6)
deadline = time.monotonic() + 7
options = {"timeout_seconds": 8}
words = "{timeout_seconds: 9}"
def end(timeout: float = 10) -> None: ...
pytestmark = pytest.mark.timeout(11)
"""
    assert [seconds for _, seconds in sorted(waits(ast.parse(text)))] == [5, 6, 7, 8, 9, 10, 11]
