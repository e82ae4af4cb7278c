#!/usr/bin/env python3
"""Trains a small Llama with TRL, in double precision, and with nrl-train, on the same data, and compares every step.

Needs trl, transformers, datasets and torch. Writes models, tokenizer and records into DIRECTORY, trains 20 steps of every
case, each on all records, prints the largest relative differences, and exits with 1 if one exceeds its tolerance.

TRL is set to what both programs define alike. The differences that are intended:
- TRL's completions include what a template writes after the end token; here the end token is the last one with a loss.
  The template of pairs writes nothing there.
- TRL's rewards/* and logps/* are sums over tokens for every loss; here those of ipo and sigmoid_norm are means, as their
  losses are. They are not compared.
- TRL's advantages subtract the mean of the group, those here the mean of the other completions. Both get the same ones.
- TRL multiplies the KL divergence by the ratio unless use_bias_correction_kl is false.
- TRL's epsilon_high of cispo is the bound itself, and there is no lower bound: here 1 + ratio_clip_max, ratio_clip_min 1.
- dr_grpo divides by max_completion_length in TRL, by policy.max_total_sequence_length here.
- TRL's sigmoid has no label smoothing. Its bnpo is dapo in a single microbatch.
"""
import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch  # noqa: E402
from datasets import Dataset, disable_progress_bars  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import (LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification,  # noqa: E402
                          PreTrainedTokenizerFast)

STEPS, RECORDS, LENGTH, GROUP = 20, 64, 128, 4
LEARNING_RATE = {"sft": 1e-3, "dpo": 1e-4, "rm": 1e-4, "grpo": 1e-4}
TOLERANCES = {"loss": 1e-5, "norm": 1e-5, "metrics": 1e-5}  # f64 against f32
# Name in TRL's log: name in metrics.jsonl.
METRICS = {
    "dpo": {"rewards/chosen": "rewards_chosen_mean", "rewards/rejected": "rewards_rejected_mean",
            "rewards/accuracies": "accuracy", "rewards/margins": "rewards_margin_mean",
            "logps/chosen": "logps_chosen_mean", "logps/rejected": "logps_rejected_mean"},
    "rm": {"accuracy": "accuracy", "margin": "rewards_margin_mean"},
}


def template(after):
    return ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
            "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
            "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '" + after + "' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


class Case:
    """A configuration of both programs: `ours` by sections, `theirs` as arguments of TRL's config."""

    def __init__(self, objective, name, ours=None, theirs=None, metrics=True):
        self.objective, self.name, self.ours, self.theirs = objective, name, ours or {}, theirs or {}
        self.metrics = METRICS.get(objective, {}) if metrics else {}


def dpo(name, metrics=True, theirs=None, **ours):
    return Case("dpo", name, {"dpo": {"beta": 0.1, **ours}}, {"beta": 0.1, **(theirs or {"loss_type": [name]})}, metrics)


def grpo(name, ours, theirs):
    """The same loss without and with a divergence from the reference."""
    return [Case("grpo", f"{name}, beta {beta}", {"loss_fn": {"reference_policy_kl_penalty": beta, **ours}},
                 {"beta": beta, "epsilon": 0.2, "epsilon_high": 0.25, **theirs}) for beta in (0, 0.04)]


