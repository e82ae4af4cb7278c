#!/usr/bin/env bash
# One supervised run through many faults of many kinds, beside the same run without: checks that no step is lost or
# changed, that each failure names its cause, that nothing hangs, and that nothing is left. Prints a score.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: tests/soak/soak.sh [--failures N] [--seed S] [--only "KIND KIND..."] [--slack SECONDS] [--one-host] [--keep DIR]
                          --binary NRL_TRAIN
  --failures N   faults that end an attempt (20); between two of them are up to three that must change nothing
  --seed S       which faults, on which ranks, in which steps (1)
  --only KINDS   of the faults that end an attempt, those whose kinds begin with these words, e.g. "cut flip"
  --slack S      what an attempt may take to end beyond the limits of its settings (3); more on a busy machine
  --one-host     4 ranks on this host; default: 2 hosts in namespaces of 2 ranks, and a spare one, which needs root
  --keep DIR     keep the files of the run there
Exits with 1 if a check fails, and with 77 where hosts cannot be made.
300 faults of all kinds in about 20 minutes: --failures 120
TEXT
}

failures=20 seed=1 only='' hosts=2 slack=3 keep='' binary=''
while (($#)); do
  case $1 in
    --failures) failures=$2 && shift ;;
    --seed) seed=$2 && shift ;;
    --only) only=$2 && shift ;;
    --slack) slack=$2 && shift ;;
    --one-host) hosts=1 ;;
    --keep) keep=$2 && shift ;;
    --binary) binary=$(realpath "$2") && shift ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && exit 64 ;;
  esac
  shift
done
[[ -x $binary && $failures =~ ^[1-9][0-9]*$ && $seed =~ ^[0-9]+$ && $slack =~ ^[0-9]+$ ]] || { usage >&2 && exit 64; }
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
# shellcheck source=../cli/common.sh
source "$here/../cli/common.sh" soak "$binary" "$(realpath "$here/../..")"
small_disk=
finish() {
  jobs -p | xargs -r kill 2>/dev/null || true
  [[ -z $keep ]] || cp -r "$work/." "$keep" || true
  [[ -z $small_disk ]] || umount "$work/run" || true
  rm -rf "$work"
}
trap finish EXIT
[[ -z $keep ]] || mkdir -p "$keep"

# ---- What happens when: a line "ATTEMPT KIND RANK STEP" for each fault, the one that ends the attempt last ----
# Faults with @ are of NRL_FAULTS: KIND@PHASE, or KIND@TENSOR. Those of hosts: "cut" pulls the cable for longer than the
# limit, "gone" until the examination of the hosts is over, "power" ends all processes of a host, which starts again.
every_period=3 # steps from one comparison of replicas to the next
repeat_period=10
ends="kill@computing kill@data kill@checkpoint segv@computing abort@computing stop@computing stop@data hang@computing hang@data
  hang@checkpoint launcher supervisor flip@model.layers.1.mlp.up_proj.weight nan@model.norm.weight
  flip@exp_avg/model.layers.0.self_attn.q_proj.weight flip@repeat"
mild="io-write-ENOSPC io-write-EIO io-fsync-EIO io-rename-EROFS io-create-EACCES io-delay slow pause save pause-launcher"
if ((hosts > 1)); then
  ends="cut power $ends gone" # first those that need most
  mild+=" blink pause-host pause-daemon"
fi
if [[ -n $only ]]; then
  chosen=
  for kind in $ends; do for word in $only; do [[ $kind != "$word"* ]] || chosen+=" $kind"; done; done
  [[ -n $chosen ]] || { echo "--only $only: the kinds are $ends" >&2 && exit 64; }
  ends=$chosen
fi
mkdir run
if ((EUID == 0)) && mount -t tmpfs -o size=160m soak "$work/run" 2>/dev/null; then
  small_disk=1
  mild+=" full-disk"
