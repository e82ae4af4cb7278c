#!/usr/bin/env bash
# One supervised run through many faults of many kinds, beside the same run without: checks that no step is lost or
# changed, that each failure names its cause, and that nothing is left. Prints a score.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: tests/soak/soak.sh [--failures N] [--seed S] [--one-host] [--keep DIR] --binary NRL_TRAIN
  --failures N   faults that end an attempt (20); between two of them are up to three that must change nothing
  --seed S       which faults, on which ranks, in which steps (1)
  --one-host     4 ranks on this host; default: 2 hosts in namespaces of 2 ranks, which needs root
  --keep DIR     keep the files of the run there
Exits with 1 if a check fails, and with 77 where hosts cannot be made.
TEXT
}

failures=20 seed=1 hosts=2 keep='' binary=''
while (($#)); do
  case $1 in
    --failures) failures=$2 && shift ;;
    --seed) seed=$2 && shift ;;
    --one-host) hosts=1 ;;
    --keep) keep=$2 && shift ;;
    --binary) binary=$(realpath "$2") && shift ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && exit 64 ;;
  esac
  shift
done
[[ -x $binary && $failures =~ ^[1-9][0-9]*$ && $seed =~ ^[0-9]+$ ]] || { usage >&2 && exit 64; }
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
# shellcheck source=../cli/common.sh
source "$here/../cli/common.sh" soak "$binary" "$(realpath "$here/../..")"
trap 'jobs -p | xargs -r kill 2>/dev/null || true; [[ -z $keep ]] || cp -r "$work/." "$keep"; rm -rf "$work"' EXIT
[[ -z $keep ]] || mkdir -p "$keep"

# ---- What happens when: a line "ATTEMPT KIND RANK STEP" for each fault, the one that ends the attempt last ----
awk -v seed="$seed" -v failures="$failures" '
  BEGIN {
    srand(seed)
    ends = split("kill@computing kill@data kill@checkpoint segv@computing abort@computing stop@computing stop@data " \
      "hang@computing hang@data hang@checkpoint launcher supervisor cut", end, " ")
    mild = split("io-write-ENOSPC io-write-EIO io-fsync-EIO io-rename-EROFS io-create-EACCES io-delay slow pause blink save", harmless, " ")
    step = 0
    for (attempt = 1; attempt <= failures; ++attempt) {
      # Every kind once, then at random.
      kind = attempt <= ends ? end[attempt] : end[int(rand() * ends) + 1]
      last = step + 12 + int(rand() * 8)
      if (kind ~ /checkpoint/) last -= last % 5
      for (n = int(rand() * 4); n > 0; --n) {
        at = step + 2 + int(rand() * (last - step - 3))
        mild_kind = harmless[++used <= mild ? used : int(rand() * mild) + 1]
        if (mild_kind !~ /^io-/ || !(attempt in io)) print attempt, mild_kind, mild_kind ~ /^io-/ ? 0 : int(rand() * 4), at
        if (mild_kind ~ /^io-/) io[attempt] = 1  # three failed saves in a row would end the run
      }
      print attempt, kind, kind == "cut" ? 2 : int(rand() * 4), last
      # Ranks that have lost their launcher go on for some seconds.
      step = last + (kind == "launcher" ? 120 : 0)
    }
    print failures + 1, "end", 0, step + 20
  }' >schedule
