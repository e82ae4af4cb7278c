// Which chunks of a stage share a pool of stashes.
#include <vector>

#include "apps/plan/pipeline.h"
#include "precision/recipe.h"
#include "tests/catch.h"
#include "tests/model/tiny_model.h"

using namespace nrl;

namespace {

struct Case {
  model::ModelSpec spec = {};
  model::ModelLayout layout = {};
  precision::Recipe recipe = precision::float32;
  std::vector<model::RecomputeRule> recompute = std::vector<model::RecomputeRule>(8);
  std::vector<model::OffloadRule> offload = std::vector<model::OffloadRule>(8);

  std::vector<int> pools() const {
    return plan::stash_pools(spec, layout, model::make_parameters(spec, layout), recipe, recompute, offload);
  }
};

/// Eight blocks in two stages of four chunks of one, seen from the second stage: blocks 1, 3, 5, 7.
Case eight_blocks() {
  Case c{.spec = test::tiny_spec(R"({"model_type":"llama","vocab_size":64,"hidden_size":16,
                                     "intermediate_size":24,"num_hidden_layers":8,"num_attention_heads":2,
                                     "max_position_embeddings":64})",
                                 {})};
  c.layout.stages = 2;
  c.layout.stage = 1;
  c.layout.chunks = 4;
  return c;
}

}  // namespace

TEST_CASE("chunks share a pool if their blocks have the same slots and policies", "[plan]") {
  CHECK(eight_blocks().pools() == std::vector{0, 0, 0, 0});
  SECTION("recomputed") {
    Case c = eight_blocks();
    c.recompute[3].modules = {"norm"};
    c.recompute[4].modules = {"norm"};  // of the first stage
    CHECK(c.pools() == std::vector{0, 1, 0, 0});
    c.recompute[7] = c.recompute[3];
    CHECK(c.pools() == std::vector{0, 1, 0, 1});
  }
  SECTION("offloaded") {
    Case c = eight_blocks();
    c.offload[1].all = true;
    CHECK(c.pools() == std::vector{0, 1, 1, 1});
  }
  SECTION("numbers of blocks") {
    Case c = eight_blocks();
    c.layout.split.chunks = {0, 1, 1, 2, 1, 1, 1, 1};
    CHECK(c.pools() == std::vector{0, 1, 0, 0});
  }
  SECTION("experts") {
    Case c = eight_blocks();
    c.spec = test::tiny_spec(R"({"model_type":"qwen3_moe","vocab_size":64,"hidden_size":16,
                                 "intermediate_size":24,"num_hidden_layers":8,"num_attention_heads":2,
                                 "num_key_value_heads":2,"head_dim":8,"max_position_embeddings":64,
                                 "num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":8,
                                 "norm_topk_prob":true,"mlp_only_layers":[1,2]})",
                             {});
    CHECK(c.pools() == std::vector{0, 1, 1, 1});
  }
}
