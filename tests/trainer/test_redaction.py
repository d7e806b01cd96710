"""Secrets that stand on a command line: what is written down of it, and who may read that."""

import json
import stat
from pathlib import Path

import pytest
from my_project_trainer.cli import command as cli
from my_project_trainer.launch.reports import describe
from my_project_trainer.options import redaction
from tests.project import PACKAGE, fit, run

from processes import at_root


@pytest.mark.parametrize(
    "name",
    [
        *("--model.token", "--model.api_key", "--data.init_args.db-password", "--model.hf_token"),
        *("--model.client_secret_file", "--model.aws_credentials", "--model.APIKEY", "password"),
        *("--model.accessToken", "--model.apiKey", "bearer", "jwt", "slack_webhook_url"),
        *("Authorization", "X-Amz-Signature"),
    ],
)
def test_a_name_that_is_secret(name: str) -> None:
    assert redaction.is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("--model.max_tokens", "--model.tokenizer", "--model.key_size", "--model.monkey"),
        *("--token.layers", "--trainer.seed", "--model.author", "--model.maxTokens"),
    ],
)
def test_a_name_that_is_none(name: str) -> None:
    assert not redaction.is_secret(name)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["fit", "--model.token=S", "--x", "1"], ["fit", "--model.token=***", "--x", "1"]),
        (["--model.token", "S", "--x=1"], ["--model.token", "***", "--x=1"]),
        (["--model.token", "--x", "1"], ["--model.token", "--x", "1"]),
        (["--model.opt", '{"token": "S", "n": 1}'], ["--model.opt", "{token: '***', n: 1}"]),
        (["--model={opts: {keys: [{key: S}]}}"], ["--model={opts: {keys: [{key: '***'}]}}"]),
        (["--data.url=https://me:S@host/x:y"], ["--data.url=https://***@host/x:y"]),
        (["--data.url", "[s3://k:S@host]"], ["--data.url", "['s3://***@host']"]),
        (["--data.range={a: 1}", "12:30"], ["--data.range={a: 1}", "12:30"]),
        (["--data.url=https://S@host/x"], ["--data.url=https://***@host/x"]),
        (["https://host/a?b=1&api_key=S&c=2#d"], ["https://host/a?b=1&api_key=***&c=2#d"]),
        (["s3://b/x?X-Amz-Signature=S"], ["s3://b/x?X-Amz-Signature=***"]),
        (["--data.header", "Bearer S"], ["--data.header", "Bearer ***"]),
        (["--x=['Authorization: Basic S']"], ["--x=['Authorization: Basic ***']"]),
        (["--data={headers: {Authorization: S}}"], ["--data={headers: {Authorization: '***'}}"]),
        (["--config", "a: [", "--model.key_of={"], ["--config", "a: [", "--model.key_of={"]),
    ],
)
def test_a_command_line_without_its_secrets(words: list[str], shown: list[str]) -> None:
    assert redaction.command(words) == shown


def test_a_run_tells_no_other_user_its_secrets(tmp_path: Path) -> None:
    into = ["--trainer.default_root_dir", tmp_path, "--trainer.run_name", "run"]
    short = ["--trainer.max_steps", "1", "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    secret = ["--model", "redaction_subject.Secretive", "--model.token=my-secret"]
    done = run(fit(*into, *short, *secret), cwd=tmp_path, extra=at_root())
    assert done.returncode == 0, done.stderr
    assert "my-secret" not in done.stdout + done.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.name for path in files if b"my-secret" in path.read_bytes()} == {"config.yaml"}
    assert (
        "--model.token=***"
        in json.loads((tmp_path / "run" / "run.json").read_text())["attempts"][0]["command"]
    )
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files}
    assert modes["run.json"] == modes["config.yaml"] == 0o600
    again = ["-m", PACKAGE, "fit", "--config", tmp_path / "run" / "config.yaml"]
    more = run([*again, "--trainer.run_name", "again"], cwd=tmp_path, extra=at_root())
    assert more.returncode == 0, more.stderr
    assert "my-secret" in (tmp_path / "again" / "config.yaml").read_text()


def test_an_error_does_not_show_a_token() -> None:
    error = OSError("401 for url: https://me:S@host/a?api_key=S (Authorization: Bearer S)")
    text = describe(error, "rank 1: ")
    shown = "401 for url: https://***@host/a?api_key=*** (Authorization: Bearer ***"
    assert text.splitlines()[-1] == f"rank 1: OSError: {shown}"


def test_a_wrong_value_of_a_secret_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--model.class_path", "redaction_subject.Secretive", "--model.pin_key=letters"]
    with pytest.raises(SystemExit):
        cli.main(["fit", "--trainer.max_epochs=1", *wrong])
    assert capsys.readouterr().err == "error: model.pin_key=***: expected int\n"
