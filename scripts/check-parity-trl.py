#!/usr/bin/env python3
"""Fine-tunes a small Llama on a chat file with TRL, in double precision, and with nrl-train, and compares every step.

Needs trl, transformers and torch. Writes the model, its tokenizer and the records into DIRECTORY, trains both for 20
steps, each on all records, and exits with 1 if a loss, a gradient norm or the ids and masks of a record differ.

usage: check-parity-trl.py BINARY DIRECTORY [KEY=VALUE ...]
"""
import json
import os
import random
import subprocess
import sys

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

binary, work, overrides = sys.argv[1], sys.argv[2], sys.argv[3:]
STEPS, RECORDS, LENGTH = 20, 64, 128
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-4  # f64 against f32
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_inputs():
    draw = random.Random(1)
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 7))) for _ in range(200)]

    def text(most):
        return " ".join(draw.choice(words) for _ in range(draw.randint(1, most)))

    records = []
    for i in range(RECORDS):
        turns = [{"role": "system", "content": text(6)}] if i % 3 == 0 else []
        for _ in range(1 + i % 2):
            turns += [{"role": "user", "content": text(8)}, {"role": "assistant", "content": text(9)}]
        records.append({"messages": turns})
    with open(os.path.join(work, "chat.jsonl"), "w") as f:
        for record in records:
            f.write(json.dumps(record) + "\n")

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe.train_from_iterator(
        [m["content"] for r in records for m in r["messages"]],
        trainers.BpeTrainer(vocab_size=512, special_tokens=special,
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    directory = os.path.join(work, "model")
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=128, max_position_embeddings=LENGTH, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id))
    model.float().save_pretrained(directory)
    return directory, records, tokenizer


def train_with_trl(directory, records, tokenizer):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    config = SFTConfig(
        output_dir=os.path.join(work, "trl"), max_steps=STEPS, per_device_train_batch_size=RECORDS,
        gradient_accumulation_steps=1, learning_rate=1e-3, lr_scheduler_type="constant", warmup_steps=0,
        weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=1.0, bf16=False, fp16=False,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[], packing=False,
        assistant_only_loss=True, max_length=LENGTH, use_cpu=True, disable_tqdm=True, optim="adamw_torch",
        dataset_num_proc=None, loss_type="nll")
    trainer = SFTTrainer(model=model, args=config, train_dataset=Dataset.from_list(records),
                         processing_class=tokenizer)
    trainer.train()
    return [row for row in trainer.state.log_history if "grad_norm" in row]


def train_with_nrl(directory):
    config = {
        "algorithm": "sft", "device": "cpu",
        "policy": {
            "model_name": directory, "precision": "float32", "train_global_batch_size": RECORDS,
            "train_micro_batch_size": 8, "max_total_sequence_length": LENGTH, "max_grad_norm": 1.0,
            "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8},
            "scheduler": {"lr_decay_style": "constant"},
        },
        "sft": {"max_num_steps": STEPS},
        "data": {"train": {"data_path": os.path.join(work, "chat.jsonl")}, "cache_dir": os.path.join(work, "cache")},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": os.path.join(work, "logs")},
        "kernels": {"num_threads": 1},
    }
    path = os.path.join(work, "run.yaml")
    with open(path, "w") as f:
        f.writelines(f"{key}: {json.dumps(value)}\n" for key, value in config.items())
    result = subprocess.run([binary, path, *overrides], capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stdout + result.stderr)
    with open(os.path.join(work, "logs", "metrics.jsonl")) as f:
        return [row for row in map(json.loads, f) if "grad_norm" in row]


def main():
    os.makedirs(work, exist_ok=True)
    directory, records, tokenizer = write_inputs()
    ours = train_with_nrl(directory)
    theirs = train_with_trl(directory, records, tokenizer)
    worst_loss = worst_norm = 0.0
    print(f"{'step':>4} {'loss':>12} {'TRL':>12} {'relative':>9}   {'norm':>10} {'TRL':>10} {'relative':>9}")
    for a, b in zip(ours, theirs):
        loss = abs(a["loss"] - b["loss"]) / b["loss"]
        norm = abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"]
        worst_loss, worst_norm = max(worst_loss, loss), max(worst_norm, norm)
        print(f"{a['step']:>4} {a['loss']:>12.8f} {b['loss']:>12.8f} {loss:>9.1e}   {a['grad_norm']:>10.6f} "
              f"{b['grad_norm']:>10.6f} {norm:>9.1e}")
    print(f"largest relative differences: loss {worst_loss:.1e}, gradient norm {worst_norm:.1e}")
    if len(ours) != STEPS or len(theirs) != STEPS or worst_loss > LOSS_TOLERANCE or worst_norm > NORM_TOLERANCE:
        sys.exit(1)


main()
