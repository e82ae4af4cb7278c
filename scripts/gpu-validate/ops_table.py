#!/usr/bin/env python3
"""Prints the time of every operation in a trace of profiling.enabled: ops_table.py TRACE"""
import collections
import json
import sys

with open(sys.argv[1]) as file:
    events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
# Rows from 1000 on are the streams of a device; without one, the host. Ranges are nested: what is inside another one
# counts there alone.
device = [e for e in events if e["tid"] >= 1000] or events
calls, total = collections.Counter(), collections.Counter()
open_ranges = []
for event in sorted(device, key=lambda e: (e["tid"], e["ts"], -e["dur"])):
    while open_ranges and (open_ranges[-1]["tid"] != event["tid"] or
                           open_ranges[-1]["ts"] + open_ranges[-1]["dur"] < event["ts"] + event["dur"] - 0.01):
        open_ranges.pop()
    if open_ranges:
        total[open_ranges[-1]["name"]] -= event["dur"]
    calls[event["name"]] += 1
    total[event["name"]] += event["dur"]
    open_ranges.append(event)
begin = min(e["ts"] for e in device)
end = max(e["ts"] + e["dur"] for e in device)
print(f"traced {(end - begin) / 1e3:.2f} ms")
print(f"{'operation':<32} {'calls':>6} {'ms':>10} {'of step':>8}")
for name, us in total.most_common():
    print(f"{name:<32} {calls[name]:>6} {us / 1e3:>10.3f} {us / (end - begin) * 100:>6.1f} %")
