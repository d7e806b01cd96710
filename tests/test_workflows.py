"""The CI of the template and of a rendered project, for each service that an answer may name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from linters import lint, lint_workflow
from rendering import DEFAULTS, ROOT, TEMPLATE, check_works, render

from local_extensions import APART, CI_SERVICES, ENGINES

FILES = {
    "github": {".github/workflows/ci.yml", ".github/workflows/docs.yml"},
    "gitlab": {".gitlab-ci.yml"},
    "none": set[str](),
}
# All that a workflow may use of others, at the commits that were looked at.
ACTIONS = {
    "actions/cache@5a3ec84eff668545956fd18022155c47e93e2684 # v4.2.3",
    "actions/checkout@11bd71901bbe5b1630ceea73d27597364c9af683 # v4.2.2",
    "actions/deploy-pages@d6db90164ac5ed86f2b6aed7e0febac5b3c0c03e # v4.0.5",
    "actions/setup-python@a26af69be951a213d495a4c3e4e4022e16d87065 # v5.6.0",
    "actions/upload-pages-artifact@56afc609e74202658d3ffba0e8f6dda462b719fa # v3.0.1",
}
# What a job of GitLab may say, of what GitLab knows; a misspelled key would be an error only there.
GITLAB_KEYS = {
    *("stage", "image", "services", "variables", "tags", "rules", "needs", "parallel", "timeout"),
    *("before_script", "script", "interruptible", "artifacts"),
}


@pytest.fixture(scope="session")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a render, hooks included, for each CI service."""
    return {
        service: render(tmp_path_factory.mktemp(service), {"ci": service}, hooks=True)
        for service in CI_SERVICES
    }


@pytest.fixture(scope="session", params=["template", "project"])
def owner(request: pytest.FixtureRequest, projects: dict[str, Path]) -> Path:
    """Return the folder of the template, then that of a render."""
    return ROOT if request.param == "template" else projects["github"]


@pytest.fixture(scope="session")
def workflow(owner: Path) -> Path:
    """Return the workflow that checks each push, of the template and of a render."""
    return owner / ".github" / "workflows" / "ci.yml"


@pytest.fixture(scope="session")
def publishing(owner: Path) -> Path:
    """Return the workflow that publishes the docs, likewise."""
    return owner / ".github" / "workflows" / "docs.yml"


