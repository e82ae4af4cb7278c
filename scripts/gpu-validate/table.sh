# shellcheck shell=bash
# The stages of gpu-validate.sh; sourced.

# NAME|CALL|LIMIT|WHAT: name, number of the call, time limit in seconds, description. New checks come before slow ones.
stage_table() {
  cat <<'TEXT'
doctor|1|30|capabilities of this build and machine
smoke|1|60|5 steps of configs/quickstart.yaml; names the attention kernel
attention-ops|1|150|attention kernels against the fp64 reference, and cuDNN against them
kernels|1|120|the other kernels against the fp64 reference
gradients|1|45|backward kernels against finite differences
losses-fp32|1|60|20 steps of configs/quickstart.yaml in fp32 against the CPU
losses-bf16|1|60|the same in bf16
losses-float16|1|60|100 steps of a small Llama in fp16 beside bf16, the first ones beside the CPU
losses-fp8-tensorwise|1|60|the same with FP8 GEMMs, tensorwise scales
losses-fp8-delayed|1|60|the same with delayed scales
losses-fp8-blockwise|1|60|the same with scales of blocks
graph|1|45|20 steps with a CUDA graph: bitwise identical
offload|1|60|activations and optimizer offloaded, with and without a CUDA graph: bitwise identical
resume|1|45|10 steps, a checkpoint, 10 steps: bitwise identical to 20 steps
ranks|1|60|2 ranks that share the GPU, host-staged
ranks-nccl|1|60|the same through NCCL (2.30 and later support two ranks on one GPU)
ranks-optim|1|60|2 ranks with sharded optimizer state, weights gathered during the next step
libraries|1|120|the other GPU tests of the build (gpu_*): communication, cuDNN, ...
step-8b|2|60|steps of configs/bench-8b-layers.yaml
step-1b|2|60|steps of configs/bench-llama-1b.yaml
step-8b-fp8|2|75|step-8b with FP8 GEMMs, tensorwise scales: against step-8b
step-8b-fp8-delayed|2|75|the same with delayed scales
step-8b-offload|2|60|step-8b with inputs, queries, keys, values and outputs of attention moved to the host
step-8b-autotune|2|75|step-8b with timed GEMM kernels
step-8b-recompute|2|60|step-8b with norms and activations recomputed
step-8b-graph|2|60|step-8b with a CUDA graph
step-8b-micro4|2|75|step-8b with 4 microbatches per step
gemm|2|60|GEMMs
attention|2|90|attention
ops|2|60|memory-bound kernels against the copy bandwidth, 8,192 tokens
step-1b-autotune|2|75|step-1b with timed GEMM kernels
step-1b-recompute|2|60|step-1b with norms and activations recomputed
step-1b-graph|2|60|step-1b with a CUDA graph
step-1b-micro4|2|75|step-1b with 4 microbatches per step
step-1.5b|3|60|steps of configs/bench-gpt2-1.5b.yaml, and the time to the first
ops-32k|3|60|memory-bound kernels at 32,768 tokens
profile-8b|3|90|one traced step of configs/bench-8b-layers.yaml: time of every op
profile-1b|3|90|one traced step of configs/bench-llama-1b.yaml
ncu-norm|3|60|Nsight Compute: backward pass of RMSNorm
ncu-loss|3|60|Nsight Compute: cross entropy
ncu-qk|3|60|Nsight Compute: backward pass of QK-norm and RoPE
ncu-attention|3|60|Nsight Compute: backward pass of our own attention
torch|4|280|configs/bench-8b-layers.yaml in torch.compile, in alternation
torch-1b|4|280|configs/bench-llama-1b.yaml in torch.compile, in alternation
torch-recompute|4|180|configs/bench-8b-layers.yaml with recomputation, for the memory
torch-eager|4|180|configs/bench-8b-layers.yaml in eager PyTorch, in alternation
big|5|120|tensors of more than 2^31 elements
memcheck-attention|5|150|compute-sanitizer memcheck on our attention kernels
memcheck-norm|5|150|the same for norm, QK-norm and RoPE
memcheck-rest|5|150|the same for the other ops
racecheck-attention|5|150|compute-sanitizer racecheck on our attention kernels
racecheck-norm|5|150|the same for norm, QK-norm and RoPE
racecheck-rest|5|150|the same for the other ops
synccheck-attention|5|150|compute-sanitizer synccheck on our attention kernels
synccheck-norm|5|150|the same for norm, QK-norm and RoPE
synccheck-rest|5|150|the same for the other ops
TEXT
}

# Prints call, stage and description.
list_stages() { stage_table | awk -F'|' '{ printf "%s  %-21s %s\n", $2, $1, $4 }'; }
