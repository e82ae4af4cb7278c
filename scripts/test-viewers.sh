#!/usr/bin/env bash
# Runs the tests that read our files with the programs of users: installs the Python ones into build/viewers (1 GB), names
# the others that are missing, and leaves screenshots. CI skips these tests where the programs are missing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT2'
usage: scripts/test-viewers.sh [--screenshots DIRECTORY]
  --screenshots DIRECTORY  of the pages in Chromium (build/viewers/screenshots)
NRL_VIEWERS_PYTHON names a Python that has the packages already.
TEXT2
}

screenshots=$root_dir/build/viewers/screenshots
while (($#)); do
  take_option "" "screenshots" "$@"
  shift "$taken"
done
packages=(tensorboard wandb mlflow-skinny perfetto html5lib traceinsight 'pandas<3' pyyaml torch-tb-profiler 'setuptools<81')
if [[ -z ${NRL_VIEWERS_PYTHON:-} ]]; then
  environment=$root_dir/build/viewers/python
  [[ -x $environment/bin/python ]] || python3 -m venv "$environment"
  say "Python packages: ${packages[*]}"
  "$environment/bin/python" -m pip install --quiet "${packages[@]}" || die 69 "pip cannot install the packages"
  export NRL_VIEWERS_PYTHON=$environment/bin/python
fi
# missing PROGRAM ADVICE
missing() { command -v "$1" >/dev/null || echo "not run, $1 is missing: $2" >&2; }
missing chromium 'apt-get install chromium'
missing promtool 'apt-get install prometheus'
missing trace_processor_shell 'a release of Perfetto, not packaged; its message definitions read the traces'
mkdir -p "$screenshots"
export NRL_SCREENSHOTS
NRL_SCREENSHOTS=$(realpath "$screenshots")
build cpu nrl-train profile_samples
cd "$root_dir/build/cpu"
ctest --output-on-failure --no-tests=error -L viewers
# promtool checks the metrics of this one.
ctest --output-on-failure --no-tests=error -R '^cli.live_scrape$'
echo "screenshots: $NRL_SCREENSHOTS"
