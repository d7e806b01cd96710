"""``predict`` returns and writes any nesting, in the dataset's order, on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import UserError
from my_project_trainer.cli import command as cli
from my_project_trainer.strategies.replicated.dp import join_rows
from safetensors.torch import load_file
from tests.project import succeed

import prediction_subject
from processes import at_root

REFUSED = "predict_step returned a set, which ranks cannot exchange and files cannot hold: "
SUMS = [1.0, 5.0, 9.0, 13.0, 8.0]


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process, and two ranks, return for each kind of prediction."""
    folder = tmp_path_factory.mktemp("predictions")
    done = succeed(["-m", "prediction_subject"], cwd=folder, extra=at_root())
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["nested", "scalar", "rows"])
def test_two_ranks_return_what_one_process_returns(predictions: Any, kind: str) -> None:
    alone, ranks = predictions
    assert len(alone[kind][1]) == 5
    assert ranks[kind] == alone[kind]


def test_each_batch_is_there_once_and_in_order(predictions: Any) -> None:
    _, ranks = predictions
    assert [values[-1] for values in ranks["scalar"][1]] == SUMS
    assert [values[-1] for values in ranks["rows"][1]] == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


def test_ranks_name_the_type_that_they_cannot_exchange(predictions: Any) -> None:
    _, ranks = predictions
    assert ranks["set"].startswith(REFUSED)


def predict(kind: str) -> None:
    """The command, on the initial weights of a module."""
    model = ["--model", f"{prediction_subject.__name__}.Nested", "--model.kind", kind]
    options = ["--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    cli.main(["predict", "--checkpoint", "none", "--trainer.run_name", "a", *model, *options])


@pytest.mark.usefixtures("apart")
def test_the_command_writes_any_nesting_of_plain_types(capsys: Any) -> None:
    predict("rows")
    folder = Path("runs/a")
    assert load_file(folder / "predictions.safetensors")["predictions"].tolist() == [*range(9)]
    predict("nested")
    line = "5 batches of predictions written to runs/a/predictions.pt"
    assert f"{line} (removed predictions.safetensors)" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["predictions.pt"]
    read = torch.load(folder / "predictions.pt", weights_only=True)
    assert [output["ragged"].shape for output in read] == [(2, 1), (2, 3), (2, 2), (2, 1), (1, 3)]
    assert read[4]["boxes"] == [(torch.tensor(8.0), "«8»")]
    assert read[3]["answer"] == {"text": ["6"], "score": 2.0}
    assert read[4]["array"].tolist() == [16]
    predict("table")
    lines = (folder / "predictions.csv").read_text().splitlines()
    assert lines[:3] == ["name,value,near", "«0»,0.0,True", "«1»,1.0,True"]
    assert lines[8:] == ['"«7», 7",7.0,False', "«8»,8.0,False"]
    assert " and, as a table, predictions.csv\n" in capsys.readouterr().out
    predict("scalar")
    assert not (folder / "predictions.csv").exists()
    assert torch.load(folder / "predictions.pt", weights_only=True) == SUMS


@pytest.mark.usefixtures("apart")
def test_the_command_checks_the_first_batch_before_it_computes_the_rest(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        predict("set")
    assert ended.value.code == 2
    assert f"error: {REFUSED}" in capsys.readouterr().err


def test_the_devices_of_a_batch_join_rows_and_refuse_the_rest() -> None:
    device, x = torch.device("cpu"), torch.arange(3.0)
    parts = [{"rows": (rows, None)} for rows in x.split([2, 1])]
    joined = join_rows(parts, [2, 1], device)
    assert joined["rows"][0].tolist() == [0, 1, 2]
    assert joined["rows"][1] is None
    for first, second in ((["a", "b"], ["c"]), (x[:2].sum(), x[2:].sum()), (x[:1], x[1:])):
        with pytest.raises(UserError, match="return tensors with a row of one shape"):
            join_rows([first, second], [2, 1], device)
