"""Redact secrets before a command line, a configuration or a message is written or printed.

Options are secret by name (``--model.api_key``). Inside of values, users and passwords of URLs,
their parameters with such names (``?api_key=…``) and ``Authorization`` headers are redacted too.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(
    r"secret|passw(or)?d|passphrase|credential|webhook|authorization"
    r"|(^|_)(token|key|apikey|pwd|auth|bearer|jwt|sig|signature)$",
    re.IGNORECASE,
)
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_USER = re.compile(r"(?<=://)[^/\s]+(?=@)")
_PARAMETER = re.compile(r"(?<=[?&;#])([^=?&;#\s]+)=[^&;#\s]+")
_HEADER = re.compile(
    r"(authorization[\"' ]*[:=][\"' ]*(\w+ +)?|bearer +)[^\s\"',}]+", re.IGNORECASE
)

# In a diff: names before a literal in any file, and before any value in files of settings.
_LITERAL = re.compile(r"""(\w[\w.-]*)["']?\]?\s*[:=]\s*["']""")
_SETTING = re.compile(r"""(\w[\w.-]*)["']?\s*[:=]""")
_SETTINGS = (".yaml", ".yml", ".toml", ".ini", ".cfg", ".json", ".sh", ".env")


def is_secret(name: str) -> bool:
    """Whether the value of an option with this name, including its sections, is a secret."""
    words = _WORD_START.sub("_", name.rpartition(".")[2]).replace("-", "_")
    return _SECRET.search(words) is not None


def command(words: Sequence[str]) -> list[str]:
    """A command line with the values of secret options redacted."""
    redacted: list[str] = []
    hides_next = False
    for word in words:
        name, equals, given = word.partition("=")
        is_option = word.startswith("--")
        if hides_next and not is_option:
            redacted.append(HIDDEN)
        elif is_option and equals:
            redacted.append(f"{name}={HIDDEN if is_secret(name) else text(given)}")
        else:
            redacted.append(text(word))
        hides_next = is_option and not equals and is_secret(name)
    return redacted


def text(given: str) -> str:
    """A command-line value with secrets inside it redacted."""
    if ":" not in given:
        return message(given)
    return document(given, default_flow_style=True, width=10**6).strip()


def document(given: str, **style: Any) -> str:
    """A YAML document with secrets inside it redacted; ``style``: how it is written then."""
    import yaml

    try:
        parsed = yaml.safe_load(given)
    except yaml.YAMLError:
        parsed = None
    if not isinstance(parsed, Mapping | list):
        return message(given)
    shown = value(parsed)
    if shown == parsed:
        return message(given)
    written: str = yaml.safe_dump(shown, sort_keys=False, **style)
    return written


def message(given: str) -> str:
    """A text with secrets inside it redacted."""
    given = _HEADER.sub(rf"\1{HIDDEN}", _USER.sub(HIDDEN, given))
    return _PARAMETER.sub(
        lambda found: f"{found[1]}={HIDDEN}" if is_secret(found[1]) else found[0], given
    )


def value(given: Any) -> Any:
    """A parsed value with secrets inside it redacted."""
    if isinstance(given, Mapping):
        return {
            key: HIDDEN if is_secret(str(key)) and each is not None else value(each)
            for key, each in given.items()
        }
    if isinstance(given, list):
        return [value(each) for each in given]
    return message(given) if isinstance(given, str) else given


def diff(given: str) -> str:
    """The output of ``git diff``, with its lines redacted from secret literals and settings on."""
    lines, pattern = [], _LITERAL
    for line in message(given).splitlines(keepends=True):
        if line.startswith("+++ "):
            pattern = _SETTING if line.rstrip().endswith(_SETTINGS) else _LITERAL
        ends = [found.end() for found in pattern.finditer(line) if is_secret(found[1])]
        lines.append(f"{line[: ends[0]]} {HIDDEN}\n" if ends else line)
    return "".join(lines)
