#!/usr/bin/env python3
"""Trains the same adapters on the same samples with PEFT, in double precision, and compares every step.

Needs torch, transformers and peft. scripts/check-lora-parity.sh makes the directories FAMILY: base/step-0, start/step-0
(the adapter before the first step), lora/step-20, merged, samples.jsonl and logs/metrics.jsonl. Exit 1 when something
differs by more than the tolerance.
"""
import json
import os
import sys
import warnings

warnings.simplefilter("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
from peft import PeftModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

logging.disable_progress_bar()

LR, BETAS, EPS, DECAY, CLIP = 1.0e-2, (0.85, 0.97), 1.0e-6, 0.3, 0.4
# Adam divides by gradients that are nearly zero, which amplifies rounding in single elements of the adapters.
TOLERANCES = {"loss": 1e-6, "grad_norm": 1e-4, "adapter": 1e-3, "logits": 1e-5, "merged logits": 1e-5}


def read_lines(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).double().eval()


def relative(a, b):
    return abs(a - b) / abs(b)


def worst_of(a, b):
    """Largest difference of two tensors, relative to the largest element."""
    return ((a - b).abs().max() / b.abs().max()).item()


def compare(family):
    samples = {}
    for row in read_lines(f"{family}/samples.jsonl"):
        samples.setdefault(row["step"], []).append(row["tokens"])
    rows = {row["step"]: row for row in read_lines(f"{family}/logs/metrics.jsonl") if "loss" in row}
    model = PeftModel.from_pretrained(load(f"{family}/base/step-0"), f"{family}/start/step-0", is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    worst = dict.fromkeys(TOLERANCES, 0.0)
    for step, sequences in sorted(samples.items()):
        ids = torch.tensor(sequences)
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        worst["loss"] = max(worst["loss"], relative(rows[step]["loss"], loss.item()))
        worst["grad_norm"] = max(worst["grad_norm"], relative(rows[step]["grad_norm"], norm.item()))
    if len(samples) != 20 or len(rows) != 20:
        sys.exit(f"{family}: {len(samples)} steps of samples and {len(rows)} of metrics, expected 20")
    ours = load_file(f"{family}/lora/step-20/adapter_model.safetensors")
    theirs = {n.replace(".default", ""): p.detach() for n, p in model.named_parameters() if p.requires_grad}
    if sorted(ours) != sorted(theirs):
        sys.exit(f"{family}: the files have other tensors: {sorted(set(ours) ^ set(theirs))[:4]}")
    for name, tensor in theirs.items():
        worst["adapter"] = max(worst["adapter"], worst_of(ours[name].double(), tensor))
    # Our adapter in PEFT, and our merged model in transformers.
    ids = torch.tensor(samples[1])[:, :-1]
    with torch.no_grad():
        mine = PeftModel.from_pretrained(load(f"{family}/base/step-0"), f"{family}/lora/step-20")(ids).logits
        worst["logits"] = worst_of(mine, model(ids).logits)
        worst["merged logits"] = worst_of(load(f"{family}/merged")(ids).logits, mine)
    print(f"{family:8} {len(theirs):4} tensors  loss {loss.item():.6f}  " +
          "  ".join(f"{name} {value:.1e}" for name, value in worst.items()))
    return all(worst[name] <= TOLERANCES[name] for name in TOLERANCES)


if not all([compare(family) for family in sys.argv[1:]]):
    print(f"tolerances: {TOLERANCES}")
    sys.exit(1)
