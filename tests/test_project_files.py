"""What a project has by question: pre-commit, update services, editors, a container to work in."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import ClickException
from history import missing
from linters import TOOLS, lint
from rendering import TEMPLATE, git, make_repository, ran, render
from test_update import PYTHON

from local_extensions import EDITORS, UPDATES

# With it all; Renovate, because it reads what each CI service has.
EVERYTHING = {"updates": "renovate", "pre_commit": "yes", "editor": "devcontainer"}
PRE_COMMIT = shutil.which("pre-commit", path=f"{TOOLS}:{os.environ['PATH']}")
# Of the schema in github.com/devcontainers/spec, what is used.
DEVCONTAINER_KEYS = {
    *("name", "image", "hostRequirements", "runArgs", "containerEnv", "postCreateCommand"),
    "customizations",
}
DEBUGGED = ("fit: one process", "fit: two processes")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a render with all of these files, whose name must be quoted."""
    answers = EVERYTHING | {"project_name": 'Night "Train" \\ 1', "project_slug": "night"}
    return render(tmp_path_factory.mktemp("files"), answers, hooks=True)


def read(file: Path) -> Any:
    """Return what a file of JSON holds; VS Code's may have comments, each in a line of its own."""
    return json.loads(re.sub(r"^\s*//.*$", "", file.read_text("utf-8"), flags=re.MULTILINE))


def own_files(project: Path) -> set[str]:
    """Return the files of a render whose being there depends on these questions."""
    places = (".vscode/*", ".devcontainer/*", ".github/*.*", "renovate.json", ".pre-commit*")
    return {str(file.relative_to(project)) for place in places for file in project.glob(place)}


def test_each_answer_has_its_files(project: Path, tmp_path: Path) -> None:
    code = {f".vscode/{name}.json" for name in ("settings", "extensions", "launch")}
    editors = {"none": set[str](), "vscode": code}
    editors["devcontainer"] = code | {".devcontainer/devcontainer.json"}
    assert set(editors) == set(EDITORS)
    for editor, files in editors.items():
        chosen = render(tmp_path / "editors" / editor, {"editor": editor}, hooks=True)
        assert own_files(chosen) == files
    updates = {"none": set[str](), "dependabot": {".github/dependabot.yml"}}
    updates["renovate"] = {"renovate.json"}
    assert set(updates) == set(UPDATES)
    for service, files in updates.items():
        assert own_files(render(tmp_path / service, {"updates": service}, hooks=True)) == files
    both = editors["devcontainer"] | updates["renovate"]
    assert own_files(project) == both | {".pre-commit-config.yaml"}


def test_dependabot_is_for_workflows_of_github(tmp_path: Path) -> None:
    project = render(tmp_path, {"updates": "dependabot"})
    file = project / ".github" / "dependabot.yml"
    assert (
        lint("check-jsonschema", "--builtin-schema", "vendor.dependabot", file, cwd=project) == ""
    )
    assert lint("zizmor", "--offline", "--quiet", file, cwd=project) == ""
    (update,) = yaml.safe_load(file.read_text("utf-8"))["updates"]
    assert update["package-ecosystem"] == "github-actions"
    for service in ("gitlab", "none"):
        with pytest.raises(ClickException) as refusal:
            render(tmp_path / service, {"updates": "dependabot", "ci": service})
        line = f"updates 'dependabot' is refused: it needs ci=github, not {service}"
        assert refusal.value.format_message() == line
        assert not (tmp_path / service).exists()


@pytest.mark.parametrize(
    ("service", "manager"), [("github", "github-actions"), ("gitlab", "gitlabci"), ("none", None)]
)
def test_renovate_updates_what_no_lock_holds(
    service: str, manager: str | None, tmp_path: Path
) -> None:
    project = render(tmp_path, {"updates": "renovate", "ci": service})
    file = project / "renovate.json"
    assert lint("check-jsonschema", "--builtin-schema", "vendor.renovate", file, cwd=project) == ""
    assert read(file)["enabledManagers"] == ["dockerfile", *([manager] if manager else [])]
    bad = tmp_path / "bad.json"
    bad.write_text(
        file.read_text("utf-8").replace('"enabledManagers": [', '"enabledManagers": [1, ')
    )
    assert lint("check-jsonschema", "--builtin-schema", "vendor.renovate", bad, cwd=project)


