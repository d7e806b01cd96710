"""The pages say what the files say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

from options_table import PAGE, page
from rendering import DEFAULTS, ROOT, TEMPLATE
from tools import scripts

from local_extensions import RESERVED, RULES

TOOLS = ROOT / "requirements.txt"
PROJECT_LOCKS = {lock.name: lock for lock in (TEMPLATE / "requirements").glob("*.txt")}


def test_the_table_of_options_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run `make docs`"
    assert "| `license` | License | `MIT` | `MIT` or `Apache-2.0` or" in text


def test_every_question_has_a_wording_and_is_checked_right_after_it() -> None:
    settings = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
    questions = [key for key in settings if not key.startswith("_")]
    assert questions == list(RULES) == list(DEFAULTS) == list(settings["__prompts__"])
    keys = list(settings)
    for name in questions:
        check = keys[keys.index(name) + 1]
        assert check == f"__checked_{name}"
        assert settings[check] == f"{{{{ cookiecutter.{name} | checked('{name}') }}}}"


def pins(lock: Path) -> dict[str, str]:
    text = lock.read_text(encoding="utf-8")
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE))


def test_the_locks_are_of_this_tree_and_hash_checked() -> None:
    assert set(PROJECT_LOCKS) == {
        *("cpu.txt", "cuda.txt", "dev.txt"),
        *("horovod.txt", "fairscale.txt", "deepspeed.txt"),
    }
    for lock in [*PROJECT_LOCKS.values(), TOOLS]:
        text = lock.read_text(encoding="utf-8")
        for requirement in re.sub(r"#.*", "", text).replace("\\\n", " ").splitlines():
            if requirement.strip():
                assert re.fullmatch(r"\S+==\S+(\s+--hash=sha256:[0-9a-f]{64})+\s*", requirement)
        assert "://" not in text
        if lock.name in ("horovod.txt", "fairscale.txt"):
            continue  # kept by hand: one source each
        # GPUs want the same as CPUs; only the build of torch is another.
        source = lock.with_name("cpu.in" if lock.name == "cuda.txt" else f"{lock.stem}.in")
        asked = re.findall(
            r"^([A-Za-z0-9][A-Za-z0-9._-]*)", source.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert {name.lower() for name in asked} <= pins(lock).keys()


def test_the_project_s_locks_fit_one_another() -> None:
    cpu, cuda, dev = (pins(PROJECT_LOCKS[name]) for name in ("cpu.txt", "cuda.txt", "dev.txt"))
    assert cpu["torch"] == "2.13.0+cpu"
    assert cuda["torch"] == "2.13.0"
    assert cpu.items() - cuda.items() == {("torch", "2.13.0+cpu")}
    assert not [name for name in cpu if re.match("nvidia-(?!ml-py)|triton|cuda", name)]
    assert {
        name: version for name, version in dev.items() if cpu.get(name, version) != version
    } == {}


def test_no_command_may_hide_one_that_scripts_call(project: Path) -> None:
    """What stands where a command does, and is one on this machine but not of the shell's own."""
    own = subprocess.run(["bash", "-c", "compgen -b; compgen -k"], capture_output=True, text=True)
    start = r"(?:^|[|&;({!@]|\b(?:do|then|else|exec|if|while|until|elif)\b)[ \t]*"
    command = re.compile(start + r"(?:[A-Z_]+=\S+ +)*([a-z][a-z0-9_-]*)(?=[\s;)]|$)", re.MULTILINE)
    called: set[str] = set()
    for script in [*scripts(project), Path("Makefile"), Path("Dockerfile")]:
        text = re.sub(r"(^|\s)#.*", "", (project / script).read_text(encoding="utf-8"))
        called |= set(command.findall(text.replace("\\\n", " ")))
    called -= set(own.stdout.split())
    called = {name for name in called if shutil.which(name)}
    assert {"bash", "sed", "git", "env"} <= called
    assert {name.replace("-", "_") for name in called} - RESERVED == set()
    assert {"srun", "sbatch", "scontrol", "squeue", "scancel", "mpirun", "docker"} <= RESERVED
    assert {"conftest", "sitecustomize", "usercustomize"} <= RESERVED


def test_no_package_may_hide_one_that_is_locked() -> None:
    for lock in PROJECT_LOCKS.values():
        assert {re.sub(r"[-.]", "_", name) for name in pins(lock)} <= RESERVED, lock.name
