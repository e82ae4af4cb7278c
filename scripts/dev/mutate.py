#!/usr/bin/env python3
"""Mutation testing: seeds the faults of scripts/mutants/*.txt one at a time and counts how many ctest detects.

All mutants are compiled into one build of a copy of the tree (build/mutants); the environment variable NRL_MUTANT
enables one of them. Every test runs once without a mutant to record the mutants it reaches; then, for each mutant, the
tests that reach it run until one fails. The original sources are not modified.

A mutant is a block of lines in scripts/mutants/AREA.txt:

  name: adamw_no_decay
  file: core/ops/optimizer/adamw_step.h
  what: weights are not decayed
  kind: expr           expr: OLD becomes (mutant ? (NEW) : (OLD)); stmt: if (mutant) { NEW } else { OLD }
  in: source text      optional: the place of OLD; must occur exactly once in the file
  old: source text     must occur exactly once in there; one line each for text of several lines
  new: mutated text
  verify: 2 key=value  optional, for --verify: number of ranks, and overrides of tests/verify/tiny.yaml, or of the
                       file in that directory that is named first; options of verify may be among them
  spoils: expression   optional, for --verify: the verdict must match it

With --verify, which builds only nrl-train, `nrl-train verify` runs on the layout of each mutant that has one: it must
pass without the mutant, and with it leave with 70 and name what is spoiled. Mutants that are verified with
--undisturbed are also run without it: the output says whether the comparison after every step misses them.

Exit 0 when every area reaches the target, 1 when one does not, 65 for a list that does not match the sources.
"""
import argparse
import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
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
TARGET = 0.9
HEADER = """// NRL_MUTANT selects the active fault. With NRL_MUTANT_LOG, a file is created in that directory for every mutant reached.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

inline int nrl_mutant_state = -1;  // -1: the environment was not read yet; 0: none; 1: one, or recording
inline int nrl_mutant_active = 0;
inline const char* nrl_mutant_log = nullptr;
inline bool nrl_mutant_seen[COUNT + 1] = {};

__attribute__((noinline, no_sanitize("thread"))) inline bool nrl_mutant_slow(int id) {
  if (nrl_mutant_state < 0) {
    const char* active = std::getenv("NRL_MUTANT");
    nrl_mutant_log = std::getenv("NRL_MUTANT_LOG");
    nrl_mutant_active = active ? std::atoi(active) : 0;
    nrl_mutant_state = active || nrl_mutant_log ? 1 : 0;
  }
  if (nrl_mutant_log && !nrl_mutant_seen[id]) {
    nrl_mutant_seen[id] = true;
    char path[512];
    std::snprintf(path, sizeof(path), "%s/%d", nrl_mutant_log, id);
    const int fd = ::open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
    if (fd >= 0) ::close(fd);
  }
  return id == nrl_mutant_active;
}

__attribute__((no_sanitize("thread"))) inline bool nrl_mutant(int id) {
  return __builtin_expect(nrl_mutant_state != 0, 0) && nrl_mutant_slow(id);
}
"""


def die(code, text):
    print(f"mutate.sh: {text}", file=sys.stderr)
    sys.exit(code)


@dataclasses.dataclass
class Mutant:
    area: str
    where: str
    name: str = ""
    file: str = ""
    what: str = ""
    kind: str = ""
    context: str = ""
    old: str = ""
    new: str = ""
    verify: str = ""
    spoils: str = ""
    id: int = 0

    def seeded(self):
        if self.kind == "expr":
            return f"(::nrl_mutant({self.id}) ? ({self.new}) : ({self.old}))"
        return f"if (::nrl_mutant({self.id})) {{ {self.new} }} else {{ {self.old} }}"


