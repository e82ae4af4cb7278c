// Examples in the help texts of the subcommands.

#include <utility>

#include "apps/nrl-train/commands.h"

namespace nrl::app {

std::string_view examples_of(std::string_view command) {
  static constexpr std::pair<std::string_view, std::string_view> examples[] = {
      {"train",
       "  nrl-train configs/quickstart.yaml\n"
       "  nrl-train configs/quickstart.yaml policy.optimizer.lr=1e-3 pretrain.max_num_steps=200\n"
       "  mpirun -n 8 nrl-train configs/gpt2-124m.yaml distributed.shard_strategy=optim"},
      {"plan",
       "  nrl-train plan configs/gpt2-124m.yaml --world 8\n"
       "  nrl-train plan configs/gpt2-124m.yaml --device h100 --buffers\n"
       "  nrl-train plan configs/gpt2-124m.yaml --world 8 --device h100 --search 5"},
      {"verify",
       "  mpirun -n 2 nrl-train verify configs/quickstart.yaml distributed.shard_strategy=optim\n"
       "  mpirun -n 4 nrl-train verify configs/gpt2-124m.yaml --layouts auto --random-tokens\n"
       "  mpirun -n 4 nrl-train verify configs/gpt2-124m.yaml --layouts auto --sample 60 --undisturbed 4"},
      {"prepare",
       "  nrl-train prepare --input book.txt --tokenizer bytes --output data/book\n"
       "  nrl-train prepare --input docs/ --tokenizer train-sentencepiece:8192 --output data/docs\n"
       "  nrl-train prepare --input web.jsonl --tokenizer hf:gpt2/tokenizer.json --output data/web"},
      {"data", "  nrl-train data show configs/quickstart.yaml --steps 1:3"},
      {"data show",
       "  nrl-train data show configs/quickstart.yaml --steps 1:3\n"
       "  nrl-train data show configs/quickstart.yaml --steps 500:501 --json\n"
       "  nrl-train data show configs/quickstart.yaml --split validation --steps 1:2"},
      {"generate",
       "  nrl-train generate results/quickstart/checkpoints --prompt \"Once upon a time\"\n"
       "  nrl-train generate results/quickstart/checkpoints/step-500 --prompt \"Once\" --temperature 0\n"
       "  nrl-train generate ~/models/Llama-3.2-1B --prompt \"The sky is\" --top-p 0.9 --seed 7"},
      {"eval",
       "  nrl-train eval results/quickstart/checkpoints --data data/book\n"
       "  mpirun -n 4 nrl-train eval ~/models/Llama-3.2-1B --data data/book data/web --max-tokens 100000"},
      {"report",
       "  nrl-train report results/quickstart/logs\n"
       "  nrl-train report results/first/logs results/second/logs --html compare.html"},
      {"explain",
       "  nrl-train explain policy.optimizer.lr\n"
       "  nrl-train explain learning_rate          the name in another program, or a word to search for\n"
       "  nrl-train explain policy.scheduler       all keys of a section"},
      {"checkpoint", "  nrl-train checkpoint verify results/quickstart/checkpoints"},
      {"checkpoint verify",
       "  nrl-train checkpoint verify results/quickstart/checkpoints\n"
       "  nrl-train checkpoint verify results/quickstart/checkpoints/step-500"},
      {"tune",
       "  nrl-train tune batch-size configs/quickstart.yaml\n"
       "  mpirun -n 4 nrl-train tune batch-size configs/gpt2-124m.yaml --max-memory 0.5"},
      {"tune batch-size",
       "  nrl-train tune batch-size configs/quickstart.yaml\n"
       "  nrl-train tune batch-size configs/gpt2-124m.yaml --sizes 1,2,4,8 --steps 5"},
      {"bench",
       "  nrl-train bench gemm\n"
       "  nrl-train bench step configs/quickstart.yaml --steps 50\n"
       "  mpirun -n 4 nrl-train bench comm\n"
       "  mpirun -n 4 nrl-train bench comm configs/quickstart.yaml distributed.tensor_parallel_size=2\n"
       "  nrl-train bench compare configs/suites/claims.yaml --only recompute"},
      {"doctor", "  nrl-train doctor"},
  };
  for (const auto& [name, text] : examples)
    if (name == command) return text;
  return {};
}

}  // namespace nrl::app
