#!/usr/bin/env bash
# Argument checks and skip conditions of the scripts, without a network: run.sh CASE SOURCE_DIR.
set -euo pipefail
case_name=$1
scripts=$2/scripts
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() {
  echo "FAIL: $*" >&2
  exit 1
}

# expect CODE TEXT COMMAND...: exit code, and a text that the output has.
expect() {
  local want=$1 text=$2 got=0
  shift 2
  "$@" >out.txt 2>&1 || got=$?
  ((got == want)) || fail "exit code $got instead of $want: $*: $(cat out.txt)"
  grep -qF -- "$text" out.txt || fail "no '$text' in: $(cat out.txt)"
}

# command_of NAME TEXT: a program NAME that is found before any other.
mkdir bin
command_of() {
  printf '#!/bin/sh\n%s\n' "$2" >"bin/$1"
  chmod +x "bin/$1"
}

fresh=("$scripts/fresh-machine.sh" --cache "$work/cache")
case $case_name in
  fresh_skips) # a machine that cannot be created is skipped with the reason, and leaves no files
    expect 64 usage: "${fresh[@]}" buster
    expect 64 'an absolute path' "$scripts/fresh-machine.sh" --cache here bookworm
    if ((EUID != 0)); then
      expect 77 'skipped: fresh machine bookworm: root is required' "${fresh[@]}" bookworm
      exit 0
    fi
    export PATH=$work/bin:$PATH
    command_of mmdebstrap 'echo "E: mirror: no route" >&2; exit 1'
    command_of unshare 'exit 1'
    expect 77 'skipped: fresh machine bookworm: mounts are not permitted' "${fresh[@]}" bookworm
    command_of unshare 'exit 0'
    command_of df 'echo Avail; echo 100'
    expect 77 'has 100 MiB free' "${fresh[@]}" bookworm
    command_of df 'echo Avail; echo 100000'
    expect 77 'the base system: E: mirror: no route' "${fresh[@]}" bookworm
    [[ $(ls cache) == $'bookworm.ccache\nbookworm.debs\nbookworm.lock' ]] || fail "left: $(ls cache)"
    ;;
  fresh_signal) # a signal ends the child and removes the machine
    if ((EUID != 0)); then
      echo "skipped: needs root"
      exit 77
    fi
    export PATH=$work/bin:$PATH
    command_of unshare 'exit 0'
    command_of df 'echo Avail; echo 100000'
    command_of mmdebstrap 'echo $$ >started; exec sleep 100'
    "${fresh[@]}" bookworm >out.txt 2>&1 &
    script=$!
    for ((i = 0; i < 200; ++i)); do
      [[ ! -s started ]] || break
      sleep 0.05
    done
    [[ -s started ]] || fail "did not start: $(cat out.txt)"
    kill -TERM "$script"
    status=0
    wait "$script" || status=$?
    ((status == 143)) || fail "exit code $status: $(cat out.txt)"
    ! kill -0 "$(cat started)" 2>/dev/null || fail "still runs"
    ;;
  quickstart_arguments) # errors come before any installation
    expect 66 "no-such-file: no such file" "$scripts/quickstart.sh" no-such-file
    expect 64 "other: not KEY=VALUE" "$scripts/quickstart.sh" "$work" other
    expect 64 "other: not KEY=VALUE" "$scripts/quickstart.sh" pretrain.max_num_steps=5 other
    QUICKSTART_SECONDS=2m expect 64 "QUICKSTART_SECONDS: expected a number of seconds; found '2m'" "$scripts/quickstart.sh"
    expect 0 "KEY=VALUE: a key of" "$scripts/quickstart.sh" --help
    ;;
  *) fail "no such case: $case_name" ;;
esac
