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
