"""Command-line help on strategies: an overview, and all options and limits of one strategy."""

import argparse
import inspect
import re

from jsonargparse import ArgumentParser

from .. import strategies
from ..errors import ConfigurationError
from ..strategies import Entry, Limits

OPTION = "trainer.strategy.help"
_OPTIONS = "trainer.strategy_options"
_AUTO = (
    "ddp for several devices or processes, ddp_notebook for them in a notebook, else single_device"
)


def asked_for(words: list[str]) -> str | None:
    """The strategy named after the help option, or empty; ``None`` without the option."""
    for position, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name == f"--{OPTION}":
            following = words[position + 1 : position + 2]
            return value if has_value else "".join(following).removeprefix("-")
    return None


def overview() -> str:
    """All registered strategies, one line each."""
    lines = {"auto": _AUTO}
    lines |= {name: _summary(strategies.find(name)) for name in strategies.names()}
    width = max(map(len, lines)) + 2
    return "\n".join(f"  {name:{width}}{line}" for name, line in lines.items())


def plain(text: str) -> str:
    """A text without the marks of docstrings and of types."""
    text = re.sub(r"Annotated\[(\w+),\s+([^\]]*)\]", r"\1 \2", text)
    return re.sub(r":\w+:`(?:[^`]*[.~])?([^`]*)`", r"\1", text).replace("``", "")


def describe(name: str) -> str:
    """A strategy's options with type and default, and its limits."""
    if not name:
        raise ConfigurationError(f"--{OPTION} needs a name, such as ddp; 'fit --help' lists them")
    if name == "auto":
        return f"auto: {_AUTO}"
    entry = strategies.find(name)
    lines = [f"{name}: {_summary(entry)}", "", "options:", _options(entry), "", "limits:"]
    return "\n".join([*lines, *(f"  {line}" for line in _limits(entry.limits))])


def _summary(entry: Entry) -> str:
    first = entry.summary or (inspect.getdoc(entry.cls) or "").split("\n\n")[0]
    return " ".join(plain(first).split()).rstrip(".")


def _options(entry: Entry) -> str:
    parser = ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    parser.add_class_arguments(entry.cls, _OPTIONS, as_group=False, skip=set(entry.preset))
    for action in parser._actions:
        if action.dest == _OPTIONS:
            action.help = argparse.SUPPRESS
    text = parser.format_help().partition("\n")[2].strip("\n")
    return plain(text) or "  none"


def _limits(limits: Limits) -> list[str]:
    most = {"device": limits.max_devices, "node": limits.max_nodes}
    lines = [f"at most {count} {name}" for name, count in most.items() if count is not None]
    lines.append(f"runs on {' or '.join(limits.accelerators)}")
    if limits.launched_by is not None:
        lines.append(f"several processes are started by {limits.launched_by}")
    lines += [f"needs the package {each}: {how}" for each, how in limits.packages.items()]
    return lines + [f"refuses {what}: {reason}" for what, reason in limits.refused.items()]
