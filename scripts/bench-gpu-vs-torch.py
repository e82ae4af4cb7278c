#!/usr/bin/env python3
"""Benchmarks one model in nrl-train and plain PyTorch, in alternation on the same device; prints tokens/s, memory, ratios.

The model is that of a configuration (configs/bench-*.yaml). PyTorch is tuned: fp32 weights and gradients with bf16
autocast and a bf16 residual stream, scaled_dot_product_attention, fused AdamW, TF32 allowed, eager and under
torch.compile. If its memory is short it gets smaller microbatches and gradient accumulation, and nrl-train is measured
with the same microbatch: ratios are of runs with equal microbatches. Speed is that of the median step; memory is the
device's by nvidia-smi (on a CPU: peak resident memory), which counts everything. --json is written after every run.
"""
import argparse
import contextlib
import ctypes
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


def version_text(number):
    """130100 is 13.1.0."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def torch_libraries():
    """Versions and files of the libraries that this process has loaded."""
    with open("/proc/self/maps") as maps:
        files = [line.split()[-1] for line in maps if "/lib" in line]

    found = {}
    for name, library, function in (("cuDNN", "libcudnn.so", "cudnnGetVersion"), ("cuBLASLt", "libcublasLt.so", "cublasLtGetVersion")):
        path = next((f for f in files if os.path.basename(f).startswith(library)), None)
        get = getattr(ctypes.CDLL(path), function, None) if path else None
        if get:
            get.restype = ctypes.c_size_t
            found[name] = f"{version_text(get())} in {path}"
    return found


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
    model.prepare(job["length"])
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
        "program": "torch " + torch.__version__, "libraries": torch_libraries(), "compile": job["compile"], "sdpa": spec.sdpa,
        "micro_batch": job["micro_batch"], "sequences": job["sequences"], "step_ms": used * 1e3, "tokens_per_s": tokens / used,
        "flops_per_s": tokens / used * spec.flops_per_token(job["length"]), "first_step_s": first, "loss_last": float(loss.detach()) * accumulate,
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


def run_ours(args, micro):
    """`bench step` with this microbatch (None: that of the configuration)."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "ours.json")
        overrides = args.overrides + ([f"policy.train_micro_batch_size={micro}"] if micro else [])
        command = [args.nrl_train, "bench", "step", args.config, *overrides, "--device", args.device, "--steps", str(args.steps),
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


def environment_of_others():
    """Without the library paths of nrl-train, which would come before PyTorch's own."""
    return {name: value for name, value in os.environ.items()
            if not name.startswith(("LD_LIBRARY_PATH", "LD_PRELOAD", "OPAL_", "OMPI_", "PMIX_", "PRTE_"))}


def run_torch(args, ours, compiled, micro):
    """One variant of PyTorch with microbatches of `micro` sequences or, if memory is short, fewer."""
    job = {key: ours[key] for key in ("model", "length", "sequences", "precision")}
    job.update(device=args.device, steps=args.steps, warmup=args.warmup, compile=compiled, threads=ours["device"].get("threads", 1))
    while True:
        job["micro_batch"] = micro
        environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **environment_of_others()}
        if args.device == "cpu":
            environment["OMP_NUM_THREADS"] = str(job["threads"])
        with DeviceMemory(args.device) as memory:
            done = subprocess.run([args.python, os.path.abspath(__file__), "--worker"], input=json.dumps(job), text=True,
                                  stdout=subprocess.PIPE, env=environment)
        if done.returncode:
            return {"skipped": f"PyTorch failed with exit code {done.returncode} (see above)"}
        result = json.loads(done.stdout.splitlines()[-1])
        if not result.get("out_of_memory"):
            result["device_bytes"] = memory.bytes()
            return result
        if micro == 1:
            return {"skipped": "out of memory with microbatches of one sequence"}
        print(f"PyTorch is out of memory with microbatches of {micro}", flush=True)
        micro = next(m for m in range(micro // 2, 0, -1) if job["sequences"] % m == 0)


def memory_of(result, device):
    """The bytes to compare."""
    if device == "cpu":
        return result["peak_resident_bytes"]
    return result["device_bytes"] or result.get("planned_bytes") or result.get("reserved_bytes")


def our_libraries(args):
    """Versions and files in the output of `nrl-train doctor`: library      cuDNN 9.19.0 in /usr/lib/libcudnn.so.9"""
    text = subprocess.run([args.nrl_train, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    lines = (line.split(maxsplit=2) for line in text.splitlines() if line.startswith("library "))
    return {name: rest for _, name, rest in lines if rest[0].isdigit()}


class Comparison:
    def __init__(self, args):
        self.args = args
        self.variants = ([] if args.no_compile else ["compiled"]) + ([] if args.no_eager else ["eager"])
        self.libraries = {"nrl-train": our_libraries(args)}
        self.micro = {}   # the microbatch that each variant of PyTorch ended with
        self.rounds = []  # {"ours": {microbatch: result}, "torch": {variant: result}}

    def ours(self, micro):
        """Our result in this round with this microbatch; measured when first asked for."""
        done = self.rounds[-1]["ours"]
        if micro not in done:
            result = run_ours(self.args, micro)
            micro = result["micro_batch"]
            done[micro] = result
            self.args.micro_batch = self.args.micro_batch or micro
            self.show("nrl-train", result)
            self.write()
        return done[micro]

    def round(self):
        self.rounds.append({"ours": {}, "torch": {}})
        for variant in self.variants:
            ours = self.ours(self.micro.get(variant, self.args.micro_batch))
            result = run_torch(self.args, ours, variant == "compiled", ours["micro_batch"])
            self.rounds[-1]["torch"][variant] = result
            self.show(variant, result)
            if "skipped" not in result:
                self.libraries["PyTorch"] = {"torch": result["program"].split()[-1], **result.get("libraries", {})}
                self.micro[variant] = result["micro_batch"]
            self.write()
            if "skipped" not in result:
                self.ours(result["micro_batch"])  # again, if PyTorch needed a smaller microbatch
        self.write()

    def show(self, name, r):
        head = f"round {len(self.rounds)}  {name:<10} "
        if "skipped" in r:
            print(head + r["skipped"], flush=True)
            return
        print(f"{head}{r['tokens_per_s']:>10,.0f} tokens/s  {r['step_ms']:>9.1f} ms  {memory_of(r, self.args.device) / 2**20:>9,.0f} MiB  "
              f"first step after {r['first_step_s']:.1f} s  micro {r['micro_batch']} x {r['sequences'] // r['micro_batch']}", flush=True)

    def ratios(self):
        found = {}
        for variant in self.variants:
            pairs = []
            for r in self.rounds:
                theirs = r["torch"].get(variant, {"skipped": "not run"})
                if "skipped" not in theirs and theirs["micro_batch"] in r["ours"]:
                    pairs.append((r["ours"][theirs["micro_batch"]], theirs))
            if pairs:
                found["speed_ratio_" + variant] = median([o["tokens_per_s"] / t["tokens_per_s"] for o, t in pairs])
                found["memory_ratio_" + variant] = median([memory_of(o, self.args.device) / memory_of(t, self.args.device) for o, t in pairs])
                found["micro_batch_" + variant] = pairs[-1][1]["micro_batch"]
        return found

    def write(self):
        if not self.args.json:
            return
        rounds = [[*r["ours"].values(), *({"variant": v, **t} for v, t in r["torch"].items())] for r in self.rounds]
        with open(self.args.json + ".part", "w") as f:
            json.dump({**self.ratios(), "config": self.args.config, "overrides": self.args.overrides, "libraries": self.libraries,
                       "rounds": rounds}, f)
            f.write("\n")
        os.replace(self.args.json + ".part", self.args.json)

    def summary(self):
        found = self.ratios()
        for program, versions in self.libraries.items():
            print(f"libraries of {program}: " + (", ".join(f"{name} {version}" for name, version in versions.items()) or "none"))
        return "; ".join(f"relative to PyTorch {v}, microbatch {found['micro_batch_' + v]}: speed x {found['speed_ratio_' + v]:.2f}, "
                         f"memory x {found['memory_ratio_' + v]:.2f}" for v in self.variants if "speed_ratio_" + v in found) or \
            "PyTorch did not run: no comparison"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="e.g. configs/bench-8b-layers.yaml")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--nrl-train", default="build/cuda/bin/nrl-train", help="the program to measure")
    parser.add_argument("--python", default=sys.executable, help="the Python that has PyTorch (default: this one)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--micro-batch", type=int, help="of both programs (default: that of the configuration)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per round")
    parser.add_argument("--warmup", type=int, default=3, help="warm-up steps of PyTorch")
    parser.add_argument("--rounds", type=int, default=1, help="rounds; ratios are medians over them")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--no-eager", action="store_true", help="torch.compile only")
    only.add_argument("--no-compile", action="store_true", help="eager PyTorch only")
    parser.add_argument("--json", help="file to write, after every run")
    args = parser.parse_intermixed_args()
    comparison = Comparison(args)
    for _ in range(args.rounds):
        comparison.round()
    print(comparison.summary())


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        print(json.dumps(train(json.load(sys.stdin))))
    else:
        main()
