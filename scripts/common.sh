# shellcheck shell=bash
# Functions shared by the scripts; sourced, never run.

root_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '\n== %s\n' "$*"; }

# die CODE MESSAGE...
die() {
  local code=$1
  shift
  printf 'error: %s\n' "$*" >&2
  exit "$code"
}

# Cores this process may use. (nproc alone would return OMP_NUM_THREADS.)
cores() { env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc; }

# build PRESET TARGET...: configures and builds; default: all targets. `cmake_settings`: -D options, separated by spaces.
# A compile job may take 1.5 GB.
build() {
  local preset=$1 jobs by_memory
  shift
  jobs=$(cores)
  by_memory=$(awk '/^MemAvailable:/ { print int($2 / 1536000) }' /proc/meminfo 2>/dev/null || true)
  if [[ -n $by_memory ]] && ((by_memory < jobs)); then jobs=$((by_memory > 1 ? by_memory : 1)); fi
  local log=$root_dir/build/$preset/configure.log
  mkdir -p "$root_dir/build/$preset"
  # shellcheck disable=SC2086
  if ! (cd "$root_dir" && cmake --preset "$preset" ${cmake_settings:-}) >"$log" 2>&1; then
    cat "$log" >&2
    die 69 "cmake failed to configure (see above). Fix: scripts/install-deps.sh installs what is missing"
  fi
  (cd "$root_dir" && cmake --build --preset "$preset" -j "$jobs" ${1:+--target "$@"})
}

# Sets `binary` to nrl-train of the preset cpu, built now.
build_binary() {
  build cpu nrl-train
  # shellcheck disable=SC2034  # used by the scripts that source this
  binary=$root_dir/build/cpu/bin/nrl-train
}

# take_KIND --NAME [VALUE]...: checks the value of an option and sets the variable NAME to it.
take_number() {
  [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die 64 "$1 takes a number of 1 or more"
  printf -v "${1#--}" '%s' "$2"
}
take_path() {
  [[ -n ${2:-} ]] || die 64 "$1 takes a path"
  printf -v "${1#--}" '%s' "$2"
}
take_program() {
  local path
  path=$(realpath -e "${2:-}") || die 66 "$1: no such file"
  printf -v "${1#--}" '%s' "$path"
}
# take_option "NUMBERS" "PATHS" --NAME [VALUE]...: the options that benchmarks share: those named in NUMBERS and PATHS,
# --binary and --help, which calls usage(). Sets `taken` to the number of arguments of the option.
take_option() {
  local numbers=" $1 " paths=" $2 " name=" ${3#--} "
  shift 2
  # shellcheck disable=SC2034  # used by the scripts that source this
  taken=2
  case $1 in
    --binary) take_program "$@" ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      [[ $1 == --* ]] || name=none
      if [[ $numbers == *"$name"* ]]; then
        take_number "$@"
      elif [[ $paths == *"$name"* ]]; then
        take_path "$@"
      else
        die 64 "unknown option $1; see --help"
      fi
      ;;
  esac
}
# Adds the value of the option to the array pythons. realpath -s: a virtual environment's python is a link that must
# keep its name.
take_python() {
  local path
  path=$(realpath -es "$(command -v "${2:-}")" 2>/dev/null) || die 66 "$1: no program '${2:-}'"
  pythons+=("$path")
}

# Sets the array mpi_run and the environment that mpirun needs. --oversubscribe: mpirun counts cores, not hardware
# threads. Root must be allowed explicitly.
mpi_setup() {
  local ranks=$1
  # shellcheck disable=SC2034  # used by the scripts that source this
  mpi_run=(mpirun --bind-to none --oversubscribe -n "$ranks")
  if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
  # For mpirun's hwloc: containers often have no /sys.
  [[ -d /sys/devices/system/cpu ]] || export HWLOC_HIDE_ERRORS=${HWLOC_HIDE_ERRORS:-2}
  # Containers often forbid cross-process memory copies (CMA), which Open MPI reports with every message.
  export OMPI_MCA_btl_vader_single_copy_mechanism=${OMPI_MCA_btl_vader_single_copy_mechanism:-none}
}

# Pythons that may have PyTorch, the preferred one first.
torch_pythons() { printf '%s\n' ${NRL_PYTHON:+"$NRL_PYTHON"} python3 /usr/bin/python3; }
# find_torch: prints the first of them that has it.
find_torch() {
  local python
  while read -r python; do
    if outside "$python" -c 'import torch' 2>/dev/null; then
      echo "$python"
      return
    fi
  done < <(torch_pythons)
  return 1
}
# Runs a command of another program without the library paths of ours: its own libraries have their own.
outside() {
  local name names=()
  for name in $(compgen -e | grep -E '^(LD_LIBRARY_PATH|LD_PRELOAD|OPAL_|OMPI_|PMIX_|PRTE_)'); do names+=(-u "$name"); done
  env "${names[@]}" "$@"
}

# Of the numbers on standard input; nothing if there are none.
median() { LC_ALL=C sort -g | awk '{ v[NR] = $1 } END { if (NR) printf "%.9g\n", NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'; }
