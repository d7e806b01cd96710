"""Prints the notes of a release, cut from CHANGELOG.md: release.py TAG [URL].

URL is that of the repository, for the links of the changelog, which are relative to its files. Ends
with 1 and a line for each problem if the tag, `_template_version`, CHANGELOG.md and CITATION.cff do
not say the same. `.github/workflows/release.yml` runs it for a tag.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADING = r"^## \[%s\] - (\d{4}-\d\d-\d\d)\n"
UPDATE = """
## Update a project

```
pip install cruft
cruft update --checkout {tag}
make setup
make test
```

Commit your edits first. `docs/how-to/update.md` of your project says what happens to them.
"""


def section(changelog: str, version: str) -> tuple[str, str]:
    """Return the date and the text of a version's section; both are empty if there is none."""
    parts = re.split(HEADING % re.escape(version), changelog, flags=re.MULTILINE)
    if len(parts) != 3:
        return "", ""
    # Up to the next heading of this level, or to the links at the end.
    text = re.split(r"^(?:## |\[[^\]]+\]: )", parts[2], maxsplit=1, flags=re.MULTILINE)[0]
    return parts[1], text.strip()


def absolute_links(text: str, base: str) -> str:
    """Return Markdown whose links to files of the repository begin with `base`."""
    return re.sub(r"\]\((?!https?://|mailto:|#)([^)\s]+)\)", rf"]({base}/\1)", text)


def problems(tag: str, root: Path) -> list[str]:
    """Return what does not agree with a tag such as v1.2.3, one line each."""
    if not re.fullmatch(r"v(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", tag):
        return [f"the tag {tag!r} is not of the form v1.2.3"]
    version = tag.removeprefix("v")
    settings = json.loads((root / "cookiecutter.json").read_text(encoding="utf-8"))
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    cited = dict(re.findall(r"^(version|date-released): \"?([^\"\n]+)\"?$", citation, re.MULTILINE))
    date, text = section((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    found = []
    if settings["_template_version"] != version:
        found.append(f"cookiecutter.json: _template_version is {settings['_template_version']}")
    if cited.get("version") != version:
        found.append(f"CITATION.cff: version is {cited.get('version')}")
    if not text:
        found.append(f"CHANGELOG.md: no text below a heading '## [{version}] - YYYY-MM-DD'")
    elif cited.get("date-released") != date:
        found.append(f"CITATION.cff: date-released is {cited.get('date-released')}, not {date}")
    return [f"{line}; the tag is {tag}" for line in found]


def notes(tag: str, url: str, root: Path) -> str:
    """Return the notes: the section of the changelog, and how to update a project."""
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    text = section(changelog, tag.removeprefix("v"))[1]
    text = absolute_links(text, f"{url}/blob/{tag}") if url else text
    return f"{text}\n{UPDATE.format(tag=tag)}"


if __name__ == "__main__":
    tag, url = [*sys.argv[1:], "", ""][:2]
    if wrong := problems(tag, ROOT):
        sys.exit("\n".join(wrong))
    print(notes(tag, url.rstrip("/"), ROOT), end="")
