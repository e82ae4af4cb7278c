#!/usr/bin/env python3
"""Trains the same reward models on the same pairs with transformers, in double precision, and compares every step.

Needs torch, transformers and peft. scripts/check-reward-parity.sh makes pairs.jsonl and the directories FAMILY:
base/step-0, start/step-0 (the model or adapter before the first step), rm/step-20, merged (of an adapter) and
logs/metrics.jsonl. Exit 1 when something differs by more than the tolerance.
"""
import json
import os
import sys
import warnings

warnings.simplefilter("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
from peft import PeftModel  # noqa: E402
from torch.nn.functional import logsigmoid  # noqa: E402
from transformers import AutoModelForSequenceClassification  # noqa: E402
from transformers.utils import logging  # noqa: E402

logging.disable_progress_bar()

LR, BETAS, EPS, DECAY, CLIP = 1.0e-4, (0.85, 0.97), 1.0e-5, 0.3, 2.0
STEPS, CENTER, END = 20, 0.01, 256
# With larger steps Adam, which divides by gradients that are nearly zero, amplifies rounding in a few steps.
TOLERANCES = {"loss": 1e-5, "grad_norm": 1e-4, "rewards": 1e-5, "accuracy": 0, "start": 1e-6, "scores": 1e-5,
              "merged": 1e-5}


def read_lines(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def load(directory, **more):
    return AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, **more).double().eval()


def load_trained(family, run):
    """A model that nrl-train wrote, or an adapter on its base model."""
    if family == "lora":
        base = load(f"{family}/base/step-0", num_labels=1)
        return PeftModel.from_pretrained(base, f"{family}/{run}", is_trainable=True)
    return load(f"{family}/{run}")


def score(model, text):
    """Alone, without padding."""
    ids = torch.tensor([list(text.encode()) + [END]])
    return model(ids).logits[0, 0]


def relative(a, b):
    return abs(a - b) / abs(b)


def worst_of(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def compare(family, pairs):
    rows = {row["step"]: row for row in read_lines(f"{family}/logs/metrics.jsonl") if "loss" in row}
    model = load_trained(family, "start/step-0")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in trained if p.dim() > 1], "weight_decay": DECAY},
         {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0}], lr=LR, betas=BETAS, eps=EPS)
    worst = dict.fromkeys(TOLERANCES, 0.0)
    for step in range(1, STEPS + 1):
        chosen, rejected = [torch.stack([score(model, p["prompt"] + p[key]) for p in pairs])
                            for key in ("chosen", "rejected")]
        loss = (-logsigmoid(chosen - rejected) + CENTER * (chosen + rejected)**2).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        row = rows[step]
        worst["loss"] = max(worst["loss"], relative(row["loss"], loss.item()))
        worst["grad_norm"] = max(worst["grad_norm"], relative(row["grad_norm"], norm.item()))
        # Means may be near zero.
        largest = max(chosen.abs().max().item(), rejected.abs().max().item())
        for key, scores in (("rewards_chosen_mean", chosen), ("rewards_rejected_mean", rejected)):
            error = abs(row[key] - scores.mean().item()) / largest
            worst["rewards"] = max(worst["rewards"], error)
            if step == 1:
                worst["start"] = max(worst["start"], error)
        worst["accuracy"] = max(worst["accuracy"], abs(row["accuracy"] - (chosen > rejected).double().mean().item()))
    if len(rows) != STEPS:
        sys.exit(f"{family}: {len(rows)} steps of metrics, expected {STEPS}")
    # Our reward model in transformers, or our adapter in PEFT.
    texts = [p["prompt"] + p[key] for p in pairs for key in ("chosen", "rejected")]

    def scores_of(other):
        with torch.no_grad():
            return torch.stack([score(other, text) for text in texts])

    mine = load_trained(family, "rm/step-20")
    worst["scores"] = worst_of(scores_of(mine), scores_of(model))
    if family == "lora":
        worst["merged"] = worst_of(scores_of(load(f"{family}/merged")), scores_of(mine))
    print(f"{family:8} {len(trained):4} tensors  loss {loss.item():.6f}  " +
          "  ".join(f"{name} {value:.1e}" for name, value in worst.items()))
    return all(worst[name] <= TOLERANCES[name] for name in TOLERANCES)


pairs = read_lines("pairs.jsonl")
if not all([compare(family, pairs) for family in sys.argv[1:]]):
    print(f"tolerances: {TOLERANCES}")
    sys.exit(1)
