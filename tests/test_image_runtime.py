"""What the image runs as, what process 1 is, and that all it installs is checked by hash."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def instructions(project: Path, stage: str) -> list[str]:
    """Return the instructions of a stage, each on one line."""
    text = (project / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\s*\\\n\s*", " ", text)
    (stage_text,) = re.findall(rf"^FROM \S+ AS {stage}\n(.*?)(?=^FROM |\Z)", text, re.M | re.S)
    return [line for line in stage_text.splitlines() if line]


@pytest.mark.parametrize("stage", ["runtime", "dev"])
def test_it_runs_as_a_user_who_is_not_root_under_an_init_process(project: Path, stage: str) -> None:
    lines = instructions(project, stage)
    # The last of each counts.
    users = [line for line in lines if line.startswith("USER ")]
    assert users[-1:] == ["USER 10001:10001"]
    entries = [line for line in lines if line.startswith("ENTRYPOINT ")]
    assert entries[-1].startswith('ENTRYPOINT ["tini", "--"')


def test_the_user_is_made_with_the_number_that_the_image_runs_as(project: Path) -> None:
    (made,) = (line for line in instructions(project, "base-cpu") if "useradd" in line)
    assert "useradd --uid 10001 " in made
    # --user can be any user, who must be able to write there.
    assert "install --directory --owner 10001 --group 10001 --mode 1777 /app/runs" in made


def test_all_that_pip_installs_is_checked_by_hash(project: Path) -> None:
    text = " ".join(
        line for stage in ("builder", "dev", "environment") for line in instructions(project, stage)
    )
    installs = re.findall(r"pip install [^;&]*", text)
    assert len(installs) >= 2
    assert [install for install in installs if "--require-hashes" not in install] == []
    # torch comes by a script of ours (test_torch_sources.py), which gives pip the option itself.
    assert text.count('python install_torch.py "$VARIANT"') == 1
    assert not any(re.search(r"\btorch[ =\"']", install) for install in installs)


def test_each_installation_trusts_the_user_s_certificate(project: Path) -> None:
    trusts = "if [ -e /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi"
    runs = [line for stage in ("builder", "dev") for line in instructions(project, stage)]
    installs = [line for line in runs if 'install_torch.py "' in line or "pip install" in line]
    assert len(installs) >= 2
    for install in installs:
        assert "--mount=type=secret,id=ca" in install
        assert trusts in install


def test_horovod_is_built_for_other_processors_too(project: Path) -> None:
    (flags,) = (line for line in instructions(project, "builder") if "ARCH_FLAGS" in line)
    assert flags == 'ARG HOROVOD_BUILD_ARCH_FLAGS="-march=x86-64-v2"'
