#!/bin/bash
# Install the Python packages that a file lists into .venv, with uv if it is there; torch stays what it is.
set -eu
python=.venv/bin/python
torch=$(mktemp)
trap 'rm -f "$torch"' EXIT
"$python" -c 'import torch; print("torch==" + torch.__version__.partition("+")[0])' > "$torch"
if [ -x .venv/bin/uv ] && .venv/bin/uv pip install --quiet --python "$python" --compile-bytecode -c "$torch" -r "$1"; then
    echo "requirements: $1 is installed"
else
    "$python" -m pip --disable-pip-version-check install --quiet --no-input -c "$torch" -r "$1"
fi
