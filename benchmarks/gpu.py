"""Times a GPT of 124 million parameters on one GPU: the trainer, a hand-written loop, Lightning.

python benchmarks/gpu.py                         three rounds, ten minutes; writes docs/gpu.md
python benchmarks/gpu.py --device cpu --quick    a smoke run with a tiny model; writes nothing

The contestants alternate, in a fresh process each; medians are compared. It takes the Python that
it is run by: `make bench-gpu` finds one whose torch sees a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_job import MARK, NAMES, PRECISION, QUICK, Job, lightning_name

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "gpu.md"
BEGIN, END = "<!-- bench-gpu: begin -->\n", "<!-- bench-gpu: end -->"
TIMEOUT = 600
# What is aimed at: a step and its memory beside the hand-written loop's.
AIMS = {"step_ms": ("A step of the trainer", 0.02), "peak_mib": ("Its peak memory", 0.03)}
# Dense bfloat16, from NVIDIA's data sheets; of others, --peak-tflops.
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0, "L40S": 362.0}
FACTS = """
import torch
p = torch.cuda.get_device_properties(0)
print(f"{p.name} ({p.total_memory / 2**30:.0f} GiB), CUDA {torch.version.cuda}")
"""

Rounds = dict[str, list[dict[str, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="one round of a tiny model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument(
        "--seconds", type=float, default=540, help="no round begins that would not fit"
    )
    parser.add_argument("--lines", type=Path, help="file to which each measurement is added")
    parser.add_argument("--batch", type=int, default=Job.batch, help="sequences of a step")
    parser.add_argument("--peak-tflops", type=float, help="of the GPU in bfloat16, for the MFU")
    parser.add_argument("--out", type=Path, default=PAGE, help="page with the two marks in it")
    options = parser.parse_args()
    if options.rounds < 3 and not options.quick:
        parser.error("--rounds: medians of less than three say nothing")
    chosen = {"loop", *options.only, *map(_loop_of, options.only)}
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu: on a CPU only the smoke run is of use; add --quick")
    if not options.quick:
        check_page(options.out)
    job = dataclasses.replace(QUICK if options.quick else Job(), device=options.device)
    if not options.quick:
        job = dataclasses.replace(job, batch=options.batch)
    names, left_out = contestants()
    names = [each for each in names if each in chosen]
    count = 1 if options.quick else options.rounds
    rounds = play(job, names, count, options.seconds, options.lines)
    check(rounds)
    device = device_of(options.device)
    known = (tflop for name, tflop in PEAK_TFLOPS.items() if name in device)
    peak = options.peak_tflops or next(known, None)
    if peak is None:
        left_out.append("The MFU is not known: give the GPU's --peak-tflops.")
    text = markdown(job, rounds, device, left_out, peak)
    print(text)
    if not options.quick:
        write(options.out, text)


def contestants() -> tuple[list[str], list[str]]:
    """Return those that can run here, and a line for each that cannot."""
    if lightning_name() is not None:
        return list(NAMES), []
    line = f"Lightning is not compared: {sys.executable} does not have it; pip install lightning"
    return [name for name in NAMES if name != "lightning"], [line]


def play(job: Job, names: list[str], count: int, seconds: float, lines: Path | None) -> Rounds:
    """Measure all contestants in so many rounds, or fewer where the next would end too late."""
    rounds: Rounds = {name: [] for name in names}
    began = time.monotonic()
    for number in range(count):
        if number and (time.monotonic() - began) * (number + 1) / number > seconds:
            print(f"{number} rounds: no time for another (--seconds)", file=sys.stderr, flush=True)
            break
        # Every other round runs backwards, so that a GPU that gets warm favors nobody.
        for name in names[::-1] if number % 2 else names:
            result = measure(job, name)
            rounds[name].append(result)
            if lines is not None:
                with lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"round": number + 1, "name": name, **result}) + "\n")
            line = ", ".join(f"{key} {value:.2f}" for key, value in result.items())
            print(f"{number + 1}: {NAMES[name]}: {line}", file=sys.stderr, flush=True)
    return rounds


def measure(job: Job, name: str) -> dict[str, float]:
    """Return what a contestant's process found."""
    command = [sys.executable, str(HERE / "gpu_one.py"), name, json.dumps(dataclasses.asdict(job))]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        done = subprocess.run(
            command, check=False, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT
        )
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            result: dict[str, float] = json.loads(line.removeprefix(MARK))
            return result
    words = (done.stdout + done.stderr)[-3000:]
    raise SystemExit(f"{NAMES[name]}: no result; exit code {done.returncode}; it said:\n{words}")


