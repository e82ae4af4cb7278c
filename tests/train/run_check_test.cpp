// What a run is checked against before it is set up.

#include "apps/train/run_check.h"

#include <string>
#include <vector>

#include "core/base/text.h"
#include "core/device/cpu/memory.h"
#include "tests/catch.h"

using namespace nrl;

TEST_CASE("the ranks of a machine share its memory") {
  for (const int ranks : {1, 2, 4}) {
    ConfigResult result = load_config_text(
        "policy:\n"
        "  model: {model_type: llama, vocab_size: 272, hidden_size: 48, intermediate_size: 80,\n"
        "          num_hidden_layers: 2, num_attention_heads: 4}\n"
        "  train_global_batch_size: 2147483640\n"
        "pretrain: {max_num_steps: 10}\n"
        "data: {train: {data_path: corpus}}\n",
        "t.yaml", std::vector<std::string>{"device=cpu"});
    REQUIRE(result.ok());
    train::check_run(result, {.world = ranks, .nodes = 1, .local = ranks, .files = false});
    const std::string shown = render(result.diagnostics);
    INFO(shown);
    CHECK(result.exit_code() == Exit::out_of_memory);
    const std::string owner =
        ranks == 1 ? "this machine" : fmt::format("this machine (shared by {} ranks)", ranks);
    const uint64_t share = cpu::machine_memory() / static_cast<uint64_t>(ranks);
    CHECK(shown.find(fmt::format("but {} has {} for it", owner, human_bytes(share))) != std::string::npos);
  }
}

TEST_CASE("tensor-parallel ranks must divide the heads and the MLP") {
  const auto complaint = [](const std::string& ranks, const std::string& model) {
    ConfigResult result = load_config_text(
        "policy:\n"
        "  model: {vocab_size: 272, hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 8, " +
            model +
            "}\n"
            "  train_global_batch_size: 8\n"
            "pretrain: {max_num_steps: 10}\n"
            "data: {train: {data_path: corpus}}\n",
        "t.yaml", std::vector<std::string>{"device=cpu", "distributed.tensor_parallel_size=" + ranks});
    REQUIRE(result.ok());
    train::check_run(result, {.world = 8, .nodes = 1, .local = 8, .files = false});
    CHECK((result.exit_code() == Exit::config || result.ok()));
    return result.ok() ? "" : render(result.diagnostics);
  };
  const std::string llama = "model_type: llama, intermediate_size: 80, num_key_value_heads: 4";
  CHECK(complaint("2", llama).empty());
  CHECK(complaint("4", llama).empty());
  const std::string heads = complaint("8", llama);
  INFO(heads);
  CHECK(
      heads.find("distributed.tensor_parallel_size is 8, which does not divide the model: it has 4 key/value "
                 "heads\n") != std::string::npos);
  CHECK(heads.find("fits: 1, 2, 4\n") != std::string::npos);
  const std::string ffn = complaint("4", "model_type: llama, intermediate_size: 82, num_key_value_heads: 2");
  INFO(ffn);
  CHECK(ffn.find("it has 2 key/value heads, 82 columns of the MLP") != std::string::npos);
  CHECK(ffn.find("fits: 1, 2\n") != std::string::npos);
}
