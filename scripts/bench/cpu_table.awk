# Makes the Markdown tables of scripts/bench-cpu.sh. Input, separated by tabs:
#   program NAME TITLE
#   run CASE PRECISION NAME ROUND BEST_MS MEDIAN_MS PEAK_KIB OTHERS MFU GEMM_SHARE
# CASE is MODEL-bBATCH-tLENGTH. The first program is ours, the others are its peers. BEST_MS and MEDIAN_MS are of the steps
# of a round, OTHERS is the share of the processor that other programs took, MFU and GEMM_SHARE are given for ours only.
BEGIN { FS = "\t" }

$1 == "program" {
  names[++programs] = $2
  titles = titles " " $3 " |"
}
$1 == "run" {
  row = $2 FS $3
  if (!seen[row]++) rows[++row_count] = row
  n = ++rounds[row, $4]
  for (i = 6; i <= 11; ++i) values[row, $4, i, n] = $i + 0
}

# Smallest and median value of a field over the rounds.
function best(row, name, field,    n, x) {
  x = values[row, name, field, 1]
  for (n = 2; n <= rounds[row, name]; ++n)
    if (values[row, name, field, n] < x) x = values[row, name, field, n]
  return x
}
function median(row, name, field,    sorted, count, i, n, x) {
  count = rounds[row, name]
  for (n = 1; n <= count; ++n) { # insertion sort
    x = values[row, name, field, n]
    for (i = n; i > 1 && sorted[i - 1] > x; --i) sorted[i] = sorted[i - 1]
    sorted[i] = x
  }
  return count % 2 ? sorted[(count + 1) / 2] : (sorted[count / 2] + sorted[count / 2 + 1]) / 2
}
# Fastest step, median over the rounds of the median step, median peak.
function figure(kind, row, name) { return kind == "best" ? best(row, name, 6) : median(row, name, kind == "median" ? 7 : 8) }
# The peer's figure over ours, of the peer with the smallest.
function ratio(kind, row,    i, x, least) {
  for (i = 2; i <= programs; ++i) {
    x = figure(kind, row, names[i])
    if (i == 2 || x < least) least = x
  }
  return least / figure(kind, row, names[1])
}

function tokens(row,    sizes) {
  match(row, /-b[0-9]+-t[0-9]+/)
  split(substr(row, RSTART + 2, RLENGTH - 2), sizes, "-t")
  return sizes[1] * sizes[2]
}
# gpt2-124m-b4-t256: gpt2-124m 4x256.
function label(row,    parts) {
  split(row, parts, FS)
  match(parts[1], /-b[0-9]+-t/)
  sub(/-t/, "x", parts[1])
  return substr(parts[1], 1, RSTART - 1) " " substr(parts[1], RSTART + 2)
}
function precision(row) { return row ~ /bfloat16$/ ? "bf16" : "fp32" }

function print_header(text,    rule) {
  rule = text
  gsub(/[^|]+/, "---", rule)
  print text
  print rule
}

END {
  peers = programs > 1
  print_header("| tokens/s: best / median |" titles (peers ? " speed ratio |" : "") " MFU | in GEMMs |")
  for (r = 1; r <= row_count; ++r) {
    row = rows[r]
    printf "| %s %s |", label(row), precision(row)
    for (i = 1; i <= programs; ++i)
      printf " %.0f / %.0f |", tokens(row) * 1e3 / figure("best", row, names[i]), tokens(row) * 1e3 / figure("median", row, names[i])
    if (peers) printf " %.2f / %.2f |", ratio("best", row), ratio("median", row)
    printf " %.0f %% | %.0f %% |\n", 100 * median(row, names[1], 10), 100 * median(row, names[1], 11)
  }

  print ""
  print_header("| peak MiB |" titles (peers ? " memory ratio |" : ""))
  for (r = 1; r <= row_count; ++r) {
    row = rows[r]
    printf "| %s %s |", label(row), precision(row)
    for (i = 1; i <= programs; ++i) printf " %.0f |", figure("peak", row, names[i]) / 1024
    print peers ? sprintf(" %.2f |", 1 / ratio("peak", row)) : ""
  }

  for (r = 1; r <= row_count; ++r) {
    split(rows[r], parts, FS)
    fp32 = parts[1] FS "float32"
    if (parts[2] == "float32" || !(fp32 in seen)) continue
    if (!(found++)) print ""
    printf "%s: bf16 is %.2f / %.2f times as fast as fp32 (nrl-train).\n", label(fp32), \
      figure("best", fp32, names[1]) / figure("best", rows[r], names[1]), figure("median", fp32, names[1]) / figure("median", rows[r], names[1])
  }

  for (r = 1; r <= row_count; ++r)
    for (i = 1; i <= programs; ++i)
      if (median(rows[r], names[i], 9) > most) {
        most = median(rows[r], names[i], 9)
        disturbed = names[i] ", " label(rows[r]) " " precision(rows[r])
      }
  if (most > 0.05) printf "\nOther programs took up to %.0f %% of the processor (%s): repeat on an idle machine.\n", 100 * most, disturbed
}
