#!/usr/bin/env python3
"""A plain PyTorch training loop on the CPU: the peers of scripts/bench-cpu.sh. Prints one JSON line.

Random tokens, the same batch every step; fp32 weights, AdamW (fused where the CPU has it), clip 1.0; attention by
F.scaled_dot_product_attention if this PyTorch has it (torch 2). In bfloat16 the forward pass runs under autocast.
"""
import argparse
import json
import resource
import time

MODELS = {
    "gpt2-124m": {"model_type": "gpt2", "vocab_size": 50304, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
                  "tie_word_embeddings": True},
    "llama-17m": {"model_type": "llama", "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024,
                  "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 512,
                  "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", choices=sorted(MODELS), default="gpt2-124m")
parser.add_argument("--seq", type=int, default=256, help="tokens of a sequence")
parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
parser.add_argument("--steps", type=int, default=5, help="steps to time")
parser.add_argument("--warmup", type=int, default=2, help="steps before them")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
parser.add_argument("--compile", action="store_true", help="torch.compile; needs torch 2 and g++")
args = parser.parse_args()

import torch  # noqa: E402  (after --help)

import torch_models  # noqa: E402

torch.set_num_threads(args.threads)
torch.manual_seed(1)
spec = torch_models.Spec(MODELS[args.model])
spec.sdpa = hasattr(torch.nn.functional, "scaled_dot_product_attention")
model = torch_models.Decoder(spec)
model.prepare(args.seq)  # not in the compiled function
# A CPU has the fused update since torch 2.4.
fused = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 4)
optimizer = model.optimizer(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=fused)
loss_of = torch.compile(model.loss) if args.compile else model.loss
data = torch.randint(0, spec.vocab, (args.batch, args.seq + 1))
tokens, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()

seconds, losses = [], []
for _ in range(args.warmup + args.steps):
    begin = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.precision == "bfloat16"):
        loss = loss_of(tokens, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(float(loss.detach()))
    seconds.append(time.perf_counter() - begin)
seconds = sorted(seconds[args.warmup:])
median = seconds[len(seconds) // 2]
print(json.dumps({
    "program": "torch " + torch.__version__, "model": args.model, "seq": args.seq, "batch": args.batch, "threads": args.threads,
    "precision": args.precision, "sdpa": spec.sdpa, "compile": args.compile,
    "step_ms": round(median * 1e3, 2), "step_ms_best": round(seconds[0] * 1e3, 2),
    "tokens_per_s": round(args.batch * args.seq / median, 2),
    "gflops": round(spec.flops_per_token(args.seq) * args.batch * args.seq / median / 1e9, 2),
    "peak_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    "loss_first": losses[0], "loss_last": losses[-1]}))