def all_cases():
    clip = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.25}
    smoothing = {"label_smoothing": 0.1}
    return [
        Case("sft", "nll"),
        dpo("sigmoid", loss_type="sigmoid"),
        dpo("hinge", loss_type="hinge"),
        dpo("ipo", metrics=False, loss_type="ipo"),
        dpo("robust", theirs={"loss_type": ["robust"], **smoothing}, loss_type="robust", **smoothing),
        dpo("apo_zero", loss_type="apo_zero"),
        dpo("apo_down", loss_type="apo_down"),
        dpo("sigmoid_norm", metrics=False, loss_type="sigmoid", average_log_probs=True),
        *(Case("rm", f"center {c}", {"rm": {"center_rewards_coefficient": c}}, {"center_rewards_coefficient": c})
          for c in (0, 0.1)),
        *grpo("grpo", {**clip, "aggregation": "sequence_mean_token_mean"}, {"loss_type": "grpo"}),
        *grpo("dr_grpo", {**clip, "aggregation": "sequence_mean_token_sum_norm"}, {"loss_type": "dr_grpo"}),
        *grpo("dapo", {**clip, "aggregation": "token_mean"}, {"loss_type": "dapo"}),
        *grpo("dapo, delta 1.5", {**clip, "aggregation": "token_mean", "ratio_clip_c": 1.5},
              {"loss_type": "dapo", "delta": 1.5}),
        *grpo("cispo", {"type": "cispo", "ratio_clip_min": 1, "ratio_clip_max": 0.25, "aggregation": "token_mean"},
              {"loss_type": "cispo", "epsilon_high": 1.25}),
        *grpo("grpo, sequence", {**clip, "type": "gspo"},
              {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    ]


class Inputs:
    """The tokenizer, the models and the records of all objectives, and their files."""

    def __init__(self, work):
        self.work = work
        draw = random.Random(1)
        words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 7))) for _ in range(200)]

        def text(most):
            return " ".join(draw.choice(words) for _ in range(draw.randint(1, most)))

        self.sft = []
        for i in range(RECORDS):
            turns = [{"role": "system", "content": text(6)}] if i % 3 == 0 else []
            for _ in range(1 + i % 2):
                turns += [{"role": "user", "content": text(8)}, {"role": "assistant", "content": text(9)}]
            self.sft.append({"messages": turns})

        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        bpe.train_from_iterator(
            [m["content"] for r in self.sft for m in r["messages"]],
            trainers.BpeTrainer(vocab_size=512, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")

        self.dpo = self.rm = [
            {"prompt": [{"role": "user", "content": text(8)}],
             "chosen": [{"role": "assistant", "content": text(9)}],
             "rejected": [{"role": "assistant", "content": text(9)}]} for _ in range(RECORDS)]
        for objective in "sft", "dpo", "rm", "grpo":
            self.save_model(objective)
        self.grpo = self.rollouts(draw, text)
        for objective in "sft", "dpo", "rm", "grpo":
            with open(os.path.join(work, objective + ".jsonl"), "w") as f:
                f.writelines(json.dumps(record) + "\n" for record in getattr(self, objective))

    def save_model(self, objective):
        directory = os.path.join(self.work, "model-" + objective)
        self.tokenizer.chat_template = template("\\n" if objective == "sft" else "")
        self.tokenizer.save_pretrained(directory)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4 if objective == "sft" else 2, intermediate_size=128, max_position_embeddings=LENGTH,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=self.tokenizer.eos_token_id)
        if objective == "rm":
            config.num_labels, config.pad_token_id = 1, self.tokenizer.pad_token_id
            LlamaForSequenceClassification(config).float().save_pretrained(directory)
        else:
            LlamaForCausalLM(config).float().save_pretrained(directory)

    def load(self, objective):
        directory = os.path.join(self.work, "model-" + objective)
        self.tokenizer.chat_template = template("\\n" if objective == "sft" else "")
        family = LlamaForSequenceClassification if objective == "rm" else LlamaForCausalLM
        # Not eager for GRPO: it makes NaN of the padding before prompts in double precision.
        attention = "sdpa" if objective == "grpo" else "eager"
        return family.from_pretrained(directory, dtype=torch.float64, attn_implementation=attention)

    def rollouts(self, draw, text):
        """Completions of one prompt in groups. The old log-probabilities are those of the model and noise, so that some
        ratios are clipped in the first step already."""
        model = self.load("grpo")
        records = []
        for i in range(RECORDS):
            if i % GROUP == 0:
                prompt = self.tokenizer(text(8))["input_ids"]
                rewards = torch.tensor([draw.random() for _ in range(GROUP)], dtype=torch.float64)
                advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            completion = self.tokenizer(text(9))["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1:-1]
            log_probs = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
            old = [min(x + draw.gauss(0, 0.2), 0.0) for x in log_probs.tolist()]
            records.append({
                "prompt_ids": prompt, "completion_ids": completion, "group": i // GROUP,
                # As both programs keep them.
                "advantage": torch.tensor(advantages[i % GROUP].item(), dtype=torch.float32).item(),
                "old_logprobs": torch.tensor(old, dtype=torch.float32).tolist()})
        return records


def train_with_trl(case, inputs):
    import trl

    common = dict(
        output_dir=os.path.join(inputs.work, "trl"), max_steps=STEPS, per_device_train_batch_size=RECORDS,
        gradient_accumulation_steps=1, learning_rate=LEARNING_RATE[case.objective], lr_scheduler_type="constant",
        warmup_steps=0, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=1.0, bf16=False,
        fp16=False, gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, optim="adamw_torch", **case.theirs)
    model = inputs.load(case.objective)
    more = dict(model=model, processing_class=inputs.tokenizer)
    if case.objective != "grpo":
        more["train_dataset"] = Dataset.from_list(getattr(inputs, case.objective))
    if case.objective == "sft":
        trainer = trl.SFTTrainer(args=trl.SFTConfig(
            packing=False, assistant_only_loss=True, max_length=LENGTH, dataset_num_proc=None, loss_type="nll", **common),
            **more)
    elif case.objective == "dpo":
        trainer = trl.DPOTrainer(ref_model=inputs.load("dpo"), args=trl.DPOConfig(max_length=LENGTH, **common), **more)
    elif case.objective == "rm":
        trainer = trl.RewardTrainer(args=trl.RewardConfig(max_length=LENGTH, **common), **more)
    else:
        trainer = rollout_trainer(inputs, common, more)
    stdout = os.dup(1)
    os.dup2(2, 1)  # the trainer prints its logs
    trainer.train()
    sys.stdout.flush()
    os.dup2(stdout, 1)
    return [row for row in trainer.state.log_history if "grad_norm" in row]


def rollout_trainer(inputs, common, more):
    """GRPOTrainer with the rollouts of the file instead of generated ones."""
    import trl

    reference = inputs.load("grpo")

    def padded(lists, left=False, dtype=torch.long):
        longest = max(map(len, lists))
        rows = [(([0] * (longest - len(x)) + x) if left else (x + [0] * (longest - len(x)))) for x in lists]
        masks = [(([0] * (longest - len(x)) + [1] * len(x)) if left else ([1] * len(x) + [0] * (longest - len(x))))
                 for x in lists]
        return torch.tensor(rows, dtype=dtype), torch.tensor(masks)

    class RolloutTrainer(trl.GRPOTrainer):
        def _generate_and_score_completions(self, _):
            records = inputs.grpo
            prompt_ids, prompt_mask = padded([r["prompt_ids"] for r in records], left=True)
            completion_ids, completion_mask = padded([r["completion_ids"] for r in records])
            old, _ = padded([r["old_logprobs"] for r in records], dtype=torch.float64)
            batch = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids,
                     "completion_mask": completion_mask, "old_per_token_logps": old,
                     "advantages": torch.tensor([r["advantage"] for r in records], dtype=torch.float64),
                     "num_items_in_batch": completion_mask.sum()}
            if self.beta != 0:
                with torch.no_grad():
                    logits = reference(torch.cat([prompt_ids, completion_ids], 1),
                                       attention_mask=torch.cat([prompt_mask, completion_mask], 1)).logits
                log_probs = logits[:, prompt_ids.size(1) - 1:-1].log_softmax(-1)
                batch["ref_per_token_logps"] = log_probs.gather(-1, completion_ids[..., None])[..., 0]
            return batch

    return RolloutTrainer(
        args=trl.GRPOConfig(num_generations=GROUP, max_completion_length=LENGTH, use_bias_correction_kl=False, **common),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * RECORDS), **more)


