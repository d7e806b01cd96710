"""Write the locks in this folder from the .in files; `make lock` runs this with uv on PATH.

usage: lock.py [--keep]
  --keep        change only the versions that the .in files rule out; default: the newest versions
  TORCH_INDEX   environment: a package index that has torch's CPU builds, asked before PyTorch's own

torch.txt      torch as pip's own index has it: with CUDA on Linux, for the CPU on macOS; and
               torchvision and torchaudio if something needs them
torch-cpu.txt  their CPU builds for Linux; one line per Python and machine, as only their indexes
               have them
cpu.txt        the rest of what cpu.in and `dependencies` in pyproject.toml need
cuda.txt       CUDA's libraries, which torch.txt needs on Linux
dev.txt, and one for each other .in file: what is installed besides; nothing of the files above,
               unless it is for an environment of its own

Every lock is for Python 3.11 to 3.13, Linux on x86-64 and arm64, and macOS on arm64.
"""

from __future__ import annotations

import base64
import os
import re
import ssl
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

from install_torch import FAMILY, PYTORCH_INDEX, cpu_line, hidden

HERE = Path(__file__).resolve().parent
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
LINUX = "sys_platform == 'linux'"
NOTE = "# Exact versions with their hashes, {}.\n# Made from {} by `make lock`; do not edit.\n"
# A line of a .in file that sets a variable for the build of a source package.
ENVIRONMENT = re.compile(r"^# environment: (\w+)=(\S+)$", re.MULTILINE)

# A line of a .in file whose lock is for an environment of its own, and so has all that it needs:
# with `dependencies` in pyproject.toml, or without, where the project is not installed into it.
ALONE = "# environment of its own\n"
WITHOUT_PROJECT = "# environment of its own, without the project\n"

Locked = dict[str, list[str]]  # a package's name, and its entries: one per marker


def dependencies() -> str:
    """Return the lines of `dependencies` in pyproject.toml, without torch, which .in files pin."""
    text = (HERE.parent / "pyproject.toml").read_text(encoding="utf-8")
    # Not read as TOML, which it is not yet in the template's own tree.
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    if block is None:
        raise SystemExit("lock.py: pyproject.toml: write each of `dependencies` on its own line")
    found = re.findall(r"""^ *["'](.+)["'],?""", block[1], re.MULTILINE)
    return "\n".join(line for line in found if not re.match(r"torch\b(?!-)", line))


