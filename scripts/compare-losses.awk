# Compares two metrics.jsonl, step by step: awk -v tolerance=1e-3 -f scripts/compare-losses.awk A B
# Relative tolerances: `tolerance` of losses, `norm_tolerance` of gradient norms (default: the same); 0: every digit.
# Prints the largest differences. Exit code 1 when they exceed the tolerance or the files have different steps.
function field(name,    at, rest) {
  at = index($0, "\"" name "\":")
  if (!at) return ""
  rest = substr($0, at + length(name) + 3)
  sub(/[,}].*/, "", rest)
  return rest
}
function number(text) { return text ~ /^-?[0-9.]/ ? text + 0 : "nan" }
function compare(name, a, b, step,    x, y, difference, scale) {
  if (a == b) { ++same[name]; return }
  x = number(a)
  y = number(b)
  if (x == "nan" || y == "nan") { wrong = "step " step ": " name " is " a " and " b; return }
  difference = x > y ? x - y : y - x
  scale = y < 0 ? -y : y
  difference = scale > 0 ? difference / scale : difference
  if (difference > worst[name]) { worst[name] = difference; worst_step[name] = step }
}
field("loss") == "" { next }
FNR == NR { loss[++rows] = field("loss"); norm[rows] = field("grad_norm"); step[rows] = field("step"); next }
{
  ++others
  if (field("step") != step[others]) wrong = "row " others " is step " step[others] " and " field("step")
  compare("loss", loss[others], field("loss"), step[others])
  compare("grad_norm", norm[others], field("grad_norm"), step[others])
}
END {
  if (norm_tolerance == "") norm_tolerance = tolerance
  if (!rows || rows != others) wrong = "there are " rows + 0 " and " others + 0 " steps"
  if (wrong != "") { print wrong; exit 1 }
  printf "%d steps, largest relative difference: loss %.2g", rows, worst["loss"]
  if (worst["loss"] > 0) printf " (step %s)", worst_step["loss"]
  printf ", gradient norm %.2g", worst["grad_norm"]
  if (worst["grad_norm"] > 0) printf " (step %s)", worst_step["grad_norm"]
  print "; allowed " tolerance " and " norm_tolerance
  exit worst["loss"] > tolerance || worst["grad_norm"] > norm_tolerance
}
