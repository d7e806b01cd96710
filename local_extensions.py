"""The rules for the template's answers, and the guard that keeps answers from running as code.

`distributed_torch_extension.py` loads this file as a Jinja extension (`_extensions` in
`cookiecutter.json`) and says why it is not imported. Each question is followed by a private
`__checked_…` value that puts the answer through `RULES`. A bad answer is asked again at a terminal,
and refused at once in one line elsewhere, before anything is written, also without hooks.

Cookiecutter renders a value given as `key=value`, or by a user's configuration, as a Jinja
template of its own, outside any sandbox: `{{ cycler.__init__.__globals__.os.system('…') }}` would
run. `Answers.preprocess` sees each such text before it is compiled and refuses those that are not
the template's own.

The project's tests are Python that runs as it stands: they import the package by its default name,
`my_project`. `preprocess` has each of them rendered as it is, but for that name. Pages of Markdown
do the same, and may have conditions. A page that was left out (`has_page`) is rendered empty, which
the hook removes, and links to it are rendered as titles in italics.
"""

from __future__ import annotations

import json
import keyword
import os
import posixpath
import re
import shutil
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from cookiecutter.prompt import read_user_variable
from jinja2 import Environment, pass_context
from jinja2.ext import Extension
from jinja2.runtime import Context

LICENSES = ("MIT", "Apache-2.0", "BSD-3-Clause", "Proprietary")
TORCH_VARIANTS = ("auto", "cpu", "cuda")
CONTAINER_RUNTIMES = ("none", "apptainer", "pyxis")
CI_SERVICES = ("github", "gitlab", "none")
UPDATES = ("none", "dependabot", "renovate")
EDITORS = ("none", "vscode", "devcontainer")
# Libraries behind some strategies. Each is a question: "no" leaves all of it out.
ENGINES = ("deepspeed", "fairscale", "horovod", "xla")
# Of these, what is installed into an environment of its own, because it needs another torch.
APART = ("xla",)
# Families of strategies, the names of other trainers, and commands about a run. Each is a question
# too, which `parts` answers by default.
FAMILIES = ("model_parallel", "asynchronous", "legacy", "tools")
COMPONENTS = (*ENGINES, *FAMILIES)
PARTS = ("all", "core")
TRAINERS = ("source", "wheel")
# Of the trainer's tests, which a project with its wheel lacks.
TESTS_PAGE = "docs/strategies/tests.md"
# Pages of its commands. Those of other components bear their name.
TOOLS_PAGES = frozenset(
    f"docs/{name}.md" for name in ("tutorial", "doctor", "plan", "report", "reproduce")
)
# Examples besides the basic ones, each of one task and one config; `all` includes them.
EXAMPLES = ("lora", "images", "graph", "streaming")
# Places to train besides SLURM, each a folder of files and a page; `all` includes them.
PLACES = ("kubernetes", "ssh")
YES_NO = ("yes", "no")
# Answers that need another one: the answer and its question, and what that other one is.
NEEDS = {("updates", "dependabot"): ("ci", "github")}
GPU_COUNTS = tuple(map(str, range(65)))

