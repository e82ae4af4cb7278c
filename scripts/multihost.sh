#!/usr/bin/env bash
# Runs a program with mpirun on several hosts made of Linux namespaces on this machine, joined by a network whose rate
# can be limited: tests multi-node runs without a cluster. Every host has its own name, address, shared memory
# (/dev/shm) and processes; files are shared, as on a cluster.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/multihost.sh [--hosts N,N...] [--rate RATE] [--clocks S,S...] [--mpi "OPTIONS"] [--sent FILE]
                            [--cut HOST,FILE] [--kill HOST,FILE] [--timeout SECONDS] [--supervise] PROGRAM ARGS...
  --hosts N,N...     ranks of each host (2,2); the hosts are called node0, node1, ...
  --rate RATE        what each host may send to the others, as tc writes it: 100mbit, 1gbit (not limited)
  --clocks S,S...    seconds by which each host's monotonic clock is ahead of this machine's (0)
  --mpi "OPTIONS"    further options of mpirun, e.g. "--map-by node" to deal consecutive ranks to different hosts
  --sent FILE        the bytes that each host sent to the others: a line "node0 BYTES" for each
  --cut HOST,FILE    pulls the network cable of a host (node1) while the file exists
  --kill HOST,FILE   ends all processes of a host once the file exists, as a power failure does; the host starts again
                     when the file is removed
  --timeout SECONDS  ends the run, with exit code 124
  --supervise        runs PROGRAM on this machine, where mpirun starts ranks on the hosts; {hostfile} in ARGS names them
Needs root, iproute2, util-linux and Open MPI. Exits with 77 and the reason if hosts cannot be made here; otherwise with
the exit code of mpirun.
TEXT
}

hosts=2,2
rate=
clocks=()
mpi=
sent=
limit=
supervise=
losses=()
while (($#)); do
  case $1 in
    --hosts)
      [[ ${2:-} =~ ^[1-9][0-9]*(,[1-9][0-9]*)*$ ]] || die 64 "--hosts takes ranks of each host, e.g. 2,2; found '${2:-}'"
      hosts=$2
      shift
      ;;
    --rate)
      [[ ${2:-} =~ ^[1-9][0-9]*[kmg]bit$ ]] || die 64 "--rate takes a rate such as 100mbit; found '${2:-}'"
      rate=$2
      shift
      ;;
    --clocks)
      [[ ${2:-} =~ ^-?[0-9]+(,-?[0-9]+)*$ ]] || die 64 "--clocks takes seconds of each host, e.g. 0,100; found '${2:-}'"
      IFS=, read -ra clocks <<<"$2"
      shift
      ;;
    --mpi)
      mpi=${2:-}
      shift
      ;;
    --sent)
      [[ -n ${2:-} ]] || die 64 "--sent takes a file"
      sent=$2
      shift
      ;;
    --cut | --kill)
      [[ ${2:-} =~ ^node[0-9]+,.+$ ]] || die 64 "$1 takes HOST,FILE, e.g. node1,results/file; found '${2:-}'"
      losses+=("${1#--},$2")
      shift
      ;;
    --timeout)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die 64 "--timeout takes seconds; found '${2:-}'"
      limit=$2
      shift
      ;;
    --supervise) supervise=1 ;;
    -h | --help)
      usage
      exit 0
      ;;
    --)
      shift
      break
      ;;
    -*) die 64 "unknown option $1; see --help" ;;
    *) break ;;
  esac
  shift
