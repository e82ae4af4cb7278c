#!/usr/bin/env python3
"""Mutation testing: changes the product's sources one place at a time and reports what the tests detect.

  scripts/mutate.sh --seed N --count K [--in DIR]   K places drawn by the seed, each changed by an operator
  scripts/mutate.sh --meaning [--name NAME]         the faults of scripts/mutants/by_meaning.txt
  scripts/mutate.sh --verify [--name NAME]          those of them that have a layout, found by `nrl-train verify`
  scripts/mutate.sh --check                         only checks that by_meaning.txt matches the sources

Operators: negate a condition, exchange && and ||, move a bound (< and <=), shift an index by one, drop a statement,
swap two arguments of a call, exchange + and -, change a constant. Comments, strings, preprocessor lines, logging and
error texts are left alone. The same seed draws the same places from the same sources.

Each mutant is built in a copy of the tree (build/mutants); the sources are not modified. The tests that cover its file
(scripts/mutants/tests.txt) run until one fails. Results: killed; SURVIVED; does not compile (warnings are errors); not in
this build.

by_meaning.txt has blocks of lines:

  name: adamw_no_decay
  file: core/ops/optimizer/adamw_step.h
  what: weights are not decayed
  in: source text      optional: the place of `old`; must occur exactly once in the file
  old: source text     must occur exactly once in there; one line each for text of several lines
  new: mutated text
  verify: 2 key=value  optional: number of ranks, and overrides of tests/verify/tiny.yaml, or of the file in that
                       directory that is named first; options of verify may be among them
  spoils: expression   with `verify`: the last line that verify prints must match it

A mutant with a layout is killed if `nrl-train verify` exits with 70 and names what it spoils. With --verify, those that
need --undisturbed are also run without it.

Exit 0; 1 with --meaning or --verify if a mutant survived; 65 if by_meaning.txt does not match the sources.
"""
import argparse
import collections
import dataclasses
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutants"
SOURCE = BUILD / "source"
BINARIES = SOURCE / "build" / "cpu"
LISTS = ROOT / "scripts" / "mutants"
PRODUCT = ("apps", "core", "memory", "parallel", "precision")


def die(code, text):
    print(f"mutate.sh: {text}", file=sys.stderr)
    sys.exit(code)


@dataclasses.dataclass
class Mutant:
    name: str
    file: str
    begin: int
    end: int
    new: str
    what: str
    verify: str = ""
    spoils: str = ""


# ---- Operators ----

