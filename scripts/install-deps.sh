#!/usr/bin/env bash
# Installs missing build dependencies on Debian 12 or later and Ubuntu 22.04 or later. `--check` only lists them (exit 1
# if there are any).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Tools, of any version on PATH. COMMAND:PACKAGE
tools=(ninja:ninja-build g++:g++ pkg-config:pkg-config ccache:ccache mpirun:openmpi-bin)
libraries=(libopenmpi-dev libyaml-cpp-dev libspdlog-dev libcli11-dev catch2 nlohmann-json3-dev libhwloc-dev
  libsentencepiece-dev libprotobuf-dev libprotozero-dev libpcre2-dev libicu-dev zlib1g-dev libzstd-dev
  libcpp-httplib-dev libcurl4-openssl-dev libsodium-dev)
cmake_wanted=3.25
# cuDNN's C++ headers, for CUDA builds only: not packaged by distributions, but available as a Python wheel.
frontend=nvidia-cudnn-frontend==1.24.0
frontend_dir=$root_dir/build/third_party/cudnn-frontend

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

frontend_is_missing() {
  command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]] || return 1
  [[ ! -f $frontend_dir/include/cudnn_frontend.h ]] || return 1
  ! python3 -c "import importlib.metadata as m, os, sys
sys.exit(not os.path.exists(m.distribution('nvidia-cudnn-frontend').locate_file('include/cudnn_frontend.h')))" 2>/dev/null
}

# Into a separate directory: does not touch the system's Python. The wheel's Python part is not needed.
install_frontend() {
  local by_hand="python3 -m pip install --no-deps --target $frontend_dir $frontend"
  echo "missing: cuDNN's C++ headers ($frontend)"
  if $check_only; then
    echo "to install them: $by_hand"
    return 1
  fi
  python3 -m pip --version >/dev/null 2>&1 ||
    die 69 "cuDNN's C++ headers: pip is not installed. Fix: install python3-pip, then: $by_hand"
  rm -rf "$frontend_dir"
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --target "$frontend_dir" "$frontend" ||
    die 69 "cuDNN's C++ headers: pip failed (see above). Fix: $by_hand"
  rm -rf "$frontend_dir/cudnn"
  echo "installed $frontend"
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
  die 69 "this script supports Debian and Ubuntu only. Fix: install cmake >= $cmake_wanted," \
    "${tools[*]#*:}" "${libraries[@]}"

find_missing
status=0
if frontend_is_missing; then install_frontend || status=1; fi
if ((${#missing[@]} == 0)); then
  ((status == 0)) && echo "all packages are installed"
  exit "$status"
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
  command -v sudo >/dev/null || give_up "root is required to install packages, and sudo is not installed"
  # Ask for a password only on a terminal.
  if ! sudo -n true 2>/dev/null && { [[ ! -t 0 ]] || ! sudo -v; }; then
    give_up "root is required to install packages, and sudo does not permit it"
  fi
fi

export DEBIAN_FRONTEND=noninteractive
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=2 "$@"; }
known() { apt-cache policy "$1" 2>/dev/null | awk '$1 == "Candidate:" && $2 != "(none)" { ok = 1 } END { exit !ok }'; }

# Try the present package lists first: fast, and sufficient on most machines.
fresh=true
for package in "${missing[@]}"; do known "$package" || fresh=false; done
if ! $fresh || ! apt install -y --no-install-recommends "${missing[@]}"; then
  apt update || echo "the package lists could not be updated" >&2
  unknown=()
  for package in "${missing[@]}"; do known "$package" || unknown+=("$package"); done
  ((${#unknown[@]} == 0)) || give_up "apt has no package ${unknown[*]} (offline, or 'universe' is not enabled?)"
  apt install -y --no-install-recommends "${missing[@]}" || give_up "apt-get could not install them (see above)"
fi

find_missing
if [[ ${missing[*]} == cmake ]]; then
  die 69 "the distribution's cmake is older than $cmake_wanted. Fix: python3 -m pip install 'cmake>=$cmake_wanted'"
fi
((${#missing[@]} == 0)) || give_up "some packages are still missing after the installation"
echo "installed"
