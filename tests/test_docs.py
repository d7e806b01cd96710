"""The pages say what the files say."""

from __future__ import annotations

import json
import re
from pathlib import Path

from options_table import PAGE, page
from rendering import DEFAULTS, ROOT, TEMPLATE

from local_extensions import RESERVED, RULES

LOCKS = [*sorted((TEMPLATE / "requirements").glob("*.txt")), ROOT / "requirements.txt"]


def test_the_table_of_options_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run `make docs`"
    assert "| `license` | Licence: MIT, Apache-2.0, BSD-3-Clause or Proprietary | `MIT` |" in text


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
    names = ["cpu.txt", "dev.txt", "horovod.txt", "requirements.txt"]
    assert [lock.name for lock in LOCKS] == names
    for lock in LOCKS:
        text = lock.read_text(encoding="utf-8")
        for requirement in re.sub(r"#.*", "", text).replace("\\\n", " ").splitlines():
            if requirement.strip():
                assert re.fullmatch(r"\S+==\S+(\s+--hash=sha256:[0-9a-f]{64})+\s*", requirement)
        assert "://" not in text
        if lock.name == "horovod.txt":
            continue  # kept by hand: one source, which is changed to the letter
        asked = re.findall(
            r"^([A-Za-z0-9][A-Za-z0-9._-]*)",
            lock.with_suffix(".in").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        assert {name.lower() for name in asked} <= pins(lock).keys()


def test_the_project_s_lock_is_for_cpu_and_its_tools_fit_it() -> None:
    cpu, dev, _horovod, _tools = map(pins, LOCKS)
    assert cpu["torch"] == "2.13.0+cpu"
    assert not [name for name in cpu if re.match("nvidia-(?!ml-py)|triton|cuda", name)]
    assert {
        name: version for name, version in dev.items() if cpu.get(name, version) != version
    } == {}


def test_no_package_may_hide_one_that_is_locked() -> None:
    locked = {re.sub(r"[-.]", "_", name) for lock in LOCKS[:2] for name in pins(lock)}
    assert locked <= RESERVED
