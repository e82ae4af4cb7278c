#!/usr/bin/env python3
"""Reads the Chrome traces of a synthetic profile with Holistic Trace Analysis.

usage: read_hta.py DIRECTORY

The expected numbers follow from tests/profile/sample_recording.cpp. Holistic Trace Analysis leaves out the last step.
"""

import sys

from hta.trace_analysis import TraceAnalysis

COMPUTE = 7340  # microseconds of operations of a step
# Communication that no operation overlaps, and the percentage that one overlaps, by rank.
EXPOSED = [1770, 818]
OVERLAP = [6.547, 31.491]


def check(name, seen, expected):
    print(f"{name}: {seen:.2f}, expected {expected:.2f}")
    if abs(seen - expected) > 0.005 * expected:
        sys.exit(f"read_hta.py: {name}: {seen}; expected {expected}")


def main():
    analysis = TraceAnalysis(trace_dir=sys.argv[1])
    breakdown = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
    if sorted(breakdown.index) != [0, 1]:
        sys.exit(f"read_hta.py: ranks {list(breakdown.index)}")
    for rank in (0, 1):
        check(f"rank {rank} compute", breakdown.loc[rank, "compute_time(us)"], COMPUTE)
        check(f"rank {rank} communication", breakdown.loc[rank, "non_compute_time(us)"], EXPOSED[rank])
        check(f"rank {rank} overlap", overlap.loc[rank, "comp_comm_overlap_pctg"], OVERLAP[rank])


main()
