"""The command line and its YAML files: every mistake is found before anything starts."""

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.project import PACKAGE, ROOT, run

from my_project import cli, configuration
from my_project.strategy_help import describe
from my_project.trainer import DataModule, TrainingModule, strategies
from my_project.trainer.arguments import legacy
from my_project.trainer.errors import ConfigurationError

TASKS = f"{PACKAGE}.tasks"
DIGITS = ["--config", str(ROOT / "configs" / "digits.yaml")]
GPT = ["--config", str(ROOT / "configs" / "gpt.yaml")]
CPU = ["--trainer.accelerator", "cpu"]


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launch around, nothing written here, and the global switches put back."""
    for name in ("TRAINER_CLUSTER", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield
    torch.use_deterministic_algorithms(False)
    assert not (tmp_path / "runs").exists()


class NeedsArgument(TrainingModule):
    def __init__(self, width: int, depth: int = 1) -> None:
        super().__init__()
        self.width, self.depth = width, depth

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("nothing is trained here")

    def configure_optimizers(self) -> Any:
        raise AssertionError("nothing is trained here")


class TakesAnything(DataModule):
    def __init__(self, size: int = 1, **options: Any) -> None:
        self.size, self.options = size, options


class FailsByItself(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        raise ConfigurationError("model: this one never works")


def read(*arguments: str | Path, command: str = "fit") -> Any:
    return configuration.read_work("program", command, list(map(str, arguments)))


def mistakes(*arguments: str | Path, command: str = "fit") -> list[str]:
    """The lines that refuse a command."""
    with pytest.raises(ConfigurationError) as raised:
        read(*arguments, command=command)
    lines: list[str] = raised.value.problems
    assert all("\n" not in line for line in lines)
    return lines


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


# --- what is read ----------------------------------------------------------------------------


def test_the_configurations_that_come_along() -> None:
    digits, gpt = read(*DIGITS), read(*GPT)
    assert type(digits.model).__name__ == "ImageClassifier"
    assert type(digits.data).__name__ == "Digits"
    assert digits.data.batch_size == 64
    assert digits.checkpoint is None
    assert type(gpt.model).__name__ == "LanguageModel"
    assert gpt.data.context == 128


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_every_command_reads_a_configuration(command: str) -> None:
    weights = [] if command == "fit" else ["--checkpoint", "none"]
    assert read(*DIGITS, *weights, command=command).data.batch_size == 64


def resolved(found: Any) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(found.trainer.configuration)
    return content


def test_options_win_over_files_wherever_they_stand() -> None:
    for arguments in (
        [*DIGITS, "--trainer.max_epochs", "2", "--data.batch_size=8", "--model.width", "4"],
        ["--trainer.max_epochs=2", *DIGITS, "--data.batch_size", "8", "--model.width=4"],
    ):
        content = resolved(read(*arguments))
        if arguments[0] == "--config":
            assert content["trainer"]["max_epochs"] == 2
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


def test_a_class_of_the_user_s_own_by_its_path() -> None:
    found = read(
        *("--model", f"{__name__}.NeedsArgument", "--model.width", "3"),
        *("--data", f"{__name__}.TakesAnything", "--data.size", "4"),
        *("--trainer.max_steps", "1"),
    )
    assert (found.model.width, found.model.depth, found.data.size) == (3, 1, 4)


def test_options_of_a_strategy() -> None:
    found = read(
        *DIGITS, *CPU, "--trainer.strategy", "ddp", "--trainer.strategy_options.bucket_cap_mb", "3"
    )
    assert resolved(found)["trainer"]["strategy_options"] == {"bucket_cap_mb": 3}


def test_a_list_of_devices() -> None:
    content = resolved(read(*DIGITS, *CPU, "--trainer.devices", "[0, 1]"))
    assert content["trainer"]["devices"] == [0, 1]


# --- one mistake -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(
            ["--trainer.max_epoch", "3"],
            "trainer.max_epoch: there is no such option; did you mean 'max_epochs' or 'max_steps'?",
            id="unknown option of the trainer",
        ),
        pytest.param(
            ["--model.widht", "3"],
            "model.widht: there is no such option; did you mean 'width'?",
            id="unknown option of the model",
        ),
        pytest.param(
            ["--data.batchsize=3"],
            "data.batchsize: there is no such option; did you mean 'batch_size'?",
            id="unknown option of the data",
        ),
        pytest.param(
            ["--trainer.max_epochs", "three"],
            "trainer.max_epochs='three': expected int | None",
            id="text for a number",
        ),
        pytest.param(
            ["--model.dropout", "[1]"], "model.dropout=[1]: expected float", id="list for a number"
        ),
        pytest.param(
            ["--trainer.max_steps", "0"],
            "max_steps=0: give a whole number of at least 1",
            id="nothing to do",
        ),
        pytest.param(
            ["--trainer.max_epochs", "null"],
            "neither max_epochs nor max_steps is given: training would not end",
            id="no end",
        ),
        pytest.param(
            ["--trainer.strategy", "dpd"],
            "strategy='dpd' is unknown; did you mean 'dp' or 'ddp'?",
            id="unknown strategy",
        ),
        pytest.param(
            ["--trainer.strategy", "ddp", "--trainer.strategy_options", "{bucket_cap: 3}"],
            "strategy_options: ddp has no option 'bucket_cap'; did you mean 'bucket_cap_mb'?",
            id="unknown option of a strategy",
        ),
        pytest.param(
            ["--trainer.strategy=single_device", "--trainer.strategy_options.bucket=3"],
            "strategy_options: single_device has no option 'bucket'; it has none",
            id="option of a strategy without any",
        ),
        pytest.param(
            ["--trainer.strategy", "single_device", "--trainer.devices", "2"],
            "strategy='single_device' uses 1 device and 2 were requested; "
            "use strategy='ddp', or devices=1",
            id="too many devices",
        ),
        pytest.param(
            ["--trainer.devices", "1,1"],
            "devices='1,1' names device 1 more than once",
            id="a device twice",
        ),
        pytest.param(
            ["--trainer.devices", "0"],
            "devices=0 is not a device; a run needs at least one",
            id="no device",
        ),
        pytest.param(
            ["--trainer.devices", "3"],
            "global_batch_size=64 is not divisible by 3 replicas times "
            "accumulate_grad_batches=1; the nearest divisible sizes are 63 and 66",
            id="a global batch that does not divide",
        ),
        pytest.param(
            ["--trainer.num_nodes", "2"],
            "num_nodes=2: nothing has started this process on several nodes; "
            "start it with srun or torchrun, or once on each node with MASTER_ADDR, MASTER_PORT "
            "and NODE_RANK",
            id="nodes that are not there",
        ),
        pytest.param(
            ["--trainer.precision", "bf16-mix"],
            "precision='bf16-mix' is unknown; did you mean 'bf16-mixed' or '16-mixed'?",
            id="unknown precision",
        ),
        pytest.param(
            ["--trainer.loggers", "[cvs]"],
            "loggers: 'cvs' is unknown; did you mean 'csv'?",
            id="unknown logger",
        ),
        pytest.param(
            ["--trainer.run_name", "../x"],
            "run_name='../x': use letters, digits, '.', '_' and '-', a letter or digit first",
            id="a name that leaves the directory",
        ),
        pytest.param(
            ["--trainer.resume", "gone"],
            "resume='gone': no such directory; give a run directory or a checkpoint",
            id="a run that is not there",
        ),
        pytest.param(
            ["--trainer.resume", "auto"],
            "resume='auto' needs run_name, the run to look for: add --trainer.run_name NAME, or "
            "set resume to a run directory",
            id="resume a run without a name",
        ),
        pytest.param(
            ["--trainer.gradient_clip_val", "-1"],
            "gradient_clip_val=-1.0: give a number above 0, or none",
            id="a negative bound",
        ),
        pytest.param(
            ["--trainer.gradient_clip_algorithm", "nrm"],
            "gradient_clip_algorithm='nrm' is unknown; did you mean 'norm'?",
            id="unknown clipping",
        ),
        pytest.param(
            ["--trainer.keep_checkpoints", "1"],
            "keep_checkpoints=1: keep at least 2, so that one is always complete",
            id="too few checkpoints",
        ),
        pytest.param(
            ["--trainer.seed", "-1"],
            "seed=-1: give a number from 0 to 2**63 - 1",
            id="a negative seed",
        ),
        pytest.param(
            ["--data", f"{TASKS}.text.TextFiles", "--data.path", "/gone"],
            "data.path='/gone': there is no such file or folder",
            id="missing data",
        ),
        pytest.param(
            ["--model", f"{TASKS}.image_classifier.Nope"],
            f"model.class_path='{TASKS}.image_classifier.Nope': module "
            f"'{TASKS}.image_classifier' has no attribute 'Nope'",
            id="a class that is not there",
        ),
        pytest.param(
            ["--model", "nowhere.Nope"],
            "model.class_path='nowhere.Nope': No module named 'nowhere'",
            id="a module that is not there",
        ),
        pytest.param(
            ["--model", f"{TASKS}.digits.Digits"],
            f"model.class_path='{TASKS}.digits.Digits' is not a TrainingModule",
            id="data for a model",
        ),
        pytest.param(
            ["--data", f"{TASKS}.image_classifier.ImageClassifier"],
            f"data.class_path='{TASKS}.image_classifier.ImageClassifier' is not a DataModule",
            id="a model for data",
        ),
        pytest.param(
            ["--data", "math.floor"],
            "data.class_path='math.floor' is not a DataModule",
            id="a function",
        ),
        pytest.param(
            ["--model", f"{__name__}.FailsByItself"],
            "model: this one never works",
            id="a class that refuses",
        ),
        pytest.param(
            ["--optimizer.lr", "3"],
            "optimizer: there is no such section; known: data, model, trainer",
            id="unknown section",
        ),
        pytest.param(
            ["--trianer.max_epochs", "3"],
            "trianer: there is no such section; did you mean 'trainer'?",
            id="misspelled section",
        ),
        pytest.param(["fast"], "'fast' is not an option; options begin with --", id="no option"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], line: str) -> None:
    assert mistakes(*DIGITS, *CPU, *arguments) == [line]


def test_an_argument_that_is_required_and_missing() -> None:
    name = f"{__name__}.NeedsArgument"
    assert mistakes("--trainer.max_steps", "1", "--model", name) == [
        "model.width: not given, and it has no default"
    ]


def test_no_model_at_all() -> None:
    assert mistakes("--trainer.max_epochs", "1") == [
        "model: not given; name its class in a config file or by --model CLASS"
    ]


def test_a_checkpoint_that_is_not_there() -> None:
    assert mistakes(*DIGITS, "--checkpoint", "gone", command="test") == [
        "checkpoint='gone': no such directory; give a run directory or a checkpoint"
    ]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        pytest.param(None, r"No such file or directory$", id="missing"),
        pytest.param("trainer: [", r"not YAML \(while parsing a flow .*\)$", id="broken"),
        pytest.param("- a\n- b", r"contains no sections; known: trainer, model, data$", id="list"),
        pytest.param("", r"contains no sections; known: trainer, model, data$", id="empty"),
        pytest.param("a: 1\na:\n\t- b", r"not YAML \(.*\)$", id="tab"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: str | None, line: str) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        write(path, content)
    (found,) = mistakes("--config", path, *CPU)
    assert re.match(re.escape(f"--config {path}: ") + line, found), found


def test_yaml_cannot_make_python_objects(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = write(tmp_path / "c.yaml", f"trainer: !!python/object/apply:os.mkdir [{canary}]")
    (line,) = mistakes("--config", path)
    assert line.startswith(f"--config {path}: not YAML (could not determine a constructor")
    assert not canary.exists()


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ({"trainer": 5}, ["trainer: give its options by name"]),
        (
            {"model": {"init_args": {"width": 3}}},
            ["model: give a class_path, and what the class takes under init_args"],
        ),
        (
            {"optimiser": {"lr": 1}},
            ["optimiser: there is no such section; known: data, model, trainer"],
        ),
        (
            {"data": {"class_path": f"{TASKS}.digits.Digits", "init_arg": {}}},
            ["data.init_arg: unknown; use class_path and init_args"],
        ),
    ],
)
def test_a_file_of_another_shape(tmp_path: Path, content: Any, lines: list[str]) -> None:
    whole = {
        "trainer": {"max_epochs": 1, "accelerator": "cpu"},
        "model": {"class_path": f"{TASKS}.image_classifier.ImageClassifier"},
    }
    assert mistakes("--config", write(tmp_path / "c.yaml", whole | content)) == lines


# --- several mistakes ------------------------------------------------------------------------


def test_mistakes_in_every_part_are_reported_together() -> None:
    found = mistakes(
        *DIGITS,
        *CPU,
        *("--trainer.max_epoch", "3"),
        *("--trainer.log_every_n_steps", "often"),
        *("--trainer.strategy", "dpd"),
        *("--trainer.devices", "1,1"),
        *("--trainer.seed", "-1"),
        *("--model.widht", "3"),
        *("--model.dropout", "much"),
        *("--data.batch_size", "x"),
        *("--optimizer.lr", "1"),
    )
    assert len(found) == 9
    for part in (
        "trainer.max_epoch:",
        "trainer.log_every_n_steps='often'",
        "strategy='dpd'",
        "devices='1,1'",
        "seed=-1",
        "model.widht:",
        "model.dropout='much'",
        "data.batch_size='x'",
        "optimizer:",
    ):
        assert len([line for line in found if line.startswith(part)]) == 1, part


def test_mistakes_that_only_making_finds_are_reported_together() -> None:
    found = mistakes(
        *CPU,
        *("--trainer.max_steps", "0", "--trainer.precision", "8"),
        *("--model", f"{__name__}.FailsByItself"),
        *("--data", f"{TASKS}.text.TextFiles", "--data.path", "/gone"),
    )
    assert len(found) == 4


def test_a_misspelt_option_does_not_hide_missing_data() -> None:
    found = mistakes(
        *(*DIGITS, *CPU, "--trainer.max_epoch", "3"),
        *("--data", f"{TASKS}.text.TextFiles", "--data.path", "/gone"),
    )
    assert len(found) == 2


# --- the command line ------------------------------------------------------------------------


def test_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit", *DIGITS, "--trainer.max_epochs", "4", "--print_config"])
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["max_epochs"] == 4
    assert printed["trainer"]["precision"] == "32-true"
    assert list(printed) == ["trainer", "model", "data"]


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(arguments)
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ")
    for command in ("fit", "validate", "test", "predict"):
        assert f"\n  {command} " in printed


def test_help_lists_every_option_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for option in ("strategy", "devices", "global_batch_size", "resume", "seed"):
        assert f"--trainer.{option} " in printed


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["fti"], ["error: 'fti' is not a command; did you mean 'fit'?"]),
        (
            ["--config", "x"],
            [
                "error: '--config' is not a command; known: find_batch_size, fit, predict, test, "
                "validate"
            ],
        ),
        (
            ["fit", *DIGITS, "--trainer.seed=-1", "--trainer.devices=0"],
            [
                "error: devices=0 is not a device; a run needs at least one",
                "error: seed=-1: give a number from 0 to 2**63 - 1",
            ],
        ),
    ],
)
def test_a_mistake_ends_with_2(
    arguments: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == lines
    assert captured.out == ""


def test_from_outside_a_mistake_is_one_line() -> None:
    done = run(["-m", PACKAGE, "fit", *DIGITS, "--trainer.strategy", "dpd"])
    assert done.returncode == 2
    assert done.stderr == "error: strategy='dpd' is unknown; did you mean 'dp' or 'ddp'?\n"
    assert done.stdout == ""


def test_from_outside_several_mistakes_are_as_many_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", {"trainer": {"max_epoch": 1}, "model": "nowhere.Nope"})
    done = run(["-m", PACKAGE, "fit", "--config", path, "--data.x", "1"])
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: ") for line in lines)


# --- help ------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints before it ends well."""
    with contextlib.suppress(SystemExit):
        cli.main(list(arguments))
    output, error = capsys.readouterr()
    assert error == ""
    return output


