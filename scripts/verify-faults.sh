#!/usr/bin/env bash
# Proves that `nrl-train verify` detects faults: seeds those of scripts/mutants/by_meaning.txt that have a layout, one at
# a time, and runs verify on it. Options: those of scripts/mutate.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

exec "$root_dir/scripts/mutate.sh" --verify "$@"