def read_mutants():
    mutants = []
    for path in sorted((ROOT / "scripts" / "mutants").glob("*.txt")):
        fields = collections.defaultdict(list)
        for number, line in enumerate(path.read_text().split("\n") + [""], 1):
            if line.startswith("#"):
                continue
            if line:
                key, colon, value = line.partition(":")
                if not colon or key not in ("name", "file", "what", "kind", "in", "old", "new", "verify", "spoils"):
                    die(65, f"{path}:{number}: expected a field of a mutant; found '{line}'")
                fields["context" if key == "in" else key].append(value[1:])
            elif fields:
                mutant = Mutant(path.stem, f"{path.name}:{number - 1}", id=len(mutants) + 1,
                                **{key: "\n".join(lines) for key, lines in fields.items()})
                if not (mutant.name and mutant.file and mutant.old and mutant.kind in ("expr", "stmt")):
                    die(65, f"{mutant.where}: a mutant needs name, file, old, and kind expr or stmt")
                mutants.append(mutant)
                fields.clear()
    names = collections.Counter(m.name for m in mutants)
    for name, count in names.items():
        if count > 1:
            die(65, f"two mutants have the name {name}")
    return mutants


def seed(text, mutants, problems):
    """The text of a file with its mutants."""
    spans = []
    for m in mutants:
        place = m.context or m.old
        if text.count(place) == 1 and place.count(m.old) == 1:
            begin = text.index(place) + place.index(m.old)
            spans.append((begin, begin + len(m.old), m))
        else:
            problems.append(f"{m.where}: {m.name}: its old text does not occur exactly once in {m.file}")
    spans.sort(key=lambda span: span[0])
    out, at, last = [], 0, None
    for begin, end, m in spans:
        if begin < at:
            problems.append(f"{m.where}: {m.name} overlaps {last.name}")
            continue
        out += [text[at:begin], m.seeded()]
        at, last = end, m
    return '#include "nrl_mutant.h"\n#line 1\n' + "".join(out) + text[at:]


def write_if_changed(path, data):
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def copy_tree(mutants):
    """Copies the tree with the mutants; unchanged files keep their time, so that little is rebuilt."""
    by_file = collections.defaultdict(list)
    for m in mutants:
        by_file[m.file].append(m)
    listed = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True).stdout
    names = {name for name in os.fsdecode(listed).split("\0") if name and (ROOT / name).is_file()}
    problems, seeded = [], {}
    for file, group in by_file.items():
        if file in names:
            seeded[file] = seed((ROOT / file).read_text(), group, problems).encode()
        else:
            problems.append(f"{group[0].where}: {group[0].name}: there is no {file}")
    if problems:
        die(65, "\n".join(["the lists do not match the sources:", *problems]))
    for name in names:
        write_if_changed(SOURCE / name, seeded.get(name) or (ROOT / name).read_bytes())
        shutil.copymode(ROOT / name, SOURCE / name)
    write_if_changed(SOURCE / "nrl_mutant.h", HEADER.replace("COUNT", str(max(m.id for m in mutants))).encode())
    # Remove files that are no longer in the tree; the build would find them.
    for folder, folders, files in os.walk(SOURCE):
        folders[:] = [f for f in folders if f not in ("build", ".git")]
        for file in files:
            name = os.path.relpath(os.path.join(folder, file), SOURCE)
            if name not in names and name != "nrl_mutant.h":
                os.remove(SOURCE / name)


def build(jobs, targets=()):
    started = time.monotonic()
    chosen = ["--target", *targets] if targets else []
    for command in (["cmake", "--preset", "cpu", "-DNRL_WERROR=OFF"],
                    ["cmake", "--build", "--preset", "cpu", "-j", str(jobs), *chosen]):
        with open(BUILD / "build.log", "w") as log:
            if subprocess.run(command, cwd=SOURCE, stdout=log, stderr=subprocess.STDOUT).returncode:
                lines = pathlib.Path(log.name).read_text().split("\n")
                print("\n".join([line for line in lines if "error" in line][:20]), file=sys.stderr)
                die(70, f"the build failed; output: {log.name}")
    print(f"built in {time.monotonic() - started:.0f} s")


@dataclasses.dataclass
class Test:
    name: str
    command: list
    folder: str
    environment: dict
    skip: int
    seconds: float = 0
    reached: frozenset = frozenset()
    passed: bool = False


