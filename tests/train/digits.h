#pragma once
// Runs on rollouts of prompts of a digit.

#include <fstream>
#include <string>
#include <vector>

#include "tests/train/training_run.h"

namespace nrl::test {

/// Prompts of a digit; the answer is the same digit.
class Digits : public Workbench {
 public:
  Digits() {
    for (const char* name : {"prompts", "validation"}) {
      std::ofstream file(*this / (std::string(name) + ".jsonl"));
      for (int i = 0; i < 10; ++i) file << fmt::format(R"({{"prompt": "{0}=", "answer": "{0}"}})", i) << "\n";
    }
  }

  std::vector<std::string> overrides(std::vector<std::string> more) const {
    std::vector<std::string> all{"algorithm=grpo",
                                 "policy.tokenizer={name: bytes, chat_template: none}",
                                 "policy.max_total_sequence_length=8",
                                 "policy.train_global_batch_size=12",
                                 "policy.train_micro_batch_size=3",
                                 "policy.generation.max_new_tokens=3",
                                 "grpo.num_prompts_per_step=4",
                                 "grpo.num_generations_per_prompt=3",
                                 "reward=[{type: regex, name: letter, pattern: \"[a-z]\"}, {type: contains, "
                                 "name: digit, weight: 2}]",
                                 "data.train={data_path: " + (*this / "prompts.jsonl") + ", format: prompts}",
                                 "loop.max_num_steps=4"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  Finished learn(const std::string& name, std::vector<std::string> more = {}) const {
    return run(name, overrides(std::move(more)));
  }
  Rows samples(const std::string& name) const {
    return json_lines(read(name + "/logs/samples.jsonl"), "samples.jsonl");
  }
};

}  // namespace nrl::test
