# Checks the sources given as arguments (paths relative to the root of the tree) against the floors of
# docs/architecture.md: an include goes down or stays in its own row; heavy headers stay out of public headers
# (*_internal.h are private); no source is longer than 600 lines. The reference of the tests reads files with core/io,
# shares nothing else with the product, and has at most 400 lines in a file. Prints FILE:LINE: what is wrong, and exits with 1 when anything is.

BEGIN {
  # Folder, floor and row. Rows of one floor may not use each other; folders of one row may.
  n = split("core/base 1 base;core/config 2 config;core/device 2 device;core/trace 3 trace;core/tensor 3 tensor;" \
    "core/ops 4 ops;core/io 4 io;precision 5 precision;memory 6 memory;parallel/comm 7 comm;" \
    "parallel/grid 8 parallel;parallel/data 8 parallel;parallel/tensor 8 parallel;parallel/pipeline 8 parallel;" \
    "parallel/context 8 parallel;parallel/expert 8 parallel;apps/model 9 model;" \
    "apps/data 10 application;apps/plan 10 application;apps/engine 11 engine;apps/train 12 training;" \
    "apps/bench 13 bench;apps/nrl-train 14 command;tests/reference 15 reference", entries, ";")
  for (i = 1; i <= n; ++i) {
    split(entries[i], part, " ")
    floor_of[part[1]] = part[2]
    row_of[part[1]] = part[3]
  }
  max_lines = 600
  heavy = "^(nlohmann/|yaml-cpp/|CLI/|mpi\\.h$|dnnl|oneapi/dnnl)"
}

# The folder of the table that a path lies in; "" when there is none.
function folder_of(path,    part, n) {
  n = split(path, part, "/")
  if (n >= 2 && part[1] in floor_of) return part[1]
  if (n >= 3 && (part[1] "/" part[2]) in floor_of) return part[1] "/" part[2]
  return ""
}

function wrong(text) {
  print text
  bad = 1
}

function too_long() {
  most = here == "tests/reference" ? 400 : max_lines
  if (lines > most) wrong(file ":" lines ": the file has " lines " lines, more than " most "; split it")
}

FNR == 1 {
  too_long()
  file = FILENAME
  here = folder_of(file)
  if (here == "") wrong(file ":1: this folder has no floor; give it one in tests/floors/floors.awk and docs/architecture.md")
}

{ lines = FNR }

here != "" && /^[ \t]*#[ \t]*include[ \t]*["<]/ {
  target = $0
  sub(/^[^"<]*["<]/, "", target)
  sub(/[">].*/, "", target)
  quoted = $0 ~ /include[ \t]*"/
  there = folder_of(target)
  if (here == "tests/reference") {
    if (quoted && target !~ /^(core\/io|tests)\//)
      wrong(file ":" FNR ": the reference may use core/io only, not \"" target "\"")
    next
  }
  if (there == "") {
    if (quoted) wrong(file ":" FNR ": includes \"" target "\"; write the path from the root of the tree")
    if (file ~ /\.h$/ && file !~ /_internal\.h$/ && target ~ heavy)
      wrong(file ":" FNR ": includes <" target "> in a header; heavy headers belong into .cpp files or *_internal.h")
  } else if (here != there && row_of[here] != row_of[there]) {
    from = here " (floor " floor_of[here] ")"
    to = there " (floor " floor_of[there] ")"
    if (floor_of[there] > floor_of[here])
      wrong(file ":" FNR ": goes up: " from " includes \"" target "\" of " to)
    else if (floor_of[there] == floor_of[here])
      wrong(file ":" FNR ": goes sideways: " from " includes \"" target "\" of " to)
    else if (here == "parallel/comm" && there !~ /^core\//)
      wrong(file ":" FNR ": parallel/comm may use core only, not \"" target "\"")
  }
}

END {
  too_long()
  exit bad
}
