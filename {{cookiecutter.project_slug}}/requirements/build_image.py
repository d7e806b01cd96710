"""Build the image with labels that say what it is made of; `make docker` runs this.

usage: python build_image.py IMAGE VARIANT [OPTION OF DOCKER BUILD …]
  DOCKER, ENGINES, BASE_IMAGE, PIP_CONF, CA, TORCH_INDEX   environment; the Makefile describes them

A second tag names the commit, where all changes are committed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
OCI = "org.opencontainers.image"


def git(*words: str) -> str:
    """Return what git prints here; nothing where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", *words],  # noqa: S607 - the user's own
            cwd=PROJECT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def commit() -> str:
    """Return the commit, with `-dirty` where files differ from it, or nothing."""
    found = git("rev-parse", "HEAD")
    return f"{found}-dirty" if found and git("status", "--porcelain") else found


def source(remote: str) -> str:
    """Return a remote's web address without user, password and port, or nothing for a folder."""
    match = re.fullmatch(r"(?:https?|ssh)://(?:[^/]*@)?([^/:]+)(?::\d+)?/(.+)", remote)
    match = match or re.fullmatch(r"(?:[^/@]+@)([^/:]+):/?(.+)", remote)
    return f"https://{match[1]}/{match[2].removesuffix('/').removesuffix('.git')}" if match else ""


def base_image() -> str:
    """Return the base that is given, or else the Dockerfile's."""
    text = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
    found = re.search(r"^ARG BASE_IMAGE=(\S+)", text, re.MULTILINE)
    return os.environ.get("BASE_IMAGE") or (found[1] if found else "")


def labels(project: dict[str, str]) -> dict[str, str]:
    """Return the labels that the Dockerfile does not set itself; unknown ones are left out."""
    name, _, digest = base_image().partition("@")
    found = {
        f"{OCI}.description": project["description"],
        f"{OCI}.licenses": project["license"],
        f"{OCI}.source": source(git("remote", "get-url", "origin")),
        f"{OCI}.base.name": name,
        f"{OCI}.base.digest": digest,
    }
    return {label: value for label, value in found.items() if value}


def tags(image: str, committed: str) -> list[str]:
    """Return the image's name, and the one with its commit."""
    if not committed or committed.endswith("-dirty"):
        return [image]
    mark = "-" if ":" in image.rpartition("/")[2] else ":"
    return [image, f"{image}{mark}{committed[:12]}"]


def command(image: str, variant: str) -> list[str]:
    """Return the command that builds the image, but for the user's options and the folder."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lock = (PROJECT / "requirements" / "torch.txt").read_text(encoding="utf-8")
    torch = re.search(r"^torch==(\S+)", lock, re.MULTILINE)
    given = {name: os.environ.get(name, "") for name in ("ENGINES", "BASE_IMAGE")}
    arguments = {
        "VARIANT": variant,
        "STAGE": {"cu": "cuda", "ro": "compiler"}.get(variant[:2], "cpu"),  # ROCm's Triton compiles
        "COMMIT": commit(),
        "VERSION": project["version"],
        "TORCH": torch[1] if torch else "",
    }
    arguments |= {name: value for name, value in given.items() if value}
    secrets = {
        "pip_conf": f"src={os.environ.get('PIP_CONF', '')}",
        "ca": f"src={os.environ.get('CA', '')}",
        "torch_index": "env=TORCH_INDEX" if os.environ.get("TORCH_INDEX") else "env=",
    }
    words = [os.environ.get("DOCKER") or "docker", "build"]
    words += [f"--tag={tag}" for tag in tags(image, arguments["COMMIT"])]
    words += [f"--build-arg={name}={value}" for name, value in arguments.items()]
    words += [f"--label={name}={value}" for name, value in labels(project).items()]
    return words + [f"--secret=id={k},{v}" for k, v in secrets.items() if not v.endswith("=")]


def main() -> int:
    """Build the image; return docker's exit code."""
    if len(sys.argv) < 3:
        raise SystemExit("usage: python build_image.py IMAGE VARIANT [OPTION OF DOCKER BUILD …]")
    image, variant, *options = sys.argv[1:]
    buildkit = os.environ | {"DOCKER_BUILDKIT": "1"}
    words = [*command(image, variant), *options, "."]
    return subprocess.run(words, cwd=PROJECT, env=buildkit, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
