"""The contract of strategies: its names, what is private, and the way of a step through it."""

import inspect
import json
import re
from itertools import combinations
from pathlib import Path

import pytest
from my_project_trainer import strategies
from my_project_trainer.strategies import Strategy
from tests.project import ROOT, succeed

from processes import at_root

# Profiles one step: from the return of a training_step to the next one's call. Log values are read
# in other steps, and no bar is shown.
STEP = """
import json, sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import my_project_trainer as trainer
FOLDER = Path(trainer.__file__).parent
calls = []

def note(frame, event, _):
    path = Path(frame.f_code.co_filename)
    if event == "call" and path.is_relative_to(FOLDER):
        calls.append((path.relative_to(FOLDER).as_posix(), frame.f_code.co_qualname))

class Net(trainer.TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        sys.setprofile(note if batch_idx == 5 else None)
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(80, 2)), batch_size=4)
options = {"max_steps": 10, "log_every_n_steps": 1000, "enable_progress_bar": False}
trainer.Trainer(strategy="ddp", accelerator="cpu", devices=1, **options).fit(Net())
print(json.dumps(calls))
"""
MOST_NAMES, MOST_CALLS, MOST_FILES, MOST_RETURNS = 28, 34, 15, 8
PRIVATE = re.compile(r"(?:\bself\.|\bsuper\(\)\.|def |\n    )(_[a-z]\w*)")


def test_the_contract_is_small_and_its_table_whole():
    names = {*vars(Strategy), *Strategy.__annotations__}
    public = {name for name in names if not name.startswith("_")}
    assert len(public) <= MOST_NAMES, public
    page = (ROOT / "docs" / "design.md").read_text()
    table = re.split("The contract of strategies\n|These are", page)[1]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)", "".join(cells))) == public


@pytest.mark.parametrize("name", strategies.names())
def test_no_strategy_overrides_or_uses_what_is_private_to_another(name: str):
    for one, base in combinations(strategies.find(name).cls.__mro__[:-1], 2):
        ours, others = (set(PRIVATE.findall(inspect.getsource(cls))) for cls in (one, base))
        assert not ours & others, (one, base)


def test_a_step_of_ddp_can_be_followed(tmp_path: Path):
    done = succeed(["-c", STEP], cwd=tmp_path, extra=at_root())
    calls = [tuple(load) for load in json.loads(done.stdout.splitlines()[-1])]
    # From where the batch is read.
    first = [name for _, name in calls].index("read")
    calls = calls[first:] + calls[:first]
    print(*(f"{path:40} {name}" for path, name in calls), sep="\n")
    files = [path for path, _ in calls]
    changes = [path for path, before in zip(files, ["", *files], strict=False) if path != before]
    returns = len(changes) - len(set(changes))
    print(f"{len(calls)} calls in {len(set(files))} files, {returns} returns to a file")
    assert len(calls) <= MOST_CALLS
    assert len(set(files)) <= MOST_FILES
    assert returns <= MOST_RETURNS
