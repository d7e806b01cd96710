"""The command line and its YAML files: every mistake is found before anything starts."""

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from my_project_trainer import strategies
from my_project_trainer.cli import arguments as command_line
from my_project_trainer.cli import command as cli
from my_project_trainer.errors import foreign as legacy
from tests.project import PACKAGE

from configuration_subject import CPU, DIGITS, GPT, mistakes, read, resolved, write

pytestmark = pytest.mark.usefixtures("nothing_runs")


def test_the_configurations_that_come_along() -> None:
    digits, gpt = read(*DIGITS), read(*GPT)
    assert type(digits.model).__name__ == "ImageClassifier"
    assert type(digits.data).__name__ == "Digits"
    assert digits.data.batch_size == 64
    assert digits.weights == {"checkpoint": None, "averaged": True}
    assert type(gpt.model).__name__ == "LanguageModel"
    assert gpt.data.context == 128


def test_a_later_option_or_file_wins() -> None:
    for arguments in (
        [*DIGITS, "--trainer.max_epochs", "2", "--data.batch_size=8", "--model.width", "4"],
        ["--trainer.max_epochs=2", *DIGITS, "--data.batch_size", "8", "--model.width=4"],
    ):
        content = resolved(read(*arguments))
        epochs = 2 if arguments[0] == "--config" else 25
        assert content["trainer"]["max_epochs"] == epochs
        assert content["trainer"]["global_batch_size"] == 64
        assert content["data"]["init_args"] == {"batch_size": 8, "shift": 1, "num_workers": 0}
        assert content["model"]["init_args"]["width"] == 4


def test_a_later_file_wins_and_what_it_does_not_say_stays(tmp_path: Path) -> None:
    later = write(
        tmp_path / "later.yaml", {"trainer": {"max_epochs": 3}, "data": {"init_args": {"shift": 0}}}
    )
    content = resolved(read(*DIGITS, "--config", later))
    assert content["trainer"]["max_epochs"] == 3
    assert content["trainer"]["log_every_n_steps"] == 10
    assert content["data"]["init_args"] == {"batch_size": 64, "shift": 0, "num_workers": 0}
    assert content["model"]["init_args"]["learning_rate"] == 0.003


def test_the_whole_configuration_is_kept_and_can_be_read_again(tmp_path: Path) -> None:
    first = resolved(read(*DIGITS, "--trainer.seed", "7"))
    assert first["trainer"]["seed"] == 7
    assert first["trainer"]["gradient_clip_val"] is None
    again = resolved(read("--config", write(tmp_path / "resolved.yaml", first)))
    assert again == first


