#!/usr/bin/env python3
"""Trains the same models on the same samples in plain PyTorch and compares each step: in double precision, or in bf16
with fp32 master weights.

Needs python3-torch (1.13 or later), no dropout, and lr_decay_style: cosine. scripts/check-parity.sh runs it on, in a
directory RUN:

  nrl-train CONFIG pretrain.max_num_steps=0  checkpointing.checkpoint_dir=RUN/start ...
  nrl-train CONFIG logger.log_dir=RUN/logs ...
  nrl-train data show CONFIG --steps 1:21 --json > RUN/samples.jsonl

Exit 1 when a loss, a gradient norm or a learning rate differs by more than the tolerance.
"""
import argparse
import collections
import copy
import json
import math
import os
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("runs", metavar="RUN", nargs="+", help="start/step-0, samples.jsonl and logs/metrics.jsonl")
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--min-lr", type=float, required=True)
parser.add_argument("--warmup", type=int, required=True, help="lr_warmup_iters")
parser.add_argument("--decay", type=int, required=True, help="lr_decay_iters")
parser.add_argument("--betas", type=float, nargs=2, required=True)
parser.add_argument("--eps", type=float, required=True)
parser.add_argument("--weight-decay", type=float, required=True)
parser.add_argument("--clip", type=float, required=True, help="max_grad_norm")
parser.add_argument("--tolerance", type=float, default=1e-6, help="maximum relative difference of a loss")
parser.add_argument("--norm-tolerance", type=float, default=1e-4,
                    help="maximum relative difference of a gradient norm")
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32",
                    help="what nrl-train trained in; float32: PyTorch computes in double")
args = parser.parse_args()

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "bench"))
import torch  # noqa: E402

import torch_models  # noqa: E402


def learning_rate(step):
    """Learning rate of step 1, 2, ...: a linear warm-up to lr, then a cosine decay to min_lr."""
    if step <= args.warmup:
        return args.lr * step / args.warmup
    done = min(1.0, (step - args.warmup) / (args.decay - args.warmup))
    return args.min_lr + (args.lr - args.min_lr) * (1 + math.cos(math.pi * done)) / 2


def read_lines(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def compare(run):
    samples = collections.OrderedDict()
    for row in read_lines(os.path.join(run, "samples.jsonl")):
        samples.setdefault(row["step"], []).append(row["tokens"])
    rows = {row["step"]: row for row in read_lines(os.path.join(run, "logs", "metrics.jsonl")) if "loss" in row}
    steps = list(range(1, len(samples) + 1))
    if not samples or list(samples) != steps or sorted(rows) != steps:
        sys.exit(f"{run}: the steps must be 1, 2, ...: samples of {list(samples)}, metrics of {sorted(rows)}")

    bf16 = args.precision == "bfloat16"
    model = torch_models.load(os.path.join(run, "start", "step-0")).to(args.device)
    if bf16:
        model.s.residual = torch.bfloat16
        computed = copy.deepcopy(model).bfloat16()  # from the fp32 weights, every step
    else:
        computed = model.double()
    optimizer = model.optimizer(lr=0.0, betas=tuple(args.betas), eps=args.eps, weight_decay=args.weight_decay)
    worst = {"loss": 0.0, "grad_norm": 0.0, "lr": 0.0}
    clipped = 0
    print(f"{'step':>4} {'loss':>12} {'torch':>12} {'relative':>9}   {'norm':>10} {'torch':>10} {'relative':>9}   lr")
    for step, sequences in samples.items():
        row, data = rows[step], torch.tensor(sequences, device=args.device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        if bf16:
            with torch.no_grad():
                for weight, rounded in zip(model.parameters(), computed.parameters()):
                    rounded.copy_(weight)
        computed.zero_grad(set_to_none=True)
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=bf16):  # the loss in fp32
            loss = computed.loss(data[:, :-1], data[:, 1:])
        loss.backward()
        if bf16:
            for weight, rounded in zip(model.parameters(), computed.parameters()):
                weight.grad = rounded.grad.float()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip))
        optimizer.step()
        torch_row = {"loss": float(loss.detach()), "grad_norm": norm, "lr": learning_rate(step)}
        difference = {key: abs(row[key] - value) / value for key, value in torch_row.items()}
        for key, value in difference.items():
            worst[key] = max(worst[key], value if value == value else math.inf)
        clipped += norm > args.clip
        print(f"{step:4d} {row['loss']:12.7f} {torch_row['loss']:12.7f} {difference['loss']:9.1e}   "
              f"{row['grad_norm']:10.6f} {norm:10.6f} {difference['grad_norm']:9.1e}   {row['lr']:.6e}")
    good = worst["loss"] <= args.tolerance and worst["grad_norm"] <= args.norm_tolerance and worst["lr"] <= 1e-12
    print(f"{model.s.family}: worst relative difference of {len(samples)} steps: loss {worst['loss']:.2e}, "
          f"gradient norm {worst['grad_norm']:.2e}, learning rate {worst['lr']:.1e}; {clipped} steps clipped: "
          f"{'the same' if good else 'DIFFERENT'}")
    if not 0 < clipped < len(samples):
        print("a comparison needs steps that clip and steps that do not")
        return False
    return good


torch.set_num_threads(args.threads)
sys.exit(0 if all([compare(run) for run in args.runs]) else 1)
