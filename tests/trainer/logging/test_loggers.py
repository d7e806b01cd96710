"""CSV and TensorBoard."""

import csv
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from my_project_trainer.logging import LoggedRun
from my_project_trainer.logging.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def started(logger: Any, directory: Path) -> Any:
    logger.start(LoggedRun(directory, directory.name, {}))
    return logger


def rows(directory: Path) -> list[list[str]]:
    with (directory / "metrics.csv").open(newline="") as file:
        return list(csv.reader(file))


def test_csv_has_a_row_a_value(tmp_path: Path) -> None:
    logger = started(CSVLogger(), tmp_path)
    logger.write(1, 0, {"loss": 0.1, "lr": 1e-05})
    text = "step,epoch,name,value\n1,0,loss,0.1\n1,0,lr,1e-05\n"
    assert (tmp_path / "metrics.csv").read_text() == text
    logger.write(2, 1, {"loss": float("nan")})
    assert rows(tmp_path)[-1] == ["2", "1", "loss", "nan"]
    logger.close()


@settings(max_examples=50)
@given(st.lists(st.floats(), min_size=1, max_size=5))
def test_csv_keeps_floats_to_their_last_digit(tmp_path_factory, values):
    directory = tmp_path_factory.mktemp("csv")
    logger = started(CSVLogger(), directory)
    logger.write(1, 0, {str(index): value for index, value in enumerate(values)})
    logger.close()
    read = [float(row[3]) for row in rows(directory)[1:]]
    for number, wanted in zip(read, values, strict=True):
        assert number == wanted or (math.isnan(number) and math.isnan(wanted))


@pytest.mark.parametrize("name", ["a,b", "top 1, top 5", 'the "best"', 'a "b", c', "a\nb", "ü"])
def test_csv_keeps_any_name(tmp_path: Path, name: str) -> None:
    logger = started(CSVLogger(), tmp_path)
    logger.write(1, 0, {name: 1.0})
    logger.close()
    assert rows(tmp_path)[1:] == [["1", "0", name, "1.0"]]


def test_csv_cuts_off_what_stands_behind_the_checkpoint(tmp_path: Path) -> None:
    killed = started(CSVLogger(), tmp_path)
    killed.write(1, 0, {"loss": 1.0})
    position = killed.position()
    killed.write(2, 0, {"loss": 2.0})
    killed.close()
    resumed = started(CSVLogger(), tmp_path)
    resumed.resume(position, 1)
    assert rows(tmp_path) == [["step", "epoch", "name", "value"], ["1", "0", "loss", "1.0"]]
    resumed.write(2, 0, {"loss": 3.0})
    assert rows(tmp_path)[2:] == [["2", "0", "loss", "3.0"]]
    assert resumed.position() == (tmp_path / "metrics.csv").stat().st_size
    resumed.close()


@pytest.mark.parametrize("rest", [30, None])
def test_csv_that_is_shorter_than_at_the_checkpoint_is_said_to_be(tmp_path, capsys, rest) -> None:
    logger, path = started(CSVLogger(), tmp_path), tmp_path / "metrics.csv"
    write_steps(logger, range(1, 6), 1.0)
    position = logger.position()
    logger.close()
    path.write_text(path.read_text()[:rest]) if rest else path.unlink()
    resumed = started(CSVLogger(), tmp_path)
    resumed.resume(position, 5)
    resumed.close()
    (line,) = capsys.readouterr().err.splitlines()
    end = f", {position} when the checkpoint was saved: rows up to step 5 may be missing"
    assert re.fullmatch(rf"note: {path} has \d+ bytes{end}", line)


def test_csv_without_a_position_keeps_the_rows_up_to_the_step(tmp_path: Path) -> None:
    logger = started(CSVLogger(), tmp_path)
    write_steps(logger, range(8, 13), 1.0)
    logger.resume(None, 10)
    assert [row[0] for row in rows(tmp_path)] == ["step", "8", "9", "10"]
    logger.write(11, 0, {"loss": 2.0})
    logger.close()
    assert [row[0] for row in rows(tmp_path)] == ["step", "8", "9", "10", "11"]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: re.sub("[^,\n]+", r'"\g<0>"', text),
        lambda text: text.replace("8,4,loss,8.0\n", ""),
        lambda text: text.replace(".", ",").removesuffix("\n"),
        lambda text: text + "11,",
    ],
)
def test_csv_that_another_program_has_saved_has_whole_rows(tmp_path: Path, change: Any) -> None:
    logger = started(CSVLogger(), tmp_path)
    write_steps(logger, range(8, 11), 1.0)
    position = logger.position()
    write_steps(logger, range(11, 14), 1.0)
    logger.close()
    path = tmp_path / "metrics.csv"
    path.write_text(changed := change(path.read_text()), newline="")
    resumed = started(CSVLogger(), tmp_path)
    resumed.resume(position, 10)
    resumed.write(11, 0, {"loss": 2.0})
    resumed.close()
    kept = path.read_text().splitlines()
    assert kept[-1] == "11,0,loss,2.0"
    assert set(kept[:-1]) <= {*changed.splitlines()}
    assert [row[0] for row in rows(tmp_path)][-2:] == ["10", "11"]


def test_csv_that_is_replaced_while_it_is_written_is_written_again(tmp_path, capsys):
    logger, path = started(CSVLogger(), tmp_path), tmp_path / "metrics.csv"
    write_steps(logger, range(1, 3), 1.0)
    (tmp_path / "saved").write_text(path.read_text())
    (tmp_path / "saved").replace(path)
    write_steps(logger, range(3, 5), 1.0)
    assert [row[0] for row in rows(tmp_path)] == ["step", "1", "2", "3", "4"]
    path.unlink()
    write_steps(logger, range(5, 7), 1.0)
    assert [row[0] for row in rows(tmp_path)] == ["step", "5", "6"]
    tmp_path.rename(tmp_path.with_name("moved"))
    with pytest.raises(FileNotFoundError):  # and no word of a new file
        logger.write(7, 0, {"loss": 1.0})
    line = f"warning: {path} was removed or replaced; later rows are in a new file"
    assert capsys.readouterr().err.splitlines() == [line] * 2


def scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def write_steps(logger: Any, steps: range, scale: float) -> None:
    for step in steps:
        logger.write(step, step // 2, {"loss": step * scale})


def test_tensorboard_hides_what_stands_behind_the_checkpoint(tmp_path: Path) -> None:
    killed = started(TensorBoardLogger(), tmp_path)
    write_steps(killed, range(1, 6), 0.5)
    killed.close()
    time.sleep(1)  # TensorBoard sorts files by their names, which begin with the second
    resumed = started(TensorBoardLogger(), tmp_path)
    resumed.resume(killed.position(), 2)
    write_steps(resumed, range(3, 5), 2.0)
    resumed.close()
    assert scalars(tmp_path, "loss") == [(1, 0.5), (2, 1.0), (3, 6.0), (4, 8.0)]


def test_tensorboard_writes_no_file_before_the_first_value(tmp_path: Path) -> None:
    started(TensorBoardLogger(), tmp_path).close()
    assert list(tmp_path.iterdir()) == []