def train_with_nrl(case, inputs, binary, overrides):
    work = inputs.work
    config = {
        "algorithm": case.objective, "device": "cpu",
        "policy": {
            "model_name": os.path.join(work, "model-" + case.objective), "precision": "float32",
            "train_global_batch_size": RECORDS, "train_micro_batch_size": 8, "max_total_sequence_length": LENGTH,
            "max_grad_norm": 1.0,
            "optimizer": {"lr": LEARNING_RATE[case.objective], "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8},
            "scheduler": {"lr_decay_style": "constant"},
        },
        "data": {"train": {"data_path": os.path.join(work, case.objective + ".jsonl")},
                 "cache_dir": os.path.join(work, "cache")},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": os.path.join(work, "logs")},
        "kernels": {"num_threads": 1},
        **case.ours,
    }
    config[case.objective] = {**config.get(case.objective, {}), "max_num_steps": STEPS}
    path = os.path.join(work, "run.yaml")
    with open(path, "w") as f:
        f.writelines(f"{key}: {json.dumps(value)}\n" for key, value in config.items())
    shutil.rmtree(os.path.join(work, "logs"), ignore_errors=True)
    result = subprocess.run([binary, path, *overrides], capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stdout + result.stderr)
    with open(os.path.join(work, "logs", "metrics.jsonl")) as f:
        return [row for row in map(json.loads, f) if "grad_norm" in row]


def relative(a, b):
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(b), 0.1)  # Losses of policies and margins, sums of larger terms, cross 0.


