"""Writes docs/coming-from/names.md of the rendered project, from the trainer's table of names.

`make tables` runs this file; test_docs.py fails where the page is not up to date.
"""

from __future__ import annotations

import runpy
from pathlib import Path

TEMPLATE = Path(__file__).parent.parent / "{{cookiecutter.project_slug}}"
TABLE = TEMPLATE / "src" / "{{cookiecutter.package_name}}_trainer" / "legacy" / "names.py"
PAGE = TEMPLATE / "docs" / "coming-from" / "names.md"
HEADINGS = {
    "module": "Attributes of a module",
    "argument": "Arguments of Trainer, TrainingArguments and Accelerator",
    "attribute": "Attributes of a trainer",
    "subclass": "Methods of a subclass of Trainer, which would not be called",
    "call": "Arguments of fit, validate, test, predict and log",
    "callbacks": "Arguments of callbacks",
    "scheduler": "Keys of a scheduler's dict",
    "strategy": "Strategies",
    "hook": "Hooks",
    "function": "Classes and functions",
}
BEGIN = """# Names of other trainers

You get what a name of Lightning, Accelerate or transformers is called here, as errors say it.
<!-- made by `make tables` from legacy/names.py of the trainer -->
"""


def page() -> str:
    """Return the page: a table for each place where names were used."""
    rows = list(runpy.run_path(str(TABLE))["rows"]())
    parts = [BEGIN]
    for where, heading in HEADINGS.items():
        parts.append(f"\n## {heading}\n\n| name | here |\n|---|---|\n")
        lines = [f"| `{row.name}` | {row.use} |\n" for row in rows if row.where == where]
        parts += sorted(lines, key=str.lower)
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
