#!/usr/bin/env bash
# Chromium for the browser tests, PostgreSQL for the database tests: installed where missing and possible.
# Where it is not possible the tests that need them fail and say so; they are never skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

has_postgres() { command -v postgres >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null; }
has_chromium() { command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; }

ensure() {
    local has=$1 package=$2 tests=$3
    "$has" && return
    echo "test: installing $package for the $tests tests"
    bash tools/system_packages.sh "$package" && "$has" && return
    echo "test: $package is missing and could not be installed; the $tests tests will fail. Run: sudo apt-get install $package" >&2
}

ensure has_postgres postgresql database
ensure has_chromium chromium browser
