#!/usr/bin/env python3
"""Reads the Chrome traces of a synthetic profile with TensorBoard's plugin for PyTorch's profiler.

usage: read_tensorboard_profiler.py DIRECTORY

The expected numbers follow from tests/profile/sample_recording.cpp.
"""

import sys

from torch_tb_profiler import io
from torch_tb_profiler.profiler import RunLoader

# Microseconds in which a kernel runs in step 3, by worker: 7,340 of operations, the rest communication alone.
KERNEL = {"rank-0": 7340 + 1770, "rank-1": 7340 + 818}


def check(name, seen, expected):
    print(f"{name}: {seen}, expected {expected}")
    if seen != expected:
        sys.exit(f"read_tensorboard_profiler.py: {name}: {seen}; expected {expected}")


def main():
    run = RunLoader("run", sys.argv[1], io.Cache()).load()
    check("workers", sorted(run.workers), sorted(KERNEL))
    for (worker, _), profile in run.profiles.items():
        if worker not in KERNEL:
            continue  # the view of all workers
        steps = profile.overview["steps"]
        column = next(i for i, c in enumerate(steps["columns"]) if c.get("name") == "Kernel")
        rows = {row[0]: row[column] for row in steps["rows"]}
        check(f"{worker}: kernel time of step 3", rows["3"], KERNEL[worker])
        kernels = {row[0]: row[2:4] for row in profile.kernel_table["data"]["rows"]}
        check(f"{worker}: GEMMs", kernels["linear_forward"], [16, 4800])
        check(f"{worker}: all-reduces", kernels["nccl:all_reduce"][0], 4)


if __name__ == "__main__":  # its processes import this file
    main()
