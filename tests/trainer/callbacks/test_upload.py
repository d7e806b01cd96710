"""The callback of how-to/upload-checkpoints.md, on a store of this machine."""

import re
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from my_project_trainer import ConfigurationError, Trainer, checkpoint
from tests.project import ROOT

import callback_subject as subject
from fitting import quiet, saved

pytestmark = pytest.mark.usefixtures("apart")
[CODE] = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/how-to/upload-checkpoints.md").read_text(), re.DOTALL
)
PAGE: dict[str, Any] = {}
exec(CODE, PAGE)  # noqa: S102 (it is the page's)


class Away(LocalFileSystem):  # type: ignore[misc]
    protocol = "away"

    def put_file(self, source: str, target: str, **options: Any) -> None:
        raise OSError("the store is away")


fsspec.register_implementation("away", Away, clobber=True)


def fit(*callbacks: Any, **options: Any) -> Trainer:
    shared = {"max_steps": 6, "val_every_n_steps": 2, "run_name": "run", **options}
    made = quiet(callbacks=list(callbacks), **shared)
    made.fit(subject.Net())
    return made


def test_it_is_short() -> None:
    code = CODE[CODE.index("class Upload") :]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 40


def test_a_download_is_resumed_to_the_same_end(tmp_path: Path) -> None:
    run = fit(PAGE["Upload"](f"file://{tmp_path}/store")).run_directory
    names = [f"step-0000000{step}" for step in (2, 4, 6)]
    assert sorted(path.name for path in (tmp_path / "store" / "run").iterdir()) == names
    assert not list((run / "checkpoints").glob(".*"))
    resumed = fit(resume=f"{tmp_path}/store/run/step-00000004", run_name="resumed").run_directory
    expected, weights = (saved(checkpoint.resolve(directory)) for directory in (run, resumed))
    assert expected.keys() == weights.keys()
    assert all(torch.equal(expected[name], weights[name]) for name in expected)


def test_a_store_that_fails_does_not_end_training(tmp_path, capsys):
    made = fit(PAGE["Upload"](f"away://{tmp_path}/store"))
    assert made.global_step == 6
    assert not list((made.run_directory / "checkpoints").glob(".*"))
    assert capsys.readouterr().err.splitlines() == [
        f"warning: step-0000000{step} is not uploaded: the store is away" for step in (2, 4, 6)
    ]


@pytest.mark.parametrize("name", ["", "my_project_trainer.callbacks."])
def test_the_callback_that_was_built_in_is_a_line(name: str) -> None:
    name += "UploadCheckpoints"
    line = f"callbacks[0]={name!r}"
    line += (
        ": there is no UploadCheckpoints"
        if "." in name
        else (" is no built-in callback and no class path")
    )
    with pytest.raises(ConfigurationError) as raised:
        Trainer(accelerator="cpu", callbacks=[{"class_path": name, "init_args": {"url": "x"}}])
    problem = f"{line}; upload in the job or a callback: docs/how-to/upload-checkpoints.md"
    assert raised.value.problems == [problem]
