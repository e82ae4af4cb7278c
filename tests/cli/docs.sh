#!/usr/bin/env bash
# Output shown in README and docs must match the program's, except for numbers: docs.sh CASE NRL_TRAIN SOURCE_DIR
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

version_line='^    nrl-train [0-9.]+$'

# transcript FILE: the indented block of a document that begins with the version of the program.
transcript() {
  awk -v start="$version_line" '!on && $0 ~ start { on = 1 } on && /^[^ ]/ { exit } on { print substr($0, 5) }' "$source_dir/$1"
}

# compare FILE: compares shown.txt, a transcript of that file, with out.txt. Also changes every line of the transcript
# once, which must be detected.
compare() {
  local result i
  result=$(awk -f "$source_dir/tests/cli/transcript.awk" shown.txt out.txt) || fail "$1 is out of date: $result"
  for ((i = 1; i <= $(wc -l <shown.txt); ++i)); do
    # Except "...", rows of a chart, and kernels on a wrapped line.
    sed -n "${i}p" shown.txt | grep '[a-z]' | grep -qvE '^ +([a-z_]+ [0-9.]+% *)+$' || continue
    sed "${i}s/[a-z][a-z]*/&x/" shown.txt >changed.txt
    ! awk -f "$source_dir/tests/cli/transcript.awk" changed.txt out.txt >/dev/null || fail "$1: not compared: $(sed -n "${i}p" changed.txt)"
  done
}

case $case_name in
  transcript_quickstart)
    # The unmodified scripts/quickstart.sh in a tree with nothing to install or build, on less text.
    mkdir -p scripts build/cpu/bin bin headers
    cp "$source_dir"/scripts/{quickstart.sh,common.sh,metrics.awk} scripts
    cp -r "$source_dir/configs" .
    cp -r "$source_dir/core" headers
    printf '#!/bin/sh\n' | tee scripts/install-deps.sh >bin/cmake
    chmod +x scripts/install-deps.sh bin/cmake
    ln -s "$nrl_train" build/cpu/bin/nrl-train
    PATH=$work/bin:$PATH expect 0 scripts/quickstart.sh headers device=cpu pretrain.max_num_steps=20 pretrain.val_period=20 \
      policy.scheduler.lr_warmup_iters=5 >all.txt 2>err.txt
    sed -E 's/headers-[0-9]+/headers/' all.txt >out.txt
    transcript README.md >shown.txt
    compare README.md
    ;;
  transcript_doctor)
    expect 0 run 1 doctor
    transcript docs/gpu.md >shown.txt
    # The transcript is of a build with all GPU libraries on a machine without a GPU; otherwise compare only the lines
    # that do not depend on that.
    if (($(grep -cE '^(cuda .*built with|library .*(cuBLASLt|cuDNN) [0-9]|nccl  *[0-9]|training .*no NVIDIA driver)' out.txt) < 5)); then
      sed -i -E '/^(cuda|driver|device|library|nccl|training|  ) /d' out.txt shown.txt
    fi
    sed -i -E 's/^(processor  *).*/\1NAME/; s/(compute capability ).*/\1N/; s/^(library .* in ).*/\1FILE/' out.txt shown.txt
    compare docs/gpu.md
    ;;
  transcript_slurm)
    # Stand-ins: srun with two ranks, and scontrol without a queue.
    mkdir bin
    cat >bin/srun <<'RUN'