def resolve(source: str, former: str) -> Locked:
    """Return all that a .in file needs, for every Python and machine; `former` is kept to."""
    command = ["uv", "pip", "compile", source, "--universal", "--python-version", "3.11"]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        if source == "cpu.in" or ALONE in (HERE / source).read_text(encoding="utf-8"):
            project = Path(folder, "project.in")
            project.write_text(dependencies(), encoding="utf-8")
            command.append(str(project))
        output = Path(folder, "lock.txt")
        output.write_text(former, encoding="utf-8")
        subprocess.run(
            [*command, "--output-file", str(output)],
            cwd=HERE,
            env=os.environ | dict(ENVIRONMENT.findall((HERE / source).read_text("utf-8"))),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return entries(output.read_text(encoding="utf-8"))


def entries(text: str) -> Locked:
    """Return the entries of a lock by the names of their packages."""
    found: Locked = {}
    for entry in re.findall(r"^[a-z0-9][^#\n]*(?:\n +--hash=.*)+", text, re.MULTILINE):
        found.setdefault(re.split("[=;[ ]", entry)[0], []).append(entry)
    return found


def write(name: str, locked: Locked, about: str, source: str) -> None:
    """Write a lock as a whole: a run that is interrupted leaves the former one."""
    text = NOTE.format(about, source) + "".join(f"{e}\n" for es in locked.values() for e in es)
    new = HERE / f"{name}.new"
    new.write_text(text, encoding="utf-8")
    new.replace(HERE / name)


def former(*names: str) -> str:
    """Return the text of former locks, where they are there."""
    paths = [HERE / f"{name}.txt" for name in names]
    return "".join(path.read_text(encoding="utf-8") for path in paths if path.exists())


class Links(HTMLParser):
    """The addresses on a page of a package index."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the address of a link."""
        self.found += [value for name, value in attrs if (tag, name) == ("a", "href") and value]


def read_page(index: str, name: str) -> str:
    """Return a package's page in a package index; raise OSError if it cannot be had."""
    parts = urllib.parse.urlsplit(f"{index.rstrip('/')}/{name}/")
    headers = {}
    if parts.username:
        login = urllib.parse.unquote(f"{parts.username}:{parts.password or ''}").encode()
        headers["Authorization"] = f"Basic {base64.b64encode(login).decode()}"
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    trusted = ssl.create_default_context()
    if os.environ.get("PIP_CERT"):
        trusted.load_verify_locations(os.environ["PIP_CERT"])
    asked = urllib.request.Request(address, headers=headers)  # noqa: S310 - the user's own index
    with urllib.request.urlopen(asked, timeout=15, context=trusted) as answer:  # noqa: S310
        page: bytes = answer.read()
    return page.decode()


def cpu_builds(page: str, package: str, version: str) -> list[str]:
    """Return the entries of the CPU builds that a package's page lists with hashes."""
    links = Links()
    links.feed(page)
    # Both tags of a wheel are the same, but for a Python without its lock (cp313-cp313t).
    name = rf"{package}-{re.escape(version)}\+cpu-cp3(\d+)-cp3\1-[^/]*({'|'.join(MACHINES)})\.whl"
    found = {}
    for link in map(urllib.parse.unquote, links.found):
        match = re.search(rf"(?:^|/){name}#sha256=([0-9a-f]{{64}})$", link)
        if match and f"3.{match[1]}" in PYTHONS:
            line = cpu_line(package, version, f"3.{match[1]}", match[2])
            found[line] = f"{line} \\\n    --hash=sha256:{match[3]}"
    return [found[line] for line in sorted(found)]


def known_cpu_builds(package: str, version: str) -> list[str]:
    """Return the CPU builds of the former lock, where it is one of this version."""
    known = entries(former("torch-cpu")).get(package, [])
    return [entry for entry in known if entry.startswith(f"{package}=={version}+cpu ")]


def lock_cpu_builds(package: str, version: str, indexes: Iterable[str]) -> list[str]:
    """Return the entries of a package's CPU builds: of an index, else the known ones."""
    for index in indexes:
        try:
            builds = cpu_builds(read_page(index, package), package, version)
            why = f"lists no CPU build of {package} {version} with its hash"
        except (OSError, ValueError) as error:
            builds, why = [], f"cannot be read ({error})"
        if builds:
            return builds
        print(f"lock.py: {hidden(index)} {why}", file=sys.stderr)
    known = known_cpu_builds(package, version)
    had = f"torch-cpu.txt keeps the hashes of {package} that it had: {len(known)}"
    print(f"lock.py: {had}", file=sys.stderr)
    return known


def main() -> None:
    """Resolve the .in files, and write all locks."""
    if sys.argv[1:] not in ([], ["--keep"]):
        raise SystemExit("usage: lock.py [--keep]")
    keep = bool(sys.argv[1:])
    sources = [os.environ.get("TORCH_INDEX", ""), f"{PYTORCH_INDEX}cpu"]

    everything = resolve("cpu.in", former("cpu", "cuda", "torch") if keep else "")
    with tempfile.TemporaryDirectory() as folder:
        torch = Path(folder, "torch.in")
        torch.write_text(everything["torch"][0].split()[0])
        of_torch = resolve(str(torch), former("cpu", "cuda", "torch") if keep else "")
    # What torch itself needs on Linux alone is CUDA.
    cuda = {name for name, found in of_torch.items() if all(LINUX in entry for entry in found)}
    family = {name: everything[name] for name in FAMILY if name in everything}
    rest = {n: e for n, e in everything.items() if n not in cuda and n not in family}

    write("torch.txt", family, "of torch in pip's own index", "cpu.in")
    builds = {
        name: lock_cpu_builds(name, found[0].split()[0].split("==")[1], filter(None, sources))
        for name, found in family.items()
    }
    write("torch-cpu.txt", builds, "of torch's CPU builds for Linux", "cpu.in")
    write("cpu.txt", rest, "of all but torch", "cpu.in")
    libraries = {name: everything[name] for name in sorted(cuda)}
    write("cuda.txt", libraries, "of what torch.txt needs on Linux", "cpu.in")
    # The others are constrained by dev.txt.
    others = sorted({path.stem for path in HERE.glob("*.in")} - {"cpu", "dev"})
    for name in ("dev", *others):
        more = resolve(f"{name}.in", former(name) if keep else "")
        about = "of an environment of its own"
        text = (HERE / f"{name}.in").read_text(encoding="utf-8")
        if ALONE not in text and WITHOUT_PROJECT not in text:
            more = {n: e for n, e in more.items() if n not in everything}
            about = f"of what {name}.in adds to cpu.txt"
        write(f"{name}.txt", more, about, f"{name}.in")


if __name__ == "__main__":
    main()
