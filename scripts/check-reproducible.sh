#!/usr/bin/env bash
# Builds a target of the committed tree twice, in two directories of different names, time zones and file modes and with
# another number of jobs, and compares the files bit for bit: with -DNRL_REPRODUCIBLE=ON and the same SOURCE_DATE_EPOCH,
# nothing of them may depend on where, when and by whom they were built.
#
#   scripts/check-reproducible.sh                                         # nrl-train: twice a whole build
#   scripts/check-reproducible.sh --target nrl_io --file core/io/libnrl_io.a
#
# --target TARGET   default nrl-train
# --file PATH       of the target in the build directory; default bin/TARGET
# --commit COMMIT   default HEAD
# --jobs N          default: one per core
# --keep            leave the directories (in $TMPDIR) for a look at a difference
#
# Exit codes: 0 the same bits, 1 a difference, 64 usage, 69 it does not build.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

target=nrl-train file='' commit=HEAD jobs=$(cores) keep=false
while (($# > 0)); do
  case $1 in
    --jobs)
      take_number "$@"
      shift
      ;;
    --target | --file | --commit)
      take_path "$@"
      shift
      ;;
    --keep) keep=true ;;
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) die 64 "unknown option $1 (--help)" ;;
  esac
  shift
done
file=${file:-bin/$target}

git -C "$root_dir" rev-parse --quiet --verify "$commit^{commit}" >/dev/null || die 64 "$commit: no such commit"
work=$(mktemp -d)
clean_up() { $keep || rm -rf "$work"; }
trap clean_up EXIT
SOURCE_DATE_EPOCH=$(git -C "$root_dir" log -1 --format=%ct "$commit")
export SOURCE_DATE_EPOCH CCACHE_DISABLE=1

# build_in DIRECTORY UMASK ZONE JOBS: prints the path of the file.
build_in() {
  local tree=$work/$1
  mkdir -p "$tree"
  git -C "$root_dir" archive "$commit" | tar -x -C "$tree"
  (
    umask "$2"
    export TZ=$3
    cd "$tree"
    cmake --preset cpu -DNRL_REPRODUCIBLE=ON && cmake --build --preset cpu -j "$4" --target "$target"
  ) >"$work/log" 2>&1 || {
    tail -n 20 "$work/log" >&2
    die 69 "$target does not build in $tree"
  }
  [[ -f $tree/build/cpu/$file ]] || die 64 "$target leaves no $file (--file)"
}
build_in one 022 UTC "$jobs"
build_in another/directory/with/a/longer/name 077 Asia/Kolkata 1

first=$work/one/build/cpu/$file second=$work/another/directory/with/a/longer/name/build/cpu/$file
if cmp "$first" "$second"; then
  printf '%s: the same %d bytes in both directories, sha256 %s\n' "$file" "$(stat -c %s "$first")" "$(sha256sum <"$first" | cut -d ' ' -f 1)"
else
  echo "$file differs between the directories$($keep && echo ": $first $second")" >&2
  exit 1
fi
