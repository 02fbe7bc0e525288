#!/bin/sh
# setup.sh VENV EXTRAS [unlocked]: a virtual environment with the project in it, pinned by requirements.lock.
# What is missing on this machine is told in one line.
set -eu
venv=$1 extras=$2 lock=${3:-locked}
fail() { echo "set-up: $*" >&2; exit 1; }
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'

if [ ! -x "$venv/bin/python" ]; then
    for python in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14 python}; do
        if "$python" -c "$new_enough" 2>/dev/null; then found=$python; break; fi
    done
    [ -n "${found:-}" ] || fail "Python 3.11 or later is needed and not found; install it, or name it: make PYTHON=/path/to/python3"
    free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
    [ "$free_kb" -gt 6000000 ] || fail "6 GB of free disk are needed here, $((free_kb / 1000)) MB are free"
    echo "set-up: $venv with $("$found" --version) (a few minutes, once)" >&2
    "$found" -m venv "$venv" 2>/dev/null ||
        { rm -rf "$venv"; fail "$found can't make a virtual environment: install its venv module (Debian: apt-get install python3-venv)"; }
fi
[ "$lock" = locked ] && constraint="-c requirements.lock" || constraint=
log=$(mktemp)
# shellcheck disable=SC2086  # the constraint is two words or none
if ! "$venv/bin/python" -m pip install --disable-pip-version-check $constraint -e ".$extras" >"$log" 2>&1; then
    reason=$(grep -iE '^error|error:|no space|No matching' "$log" | tail -n 1)
    kept="$venv/pip.log"; cp "$log" "$kept"; rm -f "$log"
    fail "pip failed: ${reason:-see $kept} (whole log: $kept)"
fi
rm -f "$log"
