#!/bin/bash
# Install the Debian packages that a file lists, one per line, if any is missing. Needs root.
set -eu
mapfile -t wanted < <(sed 's/#.*//' "$1" | tr -s '[:space:]' '\n' | sed '/^$/d')
missing=()
for name in "${wanted[@]}"; do
    dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q '^install ok installed' || missing+=("$name")
done
if [ ${#missing[@]} -eq 0 ]; then
    echo "packages: nothing is missing"
elif [ "$(id -u)" -ne 0 ]; then
    echo "packages: root is needed to install: ${missing[*]}" >&2
    exit 1
else
    echo "packages: installing ${missing[*]}"
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
fi
