#!/usr/bin/env bash
# Argument checks, skip conditions and tables of the scripts, without a network: run.sh CASE SOURCE_DIR [NRL_TRAIN].
set -euo pipefail
case_name=$1
scripts=$2/scripts
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() {
  echo "FAIL: $*" >&2
  exit 1
}

# expect CODE TEXT COMMAND...: exit code, and a text that the output has.
expect() {
  local want=$1 text=$2 got=0
  shift 2
  "$@" >out.txt 2>&1 || got=$?
  ((got == want)) || fail "exit code $got instead of $want: $*: $(cat out.txt)"
  grep -qF -- "$text" out.txt || fail "no '$text' in: $(cat out.txt)"
}

# command_of NAME TEXT: a program NAME that is found before any other.
mkdir bin
command_of() {
  printf '#!/bin/sh\n%s\n' "$2" >"bin/$1"
  chmod +x "bin/$1"
}

fresh=("$scripts/fresh-machine.sh" --cache "$work/cache")
case $case_name in
  fresh_skips) # a machine that cannot be created is skipped with the reason, and leaves no files
    expect 64 usage: "${fresh[@]}" buster
    expect 64 'an absolute path' "$scripts/fresh-machine.sh" --cache here bookworm
    if ((EUID != 0)); then
      expect 77 'skipped: fresh machine bookworm: root is required' "${fresh[@]}" bookworm
      exit 0
    fi
    export PATH=$work/bin:$PATH
    command_of mmdebstrap 'echo "E: mirror: no route" >&2; exit 1'
    command_of unshare 'exit 1'
    expect 77 'skipped: fresh machine bookworm: mounts are not permitted' "${fresh[@]}" bookworm
    command_of unshare 'exit 0'
    command_of df 'echo Avail; echo 100'
    expect 77 'has 100 MiB free' "${fresh[@]}" bookworm
    command_of df 'echo Avail; echo 100000'
    expect 77 'the base system: E: mirror: no route' "${fresh[@]}" bookworm
    [[ $(ls cache) == $'bookworm.ccache\nbookworm.debs\nbookworm.lock' ]] || fail "left: $(ls cache)"
    ;;
  fresh_signal) # a signal ends the child and removes the machine
    if ((EUID != 0)); then
      echo "skipped: needs root"
      exit 77
    fi
    export PATH=$work/bin:$PATH
    command_of unshare 'exit 0'
    command_of df 'echo Avail; echo 100000'
    command_of mmdebstrap 'echo $$ >started; exec sleep 100'
    "${fresh[@]}" bookworm >out.txt 2>&1 &
    script=$!
    for ((i = 0; i < 200; ++i)); do
      [[ ! -s started ]] || break
      sleep 0.05
    done
    [[ -s started ]] || fail "did not start: $(cat out.txt)"
    kill -TERM "$script"
    status=0
    wait "$script" || status=$?
    ((status == 143)) || fail "exit code $status: $(cat out.txt)"
    ! kill -0 "$(cat started)" 2>/dev/null || fail "still runs"
    ;;
  quickstart_arguments) # errors come before any installation
    expect 66 "no-such-file: no such file" "$scripts/quickstart.sh" no-such-file
    expect 64 "other: not KEY=VALUE" "$scripts/quickstart.sh" "$work" other
    expect 64 "other: not KEY=VALUE" "$scripts/quickstart.sh" pretrain.max_num_steps=5 other
    QUICKSTART_SECONDS=2m expect 64 "QUICKSTART_SECONDS: expected a number of seconds; found '2m'" "$scripts/quickstart.sh"
    expect 0 "KEY=VALUE: a key of" "$scripts/quickstart.sh" --help
    ;;
  bench_cpu_arguments)
    expect 64 "--case takes MODEL-bBATCH-tLENGTH; found 'gpt2-124m'" "$scripts/bench-cpu.sh" --case gpt2-124m
    expect 64 "--precision takes float32 or bfloat16; found 'bf16'" "$scripts/bench-cpu.sh" --precision bf16
    expect 64 "--peer takes debian, wheel or compiled; found 'llm.c'" "$scripts/bench-cpu.sh" --peer llm.c
    expect 66 "--torch: no program './no-such-python'" "$scripts/bench-cpu.sh" --torch ./no-such-python
    expect 66 "--binary: no such file" "$scripts/bench-cpu.sh" --binary no-such-file
    expect 64 "--rounds takes a number of 1 or more" "$scripts/bench-cpu.sh" --rounds 0
    ;;
  bench_cpu_table) # ratios against the best of the peers, which is another one for the best step, the median and memory
    tr ' ' '\t' >results <<'TEXT'
