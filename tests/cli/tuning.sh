#!/usr/bin/env bash
# Values found by measuring: tuning.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

said() {
  grep -qE -- "$2" "$1" || fail "'$2' is not in $1: $(cat "$1")"
}

case $case_name in
  tune_lr)
    corpus
    config one
    expect 0 run 1 tune lr one.yaml --from 1e-5 --to 10 --steps 60 --json one.json --html one.html
    said out.txt '^steepest  [0-9.e-]+ \(step [0-9]+\): the loss falls most'
    said out.txt '^largest   .* from which the loss rises'
    rate=$(sed -nE 's/^use       policy.optimizer.lr=([0-9.e-]+).*/\1/p' out.txt)
    # A tiny model: above 1e-4, and below the rates at which it diverges.
    awk -v rate="$rate" 'BEGIN { exit !(rate > 1e-4 && rate < 0.5) }' || fail "lr $rate"
    grep -q '"largest_lr"' one.json || fail "no choice: $(cat one.json)"
    grep -q '<svg' one.html || fail 'no curve in the page'
    # Leaves nothing of a run, and does not disturb one that holds its log directory.
    [[ ! -e one ]] || fail 'one was created'
    # Two ranks measure what one does.
    expect 0 run 2 tune lr one.yaml --from 1e-5 --to 10 --steps 60 --json two.json
    points() { tr '{' '\n' <"$1" | sed -nE 's/.*"loss":([0-9.e+-]+).*/\1/p' | head -40; }
    paste <(points one.json) <(points two.json) | awk 'NF != 2 { exit 1 } { d = $1 - $2; if (d < 0) d = -d
      if (d > 1e-4 * $1) exit 1 } END { if (NR < 40) exit 1 }' || fail 'other losses on two ranks'
    expect 79 run 1 tune lr one.yaml --from 1 --to 100 --steps 20
    said err.txt 'the loss never falls'
    expect 64 run 1 tune lr one.yaml --from 1 --to 0.1
    said err.txt '--from 1 must be below --to 0.1'
    # Prompts, which only training answers.
    printf '{"prompt": "%d=", "answer": "1"}\n' 1 2 3 4 >prompts.jsonl
    prompts=(algorithm=grpo 'policy.tokenizer={name: bytes, chat_template: none}' 'data.train={data_path: prompts.jsonl, format: prompts}'
      'reward=[exact]' policy.train_global_batch_size=4 grpo.num_prompts_per_step=2 grpo.num_generations_per_prompt=2)
    sed -e 's/^pretrain:/grpo:/' -e '/^data:/d' one.yaml >prompts.yaml
    expect 78 run 1 tune lr prompts.yaml "${prompts[@]}" --steps 20
    said err.txt 'only training generates rollouts'
    expect 0 run 1 verify prompts.yaml "${prompts[@]}" --steps 1
    ;;
  tune_kernels)
    config one
    expect 0 run 1 tune kernels one.yaml --rounds 2 --steps 2 --json kernels.json
    said out.txt '^  baseline  '
    # The choice is the fastest, and the configuration takes its key.
    best=$(sed -nE 's/^use       (kernels.isa=[a-z0-9_]+)$/\1/p' out.txt)
    [[ $best == "kernels.isa=$(awk 'NR == 2 { print $1 }' out.txt)" ]] || fail "not the fastest: $(cat out.txt)"
    expect 0 run 1 plan one.yaml "$best"
    grep -q '"measured_ms"' kernels.json || fail "no times: $(cat kernels.json)"
    expect 0 run 2 tune kernels one.yaml --rounds 1 --steps 1
    [[ $(grep -c '^use ' out.txt) -eq 1 ]] || fail "not once: $(cat out.txt)"
    [[ ! -e one ]] || fail 'one was created'
    # On a GPU the library's GEMMs beside timed ones: the simulated device stands for it.
    simulated=$(dirname "$nrl_train")/nrl-train-sim
    if [[ -x $simulated ]]; then
      expect 0 "$simulated" tune kernels one.yaml device=cuda kernels.gemm_tuning=tuned --rounds 1 --steps 1 --json gemms.json >out.txt 2>err.txt
      said out.txt '^  library  '
      said out.txt '^  timed  '
      [[ -n $(ls tuned) ]] || fail 'no choices are kept'
    fi
    ;;
  tune_layout)
    config one
    expect 0 run 2 tune layout one.yaml --measure 3 --rounds 2 --steps 1 --json layouts.json
    [[ $(grep -cE '^  (configured|.*micro [0-9]+) ' out.txt) -eq 4 ]] || fail "not four layouts: $(cat out.txt)"
    said out.txt '^use       '
    # The choice is the layout with the smallest median, and the configuration takes its keys.
    read -r -a keys <<<"$(sed -nE 's/^use       //p' out.txt | grep -v 'as it is' || true)"
    expect 0 "$nrl_train" plan one.yaml --world 2 "${keys[@]}" >out.txt 2>err.txt
    ;;
esac
