#!/usr/bin/env python3
"""Writes the Unicode table of apps/data and the character classes that the tests expect.

    unicode-tables.py stand-ins >apps/data/stand_ins.inc
    unicode-tables.py classes >tests/data/fixtures/unicode_classes.txt

The reference is what Hugging Face's tokenizers 0.23 does: its regular expressions (Oniguruma) have the classes
of Unicode 16.0, its digits (the Rust library) those of 17.0.
Needs `pip install unicodedata2==16.0.0 regex` for the first, `tokenizers` for the second.
"""

import sys
import unicodedata as oldest  # 14.0, the oldest tables of a PCRE2 that we build with

COMMENT = "// clang-format off\n// Made by scripts/dev/unicode-tables.py %s.\n\n"


def code_points():
    return (c for c in range(0x110000) if not 0xD800 <= c < 0xE000)


def write_rows(name, kind, rows):
    print(f"constexpr {kind} {name}[] = {{")
    line = ""
    for row in rows:
        text = "{" + ",".join(f"0x{v:X}" for v in row) + "},"
        if len(line) + len(text) > 110:
            print(line.rstrip())
            line = ""
        line += text + " "
    print(line.rstrip() + "\n};")


def stand_ins():
    import regex
    import unicodedata2 as unicode

    assert oldest.unidata_version == "14.0.0" and unicode.unidata_version == "16.0.0"
    names = ["Han", "Hiragana", "Katakana", "Bopomofo", "Hangul"]  # those that a pattern may name
    scripts = [(name, regex.compile(f"\\p{{Script={name}}}")) for name in names]

    def properties(c):
        script = next((name for name, pattern in scripts if pattern.match(chr(c))), "another")
        return unicode.category(chr(c)), script, len(chr(c).encode())

    stable = {}
    for c in code_points():
        if c != 0x180E and unicode.category(chr(c)) == oldest.category(chr(c)) != "Cn":
            stable.setdefault(properties(c), []).append(c)
    rows = []
    for c in code_points():
        # U+180E was a space until Unicode 6.3, and still is one for \s of PCRE2.
        if c != 0x180E and unicode.category(chr(c)) == oldest.category(chr(c)):
            continue
        category, script, length = properties(c)
        if rows and rows[-1][1] == c - 1 and rows[-1][3] == (category, script):
            rows[-1][1] = c
            continue
        candidates = stable[properties(c)]
        rows.append([c, c, min(candidates, key=lambda d: abs(d - c)), (category, script)])
    print(COMMENT % "stand-ins" + "// {first, last, stand-in}: characters whose classes are newer than Unicode 14.0, and one of the same")
    print("// general category, script and length in UTF-8 that every PCRE2 knows.")
    write_rows("stand_in_table", "StandIn", [row[:3] for row in rows])


def classes():
    import tokenizers
    from tokenizers import Regex, pre_tokenizers

    print(f"# Ranges of characters that match in tokenizers {tokenizers.__version__}. Made by scripts/dev/unicode-tables.py classes.")
    patterns = [rf"\p{{{n}}}" for n in ("L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "N", "Nd", "P", "S", "Sc", "Sm", "Z", "C", "Cf", "Han")]
    for pattern in patterns + [r"\s", r"\w", r"\d", r"\h", "[[:punct:]]", "[[:space:]]", r"[^\s\p{L}\p{N}]", "digits"]:
        if pattern == "digits":
            step = pre_tokenizers.Digits(individual_digits=True)
            matches = {c for c in code_points() if len(step.pre_tokenize_str("a" + chr(c) + "a")) == 3}
        else:
            step = pre_tokenizers.Split(Regex(pattern), "removed")
            matches = {c for c in code_points() if not step.pre_tokenize_str(chr(c))}
        ranges = []
        for c in sorted(matches):
            if ranges and ranges[-1][1] == c - 1:
                ranges[-1][1] = c
            else:
                ranges.append([c, c])
        print(pattern, *(f"{a:x}" if a == b else f"{a:x}-{b:x}" for a, b in ranges))


{"stand-ins": stand_ins, "classes": classes}[sys.argv[1]]()
