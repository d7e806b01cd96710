"""Hostile answers in every field are refused in one line, or render a project that works."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import cookiecutter.prompt
import pytest
from click import ClickException
from click.testing import CliRunner
from cookiecutter.cli import main
from cookiecutter.main import cookiecutter as bake
from hostile import CANARY, HOSTILE, JINJA_CODE, Area
from rendering import DEFAULTS, ROOT, check_works, command, render

import distributed_torch_extension
from local_extensions import RULES, Answers, checked

FIELDS = list(DEFAULTS)
# Words of letters, digits, - and _, which are names of a partition or an account as well.
WORDS = {
    *("keyword", "soft keyword", "standard library", "dependency", "own folder", "leading digit"),
    *("device of Windows", "false"),
}
# What each field takes of HOSTILE as it stands; everything else is refused. Only the names of
# things are narrow: text for people may hold what people write.
TEXT = WORDS | {
    *("single quote", "double quote", "triple quotes", "apostrophe", "command substitution"),
    *("backticks", "semicolon", "variable", "half a brace", "parent", "absolute path", "home"),
    *("dots", "unicode", "emoji", "emoji, joined", "trailing dash", "percent", "hash"),
    *("backslashes", "trailing dot", "angle brackets", "YAML", "markup of rich"),
}
TAKEN = {
    "project_name": TEXT,
    "author_name": TEXT,
    "project_slug": {"keyword", "soft keyword", "standard library", "leading digit", "false"},
    "package_name": {"false"},
    "description": TEXT | {"empty"},
    "author_email": {"empty"},
    "slurm_partition": WORDS | {"empty"},
    "slurm_account": WORDS | {"empty"},
    **{name: set[str]() for name, rule in RULES.items() if rule.choices},
    **{name: set[str]() for name in ("version", "gpus_per_node")},
}
# The fields that take each value.
ALL_TAKEN = {value: [field for field in FIELDS if value in TAKEN[field]] for value in HOSTILE}
# Whatever could be compiled or run goes the whole way in each field; of the rest, the rules are
# asked in a moment (test_the_rule_alone), and one value of each field goes the whole way too.
RUNNABLE = [
    value
    for value, answer in HOSTILE.items()
    if CANARY in answer or "{" in answer or value == "newline"
]


@pytest.fixture
def area(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Area:
    area = Area(tmp_path / "area")
    area.lay()
    monkeypatch.chdir(area.cwd)
    return area


def assert_refused_in_a_line(area: Area, message: str) -> None:
    assert len(message.splitlines()) == 1
    assert len(message) < 250
    assert message.isprintable()
    area.assert_untouched()


def bake_in(
    area: Area, answers: dict[str, str], as_typed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Render with these answers, as `--no-input field=value` or as the prompts would take them."""

    def typed(name: str, *_rest: object) -> str:
        return answers[name]

    if as_typed:
        monkeypatch.setattr(cookiecutter.prompt, "read_user_variable", typed)
        bake(str(ROOT), output_dir=str(area.output), accept_hooks=False)
    else:
        render(area.output, answers)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("as_typed", [False, True])
