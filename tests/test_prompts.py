"""At a terminal, a refused answer is asked again, and all others are kept."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from history import clone_with_working_tree
from rendering import CORE, DEFAULTS, NEXT_STEPS, ROOT, check_works, command, git
from terminal import Terminal

from local_extensions import COMPONENTS, RULES

PROMPTS = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))["__prompts__"]
COOKIECUTTER = (sys.executable, "-m", "cookiecutter", str(ROOT))


def answer_all(terminal: Terminal, answers: dict[str, Sequence[str]]) -> list[str]:
    """Give each question its answers, one after the other; return what was said to refused ones."""
    said = []
    for name, prompt in PROMPTS.items():
        question = prompt.splitlines()[0][:50]  # a terminal breaks longer lines
        first, *others = answers.get(name, [""])
        terminal.answer(f"] {question}", first)
        for other in others:
            said.append(terminal.answer(f"/{len(PROMPTS)}] {question}", other).split("\n")[1])
    return said


def test_a_refused_answer_is_asked_again_and_the_others_are_kept(tmp_path: Path) -> None:
    with Terminal(*COOKIECUTTER, cwd=tmp_path) as terminal:
        said = answer_all(
            terminal,
            {
                "project_name": ["Night Train"],
                "project_slug": ["Not A Slug", "bash", ""],  # at last the one that is offered
                "author_name": ["O'Brien"],
                "version": ["1.0-final", "{{ 7*7 }}", "2.0"],
                "license": ["mit", "GPL", "3"],
                "deepspeed": ["N"],
                "fairscale": ["yep", "Y"],
                "horovod": ["no"],
                "xla": ["YES"],
                "ci": ["4", "gitlab"],
                "updates": ["dependabot", "renovate"],
            },
        )
        code, rest = terminal.end()
    assert said == [
        "project_slug 'Not A Slug' is refused: lower-case letters, digits, - and _ only, "
        "a letter or digit first and last",
        "project_slug 'bash' is refused: "
        "that name belongs to something the project installs or uses",
        "version '1.0-final' is refused: "
        "that is not a version in PEP 440's normal form, such as 0.1.0 or 2.0rc1",
        "version '{{ 7*7 }}' is refused: {{, {% and {# are not allowed",
        "license 'mit' is refused: "
        "choose from MIT, Apache-2.0, BSD-3-Clause, Proprietary; did you mean MIT?",
        "license 'GPL' is refused: choose from MIT, Apache-2.0, BSD-3-Clause, Proprietary",
        "fairscale 'yep' is refused: choose from yes, no; did you mean yes?",
        "ci '4' is refused: choose from github, gitlab, none",
        "updates 'dependabot' is refused: it needs ci=github, not gitlab",
    ]
    project = tmp_path / "night-train"
    assert (code, rest.split("\n", 1)[1]) == (0, NEXT_STEPS % project)
    expected = {
        "project_name": "Night Train",
        "project_slug": "night-train",
        "package_name": "night_train",
        "author_name": "O'Brien",
        "version": "2.0",
        "license": "BSD-3-Clause",
        "deepspeed": "no",
        "horovod": "no",
        "ci": "gitlab",
        "updates": "renovate",
    }
    check_works(project, DEFAULTS | expected)


def test_a_default_that_is_refused_is_not_offered_again(tmp_path: Path) -> None:
    """The slug follows from the project's name: here it is that of a package."""
    with Terminal(*COOKIECUTTER, cwd=tmp_path) as terminal:
        said = answer_all(terminal, {"project_name": ["Torch"], "project_slug": ["", "", "mine"]})
        code, _ = terminal.end()
    assert [line.split(":")[0] for line in said] == [
        "project_slug 'torch' is refused",
        "project_slug '' is refused",
    ]
    assert code == 0
    assert (tmp_path / "mine" / "src" / "mine").is_dir()


