#!/usr/bin/env bash
# Benchmarks fine-tuning on this machine's CPU in alternation with TRL: a Llama of 17 million parameters, a chat file whose
# lengths are log-normal, fp32, the same examples in every step. Writes build/bench/sft.md (the table) and sft.jsonl (all
# runs). Exits with 77 without trl, transformers and torch, with 70 if the losses of the programs differ.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench-sft.sh [--rounds N] [--steps N] [--examples N] [--micro N] [--threads N] [--variant NAME]...
                            [--torch PYTHON] [--binary PATH] [--output DIR]
  --rounds N      rounds of all programs (3)
  --steps N       timed steps per round (3), after a warm-up step
  --examples N    examples of a step, a multiple of --micro (32)
  --micro N       examples of a microbatch; packed: N x 512 tokens (8)
  --threads N     threads of each program (2)
  --variant NAME  packed, plain: nrl-train with and without packing; padded: TRL as it comes, but without gradient
                  checkpointing; padding-free: TRL without padding, attention over the whole microbatch; single: TRL with one
                  example per microbatch (default: all but single)
  --torch PYTHON  a Python with trl, transformers and torch (default: $NRL_PYTHON, python3, /usr/bin/python3)
  --binary PATH   nrl-train to measure (default: builds build/cpu/bin/nrl-train)
  --output DIR    directory for sft.md and sft.jsonl (build/bench)
TEXT
}

rounds=3
steps=3
examples=32
micro=8
threads=2
variants=()
pythons=()
binary=
output=build/bench
while (($#)); do
  case $1 in
    --rounds | --steps | --examples | --micro | --threads)
      take_number "$@"
      shift
      ;;
    --variant)
      [[ ${2:-} =~ ^(packed|plain|padded|padding-free|single)$ ]] ||
        die 64 "--variant takes packed, plain, padded, padding-free or single; found '${2:-}'"
      variants+=("$2")
      shift
      ;;
    --torch)
      take_python "$@"
      shift
      ;;
    --binary)
      take_program "$@"
      shift
      ;;
    --output)
      take_path "$@"
      output=$(realpath -m "$output")
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      exit 64
      ;;
  esac
  shift
done
((examples % micro == 0)) || die 64 "--examples: $examples is not a multiple of --micro, $micro"
((${#variants[@]})) || variants=(packed plain padded padding-free)
((${#pythons[@]})) || mapfile -t pythons < <(torch_pythons)

cd "$root_dir"
python=
for candidate in "${pythons[@]}"; do
  if versions=$(outside "$candidate" scripts/bench/sft.py check 2>/dev/null); then
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

# sft COMMAND...: its messages appear only if it fails.
sft() {
  outside "OMP_NUM_THREADS=$threads" "$python" scripts/bench/sft.py "$@" 2>"$work/log" ||
    { cat "$work/log" >&2; die 70 "sft.py $* failed (see above)"; }
}

machine=$("$binary" doctor | awk '$1 == "processor" { sub(/^processor +/, ""); print }')
data=$(sft write "$work" "$examples")
echo "$machine, $threads threads; $versions"
echo "$data"
results=$output/sft.jsonl
: >"$results"
for ((round = 1; round <= rounds; ++round)); do
  for variant in "${variants[@]}"; do
    command=trl options=()
    if [[ $variant == packed || $variant == plain ]]; then command=nrl options=(--binary "$binary"); fi
    sft "$command" "$work" --variant "$variant" --round "$round" --steps "$steps" --micro "$micro" --threads "$threads" \
      "${options[@]}" >>"$results"
    printf 'round %d, %s: median of a step %.0f ms\n' "$round" "$variant" \
      "$(tail -n 1 "$results" | sed 's/.*"step_ms": \[\([^]]*\)\].*/\1/' | tr ',' '\n' | median)"
  done
done
code=0
{
  echo "# Fine-tuning on the CPU"
  echo
  echo "$machine, $threads threads, $(date +%F). $versions."
  echo "$data; microbatches of $micro."
  echo "The programs in alternation; rounds: $rounds, timed steps of a round: $steps. Best: the fastest step of all rounds;"
  echo "median: over the rounds, of their median steps. nrl-train's processor time includes its start. Load of the machine at"
  echo "the end, over 1, 5 and 15 minutes: $(cut -d ' ' -f 1-3 /proc/loadavg)."
  echo
  outside "$python" scripts/bench/sft.py table "$results" || code=70
} >"$output/sft.md"
echo
cat "$output/sft.md"
echo
echo "written: $output/sft.md $results"
exit $code
