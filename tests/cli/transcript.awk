# Compares output shown in the docs with output of the program: awk -f transcript.awk TRANSCRIPT OUTPUT
# Words and their order must agree. Numbers, durations, units and instruction sets become placeholders, and so do the
# names of the slowest kernels; MFU may be missing; a wrapped line counts as one. Several alike in a row (steps, rows of a chart) count as
# one. In the transcript, a line "..." stands for any lines, and "..." at the end of a line for any text.
# Prints the first line of the transcript that is not in the output at its place, and exits with 1.

function normalize(line,    n, words, i, text) {
  if (line ~ /^ *[0-9.]+ \|/) return "N |"                                # a row of a chart
  if (line ~ /^ *loss \+-/) sub(/--+/, "-", line)                         # its axis
  gsub(/!\([^)]*\)/, "", line)                                            # the mark of an unusual value
  gsub(/avx(2|512(_bf16|_amx)?)|baseline/, "ISA", line)
  gsub(/[0-9]+([.,:][0-9]+)*/, "N", line)
  gsub(/Ne[-+]N/, "N", line)
  gsub(/(N[dhm])*N[dhms]/, "T", line)
  gsub(/N[kMGTP]/, "N", line)
  gsub(/[MGTP]FLOP/, "FLOP", line)
  sub(/ +mfu N%/, "", line)                                               # not printed on a machine too busy to measure
  n = split(line, words, /[ \t]+/)
  if (words[1] == "kernels" && words[n] == "N%") return "kernels NAME N%"  # by time, which differs
  for (i = 1; i <= n; ++i) {
    if (words[i - 1] ~ /N$/ && words[i] ~ /^([kMGTP]|[KMGTP]?i?B)$/) continue
    if (words[i] ~ /^(thread|epoch)s/) sub(/s/, "", words[i])
    text = text " " words[i]
  }
  return text
}

# Reads a file into `lines`, wrapped lines joined; returns their number.
function read(path, lines,    line, n) {
  while ((getline line < path) > 0) {
    if (line ~ /^[ \t]*$/ || line ~ /^[0-9:]+ starting: .* so far\)$/) continue  # the latter on a slow machine only
    if (line ~ /^        / && line !~ /\|/ && n) lines[n] = lines[n] " " line
    else lines[++n] = line
  }
  return n
}

function agree(want, got) {
  if (want ~ / \.\.\.$/) return index(got, substr(want, 1, length(want) - 4)) == 1
  return want == got
}

BEGIN {
  n = read(ARGV[1], shown)
  m = read(ARGV[2], printed)
  if (!n || !m) { print "there is no " (n ? "output" : "transcript"); exit 1 }
  for (i = 1; i <= m; ++i) got[i] = normalize(printed[i])
  at = 0
  gap = 1  # whether lines may be left out here
  for (i = 1; i <= n; ++i) {
    if (shown[i] == "...") { gap = 1; continue }
    want = normalize(shown[i])
    if (at && agree(want, got[at])) { gap = 0; continue }
    for (j = at + 1; j <= m && !agree(want, got[j]) && gap; ++j) {}
    if (j > m || !agree(want, got[j])) {
      print "not printed" (at ? " after '" printed[at] "'" : "") ": " shown[i]
      if (!gap && at < m) print "but: " printed[at + 1]
      exit 1
    }
    while (j < m && agree(want, got[j + 1])) ++j
    at = j
    gap = 0
  }
}
