#!/usr/bin/env bash
# sinks.sh READER NRL_TRAIN SOURCE_DIR: a run that is killed and resumed, read by TensorBoard, MLflow or W&B. Python
# packages are looked for in the environment of $NRL_VIEWERS_PYTHON (default: python3). Exits with 77 where the reader is
# missing.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
reader=$1
python=${NRL_VIEWERS_PYTHON:-python3}

case $reader in
  tensorboard) module=tensorboard.backend.event_processing.event_accumulator package=tensorboard ;;
  mlflow) module=mlflow package=mlflow-skinny ;;
  wandb) module=wandb package=wandb ;;
  *)
    echo "usage: sinks.sh tensorboard|mlflow|wandb NRL_TRAIN SOURCE_DIR" >&2
    exit 64
    ;;
esac
"$python" -c "import $module" 2>/dev/null || {
  echo "skipped: $python cannot import $module. Fix: pip install $package, or set NRL_VIEWERS_PYTHON"
  exit 77
}

source "$here/../cli/common.sh" "$@"
corpus
config a
keys=(logger.tensorboard_enabled=true logger.wandb_enabled=true logger.mlflow_enabled=true
  logger.mlflow.experiment_name=tiny "logger.mlflow.run_name='it''s a \"run\"'" "data.split=[9,1,0]"
  pretrain.val_period=10 pretrain.val_batches=2 checkpointing.save_period=10 logger.sample_period=10
  logger.sample_tokens=4)
# Killed between two checkpoints, so that the rows of some steps are superseded.
run 1 a.yaml "${keys[@]}" pretrain.max_num_steps=100000 &
pid=$!
until [[ -s a/logs/metrics.jsonl && $(wc -l <a/logs/metrics.jsonl) -gt 200 ]]; do sleep 0.2; done
pkill -KILL -P $pid || kill -KILL $pid
wait $pid || true
last=$(sed -n 's/^.*"step":\([0-9]*\).*$/\1/p' a/logs/metrics.jsonl | tail -1)
expect 0 run 1 a.yaml "${keys[@]}" pretrain.max_num_steps=$((last + 15))
PYTHONWARNINGS=ignore "$python" "$here/read_sinks.py" "$reader" a/logs