def test_the_seed_fixes_the_weights() -> None:
    one, two, other = (
        read(*DIGITS, "--trainer.seed", seed).model.network[0].weight for seed in ("5", "5", "6")
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_a_class_that_replaces_another_one_keeps_the_arguments_that_it_takes(tmp_path):
    config = {"class_path": f"{PACKAGE}.tasks.text.TextFiles", "init_args": {"path": str(tmp_path)}}
    later = write(tmp_path / "later.yaml", {"data": config})
    (tmp_path / "words.py").write_text("a" * 20000)
    options = ("--data.batch_size=8", f"--data={PACKAGE}.tasks.digits.Digits")
    arguments = resolved(read(*DIGITS, "--config", later))["data"]["init_args"]
    assert (arguments["batch_size"], arguments["path"]) == (64, str(tmp_path))
    assert "shift" not in arguments
    again = resolved(read(*DIGITS, "--config", later, *options))["data"]["init_args"]
    assert again == {"batch_size": 8, "shift": 0, "num_workers": 0}


def test_an_option_does_not_change_what_an_alias_repeats() -> None:
    shared = {"a": {"b": 1}}
    assert command_line.merged(shared, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    assert shared == {"a": {"b": 1}}


def test_values_of_the_command_line_extend_lists_and_are_expanded_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("USED", "used")
    stopping = {"class_path": "EarlyStopping", "init_args": {"monitor": "val_loss"}}
    config = write(tmp_path / "given.yaml", {"trainer": {"callbacks": ["EMA"]}})
    words = [
        f"--trainer.callbacks+={json.dumps(stopping)}",
        "--trainer.loggers+=logger_subject.Bare",
    ]
    content = resolved(read(*DIGITS, *CPU, "--config", config, *words))["trainer"]
    assert content["callbacks"] == ["EMA", stopping]
    assert content["loggers"] == ["csv", "tensorboard", "logger_subject.Bare"]
    assert resolved(read(*DIGITS, "--trainer.callbacks+=EMA"))["trainer"]["callbacks"] == ["EMA"]
    base = ["--trainer.max_epochs", "1", "--model", "configuration_subject.HasTags"]
    assert read(*CPU, *base, "--model.tags+=y").model.tags == ["x", "y"]
    assert read(*CPU, *base, "--model.tags", "[z]", "--model.tags+=y").model.tags == ["z", "y"]
    assert read(*CPU, *base, "--model.file", "~/$USED/x").model.file == Path.home() / "used/x"
    lines = mistakes(*DIGITS, "--trainer.callbacks+=EMA", *words, "--trainer.seeds=1")
    assert [line.split(":")[0] for line in lines] == ["trainer.seeds"]


def test_print_config(capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit", *DIGITS, "--trainer.max_epochs", "4", "--print_config"])
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["max_epochs"] == 4
    assert printed["trainer"]["precision"] == "32-true"
    assert list(printed) == ["trainer", "model", "data"]
    with pytest.raises(SystemExit):
        cli.main(["fit", "--help"])
    assert not [warning for warning in recwarn if "failing import" in str(warning.message)]
    (about,) = re.findall(r"\n  --print_config (.*?)\n  -", capsys.readouterr().out, re.DOTALL)
    assert "=unchecked: " in " ".join(about.split())  # none of the flags of jsonargparse


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(arguments)
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ")
    for command in ("fit", "validate", "test", "predict"):
        assert f"\n  {command} " in printed
    with mock.patch("importlib.metadata.version", {"my-project": "1.2"}.get):
        cli.main(["--version"])
    assert capsys.readouterr().out == "my-project 1.2\n"


def test_help_lists_options_and_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit", "--help"])
    assert ended.value.code == 0
    text, error = capsys.readouterr()
    assert error == ""
    for option in ("strategy", "devices", "global_batch_size", "resume", "seed"):
        assert f"--trainer.{option} " in text
    assert '"auto", "cpu", "gpu", or an engine\'s, such as "tpu".' in " ".join(text.split())
    assert "`" not in text  # as docstrings have: ``None``, :meth:`building`
    assert "modules inside building on the meta device" in " ".join(text.split())
    older = [name for name in legacy.types if re.search(rf"--trainer\.{name}\b", text)]
    assert older == []
    table = text[text.index("strategies:\n") :].splitlines()[1:]
    assert [line.split()[0] for line in table] == ["auto", *strategies.names()]
    assert all(len(line.split()) > 3 and len(line) < 130 for line in table)
    assert "  ddp2                       dp inside a node, ddp across nodes" in table


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["fti"], ["error: 'fti' is not a command; did you mean 'fit'?"]),
        (
            ["--config", "x"],
            [
                "error: '--config' is not a command; known: "
                + ", ".join(sorted([*cli.HELP, *cli._tools()]))
            ],
        ),
        (
            ["fit", *DIGITS, "--trainer.seed=-1", "--trainer.devices=0"],
            [
                "error: trainer.seed=-1: expected int >= 0",
                "error: devices=0 is not a device; a run needs at least one",
            ],
        ),
    ],
)
def test_a_mistake_ends_with_2(arguments, lines, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == lines
    assert captured.out == ""


def test_a_configuration_is_written_in_today_s_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    older = ("--trainer.devices", "2", "--trainer.accelerator", "ddp")
    older += ("--trainer.precision", "bf16", "--trainer.logger", "csv")
    content = resolved(read(*DIGITS, *older))
    with pytest.raises(SystemExit):
        cli.main(["fit", *DIGITS, *older, "--print_config"])
    output, error = capsys.readouterr()
    assert error == ""
    shown = yaml.safe_load(output)
    for name in ("run_name", "resume", "overwrite"):  # not recorded
        assert not shown["trainer"].pop(name)
    assert content == shown
    newer = {"devices": 2, "accelerator": "auto", "strategy": "ddp", "precision": "bf16-mixed"}
    assert {name: content["trainer"][name] for name in newer} == newer
    assert content["trainer"]["loggers"] == ["csv"]
    assert content["trainer"].keys().isdisjoint(legacy.types)
