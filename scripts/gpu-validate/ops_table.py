#!/usr/bin/env python3
"""Prints the time of every operation in a trace of profiling.enabled: ops_table.py TRACE"""
import collections
import json
import sys

with open(sys.argv[1]) as file:
    events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
# Rows from 1000 on are the streams of a device. Without one, these are the ranges of the host, which are nested.
device = [e for e in events if e["tid"] >= 1000] or events
calls, total = collections.Counter(), collections.Counter()
for event in device:
    calls[event["name"]] += 1
    total[event["name"]] += event["dur"]
begin = min(e["ts"] for e in device)
end = max(e["ts"] + e["dur"] for e in device)
print(f"traced {(end - begin) / 1e3:.2f} ms")
print(f"{'operation':<32} {'calls':>6} {'ms':>10} {'of step':>8}")
for name, us in total.most_common():
    print(f"{name:<32} {calls[name]:>6} {us / 1e3:>10.3f} {us / (end - begin) * 100:>6.1f} %")