#!/bin/sh
while case $1 in --*) true ;; *) false ;; esac; do shift; done
exec mpirun --oversubscribe --bind-to none -n 2 "$@"
RUN
    printf '#!/bin/sh\n' >bin/scontrol
    chmod +x bin/*
    export PATH=$work/bin:$PATH SLURM_JOB_ID=2 NRL_TRAIN=$nrl_train
    corpus
    config run
    sed -i 's#run/checkpoints#checkpoints#' run.yaml
    job=("$source_dir/scripts/slurm/train.sbatch" run.yaml policy.scheduler.lr_decay_iters=200000
      checkpointing.save_period=1000000 logger.log_interval=50)
    bash "${job[@]}" pretrain.max_num_steps=200000 >out.txt 2>err.txt &
    until [[ $(grep -c ' eta ' out.txt) -gt 1 ]]; do
      kill -0 $! 2>/dev/null || fail "the run ended early: $(cat out.txt err.txt)"
      sleep 0.05
    done
    kill -USR1 $!
    wait $! || fail "the batch script failed: $(cat out.txt err.txt)"
    saved=$(printf '%s\n' checkpoints/step-* | sort -V | tail -n 1)
    # A run that ends soon. A real job repeats its command, so the list of changes is dropped.
    bash "${job[@]}" "pretrain.max_num_steps=$((${saved##*-} + 5))" >resumed.txt 2>>err.txt ||
      fail "it did not resume: $(cat resumed.txt err.txt)"
    awk '/^[^ ]/ { off = $1 == "changed" } !off' resumed.txt >>out.txt
    # Without the output of Slurm itself.
    transcript docs/slurm.md | grep -vE '^(srun:|\$ | +(JobState|Requeue)=)' >shown.txt
    compare docs/slurm.md
    ;;
  transcript_predict)
    awk '/^    device      H200: / { on = 1 } on && !/^    / { exit } on { print substr($0, 5) }' "$source_dir/docs/gpu.md" >shown.txt
    expect 0 "$nrl_train" bench step "$source_dir/configs/bench-llama-1b.yaml" --predict h200 --device cpu >out.txt 2>err.txt
    compare docs/gpu.md
    ;;
  transcript_search)
    awk '/^    device   16 / { on = 1 } on && !/^    / { exit } on { print substr($0, 5) }' "$source_dir/docs/parallel.md" >shown.txt
    command=$(sed -nE '/^    nrl-train plan .* --search/ { N; s/\\\n//; s/^ +nrl-train //p }' "$source_dir/docs/parallel.md")
    cd "$source_dir"
    # shellcheck disable=SC2086  # its arguments
    expect 0 "$nrl_train" $command >"$work/out.txt" 2>"$work/err.txt"
    cd "$work"
    compare docs/parallel.md
    ;;
  transcript_program)
    awk '/^    5 times, / { on = 1 } on && /^[^ ]/ { exit } on { print substr($0, 5) }' "$source_dir/docs/architecture.md" >shown.txt
    [[ -s shown.txt ]] || fail "docs/architecture.md shows no program"
    command=$(sed -nE '/^    nrl-train plan .* --program/ { N; s/\\\n//; s/^ +nrl-train //p }' "$source_dir/docs/architecture.md")
    # shellcheck disable=SC2086  # its arguments
    (cd "$source_dir" && "$nrl_train" $command) >out.txt
    compare docs/architecture.md
    ;;
  transcript_verify)
    mapfile -t commands < <(sed -nE 's/^    mpirun -n 4 nrl-train (verify tests.*)/\1/p' "$source_dir/docs/verify.md")
    shown=0
    for command in "${commands[@]}"; do
      [[ $command != *--layouts* ]] || continue
      ((++shown))
      awk -v shown="$shown" '/^    data  / { on = ++block == shown } on && !/^    / { exit } on { print substr($0, 5) }' \
        "$source_dir/docs/verify.md" >shown.txt
      cd "$source_dir"
      # shellcheck disable=SC2086  # its arguments
      mpirun --oversubscribe --bind-to none -n 4 "$nrl_train" $command >"$work/out.txt" 2>"$work/err.txt" || fail "$(cat "$work/err.txt")"
      cd "$work"
      # Which tensors differ most depends on the processor.
      sed -i -E 's/(model|lm_head)\.[a-z0-9_.]+/TENSOR/' shown.txt out.txt
      compare docs/verify.md
    done
    ((shown == 2)) || fail "docs/verify.md has $shown commands"
    ;;
  docs_names) # keys and command options in documents exist; every transcript has a case here
    cd "$source_dir"
    mapfile -t documents < <(find . -name build -prune -o -name '*.md' -printf '%P\n' | LC_ALL=C sort)
    ((${#documents[@]} > 10)) || fail "the documents were not found: ${documents[*]}"
    grep -lE "$version_line" "${documents[@]}" | diff <(printf '%s\n' README.md docs/gpu.md docs/slurm.md) - ||
      fail "a document has a transcript without a case here, or lacks one"
    sections=$("$nrl_train" explain | sed -nE 's/^ +([a-z_]+)\. .*/\1/p' | paste -sd '|')
    grep -ohP "(?<![\w/.-])($sections)(\.[a-z_0-9]+)+(?=[=\`])" "${documents[@]}" | LC_ALL=C sort -u >"$work/keys.txt"
    (($(wc -l <"$work/keys.txt") > 20)) || fail "the keys were not found: $(cat "$work/keys.txt")"
    while read -r key; do
      "$nrl_train" explain "$key" >/dev/null || fail "a document names the key $key"
    done <"$work/keys.txt"
    grep -ohE 'nrl-train [a-z]+ [^#`|]*--[a-z-]+' "${documents[@]}" | LC_ALL=C sort -u >"$work/commands.txt"
    while read -ra words; do
      command=("${words[1]}")
      if [[ ${words[1]} =~ ^(data|checkpoint|bench|tune|profile)$ ]]; then command+=("${words[2]}"); fi
      "$nrl_train" "${command[@]}" --help >"$work/help.txt" || fail "a document has the command ${words[*]}"
      for word in "${words[@]}"; do
        [[ $word != --* ]] || grep -qE -- "^ +(-[a-z],)?$word( |\$)" "$work/help.txt" || fail "there is no $word: ${words[*]}"
      done
    done <"$work/commands.txt"
    ;;
  docs_figures) # the memory of every sharding strategy, as planned by the command below the table
    planned=$(sed -nE '/^    nrl-train plan configs\/gpt2-124m/ { N; s/\\\n//; s/^ +nrl-train plan //p }' "$source_dir/docs/sharding.md")
    planned=${planned//--world 8 distributed.*_gather=true/}
    cd "$source_dir"
    rows=0
    while IFS='|' read -r _ ranks strategy figures; do
      name=${strategy#*\`}
      keys=("distributed.shard_strategy=${name%\`*}")
      [[ $strategy == *ddp* ]] || keys+=(distributed.overlap_param_gather=true)
      [[ $strategy != *slices* ]] || keys+=("distributed.dp_replicate_size=$(sed -E 's/.*, ([0-9]+) slices.*/\1/' <<<"$strategy")")
      [[ $strategy != *"in bf16"* ]] ||
        keys+=(policy.optimizer.use_precision_aware_optimizer=true policy.optimizer.main_grads_dtype=bf16)
      # shellcheck disable=SC2086  # its arguments
      memory=$("$nrl_train" plan $planned --world $ranks "${keys[@]}" 2>"$work/err.txt" | awk '
        $1 == "memory" { on = 1 }
        $1 == "process" { on = 0 }
        on && /^  (weights|gradients|optimizer|activations|total) / { gsub(",", "", $2); printf " %.0f |", $2 / 1048576 }')
      [[ $figures == "$memory" ]] || fail "docs/sharding.md:$ranks|$strategy|$figures; planned:$memory $(cat "$work/err.txt")"
      rows=$((rows + 1))
    done < <(grep -E '^\| [28] \| `' docs/sharding.md)
    ((rows == 11)) || fail "$rows rows of memory in docs/sharding.md"
    ;;
  docs_excerpts) # code excerpts of docs/design.md match a file that it names
    cd "$source_dir"
    awk -f tests/cli/excerpts.awk docs/design.md || fail "docs/design.md is out of date"
    awk '/^```cpp/ && !n++ { print; getline; $0 = $0 "x" } { print }' docs/design.md >"$work/changed.md"
    ! awk -f tests/cli/excerpts.awk "$work/changed.md" >/dev/null || fail "a changed excerpt was not detected"
    ;;
  *) fail "no case $case_name" ;;
esac
