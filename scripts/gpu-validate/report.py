#!/usr/bin/env python3
"""Writes gpu-validate.json, .md and .log from what the stages left in gpu-validate.sh's working directory.

  report.py write    all three files, each by a temporary file and a rename, so that they are whole at any moment
  report.py passed   prints the stages that passed with the same programs in the results to merge, comma-separated
  report.py targets  prints the table of targets

The working directory has `table` (stages), `done` (one line per finished stage), stages/NAME.log, bench-NAME.json and
bench-NAME.txt, doctor.txt, smi.txt, and merge-*.json: results of earlier calls, oldest first.
"""
import argparse
import glob
import json
import os
import re
import sys

LOG_BYTES = 200_000  # of one stage in the log
TAIL_LINES = 40


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def parse(text):
    """A benchmark's JSON, or None: a stage that was stopped may leave half of it."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def write(path, text):
    temporary = path + ".part"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def shorten(text):
    if len(text) <= LOG_BYTES:
        return text
    half = LOG_BYTES // 2
    return f"{text[:half]}\n... {len(text) - LOG_BYTES} characters are left out ...\n{text[-half:]}"


def load_merges(work):
    merges = []
    for path in sorted(glob.glob(os.path.join(work, "merge-*.json"))):
        result = parse(read(path))
        if not isinstance(result, dict) or not isinstance(result.get("stages"), list):
            sys.exit("error: --merge: a file has no results of gpu-validate.sh")
        merges.append(result)
    return merges


def stage_of_this_call(args, name, number, what, row):
    work = args.work
    status, seconds, limit, date, note = row
    log = read(os.path.join(work, "stages", name + ".log"))
    commands = [line[2:].replace(work, "WORK") for line in log.splitlines() if line.startswith("+ ")]
    stage = {"stage": name, "status": status, "call": int(number), "seconds": int(seconds), "limit": int(limit), "check": what,
             "note": note.replace(work, "WORK"), "date": date, "commit": args.commit, "programs": args.programs, "commands": commands}
    result = parse(read(os.path.join(work, f"bench-{name}.json")))
    if result is not None:
        stage["result"] = result
    text = read(os.path.join(work, f"bench-{name}.txt"))
    if text:
        stage["text"] = "".join(line + "\n" for line in text.splitlines() if not line.startswith("+ "))
    if status == "fail":
        stage["tail"] = log.splitlines()[-TAIL_LINES:]
    return stage


def collect(args):
    """The stages in the table's order. A later result replaces an earlier one, unless it was skipped."""
    rows = {}
    for line in read(os.path.join(args.work, "done")).splitlines():
        name, *row = line.split("\t")
        rows[name] = row
    earlier = {}
    for result in load_merges(args.work):
        for stage in result["stages"]:
            if stage["status"] in ("pass", "fail") or stage["stage"] not in earlier:
                earlier[stage["stage"]] = stage
    stages = []
    for line in read(os.path.join(args.work, "table")).splitlines():
        name, number, limit, what = line.split("|")
        limit = limit.split("/")[0]
        old = earlier.get(name)
        if name in rows:
            new = stage_of_this_call(args, name, number, what, rows[name])
            stages.append(old if new["status"] == "skip" and old and old["status"] in ("pass", "fail") else new)
        elif name == args.running and not (old and old["status"] == "pass"):
            stages.append({"stage": name, "status": "running", "call": int(number), "seconds": 0, "limit": int(limit), "check": what,
                           "note": "not finished", "commit": args.commit, "programs": args.programs})
        elif old and old["status"] != "running":
            stages.append(old)
    return stages


# Minimum and stretch of the MFU of the two models, by GPU: an H100 has the same peak and 70 % of the bandwidth.
MFU = {"H200": {"step-1b": (0.48, 0.53), "step-8b": (0.55, 0.61)}, "H100": {"step-1b": (0.46, 0.51), "step-8b": (0.53, 0.59)}}


