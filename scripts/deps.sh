#!/usr/bin/env bash
# Installs what the build needs on Debian 12 or Ubuntu 24.04. Needs root or sudo; says what it does. Installs nothing that is there.
set -euo pipefail

packages=(
  g++ cmake ninja-build git pkg-config ca-certificates
  libeigen3-dev nlohmann-json3-dev libcli11-dev libfmt-dev
  libjpeg-dev libstb-dev libgloo-dev
  catch2 libbenchmark-dev python3
)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
if [ "${#missing[@]}" -eq 0 ]; then
  echo "deps: all ${#packages[@]} packages are installed"
  exit 0
fi

run=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "deps: needs root or sudo to install: ${missing[*]}" >&2; exit 1; }
  run=(sudo)
fi
echo "deps: installing ${missing[*]}"
"${run[@]}" apt-get update -q
"${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
echo "deps: installed ${#missing[@]} packages"
