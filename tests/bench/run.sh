#!/usr/bin/env bash
# One case of the benchmarks' tests: run.sh CASE NRL_TRAIN SOURCE_DIR
set -euo pipefail
case_name=$1
nrl_train=$2
source_dir=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export TMPDIR=$work OMP_NUM_THREADS=1

fail() {
  echo "FAIL: $*" >&2
  exit 1
}
# expect CODE COMMAND...: the command must leave with this code.
expect() {
  local want=$1 got=0
  shift
  "$@" >out.txt 2>err.txt || got=$?
  ((got == want)) || {
    cat out.txt err.txt >&2
    fail "exit code $got instead of $want: $*"
  }
}
# value FILE KEY: the first value of a key.
value() { awk -v key="$2" -f "$source_dir/scripts/metrics.awk" "$1" | head -n 1; }
positive() { awk -v x="$(value "$1" "$2")" 'BEGIN { exit !(x > 0) }' || fail "$2 in $1 is not above 0"; }

tiny=(policy.model.hidden_size=32 policy.model.intermediate_size=48 policy.model.num_hidden_layers=1 policy.model.num_attention_heads=2
  policy.model.num_key_value_heads=1 policy.model.vocab_size=256 policy.train_global_batch_size=2 policy.train_micro_batch_size=1
  policy.max_total_sequence_length=16)

cat >sft.yaml <<'TEXT'
algorithm: sft
policy:
  model: {model_type: llama, vocab_size: 256, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2,
    max_position_embeddings: 16, tie_word_embeddings: true}
  train_global_batch_size: 4
  train_micro_batch_size: 2
  max_total_sequence_length: 16
  optimizer: {lr: 1.0e-3}
sft: {max_num_steps: 20}
data: {train: {data_path: nowhere.jsonl}}
TEXT

# all DEVICE: every benchmark writes rows without an error in them.
all() {
  local what
  for what in ops gemm attention; do
    expect 0 "$nrl_train" bench $what --quick --device "$1" --json $what.json
    grep -q "\"kind\":\"$1\"" $what.json || fail "$what.json does not name the device"
    [[ $(grep -c '^{"name"' $what.json) -gt 0 ]] || fail "$what.json has no rows"
    ! grep -q '"error"' $what.json || fail "$what.json has errors: $(cat err.txt)"
    positive $what.json seconds
  done
  local precision
  for precision in float32 bfloat16 float16; do
    for what in ops gemm attention; do
      expect 0 "$nrl_train" bench $what --quick --device "$1" --precision $precision --json one.json
      ! grep -q '"error"' one.json || fail "bench $what in $precision has errors: $(cat err.txt)"
    done
  done
  [[ $(grep -c '"gated":true' ops.json) -gt 10 ]] || fail "ops.json lacks kernels"
  expect 0 "$nrl_train" bench ops --quick --device "$1" --only rope --json one.json
  [[ $(grep -c '^{"name"' one.json) -lt $(grep -c '^{"name"' ops.json) ]] || fail "--only leaves nothing out"
  expect 0 "$nrl_train" bench step "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" --quick --device "$1" --json step.json
  for key in step_ms tokens_per_s planned_bytes first_step_s loss_last flops_per_token; do positive step.json $key; done
  [[ $(value step.json tokens_per_step) == 32 ]] || fail "the overrides were not used"
  expect 0 "$nrl_train" bench generate "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" --quick --device "$1" --batch 1,3 --json generate.json
  for key in prefill_tokens_per_s first_token_s decode_tokens_per_s fraction_of_bound copy_bandwidth; do positive generate.json $key; done
  [[ $(grep -c '^{"precision":"bfloat16","batch":[13],' generate.json) == 2 ]] || fail "not both batches: $(cat generate.json)"
  # Keys and values of 10 tokens more for each of two sequences more, in 1 layer of 1 head of 16 numbers of 2 bytes.
  awk -F'"bytes_per_pass":' '/bfloat16","batch":1/ { one = $2 + 0 } /bfloat16","batch":3/ { exit !($2 - one == 2 * 10 * 2 * 16 * 2) }' generate.json ||
    fail "other bytes: $(cat generate.json)"
  # Examples fill their microbatches, packed or not.
  local packing
  for packing in false true; do
    expect 0 "$nrl_train" bench step sft.yaml policy.sequence_packing.enabled=$packing --quick --device "$1" --json sft.json
    for key in step_ms tokens_per_s loss_last; do positive sft.json $key; done
    [[ $(value sft.json tokens_per_step) == 64 ]] || fail "the microbatches are not full: $(cat sft.json)"
  done
  ! compgen -G 'nrl-bench-*' >/dev/null || fail "a temporary directory was left behind"
}

