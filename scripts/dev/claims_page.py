"""Writes docs/claims.md from the results of `nrl-train bench compare SUITE --json FILE`."""

import json
import sys

INTRO = """# What guides promise, and what was measured

Guides for other trainers say what a feature saves or costs, for models and machines that they do not always name. This
page has such statements beside a measurement on one machine, of one model. `scripts/bench-claims.sh` runs the comparisons
of `configs/suites/claims.yaml` and writes the page from their results; run it on your machine and model.

Every variant trains on random tokens in an engine of its own. Time is the median of three rounds in which the variants
take turns, relative to the first variant of the same round. Memory is the arena of a rank, which is what the plan says.
"""


def mib(count):
    return f"{count / 2**20:,.1f}"


def percent(ratio):
    return f"{100 * (ratio - 1):+.1f} %"


def write_comparison(result, name):
    of_name = [row for row in result["rows"] if row.get("comparison") == name]
    if any("skipped" in row for row in of_name):
        return
    about = next(row for row in of_name if "model" in row)
    rows = [row for row in of_name if "name" in row]
    claims = [row for row in of_name if "claim" in row]
    base = rows[0]
    print(f"## {name}\n")
    print(f"`nrl-train bench compare {result['suite']} {result['config']} --only {name}`: {about['model']}; "
          f"ranks: {result['ranks']}; {result['device']['name']}.")
    if about["note"]:
        print(about["note"])
    print("\n| promised | by | here |\n|---|---|---|")
    for c in claims:
        verdict = {True: ", met", False: ", missed"}.get(c.get("met"), "")
        print(f"| {c['claim']}: {c['promised']} | {c['source']} | {c['measured']} (`{c['variant']}`){verdict} |")
    sends = any(row.get("sent_bytes") for row in rows)
    print("\n| variant | time | weights | gradients | optimizer | activations | MiB planned | |"
          + (" MiB sent per step |" if sends else ""))
    print("|---|---|---|---|---|---|---|---|" + ("---|" if sends else ""))
    for row in rows:
        if "refused" in row:
            print(f"| {row['name']} | refused: {row['refused']} |" + " |" * (6 + sends))
            continue
        cells = [row["name"], percent(row["time_ratio"])]
        cells += [mib(row[c]) for c in ("weights", "gradients", "optimizer", "activations", "planned_bytes")]
        cells.append(percent(row["planned_bytes"] / base["planned_bytes"]))
        if sends:
            cells.append(mib(row["sent_bytes"]))
        print("| " + " | ".join(cells) + " |")
    print()


def main():
    print(INTRO)
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            result = json.load(file)
        for name in dict.fromkeys(row["comparison"] for row in result["rows"] if "comparison" in row):
            write_comparison(result, name)


main()