program nrl-train nrl-train
program debian Debian's
program wheel wheel's
run gpt2-124m-b4-t256 float32 nrl-train 1 400 500 1048576 0 0.7 0.8
run gpt2-124m-b4-t256 float32 debian 1 900 2000 4194304 0
run gpt2-124m-b4-t256 float32 wheel 1 1100 1500 2097152 0.04
run gpt2-124m-b4-t256 float32 nrl-train 2 500 700 2097152 0 0.6 0.7
run gpt2-124m-b4-t256 float32 debian 2 1000 1000 4194304 0
run gpt2-124m-b4-t256 float32 wheel 2 800 1000 3145728 0.04
run gpt2-124m-b4-t256 float32 nrl-train 3 500 1000 2097152 0 0.5 0.9
run gpt2-124m-b4-t256 float32 debian 3 1000 1400 4194304 0
run gpt2-124m-b4-t256 float32 wheel 3 1100 1600 3145728 0.2
run gpt2-124m-b4-t256 bfloat16 nrl-train 1 200 280 1048576 0 0.1 0.5
run gpt2-124m-b4-t256 bfloat16 debian 1 100 140 2097152 0
run gpt2-124m-b4-t256 bfloat16 wheel 1 300 300 4194304 0.06
TEXT
    awk -f "$scripts/bench/cpu_table.awk" results >table.md
    diff - table.md <<'TEXT' || fail "another table"
| tokens/s: best / median | nrl-train | Debian's | wheel's | speed ratio | MFU | in GEMMs |
|---|---|---|---|---|---|---|
| gpt2-124m 4x256 fp32 | 2560 / 1463 | 1138 / 731 | 1280 / 683 | 2.00 / 2.00 | 60 % | 80 % |
| gpt2-124m 4x256 bf16 | 5120 / 3657 | 10240 / 7314 | 3413 / 3413 | 0.50 / 0.50 | 10 % | 50 % |

| peak MiB | nrl-train | Debian's | wheel's | memory ratio |
|---|---|---|---|---|
| gpt2-124m 4x256 fp32 | 2048 | 4096 | 3072 | 0.67 |
| gpt2-124m 4x256 bf16 | 1024 | 2048 | 4096 | 0.50 |

gpt2-124m 4x256: bf16 is 2.00 / 2.50 times as fast as fp32 (nrl-train).

