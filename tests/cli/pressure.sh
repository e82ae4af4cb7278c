#!/usr/bin/env bash
# Runs that do not fit into memory: pressure.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

# said FILE TEXT: the file holds that text.
said() {
  grep -qF -- "$2" "$1" || fail "'$2' is not in $1: $(cat "$1")"
}

# limited KIB ARGS...: two ranks ($ranks), of which one ($victim) may have that much private memory.
ranks=2 victim=1
limited() {
  local kib=$1
  shift
  # shellcheck disable=SC2016  # expanded by the ranks
  VICTIM=$victim mpirun --oversubscribe --bind-to none -n "$ranks" bash -c \
    '[[ $OMPI_COMM_WORLD_RANK != "$VICTIM" ]] || ulimit -d "$0"; exec "$@"' "$kib" "$nrl_train" "$@" >out.txt 2>err.txt
}

# arena ARGS...: bytes of the largest arena of a rank.
arena() {
  "$nrl_train" plan "$@" --world "$ranks" | awk '$1 == "arena" { gsub(/,/, "", $2); print $2; exit }'
}

# peak ARGS...: bytes of a process of one rank.
peak() {
  "$nrl_train" plan "$@" | awk '$1 == "peak" { gsub(/,/, "", $2); print $2; exit }'
}

# Narrow layers: activations of many tokens fill the memory, and GEMMs take little time.
many=(policy.model.hidden_size=64 policy.model.num_hidden_layers=8 policy.train_global_batch_size=2560
  pretrain.max_num_steps=2 checkpointing.enabled=false)
