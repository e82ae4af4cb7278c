#!/usr/bin/env bash
# TensorBoard, W&B and MLflow files of runs. sinks.sh CASE NRL_TRAIN SOURCE_DIR
# tests/viewers reads the files with the programs themselves.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

on=(logger.tensorboard_enabled=true logger.wandb_enabled=true logger.mlflow_enabled=true)

# value FILE NAME: a text or number of an indented JSON file.
value() {
  sed -nE "s/^ *\"$2\": \"?([^\",]*)\"?,?$/\1/p" "$1"
}

corpus
case $case_name in
  sinks)
    config plain
    config a
    expect 0 run 2 plain.yaml pretrain.max_num_steps=6
    expect 0 run 2 a.yaml "${on[@]}" pretrain.max_num_steps=6
    same plain/logs/metrics.jsonl a/logs/metrics.jsonl 0
    ! grep -q 'continues without' err.txt || fail "warnings: $(cat err.txt)"
    [[ ! -e plain/logs/wandb && ! -e plain/logs/tensorboard && ! -e plain/logs/mlruns ]] || fail "files without a key"
    id=$(value a/logs/run.json run_id)
    for line in "tensorboard --logdir a/logs/tensorboard" "wandb sync a/logs/wandb/offline-run-.*-$id" \
      "mlflow migrate-filestore --source a/logs/mlruns"; do
      tr '\n' ' ' <out.txt | tr -s ' ' | grep -q -- "$line" || fail "no '$line' in $(cat out.txt)"
    done
    # A job that is started again is one run everywhere; a row of every step, once.
    expect 0 run 2 a.yaml "${on[@]}"
    [[ $(value a/logs/run.json run_id) == "$id" ]] || fail "another id: $(cat a/logs/run.json)"
    [[ $(value a/logs/run.json last_step | xargs) == "6 10" ]] || fail "sessions: $(cat a/logs/run.json)"
    [[ $(value a/logs/summary.json run_id) == "$id" && $(value a/logs/summary.json exit) == 0 ]] || fail "summary.json"
    [[ $(find a/logs/tensorboard -name 'events.out.tfevents.*' | wc -l) -eq 2 ]] || fail "event files"
    [[ $(find a/logs/wandb -name "run-$id.wandb" | wc -l) -eq 2 ]] || fail "offline runs: $(find a/logs/wandb)"
    cut -d' ' -f3 "a/logs/mlruns/0/$id/metrics/train/loss" | xargs >steps.txt
    [[ $(cat steps.txt) == "1 2 3 4 5 6 7 8 9 10" ]] || fail "steps in MLflow: $(cat steps.txt)"
    awk '$2 <= 0 || $2 >= 1 { bad = 1 } END { exit bad || NR != 10 }' "a/logs/mlruns/0/$id/metrics/perf/goodput" ||
      fail "goodput: $(cat "a/logs/mlruns/0/$id/metrics/perf/goodput")"
    # Steps of both sessions count, the time between them does not.
    awk -v whole="$(value a/logs/summary.json goodput)" -v created="$(value a/logs/run.json created)" \
      -v end="$(value a/logs/summary.json time)" -F'[:,]' '{ for (i = 1; i < NF; ++i) if ($i == "\"step_ms\"") sum += $(i + 1) }
        END { good = sum / 1000 / (end - created); exit !(whole > 0.99 * good && whole < 1.01 * good) }' \
      a/logs/metrics.jsonl || fail "goodput $(value a/logs/summary.json goodput)"
    # From an older checkpoint: later rows are replaced.
    rm -r a/checkpoints/step-10 a/checkpoints/step-6
    expect 0 run 2 a.yaml "${on[@]}"
    [[ $(value a/logs/run.json run_id) == "$id" ]] || fail "another id after the second resume"
    [[ $(cut -d' ' -f3 "a/logs/mlruns/0/$id/metrics/train/loss" | xargs) == "1 2 3 4 5 6 7 8 9 10" ]] ||
      fail "steps after the second resume"
    expect 0 run 1 report a/logs --csv a.csv --by hours
    grep -q ' to .* h$' out.txt || fail "no axis of hours: $(cat out.txt)"
    [[ $(wc -l <a.csv) -eq 11 && $(head -1 a.csv) == step,time,loss,* ]] || fail "table: $(cat a.csv)"
    expect 64 run 1 report a/logs plain/logs --csv a.csv
    ;;
  sinks_removed)
    # Directories that go away: one warning for each sink, and the run goes on.
    config a
    run 1 a.yaml "${on[@]}" pretrain.max_num_steps=4000 checkpointing.enabled=false logger.log_interval=1000 &
    pid=$!
    until [[ -d a/logs/mlruns && -s a/logs/metrics.jsonl ]]; do sleep 0.1; done
    rm -r a/logs/tensorboard a/logs/wandb a/logs/mlruns
    wait $pid || fail "the run ended: $(cat err.txt)"
    for sink in tensorboard wandb mlflow; do
      [[ $(grep -c "the run continues without $sink" err.txt) -eq 1 ]] || fail "warnings of $sink: $(cat err.txt)"
      ! grep -q 'filesystem error' err.txt || fail "a warning in the library's words: $(cat err.txt)"
    done
    [[ $(wc -l <a/logs/metrics.jsonl) -eq 4000 ]] || fail "rows are missing"
    ! grep -q 'wandb sync' out.txt || fail "advice for a sink that failed"
    ;;
  sinks_blocked)
    # Directories that cannot be made.
    config a
    mkdir -p a/logs
    touch a/logs/tensorboard a/logs/wandb a/logs/mlruns
    expect 0 run 1 a.yaml "${on[@]}"
    [[ $(grep -c "the run continues without" err.txt) -eq 3 ]] || fail "warnings: $(cat err.txt)"
    ;;
esac