SKIPPED = re.compile(r'R"([^()\\ ]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])\'|//[^\n]*|/\*.*?\*/'
                     r"|^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.S | re.M)
# Calls whose arguments are texts; of NRL_CHECK those after the condition.
TEXTS = re.compile(r"\b(?:NRL_CHECK|NRL_ENUM|static_assert|fail\w*|refuse\w*|diagnose\w*|warn\w*|error|print\w*"
                   r"|log::\w+|fmt::\w+)\(")


def closing(text, at):
    """The position after the bracket that closes the one at `at`; -1 if there is none."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i + 1
    return -1


def split_arguments(text, begin, end):
    """Spans of the arguments between two positions."""
    spans, depth, first = [], 0, begin
    for i in range(begin, end):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if text[i] == "," and depth == 0:
            spans.append((first, i))
            first = i + 1
    return spans + [(first, end)]


def masked(text):
    """The text with blanks in place of what is not mutated; positions and lines stay."""

    def blank(found):
        return re.sub(r"[^\n]", " ", found)

    text = SKIPPED.sub(lambda m: blank(m[0]), text)
    for call in TEXTS.finditer(text):
        end = closing(text, call.end() - 1)
        begin = call.start()
        if call[0].startswith("NRL_CHECK") and end > 0:
            begin = split_arguments(text, call.end(), end - 1)[0][1]
        if end > 0:
            text = text[:begin] + blank(text[begin:end]) + text[end:]
    return text


# An operator gets the masked text and the source, and yields places (begin, end) with their new text.

def replace(pattern, table):
    def places(text, _):
        for m in re.finditer(pattern, text):
            yield m.start(1), m.end(1), table[m[1]]
    return places


def negate(text, source):
    for m in re.finditer(r"\b(?:if|while)(?: constexpr)? \(", text):
        begin, end = m.end(), closing(text, m.end() - 1) - 1
        condition = text[begin:end]
        if end > begin and ";" not in condition and not re.search(r"[^=!<>]=[^=]", condition):
            yield begin, end, f"!({source[begin:end]})"


def shift_index(text, source):
    for m in re.finditer(r"(?<=[\w)\]])\[", text):
        end = closing(text, m.start()) - 1
        line = text[text.rfind("\n", 0, m.start()) + 1:m.start()]
        declared = re.search(r"(?:^|[;{(,])\s*(?:\w+ )*[\w:<>]+[*&]? \w+$", line) and "return" not in line
        if end > m.end() and not declared:
            yield m.end(), end, f"({source[m.end():end]}) + 1"


def drop_statement(text, _):
    words = "return|break|continue|using|throw|case|default|delete|typedef|static|const|auto|public|private|else"
    chain = r"\*?[A-Za-z_][\w:]*(?:\.|->|\[[^\]]*\]|\([^;]*\)|[\w:])*"
    statement = re.compile(rf"(?!(?:{words})\b)(?:{chain}\s*[-+*/|&]?=(?!=).+|{chain}\(.*\)|(?:\+\+|--)\S+);")
    for m in re.finditer(r"^[ \t]+(\S.*;)$", text, re.M):
        before = text[:m.start()].rstrip()[-1:]
        line = m[1]
        if before in ";{})" and statement.fullmatch(line) and line.count("(") == line.count(")"):
            yield m.start(1), m.end(1), ";"


def swap_arguments(text, source):
    declaration = re.compile(r"\s*(?:const )?[\w:<>,]+[ *&]+\w+(?: = .*)?\s*", re.S)
    for m in re.finditer(r"\b(?!if\b|while\b|for\b|switch\b|return\b|sizeof\b|catch\b)[A-Za-z_][\w:]*\(", text):
        end = closing(text, m.end() - 1) - 1
        if end < 0:
            continue
        spans = split_arguments(text, m.end(), end)
        arguments = [source[a:b].strip() for a, b in spans]
        if any(not a or declaration.fullmatch(a) for a in arguments):
            continue
        for i in range(len(spans) - 1):
            if arguments[i] != arguments[i + 1]:
                yield spans[i][0], spans[i + 1][1], f"{arguments[i + 1]}, {arguments[i]}"


def change_constant(text, _):
    for m in re.finditer(r"(?<![\w.'])(\d+)(?![\w.'])", text):
        yield m.start(), m.end(), str(int(m[1]) + 1)
    for m in re.finditer(r"(?<![\w.'])(\d+\.\d+)(?=f?\b)(?!e)", text):
        yield m.start(), m.end(), str(float(m[1]) + 1)


OPERATORS = {
    "negate condition": negate,
    "and/or": replace(r" (&&|\|\|) ", {"&&": "||", "||": "&&"}),
    "move bound": replace(r" (<=?|>=?) ", {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}),
    "shift index": shift_index,
    "drop statement": drop_statement,
    "swap arguments": swap_arguments,
    "plus/minus": replace(r" ([-+]=?) ", {"+": "-", "-": "+", "+=": "-=", "-=": "+="}),
    "change constant": change_constant,
}


def draw(seed, count, folders):
    """Mutants at places of the sources in `folders`; every operator is as likely as the others."""
    listed = subprocess.run(["git", "ls-files", "--", *folders], cwd=ROOT, check=True, capture_output=True, text=True)
    files = [f for f in sorted(listed.stdout.split()) if f.startswith(tuple(p + "/" for p in PRODUCT))
             and f.endswith((".h", ".cpp", ".cu", ".cuh"))]
    places = collections.defaultdict(list)
    for file in files:
        source = (ROOT / file).read_text()
        text = masked(source)
        for operator, find in OPERATORS.items():
            places[operator] += [(file, *place) for place in find(text, source)]
    places = {operator: found for operator, found in places.items() if found}
    if sum(map(len, places.values())) < count:
        die(64, f"{', '.join(folders)}: fewer than {count} places to mutate. Fix: name a directory of the product")
    generator, drawn = random.Random(seed), {}
    while len(drawn) < count:
        operator = generator.choice(list(places))
        file, begin, end, new = generator.choice(places[operator])
        text = (ROOT / file).read_text()
        old = " ".join(text[begin:end].split())
        place = f"{file}:{text.count(chr(10), 0, begin) + 1}"
        drawn[file, begin, end] = Mutant(place, file, begin, end, new, f"{operator}: {old} -> {' '.join(new.split())}")
    return list(drawn.values())


# ---- Faults by meaning ----

def read_meaning():
    path, mutants, problems = LISTS / "by_meaning.txt", [], []
    for block in re.split(r"\n\s*\n", re.sub(r"^#.*\n", "", path.read_text(), flags=re.M)):
        fields = collections.defaultdict(list)
        for line in filter(None, block.split("\n")):
            key, colon, value = line.partition(":")
            if not colon or key not in ("name", "file", "what", "in", "old", "new", "verify", "spoils"):
                die(65, f"{path}: expected a field of a mutant; found '{line}'")
            fields[key].append(value[1:])
        if not fields:
            continue
        f = {key: "\n".join(lines) for key, lines in fields.items()}
        source = ROOT / f["file"]
        text = source.read_text() if source.is_file() else ""
        place, old = f.get("in") or f["old"], f["old"]
        if text.count(place) != 1 or place.count(old) != 1:
            problems.append(f"{path.name}: {f['name']}: its old text does not occur exactly once in {f['file']}")
            continue
        begin = text.index(place) + place.index(old)
        statement = old.rstrip().endswith((";", "}"))
        new = f.get("new", "")
        mutants.append(Mutant(f["name"], f["file"], begin, begin + len(old),
                              f"{{ {new} }}" if statement else f"({new})",
                              f["what"], f.get("verify", ""), f.get("spoils", "")))
    twice = [name for name, n in collections.Counter(m.name for m in mutants).items() if n > 1]
    problems += [f"{path.name}: two mutants have the name {name}" for name in twice]
    if problems:
        die(65, "\n".join(["the list does not match the sources:", *problems]))
    return mutants


# ---- Build and tests ----

def write_if_changed(path, data):
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def copy_tree():
    """Copies the tree; unchanged files keep their time, so that little is rebuilt."""
    listed = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True).stdout
    names = {name for name in os.fsdecode(listed).split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        write_if_changed(SOURCE / name, (ROOT / name).read_bytes())
        shutil.copymode(ROOT / name, SOURCE / name)
    # Remove files that are no longer in the tree; the build would find them.
    for folder, folders, files in os.walk(SOURCE):
        folders[:] = [f for f in folders if f not in ("build", ".git")]
        for file in files:
            if os.path.relpath(os.path.join(folder, file), SOURCE) not in names:
                os.remove(os.path.join(folder, file))


def run_cmake(*arguments):
    """Whether it succeeds, and its output."""
    done = subprocess.run(["cmake", *arguments], cwd=SOURCE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode == 0, done.stdout


def build(targets, jobs):
    return run_cmake("--build", str(BINARIES), "-j", str(jobs), "--target", *sorted(targets))


@dataclasses.dataclass
class Test:
    name: str
    command: list
    folder: str
    environment: dict
    skip: int
    targets: set
    seconds: float = 60


def read_tests():
    listed = subprocess.run(["ctest", "--show-only=json-v1"], cwd=BINARIES, check=True, capture_output=True).stdout
    tests = {}
    for entry in json.loads(listed)["tests"]:
        properties = {p["name"]: p["value"] for p in entry.get("properties", [])}
        # ctest leaves out the command of a program that is not built; its name is then that of the test.
        command = entry.get("command", [])
        programs = {pathlib.Path(word).name for word in command if word.startswith(str(BINARIES / "bin"))}
        tests[entry["name"]] = Test(entry["name"], command, properties["WORKING_DIRECTORY"],
                                    dict(v.split("=", 1) for v in properties.get("ENVIRONMENT", [])),
                                    properties.get("SKIP_RETURN_CODE", -1), programs or {entry["name"].split(".")[0]})
    return tests


def read_cover():
    """The tests of a directory, from scripts/mutants/tests.txt."""
    cover = {}
    for line in (LISTS / "tests.txt").read_text().split("\n"):
        if line and not line.startswith("#"):
            folder, *names = line.split()
            cover[folder] = names
    return cover


def tests_of(file, cover, tests):
    """The tests of a file, those that fail first at the front."""
    folders = [f for f in cover if file.startswith(f + "/")]
    if not folders:
        die(65, f"scripts/mutants/tests.txt has no tests for {file}")
    names = cover[max(folders, key=len)]
    for name in names:
        if name not in tests:
            die(65, f"scripts/mutants/tests.txt: there is no test {name}")
    return [tests[name] for name in names]


def run(command, folder, environment, limit):
    """Exit code and output; code None: it did not end. Ends its processes and removes its temporary files."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, tempfile.TemporaryFile("w+") as output:
        os.chmod(scratch, 0o755)  # some tests run as another user
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True,
                                   env=os.environ | environment | {"TMPDIR": scratch})

        def end(number):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                pass

        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            end(signal.SIGTERM)  # mpirun ends its ranks on SIGTERM, but not on SIGKILL
            time.sleep(2)
        end(signal.SIGKILL)
        process.wait()
        output.seek(0)
        return code, output.read()


