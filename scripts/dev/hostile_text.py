"""Documents on which tokenizers tend to differ: all scripts, marks, emoji sequences, controls, runs."""

import random

SEEDS = [
    "", " ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u180e", "\u200b", "\u2028", "\u0085", "\ufeff", "\0",
    " leading", "trailing ", "  two  spaces  ", "\n\n\n  x", "a\n \n b", "x \t y\u00a0z", "   \n   \n", "a" * 200,
    " " * 77, "\u2581", "\u2581\u2581a \u2581 b\u2581", "ab" * 100, "aab" * 60, "ha" * 33 + "h", "\n" * 50, ".,;" * 30,
    "1", "12", "123", "1234567890" * 12, "3.14159", "0x7f", "1,000,000.00", "\u0661\u0662\u0663", "\u00bd\u00b2\u2460",
    "I'll you've THEY'RE don'T it's 'sound 'Tis \u2019s x'\u017f", "</s>", "<s>a</s>", "<unk>", "<0x41>", "<0x0A>\n",
    "<|endoftext|>", "e\u0301 \u00e9 a\u0323\u0307 a\u0307\u0323 \u212b \uac01 \u1100\u1161\u11a8",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd \u2764\ufe0f",
    "\u0915\u094d\u0937\u093f \u0e01\u0e33 \u0b95\u0bca \u1019\u103c\u1014\u103a\u1019\u102c \u05e9\u05b8\u05dc\u05d5\u05b9\u05dd",
    "\u4e2d\u6587\uff0c\u5168\u89d2\uff01\uff21\uff22\u3000\u304b\u306a\u30ab\u30ca \ud55c\uad6d\uc5b4",
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i];  // total\n}\n", "http://a.b/c?d=e&f=%20#g", "caf\u00e9 na\u00efve \ufb01 \u2460 \uff28",
    "\u0130stanbul \u01c5 \u1e9e \u00df \ufb05 \u1f80", "\x00\x01\x02\x1b[31m\x7f\x9f", "a\u0300\u0301\u0302\u0303\u0304\u0305", "\u0300\u0301",
    "\U0010ffff\ufffd\ufffe\ue000", "\u202eabc\u202c", "tab\tspace \n\r\n\r mixed \x0b\x0c end",
]

# Assigned in Unicode 15.0, 15.1 and 16.0.
NEW = (
    [0x897, 0xCF3, 0xECE, 0x1C89, 0x1C8A, 0x2FFC, 0x2FFF, 0x31E4, 0x31E5, 0x31EF, 0xA7CB, 0xA7CC, 0xA7CD, 0xA7DA, 0xA7DC]
    + [0x105C0, 0x105C9, 0x105D2, 0x105E4, 0x10D40, 0x10D4A, 0x10D50, 0x10D69, 0x10D70, 0x10EC2, 0x10EFC, 0x10EFD]
    + [0x1123F, 0x11240, 0x11241, 0x11380, 0x11383, 0x1138E, 0x113B8, 0x113C5, 0x113CE, 0x113E1, 0x116D0, 0x11B00]
    + [0x11BC0, 0x11BF0, 0x11F00, 0x11F02, 0x11F41, 0x11F50, 0x11F5A, 0x1342F, 0x13439, 0x13460, 0x143FA, 0x16100]
    + [0x1611E, 0x16130, 0x16D40, 0x16D67, 0x16D68, 0x16D69, 0x16D6A, 0x16D70, 0x1B132, 0x1B155, 0x1CC00, 0x1CCD6]
    + [0x1CCF0, 0x1CD00, 0x1D2C0, 0x1DF25, 0x1E030, 0x1E08F, 0x1E4D0, 0x1E4EB, 0x1E4EC, 0x1E4F0, 0x1E5D0, 0x1E5EE]
    + [0x1E5F1, 0x1F6DC, 0x1F774, 0x1F77B, 0x1F7D9, 0x1F8B2, 0x1FA75, 0x1FA87, 0x1FAE9, 0x1FBCB, 0x2B739, 0x2EBF0]
    + [0x2EE5D, 0x31350, 0x323AF]
)


def character(rng):
    """One character; every plane with assigned characters, the basic plane most often."""
    kind = rng.random()
    if kind < 0.25:
        return chr(rng.randrange(0x20, 0x7F))
    if kind < 0.40:
        return rng.choice(" \n\t'.,0123456789\r-_\u00a0\u2581")
    if kind < 0.45:
        return chr(rng.choice(NEW))
    if kind < 0.50:
        return chr(rng.choice([rng.randrange(0x300, 0x370), rng.randrange(0x591, 0x5C8), 0x200D, 0xFE0F, 0x94D, 0xE31]))
    if kind < 0.55:
        return chr(rng.choice([rng.randrange(0x1F300, 0x1FB00), rng.randrange(0x1F1E6, 0x1F200), 0x20E3]))
    ranges = [(0xA0, 0x250), (0x370, 0x1100), (0x1100, 0x2000), (0x2000, 0x2C00), (0x2C00, 0x3400), (0x3400, 0xA000),
              (0xA000, 0xD800), (0xE000, 0x10000), (0x10000, 0x17000), (0x17000, 0x20000), (0x20000, 0x32400), (0xE0000, 0xE0200)]
    low, high = rng.choice(ranges)
    return chr(rng.randrange(low, high))


def document(rng):
    kind = rng.random()
    if kind < 0.2:  # characters of one block
        base = rng.choice([rng.randrange(0xA0, 0xD700, 0x40), rng.randrange(0x10000, 0x1FC00, 0x40)])
        return "".join(chr(base + rng.randrange(0x60)) if rng.random() < 0.85 else character(rng) for _ in range(rng.randrange(60)))
    if kind < 0.3:  # runs over few letters, where ties and overlaps matter
        letters = rng.choice(["ab", "a ", "ab ", "0 1", " \n", "\u00e9e\u0301", "aA' "])
        return "".join(rng.choice(letters) for _ in range(rng.randrange(200)))
    if kind < 0.5:  # seeds stuck together
        return rng.choice(["", " ", "\n"]).join(rng.choice(SEEDS) for _ in range(rng.randrange(1, 8)))
    return "".join(character(rng) for _ in range(rng.randrange(80)))


def documents(count, seed=1):
    rng = random.Random(seed)
    docs = list(SEEDS) + ["a" + chr(c) + " " + chr(c) + "1" for c in NEW]
    while len(docs) < count:
        docs.append(document(rng))
    # Surrogates are not text.
    return ["".join(c for c in d if not 0xD800 <= ord(c) < 0xE000) for d in docs[:count]]
