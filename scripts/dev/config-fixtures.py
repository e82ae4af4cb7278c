#!/usr/bin/env python3
"""Writes tests/model/fixtures: config.json files with the logits that transformers computes from them.

tests/model/config_fixtures_test.cpp reads each config.json, fills the weights with weight() below, and compares. Needs
`pip install torch numpy transformers`. Run it once with transformers 4 and once with transformers 5:

    scripts/dev/config-fixtures.py            # adds what this version writes; compares what the other one has written
    scripts/dev/config-fixtures.py --check    # only compares
    scripts/dev/config-fixtures.py --check --written build/cpu/bin/nrl-train    # also the config.json of checkpoints

A case is a config.json as model authors publish it, or, where `save` is set, what save_pretrained() makes of it: each
major version of transformers writes other keys. Exits with 1 where logits differ from those of a file that is there.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy
import safetensors.torch
import torch
import transformers

TOKENS = [3, 17, 8, 26, 0, 11, 5, 22, 14, 9, 1, 28, 19, 6, 24, 13]
POSITIONS = [0, 6, 15]  # logits of these are kept

GPT2 = {"model_type": "gpt2", "vocab_size": 29, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 20}
SIZES = {"vocab_size": 29, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
# Two layers with a window, one without, and again. The width is no square, so that the scale of embeddings is rounded.
GEMMA3 = {"num_hidden_layers": 7, "head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 3}
TEXT_PART = "language_model."


def of(family, *without, **keys):
    config = {"model_type": family, **SIZES, **keys}
    return {key: value for key, value in config.items() if key not in without}


# As published: what is left out has the value that the family's class has for it.
PUBLISHED = {
    "gpt2": {**GPT2, "n_ctx": 20},
    "gpt2-untied": {**GPT2, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3, "n_inner": 40},
    "gpt2-gelu": {**GPT2, "activation_function": "gelu", "n_inner": None, "layer_norm_epsilon": 1e-6},
    "gpt2-silu": {**GPT2, "activation_function": "silu"},
    "gpt2-gelu-fast": {**GPT2, "activation_function": "gelu_fast"},
    "gpt2-other-names": {"model_type": "gpt2", "vocab_size": 29, "hidden_size": 24, "num_hidden_layers": 1,
                         "num_attention_heads": 3, "max_position_embeddings": 20},
    "llama": of("llama"),
    "llama-all-heads": of("llama", "num_key_value_heads", rope_theta=500.0, rms_norm_eps=1e-5),
    "llama-one-head": of("llama", num_key_value_heads=1, head_dim=10, hidden_act="gelu"),
    "llama-null-heads": of("llama", num_key_value_heads=None, head_dim=None, rope_scaling=None, hidden_act="gelu_new"),
    "llama-biases": of("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, sliding_window=3),
    "llama-attention-bias": of("llama", attention_bias=True, hidden_act="gelu_pytorch_tanh"),
    "llama-mlp-bias": of("llama", mlp_bias=True, hidden_act="swish", rms_norm_eps=1e-3),
    "llama-type-linear": of("llama", rope_scaling={"type": "linear", "factor": 2.5}),
    "llama-type-dynamic": of("llama", max_position_embeddings=8, rope_scaling={"type": "dynamic", "factor": 2.0}),
    "llama-dynamic-original": of("llama", max_position_embeddings=8, rope_scaling={
        "rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}),
    "llama-dynamic-within": of("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
    "llama-type-yarn": of("llama", rope_scaling={"type": "yarn", **YARN}),
    "llama-yarn-mscale": of("llama", rope_scaling={"rope_type": "yarn", "mscale": 0.8, "mscale_all_dim": 0.5, **YARN}),
    "llama-yarn-equal-mscale": of("llama", rope_scaling={"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0,
                                                         **YARN}),
    "llama-yarn-one-mscale": of("llama", rope_scaling={"rope_type": "yarn", "mscale": 0.5, **YARN}),
    "llama-yarn-no-original": of("llama", rope_theta=20.0, max_position_embeddings=16,
                                 rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "llama-yarn-no-positions": of("llama", "max_position_embeddings", rope_scaling={
        "rope_type": "yarn", "factor": 4.0, "truncate": False}),
    "llama-yarn-default-ramp": of("llama", max_position_embeddings=16384, rope_scaling={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False}),
    "mistral": of("mistral", sliding_window=5),
    "mistral-full": of("mistral", sliding_window=None, head_dim=8, rms_norm_eps=1e-5, rope_theta=1e6),
    "mistral-tied": of("mistral", "max_position_embeddings", sliding_window=16, tie_word_embeddings=True),
    "mistral-no-positions": of("mistral", "max_position_embeddings", sliding_window=None, head_dim=6, rope_scaling={
        "type": "yarn", "factor": 4.0, "truncate": False}),
    "qwen2": of("qwen2", sliding_window=3, max_window_layers=1, rope_theta=1e6),
    "qwen2-window-unused": of("qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=2),
    "qwen2-window-default": of("qwen2", use_sliding_window=True, sliding_window=3),
    "qwen2-no-original": of("qwen2", "max_position_embeddings", attention_bias=False,
                            rope_scaling={"type": "yarn", "factor": 4.0, "truncate": False}),
    "qwen2-tied": of("qwen2", tie_word_embeddings=True, attention_bias=True, head_dim=10,
                     layer_types=["full_attention"] * 2),
    "qwen3": of("qwen3", num_attention_heads=2, num_key_value_heads=1),
    "qwen3-bias": of("qwen3", head_dim=8, attention_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-3),
    "mixtral": of("mixtral", num_local_experts=5, num_experts_per_tok=2, rope_theta=1e4),
    "mixtral-defaults": of("mixtral", sliding_window=4, head_dim=8),
    "qwen2_moe": of("qwen2_moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20,
                    shared_expert_intermediate_size=28),
    "qwen2_moe-mixed": of("qwen2_moe", num_hidden_layers=3, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
                          moe_intermediate_size=12, shared_expert_intermediate_size=16, mlp_only_layers=[1]),
    "qwen3_moe": of("qwen3_moe", num_experts=8, num_experts_per_tok=4, moe_intermediate_size=12, norm_topk_prob=True,
                    head_dim=8),
    "qwen3_moe-sparse": of("qwen3_moe", num_hidden_layers=3, num_experts=4, num_experts_per_tok=1,
                           moe_intermediate_size=12, head_dim=8, decoder_sparse_step=2, attention_bias=True),
    "gemma3_text": of("gemma3_text", **GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_theta=500.0,
                      rope_local_base_freq=20.0, query_pre_attn_scalar=5),
    "gemma3_text-defaults": of("gemma3_text", num_hidden_layers=7, head_dim=4, num_attention_heads=8,
                               num_key_value_heads=4, sliding_window=3),
    "gemma3_text-types": of("gemma3_text", num_hidden_layers=3, head_dim=8, sliding_window=5, attention_bias=True,
                            layer_types=["full_attention", "sliding_attention", "full_attention"],
                            tie_word_embeddings=False, hidden_activation="silu", rms_norm_eps=1e-3),
    "gemma3": {"model_type": "gemma3", "vision_config": {"hidden_size": 16, "model_type": "siglip_vision_model"},
               "mm_tokens_per_image": 4, "image_token_index": 28, "eos_token_id": [1, 28], "text_config":
               {**{key: value for key, value in SIZES.items() if key != "num_attention_heads"}, **GEMMA3,
                "num_key_value_heads": 4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "model_type": "gemma3_text"}},
}
# As save_pretrained() writes them.
SAVED = {
    "gpt2": {**GPT2, "activation_function": "gelu_pytorch_tanh", "n_inner": 36},
    "gpt2-untied": {**GPT2, "tie_word_embeddings": False},
    "llama-linear": of("llama", rope_theta=300.0, rope_scaling={"rope_type": "linear", "factor": 3.0}, head_dim=8),
    "llama-dynamic": of("llama", max_position_embeddings=10, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
    "llama-llama3": of("llama", rope_theta=900.0, rope_scaling={"rope_type": "llama3", **LLAMA3}, mlp_bias=True,
                       tie_word_embeddings=True),
    "llama-yarn": of("llama", rope_scaling={"rope_type": "yarn", "attention_factor": 1.3, "beta_fast": 4.0,
                                            "beta_slow": 0.3, "truncate": False, **YARN}, attention_bias=True),
    "mistral": of("mistral", sliding_window=4, rope_theta=1e5),
    "mistral-full": of("mistral", sliding_window=None),
    "qwen2": of("qwen2", tie_word_embeddings=True, rope_theta=1e6),
    "qwen2-yarn": of("qwen2", rope_scaling={"rope_type": "yarn", **YARN}),
    "qwen3": of("qwen3", head_dim=8, tie_word_embeddings=True, rope_theta=1e6),
    "qwen3-bias": of("qwen3", head_dim=8, attention_bias=True),
    "mixtral": of("mixtral", num_local_experts=4, rope_theta=1e5),
    "qwen2_moe": of("qwen2_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
                    shared_expert_intermediate_size=16),
    "qwen3_moe": of("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=8),
    "gemma3_text": of("gemma3_text", **GEMMA3, rope_scaling={"rope_type": "linear", "factor": 2.0}),
}
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")


def weight(name, shape):
    """The values of a tensor, exact in fp32: a hash of its name and of the index in row-major order, in [-1, 1)."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = (seed ^ byte) * 0x100000001B3 & (1 << 64) - 1
    with numpy.errstate(over="ignore"):
        x = numpy.uint64(seed) + numpy.arange(numpy.prod(shape), dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> numpy.uint64(30)) * numpy.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> numpy.uint64(27)) * numpy.uint64(0x94D049BB133111EB)
        x ^= x >> numpy.uint64(31)
    u = (x >> numpy.uint64(40)).astype(numpy.float64) / 2**23 - 1
    if len(shape) == 1:
        u = u / 4 if name.endswith("bias") else 1 + u / 4  # biases; weights of norms
    elif "embed_tokens" in name or "wte" in name or "wpe" in name:
        u = u / 64  # small, so that the epsilon of the first norm matters
    elif "lm_head" not in name:
        u = u / 2
    return torch.from_numpy(u.reshape(shape).astype(numpy.float32))


