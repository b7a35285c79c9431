#!/usr/bin/env bash
# Installs Debian packages where that is possible without asking: as root, or with a sudo that wants no password.
# usage: tools/system_packages.sh PACKAGE...   Exit 1, with nothing printed, where it is not possible.
set -euo pipefail
command -v apt-get >/dev/null || exit 1
as_root=()
if [[ $(id -u) != 0 ]]; then
    command -v sudo >/dev/null && sudo -n true 2>/dev/null || exit 1
    as_root=(sudo -n)
fi
export DEBIAN_FRONTEND=noninteractive
install() { "${as_root[@]}" apt-get install -y -q --no-install-recommends "$@" >/dev/null 2>&1; }
install "$@" && exit 0
# A fresh machine has no package lists yet.
"${as_root[@]}" apt-get update -q >/dev/null 2>&1 || true
install "$@"
