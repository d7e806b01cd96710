"""Manifests for Kubernetes: what the schemas take, and their commands run as processes here."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models
from rendering import render
from slurm.jobs import PLAIN, PYTHON, SUBJECT, difference, fit_alone, read_metrics, until

Manifest = dict[str, Any]
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
ALL_KINDS = {*MODELS, "PersistentVolumeClaim", "NetworkPolicy"}
VERSION = "1.37"
# Random numbers too must continue where they were.
NOISY = (*PLAIN, "--data.shift=1", "--model=subject.Slow", "--model.dropout=0.2")
# A label of RFC 1035, as Kubernetes wants names of services; JobSet derives pods' from its own.
NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


def manifests(project: Path) -> dict[str, Manifest]:
    texts = [file.read_text("utf-8") for file in sorted((project / "kubernetes").glob("*.yaml"))]
    every = [manifest for text in texts for manifest in yaml.safe_load_all(text)]
    assert len(every) == len({manifest["kind"] for manifest in every})
    return {manifest["kind"]: manifest for manifest in every}


def job_spec(manifest: Manifest) -> Manifest:
    """Return the specification of the job of a node, in a JobSet or a TrainingRuntime."""
    jobs = manifest["spec"].get("template", manifest)["spec"]["replicatedJobs"]
    (job,) = jobs
    spec: Manifest = job["template"]["spec"]
    return spec


def pod_spec(manifest: Manifest) -> Manifest:
    spec: Manifest = job_spec(manifest)["template"]["spec"]
    return spec


def container(manifest: Manifest) -> Manifest:
    (first,) = pod_spec(manifest)["containers"]
    return dict(first)


def check(manifest: Manifest) -> None:
    """Raise an error where a schema does not take a manifest, or does not know a field in it."""
    if model := MODELS.get(manifest["kind"]):
        assert model.from_dict(manifest).to_dict() == manifest
    else:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    if manifest["kind"] in ("JobSet", "TrainingRuntime"):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}}
        kubernetes_validate.validate(job | {"spec": job_spec(manifest)}, VERSION, strict=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a render for CPUs, with a model that is as slow as a test needs."""
    answers = {"other_launchers": "kubernetes", "gpus_per_node": "0"}
    folder = render(tmp_path_factory.mktemp("kubernetes"), answers, hooks=True)
    (folder / "subject.py").write_text(SUBJECT, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("slug", "gpus"),
    [("my-project", "0"), ("3d_1", "1"), ("x" * 100, "8"), ("a_-" + "b" * 31 + "-_c", "64")],
)
def test_the_schemas_take_every_manifest(tmp_path: Path, slug: str, gpus: str) -> None:
    answers = {"project_slug": slug, "package_name": "p", "version": "1!2.0rc1+cu.5"}
    answers |= {"other_launchers": "all", "gpus_per_node": gpus}
    by_kind = manifests(render(tmp_path, answers))
    assert set(by_kind) == ALL_KINDS
    for manifest in by_kind.values():
        check(manifest)
        assert NAME.fullmatch(manifest["metadata"]["name"])
        # Of the hundredth node, with the suffix that the job's controller appends.
        assert NAME.fullmatch(by_kind["JobSet"]["metadata"]["name"] + "-node-99-0-abcde")
    image = container(by_kind["JobSet"])["image"]
    assert re.fullmatch(r"[a-z.]+/[a-z0-9]+([-_]+[a-z0-9]+)*:[\w.-]+", image)
    assert image.endswith(":1-2.0rc1-cu.5" + ("-cuda" if gpus != "0" else ""))
    limits = container(by_kind["JobSet"])["resources"]["limits"]
    assert limits.get("nvidia.com/gpu", 0) == int(gpus)


@pytest.mark.parametrize("kind", sorted(ALL_KINDS))
def test_a_field_that_does_not_exist_is_found(project: Path, kind: str) -> None:
    manifest = manifests(project)[kind]
    broken = json.loads(json.dumps(manifest).replace('"spec": {', '"spec": {"replica": 2, ', 1))
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        check(broken)


def test_nothing_is_there_unless_it_is_asked_for(tmp_path: Path) -> None:
    for answer, places in {"none": set(), "ssh": {"ssh"}, "kubernetes": {"kubernetes"}}.items():
        folder = render(tmp_path / answer, {"other_launchers": answer}, hooks=True)
        assert {name for name in ("kubernetes", "ssh") if (folder / name).exists()} == places
        pages = {path.stem for path in (folder / "docs" / "how-to").glob("*.md")}
        assert pages & {"kubernetes", "ssh"} == places