def with_experts(read):
    """A model with experts, whose tensors transformers 5 fuses in memory, and the tensors of its file."""
    model = transformers.AutoModelForCausalLM.from_config(read)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        path = os.path.join(directory, "model.safetensors")
        shapes = {name: list(tensor.shape) for name, tensor in safetensors.torch.load_file(path).items()}
        safetensors.torch.save_file({name: weight(name, shape) for name, shape in shapes.items()}, path, {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager",
                                                                  torch_dtype=torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval(), shapes


def computed(config):
    """The names and shapes of the tensors of that config.json, and its logits in double precision."""
    prefix = TEXT_PART if config["model_type"] == "gemma3" else ""  # the text part of a multimodal file
    config = config["text_config"] if prefix else config
    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, "config.json"), "w") as f:
            json.dump(config, f)
        read = transformers.AutoConfig.from_pretrained(directory)
    tensors = {}
    if config["model_type"] in EXPERTS:
        model, tensors = with_experts(read)
    else:
        model = transformers.AutoModelForCausalLM.from_config(read, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters() if not tensors else ():  # a tied head is not among them
            parameter.copy_(weight(prefix + name, list(parameter.shape)))
            tensors[prefix + name] = list(parameter.shape)
        if prefix:
            tensors["vision_tower.norm.weight"] = [16]
        logits = model.double()(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return tensors, [[float(f"{x:.9g}") for x in logits[p].tolist()] for p in POSITIONS]


def saved(config):
    """The config.json that save_pretrained() writes."""
    config = dict(config)
    made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    with tempfile.TemporaryDirectory() as directory:
        made.save_pretrained(directory)
        with open(os.path.join(directory, "config.json")) as f:
            return json.load(f)


def written(program, config):
    """The config.json that nrl-train writes for a model of that one, with the initial weights."""
    with tempfile.TemporaryDirectory() as directory:
        reference = os.path.join(os.path.dirname(program), "reference_trainer")
        subprocess.run([reference, "data", "tokens", str(config["vocab_size"]), "8", "1"], cwd=directory, check=True)
        with open(os.path.join(directory, "run.yaml"), "w") as f:
            f.write(f"policy:\n  model: {json.dumps(config)}\n  train_global_batch_size: 1\n"
                    "  max_total_sequence_length: 8\n  precision: float32\npretrain: {max_num_steps: 0}\n"
                    "data: {train: {data_path: tokens}}\ncheckpointing: {checkpoint_dir: c}\nlogger: {log_dir: l}\n")
        result = subprocess.run([program, "run.yaml"], cwd=directory, capture_output=True, text=True)
        if result.returncode != 0:
            sys.exit(f"{json.dumps(config)}: {result.stderr}")
        with open(os.path.join(directory, "c", "step-0", "config.json")) as f:
            return json.load(f)


def text_of(fixture):
    """JSON with one line for each tensor, and one for the logits of a position."""
    lines = ['  "config": ' + json.dumps(fixture["config"], indent=2).replace("\n", "\n  "),
             '  "tokens": ' + json.dumps(fixture["tokens"]), '  "positions": ' + json.dumps(fixture["positions"]),
             '  "tensors": {\n' + ",\n".join(f'    "{n}": {s}' for n, s in fixture["tensors"].items()) + "\n  }",
             '  "logits": [\n' + ",\n".join("    " + json.dumps(row) for row in fixture["logits"]) + "\n  ]"]
    return '{\n  "transformers": "' + fixture["transformers"] + '",\n' + ",\n".join(lines) + "\n}\n"


def main():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=os.path.join(root, "tests", "model", "fixtures"))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--written", metavar="NRL_TRAIN", type=os.path.realpath)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    major = transformers.__version__.split(".")[0]
    cases = {name: config for name, config in PUBLISHED.items()}
    cases.update({f"saved{major}-{name}": saved(config) for name, config in SAVED.items()})
    status = 0
    for name, config in cases.items():
        path = os.path.join(args.output, name + ".json")
        tensors, logits = computed(config)
        if args.written and name in PUBLISHED:
            a, b = numpy.array(logits), numpy.array(computed(written(args.written, config))[1])
            if abs(a - b).max() > 1e-6 * abs(a).max():
                print(f"{name}: transformers reads another model from the config.json of its checkpoint")
                status = 1
        if os.path.exists(path):
            with open(path) as f:
                there = json.load(f)
            a, b = numpy.array(there["logits"]), numpy.array(logits)
            difference = abs(a - b).max() / abs(b).max() if a.shape == b.shape else float("inf")
            if difference > 1e-6 or there["tensors"] != tensors or (name in PUBLISHED and there["config"] != config):
                print(f"{name}: differs from transformers {there['transformers']}: logits by {difference:.1e}")
                status = 1
        elif not args.check:
            with open(path, "w") as f:
                f.write(text_of({"transformers": transformers.__version__, "config": config, "tokens": TOKENS,
                                 "positions": POSITIONS, "tensors": tensors, "logits": logits}))
    print(f"transformers {transformers.__version__}: {len(cases)} cases")
    return status


if __name__ == "__main__":
    sys.exit(main())