def read_tests(exclude):
    listed = subprocess.run(["ctest", "--show-only=json-v1"], cwd=BINARIES, check=True, capture_output=True).stdout
    tests = []
    for entry in json.loads(listed)["tests"]:
        properties = {p["name"]: p["value"] for p in entry.get("properties", [])}
        # Properties that need more than a command and its exit code; the project's tests have none.
        for name in ("WILL_FAIL", "PASS_REGULAR_EXPRESSION", "FAIL_REGULAR_EXPRESSION", "FIXTURES_REQUIRED", "DISABLED"):
            if name in properties:
                die(70, f"test {entry['name']} has the property {name}, which mutate.py does not know")
        if entry["name"] in exclude:
            continue
        tests.append(Test(entry["name"], entry["command"], properties["WORKING_DIRECTORY"],
                          dict(v.split("=", 1) for v in properties.get("ENVIRONMENT", [])),
                          properties.get("SKIP_RETURN_CODE", -1)))
    return tests


def run_test(test, extra, limit):
    """Whether the test passes (or is skipped). Ends its processes and removes its temporary files."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        os.chmod(scratch, 0o755)  # some tests run as another user
        process = subprocess.Popen(test.command, cwd=test.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, start_new_session=True,
                                   env=os.environ | test.environment | {"TMPDIR": scratch} | extra)

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
    return code in (0, test.skip)


def measure_reach(tests, jobs):
    """Runs every test once without a mutant: how long it takes, and the mutants that it reaches."""

    def measure(test):
        with tempfile.TemporaryDirectory() as log:
            started = time.monotonic()
            test.passed = run_test(test, {"NRL_MUTANT_LOG": log}, 900)
            test.seconds = time.monotonic() - started
            test.reached = frozenset(int(name) for name in os.listdir(log))

    # Cache the result for a bitwise identical build.
    digest = hashlib.sha256()
    for path in sorted([*(BINARIES / "bin").iterdir(), *(p for p in (SOURCE / "tests").rglob("*.sh"))]):
        if path.is_file():
            digest.update(path.read_bytes())
    cache = BUILD / "reach.json"
    known = json.loads(cache.read_text()) if cache.is_file() else {}
    if known.get("digest") == digest.hexdigest():
        for test in tests:
            if test.name in known["tests"]:
                test.seconds, reached, test.passed = known["tests"][test.name]
                test.reached = frozenset(reached)
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(measure, [t for t in tests if not t.passed]))
    cache.write_text(json.dumps({"digest": digest.hexdigest(),
                                 "tests": {t.name: [t.seconds, sorted(t.reached), t.passed] for t in tests}}))
    failed = [t.name for t in tests if not t.passed]
    print(f"{len(tests)} tests without a mutant: {time.monotonic() - started:.0f} s")
    if failed:
        print(f"excluded, since they fail without a mutant in the copy of the tree: {' '.join(failed)}")
    return [t for t in tests if t.passed]


def run_verify(layout, extra, limit=120):
    """Exit code and output of nrl-train verify on a layout "RANKS [CONFIG] KEY=VALUE..."; None: it did not end."""
    ranks, *overrides = shlex.split(layout)
    config = overrides.pop(0) if overrides and overrides[0].endswith(".yaml") else "tiny.yaml"
    environment = os.environ | extra | {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                                        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", ranks, str(BINARIES / "bin" / "nrl-train"),
               "verify", str(SOURCE / "tests" / "verify" / config), *overrides]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment)
        try:
            return (lambda out: (process.returncode, out))(process.communicate(timeout=limit)[0])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
            return None, ""


def verify_mutants(mutants):
    """Runs verify with every mutant; returns the exit code of this program."""
    for layout in sorted({m.verify for m in mutants}):
        code, out = run_verify(layout, {})
        if code != 0:
            print(out)
            die(70, f"without a mutant verify leaves with {code} on {layout}")
    missed = []
    undisturbed = only_undisturbed = 0
    for m in mutants:
        code, out = run_verify(m.verify, {"NRL_MUTANT": str(m.id)})
        verdict = next((line for line in out.split("\n") if line.startswith("MISMATCH")), "")
        found = code == 70 and re.search(m.spoils, verdict)
        if not found:
            missed.append(m.name)
        shown = verdict.partition(" as one rank does: ")[2] or f"exit {code}: " + " ".join(out.split())[-200:]
        print(f"{'detected' if found else 'MISSED  '}  {m.name:<40} {shown}", flush=True)
        looked = re.sub(r"--undisturbed \d+ ?", "", m.verify)
        if looked != m.verify:
            undisturbed += 1
            code, _ = run_verify(looked, {"NRL_MUTANT": str(m.id)})
            only_undisturbed += code == 0
            print(f"{'':<10}without --undisturbed: {'missed' if code == 0 else f'exit {code}'}", flush=True)
    print(f"\nverify detected {len(mutants) - len(missed)} of {len(mutants)} faults and named what they spoil")
    if undisturbed:
        print(f"{undisturbed} with --undisturbed, {only_undisturbed} of which verify misses without it")
    for name in missed:
        print(f"missed: {name}")
    return 1 if missed else 0


def main():
    parser = argparse.ArgumentParser(prog="scripts/mutate.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", action="append", default=[], help="only this area (may be given several times)")
    parser.add_argument("--name", action="append", default=[], help="only this mutant (may be given several times)")
    parser.add_argument("--check", action="store_true", help="only check that the lists match the sources")
    parser.add_argument("--verify", action="store_true", help="run nrl-train verify with the mutants that have a layout")
    parser.add_argument("--list", action="store_true", help="only list the mutants")
    parser.add_argument("--exclude", action="append", default=[], metavar="TEST", help="do not run this test")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at once (default: all cores)")
    args = parser.parse_args()
    mutants = read_mutants()
    chosen = [m for m in mutants if (not args.area or m.area in args.area) and (not args.name or m.name in args.name)]
    if args.verify:
        chosen = [m for m in chosen if m.verify]
    if not chosen:
        die(64, "no mutant has this area and name")
    if args.list:
        for m in chosen:
            print(f"{m.area:<11} {m.name:<40} {m.what}")
        return 0
    if args.verify:
        # Only these, so that little is compiled.
        copy_tree([m for m in mutants if m.verify])
        build(args.jobs, ["nrl-train"])
        return verify_mutants(chosen)
    copy_tree(mutants)
    if args.check:
        print(f"{len(mutants)} mutants match the sources")
        return 0
    build(args.jobs)
    tests = measure_reach(read_tests(args.exclude), args.jobs)

    # Order of tests: the one that detected the mutant last time, those that detected others of its area, fast ones.
    history_path = BUILD / "detected.json"
    history = json.loads(history_path.read_text()) if history_path.is_file() else {}
    by_area = collections.Counter((m.area, history[m.name]) for m in mutants if m.name in history)

    def detected_by(m):
        """The first test that fails under the mutant; none: it survived."""
        reaching = sorted((t for t in tests if m.id in t.reached),
                          key=lambda t: (t.name != history.get(m.name), -by_area[m.area, t.name], t.seconds))
        for test in reaching:
            if not run_test(test, {"NRL_MUTANT": str(m.id)}, 30 + 4 * test.seconds):
                return test.name, len(reaching)
        return None, len(reaching)

    survivors, killed, total = [], collections.Counter(), collections.Counter()
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(detected_by, m): m for m in chosen}
        for done in concurrent.futures.as_completed(running):
            m, (test, reaching) = running[done], done.result()
            total[m.area] += 1
            if test:
                killed[m.area] += 1
                history[m.name] = test
                by_area[m.area, test] += 1
                print(f"detected  {m.area:<11} {m.name:<40} {test}", flush=True)
            else:
                survivors.append((m, reaching))
                print(f"SURVIVED  {m.area:<11} {m.name:<40} {reaching} tests reach it", flush=True)
            history_path.write_text(json.dumps(history, indent=1))
    print(f"\n{len(chosen)} mutants: {time.monotonic() - started:.0f} s\n")
    for m, reaching in survivors:
        print(f"survivor {m.name} ({m.file}; {reaching} tests reach it): {m.what}")
    print(f"\n{'area':<12} {'detected':>8} {'of':>4} {'rate':>6}")
    for area in sorted(total):
        print(f"{area:<12} {killed[area]:>8} {total[area]:>4} {killed[area] / total[area]:>6.0%}")
    print(f"{'all':<12} {sum(killed.values()):>8} {len(chosen):>4} {sum(killed.values()) / len(chosen):>6.0%}")
    return 0 if all(killed[area] >= TARGET * total[area] for area in total) else 1


if __name__ == "__main__":
    sys.exit(main())