fi
awk -v seed="$seed" -v failures="$failures" -v ending="$ends" -v harmless="$mild" -v repeat="$repeat_period" '
  BEGIN {
    srand(seed)
    ends = split(ending, end, " ")
    mild = split(harmless, gentle, " ")
    step = 0
    for (attempt = 1; attempt <= failures; ++attempt) {
      # Every kind once, then at random.
      kind = attempt <= ends ? end[attempt] : end[int(rand() * ends) + 1]
      last = step + 12 + int(rand() * 8)
      if (kind ~ /checkpoint/) last -= last % 5
      if (kind ~ /repeat/) last += repeat - last % repeat
      files = 0  # three failed saves in a row would end the run
      for (n = int(rand() * 4); n > 0; --n) {
        at = step + 2 + int(rand() * (last - step - 3))
        mild_kind = gentle[++used <= mild ? used : int(rand() * mild) + 1]
        if (mild_kind ~ /^(io-|full)/ && files++) continue
        # What continues a launcher or a host continues its stopped ranks as well.
        if (kind ~ /^stop/ && mild_kind ~ /^pause/) continue
        print attempt, mild_kind, mild_kind ~ /^io-/ ? 0 : int(rand() * 4), at
      }
      print attempt, kind, int(rand() * 4), last
      # These come when what is to happen before is over; ranks that have lost their launcher go on for some seconds.
      step = last + (kind ~ /^(cut|power|gone|launcher|supervisor)$/ ? 150 : 0)
    }
    print failures + 1, "end", 0, step + 20
  }' >schedule
