"""Generation with transformers on the CPU, for bench-generate.sh: a Llama of the given shape with random weights.

Prints one JSON line {"precision", "batch", "prefill_tokens_per_s", "decode_tokens_per_s"} for each batch. Decoding is
the difference between generating all tokens and generating one.
"""

import argparse
import json
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--precision", choices=["float32", "bfloat16"], required=True)
parser.add_argument("--batch", type=int, nargs="+", required=True)
parser.add_argument("--prompt-tokens", type=int, required=True)
parser.add_argument("--new-tokens", type=int, required=True)
parser.add_argument("--threads", type=int, required=True)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--model", required=True, help="JSON of config.json's members")
args = parser.parse_args()

try:
    import torch
    import transformers
except ImportError as error:
    print(f"transformers and torch are missing: {error}", file=sys.stderr)
    sys.exit(77)

torch.set_num_threads(args.threads)
torch.manual_seed(0)
config = transformers.LlamaConfig(**json.loads(args.model))
model = transformers.LlamaForCausalLM(config).to(getattr(torch, args.precision)).eval()
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0


def seconds(ids, new_tokens):
    begin = time.perf_counter()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                         max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    assert out.shape[1] == ids.shape[1] + new_tokens, out.shape
    return time.perf_counter() - begin


with torch.inference_mode():
    for batch in args.batch:
        ids = torch.randint(0, config.vocab_size, (batch, args.prompt_tokens))
        seconds(ids, 2)  # warm-up
        first = min(seconds(ids, 1) for _ in range(args.rounds))
        decode = min(seconds(ids, args.new_tokens) for _ in range(args.rounds)) - first
        print(json.dumps({
            "precision": args.precision,
            "batch": batch,
            "prefill_tokens_per_s": batch * args.prompt_tokens / first,
            "decode_tokens_per_s": batch * (args.new_tokens - 1) / decode,
            "program": f"transformers {transformers.__version__}, torch {torch.__version__}",
        }), flush=True)
