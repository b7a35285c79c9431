#!/usr/bin/env bash
# Makes .venv: everything the program needs, and with --test what its tests and linters need too.
# Does nothing when nothing changed since the last time; each thing that can be wrong gets one clear line.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=.venv TORCH=2.13.0 MINIMUM_TORCH=2.11 MINIMUM_FREE_KIB=$((3 * 1024 * 1024))
extra=runtime
locks=(requirements.lock)
if [[ "${1:-}" == --test ]]; then
    extra=test
    locks+=(requirements-test.lock)
fi

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

is_new_enough() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; }

find_python() {
    if [[ -n "${PYTHON:-}" ]]; then
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 to 3.14; name one that is"
        printf '%s' "$PYTHON"
        return
    fi
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if is_new_enough "$name"; then
            printf '%s' "$name"
            return
        fi
    done
    fail "Python 3.11 to 3.14 is needed; found $(python3 --version 2>&1 || true). Install one, or name it: make setup PYTHON=/path/to/python3.12"
}

torch_is_there() {
    "$1" -c "
import sys
try:
    import torch
except Exception:
    sys.exit(1)
found = tuple(int(part) for part in torch.__version__.split('+')[0].split('.')[:2])
sys.exit(found < tuple(int(part) for part in '$MINIMUM_TORCH'.split('.')))" 2>/dev/null
}

make_venv() {
    local python version options=()
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        bash tools/system_packages.sh "python$version-venv" ||
            fail "Python $version lacks its venv module; run: sudo apt-get install python$version-venv"
    fi
    # A torch that the machine already has (often built for its own card) is used rather than a second one fetched.
    if torch_is_there "$python"; then
        options+=(--system-site-packages)
    fi
    say "making $VENV with Python $version"
    "$python" -m venv "${options[@]}" "$VENV" || fail "could not make $VENV with $python; is the disk full? ($(df -h . | awk 'NR==2 {print $4}') free)"
}

pip_install() {
    local log
    log=$(mktemp)
    if "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >"$log" 2>&1; then
        rm -f "$log"
        return
    fi
    tail -n 15 "$log" >&2
    if grep -q 'No space left on device' "$log"; then
        rm -f "$log"
        fail "the disk is full ($(df -h . | awk 'NR==2 {print $4}') free); about 8 GiB are needed when torch brings its CUDA libraries, 3 GiB otherwise"
    elif grep -qE 'NewConnectionError|Temporary failure in name resolution|ReadTimeout|ProxyError|Network is unreachable' "$log"; then
        rm -f "$log"
        fail "packages could not be downloaded; check this machine's network or pip's configuration, then run it again"
    fi
    rm -f "$log"
    fail "pip could not install: $* (its last lines are above)"
}

# The stamp names everything the environment follows from.
wanted=$(cat pyproject.toml tools/setup.sh "${locks[@]}" | sha256sum | cut -d' ' -f1)
if [[ -x $VENV/bin/headroom && -f $VENV/.headroom-$extra && "$(cat "$VENV/.headroom-$extra")" == "$wanted" ]]; then
    exit 0
fi

free_kib=$(df -Pk . | awk 'NR==2 {print $4}')
if [[ ! -x $VENV/bin/python ]]; then
    ((free_kib >= MINIMUM_FREE_KIB)) || fail "only $((free_kib / 1024)) MiB of disk are free here; at least 3 GiB are needed"
    make_venv
fi
is_new_enough "$VENV/bin/python" || fail "$VENV holds an old or broken Python; run 'make clean' and try again"
if ! torch_is_there "$VENV/bin/python"; then
    say "installing torch $TORCH (the largest part)"
    pip_install "torch==$TORCH"
fi
say "installing the packages of ${locks[*]}"
# --no-deps: the locks are complete but for torch and what torch brings, which differ by platform and card.
for lock in "${locks[@]}"; do
    pip_install --no-deps --require-hashes -r "$lock"
done
pip_install --no-deps --no-build-isolation -e .
printf '%s\n' "$wanted" >"$VENV/.headroom-$extra"
say "ready: $VENV/bin/headroom"
