"""Times a GPT of 124 million parameters on one GPU: the trainer, a hand-written loop, Lightning.

python benchmarks/gpu.py                         three rounds, ten minutes; writes docs/gpu.md
python benchmarks/gpu.py --device cpu --quick    a smoke run with a tiny model; writes nothing

The contestants alternate, in a fresh process each; medians are compared. It takes the Python that
it is run by: `make bench-gpu` finds one whose torch sees a GPU.
"""

from __future__ import annotations

import datetime
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import report
import rounds as side_by_side
from child import ONE_THREAD
from child import measure as measured
from job import Job
from rounds import Reading, middle

TIMEOUT = 600
NAMES = {
    "loop": "hand-written loop",
    "bundled": "this trainer",
    "bundled_fsdp": "this trainer, fsdp",
    "lightning": "Lightning",
    "loop_compiled": "hand-written loop, compiled",
    "bundled_compiled": "this trainer, compiled",
}
FULL = Job("", subject="gpt2", epoch=51, fused=True, mixed=True, device="cuda")
# A smoke run: its numbers say nothing.
QUICK = replace(FULL, subject="gpt2_quick", batch=2, warmup=2, steps=4, epoch=7)
# What is aimed at: a step and its memory beside the hand-written loop's.
AIMS = {"step_ms": ("A step of the trainer", 0.02), "peak_mib": ("Its peak memory", 0.03)}
# Dense bfloat16, from NVIDIA's data sheets; of others, --peak-tflops.
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0, "L40S": 362.0}
FACTS = """
import torch
p = torch.cuda.get_device_properties(0)
print(f"{p.name} ({p.total_memory / 2**30:.0f} GiB), CUDA {torch.version.cuda}")
"""

Rounds = Mapping[str, Sequence[Reading]]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument(
        "--seconds", type=float, default=540, help="no round begins that would not fit"
    )
    parser.add_argument("--lines", type=Path, help="file to which each measurement is added")
    parser.add_argument("--batch", type=int, default=FULL.batch, help="sequences of a step")
    parser.add_argument("--peak-tflops", type=float, help="of the GPU in bfloat16, for the MFU")
    options = parser.parse_args()
    if options.rounds < 3 and not options.quick:
        parser.error("--rounds: medians of less than three say nothing")
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu: on a CPU only the smoke run is of use; add --quick")
    page = report.Page(options, "gpu")
    job = QUICK if options.quick else replace(FULL, batch=options.batch)
    job = replace(job, device=options.device)
    names, left_out = contestants()
    chosen = {"loop", *options.only, *map(_loop_of, options.only)}
    rounds = side_by_side.play(
        [each for each in names if each in chosen],
        lambda name: measure(job, name),
        1 if options.quick else options.rounds,
        options.seconds,
        options.lines,
    )
    check(rounds)
    device = device_of(options.device)
    known = (tflop for name, tflop in PEAK_TFLOPS.items() if name in device)
    peak = options.peak_tflops or next(known, None)
    if peak is None:
        left_out.append("The MFU is not known: give the GPU's --peak-tflops.")
    page.publish({"bench-gpu": markdown(job, rounds, device, left_out, peak)})


def contestants() -> tuple[list[str], list[str]]:
    """Return those that can run here, and a line for each that cannot."""
    if any(map(importlib.util.find_spec, ("lightning", "pytorch_lightning"))):
        return list(NAMES), []
    line = f"Lightning is not compared: {sys.executable} does not have it; pip install lightning"
    return [name for name in NAMES if name != "lightning"], [line]


def measure(job: Job, name: str) -> Reading:
    """Return what a contestant's process found."""
    job = replace(job, contestant=name)
    variables = ONE_THREAD if job.device == "cpu" else {}
    found: list[Reading] = measured("contestants.py", job, variables, timeout=TIMEOUT)
    return found[0]


def check(rounds: Rounds) -> None:
    """All must have come near the loop's loss, or they did not do the same work."""
    named = {NAMES[name]: results for name, results in rounds.items()}
    side_by_side.check_losses(named, NAMES["loop"], part=0.1)


def markdown(
    job: Job, rounds: Rounds, device: str, left_out: list[str], peak_tflops: float | None
) -> str:
    """Return the table, and whether it is what is aimed at."""
    now = datetime.datetime.now(datetime.UTC)
    count = len(rounds["loop"])
    versions = report.versions("torch", "lightning", "pytorch-lightning")
    facts = [f"{now:%Y-%m-%d %H:%M} UTC", device, f"Python {platform.python_version()}", *versions]
    head = ["", "step", "beside the loop", "tokens a second", "MFU", "peak memory"]
    is_smoke = job.warmup == QUICK.warmup
    return "\n".join(
        [
            f"{', '.join(facts)}.",
            f"{job.batch} sequences of {job.size.context} tokens a step, bf16-mixed, fused AdamW, "
            f"clipped; medians of {count} round{'s' if count > 1 else ''} of {job.steps} steps.",
            "",
            report.table([*head, "beside the loop"], _rows(job, rounds, peak_tflops)),
            "",
            *(["A smoke run: its numbers say nothing."] if is_smoke else verdicts(rounds)),
            *left_out,
            "",
        ]
    )


def _rows(job: Job, rounds: Rounds, peak_tflops: float | None) -> Iterator[list[str]]:
    for name, results in rounds.items():
        step, peak = (middle(results, key) for key in AIMS)
        step_of_loop, peak_of_loop = (middle(rounds[_loop_of(name)], key) for key in AIMS)
        tokens = job.batch * job.size.context / step * 1e3
        part = tokens * job.size.flops_per_token / peak_tflops / 1e12 if peak_tflops else None
        yield [
            NAMES[name],
            f"{step:.2f} ms",
            f"{step / step_of_loop - 1:+.1%}",
            f"{tokens:,.0f}",
            "" if part is None else f"{part:.1%}",
            f"{peak:.0f} MiB",
            f"{peak / peak_of_loop - 1:+.1%}",
        ]


def _loop_of(name: str) -> str:
    """The hand-written loop beside which a contestant is shown: compiled, if it is."""
    return "loop_compiled" if name.endswith("_compiled") else "loop"


def verdicts(rounds: Rounds) -> list[str]:
    """Return a line for each aim, eager and compiled."""
    lines = []
    for key, (what, aim) in AIMS.items():
        for name in [each for each in ("bundled", "bundled_compiled") if each in rounds]:
            more = middle(rounds[name], key) / middle(rounds[_loop_of(name)], key) - 1
            word = "reached" if more <= aim else "**missed**"
            shown = f"{what}{', compiled' if name != 'bundled' else ''}"
            lines.append(f"- {shown}: {more:+.1%}; the aim of at most {aim:+.0%} is {word}.")
    return lines


def device_of(kind: str) -> str:
    """Return the name of what is measured; a process of its own asks, which leaves no context."""
    if kind == "cpu":
        return f"{platform.machine()} CPU (a smoke run)"
    done = subprocess.run(
        [sys.executable, "-c", FACTS], capture_output=True, text=True, check=True, timeout=TIMEOUT
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
