# shellcheck shell=bash
# The arguments and the run of scripts/bench-sft.sh, bench-dpo.sh and bench-grpo.sh; sourced by them after common.sh.
# Set before: usage(), objective (sft, dpo or grpo), title, known (array of all variants), variants_default (array).
# shellcheck disable=SC2154  # these, and root_dir of common.sh

rounds=3
steps=3
examples=32
micro=8
if [[ $objective == grpo ]]; then examples=512 micro=512; fi
threads=2
variants=()
shape="sort"
pythons=()
binary=
output=$root_dir/build/bench
while (($#)); do
  taken=2
  case $1 in
    --variant)
      [[ -n ${2:-} && " ${known[*]} " == *" $2 "* ]] ||
        die 64 "--variant takes one of ${known[*]}; found '${2:-}'"
      variants+=("$2")
      ;;
    --model)
      [[ $objective == grpo && ${2:-} =~ ^(sort|smollm-135m)$ ]] ||
        die 64 "--model is an option of bench-grpo.sh and takes one of sort smollm-135m; found '${2:-}'"
      shape=$2
      ;;
    --torch) take_python "$@" ;;
    *) take_option "rounds steps examples micro threads" "output" "$@" ;;
  esac
  shift "$taken"
done
output=$(realpath -m "$output")
((examples % micro == 0)) || die 64 "--examples: $examples is not a multiple of --micro, $micro"
((${#variants[@]})) || variants=("${variants_default[@]}")
((${#pythons[@]})) || mapfile -t pythons < <(torch_pythons)

cd "$root_dir" || exit
python=
for candidate in "${pythons[@]}"; do
  if versions=$(outside "$candidate" scripts/bench/tuning.py check 2>/dev/null); then
    python=$candidate
    break
  fi
done
if [[ -z $python ]]; then
  echo "skipped: no Python has trl, transformers and torch (pip install trl; --torch PYTHON)"
  exit 77
fi
[[ -n $binary ]] || build_binary
mkdir -p "$output"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONDONTWRITEBYTECODE=1

# tuning COMMAND...: its messages appear only if it fails.
tuning() {
  outside "OMP_NUM_THREADS=$threads" "$python" scripts/bench/tuning.py "$@" 2>"$work/log" ||
    { cat "$work/log" >&2; die 70 "tuning.py $* failed (see above)"; }
}

machine=$("$binary" doctor | awk '$1 == "processor" { sub(/^processor +/, ""); print }')
data=$(tuning write "$objective" "$work" "$examples" --model "$shape")
echo "$machine, $threads threads; $versions"
echo "$data"
results=$output/$objective.jsonl
: >"$results"
for ((round = 1; round <= rounds; ++round)); do
  for variant in "${variants[@]}"; do
    command=trl options=()
    if [[ $variant == packed || $variant == plain ]]; then command=nrl options=(--binary "$binary"); fi
    if [[ $objective == grpo ]]; then options+=(--examples "$examples"); fi
    tuning "$command" "$objective" "$work" --variant "$variant" --round "$round" --steps "$steps" --micro "$micro" --threads "$threads" \
      "${options[@]}" >>"$results"
    printf 'round %d, %s: median of a step %.0f ms\n' "$round" "$variant" \
      "$(tail -n 1 "$results" | sed 's/.*"step_ms": \[\([^]]*\)\].*/\1/' | tr ',' '\n' | median)"
  done
done
code=0
{
  echo "# $title"
  echo
  echo "$machine, $threads threads, $(date +%F). $versions."
  echo "$data; microbatches of $micro."
  echo "The programs in alternation; rounds: $rounds, timed steps of a round: $steps. Best: the fastest step of all rounds;"
  echo "median: over the rounds, of their median steps. nrl-train's processor time includes its start. Load of the machine at"
  echo "the end, over 1, 5 and 15 minutes: $(cut -d ' ' -f 1-3 /proc/loadavg)."
  echo
  outside "$python" scripts/bench/tuning.py table "$results" || code=70
} >"$output/$objective.md"
echo
cat "$output/$objective.md"
echo
echo "written: $output/$objective.md $results"
exit $code
