"""Links between the pages, and names of files in them, lead somewhere."""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path

import pytest
from rendering import ROOT, TEMPLATE, template_files

PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(TEMPLATE.glob("docs/**/*.md")),
    ROOT / "benchmarks" / "README.md",
    TEMPLATE / "README.md",
)
# Examples of what users create, or had.
EXAMPLES = {
    *("tasks/line.py", "strategies/sign.py", "lora.py", "reviews.py", "tasks/houses.py"),
    "upload.py",
}
EXAMPLES |= {"predict.py", "squares.py"}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        name, _, anchor = urllib.parse.unquote(target).partition("#")
        other = page.parent / name if name else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


def test_files_named_on_pages_exist() -> None:
    files = [f"/{name}" for name in template_files(ROOT)]
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    text = text.replace("src/my_project/", "").replace("src/my_project_trainer/", "")
    named = set(re.findall(r"`([\w./-]+\.(?:py|sh))`", text))
    assert {"logging/loggers.py", "slurm/cluster.sh", "tasks/gan.py"} <= named
    missing = {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
    assert missing == EXAMPLES
