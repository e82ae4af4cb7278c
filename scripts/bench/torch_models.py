"""Decoders in plain PyTorch (1.13 or later), as a user would write them: GPT-2, Llama, Mistral, Qwen2, Qwen3 and Gemma 3.

One module for all families, driven by a Hugging Face config.json (or the same keys as a dict). Projections that read
the same input are one matrix, which is the faster way in eager PyTorch. Used by torch_train.py and check-parity.py.
"""
import json
import os
import struct

import torch
import torch.nn as nn
import torch.nn.functional as F


class Spec:
    """The numbers of a model, from config.json's keys. Refuses what the forward pass below does not do."""

    def __init__(self, config):
        self.family = config["model_type"]
        gpt2 = self.family == "gpt2"
        gemma = self.family == "gemma3_text"
        if self.family not in ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3_text"):
            raise ValueError(f"model_type {self.family} is not known here")
        if config.get("rope_scaling"):
            raise ValueError("rope_scaling is not done here")
        if config.get("use_sliding_window"):
            raise ValueError("use_sliding_window is not done here")
        self.gpt2 = gpt2
        self.vocab = config["vocab_size"]
        self.hidden = config["n_embd" if gpt2 else "hidden_size"]
        self.layers = config["n_layer" if gpt2 else "num_hidden_layers"]
        self.heads = config["n_head" if gpt2 else "num_attention_heads"]
        self.kv_heads = self.heads if gpt2 else config.get("num_key_value_heads", self.heads)
        self.head_dim = config.get("head_dim") or self.hidden // self.heads
        self.ffn = (config.get("n_inner") or 4 * self.hidden) if gpt2 else config["intermediate_size"]
        self.positions = config["n_positions" if gpt2 else "max_position_embeddings"]
        self.eps = config.get("layer_norm_epsilon", 1e-5) if gpt2 else config.get("rms_norm_eps", 1e-6)
        self.theta = config.get("rope_theta", 1e6 if gemma else 10000.0)
        self.window = config.get("sliding_window") if self.family == "mistral" else None
        # Gemma: norms multiply by 1 + weight and follow the sublayers, too; all but every period-th layer have a window.
        self.gemma, self.period = gemma, config.get("sliding_window_pattern", 6)
        self.local_window, self.local_theta = config.get("sliding_window", 4096), config.get("rope_local_base_freq", 1e4)
        self.scale = (config.get("query_pre_attn_scalar", 256) if gemma else self.head_dim) ** -0.5
        self.qkv_bias = gpt2 or self.family == "qwen2" or bool(config.get("attention_bias"))
        self.o_bias = gpt2 or (self.family != "qwen2" and bool(config.get("attention_bias")))
        self.mlp_bias = gpt2 or bool(config.get("mlp_bias"))
        self.qk_norm = self.family in ("qwen3", "gemma3_text")
        self.tied = config.get("tie_word_embeddings", gpt2 or gemma)
        self.activation = config.get("activation_function", "gelu_new") if gpt2 else config.get("hidden_act", "silu")
        if gemma:
            self.activation = config.get("hidden_activation", "gelu_pytorch_tanh")
        for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
            if config.get(key):
                raise ValueError(f"{key} must be 0: two programs do not draw the same dropout masks")
        self.sdpa = False     # attention by F.scaled_dot_product_attention (torch 2), without the matrix of scores
        self.residual = None  # dtype of the residual stream; None: that of the embedding

    def flops_per_token(self, length):
        """Model FLOPs of a token in training: matrix products three times, causal attention counted exactly."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.hidden * (q + 2 * kv) + q * self.hidden + (2 if self.gpt2 else 3) * self.hidden * self.ffn
        pairs = sum(self.pairs(length, self.kind(i)[0]) for i in range(self.layers))
        return 6 * (self.layers * layer + self.hidden * self.vocab) + 12 * q * pairs / length

    @staticmethod
    def pairs(length, window):
        """Pairs of a token and one that it sees."""
        hidden = max(length - window, 0) if window else 0
        return (length * (length + 1) - hidden * (hidden + 1)) / 2

    def kind(self, layer):
        """The window (or None) and the rotary base of a layer."""
        if self.gemma and (layer + 1) % self.period:
            return self.local_window, self.local_theta
        return self.window, self.theta


class RMSNorm(nn.Module):
    def __init__(self, width, eps, offset=0):
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.full((width,), 1.0 - offset)), eps, offset

    def forward(self, x):
        if self.offset:
            y = x.to(torch.promote_types(x.dtype, torch.float32))
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
            return (y * (self.offset + self.weight.to(y.dtype))).to(x.dtype)
        if x.dtype != self.weight.dtype and hasattr(F, "rms_norm"):
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight.to(x.dtype)


def activation(name, x):
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return F.gelu(x, approximate="tanh")
    return {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}[name](x)


def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        norm = (lambda: nn.LayerNorm(s.hidden, s.eps)) if s.gpt2 else (lambda: RMSNorm(s.hidden, s.eps, int(s.gemma)))
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.s = s
        self.norm1, self.norm2 = norm(), norm()
        if s.gemma:
            self.post_norm1, self.post_norm2 = norm(), norm()
        self.qkv = nn.Linear(s.hidden, q + 2 * kv, bias=s.qkv_bias)
        self.o = nn.Linear(q, s.hidden, bias=s.o_bias)
        self.mlp_in = nn.Linear(s.hidden, s.ffn if s.gpt2 else 2 * s.ffn, bias=s.mlp_bias)
        self.mlp_out = nn.Linear(s.ffn, s.hidden, bias=s.mlp_bias)
        if s.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(s.head_dim, s.eps, int(s.gemma)) for _ in range(2))

    def attention(self, x, hidden_pairs, cos, sin):
        s, (b, t, _) = self.s, x.shape
        widths = [s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim]
        q, k, v = (y.view(b, t, -1, s.head_dim) for y in self.qkv(x).split(widths, -1))
        if s.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if not s.gpt2:
            q, k = rope(q, cos, sin), rope(k, cos, sin)
        if s.sdpa:
            grouped = {}
            if s.kv_heads != s.heads:
                if "enable_gqa" in (F.scaled_dot_product_attention.__doc__ or ""):  # torch 2.5
                    grouped["enable_gqa"] = True
                else:
                    k, v = (z.repeat_interleave(s.heads // s.kv_heads, 1) for z in (k, v))
            masked = {"attn_mask": ~hidden_pairs, "scale": s.scale} if s.gemma else {"is_causal": True}
            y = F.scaled_dot_product_attention(q, k, v, **masked, **grouped)
            return self.o(y.transpose(1, 2).reshape(b, t, -1))
        if s.kv_heads != s.heads:
            k, v = (y.repeat_interleave(s.heads // s.kv_heads, 1) for y in (k, v))
        scores = (q * s.scale) @ k.transpose(-2, -1)
        y = F.softmax(scores.masked_fill_(hidden_pairs, float("-inf")), -1) @ v
        return self.o(y.transpose(1, 2).reshape(b, t, -1))

    def forward(self, x, hidden_pairs, cos, sin):
        y = self.attention(self.norm1(x), hidden_pairs, cos, sin)
        x = x + (self.post_norm1(y) if self.s.gemma else y)
        y = self.mlp_in(self.norm2(x))
        if self.s.gpt2:
            y = activation(self.s.activation, y)
        else:
            gate, up = y.chunk(2, -1)
            y = activation(self.s.activation, gate) * up
        y = self.mlp_out(y)
        return x + (self.post_norm2(y) if self.s.gemma else y)


class Decoder(nn.Module):
    def __init__(self, spec):
        super().__init__()
        s = self.s = spec
        self.embedding = nn.Embedding(s.vocab, s.hidden)
        self.positions = nn.Embedding(s.positions, s.hidden) if s.gpt2 else None
        self.blocks = nn.ModuleList([Block(s) for _ in range(s.layers)])
        self.norm = nn.LayerNorm(s.hidden, s.eps) if s.gpt2 else RMSNorm(s.hidden, s.eps, int(s.gemma))
        self.head = nn.Linear(s.hidden, s.vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02)
        if s.tied:
            self.head.weight = self.embedding.weight
        self.constants = {}

    def prepare(self, t):
        """Makes the tables of all layers for sequences of length t."""
        for layer in range(self.s.layers):
            self.tables(t, layer)

    def tables(self, t, layer):
        """Pairs that attention hides, and the cosines and sines of RoPE, of a layer for sequences of length t."""
        window, theta = kind = self.s.kind(layer)
        if (t, kind) not in self.constants:
            s, i = self.s, torch.arange(t, device=self.embedding.weight.device)
            hidden_pairs = i[None, :] > i[:, None]
            if window:
                hidden_pairs |= i[:, None] - i[None, :] >= window
            frequency = 1.0 / theta ** (torch.arange(0, s.head_dim, 2, device=i.device).double() / s.head_dim)
            angle = torch.outer(i.double(), frequency)
            self.constants = {k: v for k, v in self.constants.items() if k[0] == t}
            self.constants[t, kind] = (hidden_pairs, angle.cos().float(), angle.sin().float())
        return self.constants[t, kind]

    def loss(self, tokens, targets):
        """Mean cross-entropy; both (sequences, length)."""
        x, t = self.embedding(tokens), tokens.shape[1]
        if self.positions is not None:
            x = x + self.positions.weight[:t]
        if self.s.residual:
            x = x.to(self.s.residual)
        if self.s.gemma:
            x = x * torch.tensor(self.s.hidden**0.5, dtype=x.dtype)
        for i, block in enumerate(self.blocks):
            x = block(x, *self.tables(t, i))
        return F.cross_entropy(self.head(self.norm(x)).view(-1, self.s.vocab), targets.reshape(-1))

    def optimizer(self, lr, betas, eps, weight_decay, fused=False):
        """AdamW, with decay on matrices and embeddings only; fused: as one kernel (CUDA: torch 2, CPU: torch 2.4)."""
        groups = [{"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": weight_decay},
                  {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, **({"fused": True} if fused else {"foreach": True}))


def read_safetensors(path):
    """All tensors of a .safetensors file, by name."""
    types = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
    with open(path, "rb") as f:
        (size,) = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(size))
        data = bytearray(f.read())
    out = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, (begin, end) = types[entry["dtype"]], entry["data_offsets"]
        flat = torch.frombuffer(data, dtype=dtype, offset=begin, count=(end - begin) // torch.empty(0, dtype=dtype).element_size())
        out[name] = flat.reshape(entry["shape"]).clone()
    return out


def load(directory):
    """The model of a Hugging Face directory, in fp32. Every tensor of the file must find its place."""
    with open(os.path.join(directory, "config.json")) as f:
        model = Decoder(Spec(json.load(f)))
    tensors = {}
    for name in sorted(os.listdir(directory)):
        if name.startswith("model") and name.endswith(".safetensors"):
            tensors.update(read_safetensors(os.path.join(directory, name)))
    s = model.s

    def take(*names):
        for n in names:
            if n not in tensors:
                raise KeyError(f"{directory}: the tensor {n} is missing")
        return torch.cat([tensors.pop(n).float() for n in names])

    def linear(module, *names):
        weight = take(*(n + ".weight" for n in names))
        module.weight.copy_(weight.t() if s.gpt2 else weight)  # GPT-2's files hold them as (in, out)
        if module.bias is not None:
            module.bias.copy_(take(*(n + ".bias" for n in names)))

    def norm(module, name):
        module.weight.copy_(take(name + ".weight"))
        if getattr(module, "bias", None) is not None:
            module.bias.copy_(take(name + ".bias"))

    with torch.no_grad():
        top = "transformer." if s.gpt2 else "model."
        model.embedding.weight.copy_(take(top + ("wte.weight" if s.gpt2 else "embed_tokens.weight")))
        if s.gpt2:
            model.positions.weight.copy_(take(top + "wpe.weight"))
        for i, b in enumerate(model.blocks):
            at = f"{top}{'h' if s.gpt2 else 'layers'}.{i}."
            norm(b.norm1, at + ("ln_1" if s.gpt2 else "input_layernorm"))
            norm2 = "pre_feedforward_layernorm" if s.gemma else "post_attention_layernorm"
            norm(b.norm2, at + ("ln_2" if s.gpt2 else norm2))
            if s.gemma:
                norm(b.post_norm1, at + "post_attention_layernorm")
                norm(b.post_norm2, at + "post_feedforward_layernorm")
            if s.gpt2:
                linear(b.qkv, at + "attn.c_attn")
                linear(b.o, at + "attn.c_proj")
                linear(b.mlp_in, at + "mlp.c_fc")
                linear(b.mlp_out, at + "mlp.c_proj")
                continue
            linear(b.qkv, *(f"{at}self_attn.{p}_proj" for p in "qkv"))
            linear(b.o, at + "self_attn.o_proj")
            linear(b.mlp_in, at + "mlp.gate_proj", at + "mlp.up_proj")
            linear(b.mlp_out, at + "mlp.down_proj")
            if s.qk_norm:
                norm(b.q_norm, at + "self_attn.q_norm")
                norm(b.k_norm, at + "self_attn.k_norm")
        norm(model.norm, top + ("ln_f" if s.gpt2 else "norm"))
        if not s.tied:
            model.head.weight.copy_(take("lm_head.weight"))
    tensors.pop("lm_head.weight", None)
    if tensors:
        raise ValueError(f"{directory}: no place for {', '.join(sorted(tensors))}")
    return model
