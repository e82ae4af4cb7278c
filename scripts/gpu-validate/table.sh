# shellcheck shell=bash
# The stages of gpu-validate.sh; sourced.

# NAME|CALL|LIMIT[/LEAST]|WHAT: name, number of the call, time limit in seconds, the least that it is worth starting with
# (default: a quarter of the limit), description. In the order in which they run: what is worth most comes first.
stage_table() {
  cat <<'TEXT'
doctor|1|30|capabilities of this build and machine
smoke|1|60|5 steps of configs/quickstart.yaml; names the attention kernel
step-8b|1|60|steps of configs/bench-8b-layers.yaml
step-1b|1|60|steps of configs/bench-llama-1b.yaml
attention-ops|1|150|attention kernels against the fp64 reference, and cuDNN against them
losses-bf16|1|60|20 steps of configs/quickstart.yaml in bf16 against the CPU
losses-fp32|1|60|the same in fp32
graph|1|45|20 steps with a CUDA graph: bitwise identical
step-8b-fp8|1|75|step-8b with FP8 GEMMs, tensorwise scales: against step-8b
step-8b-fp8-delayed|1|75|the same with delayed scales
losses-fp8-tensorwise|1|60|100 steps of a small Llama with FP8 GEMMs, tensorwise scales, beside bf16, the first ones beside the CPU
attention|1|90|attention
gemm|1|60|GEMMs
ops|1|60|memory-bound kernels against the copy bandwidth, 8,192 tokens
torch|2|280/150|configs/bench-8b-layers.yaml in torch.compile, in alternation
torch-1b|2|280/150|configs/bench-llama-1b.yaml in torch.compile, in alternation
torch-losses|2|90|20 steps of a small Llama and GPT-2 from the same weights on the same samples in PyTorch
kernels-small|2|60|the other kernels against the fp64 reference, small sizes
gradients|2|45|backward kernels against finite differences
kernels|2|180|the other kernels against the fp64 reference, all sizes
memcheck-attention|3|150|compute-sanitizer memcheck on our attention kernels
racecheck-attention|3|150|compute-sanitizer racecheck on our attention kernels
profile-8b|3|90|one traced step of configs/bench-8b-layers.yaml: time of every op
profile-1b|3|90|one traced step of configs/bench-llama-1b.yaml
ncu-norm|3|60|Nsight Compute: backward pass of RMSNorm
ncu-loss|3|60|Nsight Compute: cross entropy
ncu-qk|3|60|Nsight Compute: backward pass of QK-norm and RoPE
ncu-attention|3|60|Nsight Compute: backward pass of our own attention
step-8b-autotune|3|75|step-8b with timed GEMM kernels
step-1b-autotune|3|75|step-1b with timed GEMM kernels
step-8b-graph|3|60|step-8b with a CUDA graph
step-1b-graph|3|60|step-1b with a CUDA graph
losses-float16|4|60|100 steps of a small Llama in fp16 beside bf16, the first ones beside the CPU
losses-fp8-delayed|4|60|the same with FP8 GEMMs, delayed scales
losses-fp8-blockwise|4|60|the same with scales of blocks
step-8b-fp8-blockwise|4|75|step-8b with FP8 GEMMs, scales of blocks: against step-8b
offload|4|60|activations and optimizer offloaded, with and without a CUDA graph: bitwise identical
resume|4|45|10 steps, a checkpoint, 10 steps: bitwise identical to 20 steps
ranks|4|60|2 ranks that share the GPU, host-staged
ranks-optim|4|60|2 ranks with sharded optimizer state, weights gathered during the next step
libraries|4|120|the other GPU tests of the build (gpu_*): communication, cuDNN, ...
cpu-kernels|4|120|the kernels of this machine's CPU against the fp64 reference, each instruction set
step-1.5b|4|60|steps of configs/bench-gpt2-1.5b.yaml, and the time to the first
ops-32k|4|60|memory-bound kernels at 32,768 tokens
step-8b-micro4|4|75|step-8b with 4 microbatches per step
step-1b-micro4|4|75|step-1b with 4 microbatches per step
step-8b-recompute|4|60|step-8b with norms and activations recomputed
step-1b-recompute|4|60|step-1b with norms and activations recomputed
step-8b-offload|4|60|step-8b with inputs, queries, keys, values and outputs of attention moved to the host
big|5|120|tensors of more than 2^31 elements
memcheck-norm|5|150|compute-sanitizer memcheck on norm, QK-norm and RoPE
memcheck-rest|5|150|the same on the other ops
torch-recompute|5|180/100|configs/bench-8b-layers.yaml with recomputation, for the memory
racecheck-norm|5|150|compute-sanitizer racecheck on norm, QK-norm and RoPE
racecheck-rest|5|150|the same on the other ops
synccheck-attention|5|150|compute-sanitizer synccheck on our attention kernels
synccheck-norm|5|150|the same on norm, QK-norm and RoPE
synccheck-rest|5|150|the same on the other ops
torch-eager|5|180/100|configs/bench-8b-layers.yaml in eager PyTorch, in alternation
ranks-nccl|5|60|2 ranks that share the GPU through NCCL (2.30 and later support it)
TEXT
}

# rows_of NAME...: their rows, in this order.
rows_of() {
  stage_table | awk -F'|' -v names="$*" '{ row[$1] = $0 } END { n = split(names, name, " "); for (i = 1; i <= n; ++i) print row[name[i]] }'
}

# Prints call, stage and description.
list_stages() { stage_table | awk -F'|' '{ printf "%s  %-21s %s\n", $2, $1, $4 }'; }
