#!/usr/bin/env python3
"""Benchmarks one model in nrl-train and plain PyTorch, in alternation on the same device; prints tokens/s, memory, ratios.

The model is that of a configuration (configs/bench-*.yaml). PyTorch is tuned: fp32 weights and gradients with bf16
autocast and a bf16 residual stream, scaled_dot_product_attention, fused AdamW, TF32 allowed, eager and under
torch.compile; if memory is short, with smaller microbatches and gradient accumulation. Speed is that of the median step;
memory is the device's by nvidia-smi (on a CPU: peak resident memory), which counts everything.
"""
import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "bench"))


def median(values):
    values = sorted(values)
    n = len(values)
    return values[n // 2] if n % 2 else (values[n // 2 - 1] + values[n // 2]) / 2


# --- one variant of PyTorch, in its own process


def train(job):
    """Runs job["steps"] steps after job["warmup"]; returns the measurements."""
    begin = time.time()
    import torch
    import torch_models

    cuda = job["device"] == "cuda"
    torch.manual_seed(1)
    if not cuda:
        torch.set_num_threads(job["threads"])
    torch.backends.cuda.matmul.allow_tf32 = True
    spec = torch_models.Spec(job["model"])
    bf16 = job["precision"] == "bfloat16"
    spec.sdpa = hasattr(torch.nn.functional, "scaled_dot_product_attention") and not spec.window
    spec.residual = torch.bfloat16 if bf16 else None
    if job["compile"] and not hasattr(torch, "compile"):
        return {"skipped": f"torch {torch.__version__} has no torch.compile"}
    with torch.device("cuda") if cuda else contextlib.nullcontext():
        model = torch_models.Decoder(spec)
    model.tables(job["length"])
    optimizer = model.optimizer(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=cuda)
    loss_of = torch.compile(model.loss) if job["compile"] else model.loss
    accumulate = job["sequences"] // job["micro_batch"]
    data = torch.randint(0, spec.vocab, (accumulate, job["micro_batch"], job["length"] + 1), device=job["device"])

    def step():
        optimizer.zero_grad(set_to_none=True)
        for part in data:
            with torch.autocast(job["device"], dtype=torch.bfloat16, enabled=bf16):
                loss = loss_of(part[:, :-1], part[:, 1:]) / accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    wait = torch.cuda.synchronize if cuda else lambda: None
    seconds, first = [], None
    try:
        for _ in range(job["warmup"] + job["steps"]):
            wait()
            start = time.perf_counter()
            loss = step()
            wait()
            seconds.append(time.perf_counter() - start)
            first = first or time.time() - begin
    except RuntimeError as error:  # torch.cuda.OutOfMemoryError is one
        if "out of memory" not in str(error) and "ALLOC_FAILED" not in str(error):
            raise
        return {"out_of_memory": True}
    used = median(seconds[job["warmup"]:])
    tokens = job["sequences"] * job["length"]
    return {
        "program": "torch " + torch.__version__, "compile": job["compile"], "sdpa": spec.sdpa,
        "micro_batch": job["micro_batch"], "accumulate": accumulate, "step_ms": used * 1e3, "tokens_per_s": tokens / used,
        "flops_per_s": tokens / used * spec.flops_per_token(job["length"]), "first_step_s": first, "loss_last": float(loss) * accumulate,
        "allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


# --- the rounds


class DeviceMemory:
    """Peak increase of the device's memory in use while a program runs."""

    def __init__(self, device):
        self.on, self.base, self.peak = device == "cuda", None, None

    @staticmethod
    def used():
        try:
            text = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"],
                                  capture_output=True, text=True, timeout=10, check=True).stdout
            return int(text.split()[0]) << 20
        except (OSError, ValueError, IndexError, subprocess.SubprocessError):
            return None

    def watch(self):
        while not self.stop.wait(0.2):
            now = self.used()
            if now is not None:
                self.peak = max(self.peak, now)

    def __enter__(self):
        self.base = self.peak = self.used() if self.on else None
        if self.base is not None:
            self.stop = threading.Event()
            self.thread = threading.Thread(target=self.watch)
            self.thread.start()
        return self

    def __exit__(self, *_):
        if self.base is not None:
            self.stop.set()
            self.thread.join()

    def bytes(self):
        return None if self.base is None else self.peak - self.base


def run_ours(args, directory):
    path = os.path.join(directory, "ours.json")
    command = [args.nrl_train, "bench", "step", args.config, *args.overrides, "--device", args.device, "--steps", str(args.steps),
               "--json", path]
    with DeviceMemory(args.device) as memory:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout)
        sys.exit(f"error: {' '.join(command)} failed with exit code {done.returncode}")
    with open(path) as f:
        result = json.load(f)
    del result["rows"]
    result["device_bytes"] = memory.bytes()
    return result


