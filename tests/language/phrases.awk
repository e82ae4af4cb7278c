# Prints FOLDER FILE:LINE: PHRASE for comments that do not say "X does Y": those that begin with Of, What, Those, Who,
# Whose or That, and the words who, nobody, no one, those of, that of. A phrase may span two lines of a comment.

# The comment of a line; "" when there is none. Marks of documentation (///<) and one opening bracket are removed.
function comment_of(line) {
  gsub(/'(\\.|[^'\\])'/, "0", line)
  gsub(/"(\\.|[^"\\])*"/, "0", line)
  if (!match(line, /\/\/+[!<]*/)) return ""
  own_line = substr(line, 1, RSTART - 1) ~ /^[ \t]*$/
  line = substr(line, RSTART + RLENGTH)
  sub(/^[ \t(]+/, "", line)
  return line
}

function folder_of(path,    part, n) {
  n = split(path, part, "/")
  return n > 2 ? part[1] "/" part[2] : part[1]
}

function found(phrase) {
  print folder_of(FILENAME), FILENAME ":" FNR ": " phrase
}

FNR == 1 { inside = 0 }

{
  text = comment_of($0)
  if (text == "") {
    inside = 0
    next
  }
  # A comment goes on if it fills its line and the line before was one of it.
  if (!(inside && own_line)) {
    carried = ""
    if (match(text, /^(Of|What|Those|Who|Whose|That)[^A-Za-z]/)) found("begins with " substr(text, 1, RLENGTH - 1))
  }
  inside = 1
  rest = " " carried tolower(text) " "
  while (match(rest, /[^a-z](who|nobody|no one|those of|that of)[^a-z]/)) {
    # A comment that begins with it was found above.
    if (!(rest == " " tolower(text) " " && RSTART == 1 && !carried && text ~ /^Who[^A-Za-z]/))
      found(substr(rest, RSTART + 1, RLENGTH - 2))
    rest = substr(rest, RSTART + RLENGTH - 1)
  }
  carried = match(text, /(^|[^A-Za-z])([Nn]o|[Tt]hose|[Tt]hat)$/) ? tolower(substr(text, RSTART)) " " : ""
}