FOLDER = Path(__file__).resolve().parent
PROJECT_FOLDER = "{{cookiecutter.project_slug}}"
# What the project's tests call its package.
PACKAGE = re.compile(r"\bmy_project(?=_trainer\b|\b)")
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+\.md)(?:#[^)\s]*)?\)")


def _names(file: str) -> frozenset[str]:
    """Return the names in a file of the template's, without its comments."""
    return frozenset(re.sub("#.*", "", (FOLDER / file).read_text(encoding="utf-8")).split())


# Names of modules, commands and folders that a slug or a package would hide. Tests compare them
# with the locks, with what these install and with what the scripts call.
RESERVED = _names("reserved_names.txt")
# Not `sys.stdlib_module_names`: that differs between the Pythons that a project may be used with.
PYTHON_MODULES = _names("python_modules.txt")
# Pages of each project, whatever it leaves out.
CORE_PAGES = _names("core_pages.txt")
# Names that Windows keeps for itself, whatever the extension.
DEVICES = frozenset(
    ["con", "prn", "aux", "nul", *(f"{d}{i}" for d in ("com", "lpt") for i in range(10))]
)

JINJA = re.compile(r"\{[{%#]")
# Direction marks can make a text read otherwise than it is ("Trojan Source", CVE-2021-42574).
DIRECTION_MARKS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
# The normal form of PEP 440, so that the built distribution bears the very text that was given.
VERSION = re.compile(
    r"([1-9][0-9]*!)?(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*))*"
    r"((a|b|rc)(0|[1-9][0-9]*))?(\.post(0|[1-9][0-9]*))?(\.dev(0|[1-9][0-9]*))?"
    r"(\+[a-z0-9]+(\.[a-z0-9]+)*)?"
)
EMAIL = re.compile(
    r"[A-Za-z0-9_%+'-]+(\.[A-Za-z0-9_%+'-]+)*"
    r"@[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)+"
)
# Names of SLURM stand in `#SBATCH` lines and shell scripts: nothing that either would read.
SLURM_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


class AnswerRefused(click.ClickException, SystemExit):
    """An answer that the template does not take.

    Both commands print it as one line on stderr and end with exit code 1: click does for
    cookiecutter, and Python itself, for a SystemExit, for cruft.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = f"Error: {message}"


def nearest(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean …?" where a known word is close to `word`, else nothing."""
    import difflib  # here: only an error pays for this import

    known = {w.lower(): w for w in words}
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f"; did you mean {known[close[0]]}?" if close else ""


def _slug_fault(answer: str) -> str | None:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9_-]*[a-z0-9])?", answer):
        return "lower-case letters, digits, - and _ only, a letter or digit first and last"
    if answer.replace("-", "_") in RESERVED | DEVICES:
        return "that name belongs to something the project installs or uses"
    return None


def _package_fault(answer: str) -> str | None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", answer):
        return "lower-case letters, digits and _ only, a letter first"
    if keyword.iskeyword(answer) or keyword.issoftkeyword(answer):
        return "that is a keyword of Python"
    if answer in PYTHON_MODULES:
        return "that would hide a module of Python's standard library"
    if answer in RESERVED | DEVICES:
        return "that would hide a module or folder that the project uses"
    return None


def _email_fault(answer: str) -> str | None:
    if answer and not EMAIL.fullmatch(answer):
        return "that is not an e-mail address such as name@example.org"
    return None


def _version_fault(answer: str) -> str | None:
    if not VERSION.fullmatch(answer):
        return "that is not a version in PEP 440's normal form, such as 0.1.0 or 2.0rc1"
    return None


def _slurm_fault(answer: str) -> str | None:
    if answer and not SLURM_NAME.fullmatch(answer):
        return "letters, digits, _, . and - only, no . or - first or last"
    return None


def _partition_fault(answer: str) -> str | None:
    if answer and not all(map(SLURM_NAME.fullmatch, answer.split(","))):
        return "names of letters, digits, _, . and -, separated by commas without spaces"
    return None


def _gpus_fault(answer: str) -> str | None:
    if answer not in GPU_COUNTS:
        return f"give a whole number from 0 to {GPU_COUNTS[-1]}"
    return None


def _no_fault(_answer: str) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Rule:
    """What one question takes; `says` is the wording in docs/options.md.

    `choices` are all answers that it takes, where these are few; nothing where they are not.
    Where they are a `menu`, the number of a choice, from 1, stands for it; `y` and `n`, in any
    case, stand for `yes` and `no`.
    """

    says: str
    longest: int
    fault: Callable[[str], str | None] = _no_fault
    may_be_empty: bool = False
    choices: tuple[str, ...] = ()
    menu: bool = False

    def read(self, answer: str) -> str:
        """Return the answer that was meant: the choice for its number, text for its bytes."""
        if self.menu and answer in map(str, range(1, len(self.choices) + 1)):
            return self.choices[int(answer) - 1]
        if self.choices == YES_NO and answer.lower() in ("y", "n", *YES_NO):
            return "yes" if answer[0] in "yY" else "no"
        try:  # where Python takes the terminal for ASCII, other bytes of UTF-8 come as surrogates
            return answer.encode("utf-8", "surrogateescape").decode("utf-8")
        except UnicodeError:
            return answer


def one_of(*choices: str) -> Rule:
    """Return the rule of a question that takes one of these words, as they are written."""

    def fault(answer: str) -> str | None:
        if answer not in choices:
            return f"choose from {', '.join(choices)}{nearest(answer, choices)}"
        return None

    says = " or ".join(f"`{choice}`" for choice in choices)
    return Rule(says, 50, fault, choices=choices, menu=True)


