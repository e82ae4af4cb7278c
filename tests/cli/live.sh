#!/usr/bin/env bash
# Telemetry, alerts and live views of runs. live.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

everything=(logger.monitor_gpus=true logger.gpu_monitoring.collection_interval=0.005
  logger.gpu_monitoring.flush_interval=0.005 monitoring.interval=0.01 monitoring.alerting.enabled=true
  monitoring.analysis.trend_analysis=true monitoring.analysis.anomaly_detection=true
  monitoring.visualization.prometheus=true monitoring.visualization.dashboard=true monitoring.visualization.port=0
  monitoring.visualization.textfile=live/run.prom)

# page URL [ACCEPT]: an answer of a server. Skips the test where there is neither curl nor Python.
page() {
  if command -v curl >/dev/null; then
    curl -sf --max-time 5 -H "Accept: ${2:-*/*}" "$1"
  elif command -v python3 >/dev/null; then
    python3 -c 'import sys, urllib.request as r
print(r.urlopen(r.Request(sys.argv[1], headers={"Accept": sys.argv[2]}), timeout=5).read().decode(), end="")' "$1" "${2:-*/*}"
  else
    exit 77
  fi
}

# value FILE NAME: of a metric without labels.
value() {
  awk -v name="$2" '$1 == name { print $2 }' "$1"
}

