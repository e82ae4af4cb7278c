#!/usr/bin/env bash
# Mutation testing: changes the sources in one place at a time and reports what the tests detect. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

command -v python3 >/dev/null || die 69 "scripts/mutate.sh needs python3"
exec python3 "$root_dir/scripts/dev/mutate.py" "$@"