def test_pre_commit_runs_what_ci_runs(project: Path) -> None:
    """No version stands in its file, so none can differ from that of the lock."""
    content = yaml.safe_load((project / ".pre-commit-config.yaml").read_text("utf-8"))
    (repository,) = content["repos"]
    assert repository["repo"] == "local"
    entries = [hook["entry"] for hook in repository["hooks"]]
    workflow = yaml.safe_load((project / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    steps = [step.get("run") for step in workflow["jobs"]["lint"]["steps"]]
    assert [entry for entry in steps if entry] == ["make setup", *entries]


def commit_by_pre_commit(project: Path) -> subprocess.CompletedProcess[str]:
    """Commit all in a repository that has the hook, as a user does."""
    git(project, "add", "--all")
    identity = ("-c", "user.name=x", "-c", "user.email=x@localhost")
    environment = os.environ | {"VENV": str(PYTHON.parent.parent)}
    environment["PRE_COMMIT_HOME"] = str(project.parent / "pre-commit")
    return ran(["git", *identity, "commit", "--message", "Change"], cwd=project, env=environment)


@pytest.mark.trains
def test_a_commit_with_an_error_is_stopped(tmp_path: Path) -> None:
    """By the real pre-commit, in the environment of a project; without its step of installing."""
    if not PRE_COMMIT or not PYTHON.exists():
        missing("needs pre-commit and a project's environment: make project")
    project = render(tmp_path, {"pre_commit": "yes"}, hooks=True)
    make_repository(project)
    makefile = project / "Makefile"  # the environment is another project's: leave it as it is
    text = re.sub(r"^(lint|typecheck): setup", r"\1:", makefile.read_text("utf-8"), flags=re.M)
    makefile.write_text(text, encoding="utf-8")
    subprocess.run([PRE_COMMIT, "install"], cwd=project, check=True, capture_output=True)
    task = project / "src" / "my_project" / "tasks" / "line.py"
    task.write_text("print(undefined)\n", encoding="utf-8")
    done = commit_by_pre_commit(project)
    assert done.returncode == 1
    assert re.search(r"make lint\.+Failed", done.stderr), done.stderr
    assert "Undefined name `undefined`" in done.stderr
    task.write_text("print(1)\n", encoding="utf-8")
    done = commit_by_pre_commit(project)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\.Passed$", done.stderr, re.MULTILINE)) == 2
    assert git(project, "rev-list", "--count", "HEAD") == "2\n"


def test_vs_code_debugs_one_process_and_two(project: Path) -> None:
    launch = read(project / ".vscode" / "launch.json")
    by_name = {configuration["name"]: configuration for configuration in launch["configurations"]}
    assert tuple(by_name) == DEBUGGED
    for entry in by_name.values():
        assert (entry["type"], entry["request"], entry["module"]) == ("debugpy", "launch", "night")
        arguments = dict(zip(entry["args"][1::2], entry["args"][2::2], strict=True))
        assert (project / arguments["--config"]).is_file()
    assert by_name["fit: two processes"]["subProcess"] is True
    settings = read(project / ".vscode" / "settings.json")
    assert settings["python.defaultInterpreterPath"] == "${workspaceFolder}/.venv/bin/python"


@pytest.mark.trains
@pytest.mark.parametrize("name", DEBUGGED)
def test_what_vs_code_starts_trains(name: str, project: Path) -> None:
    if not PYTHON.exists():
        missing("no project is installed: make project")
    launch = read(project / ".vscode" / "launch.json")
    (configuration,) = [entry for entry in launch["configurations"] if entry["name"] == name]
    done = ran(
        [PYTHON, "-m", configuration["module"], *configuration["args"], "--trainer.max_steps", "2"],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(project / "src"), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    count = configuration["args"][configuration["args"].index("--trainer.devices") + 1]
    assert f"{count} process" in done.stdout + done.stderr
    shutil.rmtree(project / "runs")


def test_the_container_to_work_in_is_set_up_by_make(project: Path) -> None:
    content = read(project / ".devcontainer" / "devcontainer.json")
    assert set(content) == DEVCONTAINER_KEYS
    assert content["name"] == 'Night "Train" \\ 1'
    assert content["postCreateCommand"] == "make setup"
    makefile = (TEMPLATE / "Makefile").read_text("utf-8")
    assert "\nVENV ?= .venv\n" in makefile  # which the container's variable sets
    assert re.fullmatch(r"mcr\.microsoft\.com/devcontainers/python:3\.11-\w+", content["image"])
    settings = content["customizations"]["vscode"]["settings"]
    python = content["containerEnv"]["VENV"] + "/bin/python"
    assert settings["python.defaultInterpreterPath"] == python
    recommended = read(project / ".vscode" / "extensions.json")["recommendations"]
    assert content["customizations"]["vscode"]["extensions"] == recommended
