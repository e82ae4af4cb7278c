// Context parallelism in whole runs: the same losses, gradient norms and weights as on one rank, for every
// way to exchange tokens.

#include "core/io/safetensors.h"
#include "tests/train/training_run.h"

using namespace nrl;
using namespace nrl::test;

namespace {

/// fp32: the order of sums differs. Four updates amplify that in weights: AdamW divides a gradient by its
/// size.
constexpr double tolerance = 1e-5, weight_tolerance = 3e-5;

class ContextBench : public Workbench {
 public:
  ContextBench() {
    model =
        "{model_type: llama, vocab_size: 272, hidden_size: 32, intermediate_size: 24, num_hidden_layers: 2, "
        "num_attention_heads: 8, num_key_value_heads: 4, max_position_embeddings: 64}";
    std::vector<int32_t> tokens = random_tokens(2000, 3);
    for (size_t i = 0; i < tokens.size(); i += 7 + tokens[i] % 16) tokens[i] = 256;
    write_tokens("documents", tokens);
  }

  /// Keys of a run on several documents per sample, kept apart.
  std::vector<std::string> packed() const {
    return {"policy.tokenizer.name=bytes", "data.train.data_path=" + *this / "documents",
            "data.reset_position_ids=true", "data.reset_attention_mask=true", "data.eod_mask_loss=true"};
  }

  void train(const std::string& name, int ranks, std::vector<std::string> keys) const {
    keys.insert(keys.begin(),
                {"policy.max_total_sequence_length=16", "data.validation.data_path=" + *this / "corpus",
                 "pretrain.val_period=4", "pretrain.val_batches=2"});
    const Finished finished =
        ranks == 1
            ? run(name, keys)
            : run_ranks(fmt::format("{} -n {} {}", NRL_MPIRUN_COMMAND, ranks, NRL_TRAIN_BINARY), name, keys);
    INFO(finished.err);
    REQUIRE(finished.code == Exit::ok);
  }

  std::vector<double> validation(const std::string& name) const {
    std::vector<double> out;
    for (const JsonValue& row : rows(name))
      if (row.contains("val_loss")) out.push_back(row.get_double("val_loss"));
    return out;
  }

  void check_same(const std::string& name, const std::string& one) const {
    for (const char* field : {"loss", "grad_norm"}) {
      INFO(field);
      const auto got = values(name, field), want = values(one, field);
      REQUIRE(want.size() == 4);
      REQUIRE(got.size() == want.size());
      for (size_t i = 0; i < want.size(); ++i) CHECK(got[i] == Approx(want[i]).epsilon(tolerance));
    }
    const auto got = validation(name), want = validation(one);
    REQUIRE(!want.empty());
    REQUIRE(got.size() == want.size());
    for (size_t i = 0; i < want.size(); ++i) CHECK(got[i] == Approx(want[i]).epsilon(tolerance));
    check_weights(name, one);
  }

 private:
  void check_weights(const std::string& name, const std::string& one) const {
    const auto file = [&](const std::string& run) {
      return SafetensorsFile(*this / (run + "/checkpoints/step-4/model.safetensors"));
    };
    const SafetensorsFile got = file(name), want = file(one);
    REQUIRE(got.tensors().size() == want.tensors().size());
    for (const TensorInfo& tensor : want.tensors()) {
      INFO(tensor.name);
      const auto values = [&](const SafetensorsFile& from) {
        const TensorInfo& info = from.at(tensor.name);
        std::vector<float> out(static_cast<size_t>(info.elements()));
        from.read(info, out.data(), out.size() * sizeof(float));
        return out;
      };
      const std::vector<float> a = values(got), b = values(want);
      REQUIRE(a.size() == b.size());
      double error = 0, norm = 0;
      for (size_t i = 0; i < b.size(); ++i) {
        error += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
        norm += std::pow(static_cast<double>(b[i]), 2);
      }
      CHECK(std::sqrt(error) <= weight_tolerance * std::sqrt(norm));
    }
  }
};

struct Layout {
  int size;
  const char* type;
  std::vector<std::string> more = {};
};

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all = {
      {2, "p2p"},
      {2, "all_gather"},
      {2, "a2a"},
      {4, "p2p"},
      {4, "all_gather"},
      {4, "a2a"},
      {4, "a2a+p2p", {"distributed.hierarchical_context_parallel_sizes=[2,2]"}},
      {4, "[a2a+p2p,all_gather]", {"distributed.hierarchical_context_parallel_sizes=[2,2]"}},
      {2, "p2p", {"policy.recompute.granularity=selective"}},
      {2, "p2p", {"policy.checkpoint_every=2"}},
      {2, "all_gather", {"policy.gradient_checkpointing=true"}},
      {4, "a2a", {"policy.recompute.modules=[core_attn]"}},
  };
  return all;
}

void check_layouts(const ContextBench& bench, const std::vector<std::string>& keys) {
  bench.train("one", 1, keys);
  int number = 0;
  for (const Layout& layout : layouts()) {
    CAPTURE(layout.size, layout.type, layout.more);
    std::vector<std::string> all = keys;
    all.push_back(fmt::format("distributed.context_parallel_size={}", layout.size));
    all.push_back(fmt::format("distributed.cp_comm_type={}", layout.type));
    all.insert(all.end(), layout.more.begin(), layout.more.end());
    const std::string name = fmt::format("run{}", ++number);
    bench.train(name, layout.size, all);
    bench.check_same(name, "one");
  }
}

}  // namespace

TEST_CASE("ranks that split samples train as one rank") {
  check_layouts(ContextBench(), {});
}

TEST_CASE("ranks that split samples of several documents train as one rank") {
  const ContextBench bench;
  check_layouts(bench, bench.packed());
}

TEST_CASE("ranks that split samples, of data-parallel replicas with sharded optimizer state") {
  const ContextBench bench;
  bench.train("one", 1, bench.packed());
  for (const char* type : {"p2p", "a2a"}) {
    CAPTURE(type);
    std::vector<std::string> keys = bench.packed();
    keys.insert(keys.end(),
                {"distributed.context_parallel_size=2", fmt::format("distributed.cp_comm_type={}", type),
                 "distributed.shard_strategy=optim"});
    bench.train(type, 4, keys);
    bench.check_same(type, "one");
  }
}

TEST_CASE("a window needs the exchanges that have all keys of a query at once") {
  const ContextBench bench;
  const std::vector<std::string> window = {
      "policy.model={model_type: mistral, vocab_size: 272, hidden_size: 32, intermediate_size: 24, "
      "num_hidden_layers: 2, num_attention_heads: 8, num_key_value_heads: 4, max_position_embeddings: 64, "
      "sliding_window: 5}"};
  bench.train("one", 1, window);
  for (const char* type : {"all_gather", "a2a"}) {
    CAPTURE(type);
    std::vector<std::string> keys = window;
    keys.insert(keys.end(),
                {"distributed.context_parallel_size=2", fmt::format("distributed.cp_comm_type={}", type)});
    bench.train(type, 2, keys);
    bench.check_same(type, "one");
  }
}
