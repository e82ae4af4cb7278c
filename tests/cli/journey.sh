#!/usr/bin/env bash
# What happens to a run's work: killed, damaged, changed, moved. journey.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

# says FILE TEXT: the output must hold this text.
says() {
  grep -qF -- "$2" "$1" || fail "no '$2' in $1: $(cat "$1")"
}

# tree DIR: names and checksums of everything in it.
tree() {
  (cd "$1" && find . -type f -exec md5sum {} + | sort -k2)
}

# complete_sets DIR: of the files NAME-i-of-N all N must be there.
complete_sets() {
  local file of
  for file in "$1"/*-of-*; do
    of=${file##*-of-}
    (($(find "$1" -name '*-of-*' | wc -l) == 10#${of%%.*})) || fail "an incomplete set: $(ls "$1")"
  done
}

# kill_run PID: kills a run in the background by force: its ranks, not mpirun, which sees them die.
kill_run() {
  local program ranks
  program=$(pgrep -P "$1" || true)
  ranks=$(for p in $program; do pgrep -P "$p"; done || true)
  # shellcheck disable=SC2086  # several ids
  kill -KILL ${ranks:-$program} 2>/dev/null || true
  wait "$1" 2>/dev/null || true
}

# kill_during_save NAME RANKS ARGS...: kills the run by force while a checkpoint is being written, or after step 20 where
# this shell was too slow to see one.
kill_during_save() {
  local name=$1 ranks=$2 pid
  run "$ranks" "$name.yaml" "${@:3}" &
  pid=$!
  while kill -0 $pid 2>/dev/null; do
    [[ ! -e $name/checkpoints/step-20 ]] || break
    # The first save must be complete; then any unfinished one will do.
    if [[ -e $name/checkpoints/LATEST ]] && compgen -G "$name/checkpoints/step-*.tmp-*" >/dev/null; then break; fi
  done
  kill_run $pid
}

case $case_name in
  journey)
    corpus
    for ranks in 1 2 4; do
      config whole$ranks
      expect 0 run $ranks whole$ranks.yaml distributed.shard_strategy=optim pretrain.max_num_steps=40 checkpointing.save_period=2
      name=killed$ranks
      config $name
      options=(distributed.shard_strategy=optim pretrain.max_num_steps=40 checkpointing.save_period=2)
      kill_during_save $name $ranks "${options[@]}"
      [[ ! -e $name/checkpoints/step-40 ]] || fail "the run was over before it was killed"
      latest=$(<$name/checkpoints/LATEST)
      complete_sets "$name/checkpoints/$latest"
      # The newest checkpoint is damaged as well: the one before it takes over, and nothing is thrown away.
      steps=$(find $name/checkpoints -maxdepth 1 -name 'step-*' ! -name '*.tmp-*' | wc -l)
      if ((steps > 1)); then
        newest=$(find $name/checkpoints -maxdepth 1 -name 'step-*' ! -name '*.tmp-*' | sort -t- -k2 -n | tail -1)
        newest=$name/checkpoints/$(basename "$newest")
        damage "$newest/model.safetensors"
        expect 0 run $ranks $name.yaml "${options[@]}"
        says err.txt "checkpoint not used: $newest/model.safetensors: damaged"
        [[ -s $name/checkpoints/previous-1/$(basename "$newest")/model.safetensors ]] || fail "the damaged checkpoint is gone"
      else
        expect 0 run $ranks $name.yaml "${options[@]}"
      fi
      says out.txt "resume"
      same whole$ranks/logs/metrics.jsonl $name/logs/metrics.jsonl 0
      diff <(cd whole$ranks/checkpoints/step-40 && md5sum ./*.safetensors) \
        <(cd $name/checkpoints/step-40 && md5sum ./*.safetensors) || fail "the state of $ranks ranks differs"
      [[ -z $(find $name/checkpoints -name '*.tmp-*') ]] || fail "a killed save was left"
    done
    ;;
  none_usable)
    corpus
    config n
    expect 0 run 1 n.yaml
    # One damaged, one of a newer format.
    damage n/checkpoints/step-5/model.safetensors
    sed -i 's/nrl-checkpoint-1/nrl-checkpoint-2/' n/checkpoints/step-10/manifest.json
    tree n >before.txt
    for ranks in 1 2; do
      expect 65 run $ranks n.yaml pretrain.max_num_steps=12
      says err.txt "cannot resume from any of the 2 checkpoints in n/checkpoints"
      says err.txt "step-5/model.safetensors: damaged"
      says err.txt "step-10/manifest.json"
      says err.txt "checkpointing.resume=never"
      [[ $(grep -c 'cannot resume from' err.txt) -eq 1 ]] || fail "the message was not printed once"
    done
    tree n >after.txt
    cmp before.txt after.txt || fail "the refused run touched something"
    # Starting afresh keeps them.
    expect 0 run 1 n.yaml checkpointing.resume=never
    says err.txt "n/checkpoints/previous-1"
    [[ $(tree n/checkpoints/previous-1 | grep -c safetensors) -eq 4 ]] || fail "the old checkpoints are gone"
    expect 0 run 1 n.yaml pretrain.max_num_steps=11
    says out.txt "step-10"
    # An explicit path is checked as well; what it names and what is newer is not lost.
    damage n/checkpoints/step-5/config.json
    expect 65 run 1 n.yaml checkpointing.resume=n/checkpoints/step-5
    says err.txt "step-5/config.json: damaged"
    expect 0 run 1 n.yaml checkpointing.resume=n/checkpoints/step-10 pretrain.max_num_steps=11
    [[ -d n/checkpoints/previous-2/step-11 && -d n/checkpoints/step-10 ]] || fail "going back lost a checkpoint"
    ;;
  changes)
    corpus
    config c
    expect 0 run 1 c.yaml pretrain.max_num_steps=5
    refuse() {
      tree c >before.txt
      expect 78 run "$1" c.yaml "${@:4}"
      says err.txt "$2"
      says err.txt "$3"
      tree c >after.txt
      cmp before.txt after.txt || fail "the refused run touched something"
    }
    refuse 1 "policy.model.rope_theta: 10000 -> 500000" "allow_changes=[model]" policy.model.rope_theta=500000
    refuse 2 "data.seed: 7 -> 8" "allow_changes=[seed]" pretrain.seed=8
    refuse 1 "policy.max_total_sequence_length: 32 -> 16" "allow_changes=[sequence_length]" policy.max_total_sequence_length=16
    refuse 1 "policy.model.num_attention_heads: 4 -> 8" "restore these values" policy.model.num_attention_heads=8 \
      policy.model.head_dim=6 policy.model.num_key_value_heads=4 "checkpointing.allow_changes=[model, data, seed]"
    # Moved with equal content, and another lr and batch: listed in one block.
    for file in corpus.*; do cp "$file" "moved.${file#corpus.}"; done
    expect 0 run 1 c.yaml data.train.data_path=moved policy.optimizer.lr=1e-3 policy.train_global_batch_size=16 pretrain.max_num_steps=7
    says out.txt "data.train.data_path[0]: corpus -> moved (same content)"
    says out.txt "policy.optimizer.lr: 0.003 -> 0.001"
    says out.txt "policy.train_global_batch_size: 8 -> 16"
    # Other content: only when allowed.
    expect 0 run 1 prepare --input "$source_dir/core" "$source_dir/apps" "$source_dir/memory" --tokenizer bytes --output moved
    refuse 1 "data.train.content[0]" "allow_changes=[data]" data.train.data_path=moved policy.train_global_batch_size=16
    expect 0 run 1 c.yaml data.train.data_path=moved policy.train_global_batch_size=16 pretrain.max_num_steps=9 \
      "checkpointing.allow_changes=[data]"
    says out.txt "samples may repeat or be missed"
    ;;
  rank_files)
    corpus
    config r
    mkdir -p here there
    for place in here there; do cp corpus.* r.yaml "$place"; done
    both() {
      # Rank 1 works in another directory. Not by mpirun's own means: that of Open MPI 5 crashes without sysfs.
      # shellcheck disable=SC2016  # for the shell of the rank
      mpirun --oversubscribe --bind-to none -n 2 bash -c 'cd "$0/$( ((OMPI_COMM_WORLD_RANK)) && echo there || echo here)" && exec "$@"' \
        "$work" "$nrl_train" "$@" >out.txt 2>err.txt
    }
    expect 0 both r.yaml pretrain.max_num_steps=1 checkpointing.enabled=false
    damage there/corpus.bin 1000 # large files are compared by samples; the first is at the beginning
    expect 65 both r.yaml pretrain.max_num_steps=1 logger.log_dir=other
    says err.txt "rank 1"
    says err.txt "corpus.bin"
    cp here/corpus.bin there
    rm there/corpus.idx
    expect 65 both r.yaml pretrain.max_num_steps=1 logger.log_dir=other
    says err.txt "corpus.idx (missing)"
    cp here/corpus.idx there
    # A model that differs in one copy.
    expect 0 run 1 r.yaml pretrain.max_num_steps=0
    sed '/model: {/,/max_position/d; s|^policy:|policy:\n  model_name: model|' r.yaml >here/m.yaml
    for place in here there; do cp -r r/checkpoints/step-0 $place/model; done
    damage there/model/model.safetensors
    expect 65 both m.yaml logger.log_dir=other
    says err.txt "model/model.safetensors"
    [[ ! -e here/other && ! -e there/other && ! -e here/r/checkpoints ]] || fail "a refused run left something behind"
    ;;
  weights)
    corpus
    config w
    expect 0 run 1 w.yaml
    good=w/checkpoints/step-10
    config m
    sed -i "/model: {/,/max_position/d; s|^policy:|policy:\n  model_name: model|" m.yaml
    # Every file of the manifest counts, also those that are not read.
    for file in model.safetensors optimizer-00001-of-00001.safetensors config.json; do
      rm -rf model
      cp -r $good model
      damage model/$file
      expect 65 run 1 generate model --prompt x --max-tokens 1
      says err.txt "model/$file"
      expect 65 run 2 m.yaml
      says err.txt "model/$file"
    done
    [[ ! -e m ]] || fail "a refused run left something behind"
    # A plain directory has no checksums, but NaN is found.
    rm -rf model
    cp -r $good model
    rm model/manifest.json
    expect 0 run 1 generate model --prompt x --max-tokens 1
    size=$(stat -c %s model/model.safetensors)
    printf '\0\0\300\177\0\0\200\377' | dd of=model/model.safetensors bs=1 seek=$((size - 8)) conv=notrunc status=none
    for command in "generate model --prompt x --max-tokens 1" m.yaml; do
      # shellcheck disable=SC2086  # a command line in words
      expect 65 run 1 $command
      says err.txt "has 2 NaN or infinite values of"
      says err.txt "tensor \""
    done
    # Finite but useless weights: divergence says where they came from.
    expect 0 run 1 w.yaml checkpointing.resume=never pretrain.max_num_steps=0 policy.model.initializer_range=1.0e+25 \
      checkpointing.checkpoint_dir=huge
    rm -rf model
    cp -r huge/step-0 model
    expect 79 run 1 m.yaml pretrain.max_num_steps=8
    says err.txt "No step succeeded with the weights loaded from model"
    ;;
  shards)
    corpus
    config s
    for strategy in ddp optim; do
      expect 0 run 2 s.yaml pretrain.max_num_steps=1 distributed.shard_strategy=$strategy checkpointing.checkpoint_dir=$strategy
      complete_sets $strategy/step-1
    done
    ;;
  locks)
    corpus
    config a
    config b
    run 1 a.yaml pretrain.max_num_steps=100000 policy.scheduler.lr_decay_iters=100000 checkpointing.save_period=0 &
    pid=$!
    for _ in $(seq 200); do
      [[ -s a/logs/metrics.jsonl ]] && break
      sleep 0.05
    done
    cp out.txt a.txt
    for ranks in 1 2; do
      expect 73 run $ranks b.yaml logger.log_dir=a/logs
      says err.txt "a/logs/run.lock: locked by pid"
      [[ ! -e b ]] || fail "the refused run made its checkpoint directory"
      expect 73 run $ranks b.yaml checkpointing.checkpoint_dir=a/checkpoints
      says err.txt "a/checkpoints/run.lock: locked by pid"
      [[ ! -e b ]] || fail "the refused run made its log directory"
    done
    kill_run $pid
    # One directory for both, by two names.
    expect 0 run 1 b.yaml pretrain.max_num_steps=1 logger.log_dir=both checkpointing.checkpoint_dir=./both/
    [[ -d both/step-1 && ! -e both/run.lock ]] || fail "$(ls both)"
    ;;
  *) fail "unknown case $case_name" ;;
esac
echo "$case_name: ok"
