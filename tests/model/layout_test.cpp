// The parts of all ranks of a layout: together they are the model.
#include <map>

#include "apps/model/families/hf_config.h"
#include "apps/model/spec/parameters.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::model;

namespace {

ModelSpec spec_of(const char* json) {
  return parse_model_config(json, "c");
}

const char* const models[] = {
    R"({"model_type":"gpt2","vocab_size":101,"n_embd":16,"n_layer":5,"n_head":4,"n_positions":32})",
    R"({"model_type":"llama","vocab_size":101,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":5,
        "num_attention_heads":8,"num_key_value_heads":4})",
    R"({"model_type":"qwen3","vocab_size":97,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":4,
        "num_attention_heads":4,"num_key_value_heads":4,"head_dim":8,"tie_word_embeddings":true})",
    R"({"model_type":"qwen2_moe","vocab_size":97,"hidden_size":32,"num_hidden_layers":4,"num_attention_heads":4,
        "intermediate_size":48,"num_experts":3,"num_experts_per_tok":2,"moe_intermediate_size":10,
        "shared_expert_intermediate_size":12,"mlp_only_layers":[1]})",
    R"({"model_type":"gemma3_text","vocab_size":97,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":7,
        "num_attention_heads":4,"num_key_value_heads":4,"head_dim":8})"};

/// Every rank of a layout with these sizes.
std::vector<ModelLayout> ranks_of(ModelLayout sizes) {
  std::vector<ModelLayout> out;
  for (sizes.stage = 0; sizes.stage < sizes.stages; ++sizes.stage)
    for (sizes.tensor_rank = 0; sizes.tensor_rank < sizes.tensor; ++sizes.tensor_rank) out.push_back(sizes);
  return out;
}

/// Ranks of data parallelism that split experts, and the matrices of each.
std::vector<ModelLayout> expert_ranks_of(ModelLayout sizes) {
  std::vector<ModelLayout> out;
  for (sizes.expert_rank = 0; sizes.expert_rank < sizes.expert; ++sizes.expert_rank)
    for (sizes.expert_tensor_rank = 0; sizes.expert_tensor_rank < sizes.expert_tensor;
         ++sizes.expert_tensor_rank)
      out.push_back(sizes);
  return out;
}

}  // namespace

TEST_CASE("the parameters of all ranks cover the model, and only copies overlap", "[layout]") {
  const char* model = models[GENERATE(0, 1, 2, 3, 4)];
  const int tensor = GENERATE(1, 2, 4), stages = GENERATE(1, 2), chunks = GENERATE(1, 2);
  const bool sequence_parallel = GENERATE(false, true);
  const ModelSpec spec = spec_of(model);
  const ModelLayout sizes{
      .tensor = tensor, .sequence_parallel = sequence_parallel, .stages = stages, .chunks = chunks};
  CAPTURE(model, tensor, stages, chunks, sequence_parallel);
  std::map<std::string, std::vector<int>> held;  // per element: ranks that count it
  for (const Parameter& p : make_parameters(spec).all)
    for (const Part& part : p.parts) {
      int64_t n = 1;
      for (const int64_t d : part.global) n *= d;
      held[part.name].resize(static_cast<size_t>(n));
    }
  for (const ModelLayout& rank : ranks_of(sizes)) {
    const ParameterList list = make_parameters(spec, rank);
    CHECK((list.embedding >= 0) == rank.first_stage());
    CHECK((list.head >= 0) == rank.last_stage());
    REQUIRE(static_cast<int64_t>(list.layers.size()) == spec.layers);
    for (int l = 0; l < spec.layers; ++l)
      CHECK((list.layers[l].qkv >= 0) == held_blocks(rank, spec.layers)[l]);
    for (const Parameter& p : list.all) {
      int64_t in_parts = 0;
      const bool copy = (p.copies == Copies::tp && rank.tensor_rank > 0) ||
                        (p.group == group_name::tensor_partial && rank.tensor_rank > 0) ||
                        (p.group == group_name::expert && rank.tensor_rank > 0) ||
                        (p.group == group_name::tied && rank.stage > 0);
      for (const Part& part : p.parts) {
        CHECK(part.offset == in_parts);
        in_parts += part.numel();
        auto& counts = held.at(part.name);
        for (int64_t i = 0; !copy && i < part.numel(); ++i) ++counts.at(static_cast<size_t>(part.element(i)));
      }
      CHECK(in_parts == p.numel());
    }
  }
  for (const auto& [name, counts] : held) {
    CAPTURE(name);
    CHECK(std::all_of(counts.begin(), counts.end(), [](int n) { return n == 1; }));
  }
}