def compare(case, inputs, args):
    ours = train_with_nrl(case, inputs, args.binary, args.overrides)
    theirs = train_with_trl(case, inputs)
    worst = {"loss": 0.0, "norm": 0.0, "metrics": 0.0}
    for a, b in zip(ours, theirs):
        differences = {"loss": relative(a["loss"], b["loss"]), "norm": relative(a["grad_norm"], b["grad_norm"]),
                       "metrics": max([relative(a[y], b[x]) for x, y in case.metrics.items()], default=0.0)}
        worst = {key: max(worst[key], differences[key]) for key in worst}
        if args.steps:
            print(f"  {a['step']:>3} loss {a['loss']:.8f} {b['loss']:.8f} {differences['loss']:.1e}  "
                  f"norm {a['grad_norm']:.6f} {b['grad_norm']:.6f} {differences['norm']:.1e}")
            for x, y in case.metrics.items():
                print(f"      {y} {a[y]:.7f} {b[x]:.7f}")
    good = len(ours) == len(theirs) == STEPS and all(worst[key] <= TOLERANCES[key] for key in worst)
    metrics = f"{worst['metrics']:.1e}" if case.metrics else "-"
    print(f"{case.objective:<9} {case.name:<26} {theirs[0]['loss']:>11.7f} {theirs[-1]['loss']:>11.7f} {worst['loss']:>9.1e} "
          f"{worst['norm']:>9.1e} {metrics:>9}{'' if good else '  DIFFERENT'}", flush=True)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", help="nrl-train")
    parser.add_argument("directory", help="is made if it does not exist")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further keys of nrl-train")
    parser.add_argument("--objective", action="append", choices=["sft", "dpo", "rm", "grpo"], help="default: all")
    parser.add_argument("--case", help="only cases whose name begins like this")
    parser.add_argument("--steps", action="store_true", help="print every step")
    args = parser.parse_intermixed_args()
    os.makedirs(args.directory, exist_ok=True)
    disable_progress_bars()
    inputs = Inputs(args.directory)
    cases = [c for c in all_cases() if (not args.objective or c.objective in args.objective) and
             c.name.startswith(args.case or "")]
    print(f"{'objective':<9} {'case':<26} {'first loss':>11} {'last loss':>11} {'loss':>9} {'norm':>9} {'metrics':>9}")
    results = [compare(case, inputs, args) for case in cases]
    if not results or not all(results):
        sys.exit(1)


main()