def test_a_pod_has_no_more_rights_than_it_needs(project: Path) -> None:
    """What Kubernetes' Pod Security Standard "restricted" demands, and the Dockerfile's user."""
    dockerfile = (project / "Dockerfile").read_text(encoding="utf-8")
    for kind in ("JobSet", "TrainingRuntime"):
        pod, node = pod_spec(manifests(project)[kind]), container(manifests(project)[kind])
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert f"USER {pod['securityContext']['runAsUser']}:" in dockerfile
        assert node["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not pod["automountServiceAccountToken"]
        kinds = {next(key for key in volume if key != "name") for volume in pod["volumes"]}
        assert kinds == {"persistentVolumeClaim", "emptyDir"}


def test_both_ways_to_start_have_the_same_pods(project: Path) -> None:
    by_kind = manifests(project)
    jobset, runtime = (copy.deepcopy(by_kind[kind]) for kind in ("JobSet", "TrainingRuntime"))
    assert runtime["spec"]["template"]["spec"]["failurePolicy"] == jobset["spec"]["failurePolicy"]
    assert by_kind["TrainJob"]["spec"]["trainer"]["args"] == container(jobset)["args"]
    for manifest in (jobset, runtime):
        for key in ("args", "command", "env"):
            pod_spec(manifest)["containers"][0].pop(key, None)
        for key in ("completions", "parallelism"):
            job_spec(manifest).pop(key, None)
    assert job_spec(jobset) == job_spec(runtime)


def test_the_policies_fit_each_other(project: Path) -> None:
    """What neither schema says: an API server, or JobSet's own checks, would refuse it."""
    watch = project / "src" / "my_project_trainer" / "launch" / "watch.py"
    (default,) = re.findall(r"_DEFAULT_SAVE_SECONDS = (\d+)", watch.read_text("utf-8"))
    kinds = manifests(project)
    policy = kinds["JobSet"]["spec"]["failurePolicy"]
    rule = models.JobsetV1alpha2FailurePolicyRule.model_fields["action"].description
    assert rule is not None
    for entry in policy["rules"]:
        assert f" {entry['action']}," in rule
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", entry["name"])
    for kind in ("JobSet", "TrainingRuntime"):
        job, pod = job_spec(kinds[kind]), pod_spec(kinds[kind])
        assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
        assert pod["terminationGracePeriodSeconds"] > int(default) + 10
        codes: dict[str, Any] = {}
        for entry in job["podFailurePolicy"]["rules"]:
            codes[entry["action"]] = entry.get("onExitCodes", {}).get("values", codes.get("Ignore"))
            assert len({"onExitCodes", "onPodConditions"} & set(entry)) == 1
            exits = entry.get("onExitCodes", {"containerName": "node", "values": [1]})
            assert exits["containerName"] == container(kinds[kind])["name"] == "node"
            assert exits["values"] == sorted(set(exits["values"]) - {0})
        # An error in the options; one that another try may not have; a save after SIGTERM.
        assert codes == {"FailJob": [2], "Count": [75], "Ignore": [143]}
    assert job_spec(kinds["JobSet"])["completions"] == job_spec(kinds["JobSet"])["parallelism"] == 1
    runtime = kinds["TrainingRuntime"]
    assert kinds["TrainJob"]["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (claim,) = [v for v in pod_spec(runtime)["volumes"] if "persistentVolumeClaim" in v]
    name = kinds["PersistentVolumeClaim"]["metadata"]["name"]
    assert claim["persistentVolumeClaim"]["claimName"] == name
    labels = job_spec(runtime)["template"]["metadata"]["labels"]
    assert kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels


class Pods:
    """The containers of a run on two nodes, as processes of this machine."""

    def __init__(self, project: Path, kind: str, *extra: str) -> None:
        by_kind = manifests(project)
        name = by_kind["JobSet"]["metadata"]["name"]
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = server.getsockname()[1]
        self._project, self._kind = project, kind
        node = container(by_kind["JobSet" if kind == "JobSet" else "TrainingRuntime"])
        args = [*by_kind["TrainJob"]["spec"]["trainer"]["args"], *extra]
        entry = json.loads(
            re.findall(r"^ENTRYPOINT (.*)", (project / "Dockerfile").read_text("utf-8"), re.M)[-1]
        )
        command = node.get("command", entry)
        assert command[:2] == ["tini", "--"]
        self.processes = [
            self._start([*command[2:], *args], self._variables(node["env"], name, rank), rank)
            for rank in range(2)
        ]

    def _variables(self, entries: list[Manifest], name: str, rank: int) -> dict[str, str]:
        """Return the variables of a container, as a kubelet computes them from labels."""
        labels = {"jobset-name": name, "replicatedjob-replicas": "2", "job-index": str(rank)}
        variables: dict[str, str] = {}
        for entry in entries:
            if "value" in entry:
                variables[entry["name"]] = expanded(entry["value"], variables)
            else:
                path = entry["valueFrom"]["fieldRef"]["fieldPath"]
                label = re.fullmatch(r"metadata\.labels\['jobset\.sigs\.k8s\.io/(.*)'\]", path)
                assert label is not None
                variables[entry["name"]] = labels[label[1]]
        if self._kind == "TrainJob":  # as the plugin of Kubeflow Trainer for torch does
            variables |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": str(rank)}
            address = f"{name}-node-0-0.{name}"
            variables |= {"PET_MASTER_ADDR": address, "PET_MASTER_PORT": "29400"}
        prefix = "PET_" if self._kind == "TrainJob" else ""
        assert variables[f"{prefix}MASTER_ADDR"] == f"{name}-node-0-0.{name}"
        here = {f"{prefix}MASTER_ADDR": "127.0.0.1", f"{prefix}MASTER_PORT": str(self._port)}
        return variables | here

    def _start(
        self, command: list[str], variables: dict[str, str], rank: int
    ) -> subprocess.Popen[bytes]:
        path = f"{PYTHON.parent}:/usr/bin:/bin"
        environment = {"PATH": path, "PYTHONPATH": "src", "HOME": os.environ["HOME"]}
        with (self._project / f"pod-{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [expanded(word, variables) for word in command],
                cwd=self._project,
                env=environment | {"OMP_NUM_THREADS": "1"} | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def said(self) -> str:
        return "".join((self._project / f"pod-{rank}.log").read_text("utf-8") for rank in range(2))

    def end(self) -> list[int]:
        return [process.wait(timeout=600) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(timeout=600)


def expanded(text: str, variables: dict[str, str]) -> str:
    """Replace $(NAME) as Kubernetes does: by a variable that stands before, or else not at all."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)


@pytest.fixture
def started() -> Iterator[list[Pods]]:
    pods: list[Pods] = []
    yield pods
    for pod in pods:
        pod.kill()


@pytest.fixture(scope="module")
def undisturbed(project: Path) -> Path:
    """Return the directory of a run on two nodes that nothing has stopped."""
    pods = Pods(project, "JobSet", *NOISY, "--trainer.run_name=undisturbed")
    try:
        assert pods.end() == [0, 0], pods.said()
    finally:
        pods.kill()
    return project / "runs" / "undisturbed"


@pytest.mark.trains
@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_two_nodes_save_when_one_is_drained_and_resume(
    project: Path, undisturbed: Path, started: list[Pods], kind: str
) -> None:
    name = f"run-{kind.lower()}"
    fit = (*NOISY, f"--trainer.run_name={name}")
    metrics = project / "runs" / name / "metrics.csv"

    def has_reached(step: int) -> bool:
        return any(int(row[0]) >= step for row in read_metrics(metrics.parent))

    started.append(Pods(project, kind, *fit, "--model.seconds=[0.5]"))
    until(lambda: has_reached(3), started[0].said)
    # The node of one is drained: both save, and have the exit code with which they start again.
    started[0].processes[1].send_signal(signal.SIGTERM)
    assert started[0].end() == [143, 143], started[0].said()
    (ignored,) = [
        rule["onExitCodes"]["values"]
        for rule in job_spec(manifests(project)["JobSet"])["podFailurePolicy"]["rules"]
        if rule["action"] == "Ignore" and "onExitCodes" in rule
    ]
    assert ignored == [143]
    started.append(Pods(project, kind, *fit))
    assert started[1].end() == [0, 0], started[1].said()
    assert "resumed from" in started[1].said()
    layout = json.loads((metrics.parent / "run.json").read_text("utf-8"))["attempts"][-1]["layout"]
    assert (layout["world_size"], layout["num_nodes"]) == (2, 2)
    assert metrics.read_bytes() == (undisturbed / "metrics.csv").read_bytes()


@pytest.mark.trains
def test_the_numbers_are_those_of_one_process(project: Path, started: list[Pods]) -> None:
    fit = (*PLAIN, "--model.dropout=0", "--trainer.max_epochs=1")
    started.append(Pods(project, "JobSet", *fit, "--trainer.run_name=two"))
    one = fit_alone(project, os.environ | {"OMP_NUM_THREADS": "1"}, "one", *fit)
    assert started[0].end() == [0, 0], started[0].said()
    assert difference(read_metrics(project / "runs" / "two"), one, steps=20) < 1e-5


@pytest.mark.trains
@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_a_wrong_option_is_not_tried_again(project: Path, started: list[Pods], kind: str) -> None:
    started.append(Pods(project, kind, "--trainer.max_epoch=1"))
    assert set(started[0].end()) == {2}, started[0].said()


@pytest.mark.trains
def test_a_node_that_is_killed_ends_the_other(project: Path, started: list[Pods]) -> None:
    """With an exit code of neither rule: the JobSet starts both again."""
    fit = (*PLAIN, "--model=subject.Slow", "--model.seconds=[0.5]", "--trainer.run_name=killed")
    started.append(Pods(project, "JobSet", *fit))
    first, second = started[0].processes
    metrics = project / "runs" / "killed"
    until(lambda: len(read_metrics(metrics)) > 2, started[0].said)
    before = time.monotonic()
    second.kill()
    assert first.wait(timeout=600) not in (0, 2, 143), started[0].said()
    assert time.monotonic() - before < 250
