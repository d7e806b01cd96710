"""Adds the template's own pages to the docs of a render, for one site of both: FOLDER of a render.

`make docs` runs this file. Links from a page of the template to one of the project, and from
CONTRIBUTING.md to docs/, are those of the repository; in the site they are shorter.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT_DOCS = "%7B%7Bcookiecutter.project_slug%7D%7D/docs/"
# In this order, with their titles in the navigation.
PAGES = {
    "options": "Questions of the template",
    "evidence": "Evidence",
    "benchmarks": "Benchmarks",
    "memory": "Memory, measured",
    "checkpoints": "Checkpoints, measured",
    "plan": "Accuracy of plan",
    "pipeline": "Pipelines, measured",
    "scale": "Many ranks, measured",
    "study": "Batch size and learning rate",
    "soak": "Random faults",
    "gpu": "GPUs",
    "design": "Design of the template",
    "contributing": "Contributing",
    "changelog": "Changelog",
}


def in_site(text: str) -> str:
    """Return a page of the template with its links as they are in the site."""
    text = text.replace(f"../{PROJECT_DOCS}", "../").replace(PROJECT_DOCS, "../")
    text = re.sub(r"\]\((?:docs|\.\./docs)/", "](", text)
    text = re.sub(
        r"\]\((?:\.\./)?(CONTRIBUTING|CHANGELOG)\.md", lambda m: f"]({m[1].lower()}.md", text
    )
    # What is no page of the site is named without a link.
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)?(?:README|benchmarks/README)\.md[^)]*\)", r"\1", text)


def add(project: Path) -> None:
    """Copy the template's pages, plots and tables into the render's docs and navigation."""
    folder = project / "docs" / "template"
    folder.mkdir()
    for name in PAGES:
        page = ROOT / "docs" / f"{name}.md"
        page = page if page.exists() else ROOT / f"{name.upper()}.md"
        (folder / f"{name}.md").write_text(in_site(page.read_text("utf-8")), encoding="utf-8")
    for pattern in ("*.svg", "*.csv"):
        for shown in ROOT.glob(f"docs/{pattern}"):
            shutil.copy(shown, folder)
    config = project / "mkdocs.yml"
    text = config.read_text(encoding="utf-8")
    text = re.sub(r"^site_name: .*$", "site_name: cookiecutter-distributed-torch", text, flags=re.M)
    lines = [f"      - {title}: template/{name}.md" for name, title in PAGES.items()]
    config.write_text("\n".join([text.rstrip(), "  - The template:", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    add(Path(sys.argv[1]))
