"""What ``run.json`` says of an attempt: enough to run it again, and to see what differs then."""

import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import UserError, one_line
from ..launch import collectives, files
from ..launch.reports import exit_code
from ..options import redaction
from .plan import Plan

_SOURCES = files.sources()
_PROJECT = _SOURCES.parent  # the project's folder, unless the package was installed from a wheel
_VARIABLES = re.compile(
    r"(OMP|KMP|MKL|GOTO|OPENBLAS|NCCL|RCCL|GLOO|CUBLAS|CUDA|CUDNN|NVIDIA|HIP|ATEN|TORCH|PYTORCH)_"
    r"|PYTHONHASHSEED$|SLURM_\w+(_ID|_COUNT|_NODELIST|_NODES|_NODE|_PER_TASK|_PARTITION)$"
)
_MOST_DIFF_BYTES, _MOST_UNTRACKED, _SECONDS_FOR_GIT = 2**20, 1000, 10
_GIT = (  # a repository's own configuration may name programs: a run must not start them
    *("git", "--no-optional-locks", "-c", "core.fsmonitor=false"),
    *("-c", f"core.hooksPath={os.devnull}"),
)
_STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--ignore-submodules=dirty", "-unormal")
_DIFF = (
    *("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short"),
    *("--ignore-submodules=dirty", "--full-index"),
    *("--src-prefix=a/", "--dst-prefix=b/", "--unified=3"),  # whatever the user has set
)
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def attempt(plan: Plan, hosts: list[dict[str, Any]]) -> dict[str, Any]:
    """Facts of the attempt that this process starts; ``hosts`` are those of :func:`hosts`."""
    restarts = [text for text in map(os.environ.get, _RESTARTS) if text and text.isdecimal()]
    return {
        "command": redaction.command(sys.argv),
        **here(plan.started_in),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "cuda": torch.version.cuda,
        },
        "hosts": hosts,
        "layout": asdict(plan.layout),
        "restarts": max(map(int, restarts), default=0),
        "strategy": plan.strategy_name,
        "precision": plan.precision.name,
        "device": str(plan.device),
        "seed": plan.options.seed,
    }


def here(directory: Path) -> dict[str, Any]:
    """Facts that do not depend on a run: of a working directory, the project and this process.

    Values of variables and answers whose name suggests a secret are redacted.
    """
    image = {name: os.environ.get(f"IMAGE_{name.upper()}") or None for name in ("commit", "digest")}
    locks = sorted(_PROJECT.glob("requirements/*.txt"))
    variables = {name: os.environ[name] for name in sorted(os.environ) if _VARIABLES.match(name)}
    git, problem = None, None
    try:
        git = commit(_PROJECT if (_PROJECT / "pyproject.toml").is_file() else directory)
    except UserError as error:
        problem = str(error)
    return {
        "directory": str(directory),
        "code": str(_SOURCES),
        "git": git,
        "git_problem": problem,
        "template": redaction.value(_template()),
        "locks": {path.name: sha256(path.read_bytes()).hexdigest() for path in locks},
        "image": image if any(image.values()) else None,
        "packages": _packages(),
        "variables": redaction.value(variables),
    }


def other_code(directory: Path) -> list[str]:
    """A line if other code runs than that of the project in a directory, such as a copy of it."""
    here, trainer, where = directory / "src", files.TRAINER.name, files.TRAINER.parent
    for running in (_SOURCES / files.PACKAGE, files.TRAINER):
        copy, place = here / running.name, running.parent
        if copy.is_dir() and not (running.is_dir() and copy.samefile(running)):
            return [f"the code in {place} runs, not that in {here}: first `make setup`"]
    for wheel in directory.glob(f"wheels/{trainer}-*.whl"):
        if not (where / f"{trainer}-{wheel.name.split('-')[1]}.dist-info").is_dir():
            return [f"the trainer in {where} runs, not {wheel.name}: first `make setup`"]
    return []


def _template() -> dict[str, Any] | None:
    """Version of the template, and the answers to its questions; ``None``: not known here."""
    try:
        tool = tomllib.loads((_PROJECT / "pyproject.toml").read_text("utf-8"))["tool"]
        answers = dict(tool["cookiecutter-distributed-torch"])
        version = answers.pop("version")
    except (OSError, ValueError, LookupError, TypeError):
        return None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        cruft = json.loads((_PROJECT / ".cruft.json").read_text("utf-8"))["context"]["cookiecutter"]
        answers |= {name: value for name, value in cruft.items() if not name.startswith("_")}
    return {"version": version, "answers": answers}


def _packages() -> dict[str, str]:
    """Version of each installed package by its normalized name."""
    versions = {}
    for folder in reversed(sys.path):  # the first of several is imported
        # Not importlib.metadata, which parses whole files: a hundred times slower.
        with contextlib.suppress(OSError):  # Python skips folders that cannot be read, too
            for path in Path(folder).glob("*-*.*-info"):
                name, _, version = path.stem.partition("-")
                versions[re.sub("[-_.]+", "-", name).lower()] = version
    return dict(sorted(versions.items()))


