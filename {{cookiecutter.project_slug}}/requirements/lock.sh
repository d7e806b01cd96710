#!/usr/bin/env bash
# Make cpu.txt and dev.txt from cpu.in and dev.in; `make lock` calls this with pip-compile at hand.
# usage: lock.sh INDEX_OF_TORCH FOLDER_FOR_ITS_WHEEL
set -euo pipefail

mkdir -p "$2"
wheels=$(cd "$2" && pwd)
cd "$(dirname "$0")"

# torch comes first and alone, so that nothing else is looked up on its index.
pip download -qq --no-deps --retries 1 --extra-index-url "$1" --dest "$wheels" "$(grep '^torch==' cpu.in)"

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
