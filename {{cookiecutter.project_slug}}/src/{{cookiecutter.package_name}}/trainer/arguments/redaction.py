"""Redact secrets in a command line before it is written or printed.

Options are secret by name: ``--model.api_key``, ``--data.init_args.password``. Passwords in URLs
(``https://name:password@host``) are redacted too.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

HIDDEN = "***"
_SECRET = re.compile(
    r"secret|passw(or)?d|passphrase|credential|(^|_)(token|key|apikey|pwd|auth)$", re.IGNORECASE
)
_ADDRESS = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]*(?=@)")


def is_secret(name: str) -> bool:
    """Whether the value of an option with this name, including its sections, is a secret."""
    return _SECRET.search(name.rpartition(".")[2].replace("-", "_")) is not None


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
        return given
    try:
        parsed = yaml.safe_load(given)
    except yaml.YAMLError:
        parsed = given
    if isinstance(parsed, Mapping | list) and (shown := value(parsed)) != parsed:
        return yaml.safe_dump(shown, default_flow_style=True, width=10**6).strip()
    return _ADDRESS.sub(HIDDEN, given)


def value(given: Any) -> Any:
    """A parsed value with secrets inside it redacted."""
    if isinstance(given, Mapping):
        return {
            key: HIDDEN if is_secret(str(key)) and each is not None else value(each)
            for key, each in given.items()
        }
    if isinstance(given, list):
        return [value(each) for each in given]
    return _ADDRESS.sub(HIDDEN, given) if isinstance(given, str) else given
