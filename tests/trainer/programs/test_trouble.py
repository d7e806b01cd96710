"""docs/trouble.md: its messages are those of the code, and links that errors print lead there."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from my_project_trainer import errors
from my_project_trainer.launch import failures
from tests.project import ROOT

TRAINER = Path(errors.__file__).parent
PAGE = (ROOT / "docs" / "trouble.md").read_text()
SHORT = 12  # length below which a fragment of a message matches too much


def messages() -> list[str]:
    """The lines of blocks ``text``: our own messages, with … for what differs."""
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def template(node: ast.expr) -> str | None:
    """A text in the code, with … for values; ``None`` for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) or "…" for value in node.values)
    return None


def functions() -> Iterator[str]:
    """The texts of each function, one a line."""
    for file in TRAINER.rglob("*.py"):
        tree = ast.parse(file.read_text())
        for scope in (tree, *(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))):
            nodes = (child for child in ast.walk(scope) if isinstance(child, ast.expr))
            yield "\n".join(text for node in nodes if (text := template(node)))
    for file in ROOT.glob("slurm/*.sh"):
        text = re.sub(r"\$\w+", "…", file.read_text().replace("\\`", "`"))
        text = re.sub(r"\$\{\w+:-([^{}]*)\}", r"\1", text)
        yield re.sub(r"\$\{[^{}]*\}", "…", text)


def is_printed(message: str, texts: str) -> bool:
    """Whether texts of one function have all fragments of a message."""
    pieces = [word.strip(" ():;,.") for word in re.split("…|[;:] ", message)]
    fragments = [piece for piece in pieces if len(piece) >= SHORT]
    return bool(fragments) and all(is_made_of(fragment, texts) for fragment in fragments)


def is_made_of(fragment: str, texts: str) -> bool:
    """Whether a text has a fragment, or several have its parts: variables of a function."""
    if fragment in texts:
        return True
    ends = (match.start() for match in re.finditer(" ", fragment) if match.start() > 4)
    return any(
        fragment[:end] in texts and is_made_of(fragment[end + 1 :], texts)
        for end in ends
        if len(fragment) - end > SHORT
    )


def anchors() -> set[str]:
    headings = re.findall(r"^##+ (.*)$", PAGE, re.MULTILINE)
    return {re.sub(r"[^\w-]+", "-", heading.lower()).strip("-") for heading in headings}


def test_each_message_is_in_the_code_and_no_other_one() -> None:
    known, lines = [*functions()], messages()
    wrong = ["…: there is no such optoin…", "… … …", "rank … was killed by …: memory is full"]
    assert len(lines) > 40
    assert [line for line in lines if not any(is_printed(line, texts) for texts in known)] == []
    assert [line for line in wrong if any(is_printed(line, texts) for texts in known)] == []


def test_links_that_errors_print_lead_to_a_heading() -> None:
    files = [*TRAINER.rglob("*.py"), *ROOT.glob("slurm/*.sh")]
    links = {
        anchor
        for file in files
        for anchor in re.findall(r"docs/trouble\.md#([\w-]+)", file.read_text())
    }
    assert len(links) > 5
    assert links <= anchors()
    assert "a-rank-hangs" in links


def test_each_class_of_errors_is_on_the_page() -> None:
    classes = [
        name
        for name, kind in [*vars(errors).items(), ("RankError", failures.RankError)]
        if inspect.isclass(kind) and issubclass(kind, Exception)
    ]
    assert len(classes) == 7
    assert [name for name in classes if f"| `{name}` |" not in PAGE] == []


def test_each_entry_has_a_message_and_an_explanation() -> None:
    entries = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
    assert 25 <= len(entries) <= 45
    for entry in entries:
        assert re.search(r"^```(text|output)$", entry, re.MULTILINE), entry
        assert len(re.sub(r"^```.*?^```$", "", entry, flags=re.M | re.S).split()) > 12, entry
