#!/usr/bin/env bash
# Plans of runs: plan.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

said() {
  grep -qE -- "$2" "$1" || fail "'$2' is not in $1: $(cat "$1")"
}

case $case_name in
  plan_pictures) # a trace, a page and a diagram of the predicted step
    config plan
    stages=(plan.yaml --world 2 --device h100 distributed.pipeline_parallel_size=2 policy.train_micro_batch_size=1)
    expect 0 run 1 plan "${stages[@]}" --trace trace.json --html page.html --diagram
    said out.txt '^wrote    trace\.json: [0-9,]+ events'
    said out.txt '^wrote    page\.html$'
    [[ $(grep -c '^stage [01] ' out.txt) -eq 2 ]] || fail "not a row for each stage: $(cat out.txt)"
    sed -n '/^stage 0/,/0-9: forward/p' out.txt | awk 'length > 100 { exit 1 }' || fail "long lines: $(cat out.txt)"
    [[ $(head -c 1 trace.json) == '{' && $(tail -n 1 trace.json) == ']}' ]] || fail 'not a whole trace'
    # 8 microbatches, forward and backward, on 2 stages.
    [[ $(grep -cE '<rect class="[fbw]0( path)?" x=' page.html) -eq 32 ]] || fail 'other passes on the page'
    [[ $(grep -c ' path" x=' page.html) -ge 16 ]] || fail 'no longest path on the page'
    grep -q '"watts"' trace.json || fail 'no power in the trace'
    expect 0 run 1 plan "${stages[@]}" --trace other.json --json -
    head -c 1 out.txt | grep -q '{' || fail "standard output is not JSON alone: $(cat out.txt)"
    cmp trace.json other.json || fail 'two plans have different traces'
    expect 0 run 1 plan plan.yaml --world 4 --device h100 --search 3 --html search.html
    said search.html '<h2>Layouts</h2>'
    said search.html '<path class="front"'
    # With the kernels of another trainer the search, its page and a plan of the first layout have the same step.
    expect 0 run 1 plan plan.yaml --world 4 --device h100 --trainer pytorch --search 1 --html trainer.html --json trainer.json
    said out.txt '^search .*, with the kernels of pytorch$'
    said trainer.html '4 ranks, h100, kernels of pytorch: '
    said trainer.json '"trainer": ?"pytorch"'
    ms=$(grep -A2 '^search' out.txt | sed -nE '3s/.* [MG]iB +([0-9]+).*/\1/p')
    [[ -n $ms ]] || fail "no step: $(cat out.txt)"
    said trainer.html "<b>${ms}[0-9.]* ms</b>per step"
    # Refusals name the option and leave no file.
    for other in "--search 2" "--program 0" "--what-if device=h200"; do
      # shellcheck disable=SC2086
      expect 64 run 1 plan "${stages[@]}" --trace no.json $other
      said err.txt "^error: --trace is of the step of one plan. Fix: leave out ${other%% *}"
      # shellcheck disable=SC2086
      [[ $other == --search* ]] || expect 64 run 1 plan "${stages[@]}" --html no.html $other
      said err.txt "leave out ${other%% *}"
    done
    expect 64 run 1 plan "${stages[@]}" --html no.html --search 2 --expert-load 2
    said err.txt 'leave out --expert-load'
    expect 64 run 1 plan "${stages[@]}" --diagram --search 2
    said err.txt '--diagram is of the step of one plan'
    run 1 plan plan.yaml device=cuda || true
    if grep -q '^estimate none' out.txt; then
      for option in "--trace no.json" "--html no.html" "--diagram"; do
        # shellcheck disable=SC2086
        expect 64 run 1 plan plan.yaml device=cuda $option
        said err.txt "^error: ${option%% *} needs an estimate: .* Fix: --device with one of"
      done
    fi
    for option in --trace --html; do
      expect 73 run 1 plan "${stages[@]}" $option missing/no.json
      [[ $(grep -c '^error' err.txt) -eq 1 ]] || fail "not one error: $(cat err.txt)"
      said err.txt 'missing/no\.json'
    done
    [[ -z $(find . -name 'no.*') && ! -e missing ]] || fail 'refused files were written'
    ;;
  plan_objective) # the search by time, price and energy, and with measured rates
    config plan
    layouts=(plan.yaml --world 4 --device h100 --search 2)
    expect 64 run 1 plan "${layouts[@]}" --objective cost
    said err.txt '^error: --objective cost.*cluster\.cost'
    expect 64 run 1 plan "${layouts[@]}" --objective speed
    said err.txt 'speed'
    expect 64 run 1 plan plan.yaml --world 4 --device h100 --objective energy
    said err.txt '--search'
    # Without a number of layouts the configuration comes first.
    expect 64 run 1 plan --search plan.yaml --world 4 --device h100
    said err.txt "--search: 'plan\.yaml'.*--search 10"
    expect 0 run 1 plan plan.yaml --world 4 --device h100 --search --json time.json
    [[ $(grep -c "\"step_s\"" time.json) -ge 10 ]] || fail "not ten layouts: $(cat time.json)"
    expect 0 run 1 plan "${layouts[@]}" --json time.json
    for objective in "cost cluster.cost.rank_hour=2" energy; do
      # shellcheck disable=SC2086
      expect 0 run 1 plan "${layouts[@]}" --json other.json --objective $objective
      said other.json "\"objective\": *\"${objective%% *}\""
    done
    # A device of half the rates needs more time in every layout.
    printf '{"device": {"base": "h100", "copy": 1e12, "gemm": 0.3}}' >slow.json
    expect 0 run 1 plan "${layouts[@]}" --profile slow.json --json slow-layouts.json
    first() { sed -nE 's/.*"step_s": *([0-9.e+-]+).*/\1/p' "$1" | head -n 1; }
    awk -v fast="$(first time.json)" -v slow="$(first slow-layouts.json)" 'BEGIN { exit !(slow > 1.05 * fast && fast > 0) }' ||
      fail "a profile changes no search: $(first time.json) and $(first slow-layouts.json) s"
    printf '{"device": {"base": "a100"}}' >other.json
    expect 64 run 1 plan "${layouts[@]}" --profile other.json
    said err.txt 'is of a100, but the plan is for h100'
    ;;
  plan_predicted) # a run beside its estimate, and the estimate with what the run measured
    corpus
    config run
    recorded=(profiling.enabled=true 'profiling.steps="5:8"' profiling.trace=chrome)
    expect 0 run 2 train run.yaml "${recorded[@]}" distributed.shard_strategy=optim
    expect 0 run 1 report run/logs --predicted --profile-out profile.json
    said out.txt '^estimate of 2 ranks on cpu, in ms \(kernels assumed, links assumed\)$'
    for part in step 'GEMMs, rank 0' 'exposed communication' computation update 'layers and data' host; do
      said out.txt "^$part +[0-9.]+ +[0-9.]+ +[0-9.-]+  "
    done
    said out.txt '^wrote profile.json: [0-9]+ times of calls'
    sed -nE 's/^memory of a rank: ([0-9.]+) MiB planned, ([0-9.]+) MiB allocated$/\1 \2/p' out.txt | awk '$1 != $2 { exit 1 } END { exit NR != 1 }' ||
      fail "other memory: $(cat out.txt)"
    # With the run's own rates its calls take the time that they took.
    expect 0 run 1 report run/logs --predicted --profile profile.json
    said out.txt '\(kernels profile,'
    awk '$1 == "computation" || $1 == "update" { estimated += $2; measured += $3 }
      $1 == "host" && ($4 < 0.95 || $4 > 1.05) { exit 1 }
      END { exit !(measured > 0 && estimated > 0.95 * measured && estimated < 1.05 * measured) }' out.txt ||
      fail "the calls do not take the time that they took: $(cat out.txt)"
    # Other plans take the profile, too.
    expect 0 run 1 plan run.yaml --world 4 --device cpu --profile profile.json
    said out.txt '^estimate .*\(kernels profile,'
    # A predicted trace has the operations of the recorded one, as often.
    operations() { sed -nE "/\"cat\": \"$1\"/ s/.*\"name\": \"([a-z0-9_]+)\".*/\\1/p" "$2" | LC_ALL=C sort | uniq -c; }
    expect 0 run 1 plan run.yaml --world 2 --device cpu distributed.shard_strategy=optim --trace predicted.json
    operations op predicted.json >predicted.txt
    last=$(find run/logs/profile -name 'rank-0*.json' | LC_ALL=C sort | tail -1)
    operations kernel "$last" >recorded.txt
    [[ $(wc -l <recorded.txt) -gt 10 ]] || fail "no operations in $last"
    steps=$(grep -c '"name": "ProfilerStep#' "$last")
    awk -v steps="$steps" '{ print $1 * steps, $2 }' predicted.txt | diff - <(awk '{ print $1, $2 }' recorded.txt) ||
      fail "the predicted trace has other operations than $steps recorded steps"
    # A run without a window is compared, but gives no rates.
    expect 0 run 1 train run.yaml logger.log_dir=plain checkpointing.resume=never checkpointing.checkpoint_dir=plain
    expect 0 run 1 report plain --predicted
    said out.txt '^step '
    expect 66 run 1 report plain --predicted --profile-out no.json
    said err.txt 'no window of recorded steps.* Fix: train with profiling.enabled=true'
    expect 64 run 1 report plain run/logs --predicted
    said err.txt 'one run'
    expect 64 run 1 report plain --predicted --html no.html
    said err.txt 'leave out --html'
    expect 64 run 1 report plain --profile-out no.json
    said err.txt '--profile-out is for --predicted'
    rm plain/memory.json
    expect 66 run 1 report plain --predicted
    said err.txt 'it has no memory.json'
    [[ ! -e no.json && ! -e no.html ]] || fail 'refused files were written'
    ;;
  *) fail "no such case: $case_name" ;;
esac
