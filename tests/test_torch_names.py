"""What tools/torch_names.py finds missing, in wheels of a few lines."""

import ast
import re
import sys
import zipfile
from pathlib import Path

from rendering import ROOT, TEMPLATE

sys.path.insert(0, str(ROOT / "tools"))
from torch_names import Version, missing

FILES = {
    "torch/__init__.py": "from torch._C import *\nfrom .tensors import Tensor\nfrom . import nn",
    "torch/_C/__init__.pyi": "def empty(size): ...\n",
    "torch/tensors.py": "class Tensor:\n    _kept = 1\n",
    "torch/nn/__init__.py": "from .layers import *\nfrom ..tensors import Tensor",
    "torch/nn/layers.py": "if True:\n    Linear = Conv = object\n",
}
NEWER = {
    "torch/_C/__init__.pyi": "def empty(size, pinned): ...\ndef full(): ...\n",
    "torch/tensors.py": "class Tensor:\n    def _added(self): ...\n    _kept = 1\n",
    "torch/nn/layers.py": "from .new import Linear, Lazy as Conv, Extra\n",
    "torch/nn/new.py": "class Linear: ...\nLazy = Extra = object\n",
}
TRAINER = """
import torch
from torch import Tensor, nn

def step(x: Tensor) -> None:
    from torch.nn.new import Extra
    torch.empty(1, pinned=True), torch.full().sum(), torch.made_when_it_runs
    nn.Linear(x._kept, x._added), nn.Extra.method, nn.Conv, x.mine(lone=1), torch.nn.Tensor
    x._mine = x._mine
"""


def write(path: Path, files: dict[str, str]) -> Version:
    with zipfile.ZipFile(path, "w") as wheel:
        for item in files.items():
            wheel.writestr(*item)
    return Version(path)


def test_what_a_version_lacks_is_found_in_its_files(tmp_path: Path) -> None:
    versions = [write(tmp_path / "old", FILES), write(tmp_path / "new", FILES | NEWER)]
    lacking = missing([ast.parse(TRAINER)], versions)
    assert lacking == [{"pinned", "torch.full", "_added", "torch.nn.Extra", "torch.nn.new"}, set()]


def test_versions_are_all_from_the_oldest_to_the_locked_one() -> None:
    (versions,) = re.findall(r"^TORCH_VERSIONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    oldest = re.findall(r'"torch>=2\.(\d+)"', (TEMPLATE / "pyproject.toml").read_text())
    lock = (TEMPLATE / "requirements" / "torch-cpu.txt").read_text()
    newest = re.findall(r"^torch==2\.(\d+)", lock, re.M)
    assert versions.split() == [f"2.{n}.*" for n in range(int(oldest[0]), int(newest[0]) + 1)]