def passes(test):
    return run(test.command, test.folder, test.environment, 30 + 4 * test.seconds)[0] in (0, test.skip)


def verify(layout):
    """Exit code and output of nrl-train verify on a layout "RANKS [CONFIG] KEY=VALUE..."."""
    ranks, *overrides = shlex.split(layout)
    config = overrides.pop(0) if overrides and overrides[0].endswith(".yaml") else "tiny.yaml"
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", ranks, str(BINARIES / "bin" / "nrl-train"),
               "verify", str(SOURCE / "tests" / "verify" / config), *overrides]
    with tempfile.TemporaryDirectory() as folder:
        return run(command, folder, {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                                     "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}, 120)


def files_of_build():
    """Sources and headers of what is built."""
    listed = subprocess.run(["ninja", "-C", str(BINARIES), "-t", "deps"], check=True, capture_output=True, text=True)
    paths = (os.path.normpath(BINARIES / line.strip()) for line in listed.stdout.split("\n") if line.startswith("    "))
    return {os.path.relpath(path, SOURCE) for path in paths if path.startswith(str(SOURCE))}


def judge(mutant, tests, jobs):
    """Builds and tests the mutant whose source is written; the result, and what detects it."""
    if mutant.verify:
        if not build({"nrl-train"}, jobs)[0]:
            return "does not compile", ""
        code, output = verify(mutant.verify)
        verdict = next((line for line in output.split("\n") if line.startswith("MISMATCH")), "")
        if code != 70 or not re.search(mutant.spoils, verdict):
            return "SURVIVED", f"verify: exit {code}"
        looked = re.sub(r"--undisturbed \d+ ?", "", mutant.verify)
        without = f"; without --undisturbed exit {verify(looked)[0]}" if looked != mutant.verify else ""
        return "killed", f"verify: {verdict.partition(' as one rank does: ')[2] or verdict}{without}"
    for test in tests:  # programs are built when their turn comes: the first test detects most mutants
        if not build(test.targets, jobs)[0]:
            return "does not compile", ""
        if not passes(test):
            return "killed", test.name
    return "SURVIVED", f"{len(tests)} tests"


def main():
    parser = argparse.ArgumentParser(prog="scripts/mutate.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--seed", type=int, help="draw places by this seed")
    kind.add_argument("--meaning", action="store_true", help="the faults of by_meaning.txt")
    kind.add_argument("--verify", action="store_true", help="those of them that have a layout")
    kind.add_argument("--check", action="store_true", help="only check that by_meaning.txt matches the sources")
    parser.add_argument("--count", type=int, default=20, help="places to draw (default: 20)")
    parser.add_argument("--in", action="append", dest="folders", metavar="DIR", help="draw from this directory or file only (repeatable)")
    parser.add_argument("--name", action="append", help="only the fault of this name (repeatable)")
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once (default: all cores)")
    args = parser.parse_args()

    if args.seed is not None:
        mutants = draw(args.seed, args.count, args.folders or PRODUCT)
    else:
        mutants = [m for m in read_meaning() if (not args.name or m.name in args.name) and (m.verify or not args.verify)]
        if not mutants:
            die(64, "no mutant has this name")
        if args.check:
            print(f"{len(mutants)} mutants match the sources")
            return 0
    if args.list:
        for m in mutants:
            print(f"{m.name:<44} {m.what}")
        return 0

    copy_tree()
    # The settings of an ordinary build, whose objects ccache has.
    ok, output = run_cmake("--preset", "cpu")
    if not ok:
        die(70, f"cmake failed:\n{output}")
    cover, targets = read_cover(), {"nrl-train"} if any(m.verify for m in mutants) else set()
    tests = read_tests()
    for m in mutants:
        if not m.verify:
            targets.update(*(t.targets for t in tests_of(m.file, cover, tests)))
    started = time.monotonic()
    ok, output = build(targets, args.jobs)
    if not ok:
        die(70, f"the build without a mutant failed:\n{output[-4000:]}")
    print(f"built in {time.monotonic() - started:.0f} s", flush=True)
    tests = read_tests()
    tests_by_name = {m.name: [] if m.verify else tests_of(m.file, cover, tests) for m in mutants}
    used = {t.name: t for group in tests_by_name.values() for t in group}
    failed = set()
    for test in used.values():
        begin = time.monotonic()
        test.seconds = 225
        if not passes(test):
            failed.add(test.name)
        test.seconds = time.monotonic() - begin
    for layout in sorted({m.verify for m in mutants} - {""}):
        code, output = verify(layout)
        if code != 0:
            die(70, f"without a mutant verify leaves with {code} on {layout}:\n{output[-2000:]}")
    if failed:
        print(f"left out, since they fail without a mutant in the copy of the tree: {' '.join(sorted(failed))}")

    results, survivors, built = collections.Counter(), [], files_of_build()
    for m in mutants:
        path, text = SOURCE / m.file, (ROOT / m.file).read_text()
        begin = time.monotonic()
        result, by = "not in this build", ""
        if m.file in built:
            path.write_text(text[:m.begin] + m.new + text[m.end:])
            result, by = judge(m, [t for t in tests_by_name[m.name] if t.name not in failed], args.jobs)
            path.write_text(text)
        results[result] += 1
        if result == "SURVIVED":
            survivors.append(m)
        print(f"{result:<17} {m.name:<44} {m.what}{'  [' + by + ']' if by else ''} {time.monotonic() - begin:.0f} s", flush=True)

    print()
    for m in survivors:
        text = (ROOT / m.file).read_text()
        line = text.count("\n", 0, m.begin)
        print(f"survivor {m.file}:{line + 1}: {m.what}\n    {text.split(chr(10))[line].strip()}")
    print(", ".join(f"{n} {result}" for result, n in sorted(results.items())))
    judged = results["killed"] + results["SURVIVED"]
    if judged:
        print(f"{results['killed'] / judged:.0%} of {judged} mutants killed")
    return 1 if survivors and args.seed is None else 0


if __name__ == "__main__":
    sys.exit(main())