steps=$(awk '$2 == "end" { print $4 }' schedule)
faults=$(awk '
  BEGIN { text = "slow:all@step=1:seconds=0.02,steps=1000000,attempt=any" }
  $2 ~ /^(flip|nan)@/ {
    split($2, part, "@")
    text = text "; " part[1] ":rank=" $3 "@step=" $4 ":" (part[2] == "repeat" ? "site=repeat" : "tensor=" part[2]) ",element=7" (part[1] == "flip" ? ",bit=12" : "") ",attempt=" $1
    next
  }
  $2 ~ /@/ {
    split($2, part, "@")
    text = text "; " part[1] ":rank=" $3 "@step=" $4 ":" (part[2] == "computing" ? "" : "phase=" part[2] ",") "attempt=" $1
  }
  $2 == "slow" { text = text "; slow:rank=" $3 "@step=" $4 ":seconds=0.2,steps=3,attempt=" $1 }
  $2 == "io-delay" { text = text "; io:rank=0@op=fsync#4:delay=1,attempt=" $1 }
  $2 ~ /^io-.*-E/ { split($2, part, "-"); text = text "; io:rank=0@op=" part[2] "#9:errno=" part[3] ",attempt=" $1 }
  END { print text }' schedule)
external() {
  awk -v attempt="$1" '$1 == attempt && $2 !~ /@/ && $2 !~ /^(io-.*|slow|end)$/ { print $2, $3, $4 }' schedule | sort -n -k 3
}

corpus
heartbeat=2 network=4 progress=4
settings=("pretrain.max_num_steps=$steps" "policy.scheduler.lr_decay_iters=$steps" checkpointing.save_period=5
  "reliability.network_timeout_seconds=$network" "reliability.heartbeat_timeout_seconds=$heartbeat"
  "reliability.step_timeout_seconds=$progress" "reliability.replica_check_period=$every_period"
  "reliability.recompute_check_period=$repeat_period")
config plain
code=0
if ((hosts == 1)); then
  run 4 plain.yaml "${settings[@]}" || code=$?
else
  "$source_dir/scripts/multihost.sh" --hosts 2,2 "$nrl_train" plain.yaml "${settings[@]}" >out.txt 2>err.txt || code=$?
fi
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
host_of_rank() { # in this attempt
  sed -nE 's/^[0-9.]+ launch: attempt [0-9]+ starts: 4 ranks on (.*), (.*)/\1 \2/p' lines.txt | tail -n 1 | awk -v node="$(($1 / 2))" '{ print $(node + 1) }'
}
in_host() { # HOST PATTERN: its processes, outside of the namespaces
  local pid space
  space=$(readlink "/proc/$(cat "$(cat state)/$1/first")/ns/pid")
  for pid in $(pgrep -f -- "$2"); do
    if [[ $(readlink "/proc/$pid/ns/pid") == "$space" ]]; then echo "$pid"; fi
  done
}
# stopped SECONDS PIDS...: by a signal, and then continued.
stopped() {
  (($# > 1)) || return 0
  kill -STOP "${@:2}" 2>/dev/null || true
  sleep "$1"
  kill -CONT "${@:2}" 2>/dev/null || true
}
# Lines with their time.
stamp() { while IFS= read -r line; do printf '%s %s\n' "$EPOCHREALTIME" "$line"; done; }

# What a run leaves on the hosts, looked at before they are gone.
cat >supervise <<'TEXT'
#!/usr/bin/env bash
state=$(dirname "$1") code=0
echo "$state" >state
"${@:2}" || code=$?
((code != 137)) || exit "$code" # a supervisor that was killed: its hosts end with it
for host in "$state"/node*; do
  read -r pid <"$host/first" || continue
  for ((i = 0; i < 20; ++i)); do
    found=$({
      find "/proc/$pid/root/dev/shm" -mindepth 1
      nsenter -t "$pid" -p -m ps -eo pid=,args= | grep -v -e ' sleep 3600$' -e ' bash -c' -e ' ps -eo'
      nsenter -t "$pid" -n ss -Hltn
    } 2>&1) || true
    [[ -n $found ]] || break
    sleep 0.1
  done
  [[ -z $found ]] || printf '%s: %s\n' "${host##*/}" "$found"
done >left.txt
exit "$code"
TEXT
chmod +x supervise
start_supervisor() {
  rm -f cut-* power-*
  if ((hosts == 1)); then
    NRL_FAULTS=$faults "$nrl_train" launch --max-restarts 1000 --ranks 4 -- run.yaml "${settings[@]}" > >(stamp >>lines.txt) 2> >(tee -a err.txt | stamp >>lines.txt) &
  else
    local losses=() i
    for i in 0 1 2; do losses+=(--cut "node$i,$work/cut-node$i" --kill "node$i,$work/power-node$i"); done
    NRL_FAULTS=$faults "$source_dir/scripts/multihost.sh" --hosts 2,2,2 "${losses[@]}" --supervise ./supervise '{hostfile}' "$nrl_train" launch \
      --max-restarts 1000 --hosts '{hostfile}' --spares 1 -- run.yaml "${settings[@]}" > >(stamp >>lines.txt) 2> >(tee -a err.txt | stamp >>lines.txt) &
  fi
  runner=$!
}
# Starts the supervisor again where the last one had no host left: with all of them, as if repaired.
repaired() {
  local code=0
  kill -0 "$runner" 2>/dev/null && return 0
  wait "$runner" || code=$?
  ((code == 75)) || return 1
  echo "$EPOCHREALTIME repaired" >>lines.txt
  start_supervisor
}
# Waits until the attempt has reached the step; false when it has ended.
reached() { # ATTEMPT STEP
  until [[ $(attempt_now) == "$1" && $(now_at) -ge $2 ]]; do
    if [[ $(attempt_now) -gt $1 ]] || ! kill -0 "$runner" 2>/dev/null; then return 1; fi
    sleep 0.05
  done
}
# Waits until the next attempt starts or there is none.
restarted() { # ATTEMPT
  while [[ $(attempt_now) -le $1 ]] && kill -0 "$runner" 2>/dev/null; do sleep 0.1; done
}
happen() { # ATTEMPT KIND RANK
  local host='' pids
  ((hosts == 1)) || host=$(host_of_rank "$3")
  echo "$EPOCHREALTIME event $1 $2 $host" >>lines.txt
  case $2 in
    save) touch run/logs/save ;;
    pause)
      mapfile -t pids < <(pid_of_rank "$3" || true)
      stopped 0.7 "${pids[@]}"
      ;;
    pause-launcher)
      mapfile -t pids < <(processes "mpirun .*$nrl_train run.yaml" || true)
      stopped 2 "${pids[@]}"
      ;;
    pause-daemon)
      mapfile -t pids < <(in_host "$host" orted || true)
      stopped 2 "${pids[@]}"
      ;;
    pause-host)
      mapfile -t pids < <(in_host "$host" . || true)
      stopped 0.7 "${pids[@]}"
      ;;
    full-disk)
      dd if=/dev/zero of=run/filled bs=4M status=none 2>/dev/null || true
      sleep 1
      rm run/filled
      ;;
    blink | cut | gone)
      touch "cut-$host"
      case $2 in
        blink) sleep 1 ;;
        cut) sleep 6 ;; # it is looked at again once its cable is in
        gone) restarted "$1" ;;
      esac
      rm -f "cut-$host"
      ;;
    power)
      touch "power-$host"
      restarted "$1"
      rm -f "power-$host"
      ;;
    launcher) processes "mpirun .*$nrl_train run.yaml" | xargs -r kill -KILL || true ;;
    supervisor)
      processes "^$nrl_train launch" | xargs -r kill -KILL || true
      wait "$runner" || true
      start_supervisor
      ;;
  esac
}
: >lines.txt
: >err.txt
start_supervisor
began=$EPOCHSECONDS
for ((attempt = 1; attempt <= failures + 1; ++attempt)); do
  until [[ $(attempt_now) == "$attempt" ]]; do
    repaired || break 2
    sleep 0.05
  done
  while read -r kind rank step; do
    reached "$attempt" "$((step - 1))" || break
    happen "$attempt" "$kind" "$rank"
  done < <(external "$attempt")
