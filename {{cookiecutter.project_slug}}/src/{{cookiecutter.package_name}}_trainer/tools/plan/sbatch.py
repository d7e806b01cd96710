"""Compares a plan with the lines for SLURM of the project's job scripts."""

import re
from pathlib import Path

_SCRIPTS = ("slurm/train.sh", "slurm/settings.sh")
_LINE = re.compile(r"^#SBATCH\s+--([a-z-]+)[= ]\s*(\S+)", re.MULTILINE)
_VARIABLE = re.compile(r"^\s*export\s+SBATCH_([A-Z_]+)=[\"']?([^\"'\s#]+)", re.MULTILINE)


def read(root: Path) -> dict[str, tuple[str, str]]:
    """The options of sbatch by name, each with its value and its place; later ones win."""
    found: dict[str, tuple[str, str]] = {}
    for name in _SCRIPTS:
        path = root / name
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for key, value in _LINE.findall(text):
            found[key] = value, f"{name}: #SBATCH --{key}={value}"
        for key, value in _VARIABLE.findall(text):
            option = key.lower().replace("_", "-")
            found[option] = value, f"{name}: SBATCH_{key}={value}"
    return found


def disagreements(root: Path, devices: int, nodes: int, on_gpus: bool) -> list[str]:
    """One line for each option of sbatch that is not the plan's, with what overrides it."""
    found, expected = read(root), {"nodes": nodes, "ntasks": nodes * devices}
    if not found:
        return []
    per_node = ("gpus-per-node", "gpus-per-task") if on_gpus else ("ntasks-per-node",)
    expected |= {"ntasks-per-node": devices, "gpus": nodes * devices}
    expected |= {"gpus-per-node": devices, "gpus-per-task": 1, "gres": devices}
    lines = []
    for key, (value, place) in found.items():
        number = value.rpartition(":")[2]
        is_of_gpus = key.startswith("g")
        if key not in expected or (is_of_gpus and not on_gpus) or not number.isdigit():
            continue
        if int(number) != expected[key]:
            lines.append(
                f"{place}, and the plan has {expected[key]}: give sbatch --{key}={expected[key]}"
            )
    if nodes > 1 and "nodes" not in found:
        lines.append(f"no #SBATCH line says nodes: give sbatch --nodes={nodes}")
    if devices > 1 and not any(key in found for key in (*per_node, "gpus", "gres", "ntasks")):
        key = per_node[0]
        lines.append(f"no #SBATCH line says {key}: give sbatch --{key}={devices}")
    return lines
