#!/usr/bin/env bash
# Make cpu.txt and dev.txt from cpu.in and dev.in. `make lock` calls this with pip-compile at hand.
set -euo pipefail
cd "$(dirname "$0")"

for name in cpu dev; do
    pip-compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras --no-header \
        --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
        --output-file "$name.txt" "$name.in"
    {
        echo "# Exact versions with their hashes, for CPU, Linux on x86-64, Python 3.11."
        echo "# Made from $name.in by \`make lock\`; do not edit by hand."
        cat "$name.txt"
    } > "$name.new"
    mv "$name.new" "$name.txt"
done