RULES: dict[str, Rule] = {
    "project_name": Rule("one line of text", 100),
    "author_name": Rule("one line of text", 100),
    "parts": one_of(*PARTS),
    "project_slug": Rule(
        "`a-z`, `0-9`, `-`, `_`, a letter or digit at both ends; no name that the project installs",
        100,
        _slug_fault,
    ),
    "package_name": Rule(
        "`a-z`, `0-9`, `_`, a letter first; no keyword, no module that Python or the project has",
        40,
        _package_fault,
    ),
    "description": Rule("one line of text", 200, may_be_empty=True),
    "author_email": Rule("an e-mail address, or nothing", 254, _email_fault, may_be_empty=True),
    "version": Rule("a version in PEP 440's normal form", 50, _version_fault),
    "license": one_of(*LICENSES),
    "examples": one_of("basic", *EXAMPLES, "all"),
    **{component: one_of(*YES_NO) for component in COMPONENTS},
    "trainer": one_of(*TRAINERS),
    "torch_variant": one_of(*TORCH_VARIANTS),
    "slurm_partition": Rule(
        "letters, digits, `_`, `.`, `-`, a letter, digit or `_` at both ends; "
        "several separated by commas; or nothing",
        100,
        _partition_fault,
        may_be_empty=True,
    ),
    "slurm_account": Rule(
        "letters, digits, `_`, `.`, `-`, a letter, digit or `_` at both ends; or nothing",
        100,
        _slurm_fault,
        may_be_empty=True,
    ),
    "gpus_per_node": Rule("`0` to `64`", 50, _gpus_fault, choices=GPU_COUNTS),
    "container_runtime": one_of(*CONTAINER_RUNTIMES),
    "other_launchers": one_of("none", *PLACES, "all"),
    "ci": one_of(*CI_SERVICES),
    "updates": one_of(*UPDATES),
    "pre_commit": one_of(*YES_NO),
    "editor": one_of(*EDITORS),
}


def _plain_text_fault(answer: str) -> str | None:
    """Refuse what no field can hold: it would break lines, hide text or be taken for a template."""
    if any(unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"} for c in answer):
        return "control characters and line breaks are not allowed"
    if DIRECTION_MARKS.intersection(answer):
        return "marks that change the direction of text are not allowed"
    if JINJA.search(answer):
        return "{{, {% and {# are not allowed"
    if answer != answer.strip():
        return "no space first or last"
    if answer.startswith("-"):
        return "no dash first"
    return None


def refuse(name: str, answer: object, fault: str) -> NoReturn:
    """Raise the refusal of one answer, its text shortened, its control characters escaped."""
    shown = repr(answer)
    shown = shown if len(shown) <= 60 else f"{shown[:50]}… ({len(str(answer))} characters)"
    raise AnswerRefused(f"{name} {shown} is refused: {fault}")


def checked(answer: object, name: str) -> str:
    """Return the answer as the rule of that name reads it, or raise AnswerRefused."""
    rule = RULES[name]
    if not isinstance(answer, str):  # a list, a dict or a null from a user's configuration
        refuse(name, None if answer is None else type(answer).__name__, "give one line of text")
    answer = rule.read(answer)
    if not answer and not rule.may_be_empty:
        refuse(name, answer, "it may not be empty")
    if len(answer) > rule.longest:
        refuse(name, answer, f"at most {rule.longest} characters")
    if fault := _plain_text_fault(answer) or rule.fault(answer):
        refuse(name, answer, fault)
    return answer


def contradiction(name: str, answers: Mapping[str, object]) -> str | None:
    """Return what is wrong with an answer beside those that are given, or None."""
    needed, choice = NEEDS.get((name, str(answers[name])), (name, answers[name]))
    if answers.get(needed, choice) != choice:
        return f"it needs {needed}={choice}, not {answers[needed]}"
    return None


def components(answers: Mapping[str, object]) -> list[str]:
    """Return the engines and families that a project includes."""
    return [component for component in COMPONENTS if answers[component] == "yes"]


def engines(answers: Mapping[str, object]) -> list[str]:
    """Return the engines that a project includes."""
    return [component for component in components(answers) if component in ENGINES]


def installed_engines(answers: Mapping[str, object]) -> list[str]:
    """Return those of the engines that can be installed into the project's own environment."""
    return [engine for engine in engines(answers) if engine not in APART]


def examples(answers: Mapping[str, object]) -> list[str]:
    """Return the examples that a project includes besides the basic ones."""
    return [example for example in EXAMPLES if answers["examples"] in (example, "all")]


def places(answers: Mapping[str, object]) -> list[str]:
    """Return the places besides SLURM for which a project includes files."""
    return [place for place in PLACES if answers["other_launchers"] in (place, "all")]


def toml(value: str | list[str]) -> str:
    """Write a text, or several, as TOML; JSON is TOML here, once no surrogates are in it."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def with_package(source: str) -> str:
    """Return the template of a Python file in which nothing but the package's name is an answer."""
    named = PACKAGE.sub("{% endraw %}{{ cookiecutter.package_name }}{% raw %}", source)
    return f"{{% raw %}}{named}{{% endraw %}}"


def page_template(page: str, name: str) -> str:
    """Return the template of a page of Markdown, which calls the package by its default name too.

    Commands on it run as they stand in a render with the defaults. It may have conditions.
    """
    named = PACKAGE.sub("{{ cookiecutter.package_name }}", page)
    kept = f"{{% filter kept_links(cookiecutter, {name!r}) %}}{named}{{% endfilter %}}"
    return f"{{% if cookiecutter | has_page({name!r}) %}}{kept}{{% endif %}}"


def has_page(answers: Mapping[str, object], page: str) -> bool:
    """Return whether a project has a page, given by its path in the project."""
    words = page.removesuffix(".md").split("/")
    for component in COMPONENTS:
        if component in words or (component == "tools" and page in TOOLS_PAGES):
            return answers[component] == "yes"
    if page == TESTS_PAGE and answers["trainer"] == "wheel":
        return False
    if words[-1] in PLACES:
        return words[-1] in places(answers)
    if words[-1] == "examples":
        return bool(examples(answers))
    return answers["parts"] == "all" or page in CORE_PAGES or words[0] != "docs"


def kept_links(text: str, answers: Mapping[str, object], page: str) -> str:
    """Return a page's text in which links to pages that the project lacks are their titles."""

    def kept(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[2]))
        return link[0] if has_page(answers, target) else f"*{link[1]}*"

    return LINK.sub(kept, text)


