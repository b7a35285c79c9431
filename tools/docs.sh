#!/usr/bin/env bash
# Builds the documentation as a site in build/docs/site, with a reference of the code as it is; a broken link or reference ends it.
# What renders the pages (the extra `docs`) lives in an environment of its own: it needs none of the program's packages, nor they its.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly BUILD=build/docs
python=${PYTHON:-.venv/bin/python}
mkdir -p "$BUILD"
wanted=$("$python" -c '
import tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["optional-dependencies"]["docs"]))')
if [[ ! -f $BUILD/installed || "$(cat "$BUILD/installed")" != "$wanted" ]]; then
    "$python" -m venv --clear "$BUILD/venv"
    printf '%s\n' "$wanted" >"$BUILD/wanted"
    "$BUILD/venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$BUILD/wanted"
    mv "$BUILD/wanted" "$BUILD/installed"
fi
"$python" tools/docs.py "$BUILD"
"$BUILD/venv/bin/zensical" build --clean --strict --config-file "$BUILD/zensical.toml"
echo "docs: $BUILD/site/index.html"
