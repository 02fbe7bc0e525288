#!/bin/sh
# Chromium for the test of the page: Debian's package, installed where we may. Without it that test skips and says how.
set -eu
command -v chromium >/dev/null && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
echo "set-up: Chromium from the distribution, for the test of the report (once)" >&2
{ apt-get update && apt-get install -y --no-install-recommends chromium; } >/tmp/chromium-install.$$ 2>&1 ||
    { echo "set-up: apt-get could not install chromium: $(tail -n 1 /tmp/chromium-install.$$)" >&2; }
rm -f /tmp/chromium-install.$$