# comm_groups DEVICE: every kind of group of a layout has a table of its operations.
comm_groups() {
  expect 0 mpirun -n 4 --oversubscribe "$nrl_train" bench comm "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" \
    policy.train_global_batch_size=4 policy.model.num_key_value_heads=2 distributed.tensor_parallel_size=2 --quick --device "$1" --json comm.json
  for key in seconds bus_bytes_per_second; do positive comm.json $key; done
  [[ $(grep -c '"group":"tp","groups":2,"ranks":2,"nodes":1,"op":"all_gather"' comm.json) == 4 ]] ||
    fail "rows of tp: $(cat comm.json)"
  local heading
  for heading in 'tp: 2 groups of 2 ranks, inside a node' 'cp-dp: 2 groups of 2 ranks, inside a node' \
    'tp-cp-dp: 1 group of 4 ranks, inside a node'; do
    grep -qx "$heading" out.txt || fail "no $heading: $(cat out.txt)"
  done
  [[ $(grep -c '^all_reduce .* 16.0 KiB ' out.txt) == 6 ]] || fail "not all groups are measured: $(cat out.txt)"
}

# calibrate DEVICE: ranks of layouts alone make the calls of their dry runs, and their times are a profile.
calibrate() {
  local layout
  while read -r layout; do
    # shellcheck disable=SC2086  # several keys
    expect 0 "$nrl_train" bench calibrate "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" policy.train_global_batch_size=8 \
      policy.model.num_key_value_heads=2 policy.model.num_hidden_layers=4 $layout --world 8 --quick --device "$1" --out profile.json
    for key in bytes seconds host_bandwidth; do positive profile.json $key; done
    grep -q '"op": "linear_forward"' profile.json || fail "no GEMM of $layout: $(head -c 2000 profile.json)"
    grep -q '"host_gap_s": ' profile.json || fail "no gap: $(tail -c 200 profile.json)"
  done <<'TEXT'
distributed.shard_strategy=optim
distributed.tensor_parallel_size=2 distributed.pipeline_parallel_size=4
distributed.pipeline_parallel_size=2 distributed.virtual_pipeline_size=2
distributed.context_parallel_size=2 distributed.shard_strategy=optim_grads_params
TEXT
}

# links DEVICE: operations of two ranks, and three calls beside three of them.
links() {
  expect 0 mpirun -n 2 --oversubscribe "$nrl_train" bench calibrate --links --quick --device "$1" --out links.json
  local base=cpu call operation
  [[ $1 == cpu ]] || base=h100
  grep -q "\"base\": \"$base\"" links.json || fail "no device: $(head -c 300 links.json)"
  for call in linear_forward attention_forward norm_forward; do
    for operation in all_reduce all_gather reduce_scatter; do
      tr -d ' \n' <links.json | grep -qE "\"op\":\"$call\",\"work\":\"[a-z]+\",\"comm\":\"$operation\",\"slowdown\":[0-9.]+,\"comm_slowdown\":[0-9.]+" ||
        fail "no $call beside $operation: $(cat links.json)"
    done
  done
}

