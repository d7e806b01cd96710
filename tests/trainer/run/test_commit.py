"""git tells a run's commit and what was changed, and starts no program of a repository."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
from my_project_trainer.options.redaction import HIDDEN
from my_project_trainer.run import record
from my_project_trainer.run.record import commit
from my_project_trainer.tools.reproduce import compare

import control_subject as subject


def git(*arguments: str, cwd: Path) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", *identity, "-c", "protocol.file.allow=always", *arguments]
    done = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def program(folder: Path, name: str) -> Path:
    """A program that tells that it was started, and passes on what it is given."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho {name} >> '{folder}/started'\nexec cat\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a commit, a file and a submodule; the working directory."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    folder, inner = tmp_path / "outer", tmp_path / "inner"
    for path in (inner, folder):
        path.mkdir()
        git("init", "--quiet", cwd=path)
        (path / ".gitattributes").write_text("*.low filter=lower\n")
        (path / "file.dat").write_text("content\n")
        git("add", ".", cwd=path)
        git("commit", "--quiet", "--message", "first", cwd=path)
    git("submodule", "--quiet", "add", str(inner), "below", cwd=folder)
    git("commit", "--quiet", "--message", "second", cwd=folder)
    monkeypatch.chdir(folder)
    return folder


def test_a_hostile_repository_starts_no_hook_and_no_monitor(tmp_path, repository):
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for hook in ("post-index-change", "reference-transaction", "fsmonitor-watchman"):
        program(tmp_path, hook).rename(hooks / hook)
    for path in (repository, repository / "below"):
        git("config", "core.hooksPath", str(hooks), cwd=path)
        git("config", "core.fsmonitor", str(program(tmp_path, "monitor")), cwd=path)
        (path / "file.dat").write_text("another\n")
    head = git("rev-parse", "HEAD", cwd=repository)
    started = tmp_path / "started"
    started.unlink(missing_ok=True)
    config = ["diff.external", "diff.shown.textconv", "filter.lower.clean", "filter.lower.process"]
    for key in config:
        git("config", key, str(program(tmp_path, key)), cwd=repository)
    git("config", "filter.lower.required", "true", cwd=repository)
    attributes = repository / ".git" / "info" / "attributes"
    attributes.write_text("*.dat diff=shown\n*.dat filter=lower\n")
    state = commit(repository)
    assert state is not None
    assert (state["commit"], state["dirty"], state["untracked"]) == (head, True, [])
    assert "+another" in state["diff"]
    assert not started.exists(), started.read_text()
    # They are no made-up danger: git itself starts them.
    for words in (["status"], ["diff"]):
        subprocess.run(["git", *words], cwd=repository, capture_output=True, check=False)
    assert {"monitor", "filter.lower.process"} <= {*started.read_text().split()}


def test_a_filter_of_the_user_s_own_still_works(tmp_path: Path, repository: Path) -> None:
    """As git-lfs does: what is in the working directory is not what was committed."""
    path = repository / "some.low"
    path.write_text("AbC\n")
    git("config", "--global", "filter.lower.clean", "tr A-Z a-z", cwd=repository)
    git("add", "some.low", cwd=repository)
    git("commit", "--quiet", "--message", "third", cwd=repository)
    path.write_text("aBc\n")
    assert commit(repository) == {
        "commit": git("rev-parse", "HEAD", cwd=repository),
        **{"dirty": False, "diff": "", "diff_cut": False, "untracked": []},
    }


def test_a_diff_is_cut_and_has_no_secrets(repository, monkeypatch):
    (repository / "new file.py").touch()
    secret = "hunter2"  # noqa: S105
    texts = {
        "code.py": f"password = '{secret}'\nkey = len\nx = sorted(y, key=len)\n",
        "settings.yaml": f"api_key: {secret}\nwidth: 3\n",
        "file.dat": f"https://me:{secret}@example.org/\n",
    }
    for name, text in texts.items():
        (repository / name).write_text(text)
    git("add", "code.py", "settings.yaml", cwd=repository)
    state = commit(repository)
    assert state is not None
    assert state["untracked"] == ["new file.py"]
    assert secret not in state["diff"]
    assert state["diff"].count(HIDDEN) == 3
    assert "+x = sorted(y, key=len)\n" in state["diff"]
    assert "+width: 3\n" in state["diff"]
    assert not state["diff_cut"]
    monkeypatch.setattr(record, "_MOST_DIFF_BYTES", 100)
    state = commit(repository)
    assert state is not None
    assert state["diff_cut"]
    assert len(state["diff"]) == 100


