"""Redact secrets in the output of ``git diff``, line by line."""

import re

from .redaction import HIDDEN, NAME, after, is_secret, without_forms

# What stands between a name and its value: in source code, in settings.
_IN_CODE = re.compile(r"""\\?["'`](\]?\s*[:=,]|\))|\s*[:=!]=?|\s+(?=["'`])""")
_IN_SETTINGS = re.compile(r"""\\?["']?\]?\s*[?+:]?[:=>]""")
_CODE = (
    *(".c", ".cc", ".cpp", ".cu", ".cuh", ".go", ".h", ".hpp", ".java"),
    *(".js", ".py", ".pyi", ".rs", ".ts"),
)
_NAMED = re.compile(r"""\s*(?:- )?["']?name["']?\s*[:=]\s*["']?([\w.-]+)["',]*\s*$""")
_CONTINUES = re.compile(r"""(=|["']\s*[:,])\s*[(\[{\\]*$""")
_OPEN = ("=", "(", "[", "{", ",", "\\", "+", "|")
_OPEN_SETTINGS = (*_OPEN, ":", ">", "-")
_QUOTES = ('"""', "'''")


def redacted(diff: str) -> str:
    """The output of ``git diff``, with its lines redacted from secret literals and settings on."""
    lines: list[str] = []
    is_code = False
    until: str | int | None = None  # what ends a value of several lines: a text, an indentation
    begin: int | None
    for line in without_forms(diff).splitlines(keepends=True):
        body, begin = line[1:], None
        indent = len(body) - len(body.lstrip())
        if line.startswith(("diff --git ", "@@ ")):
            is_code = is_code if line[0] == "@" else line.rstrip('"\n').endswith(_CODE)
            until = None
        if isinstance(until, str):
            begin = indent
            until = None if until in body else until
        elif until is not None and indent + (body.lstrip()[:2] == "- ") > until:
            begin = indent
        elif body.strip():
            begin, until = _value_in(body, is_code), None
            if begin is not None:
                rest = body[begin:].rstrip()
                quotes = (quote for quote in _QUOTES if rest.count(quote) % 2)
                is_open = not rest or rest.endswith(_OPEN if is_code else _OPEN_SETTINGS)
                until = next(quotes, indent if is_open else None)
            elif not is_code and (named := _NAMED.match(body)) and is_secret(named[1]):
                until = "\n"  # the next line has its value
        lines.append(line if begin is None else f"{line[0]}{body[:begin]}{HIDDEN}\n")
    return "".join(lines)


def _value_in(line: str, is_code: bool) -> int | None:
    """Where the value of the first secret in a line of a file begins."""
    last_quote, continues = max(map(line.rfind, "\"'`")), _CONTINUES.search(line.rstrip())
    for match in NAME.finditer(line):
        if not is_secret(match[2]):
            continue
        link = _IN_CODE.match(line, match.end())
        if link and (last_quote >= link.end() or continues):
            return link.end()
        if not is_code and (link := _IN_SETTINGS.match(line, match.end()) or after(match)):
            return link.end()
    return None
