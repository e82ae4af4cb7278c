#!/usr/bin/env bash
# Mutation testing: seeds the faults of scripts/mutants/ one at a time and counts how many ctest detects, per area.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

command -v python3 >/dev/null || die 69 "scripts/mutate.sh needs python3"
exec python3 "$root_dir/scripts/dev/mutate.py" "$@"
