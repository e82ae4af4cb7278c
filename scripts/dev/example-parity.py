#!/usr/bin/env python3
"""Compares the examples of `nrl-train data show` with apply_chat_template() of transformers, ids and masks, and the
processor time of both on one core.

    example-parity.py NRL_TRAIN TOKENIZER_DIRECTORY CHATS.jsonl [--records 1000]

The tokenizer's chat template needs {% generation %} blocks, for the masks of transformers. Needs transformers."""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core
os.environ["RAYON_NUM_THREADS"] = "1"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nrl_train")
    parser.add_argument("tokenizer")
    parser.add_argument("chats")
    parser.add_argument("--records", type=int, default=1000, help="records to compare (default 1000)")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    show = [args.nrl_train, "data", "show", args.chats, "--format", "messages", "--tokenizer", args.tokenizer]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(show + ["--n", "0", "--workers", "1"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = subprocess.run(show + ["--n", str(args.records), "--json"], check=True, capture_output=True,
                           text=True).stdout.splitlines()
    records = json.loads(lines[0])["records"]
    with open(args.chats, encoding="utf-8") as file:
        chats = [json.loads(line) for line in file if line.strip()]

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    different = 0
    theirs = 0.0
    for line in lines[1:]:
        example = json.loads(line)
        chat = chats[example["record"]]
        begin = time.process_time()
        wanted = tokenizer.apply_chat_template(chat["messages"], tools=chat.get("tools"), tokenize=True,
                                               return_dict=True, return_assistant_tokens_mask=True)
        theirs += time.process_time() - begin
        sequence = example["sequences"][0]
        if sequence["tokens"] != wanted["input_ids"] or sequence["loss"] != wanted["assistant_masks"]:
            different += 1
            if different <= 10:
                print(f"{example['where']}: {len(sequence['tokens'])} tokens, {sum(sequence['loss'])} with loss; "
                      f"transformers: {len(wanted['input_ids'])}, {sum(wanted['assistant_masks'])}")
    compared = len(lines) - 1
    print(f"{compared} examples, {different} differ")
    print(f"nrl-train: {records / seconds:.0f} records/s of processor time, with its start and the cache; "
          f"transformers: {compared / theirs:.0f} records/s, without reading")
    return 1 if different or compared == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
