"""How the image for GPUs differs from that for CPUs: no GPU is at hand to build it for."""

from __future__ import annotations

import re
from pathlib import Path

import build_image
import pytest


def stages(project: Path) -> dict[str, tuple[str, str]]:
    """Return each stage's base and its lines, by its name."""
    text = (project / "Dockerfile").read_text(encoding="utf-8")
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", text, flags=re.MULTILINE)[1:]
    triples = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return {name: (base, lines) for base, name, lines in triples}


def test_the_variant_decides_what_all_stages_stand_on(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = stages(project)
    assert by_name["base"][0] == "base-${STAGE}"
    assert by_name["base-cuda"][0] == "base-compiler"
    assert by_name["base-compiler"][0] == "base-cpu"
    assert by_name["base-cpu"][0] == "${BASE_IMAGE}"
    assert {by_name[name][0] for name in ("builder", "runtime")} == {"base"}
    text = (project / "Dockerfile").read_text(encoding="utf-8")
    before_all_stages = text.partition("\nFROM ")[0]
    # Or they would be empty in a FROM.
    assert "\nARG VARIANT=cpu\nARG STAGE=${VARIANT}\n" in before_all_stages
    monkeypatch.setattr(build_image, "PROJECT", project)
    variants = {"cpu": "cpu", "cuda": "cuda", "cu126": "cuda", "rocm6.4": "compiler"}
    for variant, stage in variants.items():
        words = build_image.command("x:y", variant)
        assert {f"--build-arg=VARIANT={variant}", f"--build-arg=STAGE={stage}"} <= set(words)


def test_gpus_are_given_to_the_image_for_them_and_nccl_finds_infiniband(project: Path) -> None:
    by_name = stages(project)
    cuda = by_name["base-cuda"][1]
    assert "ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility\n" in cuda
    (installed,) = re.findall(r"apt-get install --yes --no-install-recommends (.*) \\", cuda)
    assert installed.split() == ["ibverbs-providers", "libibverbs1", "librdmacm1"]
    others = "".join(lines for name, (_, lines) in by_name.items() if name != "base-cuda")
    assert "NVIDIA_" not in others
    assert "ibverbs" not in others


def test_a_page_names_what_a_container_on_gpus_needs(project: Path) -> None:
    page = (project / "docs" / "how-to" / "container.md").read_text(encoding="utf-8")
    for option in (
        *("--gpus all", "--ipc=host", "--shm-size", "--ulimit memlock=-1"),
        *("--device /dev/infiniband", "--network host"),
    ):
        assert option in page