case $case_name in
  overhead) # every line, in turns of one step, on one rank and on two; nothing of it stays
    printf 'a few words that are trained on %.0s' {1..400} >text.txt
    expect 0 "$nrl_train" prepare --input text.txt --tokenizer bytes --output corpus
    mkdir tmp
    export TMPDIR=$work/tmp
    # Whatever the configuration monitors is off in the blocks without.
    cat "$source_dir/configs/bench-tiny.yaml" - >watched.yaml <<'TEXT'
logger: {wandb_enabled: true, wandb: {project: p}, monitor_gpus: true, gpu_monitoring: {collection_interval: 3}}
monitoring: {interval: 5, alerting: {enabled: true, rules: ["train/loss > 100"]}, visualization: {textfile: here.prom}}
TEXT
    run=(bench overhead watched.yaml "${tiny[@]}" policy.model.vocab_size=272 data.train.data_path=corpus --quick)
    expect 0 "$nrl_train" "${run[@]}" --json overhead.json
    for line in 'blocks    2 pairs of 1 step' 'step      ' 'report    ' 'threads   ' 'once      start '; do
      grep -q "^$line" out.txt || fail "no line '$line': $(cat out.txt)"
    done
    for key in without_ms with_ms report_ms start_ms end_ms; do positive overhead.json $key; done
    expect 0 mpirun -n 2 --oversubscribe "$nrl_train" "${run[@]}"
    [[ $(grep -c '^step ' out.txt) -eq 1 ]] || fail "not once: $(cat out.txt)"
    [[ -z $(find tmp -name 'nrl-overhead-*') ]] || fail "files are left: $(ls tmp)"
    expect 64 "$nrl_train" bench overhead
    expect 64 "$nrl_train" bench step "$source_dir/configs/bench-tiny.yaml" --pairs 3
    ;;
  cpu)
    all cpu
    comm_groups cpu
    calibrate cpu
    expect 0 "$nrl_train" bench calibrate "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" distributed.pipeline_parallel_size=2 \
      distributed.pipeline_schedule=zb_h1 policy.model.num_hidden_layers=2 --world 2 --quick --device cpu --out profile.json
    [[ $(grep -c '^rank ' out.txt) == 2 ]] || fail "not both stages: $(cat out.txt)"
    expect 0 mpirun -n 2 --oversubscribe "$nrl_train" bench calibrate "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" --quick \
      --device cpu --out profile.json
    grep -qE '"spread": [0-9.e-]+' profile.json || fail "no spread of two ranks: $(tail -c 200 profile.json)"
    links cpu
    [[ $(grep -c '"op": "all_gather"' links.json) == 2 ]] || fail "no links: $(cat links.json)"
    expect 0 "$nrl_train" plan "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" --world 2 --device cpu --profile links.json
    expect 64 "$nrl_train" bench calibrate "$source_dir/configs/bench-tiny.yaml"
    expect 64 "$nrl_train" bench calibrate --out profile.json
    expect 64 "$nrl_train" bench calibrate --links --out profile.json
    expect 64 "$nrl_train" bench step "$source_dir/configs/bench-tiny.yaml" --world 2
    expect 78 "$nrl_train" bench calibrate "$source_dir/configs/bench-tiny.yaml" --world 3 --device cpu --out profile.json
    expect 0 mpirun -n 2 --oversubscribe "$nrl_train" bench comm --quick
    grep -qx '1 group of 2 ranks, inside a node' out.txt || fail "no group: $(cat out.txt)"
    expect 0 mpirun -n 2 --oversubscribe "$nrl_train" bench comm --quick --json comm.json
    [[ $(grep -c '^{"group":"","groups":1,"ranks":2,"nodes":1,"op":"all_reduce",.*"seconds":' comm.json) == 4 ]] ||
      fail "rows of all_reduce: $(cat comm.json)"
    expect 78 mpirun -n 3 --oversubscribe "$nrl_train" bench comm "$source_dir/configs/bench-tiny.yaml" --quick distributed.tensor_parallel_size=2
    expect 0 "$nrl_train" bench ops --quick --device cpu --only rope --tokens 5 --json one.json
    [[ $(value one.json tokens) == 5 ]] || fail "--tokens is not used"
    expect 64 "$nrl_train" bench gemm --tokens 5
    [[ $(grep -c '^{"precision":"float32"' generate.json) == 2 ]] || fail "not both precisions: $(cat generate.json)"
    expect 64 "$nrl_train" bench gemm --batch 2
    expect 64 "$nrl_train" bench generate
    expect 66 "$nrl_train" bench generate nowhere.yaml
    expect 0 mpirun -n 2 --oversubscribe "$nrl_train" bench step "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" --quick --roofline \
      distributed.tensor_parallel_size=2 policy.model.num_key_value_heads=2 --json two.json
    [[ $(grep -c '^roofline ' out.txt) == 1 ]] || fail "not one table: $(cat out.txt)"
    grep -qE '^layer GEMMs, forward +linear_forward 16 x 32 x 16 .* (arithmetic|memory)$' out.txt || fail "no share of a layer: $(cat out.txt)"
    awk '{ while (match($0, /"(step_s|seconds)":[0-9.e-]+/)) { split(substr($0, RSTART, RLENGTH), x, ":"); $0 = substr($0, RSTART + RLENGTH)
      if (x[1] ~ /step_s/) step = x[2]; else sum += x[2] } } END { exit !(step > 0 && sum / step > 0.9999 && sum / step < 1.0001) }' two.json ||
      fail "the rows do not add up to the step: $(cat two.json)"
    expect 64 "$nrl_train" bench gemm --roofline
    expect 64 mpirun -n 2 --oversubscribe "$nrl_train" bench step "$source_dir/configs/bench-tiny.yaml" --predict h200
    expect 64 "$nrl_train" bench step
    expect 64 "$nrl_train" bench gemm some.yaml
    expect 66 "$nrl_train" bench step nowhere.yaml
    # A prediction needs neither the GPU nor the 52 GiB that the step takes there.
    expect 0 "$nrl_train" bench step "$source_dir/configs/bench-8b-layers.yaml" --device cpu --predict h200 --json predicted.json
    grep -qE '^device +H200: estimated, not measured \(--device cpu\)$' out.txt || fail "no device: $(cat out.txt)"
    grep -qE '^part of a step +calls +GB +TFLOP +est\. ms +share +limit$' out.txt || fail "no table: $(cat out.txt)"
    for part in 'layer GEMMs, forward' 'head GEMM, wgrad' 'attention, backward' 'cross entropy' optimizer 'between kernels'; do
      grep -qE "^$part +[0-9]+ .* [0-9.]+ % +(arithmetic|memory|launches)\$" out.txt || fail "no row $part: $(cat out.txt)"
    done
    # The columns of every row end where those of the header do.
    awk '/^part of a step/ { sub(/ +limit$/, ""); at = length($0); next } /^sum/ { exit }
      at && (substr($0, at, 1) !~ /%/ || substr($0, at + 1, 3) != "   ") { print; exit 1 }' out.txt || fail "the columns are not aligned"
    for key in estimated_s estimated_mfu estimated_poor_s; do positive predicted.json $key; done
    grep -q '"measured_s":null' predicted.json || fail "a measurement without a GPU"
    expect 0 "$nrl_train" bench step "$source_dir/configs/bench-8b-layers.yaml" --device cpu --predict a100 policy.train_micro_batch_size=1
    expect 64 "$nrl_train" bench step "$source_dir/configs/bench-tiny.yaml" --predict v100
    grep -q "unknown GPU 'v100'; expected one of: h200, h100, " err.txt || fail "no names: $(cat err.txt)"
    expect 64 "$nrl_train" bench gemm --predict h200
    expect 78 "$nrl_train" bench step "$source_dir/configs/bench-tiny.yaml" policy.optimiser.lr=1
    # Where there is no GPU, the reason and 69; where there is one, it runs.
    code=0
    "$nrl_train" bench ops --quick --device cuda --only rope >out.txt 2>err.txt || code=$?
    case $code in
      0) ;;
      69) grep -q -- '--device cuda: ' err.txt || fail "no reason: $(cat err.txt)" ;;
      *) fail "exit code $code" ;;
    esac
    ;;
  objectives)
    # Steps on random tokens of every objective, with the numbers that it reads; 2 ranks; the largest microbatch.
    cat >objective.yaml <<'TEXT'
