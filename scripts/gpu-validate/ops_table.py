#!/usr/bin/env python3
"""Prints the time of every operation in a profile: ops_table.py PROFILE_JSON"""
import json
import sys

with open(sys.argv[1]) as file:
    profile = json.load(file)
step_s = profile["split"]["wall"]
print(f"step {step_s * 1e3:.2f} ms")
print(f"{'operation':<32} {'calls':>6} {'ms':>10} {'of step':>8}")
for op in sorted(profile["operations"], key=lambda op: -op["seconds"]):
    print(f"{op['name']:<32} {op['calls']:>6} {op['seconds'] * 1e3:>10.3f} {op['seconds'] / step_s * 100:>6.1f} %")
