"""Times a GPT of 124 million parameters on one GPU: the trainer, a hand-written loop, Lightning.

The contestants alternate, in a fresh process each; medians are compared. It takes the Python that
it is run by: `make bench-gpu` finds one whose torch sees a GPU.
"""

import importlib.util
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import report
from child import ONE_THREAD, TIMEOUT, measure
from job import Job
from rounds import Reading, check_losses, middle, play

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
    variables = ONE_THREAD if job.device == "cpu" else {}
    chosen = {"loop", *options.only, *map(loop_of, options.only)}
    notes = []
    if not any(map(importlib.util.find_spec, ("lightning", "pytorch_lightning"))):
        chosen.discard("lightning")
        missing = f"{sys.executable} does not have it; pip install lightning"
        notes.append(f"Lightning is not compared: {missing}")
    rounds = play(
        [name for name in NAMES if name in chosen],
        lambda name: measure("contestants.py", replace(job, contestant=name), variables)[0],
        1 if options.quick else options.rounds,
        options.seconds,
        options.lines,
    )
    check_losses(rounds, "loop", ratio=0.1)
    device = device_of(options.device)
    known = (tflops for name, tflops in PEAK_TFLOPS.items() if name in device)
    peak = options.peak_tflops or next(known, None)
    if peak is None:
        notes.append("The MFU is not known: give the GPU's --peak-tflops.")
    page.publish({"bench-gpu": markdown(job, rounds, device, notes, peak)})


def markdown(
    job: Job, rounds: Rounds, device: str, notes: list[str], peak_tflops: float | None
) -> str:
    """Return the table, and whether it is what is aimed at."""
    count = len(rounds["loop"])
    head = ["", "step", "beside the loop", "tokens a second", "MFU", "peak memory"]
    is_smoke = job.warmup == QUICK.warmup
    return "\n".join(
        [
            report.machine("torch", "lightning", "pytorch-lightning", device=device),
            f"{job.batch} sequences of {job.size.context} tokens a step, bf16-mixed, fused AdamW, "
            f"clipped; medians of {count} round{'s' if count > 1 else ''} of {job.steps} steps.",
            "",
            report.table([*head, "beside the loop"], _rows(job, rounds, peak_tflops)),
            "",
            *(["A smoke run: its numbers say nothing."] if is_smoke else verdicts(rounds)),
            *notes,
            "",
        ]
    )


def _rows(job: Job, rounds: Rounds, peak_tflops: float | None) -> Iterator[list[str]]:
    for name, readings in rounds.items():
        step, peak = (middle(readings, key) for key in AIMS)
        step_more, peak_more = (more_than_loop(rounds, name, key) for key in AIMS)
        tokens = job.batch * job.size.context / step * 1e3
        used_tflops = tokens * job.size.flops_per_token / 1e12
        mfu = f"{used_tflops / peak_tflops:.1%}" if peak_tflops else ""
        cells = [f"{step:.2f} ms", f"{step_more:+.1%}", f"{tokens:,.0f}", mfu]
        yield [NAMES[name], *cells, f"{peak:.0f} MiB", f"{peak_more:+.1%}"]


def loop_of(name: str) -> str:
    """The hand-written loop beside which a contestant is shown: compiled, if it is."""
    return "loop_compiled" if name.endswith("_compiled") else "loop"


def more_than_loop(rounds: Rounds, name: str, key: str) -> float:
    """By which ratio a contestant has more than its hand-written loop."""
    return middle(rounds[name], key) / middle(rounds[loop_of(name)], key) - 1


def verdicts(rounds: Rounds) -> Iterator[str]:
    """Return a line for each aim, eager and compiled."""
    for key, (subject, aim) in AIMS.items():
        for name, shown in (("bundled", subject), ("bundled_compiled", f"{subject}, compiled")):
            if name in rounds:
                more = more_than_loop(rounds, name, key)
                word = "reached" if more <= aim else "**missed**"
                yield f"- {shown}: {more:+.1%}; the aim of at most {aim:+.0%} is {word}."


def device_of(kind: str) -> str:
    """Return the name of what is measured; a process of its own asks, which leaves no context."""
    if kind == "cpu":
        return f"{platform.machine()} CPU (a smoke run)"
    command = [sys.executable, "-c", FACTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