def run_torch(args, ours, compiled):
    job = {key: ours[key] for key in ("model", "length", "sequences", "precision")}
    job.update(device=args.device, steps=args.steps, warmup=args.warmup, compile=compiled, threads=ours["device"].get("threads", 1))
    micro = ours["micro_batch"]
    while True:
        job["micro_batch"] = micro
        environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
        if args.device == "cpu":
            environment["OMP_NUM_THREADS"] = str(job["threads"])
        with DeviceMemory(args.device) as memory:
            done = subprocess.run([sys.executable, os.path.abspath(__file__), "--worker"], input=json.dumps(job), text=True,
                                  stdout=subprocess.PIPE, env=environment)
        if done.returncode:
            return {"skipped": f"PyTorch failed with exit code {done.returncode} (see above)"}
        result = json.loads(done.stdout.splitlines()[-1])
        if not result.get("out_of_memory"):
            result["device_bytes"] = memory.bytes()
            return result
        if micro == 1:
            return {"skipped": "out of memory with microbatches of one sequence"}
        micro = next(m for m in range(micro // 2, 0, -1) if job["sequences"] % m == 0)


def memory_of(result, device):
    """The bytes to compare."""
    if device == "cpu":
        return result["peak_resident_bytes"]
    return result["device_bytes"] or result.get("planned_bytes") or result.get("reserved_bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="e.g. configs/bench-8b-layers.yaml")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--nrl-train", default="build/cuda/bin/nrl-train", help="the program to measure")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per round")
    parser.add_argument("--warmup", type=int, default=3, help="warm-up steps of PyTorch")
    parser.add_argument("--rounds", type=int, default=1, help="rounds; ratios are medians over them")
    parser.add_argument("--no-eager", action="store_true", help="torch.compile only")
    parser.add_argument("--json", help="file to write")
    args = parser.parse_intermixed_args()
    rounds = []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(args.rounds):
            results = {"nrl-train": run_ours(args, directory)}
            results["compiled"] = run_torch(args, results["nrl-train"], True)
            if not args.no_eager:
                results["eager"] = run_torch(args, results["nrl-train"], False)
            rounds.append(results)
            for name, r in results.items():
                if "skipped" in r:
                    print(f"round {number + 1}  {name:<10} {r['skipped']}")
                    continue
                extra = f"  micro {r['micro_batch']} x {r['accumulate']}" if "accumulate" in r else ""
                print(f"round {number + 1}  {name:<10} {r['tokens_per_s']:>10,.0f} tokens/s  {r['step_ms']:>9.1f} ms  "
                      f"{memory_of(r, args.device) / 2**20:>9,.0f} MiB  first step after {r['first_step_s']:.1f} s{extra}", flush=True)
    ratios, words = {}, []
    for name in ("compiled", "eager"):
        pairs = [(t["nrl-train"], t[name]) for t in rounds if name in t and "skipped" not in t[name]]
        if not pairs:
            continue
        ratios["speed_ratio_" + name] = median([o["tokens_per_s"] / p["tokens_per_s"] for o, p in pairs])
        ratios["memory_ratio_" + name] = median([memory_of(o, args.device) / memory_of(p, args.device) for o, p in pairs])
        words.append(f"relative to PyTorch {name}: speed x {ratios['speed_ratio_' + name]:.2f}, memory x {ratios['memory_ratio_' + name]:.2f}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump({**ratios, "config": args.config, "overrides": args.overrides, "rounds": rounds}, f)
            f.write("\n")
    print("; ".join(words) or "PyTorch did not run: no comparison")


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        print(json.dumps(train(json.load(sys.stdin))))
    else:
        main()