def check(rounds: Rounds) -> None:
    """All must have come near the loop's loss, or they did not do the same work."""
    expected = rounds["loop"][0]["loss"]
    for name, results in rounds.items():
        for result in results:
            if abs(result["loss"] - expected) > 0.1 * expected:
                raise SystemExit(
                    f"{NAMES[name]} ends at {result['loss']:.3f}, not near {expected:.3f}"
                )


def medians(rounds: Rounds, key: str) -> dict[str, float]:
    return {name: statistics.median(each[key] for each in found) for name, found in rounds.items()}


def markdown(
    job: Job, rounds: Rounds, device: str, left_out: list[str], peak_tflops: float | None
) -> str:
    """Return the table, and whether it is what is aimed at."""
    now = datetime.datetime.now(datetime.UTC)
    steps, peaks = medians(rounds, "step_ms"), medians(rounds, "peak_mib")
    count = len(rounds["loop"])
    lines = [
        f"{now:%Y-%m-%d %H:%M} UTC, {device}, Python {platform.python_version()}, {versions()}.",
        f"{job.batch} sequences of {job.context} tokens a step, {PRECISION}, fused AdamW, clipped; "
        f"medians of {count} round{'s' if count > 1 else ''} of {job.steps} steps.",
        "",
        "| | step | beside the loop | tokens a second | MFU | peak memory | beside the loop |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in rounds:
        tokens = job.batch * job.context / steps[name] * 1e3
        mfu = f"{tokens * job.flops_per_token / peak_tflops / 1e12:.1%}" if peak_tflops else ""
        loop = _loop_of(name)
        lines.append(
            f"| {NAMES[name]} | {steps[name]:.2f} ms | {steps[name] / steps[loop] - 1:+.1%} "
            f"| {tokens:,.0f} | {mfu} "
            f"| {peaks[name]:.0f} MiB | {peaks[name] / peaks[loop] - 1:+.1%} |"
        )
    told = (
        verdicts(rounds) if job.warmup > QUICK.warmup else ["A smoke run: its numbers say nothing."]
    )
    lines += ["", *told, *left_out]
    return "\n".join(lines) + "\n"


def _loop_of(name: str) -> str:
    """The hand-written loop beside which a contestant is shown: compiled, if it is."""
    return "loop_compiled" if name.endswith("_compiled") else "loop"


def verdicts(rounds: Rounds) -> list[str]:
    """Return a line for each aim, eager and compiled."""
    lines = []
    for key, (what, aim) in AIMS.items():
        found = medians(rounds, key)
        for name in [each for each in ("bundled", "bundled_compiled") if each in rounds]:
            more = found[name] / found[_loop_of(name)] - 1
            word = "reached" if more <= aim else "**missed**"
            shown = f"{what}{', compiled' if name != 'bundled' else ''}"
            lines.append(f"- {shown}: {more:+.1%}; the aim of at most {aim:+.0%} is {word}.")
    return lines


def versions() -> str:
    """Return those of torch and Lightning."""
    found = []
    for name in ("torch", "lightning", "pytorch-lightning"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def device_of(kind: str) -> str:
    """Return the name of what is measured; a process of its own asks, which leaves no context."""
    if kind == "cpu":
        return f"{platform.machine()} CPU (a smoke run)"
    done = subprocess.run(
        [sys.executable, "-c", FACTS], capture_output=True, text=True, check=True, timeout=TIMEOUT
    )
    return done.stdout.strip()


def check_page(page: Path) -> None:
    """Refuse a page without the two marks before anything is measured."""
    if page != PAGE and not page.exists():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f"{BEGIN}{END}", encoding="utf-8")
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if BEGIN not in text or END not in text.partition(BEGIN)[2]:
        raise SystemExit(f"{page} has no lines {BEGIN.strip()} and {END} to put the table between")


def write(page: Path, text: str) -> None:
    """Put the table between the marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}{text}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