steps=$(awk '$2 == "end" { print $4 }' schedule)
faults=$(awk '
  BEGIN { text = "slow:all@step=1:seconds=0.02,steps=1000000,attempt=any" }
  $2 ~ /@/ {
    split($2, part, "@")
    text = text "; " part[1] ":rank=" $3 "@step=" $4 ":" (part[2] == "computing" ? "" : "phase=" part[2] ",") "attempt=" $1
  }
  $2 == "slow" { text = text "; slow:rank=" $3 "@step=" $4 ":seconds=0.2,steps=3,attempt=" $1 }
  $2 == "io-delay" { text = text "; io:rank=0@op=fsync#4:delay=1,attempt=" $1 }
  $2 ~ /^io-.*-E/ { split($2, part, "-"); text = text "; io:rank=0@op=" part[2] "#9:errno=" part[3] ",attempt=" $1 }
  END { print text }' schedule)
external() { awk -v attempt="$1" '$1 == attempt && $2 ~ /^(launcher|supervisor|cut|pause|blink|save)$/ { print $2, $3, $4 }' schedule | sort -n -k 3; }

corpus
settings=("pretrain.max_num_steps=$steps" "policy.scheduler.lr_decay_iters=$steps" checkpointing.save_period=5
  reliability.network_timeout_seconds=4 reliability.heartbeat_timeout_seconds=2 reliability.step_timeout_seconds=4)
on_hosts() { # OPTIONS... PROGRAM ARGS...
  if ((hosts == 1)); then "$@"; else "$source_dir/scripts/multihost.sh" --hosts 2,2 "$@"; fi
}
config plain
code=0
if ((hosts == 1)); then run 4 plain.yaml "${settings[@]}" || code=$?; else on_hosts "$nrl_train" plain.yaml "${settings[@]}" >out.txt 2>err.txt || code=$?; fi
((code == 0)) || { cat out.txt err.txt >&2 && exit "$code"; }

# ---- The run ----
config run
pid_of_rank() { # processes of a rank, outside of the namespaces
  local pid
  for pid in $(processes "^$nrl_train run.yaml"); do
    if tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qx "OMPI_COMM_WORLD_RANK=$1"; then echo "$pid"; fi
  done
}
# The last step of this attempt; 0 before the first.
now_at() { awk '/ launch: attempt [0-9]+ starts/ { at = 0 } $3 == "step" { split($4, part, "/"); at = part[1] } END { print at + 0 }' lines.txt; }
attempt_now() { sed -nE 's/^[0-9.]+ launch: attempt ([0-9]+) starts.*/\1/p' lines.txt | tail -n 1; }
# Lines with their time.
stamp() { while IFS= read -r line; do printf '%s %s\n' "$EPOCHREALTIME" "$line"; done; }

start_supervisor() {
  if ((hosts == 1)); then
    NRL_FAULTS=$faults "$nrl_train" launch --max-restarts 1000 --ranks 4 -- run.yaml "${settings[@]}" > >(stamp >>lines.txt) 2>>err.txt &
  else
    rm -f cable
    NRL_FAULTS=$faults "$source_dir/scripts/multihost.sh" --hosts 2,2 --cut "node1,$work/cable" --supervise "$nrl_train" launch \
      --max-restarts 1000 --hosts '{hostfile}' -- run.yaml "${settings[@]}" > >(stamp >>lines.txt) 2>>err.txt &
  fi
  runner=$!
}
# Waits until the attempt has reached the step; false when it has ended.
reached() { # ATTEMPT STEP
  until [[ $(attempt_now) == "$1" && $(now_at) -ge $2 ]]; do
    if [[ $(attempt_now) -gt $1 ]] || ! kill -0 "$runner" 2>/dev/null; then return 1; fi
    sleep 0.05
  done
}
: >lines.txt
: >err.txt
start_supervisor
began=$EPOCHSECONDS
for ((attempt = 1; attempt <= failures + 1; ++attempt)); do
  until [[ $(attempt_now) == "$attempt" ]]; do
    kill -0 "$runner" 2>/dev/null || break 2
    sleep 0.05
  done
  while read -r kind rank step; do
    reached "$attempt" "$((step - 1))" || break
    echo "$EPOCHREALTIME event $attempt $kind" >>lines.txt
    case $kind in
      save) touch run/logs/save ;;
      pause)
        for pid in $(pid_of_rank "$rank" || true); do
          if kill -STOP "$pid"; then sleep 0.7 && kill -CONT "$pid"; fi
        done
        ;;
      blink | cut)
        ((hosts > 1)) || continue
        touch cable
        # A lost node is looked at again once its cable is in.
        if [[ $kind == blink ]]; then sleep 1; else sleep 6; fi
        rm cable
        ;;
      launcher) processes "mpirun .*$nrl_train run.yaml" | xargs -r kill -KILL || true ;;
      supervisor)
        processes "^$nrl_train launch" | xargs -r kill -KILL || true
        wait "$runner" || true
        start_supervisor
        ;;
    esac
  done < <(external "$attempt")
done
code=0
wait "$runner" || code=$?
took=$((EPOCHSECONDS - began))