def test_what_could_run_is_refused(
    area: Area, field: str, as_typed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an option, cookiecutter compiles the value as a template of its own."""
    taken = []
    for value in RUNNABLE:
        if value not in TAKEN[field]:
            try:
                bake_in(area, DEFAULTS | {field: HOSTILE[value]}, as_typed, monkeypatch)
                taken.append(value)
            except ClickException as refusal:
                assert_refused_in_a_line(area, refusal.format_message())
    assert taken == []


@pytest.mark.parametrize("value", [value for value in HOSTILE if ALL_TAKEN[value]])
@pytest.mark.parametrize("as_typed", [False, True])
def test_taken_in_every_field_at_once(
    area: Area, value: str, as_typed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = DEFAULTS | dict.fromkeys(ALL_TAKEN[value], HOSTILE[value])
    bake_in(area, answers, as_typed, monkeypatch)
    check_works(area.the_project(), answers)


@pytest.mark.parametrize("field", FIELDS)
def test_the_rule_alone(field: str) -> None:
    """Every field with every value, in a moment; the tests around it go the whole way."""
    for value, answer in HOSTILE.items():
        if value in TAKEN[field]:
            assert checked(answer, field) == answer
        else:
            with pytest.raises(ClickException):
                checked(answer, field)


@pytest.mark.parametrize("value", HOSTILE)
def test_names_derived_from_a_hostile_project_name(area: Area, value: str) -> None:
    """Folder and package follow from the project's name, where they are not given."""
    try:
        project = render(area.output, {"project_name": HOSTILE[value]})
    except ClickException:
        area.assert_untouched()
    else:
        assert area.the_project() == project
        assert value in TEXT
        slug = project.name
        derived = {"project_slug": slug, "package_name": slug.replace("-", "_")[:40]}
        check_works(project, DEFAULTS | {"project_name": HOSTILE[value]} | derived)


# The same by the command, hooks included; values that reach it otherwise than in-process.


def assert_refused(area: Area, *arguments: str, stdin: str = "", says: str) -> None:
    """Run the command in this process: test_prompts.py has the same as a process of its own."""
    words = [str(ROOT), *arguments, "--output-dir", str(area.output)]
    done = CliRunner().invoke(main, words, input=stdin)
    assert done.exit_code == 1, done.output
    assert done.stderr.startswith("Error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("\n")
    assert "Traceback" not in done.stdout
    area.assert_untouched()


def test_code_as_a_default_of_a_prompt(area: Area) -> None:
    assert_refused(area, f"author_name={JINJA_CODE}", stdin="\n" * 20, says="are not allowed")


@pytest.mark.parametrize(
    ("field", "answer", "says"),
    [
        *((field, "{{cookiecutter.project_slug}}", "are not allowed") for field in FIELDS),
        ("project_name", "", "it may not be empty"),
        ("project_slug", "../../x", "lower-case letters"),
        ("project_slug", "torch", "belongs to something"),
        ("package_name", "class", "keyword of Python"),
        ("package_name", "test", "standard library"),
        ("package_name", "telnetlib", "standard library"),  # Python 3.13 has it no longer
        ("package_name", "example", "module or folder that the project uses"),  # nvidia-ml-py's
        ("project_name", "test", "project_slug 'test' is refused: that name belongs to something"),
        ("package_name", "conftest", "module or folder that the project uses"),
        ("package_name", "sitecustomize", "module or folder that the project uses"),
        ("package_name", "p" * 41, "at most 40 characters"),
        ("description", "x\ny", "line breaks"),
        ("author_name", "x" * 300, "(300 characters) is refused: at most 100 characters"),
        ("author_name", "-rf", "no dash first"),
        ("author_email", "a..b@example.org", "not an e-mail address"),
        ("slurm_partition", "long, short", "separated by commas without spaces"),
        ("slurm_partition", "long;id", "letters, digits"),
        ("slurm_account", "long,short", "letters, digits"),
        ("gpus_per_node", "65", "a whole number from 0 to 64"),
        ("gpus_per_node", "08", "a whole number from 0 to 64"),
        ("gpus_per_node", "", "it may not be empty"),
    ],
)
def test_refused_on_the_command_line(area: Area, field: str, answer: str, says: str) -> None:
    assert_refused(area, "--no-input", f"{field}={answer}", says=says)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["../../x", "", "", "../x"], "project_slug"),
        (["x", "{% raw %}"], "are not allowed"),
        (["x", "", "most"], "choose from all, core"),
        (["x", "", "", "x", "import"], "keyword"),
        (["x", "", "", "x", "x", JINJA_CODE], "are not allowed"),
        (["x", *[""] * 7, "mit"], "did you mean MIT?"),
        (["x", *[""] * 9, "$(touch canary)"], "deepspeed"),
        (["x", *[""] * 24, "gitlub"], "did you mean git"),
    ],
)
def test_refused_at_the_prompt(area: Area, typed: list[str], says: str) -> None:
    """At once: no more lines are read than were typed."""
    assert_refused(area, stdin="\n".join(typed) + "\n", says=says)