TEST_CASE("the ranks of experts have each element of an expert once, and all others alike", "[layout]") {
  const auto [expert, expert_tensor] =
      GENERATE(std::pair(3, 1), std::pair(1, 2), std::pair(3, 2), std::pair(1, 5));
  CAPTURE(expert, expert_tensor);
  const ModelSpec spec = spec_of(models[3]);
  std::map<std::string, std::vector<int>> held, wanted;
  for (const Parameter& p : make_parameters(spec).all)
    for (const Part& part : p.parts) {
      const auto n = static_cast<size_t>(part.global[0] * part.width());
      held[part.name].assign(n, 0);
      wanted[part.name].assign(n, p.group == group_name::expert ? 1 : expert * expert_tensor);
    }
  for (const ModelLayout& rank : expert_ranks_of({.expert = expert, .expert_tensor = expert_tensor}))
    for (const Parameter& p : make_parameters(spec, rank).all)
      for (const Part& part : p.parts)
        for (int64_t i = 0; i < part.numel(); ++i)
          ++held.at(part.name).at(static_cast<size_t>(part.element(i)));
  for (const auto& [name, counts] : held) {
    CAPTURE(name);
    CHECK(counts == wanted.at(name));
  }
}

TEST_CASE("blocks are spread over the chunks of all stages in the order of the model", "[layout]") {
  const ModelLayout layout{.stages = 2, .chunks = 2};
  int next = 0;
  for (int c = 0; c < 4; ++c) {
    const BlockRange blocks = chunk_blocks(layout, 7, c);
    CHECK(blocks.begin == next);
    CHECK(blocks.end - blocks.begin >= 1);
    next = blocks.end;
  }
  CHECK(next == 7);
  CHECK(held_blocks(layout, 7)[0]);
  CHECK_FALSE(held_blocks(layout, 7)[1]);  // chunk 1 of the model is the first of stage 1
  CHECK(held_blocks(layout, 7)[3]);
}

TEST_CASE("blocks are spread as the split says", "[layout]") {
  const auto sizes = [](const ModelLayout& layout, int64_t layers) {
    CHECK(split_problem(layout, layers).empty());
    std::vector<int> out;
    int next = 0;
    for (int c = 0; c < layout.model_chunks(); ++c) {
      const BlockRange blocks = chunk_blocks(layout, layers, c);
      CHECK(blocks.begin == next);
      out.push_back(blocks.end - blocks.begin);
      next = blocks.end;
    }
    CHECK(next == layers);
    return out;
  };
  using Sizes = std::vector<int>;
  CHECK(sizes({.stages = 4, .split = {.chunks = {0, 3, 3, 0}}}, 6) == Sizes{0, 3, 3, 0});
  CHECK(sizes({.stages = 4, .split = {.first = 1}}, 7) == Sizes{1, 2, 2, 2});
  CHECK(sizes({.stages = 4, .split = {.first = 2, .last = 1}}, 9) == Sizes{2, 3, 3, 1});
  CHECK(sizes({.stages = 2, .chunks = 2, .split = {.last = 2}}, 8) == Sizes{3, 1, 3, 1});
  CHECK_FALSE(split_problem({.stages = 1 << 30, .chunks = 1 << 30}, 7).empty());  // without a list of chunks
  CHECK(sizes({.stages = 4, .split = {.embedding = true, .head = true}}, 10) == Sizes{2, 3, 3, 2});
  CHECK(sizes({.stages = 2, .chunks = 2, .split = {.head = true}}, 7) == Sizes{2, 2, 2, 1});
}
