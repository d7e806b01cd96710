"""Writes the table of options into docs/options.md, from the rules that check the answers.

`make tables` runs this file; test_docs.py fails where the page is not up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "options.md"
BEGIN = "<!-- made by `make tables` from cookiecutter.json and local_extensions.py: begin -->"
END = "<!-- end -->"
FOLLOWS = "{{ 'no' if cookiecutter.parts == 'core' else 'yes' }}"


def table() -> str:
    """Return one row for each question: name, wording, default, accepted answers."""
    from local_extensions import NEEDS, RULES

    settings = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
    rows = ["| option | question | default | accepts |", "|---|---|---|---|"]
    for name, rule in RULES.items():
        default = f"`{settings[name]}`" if settings[name] else "empty"
        default = "`yes`; `no` with `parts=core`" if settings[name] == FOLLOWS else default
        takes = rule.says + (", or its number" if rule.menu else "")
        takes += "" if rule.choices else f"; at most {rule.longest} characters"
        takes += "; may be empty" if rule.may_be_empty and "nothing" not in rule.says else ""
        takes += "".join(
            f"; `{answer}` needs `{other}={choice}`"
            for (question, answer), (other, choice) in NEEDS.items()
            if question == name
        )
        question = settings["__prompts__"][name].splitlines()[
            0
        ]  # a menu has a line for each choice
        cells = (f"`{name}`", question, default, takes)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def page(text: str) -> str:
    """Return the page with its table regenerated."""
    before, rest = text.split(BEGIN)
    _old, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