@pytest.mark.parametrize(
    ("image_commit", "expected"),
    [
        ("abc", {"commit": "abc", "dirty": False}),
        ("abc-dirty", {"commit": "abc", "dirty": True}),
        ("", None),
    ],
)
def test_without_a_commit_the_image_tells_it(tmp_path, monkeypatch, image_commit, expected):
    monkeypatch.setenv("IMAGE_COMMIT", image_commit)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        patch.setattr(record.subprocess, "run", None)  # outside of a repository, git is not started
        assert commit(tmp_path) == expected
    git("init", "--quiet", cwd=tmp_path)
    with pytest.raises(trainer.UserError, match="the repository has none yet"):
        commit(tmp_path)  # code of a repository is not the image's
    (tmp_path / "inner").mkdir()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(trainer.UserError, match="No such file or directory: git"):
        commit(tmp_path / "inner")


def test_variables_and_settings_of_the_user_change_no_record(tmp_path, repository, monkeypatch):
    (repository / "file.dat").write_text("another\n")
    (repository / "new.py").touch()
    expected = commit(repository)
    assert expected is not None
    assert expected["untracked"] == ["new.py"]
    for name, value in (
        ("status.showUntrackedFiles", "no"),
        ("diff.noprefix", "true"),
        ("diff.mnemonicPrefix", "true"),
        ("diff.context", "0"),
    ):
        git("config", "--global", name, value, cwd=repository)
    (tmp_path / "other").mkdir()
    git("init", "--quiet", cwd=tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.abbrev")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "wrong")  # which git heeds, and fails
    with pytest.raises(trainer.UserError, match="bad numeric config value 'wrong'"):
        commit(repository)
    assert "bad numeric" in record.here(repository)["git_problem"]
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "7")
    assert commit(repository) == expected
    monkeypatch.setattr(record, "_SECONDS_FOR_GIT", 0)
    with pytest.raises(trainer.UserError, match="git took more than 0 seconds"):
        commit(repository)


def test_git_is_started_twice_for_a_commit_and_once_more_for_a_diff(repository, monkeypatch):
    started: list[str] = []
    output = record._output
    monkeypatch.setattr(
        record, "_output", lambda *given: started.append(given[2]) or output(*given)
    )
    commit(repository)
    assert started == ["config", "status"]
    (repository / "file.dat").write_text("another\n")
    commit(repository)
    assert started[2:] == ["config", "status", "diff"]


def test_all_that_changed_since_a_record_is_a_line(tmp_path, repository, monkeypatch):
    (repository / ".git/info/exclude").write_text("requirements\npyproject.toml\n")
    (repository / "requirements").mkdir()
    lock, answers = repository / "requirements" / "torch.txt", repository / "pyproject.toml"
    monkeypatch.setattr(record, "_PROJECT", repository)

    def here(image: str, locked: str, version: str) -> dict[str, Any]:
        monkeypatch.setenv("IMAGE_COMMIT", image)
        lock.write_text(locked)
        answers.write_text(f'[tool.cookiecutter-distributed-torch]\nversion = "{version}"\n')
        # It is the code's commit, wherever the run was started.
        return record.here(tmp_path)

    before = here("a1", "torch==1\n", "0.1.0")
    assert list(compare.differences(before, here("a1", "torch==1\n", "0.1.0"))) == []
    (repository / "new.py").touch()
    git("commit", "--quiet", "--message", "third", "--allow-empty", cwd=repository)
    (repository / "file.dat").write_text("changed\n")
    after = here("b2", "torch==2\n", "0.2.0")
    lines = list(compare.differences(before, after))
    old, new = (state["git"]["commit"] for state in (before, after))
    sums = [state["locks"]["torch.txt"] for state in (after, before)]
    (changed,) = (line for line in lines if line.startswith("diff: file.dat: changes "))
    assert changed.endswith(", recorded none")
    assert sorted({*lines} - {changed}) == [
        f"commit: {new}, recorded {old}",
        "file: new.py: untracked, recorded none",
        "image: commit: b2, recorded a1",
        f"lock: torch.txt: {sums[0]}, recorded {sums[1]}",
        "template: version: 0.2.0, recorded 0.1.0",
    ]


def test_a_run_in_another_copy_of_the_project_says_whose_code_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = Path(trainer.__file__).resolve().parent.parent
    assert record.other_code(code.parent) == []
    assert record.other_code(tmp_path) == []
    (tmp_path / "src/my_project_trainer").mkdir(parents=True)
    line = f"the code in {code} runs, not that in {tmp_path}/src: first `make setup`"
    assert record.other_code(tmp_path) == [line]
    monkeypatch.chdir(tmp_path)
    options = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "enable_progress_bar": False}
    trainer.Trainer(**options, run_name="run").fit(subject.Net())
    assert f"note: {line}\n" in capsys.readouterr().err
    (attempt,) = json.loads(Path("runs/run/run.json").read_text())["attempts"]
    assert (attempt["code"], attempt["directory"]) == (str(code), str(tmp_path))
