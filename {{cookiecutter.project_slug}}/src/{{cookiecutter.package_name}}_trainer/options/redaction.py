"""Redact secrets before a command line, a configuration or a message is written or printed.

Secrets are recognized by their name (``--model.api_key``), and inside of values by their form
(``ghp_…``, JWT, private keys), as user of a URL, and in headers such as ``Authorization``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(
    r"secret|passw(or)?d|passphrase|credential|webhook|authorization"  # in any section
    r"|(api|auth|access|account|refresh|private|session|hf|gh)_?(key|token)s?(?![a-z])"
    # Others are tokens of a vocabulary.
    r"|(^|\.|(?<!pad|bos|eos|unk|cls|sep)(?<!mask)_)(token|key|apikey|pwd|auth|bearer|jwt|sig"
    r"|signature|pass|pw|pat|pin|dsn|cookie)(_?\d+)?$",
    re.IGNORECASE,
)
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_FORM = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY.*?(-----END [A-Z ]*PRIVATE KEY[A-Z -]*|(?=\ndiff --git )|\Z)"
    r"|((?<![\w-])|(?<=\\n))(gh[opsur]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|hf_\w{30,}"
    r"|sk-(?=[\w-]*\d)[\w-]{20,}|[prs]k_(live|test)_\w{16,}|xox[a-z]-[\w-]{20,}|AIza[\w-]{35}"
    r"|(AKIA|ASIA)[A-Z0-9]{16}|npm_\w{36}|pypi-[\w-]{50,}|dapi[0-9a-f]{32}|ya29\.[\w-]{20,}"
    r"|SG\.[\w-]{20,}\.[\w-]{20,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)"
    r"|(?<=hooks\.slack\.com/services/)[^\s\"']+|(?<=\s-u )[^\s:]+:\S+"
    r"|(?<=://)([^/\s]+|[^/\s:]*:[^\s\"']{1,200})(?=@)"
    r"|(?<![\w.+/@-])[\w.+-]{1,64}:[^\s:@/\"']{3,64}(?=@(?!sha\d)\w)",
    re.DOTALL,
)
_HEADER = re.compile(
    r"(((authorization|(?<![\w-])x-[\w-]{0,64}(key|token|secret)|\bcookie)[\"' ]*[:=][\"' ]*"
    r"(\w+ +)?)|\bbearer +|\bbasic +(?=\S{8}))[^\s\"',}]+",
    re.IGNORECASE,
)
NAME = re.compile(r"(?<![\w.-])(--?|ENV\s+)?(\w[\w.-]*)")
_VALUE = re.compile(
    r"""\*{3}|\\?[bfru]{0,2}("[^"\n]*"?|'[^'\n]*'?|`[^`\n]*`?)|([^\s&;#,"'`)}\]]|,(?=\S))+""",
    re.IGNORECASE,
)
# What stands between a name and its value.
_IN_TEXT = re.compile(r"""\+?=(?!=)|\\?["'`]?\s{0,3}[:=]\s{0,3}(?=\\?[bfru]?["'`])""")
_IN_YAML = re.compile(r"""\\?["']?\s{0,3}[:=]\s*""")
_SPACE = re.compile(r"\s+(?=\S)")


def is_secret(name: str) -> bool:
    """Whether the value of an option with this name, including its sections, is a secret."""
    return _SECRET.search(_WORD_START.sub("_", name.rstrip("+")).replace("-", "_")) is not None


def command(words: Sequence[str]) -> list[str]:
    """A command line with the values of secret options redacted."""
    return _words(words, text)


def _words(words: Sequence[Any], show: Callable[[Any], Any]) -> list[Any]:
    redacted: list[Any] = []
    hides_next = False
    for word in words:
        name, equals, setting = word.partition("=") if isinstance(word, str) else ("", "", "")
        is_option = name.startswith("-") and " " not in name
        if hides_next and not is_option:
            redacted.append(HIDDEN)
        elif is_option and equals:
            redacted.append(f"{name}={HIDDEN if is_secret(name) else show(setting)}")
        else:
            redacted.append(show(word))
        hides_next = is_option and not equals and is_secret(name)
    return redacted


def text(word: str) -> str:
    """A command-line value with secrets inside it redacted."""
    if not re.search(r"[:\[]", word):
        return message(word)
    return document(word, default_flow_style=True, width=10**6).strip()


def document(content: str, **style: Any) -> str:
    """A YAML document with secrets inside it redacted; ``style``: how it is written then."""
    import yaml

    try:
        parsed = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError):
        return _redacted(message(content), _IN_YAML)
    if not isinstance(parsed, Mapping | list) or (shown := value(parsed)) == parsed:
        return message(content)
    return str(yaml.safe_dump(shown, sort_keys=False, **style))


def message(content: str) -> str:
    """A text with secrets inside it redacted."""
    return _redacted(without_forms(content), _IN_TEXT)


def value(parsed: Any) -> Any:
    """A parsed value with secrets inside it redacted."""
    if isinstance(parsed, Mapping):
        is_named = "value" in parsed and is_secret(str(parsed.get("name")))
        return {
            key: HIDDEN
            if item is not None and (is_secret(str(key)) or (is_named and key == "value"))
            else value(item)
            for key, item in parsed.items()
        }
    if isinstance(parsed, list):
        return _words(parsed, value)
    return message(parsed) if isinstance(parsed, str) else parsed


def after(option: re.Match[str]) -> re.Match[str] | None:
    """The space between an option, or the word password, and its value."""
    is_option = option[1] or option[2].startswith("passw")
    return _SPACE.match(option.string, option.end()) if is_option else None


def without_forms(content: str) -> str:
    """Replace substrings that look like secrets, such as tokens and private keys."""
    return _HEADER.sub(rf"\1{HIDDEN}", _FORM.sub(HIDDEN, content))


def _redacted(content: str, link: re.Pattern[str]) -> str:
    """Redact the values that ``link`` connects with secret names."""
    parts, end = [], 0
    for match in NAME.finditer(content):
        if match.start() < end or not is_secret(match[2]):
            continue
        linked = link.match(content, match.end()) or (after(match) if match[1] else None)
        if linked and (secret := _VALUE.match(content, linked.end())):
            parts += [content[end : linked.end()], HIDDEN]
            end = secret.end()
    return "".join([*parts, content[end:]])