policy:
  model: {model_type: llama, vocab_size: 272, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
    num_key_value_heads: 2, max_position_embeddings: 64}
  tokenizer: {name: bytes, chat_template: none}
  train_global_batch_size: 8
  max_total_sequence_length: 32
data: {train: {data_path: nowhere.jsonl}}
TEXT
    packed=(policy.sequence_packing.enabled=true policy.sequence_packing.train_mb_tokens=64)
    losses=()
    while read -ra keys <&3; do
      for more in "" "${packed[*]}"; do
        # shellcheck disable=SC2206
        all=("${keys[@]}" $more)
        expect 0 "$nrl_train" bench step objective.yaml "${all[@]}" --quick --device cpu --json step.json
        loss=$(value step.json loss)
        [[ $loss =~ ^-?[0-9] ]] || fail "loss '$loss' of ${all[*]}"
        losses+=("$loss")
      done
      expect 0 mpirun -n 2 --oversubscribe "$nrl_train" bench step objective.yaml "${keys[@]}" --quick --device cpu
      expect 0 "$nrl_train" tune batch-size objective.yaml "${keys[@]}"
    done 3<<'TEXT'
algorithm=sft
algorithm=dpo
algorithm=rm
algorithm=grpo
algorithm=grpo loss_fn.type=gspo
algorithm=grpo loss_fn.reference_policy_kl_penalty=0.1 loss_fn.entropy_coef=0.01
algorithm=grpo data.train.format=prompts grpo.num_prompts_per_step=2 grpo.num_generations_per_prompt=4 reward=length
algorithm=distill distill.topk=8
TEXT
    # Two answers without a preference, and those of a policy that has not moved.
    [[ ${losses[2]} == 0.[67]* ]] || fail "loss of a pair: ${losses[*]}"
    ;;
  compare)
    # What the plan says of a feature is in the table: fewer bytes, and the same bytes sent.
    tiny+=(policy.train_global_batch_size=4 policy.model.num_hidden_layers=3)
    suite=$source_dir/configs/suites/claims.yaml
    ratio() { awk -v name="\"claim\":\"$1" 'index($0, name) { match($0, /"ratio":[0-9.e+-]*/); print substr($0, RSTART + 8, RLENGTH - 8) }' "$2"; }
    between() { awk -v x="$1" -v low="$2" -v high="$3" 'BEGIN { exit !(x >= low && x <= high) }' || fail "$1 is not in $2 to $3: $(cat out.txt)"; }
    expect 0 "$nrl_train" bench compare "$suite" "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" --quick --device cpu --json one.json
    grep -qx '==== zero: skipped: needs 2 ranks; there is 1' out.txt || fail "not skipped: $(cat out.txt)"
    [[ $(grep -c '^==== ' out.txt) == $(grep -c '^  - name:' "$suite") ]] || fail "not all comparisons: $(cat out.txt)"
    # A quick run judges bytes, but no times.
    [[ $(grep -c '^claim .*; here .* memory; held$' out.txt) -ge 3 ]] || fail "not judged: $(cat out.txt)"
    ! grep -qE '^claim .*(time|speed); (held|missed|smaller|larger)' out.txt || fail "a time of a quick run is judged: $(cat out.txt)"
    between "$(ratio 'gradient checkpointing saves memory' one.json)" 0.1 0.999
    between "$(ratio 'offloading the optimizer' one.json)" 0.1 0.999
    between "$(ratio 'offloading activations' one.json)" 0.1 1
    grep -qE '^activations +moves [0-9.]+ GB to the host at [0-9.]+ GB/s, [0-9.]+ GB back .* ms exposed \(0\.0 % hidden\)$' out.txt ||
      fail "no copies: $(cat out.txt)"
    positive one.json to_host_ms
    between "$(ratio 'fewer bits of optimizer state' one.json)" 0.1 0.9
    grep -q '"name":"blockwise","refused":"policy.model' one.json || fail "no reason: $(cat one.json)"
    # A variant that does not suit the device is refused also where that was not named.
    expect 0 "$nrl_train" bench compare "$suite" "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" --quick --only graph \
      policy.scheduler.lr_warmup_iters=100
    grep -q 'CUDA graph.* refused: policy.cuda_graph: true needs a GPU\|^CUDA graph  *[0-9]' out.txt || fail "graph: $(cat out.txt)"
    # --config names the configuration as well.
    expect 0 mpirun -n 2 --oversubscribe "$nrl_train" bench compare "$suite" "${tiny[@]}" --config "$source_dir/configs/bench-tiny.yaml" \
      --only zero --quick --device cpu --json two.json
    [[ $(grep -c '^==== ' out.txt) == 1 ]] || fail "--only leaves nothing out: $(cat out.txt)"
    between "$(ratio 'a distributed optimizer divides' two.json)" 0.4 0.6
    between "$(ratio 'a distributed optimizer sends' two.json)" 0.99 1.01
    # The page has the comparisons of both launches, each once.
    expect 0 "$nrl_train" bench compare "$suite" "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" --quick --device cpu \
      --only recompute --json three.json --page page.md --with two.json --with one.json
    grep -q '^| optim | ' page.md || fail "no row: $(cat page.md)"
    [[ $(grep -c '^## ' page.md) == $(grep -c '^  - name:' "$suite") ]] || fail "not every comparison: $(cat page.md)"
    grep -q '^| mixed precision saves memory: .* | held |$\|^| mixed precision saves memory: .* | larger |$' page.md ||
      fail "no verdict: $(cat page.md)"
    grep -q 'not measurable on a CPU |$' page.md || fail "no reason: $(cat page.md)"
    # Every variant is a series of a history.
    for commit in one two; do
      expect 0 "$nrl_train" bench compare "$suite" "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" --quick --device cpu \
        --only recompute --history history.jsonl --commit $commit
    done
    variants=$(grep -c '"metric":"planned_bytes".*"commit":"two"' history.jsonl)
    ((variants >= 2)) || fail "variants: $(cat history.jsonl)"
    [[ $(grep -c '"metric":"step_ms".*"commit":"two"' history.jsonl) == "$variants" ]] || fail "times: $(cat history.jsonl)"
    expect 0 "$nrl_train" report --history history.jsonl
    [[ $(grep -c '^step_ms of .*claims.yaml: recompute, ' out.txt) == "$variants" ]] || fail "series: $(cat out.txt)"
    grep -q '2 entries, last .*(two, ' out.txt || fail "entries: $(cat out.txt)"
    expect 65 "$nrl_train" bench compare "$suite" "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" --quick --device cpu \
      --only recompute --json three.json --page other.md --with page.md
    [[ ! -e other.md ]] || fail 'a page of damaged results'
    expect 64 "$nrl_train" bench compare "$suite" --page page.md
    # A suite of one's own, with its base configuration; a missed promise has an exit code of its own on all ranks.
    cp "$source_dir/configs/bench-tiny.yaml" base.yaml
    mkdir suites
    cat >suites/own.yaml <<'TEXT'