case $case_name in
  on_oom)
    corpus
    config large
    large=$(arena large.yaml "${many[@]}" policy.train_micro_batch_size=1280)
    small=$(arena large.yaml "${many[@]}" policy.train_micro_batch_size=640)
    ((large > small + 300000000)) || fail "arenas of $large and $small bytes are too similar for this test"
    # The arena of small microbatches and 250 MB for everything else: that of large ones does not fit.
    kib=$(((small + 250000000) / 1024))
    expect 71 limited "$kib" large.yaml "${many[@]}" policy.train_micro_batch_size=1280
    said err.txt 'the system refused'
    said err.txt 'activations'
    said err.txt 'in use without it: '
    # What is said to fit into what was left does.
    sed -n 's/.*= fits: \(.*\) (a rank needs .*/\1/p' err.txt >fits.txt
    grep -q '^policy.train_micro_batch_size: 640$' fits.txt || fail "not said to fit: $(cat err.txt)"
    while read -r changes; do
      changes=${changes//, / }
      # shellcheck disable=SC2086  # one argument for each key
      expect 0 limited "$kib" large.yaml "${many[@]}" policy.train_micro_batch_size=1280 ${changes//: /=} logger.log_dir=fits </dev/null
    done <fits.txt
    # The vote of one rank makes all ranks take smaller microbatches, once.
    expect 0 limited "$kib" large.yaml "${many[@]}" policy.train_micro_batch_size=1280 memory.on_oom=reduce_batch \
      logger.log_dir=reduced
    [[ $(grep -c 'memory.on_oom: a microbatch of 1280 does not fit; the run takes 640 sequences and accumulates 2 microbatches' err.txt) -eq 1 ]] ||
      fail "not announced once: $(cat err.txt)"
    said err.txt 'rank 1: the system refused'
    said out.txt '640 micro x 2 accumulate x 2 dp'
    # The same steps as those of a run that was configured so, to the last bit, and as with large microbatches but for
    # the order of sums.
    expect 0 run 2 large.yaml "${many[@]}" policy.train_micro_batch_size=640 logger.log_dir=configured
    same reduced/metrics.jsonl configured/metrics.jsonl 0
    expect 0 run 2 large.yaml "${many[@]}" policy.train_micro_batch_size=1280 logger.log_dir=unlimited
    same reduced/metrics.jsonl unlimited/metrics.jsonl 1e-5
    # Nothing is left to halve.
    expect 71 limited 150000 large.yaml "${many[@]}" policy.train_global_batch_size=2 policy.train_micro_batch_size=1 \
      policy.model.hidden_size=256 policy.model.vocab_size=40000 memory.on_oom=reduce_batch
    said err.txt 'A microbatch of one sequence cannot be made smaller'
    ;;
  on_oom_stages) # one rank of a pipeline, whose first stage needs the most memory
    corpus
    config large
    victim=0
    for layout in "2 2048 1" "2 4096 2" "4 4096 1"; do
      read -r ranks batch chunks <<<"$layout"
      keys=(large.yaml policy.model.hidden_size=64 policy.model.num_hidden_layers=8 policy.recompute.granularity=none
        pretrain.max_num_steps=1 checkpointing.enabled=false distributed.pipeline_parallel_size=2
        "distributed.virtual_pipeline_size=$chunks" "policy.train_global_batch_size=$batch")
      large=$(arena "${keys[@]}" policy.train_micro_batch_size=1024)
      small=$(arena "${keys[@]}" policy.train_micro_batch_size=512)
      ((large > small + 300000000)) || fail "arenas of $large and $small bytes are too similar for this test"
      kib=$(((small + 250000000) / 1024))
      expect 71 limited "$kib" "${keys[@]}" policy.train_micro_batch_size=1024
      [[ $(grep -c 'rank 0. error: the system refused' err.txt) -eq 1 ]] || fail "not one message: $(cat err.txt)"
      expect 0 limited "$kib" "${keys[@]}" policy.train_micro_batch_size=1024 memory.on_oom=reduce_batch
      said err.txt 'rank 0: the system refused'
      said out.txt '512 micro x '
    done
    ;;
  tune)
    config large
    # A budget between the needs of 64 and 128 sequences: the plans say which, and the runs stay within it.
    few=(policy.model.hidden_size=128 policy.model.num_hidden_layers=4 policy.train_global_batch_size=256)
    expect 0 run 1 tune batch-size large.yaml "${few[@]}" --sizes 16,32,64,128,256 --steps 1
    said out.txt 'largest   policy.train_micro_batch_size: 256'
    said out.txt 'no larger size divides the batch'
    [[ $(grep -c '%' out.txt) -eq 6 ]] || fail "not five sizes: $(cat out.txt)"
    # Listed sizes that do not divide the batch are skipped by name, and larger ones may be left that are not listed.
    expect 0 run 1 tune batch-size large.yaml "${few[@]}" --sizes 3,5,8,16 --steps 1
    said out.txt 'skipped   3, 5: do not divide the 256 sequences of a rank'
    said out.txt 'tokens/s; a larger one may fit, but --sizes has none'
    # Without a snapshot for checkpoints, which is taken only where it fits.
    bytes=$(peak large.yaml "${few[@]}" checkpointing.is_async=false policy.train_micro_batch_size=96 policy.train_global_batch_size=288)
    share=$(awk -v bytes="$bytes" '/^MemTotal/ { printf "%.6f", bytes / 1024 / $2 }' /proc/meminfo)
    limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
    [[ $limit == max ]] || share=$(awk -v bytes="$bytes" -v limit="$limit" 'BEGIN { printf "%.6f", bytes / limit }')
    expect 0 run 1 tune batch-size large.yaml "${few[@]}" --sizes 16,32,64,128,256 --steps 1 --max-memory "$share"
    said out.txt 'largest   policy.train_micro_batch_size: 64'
    said out.txt '128 sequences need'
    said out.txt 'fastest   policy.train_micro_batch_size: '
    # Several ranks agree, and nothing fits into nothing.
    expect 0 run 2 tune batch-size large.yaml --sizes 8,16 "${few[@]}" --steps 1 distributed.shard_strategy=optim
    said out.txt 'largest   policy.train_micro_batch_size: 16'
    expect 71 run 2 tune batch-size large.yaml "${few[@]}" --max-memory 0.00001
    said err.txt 'no microbatch fits: even 1 sequence per rank needs'
    # Where the accumulation is given too, both keys are named, and the run takes them.
    expect 0 run 1 tune batch-size large.yaml "${few[@]}" --sizes 32 --steps 1 policy.gradient_accumulation_steps=16 \
      policy.train_micro_batch_size=16
    said out.txt 'policy.gradient_accumulation_steps: 8'
    expect 64 run 1 tune batch-size large.yaml "${few[@]}" --sizes 3
    said err.txt '--sizes: 3 is no number that divides the 256 sequences of a rank'
    ;;
  *) fail "unknown case $case_name" ;;
esac
