"""Secrets that stand on a command line: what is written down of it, and who may read that."""

import json
import stat
import time
from pathlib import Path

import pytest
from my_project_trainer.cli import command as cli
from my_project_trainer.launch.failures import describe
from my_project_trainer.options import redacted_diff, redaction
from tests.project import PACKAGE, fit, succeed

from processes import at_root


@pytest.mark.parametrize(
    "name",
    [
        *("--model.token", "--model.api_key", "--data.init_args.db-password", "--model.hf_token"),
        *("--model.client_secret_file", "--model.aws_credentials", "--model.APIKEY", "password"),
        *("--model.accessToken", "--model.apiKey", "bearer", "jwt", "slack_webhook_url"),
        *("Authorization", "X-Amz-Signature", "HFToken", "db_pass", "token2"),
        "--model.secrets.wandb",
    ],
)
def test_a_name_that_is_secret(name: str) -> None:
    assert redaction.is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("--model.max_tokens", "--model.tokenizer", "--model.key_size", "--model.monkey"),
        *("--token.layers", "--trainer.seed", "--model.author", "--model.maxTokens"),
        *("--model.pad_token", "--model.hf_tokenizer", "pin_memory", "passes"),
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


# Of each form, one that no service has given.
FORMS = {
    "GitHub": "ghp_" + "aB3dE6gH9" * 4,
    "GitHub, of a repository": "github_pat_" + "aB3dE6gH9_" * 6,
    "GitLab": "glpat-aB3dE6gH9xYzAbCdEfGh",
    "OpenAI": "sk-proj-" + "aB3dE6gH9" * 5,
    "Anthropic": "sk-ant-api03-" + "aB3dE6gH9_" * 8,
    "Stripe": "sk_live_aB3dE6gH9aB3dE6gH9",
    "Hugging Face": "hf_" + "AbCdEfGhIj" * 3 + "KlMn",
    "AWS": "AKIA" + "IOSFODNN7EXAMPLE",
    "Slack": "xoxb-123456789012-123456789012-AbCdEfGhIjKl",
    "Google": "AIza" + "SyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q",
    "npm": "npm_" + "aB3dE6gH9" * 4,
    "PyPI": "pypi-AgEIcHlwaS5vcmc" + "aB3dE6gH9" * 8,
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9",
    "PEM": "-----BEGIN RSA PRIVATE KEY-----\nMIIEpA\nq83vEj\n-----END RSA PRIVATE KEY-----",
}
SECRET = "q7Vx9Kd2Lm4Pz8Rt"  # noqa: S105
# Where a secret is <>: in a file, and as words of a command.
FILES = r"""
a.py password = '<>' || api_key: str | None = "<>" || def f(x, token: "str" = "<>"):
a.py password = rb"<>"
a.py def f(token: Annotated[str, "doc"] = "<>"): || k = os.getenv("API_KEY", "<>")
a.py if password == "<>":
a.py k = os.environ.get("API_KEY") or "<>" || os.environ["API_KEY"] = "<>" || if (token := "<>"):
a.py os.environ.setdefault("API_KEY", "<>") || p.add_argument("--api-key", type=str, default="<>")
a.py password = (\n    "<>"\n) || password = \\n    "<>" || password = '''\n<>\n'''
a.py wandb.login(key="<>")
a.py d = {\n    "token":\n        "<>"} || h = {"X-Api-Key": "<>"} || h = {"Cookie": "session=<>"}
a.py h = {"Authorization": "Basic <>"} || user, password = "me", "<>"
a.py auth = ("me",\n        "<>")
a.py setattr(o, "token", "<>") || self.hfToken = "<>" || secret_key_2 = "<>" || apitoken = "<>"
a.py u = "postgres://me:<>/x@h/d" || c = "Server=h;Password=<>;" || c = "Name=a;AccountKey=<>=="
a.py x = f(token=token, password="<>") || u = "https://h/?a=1&api_key=<>" || u = "me:<>@host"
a.js const apiKey: string = `<>` || apiKey = cond ? 'x' : '<>'
a.cpp #define API_KEY "<>"
a.ipynb "api_key = \"<>\"", || "os.environ[\"TOKEN\"] = \"<>\"", || "os.getenv(\"TOKEN\", \"<>\")"
a.yaml api_key: <> || api_key: >-\n  <> || api_key:\n  <> || secrets:\n  wandb: <> || {api_key: <>}
a.yaml 'api_key': '<>'
a.yaml api_keys:\n- <> || - name: API_KEY\n  value: <> || api_key: &a <> || x: {token: <>, y: 1}
a.json {"apiKey": "<>"} || {"name": "TOKEN", "value": "<>"} || "token":\n  "<>"
a.toml token = "<>" || password = '''\n<>\n'''
.env.local TOKEN=<> || export PGPASSWORD=<> || T=${TOKEN:-<>}
a.sh run --token <> || run --token=<> || curl -H 'X-Api-Key: <>' u || curl -u me:<> https://h
Dockerfile ENV TOKEN=<> || ENV TOKEN <> || ARG API_KEY=<>
Makefile TOKEN := <> || TOKEN ?= <>
.netrc machine h login me password <>
.npmrc //r/:_authToken=<>
a.xml <password><></password>
notes.md The password: <> || the token=<>.
"""
WORDS = r"""
--model.HFToken=<> || --model.api_key_1=<> || --model.secrets.wandb <>
--model.credentials.user=<>
--model.hf_tokens [<>] || --model.token+ <> || --model.token+=<> || -token <> || TOKEN=<>
+model.token=<>
--o {token: <> || --o token=<> || --o [token=<>] || --o ["--token", "<>"] || --o [--token, <>]
--o run --token <>
--o {name: token, value: <>} || --o {token: [<>]} || --o {token: {value: <>}} || --o !x {token: <>}
--o {a: "{\"token\": \"<>\"}"} || --o 'token': '<>', x: [ || --o a: 1\n---\ntoken: <>
--o {d: 2024-13-45, key: <>}
--u me:<>@host || --u postgres://me:<>/x@h || --u Server=h;Password=<>
--u https://hooks.slack.com/services/T0/B0/<>
--h Basic <> || --h X-Api-Key: <> || --h ['X-Api-Key: <>'] || --h {Cookie: a=<>}
--h Authorization: token <>
--l [{class_path: W, init_args: {api_key: <>}}] || --o passwd=x,<>
--o password is x, password: <>
"""


