#!/usr/bin/env python3
"""Writes tests/data/fixtures/token_spans.json: the offsets that Hugging Face's tokenizers give to tokens.

    scripts/dev/token-spans.py            # rewrites the file
    scripts/dev/token-spans.py --check    # compares it

Each case is a tokenizer.json of the fixtures with some members replaced. Offsets count characters. Needs
`pip install tokenizers`.
"""

import argparse
import json
import os
import sys
import tempfile

FIXTURES = os.path.join(os.path.dirname(__file__), "..", "..", "tests", "data", "fixtures")
MARK = "\u2581"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
MARK_SPACES = [
    {"type": "Prepend", "prepend": MARK},
    {"type": "Replace", "pattern": {"String": " "}, "content": MARK},
]


def metaspace(scheme, split):
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": split}


def added(content, **flags):
    token = {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {**token, "special": True, **flags}


STRIPPING = [
    added("<|endoftext|>", id=0),
    added("<tool>", id=340, lstrip=True, rstrip=True, special=False),
    added("\u00e9\u00e9", id=341, normalized=True, special=False),
]
# name: file, members replaced
CASES = {
    "byte-level": ("gpt2.json", {}),
    "byte-level with a prefix space": ("gpt2.json", {"pre_tokenizer": BYTE_LEVEL}),
    "byte-level, trimmed": ("gpt2.json", {"post_processor": {**BYTE_LEVEL, "add_prefix_space": False}}),
    "ignored merges": ("llama3.json", {}),
    "NFC": ("qwen2.json", {}),
    "NFC, stripping and normalized added tokens": ("qwen2.json", {"added_tokens": STRIPPING}),
    "byte fallback": ("llama2.json", {}),
    "NFC and byte fallback": (
        "llama2.json",
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, *MARK_SPACES]}},
    ),
    "metaspace": ("llama2.json", {"normalizer": None, "pre_tokenizer": metaspace("first", True)}),
    "metaspace everywhere": ("llama2.json", {"normalizer": None, "pre_tokenizer": metaspace("always", False)}),
    "fused unknown tokens": ("llama2.json", {"model": {"byte_fallback": False}}),
    "unknown tokens": ("llama2.json", {"model": {"byte_fallback": False, "fuse_unk": False}}),
}
DOCUMENTS = [
    "int main(void) { return 12345; }\n\n  x",
    "they're the other DOG'S, don't",
    "  two  spaces  the  ",
    "\n\n the\t\r\n",
    "caf\u00e9 na\u00efve \u4e2d\u6587\uff0c the",
    "the \U0001f600\U0001f600 end \U0001f468\u200d\U0001f469",
    "l'e\u0301te\u0301 a\u0323\u0307 a\u0307\u0323 \u212b",
    "\u1100\u1161\u11a8 \u0958 \u0344\u0344",
    "a<tool>sb <|endoftext|>the <tool> \n end</s> the",
    "<s>the</s>\n<s> the",
    "e\u0301e\u0301 <tool>\u00e9\u00e9e\u0301 x",
    "\u2581the\u2581 \u2581",
    "\u00a0\u3000the\u00a0",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\u4e2d\u4e2d",
    "<0x41>\u0915\u094d\u0937",
    "\u0301the",
    " ",
    "",
]


def spans():
    import tokenizers

    cases = []
    for name, (file, replaced) in CASES.items():
        with open(os.path.join(FIXTURES, file), encoding="utf-8") as source:
            fixture = json.load(source)
        for key, value in replaced.items():
            fixture[key] = {**fixture[key], **value} if key == "model" else value
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "tokenizer.json")
            with open(path, "w", encoding="utf-8") as out:
                json.dump(fixture, out)
            tokenizer = tokenizers.Tokenizer.from_file(path)
        offsets = [[n for span in tokenizer.encode(text).offsets for n in span] for text in DOCUMENTS]
        cases.append({"name": name, "file": file, "replaced": replaced, "offsets": offsets})
    return {"documents": DOCUMENTS, "cases": cases}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    path = os.path.join(FIXTURES, "token_spans.json")
    made = spans()
    if options.check:
        with open(path, encoding="utf-8") as file:
            same = json.load(file) == made
        print("the same" if same else "different")
        sys.exit(0 if same else 1)
    cases = ",\n".join(json.dumps(case, separators=(",", ":")) for case in made["cases"])
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"documents":' + json.dumps(DOCUMENTS) + ',\n"cases":[' + cases + "]}\n")


if __name__ == "__main__":
    main()
