#!/usr/bin/env bash
# Writes requirements.lock and requirements-test.lock: one resolution for Linux, Python 3.11 to 3.14, with hashes.
# The extras for 8-bit optimizer state, passes of several micro-batches and adapters are in, so that every plan the search may choose can be carried out.
# torch is left out, and with it what only torch brings: which build fits is the machine's matter (see tools/setup.sh).
# uv resolves for all those Pythons at once; pip's own resolver sees only the one that runs it.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check uv
echo 'torch ; python_version < "0"' >"$work/without-torch"

# setuptools builds the editable install, which is done without isolation so that it too is pinned.
echo 'setuptools>=77.0.3' >"$work/build.in"

compile() {
    "$work/venv/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
        --no-emit-index-url --no-emit-find-links --override "$work/without-torch" "$@"
}

head_of() { printf '# %s\n# Made by `make lock` from pyproject.toml; do not edit. Installed with --require-hashes --no-deps.\n' "$1"; }

compile pyproject.toml "$work/build.in" --extra bitsandbytes --extra greenlet --extra peft -o "$work/runtime.lock"
compile pyproject.toml "$work/build.in" --extra bitsandbytes --extra greenlet --extra peft --extra test -c "$work/runtime.lock" -o "$work/all.lock"
# The second file holds what the first does not.
.venv/bin/python - "$work/runtime.lock" "$work/all.lock" >"$work/test.lock" <<'PYTHON'
import re, sys
from pathlib import Path

def entries(path):
    return re.findall(r"^[a-z0-9].*?(?=^[a-z0-9]|\Z)", Path(path).read_text(), flags=re.M | re.S)

known = set(entries(sys.argv[1]))
sys.stdout.write("".join(entry for entry in entries(sys.argv[2]) if entry not in known))
PYTHON
{ head_of 'What the program needs, but for torch and what torch brings.'; cat "$work/runtime.lock"; } >requirements.lock
{ head_of 'What its tests and linters need beside requirements.lock.'; cat "$work/test.lock"; } >requirements-test.lock
