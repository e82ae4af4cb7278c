# Checks the sources given as arguments (paths relative to the root of the tree) against the floors of
# docs/architecture.md: an include goes down or stays in its own row; heavy headers stay out of public headers
# (*_internal.h are private); no source is longer than 600 lines; within a row, neither files (a header and its
# sources count as one) nor directories include each other in a circle; what lies in a directory of core/ops is used by
# that directory only, but for shared and gemm; a comment names files that exist. Of the tests, the reference trainer
# reads files with core/io, shares nothing else with the product, and has at most 400 lines in a file; the reference
# kernels and the simulated GPU use core, and only the simulated GPU's program (accelerator_sim.cpp) what is above it.
# The first argument lists all files of the tree, one a line. Prints FILE:LINE: what is wrong, and exits with 1 when
# anything is.

BEGIN {
  # Directory, floor and row. Rows of one floor may not use each other; directories of one row may.
  n = split("core/base 1 base;core/config 2 config;core/device 2 device;core/trace 3 trace;core/tensor 3 tensor;" \
    "core/ops 4 ops;core/io 4 io;precision 5 precision;memory 6 memory;parallel/comm 7 comm;parallel/control 7 control;" \
    "parallel/grid 8 parallel;parallel/data 8 parallel;parallel/tensor 8 parallel;parallel/pipeline 8 parallel;" \
    "parallel/program 8 parallel;parallel/context 8 parallel;parallel/experts 8 parallel;apps/model 9 model;apps/machine 9 machine;" \
    "apps/monitor 10 monitor;apps/data 10 application;apps/plan 10 application;apps/engine 11 engine;apps/check 11 check;apps/diagnosis 11 diagnosis;apps/launch 11 launch;apps/profile 11 profile;apps/reward 11 reward;apps/rollout 11 rollout;apps/predict 12 predict;apps/state 12 state;apps/train 13 training;" \
    "apps/bench 14 bench;apps/planner 14 planner;apps/verify 14 verify;apps/tune 15 tune;apps/nrl-train 16 command;tests/reference 17 reference;tests/ops/reference 17 kernels;tests/sim 18 simulator", entries, ";")
  for (i = 1; i <= n; ++i) {
    split(entries[i], part, " ")
    floor_of[part[1]] = part[2]
    row_of[part[1]] = part[3]
  }
  max_lines = 600
  named = 0
  heavy = "^(nlohmann/|yaml-cpp/|CLI/|mpi\\.h$)"
}

# The directory of the table that a path lies in; "" when there is none.
function directory_of(path,    part, n) {
  n = split(path, part, "/")
  if (n >= 2 && part[1] in floor_of) return part[1]
  if (n >= 3 && (part[1] "/" part[2]) in floor_of) return part[1] "/" part[2]
  if (n >= 4 && (part[1] "/" part[2] "/" part[3]) in floor_of) return part[1] "/" part[2] "/" part[3]
  return ""
}

# The directory inside core/ops; "" for a contract.
function op_of(path,    part) {
  return split(path, part, "/") > 3 ? part[3] : ""
}
function op_level(path,    op) {
  op = op_of(path)
  return op == "" ? 1 : op == "shared" ? 2 : op == "gemm" ? 3 : 4
}

function wrong(text) {
  print text
  bad = 1
}

# Notes that `from` uses `to`, at this line.
function uses(kind, row, from, to) {
  if (from == to || (kind, from, to) in place_of) return
  place_of[kind, from, to] = file ":" FNR
  if (!((kind, from) in degree)) node[kind, row, count[kind, row]++] = from
  successor[kind, from, degree[kind, from]++] = to
  rows[row]
}

# The first node that `v` uses and that is left; "" when there is none.
function next_left(kind, v, left,    i) {
  for (i = 0; i < degree[kind, v]; ++i)
    if (successor[kind, v, i] in left) return successor[kind, v, i]
  return ""
}

# Reports circles of a row that share no node.
function find_circles(kind, row,    i, v, n, left, changed, path, position, text) {
  for (i = 0; i < count[kind, row]; ++i) left[node[kind, row, i]]
  while (1) {
    # What uses nothing that is left is not part of a circle.
    do {
      changed = 0
      for (i = 0; i < count[kind, row]; ++i) {
        v = node[kind, row, i]
        if ((v in left) && next_left(kind, v, left) == "") {
          delete left[v]
          changed = 1
        }
      }
    } while (changed)
    i = 0
    while (i < count[kind, row] && !(node[kind, row, i] in left)) ++i
    if (i == count[kind, row]) return
    split("", position)
    n = 0
    for (v = node[kind, row, i]; !(v in position); v = next_left(kind, v, left)) {
      position[v] = n
      path[n++] = v
    }
    text = v
    for (i = position[v]; i < n; ++i) text = text " -> " (i + 1 < n ? path[i + 1] : v)
    wrong(place_of[kind, v, position[v] + 1 < n ? path[position[v] + 1] : v] ": circle of " kind ": " text)
    for (i = position[v]; i < n; ++i) delete left[path[i]]
  }
}

