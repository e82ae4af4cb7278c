# Reads metrics.jsonl (one flat JSON object a line). Modes:
#   -v mode=column -v key=step_ms      the values of one field, of the rows that have it
#   -v mode=chart [-v width=60 -v height=12]   the loss as a chart of characters
function field(name,    at, rest) {
  at = index($0, "\"" name "\":")
  if (!at) return ""
  rest = substr($0, at + length(name) + 3)
  sub(/[,}].*/, "", rest)
  return rest
}
mode == "column" { value = field(key); if (value != "" && value != "null") print value; next }
mode == "chart" {
  value = field("loss")
  if (value == "" || value == "null") next
  x[++n] = field("step"); y[n] = value + 0
}
END {
  if (mode != "chart") exit
  if (n == 0) { print "no step in this file"; exit 1 }
  if (!width) width = 60
  if (!height) height = 12
  if (width > n) width = n
  # One column is the mean of its share of the steps.
  for (c = 1; c <= width; ++c) {
    sum = 0; count = 0
    for (i = int((c - 1) * n / width) + 1; i <= int(c * n / width); ++i) { sum += y[i]; ++count }
    mean[c] = sum / count
    if (c == 1 || mean[c] > top) top = mean[c]
    if (c == 1 || mean[c] < bottom) bottom = mean[c]
  }
  span = top > bottom ? top - bottom : 1
  for (c = 1; c <= width; ++c) row_of[c] = int((top - mean[c]) / span * (height - 1) + 0.5)
  for (r = 0; r < height; ++r) {
    line = ""
    for (c = 1; c <= width; ++c) line = line (row_of[c] == r ? "*" : " ")
    sub(/ +$/, "", line)
    printf "%7.3f |%s\n", top - r * span / (height - 1), line
  }
  axis = ""
  for (c = 1; c <= width; ++c) axis = axis "-"
  printf "%7s +%s\n", "loss", axis
  printf "%8s step %s to %s\n", "", x[1], x[n]
}