def settings(area: Area, default_context: dict[str, Any]) -> str:
    """Write a user's configuration and return its path."""
    file = area.root.parent / "settings.yaml"
    replay = {"replay_dir": str(area.root.parent / "replay")}
    file.write_text(json.dumps(replay | {"default_context": default_context}), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    "context",
    [
        {"author_name": JINJA_CODE},
        {"author_name": [JINJA_CODE]},
        {"author_name": {"x": JINJA_CODE}},
        {"author_name": {JINJA_CODE: "x"}},
        {"__checked_version": JINJA_CODE},
        {"__year": "{{cookiecutter.project_slug}}", "__checked_version": {"x": JINJA_CODE}},
        {"version": "../../x", "__checked_version": "1.0"},
        {"project_slug": "../../x", "__checked_project_slug": "x"},
        {"__year": "1999"},
        {"_template_version": "9.9"},
        {"_copy_without_render": []},
        {"__prompts__": {"license": "?"}},
        {"__prompts__": "?"},
        {"author_name": None},
        {"author_name": True},
        {"author_name": ["x\ny"]},
        {"author_name": {"x": "y"}},
    ],
    ids=str,
)
def test_refused_in_a_user_s_configuration(area: Area, context: dict[str, Any]) -> None:
    assert_refused(area, "--no-input", "--config-file", settings(area, context), says="refused")


def test_good_defaults_of_a_user_s_configuration_are_used(area: Area) -> None:
    context = {
        "author_name": "O'Brien",
        "version": 2.5,
        "gpus_per_node": 8,
        "github_username": "another template's",
    }
    file = settings(area, context)
    done = command("--no-input", "--config-file", file, "-o", str(area.output), cwd=area.cwd)
    assert (done.returncode, done.stderr) == (0, "")
    configured = {"author_name": "O'Brien", "version": "2.5", "gpus_per_node": "8"}
    check_works(area.the_project(), DEFAULTS | configured)


def test_refused_in_a_replay(area: Area) -> None:
    """A replay skips the questions and their checks; the check before the first write holds."""
    folder = area.root.parent / "replay"
    done = command(
        "--no-input", "--config-file", settings(area, {}), "-o", str(area.output), cwd=area.cwd
    )
    assert done.returncode == 0
    (file,) = folder.iterdir()
    (area.output / "my-project").rename(area.root.parent / "first")
    replay = json.loads(file.read_text(encoding="utf-8"))
    replay["cookiecutter"]["project_slug"] = "../../x"
    file.write_text(json.dumps(replay), encoding="utf-8")
    assert_refused(area, "--replay", "--config-file", settings(area, {}), says="project_slug")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("projct_name=x", "there is no option 'projct_name'; did you mean project_name?"),
        ("licence=MIT", "did you mean license?"),
        ("zzz=1", "there is no option 'zzz'"),
        ("__checked_version=1", "there is no option '__checked_version'"),
        ("__year={{ 7*7 }}", "there is no option '__year'"),
    ],
)
def test_unknown_options_are_refused(area: Area, option: str, says: str) -> None:
    assert_refused(area, "--no-input", option, says=says)


def test_code_in_the_name_of_the_output_folder(area: Area) -> None:
    folder = area.cwd / JINJA_CODE.replace("/", "")
    done = command("--no-input", "--output-dir", str(folder), cwd=area.cwd)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: the output folder ")
    assert done.stderr.count("\n") == 1
    area.assert_untouched()


@pytest.mark.parametrize("field", FIELDS)
def test_without_the_guard_the_code_runs(
    area: Area, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show that the tests above can fail: it is the guard that keeps the payload from running."""

    def unguarded(_self: object, source: str, *_rest: object, **_more: object) -> str:
        return source

    monkeypatch.setattr(Answers, "preprocess", unguarded)
    monkeypatch.setattr(distributed_torch_extension, "__getattr__", lambda _name: Answers)
    # What the payload returned, "0", is a good answer to some questions and a bad one to others.
    with contextlib.suppress(ClickException):
        render(area.output, DEFAULTS | {field: JINJA_CODE})
    assert (area.cwd / CANARY).exists()


def test_every_field_is_tried() -> None:
    assert list(RULES) == FIELDS
    assert (set(TAKEN), len(HOSTILE)) == (set(FIELDS), 50)
    assert set().union(*TAKEN.values()) <= set(HOSTILE)