def hosts(plan: Plan) -> list[dict[str, Any]]:
    """Facts of each node, of its first rank; all ranks call it."""
    facts = host(plan.device) if plan.layout.local_rank == 0 else None
    return [node for node in collectives.gather(facts) if node is not None]


def host(device: torch.device) -> dict[str, Any]:
    """Facts of this machine; of its accelerators only if ``device`` is one."""
    model = _read("/proc/cpuinfo", r"^model name\s*: (.+)$")
    facts: dict[str, Any] = {
        "name": socket.gethostname(),
        "cpu": model or platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        **{"gpus": [], "driver": None, "cuda": None, "nccl": None},
    }
    if device.type == "cuda":
        facts["gpus"] = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        facts["driver"] = _read("/proc/driver/nvidia/version", r"Module .*?(\d+\.\d+[.\d]*)")
        facts["cuda"] = torch.version.cuda or torch.version.hip
        if dist.is_available() and dist.is_nccl_available():
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def _read(path: str, pattern: str) -> str | None:
    with contextlib.suppress(OSError):
        if match := re.search(pattern, Path(path).read_text("utf-8"), re.MULTILINE):
            return match[1]
    return None


def end(step: int, metrics: Mapping[str, float], error: BaseException | None) -> dict[str, Any]:
    """Facts of the end of an attempt: ``error`` has ended it, unless it is ``None``."""
    # JSON has no NaN and no infinity.
    texts = {name: str(value) for name, value in metrics.items() if not np.isfinite(value)}
    return {"exit_code": exit_code(error), "last_step": step, "metrics": {**metrics, **texts}}


# --- the commit of the working directory, and what was changed since -----------------------------


def commit(directory: Path) -> dict[str, Any] | None:
    """The commit of a working directory, and its changes without secrets; ``None`` without git.

    In a container without the repository, the commit of the image, and whether it had changes.

    Raises:
        UserError: Git is not installed, fails or takes too long, or there is no commit.
    """
    is_here = any((folder / ".git").exists() for folder in (directory, *directory.parents))
    if is_here or "GIT_DIR" in os.environ:
        return _of_repository(directory, is_here)
    if not (image := os.environ.get("IMAGE_COMMIT", "")):
        return None
    return {"commit": image.removesuffix("-dirty"), "dirty": image.endswith("-dirty")}


def _of_repository(directory: Path, is_here: bool) -> dict[str, Any]:
    # Git's hooks set them, for commands in another repository too.
    ignored = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE") if is_here else ()
    environment = {name: os.environ[name] for name in os.environ if name not in ignored}
    try:
        variables = _without_filters(directory, environment)
        lines = _output(directory, variables, *_STATUS).split("\0")[:-1]
        changes = [line for line in lines if not line.startswith("# ")]
        untracked = [change.removeprefix("? ") for change in changes if change.startswith("? ")]
        diff = _output(directory, variables, *_DIFF) if len(changes) > len(untracked) else ""
    except subprocess.CalledProcessError as error:
        raise UserError(error.stderr.partition("\n")[0] or one_line(error)) from error
    except subprocess.TimeoutExpired as error:  # whose text is the whole command
        raise UserError(f"git took more than {_SECONDS_FOR_GIT} seconds") from error
    except OSError as error:
        raise UserError(one_line(error)) from error
    if (head := lines[0].removeprefix("# branch.oid ")) == "(initial)":
        raise UserError("the repository has none yet")
    is_cut = len(diff) > _MOST_DIFF_BYTES
    if diff:
        from ..options import redacted_diff  # a run without changes needs none of it

        diff = redacted_diff.redacted(diff[:_MOST_DIFF_BYTES])
    facts = {"commit": head, "dirty": bool(changes), "diff": diff, "diff_cut": is_cut}
    return {**facts, "untracked": untracked[:_MOST_UNTRACKED]}


def _without_filters(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which git starts no filter that the repository defines, and no transport."""
    base = {**environment, "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
    listed = ("config", "--show-scope", "--name-only", "-z", "--list")
    entries = _output(directory, base, *listed).split("\0")
    filters = {
        name.rpartition(".")[0]
        for scope, name in zip(entries[::2], entries[1::2], strict=False)
        if scope in ("local", "worktree") and name.startswith("filter.")
    }
    off = {"clean": "", "process": "", "required": "false"}
    settings = [(f"{driver}.{name}", off[name]) for driver in sorted(filters) for name in off]
    count = base.get("GIT_CONFIG_COUNT", "")
    first = int(count) if count.isdecimal() else 0  # after those of the user
    variables = {"GIT_CONFIG_COUNT": str(first + len(settings))}
    for index, (name, value) in enumerate(settings, first):
        variables |= {f"GIT_CONFIG_KEY_{index}": name, f"GIT_CONFIG_VALUE_{index}": value}
    return base | variables


def _output(directory: Path, variables: dict[str, str], *words: str) -> str:
    run = partial(subprocess.run, cwd=directory, env=variables, stdin=subprocess.DEVNULL)
    text = partial(run, encoding="utf-8", errors="replace", capture_output=True)
    return text([*_GIT, *words], check=True, timeout=_SECONDS_FOR_GIT).stdout
