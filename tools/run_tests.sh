#!/usr/bin/env bash
# Runs the whole suite. A test that failed beside others is run once more, alone: a busy machine is no fault of the program, and
# a fault shows again. Both results are printed, the names of such tests too. More than ten failures are taken at their word.
set -uo pipefail
cd "$(dirname "$0")/.."
most_tried_again=10
# Hundreds of processes start in the tests; without it each would compile the program anew, and each process of pytest all tests.
unset PYTHONDONTWRITEBYTECODE
log=$(mktemp)
trap 'rm -f "$log"' EXIT

.venv/bin/python -m pytest "$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
if [ "$status" -ne 1 ]; then
    exit "$status"
fi
mapfile -t failed < <(sed -n -E 's/^(FAILED|ERROR) (.+)/\2/p' "$log" | sed 's/ - .*//' | sort -u)
if [ "${#failed[@]}" -eq 0 ] || [ "${#failed[@]}" -gt "$most_tried_again" ]; then
    exit 1
fi
printf '\nfailed beside other tests, and run again alone:\n'
printf '  %s\n' "${failed[@]}"
.venv/bin/python -m pytest --last-failed --last-failed-no-failures none
status=$?
if [ "$status" -eq 0 ]; then
    printf '\npassed alone; worth a look all the same:\n'
    printf '  %s\n' "${failed[@]}"
fi
exit "$status"