def test_the_help_lists_each_strategy_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "fit", "--help")
    table = text[text.index("strategies:\n") :].splitlines()[1:]
    assert [line.split()[0] for line in table] == ["auto", *strategies.names()]
    assert all(len(line.split()) > 3 and len(line) < 130 for line in table)
    assert "  ddp2                       dp inside a node, ddp across nodes" in table


def test_the_help_has_no_older_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "fit", "--help")
    assert "--trainer.devices" in text
    assert [name for name in legacy.ARGUMENTS if re.search(rf"\.{name}\b", text)] == []


def test_a_configuration_is_written_in_today_s_spelling(
    capsys: pytest.CaptureFixture[str],
) -> None:
    older = ("--trainer.num_processes", "2", "--trainer.distributed_backend", "ddp")
    older += ("--trainer.precision", "bf16", "--trainer.logger", "csv")
    content = resolved(read(*DIGITS, *older))
    assert content == yaml.safe_load(printed(capsys, "fit", *DIGITS, *older, "--print_config"))
    newer = {"devices": 2, "accelerator": "cpu", "strategy": "ddp", "precision": "bf16-mixed"}
    assert {name: content["trainer"][name] for name in newer} == newer
    assert content["trainer"]["loggers"] == ["csv"]
    assert content["trainer"].keys().isdisjoint(legacy.ARGUMENTS)