done
while kill -0 "$runner" 2>/dev/null; do sleep 0.1; done
code=0
wait "$runner" || code=$? # bash knows the code of a process that was waited for before
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
cat run/logs/failures.jsonl run/logs/failure.json 2>/dev/null | tr -d '\n' | sed 's/}{/}\n{/g' >failed.txt || true
# A line for each attempt: its last step and that of the checkpoint it resumed from (-: it did not come so far), the
# newest checkpoint known when it began, saves that failed, and times: start, last step, end; its hosts.
awk '
  / launch: attempt [0-9]+ starts/ {
    leave()
    attempt = $4; start = $1; last = resume = "-"; known = saved; failed = 0; at = end = $1; hosts = $0
    sub(/.* on /, "", hosts); gsub(/, /, ",", hosts); if (hosts ~ / /) hosts = "-"
  }
  $2 == "resume" { resume = $5 }
  $3 == "step" { split($4, part, "/"); last = part[1]; if (resume == "-") resume = 0; at = end = $1 }
  $3 == "ckpt" && $4 + 0 > saved { saved = $4 + 0 }
  / not saved: / { ++failed }
  / launch: attempt [0-9]+(:| has ended)/ && !over[attempt]++ { end = $1 }
  function leave() { if (attempt) print attempt, last, resume, known + 0, failed, start, at, end, hosts }
  END { leave() }' lines.txt >attempts
# Steps that a restart repeats: those since the newest checkpoint, which is one interval old unless a save was in flight or
# was made to fail.
while read -r attempt lost resume known failed; do
  ((resume >= known)) || wrong "attempt $attempt resumed from step $resume although step $known was saved"
  ((lost < 10 || failed > 0)) || wrong "attempt $attempt resumed from step $resume: $lost steps lost"
done < <(awk '{ if (n++ && last != "-" && $3 != "-") print $1, last - $3, $3, $4, failed; if ($2 != "-") { last = $2; failed = $5 } }' attempts)
# Kind and rank of each failure, and how long it took until all ranks were gone.
awk '{ last[$1] = $2 " " $3 " " $4 } END { for (a in last) print a, last[a] }' schedule | sort -n >fatal
launched() { # ATTEMPT PATTERN: what launch said in that attempt and after it
  grep -qE "launch: (.*)?($2)" <(awk -v attempt="$1" '/ launch: attempt [0-9]+ starts/ { on = $4 == attempt } on' lines.txt)
}
named=0 counted=0 masked=0
: >durations
while read -r attempt kind rank step; do
  [[ $kind != end ]] || continue
  record=$(grep -E "\"attempt\": *${attempt}[,}]" failed.txt | tail -n 1 || true)
  read -r _ _ _ _ _ _ at end where < <(grep "^$attempt " attempts) || { wrong "attempt $attempt did not start" && continue; }
  limit=2
  case $kind in
    kill@* | segv@* | abort@*) want='rank_(killed|exited)' ;;
    stop@*) want=rank_stopped limit=$((heartbeat + 1)) ;;
    # Ranks are asked again after 5 s where the first answers name no one.
    hang@*) want=rank_hung limit=$((progress + 6)) ;;
    flip@* | nan@*) want=silent_corruption limit=2 ;;
    cut | gone | power) want='(node_lost|network|rank_exited)' limit=$((network + 1)) ;;
    *) # launchers and supervisors: the ranks may not live to write a record
      masked=$((masked + 1))
      continue
      ;;
  esac
  counted=$((counted + 1))
  host=$(awk -v hosts="$where" -v node="$((rank / 2))" 'BEGIN { split(hosts, h, ","); print h[node + 1] }')
  found=1
  grep -qE "\"kind\": *\"$want\"" <<<"$record" || found=0
  case $kind in
    # Of two hosts without a connection each takes the other one for lost: the examination tells.
    cut) ;;
    gone | power) launched "$attempt" "$host: the health check does not answer|takes the place of $host " || found=0 ;;
    *) grep -qE "\"rank\": *${rank}[,}]" <<<"$record" || found=0 ;;
  esac
  case $kind in
    flip@* | nan@*)
      # Its host is not used again until it is repaired.
      ((hosts == 1)) || launched "$attempt" "takes the place of $host |node $((rank / 2)) \($host\) has no spare" ||
        wrong "attempt $attempt: $host was not replaced"
      ;;
  esac
  if ((found)); then
    named=$((named + 1))
  else
    wrong "attempt $attempt, $kind of rank $rank in step $step: ${record:-no record}"
  fi
  # 5 s: what launch gives ranks after the record; 2 s: for the rest of the processes.
  failed_at=$(sed -nE 's/.*"failed_at": *([0-9.]+).*/\1/p' <<<"$record")
  awk -v kind="$kind" -v at="$at" -v failed="${failed_at:-0}" -v end="$end" -v limit="$((limit + slack))" '
    BEGIN { print kind, (failed ? failed - at : end - at), end - at; exit !((failed ? failed - at : 0) > limit || end - at > limit + 7) }' >>durations &&
    wrong "attempt $attempt, $kind: $(tail -n 1 durations | awk '{ print $2 " s to its record, " $3 " s to its end" }')"
