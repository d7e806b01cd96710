"""What the tests ask of the Docker engine that docker/smoke.sh has found or started."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import secrets
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A container that may do nothing but compute, and write to /tmp and to its runs.
HARDENED = (
    *("--read-only", "--tmpfs", "/tmp", "--network", "none"),  # noqa: S108 - in the container
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
)


@dataclass(frozen=True)
class Engine:
    """A client of an engine, and what images are built from in it.

    `base_compiler` has a C++ compiler too, or a build downloads it. `network` is for builds:
    "none" where the base image has all that a build wants. `wheels` holds all that cpu.txt
    locks.
    """

    docker: str
    base: str
    base_compiler: str
    network: str
    wheels: Path

    def __call__(
        self, *arguments: str | Path, check: bool = True, timeout: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Run a docker command; what it prints, errors too, is in `stdout`."""
        return _run([self.docker, *arguments], None, check=check, timeout=timeout)

    def make(self, project: Path, target: str, *settings: str) -> str:
        """Run a target of a rendered project's Makefile on this engine, and return its output."""
        words = [f"{name}={value}" for name, value in self.settings(project).items()]
        return _run(["make", target, *words, *settings], project, check=True, timeout=1200).stdout

    def settings(self, project: Path) -> dict[str, str]:
        """Return the variables of `make docker` for this engine; the project gets the wheels."""
        wheels = project / "requirements" / "wheels"
        for wheel in self.wheels.iterdir():
            if not (wheels / wheel.name).exists():
                os.link(wheel, wheels / wheel.name)
        return {
            "DOCKER": self.docker,
            "BASE_IMAGE": self.base,
            "DOCKER_FLAGS": f"--network {self.network} --progress plain",
        }

    def config(self, image: str) -> dict[str, Any]:
        """Return what an image's containers start with: user, labels, entry point, …"""
        config: dict[str, Any] = json.loads(self("inspect", image).stdout)[0]["Config"]
        return config

    def layers(self, image: str) -> list[str]:
        """Return the digests of an image's layers, the base's first."""
        layers: list[str] = json.loads(self("inspect", image).stdout)[0]["RootFS"]["Layers"]
        return layers

    def shell(self, image: str, script: str) -> str:
        """Return what a shell prints in a container, as the image's own user."""
        arguments = ("--rm", *HARDENED, "--entrypoint", "sh", image, "-c", script)
        return self("run", *arguments).stdout

    @contextlib.contextmanager
    def volume(self) -> Iterator[str]:
        """Make a volume for runs, and remove it afterward."""
        name = f"smoke-{secrets.token_hex(4)}"
        self("volume", "create", name)
        try:
            yield name
        finally:
            self("volume", "rm", "--force", name)

    @contextlib.contextmanager
    def container(self, *arguments: str) -> Iterator[str]:
        """Start a container in the background; at the end it is removed, running or not."""
        name = f"smoke-{secrets.token_hex(4)}"
        self("run", "--detach", "--name", name, *HARDENED, *arguments)
        try:
            yield name
        finally:
            self("rm", "--force", name)

    def wait(self, container: str, timeout: float = 600) -> int:
        return int(self("wait", container, timeout=timeout).stdout)

    def logs(self, container: str) -> str:
        return self("logs", container).stdout

    def search(self, image: str, words: Iterable[bytes]) -> set[bytes]:
        """Return which words stand in an image as it is saved: all layers, history and settings."""
        words_found: set[bytes] = set()
        with subprocess.Popen([self.docker, "save", image], stdout=subprocess.PIPE) as saving:
            assert saving.stdout is not None
            with tarfile.open(fileobj=saving.stdout, mode="r|") as archive:
                for member in archive:
                    file = archive.extractfile(member)
                    if isinstance(file, io.BufferedReader):
                        words_found |= _search(file, words)
            saving.stdout.read()
        assert saving.returncode == 0
        return words_found


def _run(
    command: list[str | Path], cwd: Path | None, *, check: bool, timeout: float
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=timeout,
    )
    if check:
        assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}"
    return done


def _search(file: io.BufferedReader, words: Iterable[bytes]) -> set[bytes]:
    """Return which words stand in a file, which is unpacked if it is a gzip."""
    stream: Any = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
    longest = max(map(len, words))
    matches: set[bytes] = set()
    tail = b""
    while chunk := stream.read(1 << 22):
        text = tail + chunk
        matches |= {word for word in words if word in text}
        tail = text[-longest:]
    return matches
