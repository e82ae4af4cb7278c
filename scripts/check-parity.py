#!/usr/bin/env python3
"""Trains the same model on the same samples in plain PyTorch and compares the losses step by step.

A developer's check of the mathematics; needs python3-torch (1.13 or later), fp32 and no dropout. The whole recipe:

  nrl-train CONFIG pretrain.max_num_steps=0  checkpointing.checkpoint_dir=p/start logger.log_dir=p/start-logs
  nrl-train CONFIG pretrain.max_num_steps=20 checkpointing.checkpoint_dir=p/run   logger.log_dir=p/logs
  nrl-train data show CONFIG pretrain.max_num_steps=20 --steps 1:21 --json > p/samples.jsonl
  scripts/check-parity.py --start p/start/step-0 --samples p/samples.jsonl --metrics p/logs/metrics.jsonl

scripts/check-parity.sh does all of it. Learning rates are taken from metrics.jsonl, so that only the optimizer's
other numbers are given here. Exit 1 when a loss or a gradient norm differs by more than the tolerance.
"""
import argparse
import collections
import json
import os
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--start", required=True, help="checkpoint of step 0")
parser.add_argument("--samples", required=True, help="output of nrl-train data show --json")
parser.add_argument("--metrics", required=True, help="metrics.jsonl of the run")
parser.add_argument("--betas", type=float, nargs=2, default=[0.9, 0.95])
parser.add_argument("--eps", type=float, default=1e-8)
parser.add_argument("--weight-decay", type=float, default=0.1)
parser.add_argument("--clip", type=float, default=1.0, help="0: no clipping")
parser.add_argument("--micro-batch", type=int, default=8, help="sequences at once here; changes memory, not numbers")
parser.add_argument("--tolerance", type=float, default=1e-4, help="greatest relative difference of a loss")
parser.add_argument("--norm-tolerance", type=float, default=2e-2,
                    help="greatest relative difference of a gradient norm; a step whose gradient is a spike amplifies the "
                         "rounding of all steps before it, so this is wider")
parser.add_argument("--threads", type=int, default=0)
args = parser.parse_args()

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "bench"))
import torch  # noqa: E402

import torch_models  # noqa: E402

if args.threads:
    torch.set_num_threads(args.threads)

samples = collections.OrderedDict()
with open(args.samples) as f:
    for line in f:
        row = json.loads(line)
        samples.setdefault(row["step"], []).append(row["tokens"])
with open(args.metrics) as f:
    rows = {row["step"]: row for row in map(json.loads, f) if "loss" in row}
if not samples or list(samples) != list(range(1, len(samples) + 1)):
    sys.exit(f"{args.samples}: the steps must be 1, 2, ...; found {list(samples)[:5]} ...")
missing = [step for step in samples if step not in rows]
if missing:
    sys.exit(f"{args.metrics}: step {missing[0]} is missing")

model = torch_models.load(args.start)
optimizer = model.optimizer(lr=0.0, betas=tuple(args.betas), eps=args.eps, weight_decay=args.weight_decay)
worst = {"loss": 0.0, "grad_norm": 0.0}
print(f"{'step':>4} {'loss':>12} {'torch':>12} {'relative':>9}   {'norm':>10} {'torch':>10} {'relative':>9}")
for step, sequences in samples.items():
    row, data = rows[step], torch.tensor(sequences)
    for group in optimizer.param_groups:
        group["lr"] = row["lr"]
    optimizer.zero_grad(set_to_none=True)
    loss = 0.0
    for part in data.split(args.micro_batch):
        share = len(part) / len(data)
        mean = model.loss(part[:, :-1], part[:, 1:])
        (mean * share).backward()
        loss += float(mean.detach().double()) * share
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or float("inf")))
    optimizer.step()
    differences = {"loss": abs(row["loss"] - loss) / abs(loss), "grad_norm": abs(row["grad_norm"] - norm) / norm}
    for key, value in differences.items():
        worst[key] = max(worst[key], value if value == value else float("inf"))
    print(f"{step:4d} {row['loss']:12.7f} {loss:12.7f} {differences['loss']:9.1e}   "
          f"{row['grad_norm']:10.6f} {norm:10.6f} {differences['grad_norm']:9.1e}")
good = worst["loss"] <= args.tolerance and worst["grad_norm"] <= args.norm_tolerance
print(f"{model.s.family}: worst relative difference of {len(samples)} steps: loss {worst['loss']:.2e}, "
      f"gradient norm {worst['grad_norm']:.2e}: {'the same' if good else 'DIFFERENT'}")
sys.exit(0 if good else 1)
