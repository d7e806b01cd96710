"""``ddp_notebook`` in a real kernel: cells define, train and look at what came back."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.project import PACKAGE, PATIENCE, environment, run

from processes import at_root

if not os.environ.get("CI"):
    for needed in ("nbclient", "ipykernel"):
        pytest.importorskip(needed, reason=f"{needed} is not installed: pip install -e .[dev]")

import nbclient
import nbformat

MODEL = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from {PACKAGE}_trainer import Trainer, TrainingModule, UserError
from {PACKAGE}_trainer.launch.failures import RankError

class Line(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
    def training_step(self, batch, batch_idx):
        x, = batch
        loss = (self.layer(x) - x.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x), batch_size=4)

def make(**options):
    return Trainer(
        **{{"accelerator": "cpu", "devices": 2, "max_epochs": 2, "log_every_n_steps": 1, **options}}
    )
"""


def execute(folder: Path, *cells: str, **options: Any) -> list[nbformat.NotebookNode]:
    """Run a notebook in a folder; its cells after the model's."""
    sources = [nbformat.v4.new_code_cell(source) for source in (MODEL, *cells)]
    notebook = nbformat.v4.new_notebook(cells=sources)
    kernel = {"kernel_name": "python3", "resources": {"metadata": {"path": str(folder)}}}
    client = nbclient.NotebookClient(notebook, timeout=PATIENCE, **kernel, **options)
    client.execute(env=environment(at_root()))
    return notebook.cells[1:]


def text(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


@pytest.mark.slow
def test_trains_again_and_again(tmp_path):
    cells = execute(
        tmp_path,
        """
        net = Line()
        net.activation = lambda x: x  # nothing is pickled
        net.on_fit_end = lambda: print("hello from", net.global_rank)
        before = net.layer.weight.detach().clone()
        trainer = make(strategy="ddp_notebook")
        trainer.fit(net)
        """,
        """
        after = net.layer.weight.detach().clone()
        assert not torch.equal(before, after)
        assert trainer.global_step == 16
        assert trainer.metrics["loss"] < 0.1
        assert (trainer.run_directory / "logs/rank-1.log").read_text() == "hello from 1\\n"
        """,
        """
        del net.on_fit_end
        second = make(max_epochs=1)  # strategy="auto"
        second.fit(net)
        assert not torch.equal(after, net.layer.weight)
        assert second.metrics["loss"] < trainer.metrics["loss"]
        assert second.global_step == 8
        """,
    )
    assert "hello from 0" in text(cells[0])
    assert "hello from 1" not in text(cells[0])
    for cell in (cells[0], cells[2]):
        assert "strategy ddp_notebook on cpu, precision 32-true, 2 processes" in text(cell)
        assert "loss" in text(cell)
        assert "run directory: runs/" in text(cell)


@pytest.mark.slow
def test_a_session_lives_on_after_what_goes_wrong(tmp_path):
    cells = execute(
        tmp_path,
        """
        for strategy in ("ddp", "ddp_spawn"):
            try:
                make(strategy=strategy).fit(Line())
            except UserError as error:
                print(error)
        """,
        """
        class Raises(Line):
            def training_step(self, batch, batch_idx):
                raise ArithmeticError("planted")
        make().fit(Raises())
        """,
        "make(max_steps=1).fit(Line())",
        allow_errors=True,
    )
    refused = text(cells[0]).splitlines()
    assert len(refused) == 2
    assert all("use strategy='ddp_notebook'" in line for line in refused)
    assert cells[1].outputs[-1].ename == "RankError"
    assert "ArithmeticError: planted" in cells[1].outputs[-1].evalue
    assert "done after 1 steps" in text(cells[2])


@pytest.mark.slow
def test_an_interrupt_saves_and_gives_the_session_back(tmp_path):
    body = """
        class Interrupts(Line):
            def training_step(self, batch, batch_idx):
                if self.global_step == 3 and self.global_rank == 0:
                    session = os.getppid() if {0} > 1 else os.getpid()
                    os.kill(session, signal.SIGINT)
                time.sleep(0.1)
                return super().training_step(batch, batch_idx)
        trainer = make(devices={0}, run_name="run{0}", max_epochs=50)
        net = Interrupts()
        trainer.fit(net)
        """
    again = """
        saved = Line()
        cli.load_weights(saved, trainer.run_directory)
        assert torch.equal(net.layer.weight, saved.layer.weight)
        assert trainer.run_directory == pathlib.Path("runs/run{0}").absolute()
        steps = trainer.global_step + 1
        make(devices={0}, resume=str(trainer.run_directory), max_steps=steps).fit(Line())
        """
    cells = execute(
        tmp_path,
        f"import os, pathlib, signal, time; from {PACKAGE}_trainer import cli",
        *(text.format(devices) for devices in (1, 2) for text in (body, again)),
        allow_errors=True,
    )
    for devices, (interrupted, resumed) in ((1, cells[1:3]), (2, cells[3:5])):
        shown = interrupted.outputs[-1]
        assert shown.ename == "Interrupted"
        line = r"interrupted: saved after step (\d+); resume with: Trainer\(resume='(.*)'\)"
        match = re.fullmatch(line, shown.evalue)
        assert match, shown.evalue
        assert match[2] == f"runs/run{devices}"
        assert [out.get("evalue") for out in resumed.outputs if out.output_type == "error"] == []
        saved = f"runs/run{devices}/checkpoints/step-{int(match[1]):08d}"
        assert f"resumed from {saved}" in text(resumed)
        assert f"done after {int(match[1]) + 1} steps" in text(resumed)


def test_a_script_that_only_imports_the_kernel_is_no_notebook():
    code = f"import ipykernel; from {PACKAGE}_trainer.launch.rank import is_interactive as ask"
    assert run(["-c", f"{code}; print(ask())"]).stdout == "False\n"
