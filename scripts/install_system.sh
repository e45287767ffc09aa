#!/bin/bash
# Installs the Debian packages that building deplo needs, if one is missing. Root, or sudo without a terminal.
set -euo pipefail

packages=(build-essential cmake ninja-build ccache llvm-22-dev libpolly-22-dev libz3-dev zlib1g-dev libzstd-dev libhwloc-dev catch2 libfmt-dev
          nlohmann-json3-dev clang-format-22 clang-tidy-22 git python3-venv python3-dev)

missing=()
for package in "${packages[@]}"; do
  [[ $(dpkg-query -W -f='${Status}' "$package" 2>/dev/null) == "install ok installed" ]] || missing+=("$package")
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

if ! command -v apt-get >/dev/null; then
  echo "deplo: this system has no apt-get; install by hand what Debian calls: ${missing[*]}" >&2
  exit 1
fi
run=()
if [[ $(id -u) -ne 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "deplo: missing packages: ${missing[*]}. Run 'apt-get install ${missing[*]}' as root, then make again." >&2
    exit 1
  fi
  run=(sudo)
fi

echo "deplo: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${run[@]}" apt-get update -q >/dev/null || echo "deplo: apt-get update failed; trying with the lists that are here" >&2
if ! "${run[@]}" apt-get install -y -q --no-install-recommends "${missing[@]}" >/tmp/deplo-apt.$$.log 2>&1; then
  tail -n 20 "/tmp/deplo-apt.$$.log" >&2
  echo "deplo: apt-get could not install: ${missing[*]}. LLVM 22 is in Debian 12's security archive (bookworm-security);" \
       "check /etc/apt/sources.list and the network, then make again." >&2
  exit 1
fi
rm -f "/tmp/deplo-apt.$$.log"
