"""Read YAML within bounds, and reject what YAML would silently drop.

A few lines of YAML can expand to gigabytes (aliases of aliases). So size, depth and the expansion
of aliases are checked before any value is created.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigurationError, shorten
from ..launch import files
from ..options.values import Text, expand_path, plain

_MOST_BYTES, _MOST_LEVELS, _MOST_VALUES = 256 * 1024, 50, 100_000
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
# YAML 1.1 reads 1:30 as 90 (base 60), and 017 as 15 (base 8).
_MISREAD = re.compile(r"[-+]?([0-9_]+(:[0-5]?[0-9])+(\.[0-9_]*)?|0[0-7_]*[1-7][0-7_]*)")
_TEXT = "!number"  # numbers that YAML 1.1 reads as text
_NUMBER = re.compile(r"[-+]?([0-9]+\.?|[0-9]*\.[0-9]+)[eE][-+]?[0-9]+|[-+]\.[0-9]+")
_BRACKETS = re.compile(r"\s*(\[|\{\s*\}|\{.*:)", re.S)  # a list or dict; "{name}" is text
_BREAKS = re.compile("[\x85\u2028\u2029]")
# All of a number, a date, or a name such as null; YAML leaves out comments and anchors.
_SCALAR = re.compile(r"~|[-+.:\s]*\w[\w.+:\s-]*")


class _NotYAMLError(ConfigurationError):
    """The text is not YAML."""


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    """Quotes strings that look like numbers, and escapes line breaks of other systems."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        node = super().represent_str(data)
        node.style = '"' if _BREAKS.search(data) else node.style
        return node


_Dumper.add_representer(str, _Dumper.represent_str)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_TEXT, _NUMBER, list("-+.0123456789"))
_Loader.add_constructor(_TEXT, lambda _, node: Text(node.value, float(node.value)))


def read(path: str) -> dict[Any, Any]:
    """Read the sections of a file that ``--config`` names, as :func:`read_file`."""
    return read_file(f"--config {shorten(path)}", Path(expand_path("--config", path)))


def read_file(name: str, file: Path) -> dict[Any, Any]:
    """Read the sections of a file; a ConfigurationError begins with ``name``."""
    try:
        text = files.read(file, _MOST_BYTES).decode()
    except IsADirectoryError:
        raise ConfigurationError(f"{name}: is a directory; name a YAML file") from None
    except OSError as error:
        raise ConfigurationError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{name}: not YAML ({error})") from None
    except ValueError as error:
        raise ConfigurationError(f"{name}: {error}; name a YAML file") from None
    content = _load(name, text)
    if not isinstance(content, dict):
        raise ConfigurationError(f"{name}: contains no sections; known: trainer, model, data")
    return content


def word(name: str, text: str) -> Any:
    """The value of an option: :class:`Text`, or a list or dict in brackets."""
    meaning: Any = text
    if not _MISREAD.fullmatch(text):
        with contextlib.suppress(_NotYAMLError):
            meaning = _load(name, text)
    if isinstance(meaning, dict | list) and _BRACKETS.match(text):
        return meaning
    is_bare = type(meaning) is str and not text.startswith(("'", '"'))
    is_scalar = type(meaning) is str or _SCALAR.fullmatch(text)
    if is_bare or not is_scalar or isinstance(meaning, dict | list):
        meaning = text  # "a #1" and "a: b", too
    return Text(text, float(text) if text in ("inf", "-inf", "nan") else plain(meaning))


def dump(sections: dict[str, Any]) -> str:
    """Write values as YAML that :func:`read` reads as the same values."""
    return str(yaml.dump(sections, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def _load(name: str, text: str) -> Any:
    try:
        if (node := yaml.compose(text, _Loader)) is None:
            return None
        _check(name, node, 0, itertools.count(1))
        return _Loader("").construct_document(node)
    except RecursionError:
        raise ConfigurationError(f"{name}: nested more than {_MOST_LEVELS} levels deep") from None
    except yaml.YAMLError as error:
        raise _NotYAMLError(f"{name}: not YAML ({_reason(error)})") from None
    except (ValueError, TypeError) as error:  # a number with too many digits, an invalid date
        problem = f"contains a value that cannot be read ({_reason(error)})"
        raise ConfigurationError(f"{name}: {problem}") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _check(name: str, node: yaml.Node, level: int, visited: Iterator[int]) -> None:
    """Check a value and those in it, each as often as aliases repeat it."""
    if next(visited) > _MOST_VALUES:
        raise ConfigurationError(f"{name}: aliases expand to more than {_MOST_VALUES} values")
    if level > _MOST_LEVELS:
        raise ConfigurationError(f"{name}: nested more than {_MOST_LEVELS} levels deep")
    below = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        _refuse_repeated(name, node)
        below = itertools.chain.from_iterable(node.value)
    for child in below:
        _check(name, child, level + 1, visited)
    is_number = isinstance(node, yaml.ScalarNode) and node.style is None and node.tag in _NUMBERS
    if is_number and _MISREAD.fullmatch(node.value):
        line, meaning = node.start_mark.line + 1, yaml.safe_load(node.value)
        problem = f"{shorten(node.value)} would be read as {meaning}"
        raise ConfigurationError(f"{name}: line {line}: {problem}; quote it, or write the number")


def _refuse_repeated(name: str, node: yaml.MappingNode) -> None:
    """Reject keys that are repeated: YAML silently uses the last."""
    lines: dict[tuple[str, str], int] = {}
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
        line = key.start_mark.line + 1
        if (which := (key.tag, key.value)) in lines:  # 1 and "1" are two
            twice = f"{shorten(repr(key.value))} is given twice, first in line {lines[which]}"
            raise ConfigurationError(f"{name}: line {line}: {twice}; give it once")
        lines[which] = line
