"""Takes secrets out of a command line before it is written down or shown.

An option is secret by its name: ``--model.api_key``, ``--data.init_args.password``. So is what
stands between a user's name and the host of an address: ``https://name:password@host``.
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
    """Whether the value of an option with this name, sections before it included, is a secret."""
    return _SECRET.search(name.rpartition(".")[2].replace("-", "_")) is not None


def command(words: Sequence[str]) -> list[str]:
    """A command line without the values of its secret options."""
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
    """A value as it is given on the command line, without what is secret inside it."""
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
    """A parsed value without what is secret inside it."""
    if isinstance(given, Mapping):
        return {
            key: HIDDEN if is_secret(str(key)) and each is not None else value(each)
            for key, each in given.items()
        }
    if isinstance(given, list):
        return [value(each) for each in given]
    return _ADDRESS.sub(HIDDEN, given) if isinstance(given, str) else given
