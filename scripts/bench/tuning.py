#!/usr/bin/env python3
"""The inputs, the runs and the table of scripts/bench-sft.sh, scripts/bench-dpo.sh and scripts/bench-grpo.sh.

usage: tuning.py check                              exits with 1 if a package is missing; prints the versions
       tuning.py write OBJECTIVE DIRECTORY EXAMPLES the model, its tokenizer and the file of conversations or pairs
       tuning.py nrl OBJECTIVE DIRECTORY [OPTION...]  trains with nrl-train, prints one JSON line
       tuning.py trl OBJECTIVE DIRECTORY [OPTION...]  the same examples with TRL
       tuning.py table RESULTS                      the table of a file of these lines; exits with 1 if losses differ

Every step trains on all examples of the file, so that all steps of all programs have the same work. The lengths are the
quantiles of a log-normal distribution, which is what conversations have: a median of 100 tokens, a mean of 145, none
above 512. The loss is that of the assistant's tokens. A pair has two sequences of such lengths with the same prompt. Its
reference is the model of the start, whose log-probabilities both programs compute before the first step; that is not
timed. Losses are compared after the first step, or of pairs, whose first loss is log 2 for any model, after the last.

grpo: a step generates EXAMPLES completions, GROUP of a prompt, with a random Llama of a shape of SHAPES, judges them and
trains on them. Programs sample other completions, so that no losses are compared; a random model hardly ever ends one early.
"""
import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import time

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LENGTH, MEDIAN, SIGMA, SHORTEST = 512, 100, 0.9, 20
GROUP, PROMPT = 16, 5
# Of grpo: config.json's members, and tokens of a completion. sort: configs/grpo-sort-sft.yaml; smollm-135m: configs/.
SHAPES = {
    "sort": ({"vocab_size": 258, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}, 5),
    "smollm-135m": ({"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                     "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048}, 32),
}
LEARNING_RATE, BETAS, WEIGHT_DECAY = 1e-4, (0.9, 0.95), 0.1
# <after>: a line break between messages. TRL's completions of pairs include the text after the end token, ours do not:
# pairs have none.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '<after>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TITLES = {
    "packed": "nrl-train, packed",
    "plain": "nrl-train, not packed",
    "padded": "TRL, padded",
    "single": "TRL, one at a time",
    "padding-free": "TRL, padding-free",
}


def check():
    import torch
    import transformers
    import trl

    print(f"TRL {trl.__version__}, transformers {transformers.__version__}, PyTorch {torch.__version__.split('+')[0]}")


