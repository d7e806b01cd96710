"""One measurement in a fresh process; prints one line of JSON after all that the contestant prints.

python benchmarks/one.py raw bare mlp --steps 4000
"""

from __future__ import annotations

import argparse
import importlib
import json
import os

from meter import Job, Meter

MARK = "@result "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contestant", choices=["raw", "bundled", "lightning_", "accelerate_"])
    parser.add_argument("variant", choices=["bare", "logging", "everything", "numbers"])
    parser.add_argument("subject", choices=["mlp", "transformer"])
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--warmup", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--epoch", type=int, default=1000)
    job = Job(**vars(parser.parse_args()))

    meter = Meter(job)
    run = importlib.import_module(job.contestant).run
    import torch

    torch.set_num_threads(1)
    subject = run(job, meter)
    result = meter.result() | {"final_loss": subject.final_loss()}
    print(f"\n{MARK}{json.dumps(result)}", flush=True)
    # What a framework does at exit is not measured, and must not cost the line above.
    os._exit(0)


if __name__ == "__main__":
    main()
