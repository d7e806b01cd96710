"""Compares a plan with the lines for SLURM of the project's job scripts."""

import re
from pathlib import Path

_SCRIPTS = ("slurm/train.sh", "slurm/settings.sh")
_OPTION = re.compile(
    r"^(?:#SBATCH\s+--|\s*export\s+SBATCH_)([a-zA-Z_-]+)[= ]\s*[\"']?([^\"'\s#]+)", re.MULTILINE
)


def disagreements(root: Path, devices: int, nodes: int, accelerator: str) -> list[str]:
    """One line for each option of sbatch that is not the plan's, with what overrides it."""
    on_gpus = accelerator != "cpu"
    paths = [root / name for name in _SCRIPTS if (root / name).is_file()]
    found: dict[str, tuple[str, str]] = {}  # later ones win
    for path in paths:
        for line in _OPTION.finditer(path.read_text(encoding="utf-8", errors="replace")):
            place = f"{path.relative_to(root)}: {line[0].strip()}"
            found[line[1].lower().replace("_", "-")] = line[2], place
    expected = {"nodes": nodes, "ntasks": nodes * devices, "ntasks-per-node": devices}
    if on_gpus:
        expected |= {"gpus": nodes * devices, "gpus-per-node": devices}
        expected |= {"gpus-per-task": 1, "gres": devices}
    ways = ("gpus-per-node", "gpus-per-task", "gpus", "gres", "ntasks")
    key, *others = ways if on_gpus else ("ntasks-per-node", "ntasks")
    defaults = {"nodes": "1", key: "0" if on_gpus else "1"}
    if found.keys() & {key, *others}:
        del defaults[key]
    for name, default in defaults.items() if paths else ():
        found.setdefault(name, (default, f"no #SBATCH line says {name}"))
    lines = []
    for name, number in expected.items():
        value, place = found.get(name, ("", ""))
        given = value.rpartition(":")[2]
        if given.isdigit() and int(given) != number:
            lines.append(f"{place}, and the plan has {number}: give sbatch --{name}={number}")
    return lines