config: ../base.yaml
comparisons:
  - name: dtype
    variants: [{name: fp32, set: {policy.precision: float32}}, {name: bf16, set: {policy.precision: bfloat16}}]
    promises:
      - {claim: activations halve, source: us, promised: half, measure: activation_bytes, variant: bf16, at_most: 0.7}
      - {claim: and grow back, source: us, promised: double, measure: activation_bytes, variant: fp32, than: bf16, at_least: 1.5}
      - {claim: not judged here, source: us, promised: nothing, measure: activation_bytes, variant: bf16, at_most: 0, device: cuda}
TEXT
    expect 0 "$nrl_train" bench compare suites/own.yaml "${tiny[@]}" --quick --device cpu
    sed 's/at_most: 0.7/high: 0.1/; s/at_least: 1.5/low: 5/' suites/own.yaml >suites/range.yaml
    expect 0 "$nrl_train" bench compare suites/range.yaml "${tiny[@]}" --quick --device cpu
    grep -q '^claim     activations halve: .*; larger$' out.txt || fail "not larger: $(cat out.txt)"
    grep -q '^claim     and grow back: .*; smaller$' out.txt || fail "not smaller: $(cat out.txt)"
    expect 0 "$nrl_train" bench compare suites/own.yaml "${tiny[@]}" --quick --device cpu
    grep -q '^claim     activations halve: half (us); here -.* % memory; held$' out.txt || fail "not met: $(cat out.txt)"
    grep -q '^claim     and grow back: double (us); here +.* % memory; held$' out.txt || fail "no ratio: $(cat out.txt)"
    grep -q '^claim     not judged here: nothing (us); here -[0-9.]* % memory; not measurable on a CPU$' out.txt || fail "judged: $(cat out.txt)"
    sed 's/at_most: 0.7/at_most: 0.1/' suites/own.yaml >suites/missed.yaml
    expect 70 mpirun -n 2 --oversubscribe "$nrl_train" bench compare suites/missed.yaml "${tiny[@]}" --quick --device cpu --json missed.json
    grep -qE 'dtype, bf16: activations halve: the ratio is 0\.[0-9]+; missed, at most 0\.1$' err.txt || fail "no failure: $(cat err.txt)"
    grep -q '"verdict":"missed, at most 0.1"' missed.json || fail "no verdict: $(cat missed.json)"
    sed 's/name: bf16/nome: bf16/' suites/own.yaml >suites/wrong.yaml
    expect 78 mpirun -n 2 --oversubscribe "$nrl_train" bench compare suites/wrong.yaml --quick
    grep -q -- '--> suites/wrong.yaml:4:65$' err.txt || fail "no position: $(cat err.txt)"
    [[ $(grep -c "^error: unknown key 'nome'" err.txt) == 1 ]] || fail "not one message: $(cat err.txt)"
    sed 1d suites/own.yaml >suites/open.yaml
    expect 64 mpirun -n 2 --oversubscribe "$nrl_train" bench compare suites/open.yaml --quick
    [[ $(grep -c "suites/open.yaml names no configuration" err.txt) == 1 ]] || fail "not one message: $(cat err.txt)"
    expect 66 "$nrl_train" bench compare suites/nowhere.yaml
    expect 64 "$nrl_train" bench compare
    expect 64 "$nrl_train" bench compare "$suite" --predict h200
    expect 78 "$nrl_train" bench compare "$suite" "$source_dir/configs/bench-tiny.yaml" policy.optimiser.lr=1
    ;;
  sim)
    all cuda
    comm_groups cuda
    calibrate cuda
    links cuda
    grep -q '"difference":{"out":0' attention.json || fail "bench attention compares nothing"
    grep -q '"forward_fused":{"seconds":.*"backward_separate":{"seconds":' gemm.json || fail "bench gemm times no GELU"
    # A measurement has the prediction beside it, also when the timed steps are graphs.
    for graph in false true; do
      expect 0 "$nrl_train" bench step "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" policy.cuda_graph=$graph --quick \
        --predict h200 --json predicted.json
      grep -qE '^part of a step .* est\. ms +share +measured ms +ratio +limit$' out.txt || fail "no table: $(cat out.txt)"
      for part in 'layer GEMMs, forward' 'head GEMM, dgrad' 'attention, forward' 'norms, backward' optimizer; do
        awk -v part="$part" 'index($0, part) == 1 { found = $(NF - 2) > 0 } END { exit !found }' out.txt ||
          fail "$part was not measured: $(cat out.txt)"
      done
      grep -qE '^step +[0-9.]+ ms \(median of 2\)$' out.txt || fail "no measurement: $(cat out.txt)"
      positive predicted.json measured_s
    done
    expect 64 "$nrl_train" bench step "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" --quick --roofline
    grep -q -- "--roofline measures kernels on a CPU" err.txt || fail "no reason: $(cat err.txt)"
    # A promise for a GPU is judged on one.
    printf '%s\n' 'comparisons:' '  - name: a' '    variants: [{name: b}, {name: c, set: {policy.precision: float32}}]' '    promises:' \
      '      - {claim: d, source: e, promised: f, measure: planned_bytes, variant: c, at_least: 0.1, device: cuda}' >suite.yaml
    expect 0 "$nrl_train" bench compare suite.yaml "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" --quick
    grep -q '^claim .* memory; held$' out.txt || fail "not judged: $(cat out.txt)"
    # Copies of offloaded activations have device times, except in graphs.
    for graph in false true; do
      expect 0 "$nrl_train" bench step "$source_dir/configs/bench-tiny.yaml" "${tiny[@]}" policy.model.num_hidden_layers=3 --quick \
        policy.offload_activations=true policy.cuda_graph=$graph --json offload.json
      positive offload.json to_host_bytes
      if [[ $graph == true ]]; then
        grep -q '^offload .* not timed in a CUDA graph$' out.txt || fail "no bytes: $(cat out.txt)"
      else
        grep -qE '^offload .* ms exposed \([0-9.]+ % hidden\)$' out.txt || fail "no times: $(cat out.txt)"
        positive offload.json from_host_ms
      fi
    done
    NRL_SIM_DEVICES=0 expect 0 "$nrl_train" bench step "$source_dir/configs/bench-tiny.yaml" --predict h100
    grep -q '^device  *H100: estimated, not measured' out.txt || fail "measured without a device: $(cat out.txt)"
    NRL_SIM_DEVICES=0 expect 69 "$nrl_train" bench ops --quick --device cuda
    NRL_SIM_DEVICES=0 expect 0 "$nrl_train" bench ops --quick --only rope
    ;;
  losses)
    compare() { awk -v tolerance="$1" -f "$source_dir/scripts/compare-losses.awk" a b; }
    row() { printf '{"step":%s,"time":1.5,"loss":%s,"grad_norm":%s,"lr":1}\n' "$@"; }
    { row 1 8.5 1.25; row 2 8.25 1.5; } >a
    cp a b
    expect 0 compare 0
    echo '{"step":2,"val_loss":8.5}' >>b # not a step
    expect 0 compare 0
    { row 1 8.5 1.25; row 2 8.2501 1.5; } >b
    expect 1 compare 0
    expect 1 compare 1e-6
    expect 0 compare 1e-4
    grep -q 'step 2' out.txt || fail "the step is not named"
    { row 1 8.5 1.25; row 2 8.25 1.6; } >b
    expect 1 compare 1e-2
    { row 1 8.5 1.25; row 2 null 1.5; } >b
    expect 1 compare 1
    row 1 8.5 1.25 >b
    expect 1 compare 1
    { row 1 8.5 1.25; row 3 8.25 1.5; } >b
    expect 1 compare 1
    : >b
    expect 1 compare 1
    ;;
  *) fail "no case $case_name" ;;
esac