def conversation(draw, words, tokens):
    """A conversation of about `tokens` tokens, two thirds of them the assistant's. A word has one token."""
    turns = 1 + (tokens > 80) + (tokens > 200)
    words_left = max(tokens - 9 * turns, 2 * turns)  # a message's header, end and newline
    messages = []
    for turn in range(turns):
        both = words_left // (turns - turn)
        words_left -= both
        asked = max(both // 3, 1)
        for role, count in ("user", asked), ("assistant", max(both - asked, 1)):
            messages.append({"role": role, "content": " ".join(draw.choice(words) for _ in range(count))})
    return {"messages": messages}


def pair(draw, words, chosen, rejected):
    """A pair of about `chosen` and `rejected` tokens, a third of the shorter one the prompt's."""
    asked = max((min(chosen, rejected) - 9) // 3, 1)

    def message(role, count):
        return [{"role": role, "content": " ".join(draw.choice(words) for _ in range(max(count, 1)))}]

    return {"prompt": message("user", asked), "chosen": message("assistant", chosen - 9 - asked),
            "rejected": message("assistant", rejected - 9 - asked)}


def answer_tokens(directory):
    """Of a completion of grpo."""
    with open(os.path.join(directory, "shape")) as file:
        return SHAPES[file.read()][1]


def write_prompts(directory, examples, name):
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shape, answer = SHAPES[name]
    with open(os.path.join(directory, "shape"), "w") as file:
        file.write(name)
    draw = random.Random(1)
    with open(os.path.join(directory, "examples.jsonl"), "w") as file:
        for _ in range(1000):
            digits = [str(draw.randrange(10)) for _ in range(4)]
            file.write(json.dumps({"prompt": "".join(digits) + "=", "answer": "".join(sorted(digits))}) + "\n")
    bpe = Tokenizer(models.BPE())  # of bytes
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator([], trainers.BpeTrainer(
        vocab_size=258, special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    # A random model samples every id: all of them have a text.
    bpe.add_tokens([f"<{i}>" for i in range(bpe.get_vocab_size(), shape["vocab_size"])])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|pad|>")
    model = os.path.join(directory, "model")
    tokenizer.save_pretrained(model)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True, bos_token_id=None,
                                 eos_token_id=tokenizer.eos_token_id)).float().save_pretrained(model)
    print(f"{name}: {examples} completions of {answer} tokens, {GROUP} of a prompt of {PROMPT} tokens")


def write(objective, directory, examples, shape):
    if objective == "grpo":
        return write_prompts(directory, examples, shape)
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    draw = random.Random(1)
    words = sorted({"".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 7))) for _ in range(2000)})
    normal = statistics.NormalDist(math.log(MEDIAN), SIGMA)
    sequences = examples * (2 if objective == "dpo" else 1)
    lengths = [min(max(round(math.exp(normal.inv_cdf((i + 0.5) / sequences))), SHORTEST), LENGTH - 8)
               for i in range(sequences)]
    draw.shuffle(lengths)
    if objective == "dpo":
        records = [pair(draw, words, *both) for both in zip(lengths[::2], lengths[1::2])]
    else:
        records = [conversation(draw, words, n) for n in lengths]
    with open(os.path.join(directory, "examples.jsonl"), "w") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    # Every word with and without the space before it.
    bpe.train_from_iterator(
        [text for word in words for text in (word, " " + word)] * 2 + ["user", "assistant"] * 2,
        trainers.BpeTrainer(vocab_size=8192, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE.replace("<after>", "" if objective == "dpo" else "\\n")
    model = os.path.join(directory, "model")
    tokenizer.save_pretrained(model)
    torch.manual_seed(0)
    # configs/llama-17m.yaml
    LlamaForCausalLM(LlamaConfig(
        vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=LENGTH, rms_norm_eps=1e-5, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id)).float().save_pretrained(model)

    texts = [r["messages"] for r in records] if objective == "sft" else [
        r["prompt"] + r[answer] for r in records for answer in ("chosen", "rejected")]
    lengths = sorted(len(tokenizer.apply_chat_template(text, return_dict=False)) for text in texts)
    print(f"{examples} {'examples' if objective == 'sft' else 'pairs of sequences'} of {lengths[0]} to {lengths[-1]} "
          f"tokens: median {lengths[sequences // 2]}, mean {statistics.mean(lengths):.0f}, 90th percentile "
          f"{lengths[int(sequences * 0.9)]}")
    if lengths[-1] > LENGTH:
        sys.exit(f"a sequence has {lengths[-1]} tokens, more than {LENGTH}")


def read_records(directory):
    with open(os.path.join(directory, "examples.jsonl")) as file:
        return [json.loads(line) for line in file]


def result(args, losses, **values):
    """losses: of all steps."""
    step = 1 if args.objective == "sft" else len(losses)
    loss = {} if args.objective == "grpo" else {"loss": losses[step - 1], "loss_step": step}
    print(json.dumps({"variant": args.variant, "round": args.round, "title": TITLES[args.variant], **loss, **values}))


def train_nrl(args):
    rollouts = args.objective == "grpo"
    examples = args.examples if rollouts else len(read_records(args.directory))
    logs = os.path.join(args.directory, "logs")
    config = {
        "algorithm": args.objective, "device": "cpu",
        "policy": {
            "model_name": os.path.join(args.directory, "model"), "precision": "float32",
            "train_global_batch_size": examples, "train_micro_batch_size": args.micro,
            "max_total_sequence_length": LENGTH, "max_grad_norm": 1.0,
            "optimizer": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "betas": BETAS, "eps": 1e-8},
            "scheduler": {"lr_decay_style": "constant"},
            "sequence_packing": {"enabled": args.variant == "packed"},
        },
        args.objective: {"max_num_steps": args.warmup + args.steps},
        "data": {"train": {"data_path": os.path.join(args.directory, "examples.jsonl")},
                 "cache_dir": os.path.join(args.directory, "cache")},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": logs},
        "kernels": {"num_threads": args.threads},
    }
    if rollouts:
        answer = answer_tokens(args.directory)
        config["policy"] |= {"max_total_sequence_length": (PROMPT + answer + 7) // 8 * 8,
                             "generation": {"max_new_tokens": answer}, "tokenizer": {"chat_template": "none"}}
        config["grpo"] |= {"num_prompts_per_step": examples // GROUP, "num_generations_per_prompt": GROUP}
        config["reward"] = [{"type": "exact", "answer_key": "answer"}]
        config["data"]["train"]["format"] = "prompts"
    path = os.path.join(args.directory, "run.yaml")
    with open(path, "w") as file:
        file.writelines(f"{key}: {json.dumps(value)}\n" for key, value in config.items())
    metrics = os.path.join(logs, "metrics.jsonl")
    if os.path.exists(metrics):
        os.remove(metrics)
    run = subprocess.run([args.binary, path], capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stdout + run.stderr)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(metrics) as file:
        steps = [row for row in map(json.loads, file) if "grad_norm" in row]
    timed = steps[args.warmup:]
    # The processor time of the whole run, its start included.
    result(args, examples=examples, tokens=steps[0]["tokens"], loss_tokens=steps[0]["global_valid_toks"], padding=0.0,
           step_ms=[row["step_ms"] for row in timed], data_ms=[row["data_ms"] for row in timed],
           gemm_ms=[row["gemm_ms"] for row in timed], losses=[row["loss"] for row in steps],
           cpu_ms=(usage.ru_utime + usage.ru_stime) * 1e3 / len(steps))


def train_trl(args):
    import torch
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer, LlamaForCausalLM, TrainerCallback
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    disable_progress_bars()
    torch.set_num_threads(args.threads)
    model = os.path.join(args.directory, "model")
    records = read_records(args.directory)
    repeated = []  # a step after the other, each with all examples in an order of its own
    for step in range(args.warmup + args.steps):
        order = list(records)
        random.Random(step).shuffle(order)
        repeated += order
    micro = 1 if args.variant == "single" else args.micro
    rollouts = args.objective == "grpo"
    examples = args.examples if rollouts else len(records)
    common = dict(
        output_dir=os.path.join(args.directory, "trl"), max_steps=args.warmup + args.steps,
        per_device_train_batch_size=micro, gradient_accumulation_steps=examples // micro,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", warmup_steps=0,
        weight_decay=WEIGHT_DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=1e-8, max_grad_norm=1.0,
        bf16=False, fp16=False, gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True)
    if not rollouts:  # padding-free refuses a limit; no example is longer
        common |= {"train_sampling_strategy": "sequential",
                   "max_length": None if args.variant == "padding-free" else LENGTH}
    if args.objective == "grpo":
        family = GRPOTrainer
        config = GRPOConfig(num_generations=GROUP, max_completion_length=answer_tokens(args.directory), temperature=1.0, beta=0.0,
                            loss_type="dapo", steps_per_generation=1, shuffle_dataset=False, **common)
    elif args.objective == "dpo":
        family, config = DPOTrainer, DPOConfig(beta=0.1, loss_type=["sigmoid"], precompute_ref_log_probs=True, **common)
    else:
        family, config = SFTTrainer, SFTConfig(
            packing=False, padding_free=args.variant == "padding-free", assistant_only_loss=True, loss_type="nll", **common)

    class Clock(TrainerCallback):
        """Wall-clock and processor time at the end of every step: a step includes the collation of its batches."""

        def __init__(self):
            self.ends = []

        def on_step_end(self, *_, **__):
            self.ends.append((time.perf_counter(), time.process_time()))

    clock = Clock()
    more = {"reward_funcs": lambda completions, answer, **_: [float(c == a) for c, a in zip(completions, answer)]}
    trainer = family(
        model=LlamaForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"), args=config,
        train_dataset=Dataset.from_list(records if rollouts else repeated),
        processing_class=AutoTokenizer.from_pretrained(model), callbacks=[clock], **(more if rollouts else {}))
    collate, rows = trainer.data_collator, []

    def count(batch):
        out = collate(batch)
        if args.objective == "dpo":
            counts = int(out["attention_mask"].sum()), int(out["completion_mask"].sum())
        else:
            counts = sum(len(example["input_ids"]) for example in batch), int((out["labels"] != -100).sum())
        rows.append((out["input_ids"].numel(), *counts))
        return out

    if not rollouts:
        trainer.data_collator = count
    stdout = os.dup(1)
    os.dup2(2, 1)  # the trainer prints its logs
    trainer.train()
    sys.stdout.flush()
    os.dup2(stdout, 1)
    ends = clock.ends[args.warmup - 1:]
    step_ms = [(b[0] - a[0]) * 1e3 for a, b in zip(ends, ends[1:])]
    cpu_ms = (ends[-1][1] - ends[0][1]) * 1e3 / len(step_ms)
    steps = args.warmup + args.steps
    logged = [row for row in trainer.state.log_history if "loss" in row]
    if rollouts:
        answers = statistics.mean(row["completions/mean_length"] for row in logged) * examples
        tokens, loss_tokens, all_rows = steps * (answers + 5 * examples), steps * answers, 0
    else:
        rows = rows[:steps * examples // micro]
        all_rows, tokens, loss_tokens = (sum(column) for column in zip(*rows))
    result(args, examples=examples, tokens=tokens / steps, loss_tokens=loss_tokens / steps,
           padding=1 - tokens / all_rows if all_rows else 0.0, step_ms=step_ms, cpu_ms=cpu_ms,
           losses=[row["loss"] for row in logged])


def table(path):
    with open(path) as file:
        runs = [json.loads(line) for line in file]
    variants = list(dict.fromkeys(run["variant"] for run in runs))
    rows = {}
    for variant in variants:
        mine = [run for run in runs if run["variant"] == variant]
        rows[variant] = {
            "best": min(ms for run in mine for ms in run["step_ms"]),
            "median": statistics.median(statistics.median(run["step_ms"]) for run in mine),
            "cpu": statistics.median(run["cpu_ms"] for run in mine), **mine[0]}
    peer = rows.get("padded")
    print("| program | examples/s best | median | loss tokens/s best | median | processor ms per step | padding | "
          "speed best | median | by processor time |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows.values():
        cells = [row["title"]]
        for count in row["examples"], row["loss_tokens"]:
            cells += [f"{count / row[key] * 1e3:.2f}" for key in ("best", "median")]
        cells += [f"{row['cpu']:.0f}", f"{row['padding'] * 100:.1f} %"]
        cells += [f"{peer[key] / row[key]:.2f}" if peer else "" for key in ("best", "median", "cpu")]
        print("| " + " | ".join(cells) + " |")
    print()
    first = next(iter(rows.values()))
    print(f"Tokens of a step: {first['tokens']:.0f}, with a loss {first['loss_tokens']:.0f}. Speed is relative to "
          f"{TITLES['padded']}.")
    if "loss" not in first:
        return
    different = [row["title"] for row in rows.values() if abs(row["loss"] - first["loss"]) > 1e-4 * first["loss"]]
    print(f"Losses of step {first['loss_step']}: " + ", ".join(f"{row['loss']:.6f}" for row in rows.values()) + ".")
    if different:
        sys.exit("error: another loss than " + first["title"] + ": " + ", ".join(different))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    one = commands.add_parser("write")
    one.add_argument("objective", choices=["sft", "dpo", "grpo"])
    one.add_argument("directory")
    one.add_argument("examples", type=int)
    one.add_argument("--model", choices=list(SHAPES), default="sort", help="of grpo")
    for name, variants in ("nrl", ["packed", "plain"]), ("trl", ["padded", "single", "padding-free"]):
        one = commands.add_parser(name)
        one.add_argument("objective", choices=["sft", "dpo", "grpo"])
        one.add_argument("directory")
        one.add_argument("--examples", type=int, default=512, help="grpo: completions of a step")
        one.add_argument("--variant", choices=variants, required=True)
        one.add_argument("--round", type=int, default=1)
        one.add_argument("--steps", type=int, default=3, help="steps to time")
        one.add_argument("--warmup", type=int, default=1, help="steps before them, 1 or more")
        one.add_argument("--micro", type=int, default=8, help="examples per microbatch; packed: times 512 tokens")
        one.add_argument("--threads", type=int, default=2)
        one.add_argument("--binary", help="nrl-train")
    commands.add_parser("table").add_argument("results")
    args = parser.parse_args()
    if args.command == "check":
        check()
    elif args.command == "write":
        write(args.objective, args.directory, args.examples, args.model)
    elif args.command == "table":
        table(args.results)
    else:
        {"nrl": train_nrl, "trl": train_trl}[args.command](args)


main()
