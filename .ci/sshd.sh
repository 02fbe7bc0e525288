#!/bin/sh
# sshd for the test of control over ssh: Debian's package, where we may install it. Without it that test skips.
set -eu
command -v sshd >/dev/null || [ -x /usr/sbin/sshd ] && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
echo "set-up: openssh-server from the distribution, for the test of control over ssh (once; it is not started)" >&2
# policy-rc.d keeps the package from starting a server of its own
made=
[ -e /usr/sbin/policy-rc.d ] || { printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d && made=1; }
{ apt-get update && apt-get install -y --no-install-recommends openssh-server; } >/tmp/sshd-install.$$ 2>&1 ||
    echo "set-up: apt-get could not install openssh-server: $(tail -n 1 /tmp/sshd-install.$$)" >&2
rm -f /tmp/sshd-install.$$ ${made:+/usr/sbin/policy-rc.d}
