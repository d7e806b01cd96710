#!/usr/bin/env bash
# Make cpu.txt, dev.txt, deepspeed.txt and cuda.txt from the .in files; `make lock` calls this with
# pip-compile and uv at hand.
# usage: lock.sh FOLDER_FOR_TORCHS_WHEEL [INDEX_THAT_HAS_ITS_CPU_BUILD]
set -euo pipefail

mkdir -p "$1"
wheels=$(cd "$1" && pwd)
index=${2:-}
cd "$(dirname "$0")"

# torch comes first and alone, so that nothing else is looked up on its index.
torch=$(grep '^torch==' cpu.in)+cpu
if ! pip download -qq --no-deps --retries 1 ${index:+--extra-index-url "$index"} --dest "$wheels" "$torch" 2> "$wheels/log"; then
    if grep -q 'No matching distribution' "$wheels/log"; then
        echo "pip finds no $torch: name an index that has it by make lock TORCH_INDEX=URL (see pytorch.org, \"Get started\", CPU)" >&2
    else
        cat "$wheels/log" >&2
    fi
    exit 1
fi

for name in cpu dev; do
    pip-compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras --no-header \
        --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
        --find-links "$wheels" --output-file "$name.txt" "$name.in"
    {
        echo "# Exact versions with their hashes, for CPU, Linux on x86-64, Python 3.11."
        echo "# Made from $name.in by \`make lock\`; do not edit by hand."
        cat "$name.txt"
    } > "$name.new"
    mv "$name.new" "$name.txt"
done

# What cpu.txt has already is left out, torch above all: this adds to either variant. DeepSpeed's
# source is asked for its requirements here, and not in an environment with a torch of its own.
pip-compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras --no-header \
    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
    --find-links "$wheels" --pip-args=--no-build-isolation \
    --output-file "$wheels/deepspeed.txt" deepspeed.in
{
    echo "# Exact versions with their hashes, of what \`make deepspeed\` installs besides cpu.txt or cuda.txt."
    echo "# Made from deepspeed.in by \`make lock\`; do not edit by hand."
    awk -F== 'NR == FNR { if (/^[a-z]/) known[$1]; next } /^[a-z#]/ { skip = ($1 in known) || /^#/ } !skip' \
        cpu.txt "$wheels/deepspeed.txt"
} > deepspeed.new
mv deepspeed.new deepspeed.txt

# torch for CUDA is the build that has no "+cpu" in its version; all else is as in cpu.txt. uv reads what
# the index says of packages, where pip-compile would fetch gigabytes. Of pip's settings it knows none.
if [ -z "${UV_DEFAULT_INDEX:-}" ] && url=$(pip config get global.index-url 2> /dev/null); then
    export UV_DEFAULT_INDEX=$url
fi
sed -n '/^torch==/d; s/^\([a-z][^ ]*==[^ ]*\).*/\1/p' cpu.txt > "$wheels/but-torch.txt"
uv pip compile --quiet --no-config --generate-hashes --no-header --no-emit-index-url --no-annotate \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --constraints "$wheels/but-torch.txt" --output-file "$wheels/cuda.txt" cpu.in
{
    echo "# Exact versions with their hashes, for GPUs by CUDA, Linux on x86-64, Python 3.11."
    echo "# Made from cpu.in by \`make lock\`; do not edit by hand."
    cat "$wheels/cuda.txt"
} > cuda.new
mv cuda.new cuda.txt
