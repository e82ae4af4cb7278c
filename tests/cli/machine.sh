#!/usr/bin/env bash
# Machines that lack something.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

case $case_name in
  no_sysfs) # as in many containers: nothing complains on standard error, and cores are counted
    without_sysfs=()
    if [[ -d /sys/devices/system/cpu ]]; then
      without_sysfs=(unshare --map-root-user --mount bash -c 'mount -t tmpfs tmpfs /sys && exec "$@"' bash)
      "${without_sysfs[@]}" true 2>/dev/null || {
        echo "skipped: mounts are not permitted here"
        exit 77
      }
    fi
    "${without_sysfs[@]}" "$nrl_train" doctor >out.txt 2>err.txt || fail "exit code $?: $(cat err.txt)"
    [[ ! -s err.txt ]] || fail "standard error: $(cat err.txt)"
    grep -q '([1-9][0-9]* cores\? available' out.txt || fail "no cores: $(cat out.txt)"
    ;;
  *) fail "no such case: $case_name" ;;
esac
