"""Read YAML within bounds, and reject what YAML would silently drop.

A few lines of YAML can expand to gigabytes (aliases of aliases), or to more nesting than a parser
supports. So size, depth and the expansion of aliases are checked before any value is created.
"""

import re
import stat
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigurationError, shorten
from ..options import paths

_MOST_BYTES = 256 * 1024
_MOST_LEVELS = 50
_MOST_VALUES = 100_000
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
# Base 60, and base 8.
_MISREAD = re.compile(r"[-+]?([0-9_]+(:[0-5]?[0-9])+(\.[0-9_]*)?|0[0-7_]*[1-7][0-7_]*)")


def read(path: str) -> dict[str, Any]:
    """Read the sections of a file.

    Raises:
        ConfigurationError: It cannot be read, is not YAML, is too large, or repeats a key.
    """
    name = f"--config {shorten(path)}"
    if not path:
        raise ConfigurationError("--config: no file is given")
    path = paths.expand("--config", path)
    content = _loaded(name, _text(name, Path(path)))
    if not isinstance(content, dict):
        raise ConfigurationError(f"{name}: contains no sections; known: trainer, model, data")
    return content


def value(name: str, text: str) -> Any:
    """Parse the value of an option; a string that is not YAML is returned as it is.

    Raises:
        ConfigurationError: It is too large, or repeats a key.
    """
    try:
        return _loaded(name, text)
    except _NotYAMLError:
        return text


class _NotYAMLError(ConfigurationError):
    """The text is not YAML."""


def _text(name: str, path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            what = "is a directory" if path.is_dir() else "is not a regular file"
            raise ConfigurationError(f"{name}: {what}; name a YAML file")
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        return content.decode()
    except OSError as error:
        raise ConfigurationError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{name}: not YAML ({error})") from None


def _loaded(name: str, text: str) -> Any:
    if len(text) > _MOST_BYTES:
        raise ConfigurationError(f"{name}: larger than {_MOST_BYTES // 1024} KiB")
    try:
        _check_bounds(name, text)
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if isinstance(node, yaml.ScalarNode) and _MISREAD.fullmatch(node.value):
                raise _NotYAMLError(name)  # a value of an option, which is read as it is written
            _refuse_repeated(name, node, set())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        text = " ".join(str(error).split())[:200]
        raise _NotYAMLError(f"{name}: not YAML ({text})") from None
    except (ValueError, TypeError) as error:  # a number with too many digits, an invalid date
        text = " ".join(str(error).split())[:200]
        raise ConfigurationError(f"{name}: contains a value that cannot be read ({text})") from None


def _check_bounds(name: str, text: str) -> None:
    """Check the parse events, without creating values."""
    values, sizes = 0, dict[str, int]()
    above: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            above.append((event.anchor, values))
            if len(above) > _MOST_LEVELS:
                raise ConfigurationError(f"{name}: nested more than {_MOST_LEVELS} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = above.pop()
            if anchor:
                sizes[anchor] = values - before
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in above):
                raise ConfigurationError(f"{name}: the anchor {event.anchor!r} contains itself")
            values += sizes.get(event.anchor or "", 0)
        elif isinstance(event, yaml.ScalarEvent) and event.anchor:
            sizes[event.anchor] = 1
        values += 1
        if values > _MOST_VALUES:
            raise ConfigurationError(f"{name}: aliases expand to more than {_MOST_VALUES} values")


def _refuse_misread(name: str, node: yaml.ScalarNode) -> None:
    """Reject numbers that are not what they look like: YAML 1.1 reads 017 as 15, 1:30 as 90."""
    if node.style is None and node.tag in _NUMBERS and _MISREAD.fullmatch(node.value):
        raise ConfigurationError(
            f"{name}: line {node.start_mark.line + 1}: {shorten(node.value)} would be read as "
            f"{yaml.safe_load(node.value)}; quote it, or write the number"
        )


def _refuse_repeated(name: str, node: yaml.Node, seen: set[int]) -> None:
    """Reject keys that are repeated in a mapping: YAML silently uses the last."""
    if isinstance(node, yaml.ScalarNode):
        _refuse_misread(name, node)
        return
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _refuse_repeated(name, each, seen)
        return
    lines: dict[Any, int] = {}
    for key, below in node.value:
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode) and key.value in lines:
            raise ConfigurationError(
                f"{name}: line {line}: {shorten(repr(key.value))} is given twice, first in line "
                f"{lines[key.value]}; give it once"
            )
        if isinstance(key, yaml.ScalarNode):
            lines[key.value] = line
            _refuse_misread(name, key)
        _refuse_repeated(name, below, seen)
