#!/usr/bin/env bash
# Post-training as a user runs it: the demonstration of docs/post-training.md, and the configurations for models of
# others, planned for the hardware that they name.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

case $case_name in
  sft_demonstration)
    "$source_dir/scripts/make-chat.sh" data/chat 400 >out.txt
    grep -q 'data/chat/train.jsonl (400 records)' out.txt || fail "$(cat out.txt)"
    expect 0 run 1 data show "$source_dir/configs/sft-tiny.yaml" --n 1
    grep -q '400 records -> 400 examples' out.txt || fail "no counts: $(cat out.txt)"
    # The same losses on one rank, on two, and after a stop on another number of ranks.
    tune() {
      expect 0 run "$1" "$source_dir/configs/sft-tiny.yaml" sft.val_period=3 policy.model.num_hidden_layers=1 \
        policy.scheduler.lr_decay_style=constant policy.scheduler.min_lr=0 policy.scheduler.lr_warmup_iters=0 \
        checkpointing.checkpoint_dir="$2/checkpoints" logger.log_dir="$2/logs" sft.max_num_steps="$3" "${@:4}"
    }
    tune 1 one 9
    grep -q 'packed into microbatches of 1,024 tokens' out.txt || fail "no word about packing: $(cat out.txt)"
    tune 2 two 9 distributed.tensor_parallel_size=2
    same one/logs/metrics.jsonl two/logs/metrics.jsonl 1e-4
    tune 2 parts 5
    tune 1 parts 9
    same one/logs/metrics.jsonl parts/logs/metrics.jsonl 1e-4
    expect 0 run 1 generate one/checkpoints --prompt 'Sort 3172: ' --max-tokens 4
    # All ranks refuse a damaged record, in the same words.
    sed -i '7s/completion/answer/' data/chat/train.jsonl
    expect 65 run 2 "$source_dir/configs/sft-tiny.yaml" checkpointing.enabled=false
    grep -q 'data/chat/train.jsonl:7:' err.txt || fail "the record is not named: $(cat err.txt)"
    ;;
  deferred_packed) # steps of fewer microbatches than planned complete the gradients in buckets, also deferred ones
    "$source_dir/scripts/make-chat.sh" data/chat 400 >out.txt
    for kept in fp32 bf16; do
      expect 0 run 2 "$source_dir/configs/sft-tiny.yaml" policy.sequence_packing.train_mb_tokens=64 sft.max_num_steps=3 \
        distributed.pipeline_parallel_size=2 distributed.pipeline_schedule=zb_h1 distributed.shard_strategy=optim \
        policy.optimizer.use_precision_aware_optimizer=true policy.optimizer.main_grads_dtype=$kept \
        checkpointing.enabled=false logger.log_dir=$kept/logs
    done
    same fp32/logs/metrics.jsonl bf16/logs/metrics.jsonl 1e-2
    ;;
  preference_demonstration)
    "$source_dir/scripts/make-chat.sh" data/chat 200 >out.txt
    expect 0 run 1 "$source_dir/configs/sft-tiny.yaml" policy.model.num_hidden_layers=1 sft.max_num_steps=5 sft.val_period=0 \
      sft.val_at_end=true policy.scheduler.lr_warmup_iters=0 checkpointing.checkpoint_dir=sft
    compare() { # CONFIG RANKS DIRECTORY STEPS OVERRIDES...
      expect 0 run "$2" "$source_dir/configs/$1-tiny.yaml" policy.model_name=sft/step-5 policy.train_global_batch_size=16 \
        policy.sequence_packing.train_mb_tokens=512 policy.optimizer.lr=1e-3 policy.scheduler.lr_warmup_iters=0 \
        policy.scheduler.lr_decay_style=constant policy.scheduler.min_lr=0 "$1.val_period=3" "$1.val_at_start=false" checkpointing.checkpoint_dir="$3/checkpoints" logger.log_dir="$3/logs" \
        "$1.max_num_steps=$4" "${@:5}"
    }
    for algorithm in dpo rm; do
      compare $algorithm 1 one-$algorithm 6
      compare $algorithm 2 two-$algorithm 6 distributed.tensor_parallel_size=2
      same one-$algorithm/logs/metrics.jsonl two-$algorithm/logs/metrics.jsonl 1e-4
      compare $algorithm 2 parts-$algorithm 3
      compare $algorithm 1 parts-$algorithm 6
      same one-$algorithm/logs/metrics.jsonl parts-$algorithm/logs/metrics.jsonl 1e-4
      grep -q '"val_accuracy"' one-$algorithm/logs/metrics.jsonl || fail "no accuracy: $(cat one-$algorithm/logs/metrics.jsonl)"
    done
    # A damaged file of the reference is computed again, with the same losses, and a run that is resumed does so, too.
    for reference in data/chat/*.reference-*.cache; do printf x >>"$reference"; done
    compare dpo 1 again 6
    grep -q 'the file is damaged' err.txt || fail "no word about the damaged file: $(cat err.txt)"
    same one-dpo/logs/metrics.jsonl again/logs/metrics.jsonl 1e-6
    rm -rf again parts-dpo
    compare dpo 1 parts-dpo 3
    rm data/chat/*.reference-*.cache
    compare dpo 1 parts-dpo 6
    same one-dpo/logs/metrics.jsonl parts-dpo/logs/metrics.jsonl 1e-6
    expect 65 run 1 generate one-rm/checkpoints --prompt 'Sort 3172: '
    # Other records are refused, and a damaged pair is named.
    expect 78 run 1 "$source_dir/configs/dpo-tiny.yaml" policy.model_name=sft/step-5 data.train.data_path=data/chat/train.jsonl
    sed -i '7s/rejected/refused/' data/chat/pairs-train.jsonl
    expect 65 run 2 "$source_dir/configs/rm-tiny.yaml" policy.model_name=sft/step-5 checkpointing.enabled=false
    grep -q 'data/chat/pairs-train.jsonl:7:' err.txt || fail "the record is not named: $(cat err.txt)"
    ;;
  generation_memory) # a plan has the memory that the run takes for rollouts
    config one
    printf '{"prompt": "%d=", "answer": "1"}\n' 1 2 3 4 >prompts.jsonl
    sed -e 's/^pretrain:/grpo:/' -e '/^data:/d' one.yaml >prompts.yaml
    for ranks in 1 2; do
      prompts=(prompts.yaml algorithm=grpo 'policy.tokenizer={name: bytes, chat_template: none}'
        'data.train={data_path: prompts.jsonl, format: prompts}' 'reward=[exact]' policy.train_global_batch_size=4
        grpo.num_prompts_per_step=2 grpo.num_generations_per_prompt=2 "distributed.tensor_parallel_size=$ranks")
      expect 0 run 1 plan "${prompts[@]}" --world "$ranks" --device cpu
      cp out.txt plan.txt
      planned=$(sed -n 's/^  \(generation of up to 4 sequences at once, 12 pages of 16 tokens (.*), buffers .*\)$/\1/p' plan.txt)
      [[ -n $planned ]] || fail "no generation: $(cat plan.txt)"
      # The rows of the table add up to the total.
      awk '/^memory / { inside = 1; next } $1 == "total" { gsub(",", "", $2); exit !(sum == $2 && generation > 0) }
        inside { gsub(",", "", $2); sum += $2; if ($1 == "generation") generation = $2 }' plan.txt || fail "another sum: $(cat plan.txt)"
      # Half of the keys and values on each tensor-parallel rank: 12 pages, 16 tokens, 2 layers, 2 heads of 12 numbers.
      [[ $planned == *"($((12 * 16 * 2 * 2 * 24 * 4 / ranks / 1024)).0 KiB)"* ]] || fail "other pages: $planned"
      expect 0 run "$ranks" "${prompts[@]}" grpo.max_num_steps=1 checkpointing.enabled=false
      grep -qF "$planned" out.txt err.txt || fail "planned $planned: $(cat out.txt err.txt)"
    done
    # Pretraining generates nothing.
    expect 0 run 1 plan one.yaml --device cpu
    ! grep -q generation out.txt || fail "$(cat out.txt)"
    ;;
  sft_recipes)
    model() { # DIRECTORY JSON: a model directory without weights
      mkdir -p "models/$1"
      echo "{$2, \"rms_norm_eps\": 1e-5, \"hidden_act\": \"silu\"}" >"models/$1/config.json"
    }
    llama='"model_type": "llama", "attention_bias": false, "mlp_bias": false'
    model SmolLM2-135M "$llama, \"vocab_size\": 49152, \"hidden_size\": 576, \"intermediate_size\": 1536, \"num_hidden_layers\": 30, \"num_attention_heads\": 9, \"num_key_value_heads\": 3, \"max_position_embeddings\": 8192, \"rope_theta\": 100000, \"tie_word_embeddings\": true"
    cp -r models/SmolLM2-135M models/SmolLM2-135M-Instruct
    model SmolLM2-1.7B-Instruct "$llama, \"vocab_size\": 49152, \"hidden_size\": 2048, \"intermediate_size\": 8192, \"num_hidden_layers\": 24, \"num_attention_heads\": 32, \"num_key_value_heads\": 32, \"max_position_embeddings\": 8192, \"rope_theta\": 130000, \"tie_word_embeddings\": true"
    model Llama-3.2-1B-Instruct "$llama, \"vocab_size\": 128256, \"hidden_size\": 2048, \"intermediate_size\": 8192, \"num_hidden_layers\": 16, \"num_attention_heads\": 32, \"num_key_value_heads\": 8, \"max_position_embeddings\": 131072, \"rope_theta\": 500000, \"tie_word_embeddings\": true"
    model Llama-3.1-8B-Instruct "$llama, \"vocab_size\": 128256, \"hidden_size\": 4096, \"intermediate_size\": 14336, \"num_hidden_layers\": 32, \"num_attention_heads\": 32, \"num_key_value_heads\": 8, \"max_position_embeddings\": 131072, \"rope_theta\": 500000, \"tie_word_embeddings\": false"
    model Qwen2.5-7B-Instruct '"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 1000000, "tie_word_embeddings": false'
    model Qwen3-8B '"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000, "tie_word_embeddings": false'
    model gemma-3-1b-it '"model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768, "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6'
    model Mistral-7B-Instruct-v0.3 '"model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": false'
    planned=0
    while read -r name ranks; do
      expect 0 run 1 plan "$source_dir/configs/$name.yaml" --world "$ranks" --device h100
      grep -q 'does not fit' out.txt err.txt && fail "$name does not fit: $(cat out.txt)"
      [[ $name != distill-* ]] || grep -q "teacher's numbers" out.txt || fail "$name: no numbers of a teacher: $(cat out.txt)"
      [[ $name != grpo-* && $name != distill-* ]] || grep -qE '^  generation +[1-9][0-9,]+ ' out.txt || fail "$name: no generation: $(cat out.txt)"
      planned=$((planned + 1))
    done <<'LIST'
sft-smollm2-135m 1
sft-llama-3.2-1b 1
sft-gemma3-1b 1
sft-llama-3.1-8b 8
sft-qwen2.5-7b 8
sft-qwen3-8b 8
lora-llama-3.1-8b 1
lora-mistral-7b 1
dpo-smollm2-135m 1
dpo-llama-3.2-1b 1
dpo-llama-3.1-8b 8
dpo-qwen3-8b 8
dpo-lora-mistral-7b 1
grpo-llama-3.2-1b 1
grpo-llama-3.1-8b 8
distill-smollm2-135m 1
rm-llama-3.2-1b 1
rm-qwen2.5-7b 8
LIST
    # Recipes for the hardware that each names.
    for recipe in "$source_dir"/configs/recipes/*.yaml; do
      name=$(basename "$recipe" .yaml)
      expect 0 run 1 recipes "$name"
      cp out.txt "$name.yaml"
      cmp -s "$name.yaml" "$recipe" || fail "the program has another $name"
      read -r -a where <<<"$(sed -n 's/^# Plan: //p' "$recipe")"
      expect 0 run 1 plan "$name.yaml" "${where[@]}"
    done
    expect 0 run 1 recipes
    [[ $(grep -c ' assumes: ' out.txt) -eq $(find "$source_dir/configs/recipes" -name '*.yaml' | wc -l) ]] || fail "$(cat out.txt)"
    expect 64 run 1 recipes one-nod
    grep -q "there is no recipe 'one-nod'; did you mean 'one-node'" err.txt || fail "$(cat err.txt)"
    # All of the configurations of models of others are in the list.
    [[ $(grep -l 'model_name: models/' "$source_dir"/configs/*.yaml | wc -l) -eq $planned ]] || fail "$planned are planned"
    ;;
  *) fail "unknown case" ;;
esac