def test_three_answers_and_enter_give_the_core(tmp_path: Path) -> None:
    """The answers about parts follow the third one; one of them is given all the same."""
    assert list(PROMPTS)[:3] == ["project_name", "author_name", "parts"]
    answers = {"project_name": "Night Train", "author_name": "Zoë", "parts": "core"}
    with Terminal(*COOKIECUTTER, cwd=tmp_path) as terminal:
        answer_all(terminal, {name: [answer] for name, answer in answers.items()})
        code, _ = terminal.end()
    names = {"project_slug": "night-train", "package_name": "night_train"}
    assert code == 0
    check_works(tmp_path / "night-train", DEFAULTS | CORE | answers | names)
    done = command("--no-input", "parts=2", "deepspeed=yes", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    check_works(tmp_path / "my-project", DEFAULTS | CORE | {"deepspeed": "yes"})


def test_cruft_asks_again_too(tmp_path: Path) -> None:
    template = clone_with_working_tree(tmp_path)
    cruft = (sys.executable, "-m", "cruft", "create", str(template))
    with Terminal(*cruft, cwd=tmp_path) as terminal:
        said = answer_all(terminal, {"license": ["5", "2"]})
        code, rest = terminal.end()
    line = "license '5' is refused: choose from MIT, Apache-2.0, BSD-3-Clause, Proprietary"
    assert said == [line]
    assert (code, rest.split("\n", 1)[1]) == (0, NEXT_STEPS % (tmp_path / "my-project"))
    stored = json.loads((tmp_path / "my-project" / ".cruft.json").read_text(encoding="utf-8"))
    assert stored["context"]["cookiecutter"]["license"] == "Apache-2.0"


def test_a_terminal_without_questions_is_asked_nothing(tmp_path: Path) -> None:
    with Terminal(*COOKIECUTTER, "--no-input", "license=GPL", cwd=tmp_path) as terminal:
        code, rest = terminal.end()
    assert (code, rest) == (
        1,
        "Error: license 'GPL' is refused: choose from MIT, Apache-2.0, BSD-3-Clause, Proprietary\n",
    )


def test_every_choice_of_a_menu_is_listed() -> None:
    menus = {name: rule.choices for name, rule in RULES.items() if rule.menu}
    places = ("torch_variant", "container_runtime", "other_launchers")
    last = ("ci", "updates", "pre_commit", "editor")
    assert list(menus) == ["parts", "license", "examples", *COMPONENTS, "trainer", *places, *last]
    for name, choices in menus.items():
        _question, *lines, end = PROMPTS[name].splitlines()
        assert end == "    Choose a number or a name"
        numbered = enumerate(choices, 1)
        assert lines == [f"    [bold magenta]{i}[/] - [bold]{word}[/]" for i, word in numbered]


def test_names_beyond_ascii_are_taken_in_any_locale(tmp_path: Path) -> None:
    """Where Python takes the command line and the terminal for ASCII, bytes come as surrogates."""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [*COOKIECUTTER, "--no-input", "author_name=Zoë", "project_name=Größe: 5 Äpfel"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    names = {"project_slug": "grosse-5-apfel", "package_name": "grosse_5_apfel"}
    names |= {"project_name": "Größe: 5 Äpfel", "author_name": "Zoë"}
    check_works(tmp_path / "grosse-5-apfel", DEFAULTS | names)
    typed = subprocess.run(
        COOKIECUTTER,
        cwd=tmp_path,
        env=environment,
        input="\nZoë\n".encode() + b"\n" * (len(PROMPTS) - 2),
        capture_output=True,
        timeout=600,
    )
    assert (typed.returncode, typed.stderr) == (0, b"")
    check_works(tmp_path / "my-project", DEFAULTS | {"author_name": "Zoë"})


@pytest.mark.parametrize("inside", [".", "tests", "build/../docs"])
def test_a_render_into_the_template_s_own_folder_is_refused(inside: str) -> None:
    before = sorted(ROOT.iterdir())
    done = command("--no-input", "--output-dir", inside, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    problem = f"Error: the output folder '{inside}' is refused: it is in the template"
    assert done.stderr == f"{problem}; add --output-dir FOLDER\n"
    assert sorted(ROOT.iterdir()) == before


def test_the_readme_s_commands_render_beside_the_template(tmp_path: Path) -> None:
    template = clone_with_working_tree(tmp_path)
    lines = (template / "README.md").read_text(encoding="utf-8").splitlines()
    here = [re.sub(r"https://\S+", ".", line.split("  #")[0]) for line in lines]  # no network
    tools = [line for line in here if line.startswith(("cookiecutter ", "cruft "))]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    for line in tools:
        shell = ("bash", "-euc", line if "--no-input" in line else f"{line} --no-input")
        subprocess.run(shell, cwd=template, env=environment, check=True, timeout=600)
    assert len(tools) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"template", "my-project", "night-train"}
    assert git(template, "status", "--porcelain", "--ignored") == ""
