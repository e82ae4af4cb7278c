#!/usr/bin/env bash
# Runs on several hosts, made of namespaces by scripts/multihost.sh: the same numbers as on one, few bytes between them,
# and ranks in the order of the nodes. Skipped with the reason where hosts cannot be made.
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

# hosts RANKS,RANKS OPTIONS ARGS...: trains on these hosts; OPTIONS are those of mpirun. The bytes that each host
# sends go to sent.txt. `clocks`: by how many seconds their clocks are ahead.
clocks=
hosts() {
  local code=0
  "$source_dir/scripts/multihost.sh" --timeout 120 --hosts "$1" ${clocks:+--clocks "$clocks"} --mpi "$2" --sent sent.txt "$nrl_train" "${@:3}" >out.txt 2>err.txt || code=$?
  if ((code == 77)) && grep -q '^skipped:' out.txt; then
    cat out.txt
    exit 77
  fi
  return $code
}

# few_bytes NAME: on two hosts of equal numbers of ranks, each sent what the collectives of the run take at least, and 10 %
# for the launcher, headers and votes at most.
few_bytes() {
  local least
  least=$(grep -o '{"group[^}]*}' "$1/logs/communication.json" |
    sed -E 's/.*"operation":"([^"]*)".*"bytes":([0-9]*).*/\1 \2/' |
    awk '{ sum += $1 == "all_reduce" ? $2 : $2 / 2 } END { print int(sum) }')
  ((least > 4000000)) || fail "collectives of only $least bytes: $(cat "$1/logs/communication.json")"
  awk -v least="$least" '$1 ~ /^node/ { ++n; if ($2 < least || $2 > least * 1.1) bad = 1 } END { exit bad || n != 2 }' sent.txt ||
    fail "each host must send little more than $least bytes: $(cat sent.txt)"
}

