#!/usr/bin/env bash
# Runs the README's commands on a bare machine: a minimal Debian in a directory, where an ordinary user with sudo has
# the committed HEAD of this project. Detects missing dependencies and incompatible library versions.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/fresh-machine.sh [--keep] [--cache DIR] [--tests] SUITE [COMMAND]
  SUITE        bookworm (Debian 12: gcc 12, Open MPI 4, Catch2 2) or
               trixie (Debian 13: gcc 14, Open MPI 5, Catch2 3)
  COMMAND      run by the user's shell in the project after scripts/install-deps.sh; default: a short quickstart
  --tests      the default command after scripts/test.sh
  --keep       keep the machine; the next start with --keep reuses it
  --cache DIR  base systems, packages and ccache of earlier starts; default: /var/tmp/nrl-fresh-machine
Needs root (for mounts and chroot), mmdebstrap, and a Debian mirror. Exits with 77 and the reason if a machine cannot be
created; otherwise with the exit code of the failed command.
TEXT
}

command='QUICKSTART_SECONDS=20 ./scripts/quickstart.sh'
keep=false
cache=/var/tmp/nrl-fresh-machine
while (($#)); do
  case $1 in
    --keep) keep=true ;;
    --tests) command="./scripts/test.sh && $command" ;;
    --cache)
      cache=${2:-}
      [[ $cache == /* ]] || die 64 "--cache takes an absolute path; found '$cache'"
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) break ;;
  esac
  shift
done
suite=${1:-}
if [[ $suite != bookworm && $suite != trixie ]]; then
  usage >&2
  exit 64
fi
command=${2:-$command}
(($# <= 2)) || die 64 "one COMMAND, quoted; found $# words"

# skip REASON...: no machine can be created here; not a failure of the project.
skip() {
  echo "skipped: fresh machine $suite: $*"
  exit 77
}
((EUID == 0)) || skip "root is required (mount, chroot)"
command -v mmdebstrap >/dev/null || skip "mmdebstrap is not installed (apt-get install mmdebstrap)"
unshare --mount --pid --fork true 2>/dev/null || skip "mounts are not permitted here"
mkdir -p "$cache"
[[ -O $cache ]] || die 73 "$cache belongs to another user; choose another directory with --cache"
free=$(df --output=avail -B 1048576 "$cache" | tail -n 1)
((free > 6000)) || skip "$cache has $((free)) MiB free; 6000 are needed"

exec 9>"$cache/$suite.lock"
flock 9
root=
log=$(mktemp)
child=
cleanup() {
  if [[ -n $child ]]; then
    kill -KILL "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
  fi
  rm -f "$log"
  if [[ -n $root ]]; then
    if $keep; then echo "kept: $root"; else rm -rf --one-file-system "$root"; fi
  fi
}
trap cleanup EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# In the background, so that signals are handled immediately.
attend() {
  local status=0
  "$@" &
  child=$!
  wait "$child" || status=$?
  child=
  return "$status"
}

# Runs on the machine as USER in separate namespaces: mounts and processes end with the namespaces, however this script
# ends. Without /sys, as in many containers.
inside() {
  local root=$1 cache=$2 suite=$3 user=$4 command=$5
  mount -t proc proc "$root/proc" && mount --bind /dev "$root/dev" &&
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts" && mount -t tmpfs tmpfs "$root/dev/shm" &&
    mount --bind "$cache/$suite.debs" "$root/var/cache/apt/archives" || return 1
  if [[ -d $root/home/user ]]; then mount --bind "$cache/$suite.ccache" "$root/home/user/.cache/ccache" || return 1; fi
  chroot "$root" su - "$user" -c "$command"
}
export -f inside
# on_machine USER COMMAND
on_machine() {
  # shellcheck disable=SC2016  # expanded by the inner shell
  attend unshare --mount --propagation private --pid --fork --kill-child=KILL \
    bash -c 'inside "$@"' inside "$root" "$cache" "$suite" "$@" 9>&-
}

base=$cache/$suite.tar
mkdir -p "$cache/$suite.debs/partial" "$cache/$suite.ccache"
if [[ ! -f $base ]]; then
  say "$suite: base system"
  rm -f "$base.part"
  attend mmdebstrap --quiet --format=tar --variant=minbase --include=sudo,ca-certificates "$suite" "$base.part" \
    >"$log" 2>&1 || skip "mmdebstrap could not make the base system: $(grep -v '^ *$' "$log" | tail -n 1)"
  mv "$base.part" "$base"
fi

kept=$cache/$suite.kept
if $keep && [[ -d $kept ]]; then
  root=$kept
else
  root=$(mktemp -d "$cache/$suite.XXXXXX")
  chmod 755 "$root"
  attend tar -C "$root" --exclude='./dev/*' -xf "$base"
  mkdir -p "$root/dev/pts" "$root/dev/shm"
  # Access to the mirror: names, certificates, proxies.
  cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
  cp -r /usr/local/share/ca-certificates/. "$root/usr/local/share/ca-certificates/" 2>/dev/null || true
  {
    apt-config dump | grep -E '^Acquire::(http|https|Check-)' || true
    for protocol in http https; do
      proxy=${protocol}_proxy
      if [[ -n ${!proxy:-} ]]; then echo "Acquire::$protocol::Proxy \"${!proxy}\";"; fi
    done
  } >"$root/etc/apt/apt.conf.d/99mirror"
  on_machine root "update-ca-certificates && useradd -m -s /bin/bash user &&
    echo 'user ALL=(ALL) NOPASSWD:ALL' >/etc/sudoers.d/user && install -d -o user -g user ~user/project ~user/.cache ~user/.cache/ccache" \
    >"$log" 2>&1 || skip "the machine does not start: $(tail -n 1 "$log")"
  if $keep; then
    mv "$root" "$kept"
    root=$kept
  fi
fi

# -m: extraction time, not commit time; changed sources must be newer than the objects of a kept machine.
project=$root/home/user/project
find "$project" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
git -c safe.directory="$root_dir" -C "$root_dir" archive HEAD | tar -C "$project" -xm
chown -R --reference="$root/home/user" "$project" "$cache/$suite.ccache"

say "$suite: ./scripts/install-deps.sh"
status=0
on_machine user 'cd project && ./scripts/install-deps.sh' >"$log" 2>&1 || status=$?
if ((status != 0)); then
  cat "$log"
  problem=$(grep -m 1 -E 'Failed to fetch|Could not (resolve|connect)|Temporary failure|Connection (failed|timed out)|Hash Sum mismatch' "$log") &&
    skip "packages could not be downloaded: $problem"
  die "$status" "$suite: scripts/install-deps.sh failed (see above)"
fi
echo "done, $SECONDS s after the start"

say "$suite: $command"
on_machine user "cd project && $command" || die $? "$suite: '$command' failed"
echo "$suite: passed, $SECONDS s after the start"
