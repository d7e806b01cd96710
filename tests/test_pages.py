"""The pages of projects, with all parts and with few: links, commands, sentences, the site."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pytest
import template_site
import yaml
from history import missing
from rendering import CORE, ROOT, TEMPLATE, ran, render

from local_extensions import COMPONENTS

MKDOCS = Path(os.environ.get("DOCS_VENV", ROOT / "build" / "docs-venv")) / "bin" / "mkdocs"
VARIANTS = {
    "all": {"ci": "github", "examples": "all", "other_launchers": "all"},
    "none": dict.fromkeys(COMPONENTS, "no") | {"ci": "none", "license": "Proprietary"},
    # Each family; and a name that must be quoted.
    "families": {
        **dict.fromkeys(COMPONENTS, "no"),
        **dict.fromkeys(("model_parallel", "asynchronous", "legacy"), "yes"),
        **{"ci": "gitlab", "examples": "lora", "other_launchers": "ssh"},
        **{"package_name": "night", "project_name": 'Night: "Train" #1'},
    },
    **{"core": CORE, "wheel": {"trainer": "wheel"}},
}
OWN_PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
# The commands of the trainer; those of tools/ are folders.
COMMANDS = {
    *("fit", "validate", "test", "predict", "export", "find_batch_size", "find_learning_rate")
}
# What the command line has besides `--trainer.…`, `--model.…` and `--data.…`.
OPTIONS = {
    *("config", "model", "data", "checkpoint", "trust", "averaged", "help", "print_config"),
    *("format", "output", "overwrite"),
}
# Given on the pages for files that users have.
EXAMPLES = re.compile(
    r"lora\.|reviews\.|my_data\.|my_module\.|tasks\.line\.|houses|path/to/|RUN|NAME|"
    r"cluster\.yaml|[a-z]+\.onnx"
)


@pytest.fixture(scope="session")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a render, hooks included, for each variant; that of a wheel with it unpacked."""
    folder = tmp_path_factory.mktemp("pages")
    made = {name: render(folder / name, answers, hooks=True) for name, answers in VARIANTS.items()}
    subprocess.run([sys.executable, made["wheel"] / "requirements/eject.py"], check=True)
    return made


@pytest.fixture(params=VARIANTS)
def project(request: pytest.FixtureRequest, projects: dict[str, Path]) -> Path:
    return projects[request.param]


def texts(project: Path) -> dict[Path, str]:
    files = [*sorted(project.glob("docs/**/*.md")), project / "README.md"]
    return {file: file.read_text(encoding="utf-8") for file in files}


def broken_links(files: dict[Path, str], github: bool) -> Iterator[str]:
    for file, text in files.items():
        for target in pages.links(text):
            name, _, anchor = urllib.parse.unquote(target).partition("#")
            other = (file.parent / name).resolve() if name else file
            if not other.exists():
                yield f"{file.name}: {target}"
            elif anchor and anchor not in pages.anchors(other.read_text("utf-8"), github):
                yield f"{file.name}: {target}: there is no such heading"


def test_links_lead_to_pages_and_headings(project: Path) -> None:
    by_path = texts(project)
    assert sum(len(pages.links(text)) for text in by_path.values()) > 50
    for github in (True, False):  # on GitHub, and in the site
        assert list(broken_links(by_path, github)) == []


def test_a_broken_link_is_found(projects: dict[str, Path]) -> None:
    file = projects["all"] / "docs" / "index.md"
    for target in ("how-to/modle.md", "how-to/model.md#nothing", "#nothing"):
        assert len(list(broken_links({file: f"[a]({target})"}, github=False))) == 1


def named(entries: list[Any]) -> Iterator[str]:
    """Yield the pages that a part of `nav` names."""
    for entry in entries:
        for content in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [content] if isinstance(content, str) else named(content)