def patch(name: str, content: str, sign: str) -> str:
    """Return a diff of a file and of a line after its content."""
    lines = "".join(f"{sign}{line}\n" for line in [*content.split("\n"), "ends = 1"])
    new = "/dev/null" if sign == "-" else f"b/{name}"
    return f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ {new}\n@@ -1 +1 @@\n{lines}"


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_recognized_by_its_form(form: str) -> None:
    secret = FORMS[form]
    for text in (f"x = load('{secret}', 1)", f"# {secret}", f'"a\\n{secret}"', f"a: {secret}, b"):
        hidden = [redaction.message(text), *redaction.command(["--x", text, f"--y={text}"])]
        hidden += [redacted_diff.redacted(patch("a.py", text, sign)) for sign in "+- "]
        for output in hidden:
            for line in secret.split("\n"):
                assert line not in output
    assert redaction.message(f"see {secret}: it is old") == "see ***: it is old"


@pytest.mark.parametrize("row", FILES.strip().split("\n"))
def test_a_diff_has_no_secrets(row: str) -> None:
    name, _, texts = row.partition(" ")
    for text in texts.split(" || "):
        content = text.replace("<>", SECRET).replace(r"\n", "\n")
        for sign in "+- ":
            shown = redacted_diff.redacted(patch(name, content, sign))
            assert SECRET not in shown, content
            assert shown.endswith(f"{sign}ends = 1\n"), content


@pytest.mark.parametrize("row", WORDS.strip().split("\n"))
def test_a_command_line_has_no_secrets(row: str) -> None:
    for text in row.split(" || "):
        words = text.replace("<>", SECRET).replace(r"\n", "\n").split(" ", 1)
        assert SECRET not in " ".join(redaction.command(words)), text


@pytest.mark.parametrize(
    "text",
    [
        *("image:1.0@sha256:abcdef", "--x=sk-learn-contrib-imbalanced", "skip-layer-norm", "12:30"),
        *("key_size: 3", "{a: 1, b: 'c: d'}", "task-force-of-2024-models", "max_tokens: 5"),
        *(
            'x = batch["token"].to("cuda")',
            "if token in vocabulary:",
            "hf_hub_download(repository)",
        ),
        *("tokens = self.tokenizer(text)", "pad_token: <pad>"),
    ],
)
def test_a_text_without_secrets_stays(text: str) -> None:
    assert redaction.command([text]) == [text]
    assert redacted_diff.redacted(patch("a.py", text, "+")) == patch("a.py", text, "+")


def test_long_lines_take_seconds() -> None:
    """Of 128 KiB, in which no expression may try each beginning with each end; by its own clock."""
    parts = ("a", "token=", "token:", "a://b:c", "eyJ", "a@b:c", "-----BEGIN PRIVATE KEY", "x-")
    began = time.process_time()
    for word in (
        *(*parts, "cookie:" + " " * 5000, "token'", "[", "bearer ", "sk-", "token" + " " * 999),
    ):
        long = word * (2**17 // len(word))
        redacted_diff.redacted(patch("a.yaml", long, "+"))
        redaction.command([f"--x={long}"])
    assert time.process_time() - began < 100  # expires; 10^10 steps take longer


def test_a_run_tells_no_other_user_its_secrets(tmp_path: Path) -> None:
    into = ["--trainer.default_root_dir", tmp_path, "--trainer.run_name", "run"]
    short = ["--trainer.max_steps", "1", "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    secret = ["--model", "launch_subject.Secretive", "--model.token=my-secret"]
    done = succeed(fit(*into, *short, *secret), cwd=tmp_path, extra=at_root())
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
    succeed([*again, "--trainer.run_name", "again"], cwd=tmp_path, extra=at_root())
    assert "my-secret" in (tmp_path / "again" / "config.yaml").read_text()


def test_an_error_does_not_show_a_token() -> None:
    error = OSError("401 for url: https://me:S@host/a?api_key=S (Authorization: Bearer S)")
    text = describe(error, "rank 1: ")
    shown = "401 for url: https://***@host/a?api_key=*** (Authorization: Bearer ***"
    assert text.splitlines()[-1] == f"rank 1: OSError: {shown}"


def test_a_wrong_value_of_a_secret_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--model.class_path", "launch_subject.Secretive", "--model.pin_key=letters"]
    with pytest.raises(SystemExit):
        cli.main(["fit", "--trainer.max_epochs=1", *wrong])
    assert capsys.readouterr().err == "error: model.pin_key=***: expected int\n"
