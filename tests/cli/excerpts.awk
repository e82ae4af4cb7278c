# Checks the C++ excerpts of a document: awk -f excerpts.awk DOCUMENT, in the root of the tree. Their lines must stand in
# a file that the document names in backquotes, in this order and without gaps, except where the excerpt has "...".
# Prints the first line of every excerpt that is in none of them, and exits with 1.

# The lines of a text without indentation and empty lines, each between newlines.
function add(text, line) {
  sub(/^[ \t]+/, "", line)
  return line == "" ? text : text line "\n"
}

function contains(text, excerpt,    n, parts, i, at) {
  n = split(excerpt, parts, /\n\.\.\.\n/)
  for (i = 1; i <= n; ++i) {
    at = index(text, "\n" parts[i] (i < n ? "\n" : ""))
    if (!at) return 0
    text = substr(text, at + length(parts[i]))
  }
  return 1
}

/^ *```/ {
  inside = /cpp/
  if (inside) excerpts[++count] = ""
  next
}
inside { excerpts[count] = add(excerpts[count], $0); next }
{
  while (match($0, /`[a-z_\/-]+\/[a-z_.-]+\.(cpp|cu|cuh|h)`/)) {
    paths[substr($0, RSTART + 1, RLENGTH - 2)]
    $0 = substr($0, RSTART + RLENGTH)
  }
}
END {
  for (path in paths) {
    source[path] = "\n"
    while ((getline line < path) > 0) source[path] = add(source[path], line)
  }
  for (i = 1; i <= count; ++i) {
    found = 0
    for (path in paths) found = found || contains(source[path], excerpts[i])
    if (found) continue
    print FILENAME ": in no file it names: " substr(excerpts[i], 1, index(excerpts[i], "\n") - 1)
    bad = 1
  }
  exit bad || !count
}
