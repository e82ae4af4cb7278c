#!/usr/bin/env bash
# The configurations of NeMo RL's guides, run as they are pasted: documents.sh CASE NRL_TRAIN SOURCE_DIR
# They lack a model, data and a length, which the command line gives.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

corpus
documents=$source_dir/tests/cli/documents
minimum=("policy.model={model_type: llama, vocab_size: 272, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4, num_attention_heads: 4}"
  data.train.data_path=corpus policy.max_total_sequence_length=32 pretrain.max_num_steps=2)

# shown FILE TEXT...: the file holds these texts.
shown() {
  local file=$1 text
  shift
  for text; do grep -qF -- "$text" "$file" || fail "'$text' is not in $file: $(cat out.txt err.txt)"; done
}

case $case_name in
  pasted)
    expect 0 run 2 "$documents/memory-efficient.yaml" "${minimum[@]}"
    shown out.txt 'policy.model_parallel: true is read as distributed.model_parallel: true' 'grid       2 ranks = tp 2' '4 accumulate' 'done: 2 steps'
    shown err.txt 'policy.pin_memory: true has no effect on a CPU'
    [[ $(grep -c pin_memory: err.txt) -eq 2 ]] || fail "said more than once, or without the line: $(cat err.txt)"
    rm -r results
    expect 0 run 8 "$documents/large-model.yaml" "${minimum[@]}"
    shown out.txt 'grid       8 ranks = tp 4 x pp 2' 'scale 32768' 'done: 2 steps'
    # One rank too few, or no model parallelism at all.
    expect 78 run 1 "$documents/memory-efficient.yaml" "${minimum[@]}"
    shown err.txt 'memory-efficient.yaml:13:25'
    expect 78 run 1 "$documents/memory-efficient.yaml" "${minimum[@]}" policy.tensor_parallel_size=1
    shown err.txt 'memory-efficient.yaml:12:19' 'every rank holds the whole model'
    # The cluster of a guide: 24 ranks of 8 sequences, four times a step.
    expect 0 run 1 plan --world 24 --config "$documents/multi-node.yaml" "${minimum[@]}"
    shown out.txt '8 micro x 4 accumulate x 24 dp'
    ;;
  named) # --config FILE is CONFIG
    config c
    expect 0 run 1 --config c.yaml pretrain.max_num_steps=1
    expect 0 run 1 train --config=c.yaml pretrain.max_num_steps=1 checkpointing.resume=never
    expect 0 run 1 plan --config c.yaml --world 2 policy.train_micro_batch_size=1
    shown out.txt '1 micro x 4 accumulate x 2 dp'
    expect 0 run 1 plan ./c.yaml --config c.yaml
    expect 64 run 1 plan other.yaml --config c.yaml
    shown err.txt "two configurations are given: 'other.yaml' and --config 'c.yaml'"
    expect 64 run 1 train
    shown err.txt 'CONFIG is required'
    expect 64 run 1 plan --world 2
    # Variables that NeMo RL reads.
    NRL_NSYS_PROFILE_STEP_RANGE=2:3 NRL_NSYS_WORKER_PATTERNS='*policy*' expect 78 run 1 c.yaml
    shown err.txt 'Nsight Systems captures GPUs' 'profiling.steps=2:3' '1 error, nothing was started'
    NRL_NSYS_PROFILE_STEP_RANGE='' expect 0 run 1 c.yaml checkpointing.resume=never pretrain.max_num_steps=1
    NRL_NSYS_PROFILE_STEP_RANGE=2:3 expect 0 run 1 plan c.yaml
    ;;
  snippets) # rows of snippets.txt that are no configuration; config_tests tries the others
    config c
    expect 0 run 1 c.yaml pretrain.max_num_steps=5 checkpointing.enabled=false logger.wandb_enabled=true \
      profiling.enabled=true profiling.trace=chrome profiling.steps=4:6
    find c -name '*.json' -path '*step-4*' -exec cat {} + >profile.txt
    find c -name '*.wandb' -exec cat {} + >wandb.txt
    # The switch of a fusion changes the program of a step.
    gpt2=("$source_dir/configs/gpt2-124m.yaml" "${minimum[@]:1}" --device h100 --program 0)
    expect 0 run 1 plan "${gpt2[@]}"
    shown out.txt ' mlp_in_gelu: '
    ! grep -q ' activation: ' out.txt || fail "the activation is a kernel: $(cat out.txt)"
    expect 0 run 1 plan "${gpt2[@]}" policy.fusions.bias_activation=false
    shown out.txt ' activation: '
    ! grep -q ' mlp_in_gelu: ' out.txt || fail "a GEMM has the activation: $(cat out.txt)"
    rows=0
    while IFS='|' read -r document block kind written outcome; do
      row="$document|$block|$written"
      kind=${kind// /}
      written=${written# }
      case $kind in
        variable)
          # The documents set them together.
          expect 78 env NRL_NSYS_PROFILE_STEP_RANGE=2:3 'NRL_NSYS_WORKER_PATTERNS=*policy*,*vllm*' "${written% }" "$nrl_train" c.yaml >out.txt 2>err.txt
          shown err.txt "${outcome# refused }"
          ;;
        name | code | command)
          rest=$outcome
          while [[ $rest == *\`*\`* ]]; do
            token=${rest#*\`} token=${token%%\`*} rest=${rest#*\`*\`}
            read -ra words <<<"$token"
            if [[ $token == nrl-train\ * ]]; then
              command=()
              for word in "${words[@]:1}"; do [[ $word == -* ]] || command+=("$word"); done
              expect 0 run 1 "${command[@]}" --help
              for word in "${words[@]:1}"; do [[ $word != -* ]] || grep -qF -- "$word" out.txt || fail "$row: $token has no $word"; done
            else
              grep -qawF -- "$token" profile.txt wandb.txt || fail "$row: '$token' is in no file of a run"
            fi
          done
          ;;
        *) continue ;;
      esac
      ((rows += 1))
    done < <(grep -v '^#' "$documents/snippets.txt")
    ((rows > 25)) || fail "only $rows rows were tried"
    ;;
  *) fail "no such case: $case_name" ;;
esac