def test_the_navigation_names_each_page_once(project: Path) -> None:
    config = yaml.safe_load((project / "mkdocs.yml").read_text(encoding="utf-8"))
    docs = project / "docs"
    files = sorted(str(file.relative_to(docs)) for file in docs.rglob("*.md"))
    assert sorted(named(config["nav"])) == files
    is_core = 'parts = "core"' in (project / "pyproject.toml").read_text(encoding="utf-8")
    assert len(files) == 20 if is_core else len(files) > 50
    sections = [entry for entry in config["nav"] if isinstance(entry, dict)]
    assert all(content for section in sections for content in section.values())
    (code,) = config["plugins"][-1]["mkdocstrings"]["handlers"].values()
    assert (project / code["paths"][0]).is_dir()
    for name in (*config["extra_css"], *config["extra"]["polyfills"]):
        assert (docs / name).is_file()


def easy_sentences(file: Path, text: str) -> list[pages.Sentence]:
    """Return a page's sentences; check its lines, its words and the longest sentence."""
    assert pages.long_lines(text) == [], file
    words = re.sub("`[^`]*`", "", pages.prose(text))
    assert not re.search(r"\b[Rr]efus", words), f"{file}: say 'is not supported'"
    sentences = pages.sentences(text)
    assert max(sentences).words <= 40, (file, max(sentences))
    return sentences


def assert_begins_with_what_you_get(file: Path, text: str) -> None:
    title, first, *_ = re.split(r"\n\n", text.replace("<!-- ", "\n\n<!-- "))
    assert (title[:2], first[:8]) == ("# ", "You get "), f"{file} begins with what you get"