Other programs took up to 6 % of the processor (wheel, gpt2-124m 4x256 bf16): repeat on an idle machine.
TEXT
    ;;
  bench_cpu_peers) # builds of torch that are found, named as missing, or fail
    export PATH=$work/bin:$PATH preloaded=$work/preloaded
    # shellcheck disable=SC2016  # expanded by the program
    command_of nrl-train 'case $1 in
      doctor) echo "processor    a \"CPU\""; echo "fp32 peak    1 GFLOP/s" ;;
      prepare) ;;
      *)
        for key; do
          case $key in
            logger.log_dir=*) log=${key#*=} ;;
            policy.precision=bfloat16) low=true ;;
          esac
        done
        mkdir "$log"
        echo "{\"ranks\":[{\"peak_resident_bytes\":1048576}]}" >"$log/memory.json"
        for step in 9000 9000 ${low:+50} 100; do
          echo "{\"mfu\":0.5,\"step_ms\":$step,\"gemm_ms\":90}"
        done >"$log/metrics.jsonl" ;;
      esac'
    # python_of NAME KIND VERSION COMPILES: a Python with this torch. Under torch.compile its step is faster.
    python_of() {
      # shellcheck disable=SC2016  # expanded by the program
      command_of "$1" '[ "$1" != -c ] || { echo "'"$2 $3 $4"'"; exit; }
        printf "%s\n" "$LD_PRELOAD" >"$preloaded"
        case "$*" in *bfloat16*--compile*) echo "no compiler" >&2; exit 1 ;; *--compile*) ms=150 ;; *) ms=300 ;; esac
        echo "{\"step_ms\": $((2 * ms)), \"step_ms_best\": $ms, \"peak_rss_kib\": 2048}"'
    }
    python_of old wheel 1.9 False
    python_of new wheel 2.9 True
    python_of system debian 1.9 False
    command_of none 'exit 1'
    command_of g++ ''
    bench=("$scripts/bench-cpu.sh" --binary bin/nrl-train --rounds 1 --steps 1 --case llama-17m-b4-t25 --output out)
    expect 0 '| llama-17m 4x25 fp32 | 1000 / 1000 | 333 / 167 | 667 / 333 | 1.50 / 3.00 | 50 % | 90 % |' \
      "${bench[@]}" --torch none --torch new --torch old --precision float32
    grep -qF '| llama-17m 4x25 fp32 | 1 | 2 | 2 | 0.50 |' out/cpu.md || fail "another memory: $(cat out/cpu.md)"
    grep -qxF 'Not measured: debian: python3-torch is not installed.' out/cpu.md || fail "does not name Debian's: $(cat out/cpu.md)"
    grep -qF '| nrl-train | PyTorch 2.9 | PyTorch 2.9, compiled | speed ratio |' out/cpu.md || fail "other columns: $(cat out/cpu.md)"
    grep -qF '"processor":"a \"CPU\""' out/cpu.json || fail "another processor: $(cat out/cpu.json)"
    grep -qF '"precision":"float32","program":"PyTorch 2.9, compiled","round":1,"step_ms_best":150,' out/cpu.json ||
      fail "other runs: $(cat out/cpu.json)"
    ! command -v python3 >/dev/null || python3 -m json.tool out/cpu.json >/dev/null || fail "not JSON: $(cat out/cpu.json)"

    expect 0 'not measured: compiled: torch 1.9 has no torch.compile' "${bench[@]}" --torch old --precision float32
    expect 0 'not measured: wheel: no Python has a torch' "${bench[@]}" --torch none --precision float32
    grep -qF '| llama-17m 4x25 fp32 | 1000 / 1000 | 50 % | 90 % |' out/cpu.md || fail "columns of no peer: $(cat out/cpu.md)"
    expect 0 'bf16 is 2.00 / 1.33 times as fast as fp32' "${bench[@]}" --no-torch --steps 2
    expect 70 'PyTorch 2.9, compiled failed on llama-17m (see above). Fix:' "${bench[@]}" --torch new
    grep -qx 'no compiler' out.txt || fail "not the peer's error: $(cat out.txt)"
    expect 0 '| nrl-train | PyTorch 2.9 | speed ratio |' "${bench[@]}" --torch new --peer wheel
    if compgen -G '/usr/lib/*/openblas-openmp/libblas.so.3' >openblas; then
      expect 0 '| nrl-train | PyTorch 1.9, OpenBLAS | PyTorch 2.9 |' "${bench[@]}" --torch new --torch system --peer debian --peer wheel
      expect 0 '| nrl-train | PyTorch 1.9, OpenBLAS | speed ratio |' "${bench[@]}" --torch system
      [[ $(cat preloaded) == "$(head -n 1 openblas)" ]] || fail "preloaded: $(cat preloaded)"
    else
      expect 0 'not measured: debian: libopenblas-openmp-dev is not installed' "${bench[@]}" --torch system
    fi
    ;;
  bench_cpu_run) # a few steps of the program itself
    expect 0 '| llama-17m 1x16 bf16 | ' \
      "$scripts/bench-cpu.sh" --binary "$3" --no-torch --rounds 1 --steps 1 --case llama-17m-b1-t16 --output out
    grep -qE '^\| llama-17m 1x16 fp32 \| [1-9][0-9]* / [1-9][0-9]* \| [0-9]+ % \| [1-9][0-9]* % \|$' out/cpu.md ||
      fail "no figures: $(cat out/cpu.md)"
    ;;
  perf_gate) # in turns, with a verdict by pairs; the programs are made up, the report is real
    command -v git >/dev/null || {
      echo "skipped: git is not installed"
      exit 77
    }
    expect 64 "--budget takes a number of 1 or more" "$scripts/perf-gate.sh" --budget 1m
    expect 64 "nowhere is no commit" "$scripts/perf-gate.sh" nowhere
    mkdir tree tree/scripts
    cp "$scripts/perf-gate.sh" "$scripts/common.sh" tree/scripts
    cat >tree/program <<'SH'
