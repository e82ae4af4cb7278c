#!/usr/bin/env bash
# run.sh READER PROFILE_SAMPLES: writes the outputs of a synthetic profile and reads them with READER. Python packages
# are looked for in the environment of $NRL_VIEWERS_PYTHON (default: python3). Exits with 77 where the reader is missing.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
reader=$1
samples=$2
python=${NRL_VIEWERS_PYTHON:-python3}

skip() {
  echo "skipped: $1"
  exit 77
}
# need MODULE PACKAGES: skips without the Python module.
need() {
  "$python" -c "import $1" 2>/dev/null || skip "$python cannot import $1. Fix: pip install $2, or set NRL_VIEWERS_PYTHON"
}

work=$(mktemp -d)
# shellcheck disable=SC2064  # the value of now
trap "rm -rf '$work'" EXIT

case $reader in
  perfetto)
    need perfetto.protos.perfetto.trace.perfetto_trace_pb2 perfetto
    "$samples" "$work"
    "$python" "$here/read_perfetto.py" "$work"
    ;;
  hta)
    need hta.trace_analysis "traceinsight 'pandas<3' pyyaml"
    "$samples" "$work"
    "$python" -W ignore "$here/read_hta.py" "$work/chrome"
    ;;
  tensorboard_profiler)
    need "torch_tb_profiler.profiler, absl" "torch-tb-profiler 'pandas<3'"
    "$samples" "$work"
    "$python" -W ignore "$here/read_tensorboard_profiler.py" "$work/chrome"
    ;;
  html5lib)
    need html5lib html5lib
    "$samples" "$work"
    for page in profile memory; do
      "$python" -c 'import html5lib, sys; html5lib.HTMLParser(strict=True).parse(sys.stdin.read())' <"$work/$page.html"
    done
    ;;
  chromium)
    browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) ||
      skip "there is no chromium. Fix: apt-get install chromium"
    "$samples" "$work"
    show() { # show WIDTH ARGUMENTS...
      timeout 120 "$browser" --headless=new --no-sandbox --disable-gpu --user-data-dir="$work/browser" \
        --enable-logging=stderr --hide-scrollbars --window-size="$1,3400" "${@:2}" 2>"$work/log" || {
        cat "$work/log" >&2
        exit 1
      }
    }
    # says TEXT: the last page's console has a message with it.
    says() { grep ':CONSOLE' "$work/log" | grep -q "$1"; }
    echo '<script>missing()</script>' >"$work/broken.html"
    show 1280 --dump-dom "file://$work/broken.html" >/dev/null
    says 'missing is not defined' || skip "$browser does not write the console's messages to its log"
    for page in profile memory; do
      bytes=$(stat -c %s "$work/$page.html")
      ((bytes < 5000000)) || { echo "$page.html has $bytes bytes; expected fewer than 5 MB" && exit 1; }
      for width in 360 1200; do
        sed "s/WIDTH/$width/; s/PAGE/$page/" "$here/measure_page.html" >"$work/measure.html"
        report=$(show 1280 --allow-file-access-from-files --dump-dom "file://$work/measure.html" |
          sed -n 's/.*<title>\(.*\)<\/title>.*/\1/p')
        echo "$page at $width: $report"
        [[ $report == "measured $width: fits, "* ]] || exit 1
      done
      show 1200 --screenshot="$work/$page.png" "file://$work/$page.html" >/dev/null
      ! says . || { grep ':CONSOLE' "$work/log" && exit 1; }
      [[ -s $work/$page.png ]]
      if [[ -n ${NRL_SCREENSHOTS:-} ]]; then cp "$work/$page.png" "$NRL_SCREENSHOTS"; fi
    done
    ;;
  *)
    echo "usage: run.sh perfetto|hta|tensorboard_profiler|html5lib|chromium PROFILE_SAMPLES" >&2
    exit 64
    ;;
esac
