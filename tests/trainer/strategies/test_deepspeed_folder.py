"""What DeepSpeed's folder does for the trainer: its launcher's words, its gradient scale."""

import torch
from my_project_trainer.cli import command as cli
from my_project_trainer.launch import cluster
from my_project_trainer.strategies import precision
from my_project_trainer.strategies.deepspeed.deepspeed import adapt_scale


def test_the_scale_adapts_to_deepspeeds_steps_as_to_its_own() -> None:
    ours, theirs = (precision.Precision("16-mixed", "cpu") for _ in range(2))
    for scaled in (ours, theirs):
        scaled.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        scaled.scale(torch.ones(1))  # which makes its state
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for overflowed in (True, False, False, False, True, False, False, False, False):
        parameter.grad = torch.tensor([float("inf") if overflowed else 1.0])
        theirs.step(optimizer)
        theirs.update()
        adapt_scale(ours.scaler, overflowed)
        assert ours.state() == theirs.state()


def test_an_option_that_the_launcher_appends_is_no_option_of_ours(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cluster.without_appended(["fit", "--local_rank=1", "--x"]) == ["fit", "--x"]
    assert cluster.without_appended(["fit", "--local_rank=2"]) == ["fit", "--local_rank=2"]
    cli.main(["--local_rank=1"])  # nothing is left of it
    assert capsys.readouterr().out.startswith("usage: ")