# Remembers the files that a comment names: with a directory, or by their names alone. Patterns, and headers
# between < and >, are left out.
function read_comment(text,    name, rest, before) {
  while (match(text, /[A-Za-z0-9_.\/*{}-]+\.(h|cpp|cu|cuh|sh|awk|md)/)) {
    name = substr(text, RSTART, RLENGTH)
    before = substr(text, RSTART - 1, 1)
    rest = substr(text, RSTART + RLENGTH)
    if (rest !~ /^[A-Za-z0-9_]/ && name !~ /^\/|[*{}]/ && before != "<") {
      named_at[named] = file ":" FNR
      named_file[named++] = name
    }
    text = rest
  }
}

function too_long() {
  most = here == "tests/reference" ? 400 : max_lines
  if (lines > most) wrong(file ":" lines ": the file has " lines " lines, more than " most "; split it")
}

NR == FNR {
  for (path = $0; path != ""; path = index(path, "/") ? substr(path, index(path, "/") + 1) : "") exists[path]
  next
}

FNR == 1 {
  if (file != "") too_long()
  file = FILENAME
  here = directory_of(file)
  if (here == "") wrong(file ":1: this directory has no floor; give it one in tests/floors/floors.awk and docs/architecture.md")
}

{ lines = FNR }

match($0, /\/\/.*/) { read_comment(substr($0, RSTART + 2)) }

here != "" && /^[ \t]*#[ \t]*include[ \t]*["<]/ {
  target = $0
  sub(/^[^"<]*["<]/, "", target)
  sub(/[">].*/, "", target)
  quoted = $0 ~ /include[ \t]*"/
  there = directory_of(target)
  if (!quoted) exists[target]  # of a library; comments may name it
  if (here == "tests/reference") {
    if (quoted && target !~ /^(core\/io|tests)\//)
      wrong(file ":" FNR ": the reference may use core/io only, not \"" target "\"")
    next
  }
  if (there != "" && row_of[here] == row_of[there] && target in exists) {
    from = file
    to = target
    sub(/\.[a-z]+$/, "", from)
    sub(/\.[a-z]+$/, "", to)
    uses("files", row_of[here], from, to)
    sub(/\/[^\/]*$/, "", from)
    sub(/\/[^\/]*$/, "", to)
    uses("directories", row_of[here], from, to)
  }
  if (there == "core/ops" && !(here == "core/ops" && op_of(file) == op_of(target))) {
    # In core/ops: contracts < shared < gemm < ops. Kernels of the tests count as ops.
    level = here == "core/ops" ? op_level(file) : here ~ /^tests\// ? 4 : op_level("core/ops/exec.h")
    own = file == "tests/ops/reference/" op_of(target) ".cpp"  # the reference of that op
    if (op_level(target) > level || (op_level(target) == 4 && op_of(file) != "libraries" && !own))
      wrong(file ":" FNR ": includes \"" target "\" from inside a directory of core/ops")
  }
  if (there == "") {
    if (quoted) wrong(file ":" FNR ": includes \"" target "\"; write the path from the root of the tree")
    if (file ~ /\.h$/ && file !~ /_internal\.h$/ && target ~ heavy)
      wrong(file ":" FNR ": includes <" target "> in a header; heavy headers belong into .cpp files or *_internal.h")
  } else if (here ~ /^tests\// && there !~ /^(core|tests)\// && file != "tests/sim/accelerator_sim.cpp") {
    wrong(file ":" FNR ": " here " may use core only, not \"" target "\"")
  } else if (here != there && row_of[here] != row_of[there]) {
    from = here " (floor " floor_of[here] ")"
    to = there " (floor " floor_of[there] ")"
    if (floor_of[there] > floor_of[here])
      wrong(file ":" FNR ": goes up: " from " includes \"" target "\" of " to)
    else if (floor_of[there] == floor_of[here])
      wrong(file ":" FNR ": goes sideways: " from " includes \"" target "\" of " to)
    else if ((here == "parallel/comm" || here == "parallel/control") && there !~ /^core\//)
      wrong(file ":" FNR ": " here " may use core only, not \"" target "\"")
  }
}

END {
  too_long()
  for (row in rows) {
    find_circles("files", row)
    find_circles("directories", row)
  }
  for (i = 0; i < named; ++i)
    if (!(named_file[i] in exists)) wrong(named_at[i] ": names " named_file[i] ", which does not exist")
  exit bad
}