case $case_name in
  multihost_lost)
    # A host whose cable is pulled, and one that loses its power: the others end, with one message that names it.
    corpus
    config run
    for loss in cut kill; do
      rm -rf run
      code=0
      # Slow steps: the run lasts until the loss.
      NRL_FAULTS="slow:all@step=1:seconds=0.05,steps=100000" "$source_dir/scripts/multihost.sh" --timeout 25 --hosts 2,2 \
        --mpi "-x NRL_FAULTS" "--$loss" "node1,$work/run/checkpoints/step-5" "$nrl_train" run.yaml pretrain.max_num_steps=100000 \
        checkpointing.save_period=5 reliability.network_timeout_seconds=4 >out.txt 2>err.txt || code=$?
      if ((code == 77)) && grep -q '^skipped:' out.txt; then
        cat out.txt
        exit 77
      fi
      # mpirun itself waits for minutes for the daemon of a lost host, and is ended by the time limit.
      ((code != 0)) || fail "$loss: exit code 0"
      # mpirun notices by itself that the daemon of the killed host is gone: it may end the others first, or their output.
      if [[ $loss == kill ]]; then
        [[ ! -e run/logs/failure.json ]] || grep -q '"exit_code": 80' run/logs/failure.json || fail "$loss: $(cat run/logs/failure.json)"
        continue
      fi
      awk -v lost="$(stat -c %Y run/checkpoints/step-5)" '/"failed_at"/ { exit !($2 - lost < 15) }' run/logs/failure.json ||
        fail "$loss: noticed late: $(cat run/logs/failure.json)"
      grep -Eq '^\[rank 0\] error: .*node 1' err.txt || fail "$loss: no message: $(cat err.txt)"
      grep -Eq '"kind": "(node_lost|rank_exited|network)"' run/logs/failure.json || fail "$loss: $(cat run/logs/failure.json)"
      grep -q '"exit_code": 80' run/logs/failure.json || fail "$loss: $(cat run/logs/failure.json)"
      echo "$loss: $(grep '^\[rank 0\] error' err.txt)"
    done
    ;;
  multihost_launch)
    # A supervisor outside of the hosts: two in use, one spare. A killed rank, a host whose cable is pulled and one that
    # loses its power: the run goes on, with the losses of an undisturbed one.
    corpus
    config plain
    long=(pretrain.max_num_steps=80 policy.scheduler.lr_decay_iters=80 checkpointing.save_period=5)
    expect 0 hosts 2,2 "" plain.yaml "${long[@]}"
    config run
    for loss in rank cut kill; do
      rm -rf run
      event=(--timeout 100)
      faults="slow:all@step=1:seconds=0.05,steps=100000,attempt=any"
      case $loss in
        rank) faults+="; kill:rank=3@step=8" ;;
        *) event+=("--$loss" "node1,$work/run/checkpoints/step-5") ;;
      esac
      code=0
      NRL_FAULTS=$faults "$source_dir/scripts/multihost.sh" --hosts 2,2,2 "${event[@]}" --supervise "$nrl_train" launch \
        --hosts '{hostfile}' --spares 1 -- run.yaml "${long[@]}" reliability.network_timeout_seconds=4 >out.txt 2>err.txt || code=$?
      grep '^launch: ' out.txt || fail "$loss: no supervisor: $(cat out.txt err.txt)"
      ((code == 0)) || fail "$loss: exit code $code: $(cat out.txt err.txt)"
      same plain/logs/metrics.jsonl run/logs/metrics.jsonl 0
      if [[ $loss == rank ]]; then
        grep -q '^launch: attempt 2 starts: 4 ranks on node0, node1$' out.txt || fail "another host: $(cat out.txt)"
      else
        grep -q '^launch: node2 takes the place of node1 as node 1$' out.txt || fail "$loss: no spare: $(cat out.txt)"
        grep -q ' starts: 4 ranks on node0, node2$' out.txt || fail "$loss: no spare: $(cat out.txt)"
      fi
    done
    ;;
  multihost)
    corpus
    config one
    expect 0 run 1 one.yaml
    for strategy in ddp optim; do
      for overlap in true false; do
        name=$strategy-$overlap
        config "$name"
        expect 0 hosts 2,2 "" "$name.yaml" distributed.shard_strategy=$strategy distributed.overlap_grad_reduce=$overlap \
          distributed.bucket_size_mb=0.13 cluster.num_nodes=2 cluster.gpus_per_node=2
        same one/logs/metrics.jsonl "$name/logs/metrics.jsonl" 1e-5
        few_bytes "$name"
        grep -q 'nodes  *2 x node0, 2 x node1$' out.txt || fail "the banner does not name the nodes: $(cat out.txt)"
      done
    done
    # Sums have an order: the same bits in every run, whatever the strategy.
    same ddp-true/logs/metrics.jsonl ddp-false/logs/metrics.jsonl 0
    same optim-true/logs/metrics.jsonl optim-false/logs/metrics.jsonl 0
    # One rank per host: messages give the same bits as shared memory.
    config apart
    expect 0 hosts 1,1 "" apart.yaml
    config together
    expect 0 run 2 together.yaml
    same together/logs/metrics.jsonl apart/logs/metrics.jsonl 0
    # A stopped run on two hosts resumes on one.
    config parts
    expect 0 hosts 2,2 "" parts.yaml distributed.shard_strategy=optim pretrain.max_num_steps=5
    expect 0 run 4 parts.yaml distributed.shard_strategy=optim
    same one/logs/metrics.jsonl parts/logs/metrics.jsonl 1e-5
    ;;
  multihost_order)
    corpus
    # mpirun deals consecutive ranks to different hosts; the program numbers them by host, with the same numbers.
    config inturn
    expect 0 hosts 2,2 "--map-by node" inturn.yaml cluster.gpus_per_node=2
    grep -q "2 x node0, 2 x node1; ranks by node, the launcher's 0 2 1 3$" out.txt ||
      fail "no word of the order of ranks: $(cat out.txt)"
    config together
    expect 0 run 4 together.yaml
    same together/logs/metrics.jsonl inturn/logs/metrics.jsonl 1e-5
    # Nodes of different sizes take ranks in the order in which most tensor-parallel groups stay inside; a node that
    # cannot hold whole groups is named.
    config uneven
    expect 0 hosts 1,2,1 "" uneven.yaml distributed.tensor_parallel_size=2 'cluster.gpus_per_node=[1,2,1]'
    grep -q "2 x node1, 1 x node0, 1 x node2; ranks by node, the launcher's 1 2 0 3$" out.txt ||
      fail "the nodes are in another order: $(cat out.txt)"
    grep -q 'warning: distributed.tensor_parallel_size is 2, but node node0 has 1 rank: the group of ranks 2, 3 spans nodes' err.txt ||
      fail "no warning of the node: $(cat err.txt)"
    config even
    expect 0 run 4 even.yaml distributed.tensor_parallel_size=2
    same even/logs/metrics.jsonl uneven/logs/metrics.jsonl 1e-5
    # The section `cluster` names the node that differs.
    expect 78 hosts 2,1 "" inturn.yaml policy.train_global_batch_size=6 cluster.gpus_per_node=2
    grep -q 'cluster.gpus_per_node is 2 for node 1 (node1), which has 1 rank' err.txt || fail "no such message: $(cat err.txt)"
    expect 78 hosts 2,2 "" inturn.yaml cluster.num_nodes=1
    grep -q 'cluster.num_nodes is 1, but the ranks run on 2' err.txt || fail "no such message: $(cat err.txt)"
    ;;
  multihost_clocks)
    corpus
    # A window of hosts whose clocks are 100 s apart lies on one axis: both ranks begin a step at the same time, within
    # the error that the profile states, and a collective of both has a last rank.
    config clocks
    clocks=0,100
    expect 0 hosts 1,1 "" profile run clocks.yaml --steps 3:5 profiling.trace=chrome
    window=clocks/logs/profile/step-3
    for rank in 0 1; do
      trace=$window/chrome/rank-$rank.pt.trace.json
      grep -oE '"name": "ProfilerStep#[0-9]+", .*"ts": [0-9.]+' "$trace" | sed -E 's/.*#([0-9]+)".*"ts": /\1 /' >steps-$rank.txt
      [[ -s steps-$rank.txt ]] || fail "no steps in $trace: $(head -c 600 "$trace")"
    done
    paste steps-0.txt steps-1.txt | awk '{ d = $2 - $4; if ($1 != $3 || d > 200e3 || d < -200e3) bad = 1 } END { exit bad || NR < 1 }' ||
      fail "steps of the ranks are apart: $(paste steps-0.txt steps-1.txt)"
    error=$(grep -oE '"clock_error_s": ?[0-9.e-]+' $window/profile.json | sed 's/.*: *//' | sort -g | tail -n 1)
    awk -v e="$error" 'BEGIN { exit !(e > 0 && e < 0.05) }' || fail "clock error: '$error'"
    ;;
  *) fail "no case $case_name" ;;
esac