def test_pages_are_easy_to_read(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = []
    for file, text in texts(project).items():
        every += easy_sentences(file, text)
        if file.parent != project:
            assert_begins_with_what_you_get(file, text)
    with capsys.disabled():
        print(f" {pages.average(every):.1f} words a sentence", end="")
    assert pages.average(every) <= 20


def test_the_template_s_pages_are_easy_to_read() -> None:
    for file in {*OWN_PAGES} - {ROOT / "CHANGELOG.md"}:  # in the words of their time
        text = file.read_text(encoding="utf-8")
        assert pages.long_lines(text, 118) == [], file
        assert pages.average(easy_sentences(file, text)) <= 20, file
        if file.parent != ROOT:
            assert_begins_with_what_you_get(file, text)


# Of a strategy's page, in this order.
PARTS = {
    "what you get": r"^You get ",
    "one command": r"^```(?:python)?\n(?:make|python|from)",
    "when to take it": r"^\*\*Take it\*\*",
    "its cost": r"^\*\*Cost\.\*\*",
    "its limits": r"^\*\*Limits\*\*|^\*\*Limits\.\*\*",
    "its row of the conformance table": r"^## Compared with one process\n[\s\S]*\d(?:\.\d+)?e-\d",
}


def lacking(text: str) -> list[str]:
    """Return what a strategy's page does not say, or not in its place."""
    matches = {name: re.search(regex, text, re.MULTILINE) for name, regex in PARTS.items()}
    problems = [name for name, match in matches.items() if match is None]
    starts = [match.start() for match in matches.values() if match]
    problems += ["order"] if starts != sorted(starts) else []
    cost = text[text.find("**Cost.**") : text.find("\n**Limits")]
    problems += [word for word in ("memory", "communication") if word not in cost.lower()]
    # A figure: bytes sent, or whose page has it.
    problems += [] if re.search(r"[APK] (?:/|\(|bytes)|of\s+\[`ddp`\]", cost) else ["bytes"]
    if not re.search(r"^\| option|^\*\*Options\*\*|^\*\*Options\.\*\*", text, re.MULTILINE):
        problems.append("options")
    return problems


def test_a_strategy_s_page_has_all_its_parts(projects: dict[str, Path]) -> None:
    for project in projects.values():
        folder = project / "docs" / "strategies"
        files = {*folder.rglob("*.md")} - {folder / f"{n}.md" for n in ("index", "models", "tests")}
        assert {file.name: lacking(file.read_text("utf-8")) for file in files} == {
            file.name: [] for file in files
        }
    page = (projects["none"] / "docs" / "strategies" / "fsdp.md").read_text("utf-8")
    for piece in ("**Take it**", "**Cost.**", "ommunication", "| option", "**Limits**", "## Comp"):
        assert lacking(page.replace(piece, "")), piece


def test_the_chooser_names_each_strategy(projects: dict[str, Path]) -> None:
    """Once to choose by, once with its cost, once with what it does."""
    text = (projects["all"] / "docs" / "strategies" / "index.md").read_text("utf-8")
    costs, everything = text.split("## What they cost\n")[1].split("## All strategies\n")
    chosen = text.split("## What they cost\n")[0]
    names = set(
        re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| \[(.*?)\]", everything, re.MULTILINE)))
    )
    assert len(names) > 20
    named = {section: set(re.findall(r"`(\w+)`", section)) for section in (chosen, costs)}
    assert {name for name in names if name not in named[costs] and not name.startswith("_")} <= {
        # Names of the same, presets of one that is there, and `dp` inside of `ddp`.
        *("ddp_notebook", "ddp2", "pipeline", "deepspeed", "deepspeed_stage_2_offload"),
        "ddp_sharded_spawn",
    }
    assert {"ddp", "ddp_zero1", "fsdp", "hsdp", "dp", "ddp2", "mesh", "sequential"} <= named[chosen]


def test_the_readme_is_short_and_leads_to_the_pages(project: Path) -> None:
    text = (project / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 120
    assert "docs/strategies/ddp.md" in pages.links(text)


def fields() -> set[str]:
    """Return the options of a run, from the fields of its class."""
    (file,) = TEMPLATE.glob("src/*_trainer/options/fields.py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Options")
    return {
        n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and hasattr(n.target, "id")
    }


def strategy_arguments() -> set[str]:
    (folder,) = TEMPLATE.glob("src/*_trainer/strategies")
    names: set[str] = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "make"):
                names |= {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return names


def wrong_make(command: str, makefile: str) -> str | None:
    """Return what is wrong with a command of make: a target or a variable that is not there."""
    words = re.findall(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+", command)[1:]
    for word in words:
        name, equals, _ = word.partition("=")
        if equals and not re.search(rf"\b{name}\b", makefile):
            return f"no variable {name}"
        if not equals and not re.search(rf"^{re.escape(word)}\b.*:.*", makefile, re.MULTILINE):
            return f"no target {word}"
    return None


def wrong_options(command: str, project: Path) -> Iterator[str]:
    """Yield the options of a command of the trainer that are not there, and configs."""
    words = command.split()
    tool = next((project / "src").glob("*_trainer")) / "tools" / (words[0] if words else "")
    source = "".join(path.read_text(encoding="utf-8") for path in tool.glob("*.py"))
    for word, value in zip(words, [*words[1:], ""], strict=False):
        name, *inside = word.removeprefix("--").partition("=")[0].split(".")
        if word == "--config" and not EXAMPLES.search(value) and not (project / value).is_file():
            yield f"no file {value}"
        if not word.startswith("--") or word == "--":
            continue
        if name == "trainer" and inside and inside[0] not in fields():
            yield f"no option {word}"
        if name == "trainer" and inside[:1] == ["strategy_options"]:
            shown = re.search(r"strategy_options '(\{.*?\})'", command)
            options = yaml.safe_load(shown[1]) if shown else dict.fromkeys(inside[1:2])
            yield from (f"no argument {key}" for key in options if key not in strategy_arguments())
        if not inside and name not in OPTIONS and not re.search(rf"['\"](--)?{name}['\"]", source):
            yield f"no option {word}"


def wrong(command: str, project: Path, makefile: str) -> list[str]:
    """Return what is wrong with a command of a page."""
    package = next((project / "src").glob("*_trainer")).name.removesuffix("_trainer")
    problems: list[str] = []
    command = re.sub(r"^([A-Z_]+=\S+ )+", "", command)
    if command.startswith("make ") and "…" not in command:
        problems += filter(None, [wrong_make(command, makefile)])
    if script := re.match(r"(?:bash|sbatch) (?:--\S+ )*(\S+\.sh)", command):
        problems += [] if (project / script[1]).is_file() else [f"no script {script[1]}"]
    if match := re.search(rf"-m(?:odule)? {package}(?= |$)(.*)", command):
        rest = match[1].split()
        tools = {path.name for path in (project / "src").glob("*_trainer/tools/*")}
        if rest and rest[0] not in COMMANDS | tools | {"…"}:
            problems.append(f"no command {rest[0]}")
        problems += wrong_options(match[1], project)
    names = re.findall(r"--trainer\.(\w+)", command)
    problems += [f"no option --trainer.{name}" for name in names if name not in fields() | {"NAME"}]
    return problems


def test_commands_on_the_pages_are_there(project: Path) -> None:
    makefile, count = (project / "Makefile").read_text(encoding="utf-8"), 0
    for file, text in texts(project).items():
        for command in pages.commands(text):
            count += 1
            assert wrong(command, project, makefile) == [], f"{file}: {command}"
        for name in re.findall(r"--trainer\.(\w+)", text):
            assert name in fields() | {"NAME", "OPTION"}, f"{file}: --trainer.{name}"
    assert count > 50


def test_a_wrong_command_is_found(projects: dict[str, Path]) -> None:
    project = projects["all"]
    makefile = (project / "Makefile").read_text(encoding="utf-8")
    for command, says in (
        ("make trian", "no target trian"),
        ("make docker VARAINT=cuda", "no variable VARAINT"),
        ("bash slurm/tran.sh", "no script slurm/tran.sh"),
        ("python -m my_project fti", "no command fti"),
        ("python -m my_project fit --config configs/none.yaml", "no file configs/none.yaml"),
        ("python -m my_project fit --trainer.device 2", "no option --trainer.device"),
        ("python -m my_project fit --trainer.strategy_options '{unti: 2}'", "no argument unti"),
    ):
        assert says in wrong(command, project, makefile), command


def test_commands_on_the_template_s_pages_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    makefile += (TEMPLATE / "Makefile").read_text(encoding="utf-8")
    for file in OWN_PAGES:
        if file.name == "CHANGELOG.md":  # names what was there
            continue
        for command in pages.commands(file.read_text(encoding="utf-8")):
            if command.startswith("make ") and not re.search(r"…|-C|-n ", command):
                assert wrong_make(command, makefile) is None, f"{file.name}: {command}"


def from_network(site: Path) -> set[str]:
    """Return what the pages of a site load from elsewhere; links to follow do not count."""
    loads = re.compile(
        r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"?((?:https?:)?//[^\" >]+)"
    )
    return {url for file in site.rglob("*.html") for url in loads.findall(file.read_text("utf-8"))}


def build(project: Path, *targets: str) -> Path:
    """Build a project's site by its Makefile; warnings are errors."""
    if not MKDOCS.exists():
        missing(f"there is no {MKDOCS}: make docs-tools")
    environment = MKDOCS.parent.parent
    done = ran(
        ["make", "docs", f"DOCS_VENV={environment}", f"DOCS_READY={MKDOCS}", *targets], cwd=project
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return project / "build" / "site"


@pytest.mark.docs
def test_the_site_is_built_without_warnings_and_needs_no_network(project: Path) -> None:
    site = build(project)
    docs = project / "docs"
    built = {str(page.relative_to(docs).with_suffix(".html")) for page in docs.rglob("*.md")}
    assert built <= {str(page.relative_to(site)) for page in site.rglob("*.html")}
    assert from_network(site) == set()
    if (docs / "reference").is_dir():  # not in a core
        reference = (site / "reference" / "trainer.html").read_text(encoding="utf-8")
        assert all(name in reference for name in ("accumulate_grad_batches", "find_batch_size"))
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    loops = any("LoopedBFS" in entry["text"] for entry in index["docs"])
    assert loops == (docs / "strategies" / "model_parallel").is_dir()


@pytest.mark.docs
def test_a_broken_link_ends_the_build(tmp_path: Path) -> None:
    project = render(tmp_path, hooks=True)
    with (project / "docs" / "security.md").open("a", encoding="utf-8") as page:
        page.write("\n[nowhere](how-to/model.md#nowhere)\n")
    with pytest.raises(AssertionError, match="nowhere"):
        build(project)


def test_every_page_of_the_template_is_in_its_site() -> None:
    assert {file.stem for file in ROOT.glob("docs/*.md")} <= set(template_site.PAGES)


@pytest.mark.docs
def test_the_template_s_pages_are_in_one_site_with_a_project_s(tmp_path: Path) -> None:
    project = render(tmp_path, hooks=True)
    template_site.add(project)
    site = build(project)
    for name in template_site.PAGES:
        assert (site / "template" / f"{name}.html").is_file()
    assert from_network(site) == set()