def kept_pages(navigation: str, answers: Mapping[str, object]) -> str:
    """Return the site's navigation without pages that the project lacks, and empty sections."""
    lines = [
        line
        for line in navigation.splitlines()
        if not line.endswith(".md") or has_page(answers, f"docs/{line.split()[-1]}")
    ]
    return re.sub(r"^  - .*:\n(?!      )", "", "\n".join(lines), flags=re.MULTILINE)


def texts(value: object) -> Iterable[str]:
    """Return every text in a value of `cookiecutter.json`, keys included."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (*texts(key), *texts(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)
    elif isinstance(value, str):
        yield value


def variables_of(function: str) -> Mapping[str, Any]:
    """Return the local variables of the function of cookiecutter's that has led here.

    An extension is told nothing but its environment: neither what it renders nor whether anybody is
    there to answer. The mapping is empty where no function of that name is running.
    """
    frame: FrameType | None = sys._getframe()
    while frame:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_code.co_name == function and package == "cookiecutter":
            return frame.f_locals
        frame = frame.f_back
    return {}


def refuse_unknown_keys() -> None:
    """Refuse a `key=value` of cookiecutter's command line that is no question of this template.

    Cookiecutter itself ignores a misspelled key and renders with the default. Private keys
    (`__checked_version=…`) are refused too: nobody has to set them.
    """
    command = click.get_current_context(silent=True)
    given = command.params.get("extra_context") if command else None
    for key in given if isinstance(given, Mapping) else ():
        if key not in RULES:
            raise AnswerRefused(f"there is no option {key!r:.60}{nearest(key, RULES)}")


def refuse_private_values(given: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Refuse private values of a user's configuration, which would replace the template's own."""
    for key, value in given.items():
        if key.startswith("_") and value != own[key]:
            refuse(key, value, "that is the template's; remove it from your default_context")


def refuse_output_in_template(folder: str) -> None:
    """Refuse to render into the template's own folder, but for `build/`, which git ignores."""
    path = Path(folder).resolve()
    if path.is_relative_to(FOLDER) and not path.is_relative_to(FOLDER / "build"):
        refuse("the output folder", folder, "it is in the template; add --output-dir FOLDER")


