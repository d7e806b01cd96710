"""What a release is made of: its notes, its workflow, and the repository's own papers."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from linters import lint, lint_workflow
from rendering import ROOT, ran

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
CHANGELOG = """# Changelog

## [Unreleased]

- Not yet.

## [1.2.0] - 2026-11-25

### Added

- More: [a page](docs/options.md#updates), [a
  site](https://example.org), [below](#top).

### Security

- Less.

## [1.10.0] - 2026-11-20

- Other.

## [0.1.0] - 2026-11-01

[1.2.0]: https://example.org/compare
"""
NOTES = """### Added

- More: [a page](https://example.org/me/x/blob/v1.2.0/docs/options.md#updates), [a
  site](https://example.org), [below](#top).

### Security

- Less.

## Update a project
"""


def script() -> ModuleType:
    """Return the script as a module; it is in no folder of modules."""
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder of the template, at version 1.2.0."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "release.py", tmp_path / ".ci")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG, encoding="utf-8")
    (tmp_path / "cookiecutter.json").write_text('{"_template_version": "1.2.0"}', encoding="utf-8")
    cited = "version: 1.2.0\ndate-released: 2026-11-25\n"
    (tmp_path / "CITATION.cff").write_text(cited, encoding="utf-8")
    return tmp_path


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / ".ci" / "release.py"), *arguments]
    return ran(command)


def test_the_notes_are_the_section_and_how_to_update(root: Path) -> None:
    done = run(root, "v1.2.0", "https://example.org/me/x/")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(NOTES)
    assert "cruft update --checkout v1.2.0\n" in done.stdout
    # Without a URL, links are left as they are.
    assert "[a page](docs/options.md#updates)" in run(root, "v1.2.0").stdout


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        ("1.2.0", ["the tag '1.2.0' is not of the form v1.2.3"]),
        ("", ["the tag '' is not of the form v1.2.3"]),
        ("v1.2.0-rc1", ["the tag 'v1.2.0-rc1' is not of the form v1.2.3"]),
        (
            "v1.10.0",
            [
                "cookiecutter.json: _template_version is 1.2.0; the tag is v1.10.0",
                "CITATION.cff: version is 1.2.0; the tag is v1.10.0",
                "CITATION.cff: date-released is 2026-11-25, not 2026-11-20; the tag is v1.10.0",
            ],
        ),
        *(
            (
                f"v{version}",
                [
                    f"cookiecutter.json: _template_version is 1.2.0; the tag is v{version}",
                    f"CITATION.cff: version is 1.2.0; the tag is v{version}",
                    f"CHANGELOG.md: no text below a heading '## [{version}] - YYYY-MM-DD'; "
                    f"the tag is v{version}",
                ],
            )
            for version in ("0.1.0", "1.2.1")  # a heading without text, and none
        ),
    ],
)
def test_each_contradiction_is_a_line(root: Path, tag: str, says: list[str]) -> None:
    done = run(root, tag)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == says


def test_this_tree_could_be_released_but_for_its_heading() -> None:
    """Until a release, the newest section is "Unreleased", and nothing else contradicts."""
    version = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["_template_version"]
    wrong = script().problems(f"v{version}", ROOT)
    assert [line for line in wrong if not line.startswith("CHANGELOG.md: no text")] == []


def test_the_workflow_passes_its_linters_and_releases_what_was_checked() -> None:
    assert lint_workflow(WORKFLOW) == ""
    content = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    assert content[True] == {"push": {"tags": ["v*"]}}  # YAML reads the key `on` as a boolean
    assert content["permissions"] == {"contents": "read"}
    check, release = content["jobs"]["check"], content["jobs"]["release"]
    assert "permissions" not in check
    assert check["steps"][0]["with"].pop("fetch-depth") == 0
    assert check["steps"][0]["with"] == {"persist-credentials": False}
    commands = [step["run"] for step in check["steps"] if "run" in step]
    assert commands[0] == "git merge-base --is-ancestor HEAD origin/main"
    assert 'python .ci/release.py "$GITHUB_REF_NAME" "$URL"' in commands[1]
    assert commands[2:] == ["make lint", "make test-template"]
    assert release["needs"] == "check"
    assert release["permissions"] == {"contents": "write"}
    (step,) = release["steps"]
    assert "uses" not in step
    assert step["env"]["NOTES"] == "${{ needs.check.outputs.notes }}"
    assert "--verify-tag" in step["run"]
    assert "${{" not in "".join([*commands, step["run"]])


def test_notes_pass_through_the_workflow_s_output(root: Path) -> None:
    """By the shell of its step, with a line that a fixed delimiter could be."""
    changelog = root / "CHANGELOG.md"
    changelog.write_text(CHANGELOG.replace("- Less.", "- Less.\n\nEOF\n- `$HOME`"), "utf-8")
    content = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    (step,) = [step for step in content["jobs"]["check"]["steps"] if step.get("id") == "notes"]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "URL": ""}
    environment |= {"GITHUB_REF_NAME": "v1.2.0", "GITHUB_OUTPUT": str(root / "output")}
    subprocess.run(["bash", "-ec", step["run"]], cwd=root, env=environment, check=True)
    first, *lines, last = (root / "output").read_text("utf-8").splitlines()
    assert re.fullmatch(r"notes<<[0-9a-f]{32}", first)
    assert first.removeprefix("notes<<") == last
    assert "\n".join([*lines, ""]) == run(root, "v1.2.0").stdout
    assert {"EOF", "- `$HOME`"} <= set(lines)


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("CITATION.cff", "vendor.citation-file-format"),
        (".github/dependabot.yml", "vendor.dependabot"),
        (".github/ISSUE_TEMPLATE/bug.yml", "vendor.github-issue-forms"),
        (".github/ISSUE_TEMPLATE/feature.yml", "vendor.github-issue-forms"),
        (".github/ISSUE_TEMPLATE/config.yml", "vendor.github-issue-config"),
    ],
)
def test_the_repository_s_papers_keep_to_their_schemas(
    name: str, schema: str, tmp_path: Path
) -> None:
    check = ("check-jsonschema", "--builtin-schema", schema, "--default-filetype", "yaml")
    assert lint(*check, ROOT / name, cwd=tmp_path) == ""
    bad = tmp_path / "bad.yml"
    bad.write_text((ROOT / name).read_text("utf-8") + "\nnone: of these\n", encoding="utf-8")
    assert lint(*check, bad, cwd=tmp_path) != ""


def test_issue_forms_name_commands_that_are_there() -> None:
    (tools,) = ROOT.glob("{{cookiecutter.project_slug}}/src/*_trainer/tools")
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text("utf-8")
    (command,) = re.findall(r"python -m PACKAGE (\w+)", text)
    assert (tools / command / "__init__.py").is_file()