done <fatal
! compgen -G 'run/checkpoints/*tmp*' || wrong "temporary files are left"
! compgen -G 'run/checkpoints/.trash*' || wrong "temporary files are left"
! processes "$nrl_train (launch|run.yaml)" || wrong "processes are left"
! ss -xlp 2>/dev/null | grep nrl- || wrong "sockets are left"
[[ ! -s left.txt ]] || wrong "left on hosts: $(cat left.txt)"
id=$(sed -nE 's/.*"run_id": *"([^"]*)".*/\1/p' run/logs/run.json)
[[ ! -e /dev/shm/nrl-$UID/$id ]] || wrong "shared memory is left: $(ls "/dev/shm/nrl-$UID/$id")"
repeated=$(awk '$3 == "step" { split($4, part, "/"); if (part[1] + 0 <= top) ++count; else top = part[1] + 0 } END { print count + 0 }' lines.txt)
awk '
  function middle(values, count, share,  i, j, v) {
    for (i = 2; i <= count; ++i) { v = values[i]; for (j = i - 1; j > 0 && values[j] > v; --j) values[j + 1] = values[j]; values[j + 1] = v }
    return count ? values[int((count - 1) * share + 0.5) + 1] : 0
  }
  FILENAME == "durations" {
    sub(/@.*/, "", $1)
    if (!seen[$1]++) order[++kinds] = $1
    record[$1, ++n[$1]] = $2; gone[$1, n[$1]] = $3
    next
  }
  / launch: attempt [0-9]+: / { failed = $1 }
  $3 == "step" && failed { first[++m] = $1 - failed; failed = 0 }
  END {
    print "kind (number): seconds from the last step to the record, and to the end of the attempt: median, 99 %"
    for (k = 1; k <= kinds; ++k) {
      for (i = 1; i <= n[order[k]]; ++i) { a[i] = record[order[k], i]; b[i] = gone[order[k], i] }
      printf "  %s (%d): %.1f %.1f, %.1f %.1f\n", order[k], n[order[k]], middle(a, n[order[k]], 0.5), middle(a, n[order[k]], 0.99),
        middle(b, n[order[k]], 0.5), middle(b, n[order[k]], 0.99)
    }
    printf "end of an attempt to the next step: median %.1f s, 99 %% %.1f s (%d)\n", middle(first, m, 0.5), middle(first, m, 0.99), m
  }' durations lines.txt
echo "faults: $(awk '$2 != "end" { print $2 }' schedule | sort | uniq -c | awk '{ printf "%s%s %d", (NR > 1 ? ", " : ""), $2, $1 }')"
echo "hosts: $(grep -c 'takes the place of' lines.txt || true) replaced, $(grep -c ' repaired$' lines.txt || true) times none left"
echo "score: $(awk '$2 != "end"' schedule | wc -l) faults of $(awk '$2 != "end" { print $2 }' schedule | sort -u | wc -l) kinds in $took s; $((steps)) steps, $repeated repeated; culprit right in $named of $counted ($masked masked); $bad violations"
((bad == 0))