def test_the_help_of_a_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "fit", "--trainer.strategy.help", "hsdp").splitlines()
    assert lines[0] == "hsdp: fsdp inside a node, replicated across nodes"
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    assert "--trainer.strategy_options.shard_size" in shown
    text = " ".join(" ".join(lines).split())
    assert "they fail on its peers. (type: float, default: 600.0)" in text
    assert "  runs on cpu or cuda" in lines[lines.index("limits:") :]
    dp = printed(capsys, "fit", "--trainer.strategy.help=dp").splitlines()
    assert dp[2:6] == ["options:", "  none", "", "limits:"]
    assert "  at most 1 node" in dp


@pytest.mark.parametrize("name", strategies.names())
def test_the_help_of_a_strategy_has_every_option_that_it_takes(name: str) -> None:
    entry = strategies.find(name)
    options = re.findall(r"^  --trainer\.strategy_options\.(\w+) ", help_of(name), re.MULTILINE)
    assert set(options) == set(strategies.options_of(entry.cls)) - set(entry.preset)
    for reason in entry.limits.refused.values():
        assert reason in help_of(name)


def help_of(name: str) -> str:
    text: str = describe(name)
    return text


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("dpd", "error: strategy='dpd' is unknown; did you mean 'dp' or 'ddp'?\n"),
        ("", "error: --trainer.strategy.help needs a name, such as ddp; 'fit --help' lists them\n"),
    ],
)
def test_the_help_of_no_strategy_is_one_line(
    name: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit", f"--trainer.strategy.help={name}"])
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", line)