def targets_of(stages, smi):
    """Targets, what was predicted and what was measured, for a GPU at full size only."""
    results = {s["stage"]: s["result"] for s in stages if isinstance(s.get("result"), dict) and s["programs"].endswith("-cuda")}
    mfu = MFU["H100" if "H100" in smi else "H200"]

    def value(stage, key):
        found = results.get(stage, {}).get(key)
        return found if isinstance(found, (int, float)) else None

    def prediction(stage):
        return results.get(stage, {}).get("prediction") or {}

    def best(stage, key):
        bf16 = (s for s in results if (s == stage or s.startswith(stage + "-")) and "-fp8" not in s)
        found = [v for v in (value(s, key) for s in bf16) if v is not None]
        return max(found) if found else None

    def ratio(a, b):
        return a / b if a and b else None

    def target(name, relation, minimum, stretch, measured, predicted=None):
        met = None if measured is None else measured >= minimum if relation == ">=" else measured <= minimum
        return {"target": name, "relation": relation, "minimum": minimum, "stretch": stretch, "predicted": predicted, "value": measured, "met": met}

    def quantization(stage, time):
        """What quantization adds to a step, over the time of the layers' GEMMs. It may compute norms and activations as well."""
        def times_of(of):
            return {p["name"]: p[time] for p in prediction(of).get("parts", []) if p.get(time) is not None}

        def producers(times):  # with FP8 also the gradients of activations are computed as they are rounded
            return sum(times.get(name, 0) for name in ("norms, forward", "activation, forward", "activation, backward", "quantization"))

        bf16, fp8 = times_of("step-8b"), times_of(stage)
        gemms = sum(s for name, s in fp8.items() if name.startswith("layer GEMMs"))
        return (producers(fp8) - producers(bf16)) / gemms if bf16 and gemms else None

    rows = []
    for stage, model in (("step-8b", "layers of Llama 8B at 8192 tokens"), ("step-1b", "Llama 1B at 4096 tokens")):
        rows.append(target(f"MFU, {model}", ">=", *mfu[stage], value(stage, "mfu"), prediction(stage).get("estimated_mfu")))
        rows.append(target(f"MFU, {model}, best variant", ">=", *mfu[stage], best(stage, "mfu")))
        rows.append(target(f"planned memory relative to what the GPU gave, {model}", ">=", 0.97, None,
                           ratio(value(stage, "planned_bytes"), value(stage, "used_bytes")), 1.0))
    rows.append(target("first step of 1.5 B parameters after exec, s", "<=", 6, None, value("step-1.5b", "first_step_s")))
    for row in results.get("ops", {}).get("rows", []):
        if row.get("gated"):
            rows.append(target(f"{row['name']}, fraction of the copy bandwidth", ">=", 0.85, None, row.get("fraction_of_copy")))
    for stage, scales in (("step-8b-fp8", "tensorwise"), ("step-8b-fp8-delayed", "delayed"), ("step-8b-fp8-blockwise", "blockwise")):
        rows.append(target(f"speed of FP8 ({scales}) relative to bf16, layers of Llama 8B", ">=", 1.25, None,
                           ratio(value(stage, "tokens_per_s"), value("step-8b", "tokens_per_s")),
                           ratio(prediction("step-8b").get("estimated_s"), prediction(stage).get("estimated_s"))))
        rows.append(target(f"time that quantization ({scales}) adds, relative to the layers' GEMMs", "<=", 0.08, None,
                           quantization(stage, "measured_s"), quantization(stage, "estimated_s")))
    hidden = (results.get("step-8b-offload", {}).get("offload") or {}).get("hidden")
    rows.append(target("copies of offloaded activations that are hidden, 8192 tokens", ">=", 0.8, None, hidden))
    for stage, parameters in (("torch", "1.9 B"), ("torch-1b", "1.2 B")):
        rows.append(target(f"speed relative to torch.compile, {parameters} parameters", ">=", 1.10, None, value(stage, "speed_ratio_compiled")))
    rows.append(target("memory relative to torch.compile, 1.9 B parameters, with recomputation", "<=", 0.7, None, value("torch-recompute", "memory_ratio_compiled")))
    return rows