def read(file: Path) -> dict[Any, Any]:
    content: dict[Any, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content


def jobs_of_gitlab(project: Path) -> dict[str, dict[str, Any]]:
    content = read(project / ".gitlab-ci.yml")
    return {
        k: v for k, v in content.items() if k not in {"workflow", "stages", "default", "variables"}
    }


def commands(job: dict[str, Any]) -> list[str]:
    """Return the lines of shell of a job, of either service."""
    steps = [step.get("run", "") for step in job.get("steps", [])]
    lines = [*steps, *job.get("before_script", []), *job.get("script", [])]
    return [line for line in "\n".join(lines).splitlines() if line]


def uses(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for step in job["steps"] if "uses" in step]


def makes(job: dict[str, Any]) -> list[str]:
    matches = [re.search(r"\bmake [^\"$]*", line) for line in commands(job)]
    return [line[0] for line in matches if line]


def assert_targets_exist(line: str, makefile: Path) -> None:
    """Assert that a line of `make [-C FOLDER] TARGET … NAME=VALUE …` names targets of Makefiles."""
    folder = re.match(r"make -C (\S+) ", line)
    words = line[folder.end() if folder else len("make ") :].split()
    text = (TEMPLATE / "Makefile" if folder else makefile).read_text(encoding="utf-8")
    targets = [word for word in words if "=" not in word]
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:.*## ", text, re.MULTILINE), f"no target: {line}"


@pytest.mark.parametrize("service", CI_SERVICES)
def test_each_service_has_its_files_and_no_others(
    service: str, projects: dict[str, Path], project: Path
) -> None:
    def files(folder: Path) -> set[str]:
        paths = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        return {name for name in paths if not name.startswith(".git/")}

    check_works(projects[service], DEFAULTS | {"ci": service})
    common = files(project) - FILES["github"]
    assert files(projects[service]) - common == FILES[service]
    folders = [path for path in projects[service].rglob("*") if path.is_dir()]
    assert not [path for path in folders if ".git" not in path.parts and not any(path.iterdir())]


def test_the_workflows_pass_their_linters(workflow: Path, publishing: Path) -> None:
    assert lint_workflow(workflow) == ""
    assert lint_workflow(publishing) == ""
    names = {file.name for file in workflow.parent.iterdir()}
    # test_release.py has the template's own third one.
    assert names - {"release.yml"} == {"ci.yml", "docs.yml"}
    assert ("release.yml" in names) == (workflow.parents[2] == ROOT)


def test_docs_are_published_from_main_on_request_and_by_no_code_of_the_repository(
    publishing: Path,
) -> None:
    content = read(publishing)
    assert content["permissions"] == {"contents": "read"}
    docs, publish = content["jobs"]["docs"], content["jobs"]["publish"]
    assert set(content["jobs"]) == {"docs", "publish"}
    assert commands(docs) == ["make docs"]
    assert_targets_exist("make docs", publishing.parents[2] / "Makefile")
    assert "permissions" not in docs
    assert docs["steps"][0]["with"] == {"persist-credentials": False}
    used = {step["uses"].partition("@")[0]: step.get("with", {}) for step in uses(docs)}
    assert used["actions/upload-pages-artifact"] == {"path": "build/site"}
    assert list(publishing.parents[2].glob(used["actions/setup-python"]["cache-dependency-path"]))

    assert publish["if"] == (
        "github.ref == 'refs/heads/main' && github.event_name != 'pull_request' && "
        "vars.PUBLISH_DOCS == 'yes'"
    )
    assert publish["permissions"] == {"pages": "write", "id-token": "write"}
    assert publish["needs"] == "docs"
    assert [step["uses"].partition("@")[0] for step in publish["steps"]] == ["actions/deploy-pages"]
    for job in (docs, publish):
        assert job["runs-on"] == "ubuntu-24.04"
        assert 0 < job["timeout-minutes"] <= 30
    text = publishing.read_text(encoding="utf-8")
    assert "secrets." not in text
    assert "pull_request_target" not in text


def test_the_linters_of_workflows_can_fail(workflow: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yml"
    text = workflow.read_text(encoding="utf-8")
    for right, wrong, says in (
        ("timeout-minutes:", "timout-minutes:", "'timout-minutes' was unexpected"),
        ("${{ matrix.python }}", "${{ matrix.pyhton }}", "matrix.pyhton is not defined"),
        ("make lint", 'make "$x', "SC1009"),
        ("make lint", "echo ${{ github.head_ref }}", "template-injection"),
        ("uses: actions/checkout@", "uses: actions/checkout@v4 #", "unpinned-uses"),
    ):
        assert right in text
        bad.write_text(text.replace(right, wrong), encoding="utf-8")
        assert says in lint_workflow(bad)


def test_the_file_of_gitlab_keeps_to_its_schema(projects: dict[str, Path], tmp_path: Path) -> None:
    file = projects["gitlab"] / ".gitlab-ci.yml"
    check = ("check-jsonschema", "--builtin-schema", "vendor.gitlab-ci")
    assert lint(*check, file, cwd=tmp_path) == ""
    bad = tmp_path / "bad.yml"
    bad.write_text(file.read_text(encoding="utf-8").replace("script:", "scripts:"))
    assert "bad.yml" in lint(*check, bad, cwd=tmp_path)


def test_no_repository_variable_is_needed(workflow: Path) -> None:
    """Empty variables leave every job but that for GPUs as it is."""
    text = workflow.read_text(encoding="utf-8")
    assert set(re.findall(r"\bvars\.(\w+)", text)) == {"TORCH_INDEX", "GPU_RUNNER"}
    assert text.count("vars.TORCH_INDEX") == 1
    assert "  TORCH_INDEX: ${{ vars.TORCH_INDEX }}\n" in text
    needing = {
        name for name, job in read(workflow)["jobs"].items() if "vars.GPU_RUNNER" in str(job)
    }
    assert needing == {"gpu"}


def test_packages_and_horovod_s_wheel_are_kept_between_runs(
    workflow: Path, projects: dict[str, Path]
) -> None:
    content = read(workflow)
    for name, job in content["jobs"].items():
        used = {step["uses"].partition("@")[0]: step["with"] for step in uses(job)}
        if python := used.get("actions/setup-python"):
            assert python["cache"] == "pip"
            assert list(workflow.parents[2].glob(python["cache-dependency-path"])), name
        builds = {line for line in commands(job) if re.search(r"horovod|\.ci/run|make slurm", line)}
        assert ("actions/cache" in used) == bool(builds), name
        if builds:
            assert used["actions/cache"]["path"] == content["env"]["HOROVOD_WHEELS"]
    gitlab = read(projects["gitlab"] / ".gitlab-ci.yml")
    assert gitlab["default"]["cache"]["paths"] == ["build/cache/"]
    for name in ("PIP_CACHE_DIR", "HOROVOD_WHEELS"):
        assert gitlab["variables"][name].startswith("$CI_PROJECT_DIR/build/cache/")
    assert "build/" in (projects["gitlab"] / ".gitignore").read_text().splitlines()


def test_actions_are_pinned_to_known_commits(workflow: Path) -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in workflow.parent.iterdir())
    used = re.findall(r"uses: *(.*)", text)
    assert set(used) <= ACTIONS
    assert len(used) == text.count("uses:") > 0
    assert all(re.fullmatch(r"\S+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in ACTIONS)


def test_a_workflow_may_read_and_nothing_else(workflow: Path) -> None:
    content = read(workflow)
    assert content["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in workflow.read_text(encoding="utf-8")
    assert "secrets." not in workflow.read_text(encoding="utf-8")
    for job in content["jobs"].values():
        assert "permissions" not in job
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"].pop("fetch-depth", 0) == 0
                assert step["with"] == {"persist-credentials": False}
            # A value put into a script is read by the shell; one in a variable is not.
            assert "${{" not in step.get("run", "")


def test_every_job_ends_by_itself(workflow: Path) -> None:
    content = read(workflow)
    assert content["concurrency"]["group"].startswith("${{ github.workflow }}-${{ github.ref }}")
    for job in content["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 120


def test_strangers_code_stays_off_machines_of_one_s_own(workflow: Path) -> None:
    hosted = {"ubuntu-24.04"}
    jobs = {
        name: job for name, job in read(workflow)["jobs"].items() if job["runs-on"] not in hosted
    }
    assert list(jobs) == ["gpu"]
    assert jobs["gpu"]["runs-on"] == "${{ vars.GPU_RUNNER }}"
    assert jobs["gpu"]["if"] == (
        "vars.GPU_RUNNER != '' && (github.event_name != 'pull_request' || "
        "github.event.pull_request.head.repo.full_name == github.repository)"
    )


def test_commands_of_the_workflow_are_make_s(workflow: Path) -> None:
    makefile = workflow.parents[2] / "Makefile"
    for job in read(workflow)["jobs"].values():
        assert makes(job) or commands(job) == ['bash .ci/run "$STAGES"']
        for line in makes(job):
            assert_targets_exist(line, makefile)


def test_the_templates_workflow_runs_each_stage_of_ci() -> None:
    content = read(ROOT / ".github" / "workflows" / "ci.yml")
    jobs = content["jobs"]
    matrix = " ".join(jobs["stages"]["strategy"]["matrix"]["stages"]).split()
    weekly = " ".join(jobs["exhaustive"]["strategy"]["matrix"]["stages"]).split()
    stages = re.findall(r"^run_(\w+)\(\)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    runs_others = {"readme", "exhaustive", "release"}
    assert {*matrix, *weekly} == set(stages) - runs_others
    script = (ROOT / ".ci" / "run").read_text()
    landing, _, once_a_week = script.partition("# --- once a week ---")
    assert {*re.findall(r"^run_(\w+)\(\)", landing, re.MULTILINE)} - runs_others == {*matrix}
    assert {*re.findall(r"^run_(\w+)\(\)", once_a_week, re.MULTILINE)} >= {*weekly} - {*matrix}
    assert content[True]["schedule"]  # YAML reads the key `on` as a boolean
    assert "github.event_name == 'schedule'" in jobs["exhaustive"]["if"]


# Targets that no script runs, and why not.
BY_HAND = {
    "docs-serve": "does not end",
    "lock": "takes the newest versions; test_locks.py resolves the locks",
}


def test_each_target_is_run_on_each_push_or_once_a_week() -> None:
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = dict(re.findall(r"^([a-z-]+):(.*)## ", rules, re.MULTILINE))
    scripts = [ROOT / ".ci" / "run", ROOT / ".github" / "workflows" / "ci.yml"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in scripts)
    called = re.findall(r"\bmake ([a-z -]+)", text)
    run = {word for words in called for word in words.split()} & targets.keys()
    run.add("help")  # `make` alone, which bare.sh runs
    assert "bare.sh make " in text
    for _ in targets:
        needed = {word for name in run for word in re.findall(r"[a-z-]+", targets[name])}
        run |= needed & targets.keys()
    assert targets.keys() - run == BY_HAND.keys()


def assert_same_commands(github: dict[str, Any], gitlab: dict[str, Any]) -> None:
    renamed = {"image": "container"}  # `image` is a word of GitLab's own
    gitlab = {name: job for name, job in gitlab.items() if name not in ("docs", "pages")}
    expected = {name: makes(job) for name, job in gitlab.items()}
    assert {renamed.get(name, name): makes(job) for name, job in github.items()} == expected


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine not in APART])
def test_both_install_the_engines_that_are_included(engine: str, tmp_path: Path) -> None:
    answers = dict.fromkeys(ENGINES, "no") | {engine: "yes"}
    jobs = {}
    for service, read_jobs in (
        ("github", lambda p: read(p / ".github" / "workflows" / "ci.yml")["jobs"]),
        ("gitlab", jobs_of_gitlab),
    ):
        project = render(tmp_path / service, answers | {"ci": service}, hooks=True)
        jobs[service] = read_jobs(project)
        test = "\n".join(commands(jobs[service]["test"]))
        for installs in ("apt-get", "cmake", "libopenmpi-dev"):
            assert (installs in test) == (engine == "horovod")
    assert_same_commands(jobs["github"], jobs["gitlab"])
    assert makes(jobs["github"]["test"]) == ["make setup", f"make {engine}", "make test"]
    on_gpus = [] if engine == "horovod" else [engine]
    expected = [f"make {target} VARIANT=cuda" for target in (*on_gpus, "test-gpu")]
    assert makes(jobs["github"]["gpu"]) == expected


def test_both_services_run_the_same(projects: dict[str, Path]) -> None:
    github = read(projects["github"] / ".github" / "workflows" / "ci.yml")["jobs"]
    gitlab = jobs_of_gitlab(projects["gitlab"])
    assert_same_commands(github, gitlab)
    assert [makes(job) for job in github.values()] == [
        ["make setup", "make lint", "make typecheck"],
        ["make setup", "make deepspeed", "make fairscale", "make horovod", "make test"],
        ["make test-newest PYTHON=python"],
        ["make docker", "make docker-test"],
        [f"make {target} VARIANT=cuda" for target in ("deepspeed", "fairscale", "test-gpu")],
    ]
    docs = read(projects["github"] / ".github" / "workflows" / "docs.yml")["jobs"]["docs"]
    assert makes(docs) == makes(gitlab["docs"]) == ["make docs"]
    assert makes(gitlab["pages"]) == ["make docs SITE=public"]
    assert gitlab["pages"]["artifacts"] == {"paths": ["public"]}
    (rule,) = gitlab["pages"]["rules"]
    on_main = "$CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH"
    assert rule == {"if": f'$PUBLISH_DOCS == "yes" && {on_main}'}
    (versions,) = gitlab["newest"]["parallel"]["matrix"]
    assert versions == {"PYTHON_VERSION": github["newest"]["strategy"]["matrix"]["python"]}


def test_the_file_of_gitlab_is_well_formed(projects: dict[str, Path]) -> None:
    content = read(projects["gitlab"] / ".gitlab-ci.yml")
    assert all(set(rule) <= {"if", "when"} for rule in content["workflow"]["rules"])
    assert set(content["default"]) <= {"image", "interruptible", "cache"}
    for name, job in jobs_of_gitlab(projects["gitlab"]).items():
        assert set(job) <= GITLAB_KEYS, name
        assert job["stage"] in content["stages"]
        assert re.fullmatch(r"1 hour|\d\d minutes", job["timeout"])
        # A line with a colon would be read as a mapping.
        assert job["script"]
        lines = [line for key in ("before_script", "script") for line in job.get(key, [])]
        assert all(isinstance(line, str) for line in lines)
        for line in makes(job):
            assert_targets_exist(line, projects["gitlab"] / "Makefile")
        for image in (job.get("image", content["default"]["image"]), *job.get("services", [])):
            assert re.fullmatch(r"(python|docker):[\w.$-]+", image), "no registry is named"
    assert content["stages"] == ["lint", "test", "image", "publish"]


def test_a_job_for_gpus_runs_only_where_there_are_some(projects: dict[str, Path]) -> None:
    gpu = jobs_of_gitlab(projects["gitlab"])["gpu"]
    assert gpu["rules"] == [{"if": "$GPU_RUNNER"}]
    assert gpu["tags"] == ["$GPU_RUNNER"]
