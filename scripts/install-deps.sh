#!/usr/bin/env bash
# Installs what the build needs on Debian 12 or later and Ubuntu 22.04 or later; only what is missing, nothing when
# all is there. `--check` lists what is missing and installs nothing (exit 1 when something is).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Tools: any version on the PATH will do. COMMAND:PACKAGE
tools=(ninja:ninja-build g++:g++ pkg-config:pkg-config ccache:ccache mpirun:openmpi-bin)
libraries=(libopenmpi-dev libyaml-cpp-dev libspdlog-dev libcli11-dev catch2 libdnnl-dev nlohmann-json3-dev
  libhwloc-dev libsentencepiece-dev libpcre2-dev)
cmake_wanted=3.25

usage() {
  echo "usage: scripts/install-deps.sh [--check]"
}

check_only=false
case ${1:-} in
  '') ;;
  --check) check_only=true ;;
  -h | --help)
    usage
    exit 0
    ;;
  *)
    usage >&2
    exit 64
    ;;
esac

at_least() { [[ $(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]; } # at_least WANTED FOUND

cmake_is_new() {
  local found
  found=$(cmake --version 2>/dev/null | awk 'NR == 1 { print $3 }') || true
  [[ -n $found ]] && at_least "$cmake_wanted" "$found"
}

# Fills the array `missing` with package names.
find_missing() {
  missing=()
  local entry installed
  cmake_is_new || missing+=(cmake)
  for entry in "${tools[@]}"; do
    command -v "${entry%%:*}" >/dev/null || missing+=("${entry#*:}")
  done
  installed=$(dpkg-query -W -f='${db:Status-Abbrev}|${Package}\n' "${libraries[@]}" 2>/dev/null || true)
  for entry in "${libraries[@]}"; do
    grep -qxE "(.i |.i)\|${entry//./\\.}" <<<"$installed" || missing+=("$entry")
  done
}

command -v dpkg-query >/dev/null ||
  die 69 "this script knows Debian and Ubuntu only; install by your own means: cmake >= $cmake_wanted," \
    "${tools[*]#*:}" "${libraries[@]}"

find_missing
if ((${#missing[@]} == 0)); then
  echo "all packages are there"
  exit 0
fi
echo "missing packages: ${missing[*]}"

as_root=()
if ((EUID != 0)); then as_root=(sudo); fi
by_hand="${as_root[*]:+${as_root[*]} }apt-get update && ${as_root[*]:+${as_root[*]} }apt-get install -y --no-install-recommends ${missing[*]}"
if $check_only; then
  echo "to install them: $by_hand"
  exit 1
fi
give_up() { die 69 "$*; missing: ${missing[*]}. To install them: $by_hand"; }

if ((EUID != 0)); then
  command -v sudo >/dev/null || give_up "packages can be installed by root only, and there is no sudo here"
  # Asks for a password only where somebody can type it.
  if ! sudo -n true 2>/dev/null && { [[ ! -t 0 ]] || ! sudo -v; }; then
    give_up "packages can be installed by root only, and sudo does not allow it"
  fi
fi

export DEBIAN_FRONTEND=noninteractive
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=2 "$@"; }
known() { apt-cache policy "$1" 2>/dev/null | awk '$1 == "Candidate:" && $2 != "(none)" { ok = 1 } END { exit !ok }'; }

# Try with the package lists that are here first: fast, and enough on most machines.
fresh=true
for package in "${missing[@]}"; do known "$package" || fresh=false; done
if ! $fresh || ! apt install -y --no-install-recommends "${missing[@]}"; then
  apt update || echo "the package lists could not be updated" >&2
  unknown=()
  for package in "${missing[@]}"; do known "$package" || unknown+=("$package"); done
  ((${#unknown[@]} == 0)) || give_up "apt knows no package named ${unknown[*]} (offline, or 'universe' is not enabled?)"
  apt install -y --no-install-recommends "${missing[@]}" || give_up "apt-get could not install them (see above)"
fi

find_missing
if [[ ${missing[*]} == cmake ]]; then
  die 69 "the distribution's cmake is older than $cmake_wanted; install a newer one: python3 -m pip install 'cmake>=$cmake_wanted'"
fi
((${#missing[@]} == 0)) || give_up "some packages are still missing after the installation"
echo "installed"