case $case_name in
  live)
    corpus
    config plain
    config live
    expect 0 run 2 plain.yaml
    expect 0 run 2 live.yaml "${everything[@]}" 'monitoring.alerting.rules=["train/loss > 0 for 1"]' \
      "monitoring.alerting.command=cat >>$work/sent"
    same plain/logs/metrics.jsonl live/logs/metrics.jsonl 0
    cmp -s plain/checkpoints/step-10/model.safetensors live/checkpoints/step-10/model.safetensors ||
      fail "monitoring changed the training"
    [[ ! -e plain/logs/telemetry.jsonl && ! -e plain/logs/alerts.jsonl && ! -e plain/logs/prometheus.json ]] ||
      fail "files of what is off"
    grep -q '"rank":1,"node":0' live/logs/telemetry.jsonl || fail "no telemetry of rank 1"
    grep -q '"rss_bytes"' live/logs/telemetry.jsonl || fail "no memory of the ranks"
    grep -q ' alert .*train/loss is ' out.txt || fail "no alert: $(cat out.txt)"
    grep -q '"rule":"train/loss > 0 for 1"' live/logs/alerts.jsonl || fail "alerts.jsonl lacks the alert"
    grep -q '"rule":"train/loss > 0 for 1"' sent || fail "the command did not get the alert"
    grep -q '^nrl_train_step 10$' live/run.prom || fail "the textfile is not of the last step"
    # Resumed: rows of steps after the checkpoint occur once.
    rm -r live/checkpoints/step-10
    expect 0 run 2 live.yaml "${everything[@]}"
    grep -o '"step":[0-9]*' live/logs/telemetry.jsonl | cut -d: -f2 | sort -nc || fail "steps of telemetry are out of order"
    for columns in 20 40 80 200; do
      COLUMNS=$columns "$nrl_train" watch live/logs plain/logs --once >watch.txt </dev/null || fail "watch failed"
      awk -v columns="$columns" 'length($0) > columns { print; exit 1 }' watch.txt || fail "a line is too long at $columns"
      grep -q 'step 10/10' watch.txt || ((columns < 40)) || fail "no progress: $(cat watch.txt)"
    done
    grep -q '^  rank 1  score ' watch.txt || fail "no ranks: $(cat watch.txt)"
    expect 66 run 1 watch nowhere --once
    ;;
  live_scrape)
    corpus
    config a
    page "file:///dev/null" >/dev/null || true
    "$nrl_train" a.yaml "${everything[@]}" pretrain.max_num_steps=100000 checkpointing.enabled=false >out.txt 2>err.txt &
    training=$!
    trap 'kill $training 2>/dev/null || true; rm -rf "$work" "$work.mpi"' EXIT
    for _ in $(seq 100); do
      [[ -e a/logs/prometheus.json ]] && break
      sleep 0.1
    done
    target=$(sed -E 's/.*"targets":\["([^"]*)".*/\1/' a/logs/prometheus.json)
    sleep 0.5
    page "http://$target/metrics" >first.txt || fail "no scrape: $(cat err.txt)"
    sleep 0.5
    page "http://$target/metrics" >second.txt
    page "http://$target/metrics" application/openmetrics-text >open.txt
    for name in nrl_train_tokens_total nrl_train_step_seconds_count nrl_train_step; do
      awk -v a="$(value first.txt $name)" -v b="$(value second.txt $name)" 'BEGIN { exit !(a > 0 && b > a) }' ||
        fail "$name does not rise: $(value first.txt $name), $(value second.txt $name)"
    done
    awk 'NR == FNR { if ($1 ~ /_total|_bucket|_count/) before[$1] = $2; next }
      $1 in before && $2 < before[$1] { print $1; exit 1 }' first.txt second.txt || fail "a counter fell"
    [[ $(tail -n 1 open.txt) == '# EOF' ]] || fail "OpenMetrics has no end"
    page "http://$target/" >page.html
    { grep -q 'http-equiv="refresh"' page.html && grep -q '<svg' page.html; } || fail "no page: $(head -c 300 page.html)"
    page "http://$target/api/row" | grep -q '"tokens_per_s"' || fail "no row"
    if command -v promtool >/dev/null; then promtool check metrics <first.txt || fail "promtool"; fi
    # A second run takes the next port and says so.
    expect 0 run 1 a.yaml logger.log_dir=b/logs checkpointing.enabled=false monitoring.visualization.prometheus=true \
      "monitoring.visualization.port=${target##*:}"
    grep -q "port ${target##*:} is busy" err.txt || fail "the busy port is not named: $(cat err.txt)"
    kill -TERM $training
    code=0
    wait $training || code=$?
    ((code == 75)) || fail "exit code $code"
    ;;
  leak_ranks)
    # Open files pile up in rank 1, which rank 0 turns into an alert, without telemetry.
    command -v cc >/dev/null || {
      echo "skipped: cc is not installed"
      exit 77
    }
    ! ldd "$nrl_train" | grep -qE 'lib[at]san' || {
      echo "skipped: sanitizers allow no other library before them"
      exit 77
    }
    cat >leak.c <<'C'
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>
static void* leak(void* unused) {
  for (int i = 0; i < 12000; ++i) open("/dev/null", O_RDONLY), usleep(1000);
  return unused;
}
__attribute__((constructor)) static void start(void) {
  pthread_t thread;
  pthread_create(&thread, 0, leak, 0);
}
C
    cc -shared -fPIC -o leak.so leak.c -lpthread
    corpus
    config leaks
    ulimit -n 20000 2>/dev/null || {
      echo "skipped: 20000 files may not be open"
      exit 77
    }
    # shellcheck disable=SC2016  # for the shell of the rank
    mpirun --oversubscribe --bind-to none -n 2 bash -c '[[ $OMPI_COMM_WORLD_RANK == 0 ]] || export LD_PRELOAD=$1
      exec "${@:2}"' rank "$PWD/leak.so" "$nrl_train" leaks.yaml monitoring.alerting.enabled=true \
      monitoring.alerting.thresholds.loss_increase=100 pretrain.max_num_steps=1000000 checkpointing.enabled=false \
      logger.log_interval=100000 monitoring.interval=0.5 >out.txt 2>err.txt &
    pid=$!
    for ((i = 0; i < 300; ++i)); do
      ! grep -q '"rule":"memory_leak"' leaks/logs/alerts.jsonl 2>/dev/null || break
      kill -0 $pid 2>/dev/null || fail "the run ended: $(cat err.txt)"
      sleep 0.1
    done
    kill -TERM $pid
    wait $pid || true
    grep -q '"rule":"memory_leak","severity":"warning".*"message":"memory_leak: rank 1 (.*): the number of open files grows by' \
      leaks/logs/alerts.jsonl || fail "alerts: $(cat leaks/logs/alerts.jsonl)"
    [[ ! -e leaks/logs/telemetry.jsonl ]] || fail "telemetry without its key"
    ;;
  alert_rules)
    corpus
    config a
    alerts=(monitoring.alerting.enabled=true)
    expect 78 run 1 a.yaml "${alerts[@]}" 'monitoring.alerting.rules=["perf/token_per_s < 1000"]'
    grep -q "at character 1: unknown metric 'perf/token_per_s'; did you mean 'perf/tokens_per_s'?" err.txt ||
      fail "no suggestion: $(cat err.txt)"
    expect 78 run 1 a.yaml "${alerts[@]}" monitoring.alerting.slack_notifications=true
    grep -q 'monitoring.alerting.webhook' err.txt || fail "no fix: $(cat err.txt)"
    expect 78 run 1 a.yaml monitoring.alerting.command=true
    expect 78 run 1 a.yaml "${alerts[@]}" 'monitoring.alerting.rules=["node.0.cpu > 0.5"]'
    grep -q 'write logger.monitor_gpus: true' err.txt || fail "no fix: $(cat err.txt)"
    # A command that never ends and an address that nothing answers hold no step up.
    expect 0 run 1 a.yaml "${alerts[@]}" monitoring.interval=0.001 'monitoring.alerting.rules=["train/loss > 0 for 1"]' \
      'monitoring.alerting.command=sleep 60' monitoring.alerting.webhook=http://127.0.0.1:9/
    grep -q 'monitoring.alerting.command: an alert was not sent: killed after 10 s' err.txt || fail "no warning: $(cat err.txt)"
    awk -F'"step_ms":' '{ split($2, rest, ","); if (rest[1] > 5000) exit 1 }' a/logs/metrics.jsonl || fail "a step waited"
    ;;
  *) fail "unknown case $case_name" ;;
esac
echo ok