def target_lines(targets):
    for t in targets:
        stretch = f" (stretch {t['stretch']})" if t["stretch"] is not None else ""
        measured = "not measured" if t["value"] is None else f"{t['value']:.3f}"
        predicted = "" if t["predicted"] is None else f"{t['predicted']:.3f}"
        met = {None: "", True: "yes", False: "NO"}[t["met"]]
        yield f"| {t['target']} | {t['relation']} {t['minimum']}{stretch} | {predicted} | {measured} | {met} |"


def facts_of(args):
    """What this call found; where it could not look, what an earlier one found."""
    doctor, smi = read(os.path.join(args.work, "doctor.txt")), read(os.path.join(args.work, "smi.txt"))
    for result in reversed(load_merges(args.work)):
        doctor, smi = doctor or result.get("doctor", ""), smi or result.get("nvidia_smi", "")
    return doctor.strip(), smi.strip()


def json_text(args, stages, targets):
    doctor, smi = facts_of(args)
    head = {"date": args.date, "commit": args.commit, "programs": args.programs, "device": args.device, "call": args.call,
            "seconds": args.seconds, "failed": sum(s["status"] == "fail" for s in stages), "nvidia_smi": smi, "doctor": doctor}

    def line(value):
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)

    def array(values):
        return ",\n".join(line(v) for v in values)

    return f'{line(head)[:-1]},\n"stages":[\n{array(stages)}\n],\n"targets":[\n{array(targets)}\n]}}\n'


def markdown(args, stages, targets):
    doctor, smi = facts_of(args)
    where = "a GPU" if args.device == "cuda" else "the CPU (a test of the script; not a result for GPUs)"
    lines = [f"# Validation on {where}", "", f"{args.date}, commit {args.commit}, {args.seconds} s.", "", "```", doctor]
    lines += [smi, "```"] if smi else ["```"]
    lines += ["", "| call | stage | status | s | check | result |", "|---|---|---|---|---|---|"]
    for s in stages:
        note = s["note"] + ("" if s["commit"] == args.commit else f" (commit {s['commit']})")
        cells = [str(s[key]) for key in ("call", "stage", "status", "seconds", "check")] + [note]
        lines.append("| " + " | ".join(re.sub(r"\s*\n\s*", " ", c).replace("|", "\\|") for c in cells) + " |")
    lines += ["", "| target | minimum | predicted | measured | met |", "|---|---|---|---|---|", *target_lines(targets)]
    for s in stages:
        if s.get("text"):
            lines += ["", f"## {s['stage']}", "", "```", s["text"].rstrip("\n"), "```"]
    failed = [s for s in stages if s.get("tail")]
    if failed:
        lines += ["", "## Logs of failed stages (last lines)"]
    for s in failed:
        lines += ["", f"### {s['stage']}", "", "```", *s["tail"], "```"]
    lines += ["", "## Commands", "", "```", *(c for s in stages for c in s.get("commands", [])), "```", ""]
    return "\n".join(lines)


def log_text(args):
    parts = []
    for row in read(os.path.join(args.work, "done")).splitlines():
        name, status, seconds, *_ = row.split("\t")
        parts.append(f"== {name}: {status}, {seconds} s\n{shorten(read(os.path.join(args.work, 'stages', name + '.log')))}\n")
    return "".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["write", "passed", "targets"])
    for option in ("work", "out", "device", "commit", "date", "programs"):
        parser.add_argument("--" + option, required=True)
    parser.add_argument("--call", type=int, required=True, help="0: all stages")
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--running", help="the stage that begins now")
    args = parser.parse_args()
    stages = collect(args)
    if args.mode == "passed":
        print(",".join(s["stage"] for s in stages if s["status"] == "pass" and s["programs"] == args.programs))
        return
    targets = targets_of(stages, facts_of(args)[1])
    if args.mode == "targets":
        print("\n" + "\n".join(target_lines(targets)))
        return
    path = os.path.join(args.out, "gpu-validate")
    write(path + ".json", json_text(args, stages, targets))
    write(path + ".md", markdown(args, stages, targets))
    write(path + ".log", log_text(args))


if __name__ == "__main__":
    main()
