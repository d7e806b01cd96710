"""Each mistake in a configuration is one line, and all are reported together."""

import re
from pathlib import Path
from typing import Any

import pytest
from my_project_trainer import DataModule
from my_project_trainer.options import class_paths

from configuration_subject import CPU, DIGITS, TASKS, mistakes, write

pytestmark = pytest.mark.usefixtures("nothing_runs")


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
            "trainer.max_epochs='three': expected int >= 1 | None",
            id="text for a number",
        ),
        pytest.param(
            ["--model.dropout", "[1]"], "model.dropout=[1]: expected float", id="list for a number"
        ),
        pytest.param(
            ["--trainer.max_steps", "0"],
            "trainer.max_steps=0: expected int >= 1 | None",
            id="nothing to do",
        ),
        pytest.param(
            ["--trainer.max_epochs", "null"],
            "give max_epochs, max_steps or max_time: training would not end",
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
            ["--trainer.strategy=ddp", "--trainer.strategy_options.timeout_seconds=.nan"],
            "strategy_options.timeout_seconds=nan: expected a finite number",
            id="option of a strategy that is not finite",
        ),
        pytest.param(
            ["--trainer.strategy=fsdp", "--trainer.strategy_options.accumulate_in_parts=false"],
            "strategy_options: fsdp has no option 'accumulate_in_parts': it is called "
            "reduce_every_microbatch now",
            id="former option of a strategy",
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
            "loggers[0]='cvs' is no built-in logger and no class path; did you mean 'csv'?",
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
            "trainer.gradient_clip_val=-1: expected float > 0 | None",
            id="a negative bound",
        ),
        pytest.param(
            ["--trainer.gradient_clip_algorithm", "nrm"],
            "trainer.gradient_clip_algorithm='nrm': expected Literal['norm', 'value']",
            id="unknown clipping",
        ),
        pytest.param(
            ["--trainer.keep_checkpoints", "1"],
            "trainer.keep_checkpoints=1: expected int >= 2",
            id="too few checkpoints",
        ),
        pytest.param(
            ["--trainer.seed", "-1"],
            "trainer.seed=-1: expected int >= 0",
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
            ["--model", "configuration_subject.FailsByItself"],
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
    name = "configuration_subject.NeedsArgument"
    assert mistakes("--trainer.max_steps", "1", "--model", name) == [
        "model.width: not given, and it has no default"
    ]


def test_an_argument_that_is_passed_on_to_a_parent_class() -> None:
    name = "configuration_subject.PassesOn"
    assert mistakes("--model", name, "--model.widht=3", "--model.depth=x", "--trainer.seed=x") == [
        "model.widht: there is no such option; did you mean 'width'?",
        "model.depth='x': expected int",
        "trainer.seed='x': expected int >= 0",
    ]


def test_a_class_with_any_keywords_is_given_all() -> None:
    entry = {
        "class_path": "configuration_subject.TakesAnything",
        "init_args": {"size": "2", "a": 3},
    }
    made: Any = class_paths.create("callbacks[0]", entry, DataModule, {})
    assert (made.size, made.options) == (2, {"a": 3})


def test_no_model_at_all() -> None:
    assert mistakes("--trainer.max_epochs", "1") == [
        "model: not given; name its class in a config file or by --model CLASS"
    ]


def test_a_checkpoint_that_is_not_there() -> None:
    assert mistakes(*DIGITS, "--checkpoint", "gone", command="test") == [
        "checkpoint='gone': no such directory; give a run directory or a checkpoint"
    ]
    assert mistakes("--checkpoint", "gone", "--trainer.seed", "x", command="test") == [
        "checkpoint='gone': no such directory; give a run directory or a checkpoint",
        "trainer.seed='x': expected int >= 0",
    ]


def test_an_import_that_fails_names_the_line_that_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "has_error.py").write_text("def fail():\n    {}['x']\n\nfail()\n")
    (tmp_path / "imports_it.py").write_text("import torch\nimport has_error\n")
    (tmp_path / "lacks_one.py").write_text("import not_installed_here\n")
    names = ["--model", "imports_it.M", "--trainer.strategy", "has_error.S"]
    place = f"KeyError: 'x' ({tmp_path / 'has_error.py'}, line 4)"
    lacking = f"No module named 'not_installed_here' ({tmp_path / 'lacks_one.py'}, line 1)"
    assert mistakes(*names, "--trainer.callbacks", "[lacks_one.C, nowhere_at_all.C]") == [
        f"model.class_path='imports_it.M': {place}",
        f"strategy='has_error.S': {place}",
        f"callbacks[0]='lacks_one.C': {lacking}",
        "callbacks[1]='nowhere_at_all.C': No module named 'nowhere_at_all'",
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
        "trainer.seed=-1",
        "model.widht:",
        "model.dropout='much'",
        "data.batch_size='x'",
        "optimizer:",
    ):
        assert len([line for line in found if line.startswith(part)]) == 1, part


def test_mistakes_that_only_making_finds_are_reported_together() -> None:
    found = mistakes(
        *CPU,
        *("--trainer.limit_val_batches", "2.5", "--trainer.precision", "8"),
        *("--model", "configuration_subject.FailsByItself"),
        *("--data", f"{TASKS}.text.TextFiles", "--data.path", "/gone"),
    )
    assert len(found) == 4


def test_a_misspelt_option_does_not_hide_missing_data() -> None:
    found = mistakes(
        *(*DIGITS, *CPU, "--trainer.max_epoch", "3"),
        *("--data", f"{TASKS}.text.TextFiles", "--data.path", "/gone"),
    )
    assert len(found) == 2
