# Reads metrics.jsonl (one flat JSON object per line) and prints the values of one field:
#   -v key=step_ms
function field(name,    at, rest) {
  at = index($0, "\"" name "\":")
  if (!at) return ""
  rest = substr($0, at + length(name) + 3)
  sub(/[,}].*/, "", rest)
  return rest
}
{ value = field(key); if (value != "" && value != "null") print value }