def prepare_comparison() -> None:
    """Make this render one that cruft can compare with that of an older version.

    Cruft renders for a comparison from a clone called `repo` in a temporary folder. Older versions'
    hooks made a repository there, which cruft would compare too, and cannot.
    """
    temporary = Path(tempfile.gettempdir()).resolve()
    if "cruft" in sys.modules and FOLDER.name == "repo" and FOLDER.parent.parent == temporary:
        os.environ["DISTRIBUTED_TORCH_QUIET"] = "1"  # hooks/post_gen_project.py reads it
        shutil.rmtree(FOLDER.with_name("current_template") / ".git", ignore_errors=True)


class Answers(Extension):
    """The filters of the project's files and of the questions, and the guard."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._settings = json.loads((FOLDER / "cookiecutter.json").read_text(encoding="utf-8"))
        self._own = frozenset(texts(self._settings))
        self._all_checked = False
        if prompting := variables_of("prompt_for_config"):  # before the first question
            refuse_unknown_keys()
            refuse_private_values(prompting["context"]["cookiecutter"], self._settings)
            refuse_output_in_template(variables_of("cookiecutter").get("output_dir", os.devnull))
        prepare_comparison()
        environment.filters.update(checked=self._check, all_checked=self._check_all)
        environment.filters.update(toml=toml, components=components, engines=engines)
        environment.filters.update(installed_engines=installed_engines, examples=examples)
        environment.filters.update(places=places, has_page=has_page)
        environment.filters.update(kept_links=kept_links, kept_pages=kept_pages)

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Let only the template's own texts be compiled; `name` is None for all but its files.

        The first thing that cookiecutter renders after the questions is the name of the project's
        folder. There all answers are checked once more, because some ways lead past the questions:
        a replay file, or a private value set in a user's configuration.
        """
        # A file that only some answers have is called `{% if … %}NAME.py{% endif %}`.
        if name is not None and name.removesuffix("{% endif %}").endswith(".py"):
            return with_package(source)
        if name is not None and name.endswith(".md"):
            return page_template(source, name)
        if name is not None or self._all_checked or not JINJA.search(source):
            return source
        if source == PROJECT_FOLDER:
            return "{{ cookiecutter | all_checked }}" + source
        if source not in self._own:
            refuse("the value", source, "{{, {% and {# are not allowed")
        return source

    @pass_context
    def _check(self, context: Context, answer: object, name: str) -> str:
        """Return an answer that the rule takes, and store it; ask for another at a terminal."""
        answers: dict[str, object] = context["cookiecutter"]
        while True:
            try:
                right = checked(answer, name)
                if fault := contradiction(name, answers | {name: right}):
                    refuse(name, right, fault)
            except AnswerRefused as refusal:
                prompting = variables_of("prompt_for_config")
                if prompting.get("no_input", True) or not sys.stdin.isatty():
                    raise
                click.echo(refusal.message, err=True)
                default = self._default(name, answers)
                question = (prompting["prompts"], prompting["prefix"])
                answer = read_user_variable(name, ... if default == answer else default, *question)
            else:
                answers[name] = right
                return right

    def _default(self, name: str, answers: Mapping[str, object]) -> str:
        """Return the template's own answer to a question."""
        text = self.environment.from_string(self._settings[name])
        return text.render(cookiecutter=answers)

    def _check_all(self, answers: dict[str, object]) -> str:
        """Check every answer, then let the names of the template's folders and files pass."""
        if "_template" not in answers:  # added after the last question: this is a question's text
            refuse("the value", PROJECT_FOLDER, "{{, {% and {# are not allowed")
        for name in RULES:
            answer = checked(answers.get(name), name)
            if fault := contradiction(name, answers):
                refuse(name, answer, fault)
        # A replay has those of the version that it was written by.
        answers |= {
            key: self._settings[key] for key in ("_template_version", "_copy_without_render")
        }
        # Names below the project's folder are rendered together with the path that leads there.
        folder = str(answers.get("_output_dir", ""))
        if JINJA.search(folder):
            refuse("the output folder", folder, "{{, {% and {# are not allowed")
        refuse_output_in_template(folder or os.devnull)  # a replay asks no question
        self._all_checked = True
        return ""