done
(($#)) || {
  usage >&2
  exit 64
}
IFS=, read -ra ranks <<<"$hosts"
((${#ranks[@]} <= 200)) || die 64 "--hosts: at most 200 hosts; found ${#ranks[@]}"

# skip REASON...: no hosts can be made here; not a failure of the project.
skip() {
  echo "skipped: hosts in namespaces: $*"
  exit 77
}
((EUID == 0)) || skip "root is required"
for tool in ip nsenter unshare mpirun; do
  command -v "$tool" >/dev/null || skip "$tool is not installed (apt-get install iproute2 util-linux openmpi-bin)"
done
[[ -z $rate ]] || command -v tc >/dev/null || skip "tc is not installed (apt-get install iproute2)"
unshare --net --uts --mount --pid --fork --mount-proc true 2>/dev/null || skip "namespaces are not permitted here"
((${#clocks[@]} == 0)) || unshare --time --monotonic 1 --fork true 2>/dev/null || skip "time namespaces are not permitted here"

state=$(mktemp -d)
holders=()
watchers=()
# shellcheck disable=SC2317  # called by a trap
cleanup() {
  # Watchers start hosts again.
  if ((${#watchers[@]} > 0)); then
    kill "${watchers[@]}" 2>/dev/null || true
    wait "${watchers[@]}" 2>/dev/null || true
  fi
  # The first process of a PID namespace takes all others with it; unshare only waits for it.
  cat "$state"/*/first "$state"/*/holder 2>/dev/null | xargs -r kill -KILL 2>/dev/null || true
  wait "${holders[@]}" 2>/dev/null || true
  rm -rf "$state"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# make_host NAME [SECONDS]: namespaces that a sleeping process holds, with its PID in $state/NAME/first. SECONDS: its clock
# is so much ahead.
make_host() {
  local name=$1 clock=${2:-} i pid
  mkdir -p "$state/$name"
  # `wait` reaps daemons that mpirun leaves.
  # shellcheck disable=SC2016  # for the shell in the namespace
  unshare ${clock:+--time --monotonic "$clock"} --net --uts --mount --pid --fork --kill-child --mount-proc --propagation private bash -c '
    hostname "$2"
    mount --bind "$1/hosts" /etc/hosts
    mount -t tmpfs -o mode=1777 shm /dev/shm
    ip link set lo up
    echo ready >"$1/$2/state"
    while :; do sleep 3600 & wait $! || true; done' holder "$state" "$name" </dev/null >"$state/$name/log" 2>&1 &
  local holder=$!
  holders+=("$holder")
  echo "$holder" >"$state/$name/holder"
  for ((i = 0; i < 200; ++i)); do
    [[ -s $state/$name/state ]] && break
    kill -0 "$holder" 2>/dev/null || skip "host $name does not start: $(cat "$state/$name/log")"
    sleep 0.05
  done
  [[ -s $state/$name/state ]] || skip "host $name does not start within 10 s"
  # (The file ends without a newline, so that read returns 1.)
  read -r pid _ <"/proc/$holder/task/$holder/children" || true
  echo "$pid" >"$state/$name/first"
}
first_process() { cat "$state/$1/first"; }

# in_host PID COMMAND...: in the network of that host.
in_host() {
  local pid=$1
  shift
  nsenter -t "$pid" -n "$@"
}

network=10.97.0
{
  echo "127.0.0.1 localhost"
  echo "$network.254 head"
  for i in "${!ranks[@]}"; do echo "$network.$((i + 1)) node$i"; done
} >"$state/hosts"
make_host head
head=$(first_process head)
in_host "$head" ip link add br0 type bridge
in_host "$head" ip addr add "$network.254/24" dev br0
in_host "$head" ip link set br0 up
# start_node I: the host nodeI, joined to the others.
start_node() {
  local i=$1 pid
  make_host "node$i" "${clocks[i]:-}"
  pid=$(first_process "node$i")
  in_host "$head" ip link del "v$i" 2>/dev/null || true # of the host before, which the kernel removes later
  in_host "$head" ip link add "v$i" type veth peer name eth0 netns "$pid"
  in_host "$head" ip link set "v$i" master br0 up
  in_host "$pid" ip addr add "$network.$((i + 1))/24" dev eth0
  in_host "$pid" ip link set eth0 up
  [[ -z $rate ]] || in_host "$pid" tc qdisc replace dev eth0 root tbf rate "$rate" burst 64kb latency 100ms ||
    skip "tc cannot limit a rate here"
}
total=0
for i in "${!ranks[@]}"; do
  start_node "$i"
  echo "node$i slots=${ranks[i]}" >>"$state/hostfile"
  total=$((total + ranks[i]))
done

# Called by mpirun as it would call ssh: [options] HOST WORDS..., with a bare environment and a shell.
cat >"$state/rsh" <<SH
#!/usr/bin/env bash
while [[ \$1 == -* ]]; do shift; done
pid=\$(cat "$state/\$1/first") || exit 255
shift
cd /
exec nsenter -t "\$pid" -n -u -m -p ${clocks:+-T} env -i HOME="\${HOME:-/}" USER=root LOGNAME=root SHELL=/bin/sh PATH="$PATH" sh -c "\$*"
SH
chmod +x "$state/rsh"

mpi_setup "$total"
# Without the others' process table, mpirun itself could not enter their namespaces: it runs in the network of "head".
# shellcheck disable=SC2206
start=(nsenter -t "$head" -n -u "$(command -v mpirun)" --bind-to none
  --mca plm rsh --mca plm_rsh_agent "$state/rsh" --mca btl_tcp_if_include "$network.0/24"
  --mca oob_tcp_if_include "$network.0/24" $mpi)
if [[ -n $supervise ]]; then
  mkdir "$state/bin"
  printf '#!/usr/bin/env bash\nexec %s "$@"\n' "${start[*]@Q}" >"$state/bin/mpirun"
  chmod +x "$state/bin/mpirun"
  command=(env PATH="$state/bin:$PATH" "${@//"{hostfile}"/$state/hostfile}")
else
  command=("${start[@]}" --hostfile "$state/hostfile" -n "$total" "$@")
fi
[[ -z $limit ]] || command=(timeout --kill-after=10 "$limit" "${command[@]}")
# lose KIND HOST FILE: loses a host while the file exists.
# shellcheck disable=SC2317  # called in the background
lose() {
  while :; do
    while [[ ! -e $3 ]]; do sleep 0.05; done
    if [[ $1 == kill ]]; then
      kill -KILL "$(first_process "$2")"
      rm "$state/$2/first" "$state/$2/holder" "$state/$2/state"
      while [[ -e $3 ]]; do sleep 0.05; done
      start_node "${2#node}"
      continue
    fi
    in_host "$head" ip link set "v${2#node}" down
    while [[ -e $3 ]]; do sleep 0.05; done
    in_host "$head" ip link set "v${2#node}" up
  done
}
for loss in "${losses[@]}"; do
  IFS=, read -r kind host file <<<"$loss"
  lose "$kind" "$host" "$file" &
  watchers+=("$!")
done
code=0
"${command[@]}" || code=$?
if [[ -n $sent ]]; then
  # The tenth column of /proc/net/dev, whose first one is the interface.
  for i in "${!ranks[@]}"; do
    # shellcheck disable=SC2016  # for awk
    echo "node$i $(in_host "$(first_process "node$i")" awk '$1 == "eth0:" { print $10 }' /proc/net/dev)"
  done >"$sent"
fi
exit "$code"