#!/usr/bin/env bash
case "$1 $2" in
  "bench --help") echo --history ;;
  "bench step")
    config="$3"
    while [[ $1 != --history ]]; do [[ $1 != *=* ]] || config+=" $1"; shift; done
    echo "$4" >>"$TURNS"
    printf '{"metric":"step_ms","config":"%s","machine":"m","commit":"%s","time":1,"value":%s,"low":1,"high":2,"probe":1}\n' \
      "$config" "$4" "$(awk -v n="$(wc -l <"$TURNS")" 'BEGIN { print SPEED * (1 + n % 7 / 1000) }')" >>"$2"
    ;;
  *) exec "$REAL" "$@" ;;
esac
SH
    # shellcheck disable=SC2016  # for the shell of the program
    command_of cmake 'case $1 in --build) ;; *) mkdir -p build/cpu/bin; cp program build/cpu/bin/nrl-train ;; esac'
    # shellcheck disable=SC2016
    command_of mpirun 'while [ "$1" != -n ]; do shift; done; shift 2; exec "$@"'
    export TURNS=$work/turns REAL=$3 PATH=$work/bin:$PATH
    cd tree
    printf 'build/\nout.txt\nkept/\n' >.gitignore
    commit() {
      sed -i -E "s/(print )[A-Z0-9.]+ \*/\\1$1 */" program
      chmod +x program
      git add -A && git -c user.name=t -c user.email=t@example.org commit -qm "$1"
    }
    git init -q -b main . && commit 100 && git checkout -q -b change && commit 103
    expect 0 "gate: step_ms of configs/bench-tiny.yaml: " scripts/perf-gate.sh --budget 60 --rounds 6
    old=$(git rev-parse --short=9 main) new=$(git rev-parse --short=9 HEAD)
    [[ $(head -n 12 "$TURNS" | xargs) == "$old $new $old $new $old $new $old $new $new $old $new $old" ]] ||
      fail "turns: $(head -n 12 "$TURNS" | xargs)"
    commit 109
    expect 3 "$old and $(git rev-parse --short=9 HEAD), 6 rounds in turns" scripts/perf-gate.sh --budget 60 --rounds 6 --keep kept
    [[ $(wc -l <kept/new.jsonl) == 24 && $(wc -l <kept/old.jsonl) == 24 ]] || fail "kept: $(wc -l kept/*)"
    expect 0 "gate: step_ms" scripts/perf-gate.sh --budget 60 --rounds 6 --allow 12 main
    ;;
  bench_sft_arguments)
    expect 64 "--variant takes one of packed plain padded padding-free single; found 'trl'" "$scripts/bench-sft.sh" --variant trl
    expect 64 "--variant takes one of packed plain padded single; found 'padding-free'" "$scripts/bench-dpo.sh" --variant padding-free
    expect 64 "--variant takes one of packed plain padded; found 'single'" "$scripts/bench-grpo.sh" --variant single
    expect 64 "--examples: 96 is not a multiple of --micro, 512" "$scripts/bench-grpo.sh" --examples 96
    expect 64 "--examples: 12 is not a multiple of --micro, 8" "$scripts/bench-sft.sh" --examples 12
    expect 64 "--steps takes a number of 1 or more" "$scripts/bench-sft.sh" --steps 0
    expect 66 "--torch: no program './no-such-python'" "$scripts/bench-sft.sh" --torch ./no-such-python
    command_of none 'exit 1'
    expect 64 "--steps takes a number of 1 or more" "$scripts/bench-objectives.sh" --steps x
    for name in claims cpu dpo objectives precision scaling sft verdicts; do
      expect 64 "unknown option --stepps; see --help" "$scripts/bench-$name.sh" --stepps 3
      expect 66 "--binary: no such file" "$scripts/bench-$name.sh" --binary no-such-file
    done
    expect 77 "skipped: no Python has trl, transformers and torch" "$scripts/bench-sft.sh" --torch bin/none
    expect 77 "skipped: no Python has trl, transformers and torch" "$scripts/bench-grpo.sh" --torch bin/none
    ;;
  bench_sft_table) # of two rounds: the best step, and the median over the rounds of their medians
    command -v python3 >/dev/null || {
      echo "skipped: python3 is not installed"
      exit 77
    }
    table() { PYTHONDONTWRITEBYTECODE=1 python3 "$scripts/bench/tuning.py" table results; }
    run() { # VARIANT STEPS CPU PADDING LOSS
      printf '{"variant": "%s", "title": "%s", "examples": 32, "tokens": 4000, "loss_tokens": 2000, "padding": %s, "step_ms": [%s], "loss": %s, "loss_step": 1, "cpu_ms": %s}\n' \
        "$1" "$1" "$4" "$2" "$5" "$3"
    }
    { run packed "1000, 1600, 3000" 2000 0.0 9.0; run padded "8000, 6400, 9000" 12000 0.625 9.0001
      run packed "2000, 2000, 2000" 3000 0.0 9.0; run padded "8000, 8000, 8000" 14000 0.625 9.0001; } >results
    expect 0 '| packed | 32.00 | 17.78 | 2000.00 | 1111.11 | 2500 | 0.0 % | 6.40 | 4.44 | 5.20 |' table
    grep -qxF '| padded | 5.00 | 4.00 | 312.50 | 250.00 | 13000 | 62.5 % | 1.00 | 1.00 | 1.00 |' out.txt || fail "another row: $(cat out.txt)"
    run other 1000 1 0.0 9.01 >>results
    expect 1 'error: another loss than packed: other' table
    { run packed 1000 2000 0.0 0; run padded 9000 12000 0.0 1; } | sed 's/"loss": [0-9]*, "loss_step": 1, //' >results
    expect 0 '| packed | 32.00 | 32.00 | 2000.00 | 2000.00 | 2000 | 0.0 % | 9.00 | 9.00 | 6.00 |' table # of rollouts
    ;;
  torch_train) # the peers' training loop begins at the loss of a random model, and learns its batch
    # shellcheck source=scripts/common.sh
    source "$scripts/common.sh"
    python=$(find_torch) || {
      echo "skipped: PyTorch is not installed (package python3-torch)"
      exit 77
    }
    for precision in float32 bfloat16; do
      PYTHONDONTWRITEBYTECODE=1 outside "$python" "$scripts/bench/torch_train.py" --model llama-17m --batch 2 --seq 16 --warmup 1 --steps 2 \
        --threads 1 --precision $precision >out.json
      value() { awk -v key="$1" -f "$scripts/metrics.awk" out.json; }
      awk -v first="$(value loss_first)" -v last="$(value loss_last)" -v best="$(value step_ms_best)" -v median="$(value step_ms)" \
        'BEGIN { d = first - log(8192); exit !(d > -0.3 && d < 0.3 && last < first - 0.1 && best > 0 && best <= median) }' ||
        fail "$precision: $(cat out.json)"
    done
    ;;
  sbom) # every library that the program loads is there with its version; the validator of SPDX accepts it
    for tool in jq dpkg-query; do
      command -v "$tool" >/dev/null || {
        echo "skipped: $tool is not installed"
        exit 77
      }
    done
    expect 66 'no such file' "$scripts/sbom.sh" none
    expect 64 usage: "$scripts/sbom.sh" a b
    SOURCE_DATE_EPOCH=1767225600 "$scripts/sbom.sh" "$3" >sbom.json
    [[ $(jq -r '.spdxVersion, .creationInfo.created' sbom.json) == $'SPDX-2.3\n2026-01-01T00:00:00Z' ]] || fail "$(head sbom.json)"
    [[ $(jq -r '.packages[0].checksums[0].checksumValue' sbom.json) == $(sha256sum <"$3" | cut -d ' ' -f 1) ]] || fail "another program"
    for library in libyaml-cpp libopenmpi libsodium libc6 libprotozero; do
      version=$(jq -r --arg name "$library" '.packages[] | select(.name | startswith($name)) | .name + " " + .versionInfo' sbom.json | head -n 1)
      [[ -n $version && $version == "$(dpkg-query -W -f='${Package} ${Version}' "${version%% *}")" ]] || fail "$library: $version"
    done
    [[ $(jq '[.relationships[].relatedSpdxElement] - [.packages[].SPDXID] | length' sbom.json) == 0 ]] || fail "a relation to nothing"
    SOURCE_DATE_EPOCH=1767225600 "$scripts/sbom.sh" "$3" | cmp - sbom.json || fail "another text the second time"
    python3 -c 'import spdx_tools' 2>/dev/null || {
      echo "skipped: the validator is not installed (python3 -m pip install spdx-tools); everything else passed"
      exit 77
    }
    pyspdxtools -i sbom.json >out.txt 2>&1 || fail "not valid: $(cat out.txt)"
    ;;
  reproducible_arguments)
    expect 64 'unknown option' "$scripts/check-reproducible.sh" --nothing
    expect 64 'no such commit' "$scripts/check-reproducible.sh" --commit nothing
    expect 0 'bit for bit' "$scripts/check-reproducible.sh" --help
    ;;
  *) fail "no such case: $case_name" ;;
esac