# ---- The score ----
bad=0
wrong() { echo "WRONG: $*" && bad=$((bad + 1)); }
((code == 0)) || { wrong "the supervisor left with $code" && tail -n 20 lines.txt err.txt; }
(same plain/logs/metrics.jsonl run/logs/metrics.jsonl 0) || wrong "losses differ"
cmp plain/checkpoints/step-"$steps"/model.safetensors run/checkpoints/step-"$steps"/model.safetensors || wrong "weights differ"
for path in run/checkpoints/step-*; do
  "$nrl_train" checkpoint verify "$path" >verify.txt 2>&1 || wrong "$path: $(cat verify.txt)"
done
# Kind and rank of each failure.
cat run/logs/failures.jsonl run/logs/failure.json 2>/dev/null | tr -d '\n' | sed 's/}{/}\n{/g' >failed.txt || true
awk '{ last[$1] = $2 " " $3 " " $4 } END { for (a in last) print a, last[a] }' schedule | sort -n >fatal
named=0 counted=0
while read -r attempt kind rank step; do
  [[ $kind != end ]] || continue
  ((hosts > 1)) || [[ $kind != cut ]] || continue
  record=$(grep -E "\"attempt\": *${attempt}[,}]" failed.txt | tail -n 1 || true)
  case $kind in
    kill@* | segv@* | abort@*) want='rank_(killed|exited)' ;;
    stop@*) want=rank_stopped ;;
    hang@*) want=rank_hung ;;
    cut) want='(node_lost|network)' ;;
    *) continue ;; # launchers and supervisors: the ranks may not live to write a record
  esac
  counted=$((counted + 1))
  if grep -qE "\"kind\": *\"$want\"" <<<"$record" && { [[ $kind == cut ]] || grep -qE "\"rank\": *${rank}[,}]" <<<"$record"; }; then
    named=$((named + 1))
  else
    wrong "attempt $attempt, $kind of rank $rank in step $step: ${record:-no record}"
  fi
done <fatal
! compgen -G 'run/checkpoints/*tmp*' || wrong "temporary files are left"
! compgen -G 'run/checkpoints/.trash*' || wrong "temporary files are left"
! processes "$nrl_train (launch|run.yaml)" || wrong "processes are left"
! ss -xlp 2>/dev/null | grep nrl- || wrong "sockets are left"
id=$(sed -nE 's/.*"run_id": *"([^"]*)".*/\1/p' run/logs/run.json)
[[ ! -e /dev/shm/nrl-$UID/$id ]] || wrong "shared memory is left: $(ls "/dev/shm/nrl-$UID/$id")"
kinds=$(awk -v one="$hosts" '$2 != "end" && (one > 1 || $2 !~ /^(cut|blink)$/) { print $2 }' schedule | sort | uniq -c | awk '{ printf "%s%s %d", (NR > 1 ? ", " : ""), $2, $1 }')
repeated=$(awk '$3 == "step" { split($4, part, "/"); if (part[1] + 0 <= top) ++count; else top = part[1] + 0 } END { print count + 0 }' lines.txt)
awk '
  / launch: attempt [0-9]+ has ended, / { for (i = 1; i < NF; ++i) if ($i == "ended,") leave[++n] = $(i + 1) + 0 }
  / launch: attempt [0-9]+: / { failed = $1 }
  / launch: attempt [0-9]+ starts/ { started = $1 }
  $3 == "step" && failed { first[++m] = $1 - failed; failed = 0 }
  function middle(values, count, share,  i, j, v) {
    for (i = 2; i <= count; ++i) { v = values[i]; for (j = i - 1; j > 0 && values[j] > v; --j) values[j + 1] = values[j]; values[j + 1] = v }
    return count ? values[int((count - 1) * share) + 1] : 0
  }
  END {
    printf "failure to the end of the attempt: median %.1f s, 99 %% %.1f s (%d)\n", middle(leave, n, 0.5), middle(leave, n, 0.99), n
    printf "end of the attempt to the next step: median %.1f s, 99 %% %.1f s (%d)\n", middle(first, m, 0.5), middle(first, m, 0.99), m
  }' lines.txt
echo "faults: $kinds"
echo "score: $(awk '$2 != "end"' schedule | wc -l) faults of $(awk '$2 != "end" { print $2 }' schedule | sort -u | wc -l) kinds in $took s; $((steps)) steps, $repeated repeated; culprit right in $named of $counted; $bad violations"
((bad == 0))
