"""Builds libraries that make a CUDA build of torch see GPUs which are not there.

usage: python build.py FOLDER      with the Python of that torch

What torch needs of CUDA's libraries is read from its own, by ``nm``: each name that no file beside
this one defines becomes a function that returns 0. Needs gcc, binutils and nvidia-cuda-crt.
"""

import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = [HERE / name for name in ("runtime.c", "libraries.c")]
LIBRARIES = ("libtorch_cuda*.so", "libc10_cuda.so", "libtorch_python.so", "libcaffe2_nvrtc.so")
NAMES = r"(?:__cuda|cuda|cublas|cusparse|cusolver|cudnn|cufft|curand|nccl|nvml)[A-Z]\w*"
# They compute on the host.
KEPT = re.compile("cudnnGet(Version|CudartVersion|ErrorString)|cusparse.*GetErrorString")
PRELOADED, DRIVER, NVML = "libfakegpu.so", "libcuda.so.1", "libnvidia-ml.so.1"
FLAGS = ["gcc", "-w", "-O1", "-shared", "-fPIC"]


def needed(torch: Path) -> set[str]:
    """The names that torch's libraries do not define, and those that they load by name."""
    libraries = [path for pattern in LIBRARIES for path in sorted((torch / "lib").glob(pattern))]
    command = ["nm", "--dynamic", "--undefined-only", "--format=just-symbols", *map(str, libraries)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    loaded = re.findall(rb"nvml[A-Z]\w+", (torch / "lib/libc10_cuda.so").read_bytes())
    return {line.partition("@")[0] for line in text.splitlines()} | {x.decode() for x in loaded}


def build(folder: Path) -> None:
    """Build the libraries into a folder."""
    site = Path(str(distribution("torch").locate_file("")))
    names = needed(site / "torch")
    code = "".join(path.read_text() for path in SOURCES)
    wanted = {name for name in names if re.fullmatch(NAMES, name) and not KEPT.match(name)}
    rest = {name for name in wanted if not re.search(rf"\b{name}[(,]", code)}
    driver = {name for name in names if re.match("cu(?!File)[A-Z]", name)}
    folder.mkdir(parents=True, exist_ok=True)
    for file, stubs in (("rest.c", rest), ("driver.c", driver)):
        text = "".join(f"long {name}() {{ return 0; }}\n" for name in sorted(stubs))
        (folder / file).write_text(text)
    headers = f"-I{next((site / 'nvidia').glob('cu[0-9]*/include'))}"
    made = {PRELOADED: [*SOURCES, folder / "rest.c"], DRIVER: [folder / "driver.c"]}
    for library, sources in made.items():
        words = [*FLAGS, headers, *map(str, sources), "-o", str(folder / library)]
        subprocess.run(words, check=True)
    (folder / NVML).unlink(missing_ok=True)
    (folder / NVML).symlink_to(PRELOADED)
    print(f"{len(wanted) - len(rest)} functions of {len(wanted)} do something: {folder}")


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
