#!/usr/bin/env python3
"""Compares the token ids of `nrl-train prepare` with those of the Python packages, document by document.

With --checkpoint DIR: with transformers.AutoTokenizer of that model directory. Without: with tokenizers, for
the normalizers and pre-tokenizers of published models; each gets a byte-level BPE trained on the documents.
Needs `pip install tokenizers` or `transformers sentencepiece`. Exits with 1 where an id differs.
"""

import argparse
import array
import json
import os
import struct
import subprocess
import sys
import tempfile

import hostile_text

CJK = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"
PUNCTUATION = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~]"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# name: (normalizer, patterns of Split steps or other steps, in order)
FAMILIES = {
    "gpt2": (None, ["gpt2"]),
    "llama3": (None, [LLAMA3]),
    "qwen2": ("nfc", [LLAMA3.replace("{1,3}", "")]),
    "qwen3.5": ("nfc", [LLAMA3.replace("{1,3}", "").replace(r"\p{L}", r"\p{L}\p{M}").replace(r"?\p{L}\p{M}+", r"?[\p{L}\p{M}]+")]),
    "deepseek-v3": (
        None,
        [r"\p{N}{1,3}", f"[{CJK}]+",
         PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    ),
    "deepseek-coder": (
        None,
        [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", "digits"],
    ),
    "deepseek-llm": (
        None,
        [r"[\r\n]", "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u0400-\u052f\U0001e900-\U0001e943]+",
         "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", f"[{CJK}\uac00-\ud7ff]+", "digits"],
    ),
    "gpt-4o": (
        None,
        [f"[^\\r\\n\\p{{L}}\\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\\r\\n\\p{{L}}\\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
         + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    ),
    "words": ("nfc", [r"\w+|[^\w\s]+", r"\b\d\B", r"\h", r"\p{Han}+"]),
}


def sequences(prefix):
    """The documents of a token file."""
    with open(prefix + ".idx", "rb") as file:
        index = file.read()
    assert index[:9] == b"MMIDIDX\0\0", "not an index file"
    code = index[17]
    count = struct.unpack("<Q", index[18:26])[0]
    sizes = struct.unpack(f"<{count}i", index[34 : 34 + 4 * count])
    tokens = array.array({8: "H", 4: "i"}[code])
    with open(prefix + ".bin", "rb") as file:
        tokens.frombytes(file.read())
    result, at = [], 0
    for size in sizes:
        result.append(tokens[at : at + size].tolist())
        at += size
    return result


def prepared(nrl_train, tokenizer, documents, directory):
    """Ids of `nrl-train prepare`, documents without tokens left out, and what it printed."""
    path = os.path.join(directory, "documents.jsonl")
    with open(path, "w") as file:
        for text in documents:
            file.write(json.dumps({"text": text}) + "\n")
    prefix = os.path.join(directory, "out")
    run = subprocess.run(
        [nrl_train, "prepare", "--input", path, "--tokenizer", tokenizer, "--output", prefix, "--no-append-eod"],
        capture_output=True, text=True, check=False,
    )
    if run.returncode:
        sys.exit(f"nrl-train prepare failed: {run.stderr}")
    return sequences(prefix), run.stdout


def compare(name, documents, expected, got):
    """The number of documents that differ; prints the first of them."""
    pairs = [(text, ids) for text, ids in zip(documents, expected) if ids]
    if len(pairs) != len(got):
        print(f"{name}: {len(got)} documents have tokens instead of {len(pairs)}")
        return max(1, abs(len(got) - len(pairs)))
    differing = [(text, want, ids) for (text, want), ids in zip(pairs, got) if want != ids]
    print(f"{name}: {len(documents)} documents, {sum(map(len, expected))} tokens, {len(differing)} differ")
    for text, want, ids in differing[:3]:
        at = next((i for i, (a, b) in enumerate(zip(want, ids)) if a != b), min(len(want), len(ids)))
        print(f"   {text[:120]!a}\n   at token {at}: expected {want[at:at + 8]}, got {ids[at:at + 8]}")
    return len(differing)


def family_tokenizer(name, documents, alphabet):
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    normalizer, steps = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    if normalizer == "nfc":
        tokenizer.normalizer = normalizers.NFC()
    parts = []
    for step in steps:
        if step == "digits":
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        elif step != "gpt2":
            parts.append(pre_tokenizers.Split(Regex(step), "isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=steps == ["gpt2"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    initial = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    # Without the alphabet most bytes have no token.
    texts = documents if alphabet else ["plain text"]
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=initial, show_progress=False, min_frequency=2)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def compare_families(nrl_train, documents):
    import tokenizers

    print(f"tokenizers {tokenizers.__version__}")
    differing = 0
    with tempfile.TemporaryDirectory() as directory:
        for name in FAMILIES:
            for alphabet in (True, False):
                tokenizer = family_tokenizer(name, documents, alphabet)
                path = os.path.join(directory, "tokenizer.json")
                tokenizer.save(path)
                expected = [encoding.ids for encoding in tokenizer.encode_batch(documents)]
                got, printed = prepared(nrl_train, "hf:" + path, documents, directory)
                label = name if alphabet else name + ", bytes without tokens"
                differing += compare(label, documents, expected, got)
                if alphabet == ("have no token" in printed or "no token for them" in printed):
                    print(f"{label}: bytes left out are {'' if alphabet else 'not '}reported")
                    differing += 1
    return differing


def compare_checkpoint(nrl_train, checkpoint, documents):
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    print(f"transformers {transformers.__version__}, {type(tokenizer).__name__}")
    # Text that spells a special token is that token for transformers.
    documents = [text for text in documents if not any(token in text for token in tokenizer.all_special_tokens)]
    expected = [tokenizer(text)["input_ids"] for text in documents]
    with tempfile.TemporaryDirectory() as directory:
        got, _ = prepared(nrl_train, checkpoint, documents, directory)
    return compare(checkpoint, documents, expected, got)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nrl-train", required=True, help="the binary")
    parser.add_argument("--checkpoint", help="a model directory")
    parser.add_argument("--documents", type=int, default=3000)
    options = parser.parse_args()
    documents = hostile_text.documents(options.documents)
    if options.checkpoint:
        differing = compare_checkpoint(options.nrl_train, options.checkpoint, documents)
    else:
        differing = compare_families(options.nrl_train, documents)
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
