"""Starts and stops 8 to 64 ranks on this machine, and writes docs/scale.md: what grows with ranks.

It runs in the environment of a rendered project, whose fork servers start the ranks: `make
bench-scale`.
"""

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tests import fork_server
from tests.project import free_port, start

import report
import sample_order
import scale_report
from child import HERE, TIMEOUT
from meter import require_memory
from scale_rank import Job, entries
from scale_report import Start

BYTES_OF_A_RANK, BYTES_SPARED = 110 << 20, 1 << 30
LAUNCHES = ("own launcher", "torchrun", "own launcher, 2 nodes")
STRATEGIES = ("ddp", "fsdp")
Launchers = list[subprocess.Popen[str]]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64], help="two or more")
    options = parser.parse_args()
    if len(options.ranks) < 2:
        parser.error("--ranks: growth is that between two numbers of ranks; give two or more")
    page = report.Page(options, "scale")
    ranks, seconds, held = ([2, 4], 1.0, 10**5) if options.quick else (options.ranks, 10.0, 10**7)
    require_memory(BYTES_SPARED + max(ranks) * BYTES_OF_A_RANK, "--ranks")
    order = sample_order.section(held)
    with fork_server.serving():
        for seed in range(fork_server.SEEDS):  # now they import, not in the first start
            start(["-c", ""], extra={"RANK": str(seed)}).communicate(timeout=TIMEOUT)
        groups = {
            f"{strategy}, {launch}": [measure(strategy, launch, count, seconds) for count in ranks]
            for launch in LAUNCHES
            for strategy in STRATEGIES
        }
    sections = {
        "machine": report.machine("torch", more="Over gloo."),
        "starts": scale_report.starts(groups),
        "operations": scale_report.operations(groups),
        "growth": scale_report.growths(groups),
        "order": order,
    }
    page.publish(sections)


def measure(strategy: str, launch: str, ranks: int, seconds: float) -> Start:
    """Start the ranks, let them train for some seconds, and stop them by a SIGTERM."""
    nodes = 2 if "nodes" in launch else 1
    job = Job(strategy, ranks // nodes, nodes, seconds)
    with tempfile.TemporaryDirectory(prefix="bench-") as place, ThreadPoolExecutor(nodes) as pool:
        folder = Path(place)
        began = time.monotonic()
        launchers = _launch(job, launch == "torchrun", folder)
        outputs = [pool.submit(launcher.communicate) for launcher in launchers]
        try:
            _await_ranks(ranks, folder, launchers)
            used = {
                "threads": entries(f"/proc/{launchers[0].pid}/task"),
                "descriptors": entries(f"/proc/{launchers[0].pid}/fd"),
            }
            stop_s = _stop(launchers)
        finally:
            for launcher in launchers:
                launcher.kill()
            errors = [output.result(TIMEOUT)[1] for output in outputs]
        readings = [json.loads((folder / f"rank-{n}.json").read_text()) for n in range(ranks)]
        has_saved = any(folder.glob("runs/run/checkpoints/step-*"))
    if not has_saved or any("end" not in reading for reading in readings):
        raise SystemExit(f"{job}: was stopped, but did not save; last words:\n{errors}")
    first_step_s = max(reading["first"]["at"] for reading in readings) - began
    measured = Start(ranks, first_step_s, stop_s, used, readings)
    print(job, launch, f"{first_step_s:.1f}", f"{stop_s:.1f}", file=sys.stderr, flush=True)
    return measured


def _launch(job: Job, by_torchrun: bool, folder: Path) -> Launchers:
    script: list[str | Path] = [HERE / "scale_rank.py", json.dumps(asdict(job)), folder]
    variables = {"TRAINER_SAVE_SECONDS": str(TIMEOUT)}
    if by_torchrun:
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={job.ranks}"]
        torchrun += ["--standalone", f"--shutdown-timeout={TIMEOUT}"]
        return [start([*torchrun, *script], cwd=folder, extra=variables)]
    if job.nodes > 1:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        variables["NUM_NODES"] = str(job.nodes)
    return [
        start(script, cwd=folder, extra={**variables, "NODE_RANK": str(node)})
        for node in range(job.nodes)
    ]


def _await_ranks(ranks: int, folder: Path, launchers: Launchers) -> None:
    deadline = time.monotonic() + TIMEOUT
    while len([*folder.glob("rank-*.json")]) < ranks:
        ended = [launcher for launcher in launchers if launcher.poll() is not None]
        if ended or time.monotonic() > deadline:
            words = [launcher.communicate()[1] for launcher in ended]
            raise SystemExit(f"{ranks} ranks failed, or hang, before they trained:\n{words}")
        time.sleep(0.1)


def _stop(launchers: Launchers) -> float:
    """Seconds from the signal to the end of all."""
    began = time.monotonic()
    for launcher in launchers:
        launcher.terminate()
    for launcher in launchers:
        launcher.wait(TIMEOUT)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
