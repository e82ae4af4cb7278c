// The first tensor that is not finite: faults that are planted in slots, weights and gradients of all ranks
// are named, and the search changes nothing.
#include "apps/engine/nan_search.h"

#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "apps/model/decoder.h"
#include "core/base/philox.h"
#include "core/io/json.h"
#include "tests/engine/layouts.h"

using namespace nrl;
using namespace nrl::test;
using engine::BadTensor;

namespace {

using Keys = std::vector<std::string>;

/// The engine of a rank with steps of its own data.
class Rank {
 public:
  explicit Rank(const Keys& keys, const std::string& model = small_llama)
      : config_(tiny_config(
            "cpu",
            [&] {
              Keys all{"policy.train_global_batch_size=8", "policy.train_micro_batch_size=1"};
              all.insert(all.end(), keys.begin(), keys.end());
              return all;
            }(),
            model)),
        placement_(test_world(), config_),
        engine_(make_engine(placement_, config_)) {}

  engine::StepResult step(int64_t number) {
    const BatchPlan& batch = engine_->plan().batch;
    for (int64_t m = 0; m < batch.accumulation; ++m)
      engine_->fill(m, random_batch(engine_->plan().sequence_length, static_cast<uint64_t>(number * 100 + m)),
                    m);
    engine_->step({.number = number, .learning_rate = 1e-2, .loss_tokens = batch.tokens_per_step},
                  engine_->objective());
    return engine_->collect();
  }
  model::Decoder& decoder() { return *engine_->plan().decoder; }
  engine::Engine& engine() { return *engine_; }

  /// The first finding over all ranks, and its rank.
  struct Named {
    BadTensor bad;
    int rank = -1;
    int ranks = 0;  // that found the same
  };
  Named search(const std::optional<BadTensor>& own) {
    const std::vector<std::string> texts =
        test_world().comm().gather_texts(own ? to_json(*own).dump() : std::string());
    Named out;
    for (size_t r = 0; r < texts.size(); ++r) {
      if (texts[r].empty()) continue;
      const BadTensor bad = engine::bad_tensor_from(parse_json(texts[r], "rank"));
      if (out.rank >= 0 && bad.order == out.bad.order) ++out.ranks;
      if (out.rank >= 0 && bad.order >= out.bad.order) continue;
      out = {bad, static_cast<int>(r), 1};
    }
    return out;
  }
  Named search() { return search(engine::find_bad_tensor(*engine_, engine_->objective(), NanCheck::all)); }

  /// The bits of everything that a step leaves for the next one.
  std::vector<char> state() {
    engine_->finish_gathers();
    std::vector<char> out;
    const auto add = [&](const Tensor& t) {
      if (!t) return;
      const std::vector<char> bytes = bytes_of(*engine_, t);
      out.insert(out.end(), bytes.begin(), bytes.end());
    };
    for (const engine::GroupTensors& t : engine_->groups()) {
      add(t.weights);
      add(t.codes);
      add(t.errors);
      add(t.sum_errors);
      for (const Tensor& s : t.state) add(s);
      for (const Tensor& s : t.scales) add(s);
      for (const parallel::ElementRange& r : t.group->zeroed)
        if (!t.group->gradient_buckets) add(t.gradients.rows(r.begin, r.size()));
    }
    const model::DelayedScales& delayed = decoder().fp8().delayed();
    for (const Tensor& t : {delayed.scale, delayed.amax, decoder().fp8().kept().scale}) add(t);
    return out;
  }

 private:
  ConfigResult config_;
  train::Placement placement_;
  std::unique_ptr<engine::Engine> engine_;
};

/// A slot of a layer, in a pass over a microbatch.
struct Place {
  std::string slot;
  int microbatch = 0;
  bool backward = false;
  int step = 0;  // of the layer
  auto operator<=>(const Place&) const = default;
};

bool checked(const model::StepResults& r, const model::SlotValue& v, Rank& rank) {
  const int rows = rank.decoder().all_layers().spec(v.slot).rows;
  return engine::numbers_of(rank.engine().exec(), v.value) && v.value.numel() > 0 &&
         (rows == model::token_rows || rows == model::sequence_rows) &&
         (r.step.kind == program::StepKind::compute);
}

void set_first(Rank& rank, const Tensor& t, bool infinite) {
  const uint32_t bits = infinite ? 0x7f800000 : 0x7fc00000;
  const uint16_t half = static_cast<uint16_t>(bits >> 16);
  const Tensor first = make_tensor(t.data, t.dtype, {1}, t.device);
  if (t.dtype == DType::f32)
    ops::upload(rank.engine().exec(), first, &bits);
  else
    ops::upload(rank.engine().exec(), first, &half);
}

bool is_at(const model::StepResults& r, const model::SlotValue& v, Rank& rank, const Place& at) {
  return r.mode == memory::training && checked(r, v, rank) &&
         Place{rank.decoder().all_layers().name(v.slot), r.microbatch, r.step.backward || r.step.again,
               r.step.index} == at;
}

std::string text_of(const Place& at) {
  return fmt::format("{}, microbatch {}, {}, step {}", at.slot, at.microbatch,
                     at.backward ? "backward" : "forward", at.step);
}
std::string text_of(const BadTensor& b) {
  return fmt::format("{}, microbatch {}, {}, step {}", b.name, b.microbatch, b.pass, b.order[4]);
}

/// Plants 20 values, one after the other, on the ranks in turn. Returns how many are named.
int named_of_20(const Keys& keys, const std::string& model, uint64_t seed) {
  CAPTURE(keys, model);
  const int n = test_world().size(), me = test_world().rank();
  Rank rank(keys, model);
  REQUIRE(!rank.step(1).skipped);
  // All places of this rank, in a step without faults: there are no values that are not finite.
  std::set<Place> places;
  rank.decoder().watch_results([&](const model::StepResults& r) {
    for (const model::SlotValue& v : r.written)
      if (checked(r, v, rank))
        places.insert({rank.decoder().all_layers().name(v.slot), r.microbatch,
                       r.step.backward || r.step.again, r.step.index});
  });
  REQUIRE(!rank.step(2).skipped);
  rank.decoder().watch_results({});
  REQUIRE(places.size() > 50);
  CHECK(rank.search().rank == -1);
  const std::vector<Place> all(places.begin(), places.end());

  int named = 0, planted = 0;
  const PhiloxStream random(seed, "places");
  for (int64_t k = 0; planted < 20; ++k) {
    REQUIRE(k < 200);
    const int of = static_cast<int>(k) % n;
    const Place at = all[random.bits(static_cast<uint64_t>(k)) % all.size()];
    std::string text = me == of ? text_of(at) : std::string();
    test_world().comm().broadcast_text(text, of);
    if (me == of)
      rank.decoder().watch_results([&](const model::StepResults& r) {
        for (const model::SlotValue& v : r.written)
          if (is_at(r, v, rank, at)) set_first(rank, v.value, k % 2 == 1);
      });
    // No operation may read the value, or one may make an infinity finite.
    if (rank.step(3 + k).skipped) {
      ++planted;
      const std::vector<char> before = rank.state();
      const Rank::Named found = rank.search();
      CHECK(rank.state() == before);
      INFO("rank " << of << ": " << text << "; found on rank " << found.rank << ": " << text_of(found.bad));
      CHECK(found.rank == of);
      CHECK(found.ranks == 1);
      CHECK(text_of(found.bad) == text);
      CHECK(found.bad.bad_input.empty());
      named += found.rank == of && found.ranks == 1 && text_of(found.bad) == text ? 1 : 0;
    }
    rank.decoder().watch_results({});
  }
  return named;
}

}  // namespace

TEST_CASE("20 of 20 planted values are named, and the search keeps all bits") {
  const int n = test_world().size();
  const std::string pp = "distributed.pipeline_parallel_size=2", tp = "distributed.tensor_parallel_size=2";
  if (n == 1) {
    CHECK(named_of_20({"policy.recompute.granularity=full"}, small_llama, 1) == 20);
    CHECK(named_of_20({"policy.precision=bfloat16"}, small_gpt2, 2) == 20);
    CHECK(named_of_20({"policy.precision=float32"}, small_qwen2_moe, 3) == 20);
    CHECK(named_of_20({"device=cuda"}, small_llama, 10) == 20);
  } else if (n == 2) {
    CHECK(named_of_20({pp}, small_llama, 4) == 20);
    CHECK(named_of_20({tp, "distributed.sequence_parallel=true"}, small_llama, 5) == 20);
    CHECK(named_of_20({"distributed.shard_strategy=optim"}, small_qwen3, 6) == 20);
    CHECK(named_of_20({"distributed.shard_strategy=optim_grads_params"}, small_llama, 7) == 20);
    CHECK(named_of_20({"device=cuda", tp, "distributed.sequence_parallel=true"}, small_llama, 11) == 20);
  } else {
    CHECK(named_of_20({pp, tp}, small_llama, 8) == 20);
    CHECK(named_of_20({pp, "distributed.virtual_pipeline_size=2", "policy.model.num_hidden_layers=4"},
                      small_llama, 9) == 20);
  }
}

TEST_CASE("weights and gradients that are not finite are named") {
  const int n = test_world().size(), me = test_world().rank();
  if (n > 2) return;
  Rank rank(n == 2 ? Keys{"distributed.shard_strategy=optim_grads_params", "distributed.bucket_size_mb=0.01"}
                   : Keys{});
  REQUIRE(!rank.step(1).skipped);
  CHECK(rank.search(engine::find_bad_weight(rank.engine())).rank == -1);
  // The last rank that has any: shards of such a small model may be empty.
  const std::vector<engine::WeightSlice> slices = rank.engine().weight_slices();
  const auto counts = test_world().comm().gather_texts(std::to_string(slices.size()));
  const int of = counts.back() == "0" ? 0 : n - 1;
  std::string name = me == of ? "the weights " + slices.front().part.name : std::string();
  test_world().comm().broadcast_text(name, of);
  float kept = 0;
  if (me == of) {
    std::memcpy(&kept, slices.front().values.data, 4);
    set_first(rank, slices.front().values, false);
  }
  const Rank::Named found = rank.search(engine::find_bad_weight(rank.engine()));
  CHECK(found.rank == of);
  CHECK(found.bad.name == name);
  CHECK(found.bad.bad == 1);
  if (me == of) std::memcpy(slices.front().values.data, &kept, 4);

  // The gradients of all parameters are looked at.
  engine::TensorNumbers sum{};
  REQUIRE(!rank.step(2).skipped);
  rank.engine().inspect(rank.engine().objective(), {.gradient = [&](int, const Tensor& gradient) {
                          const auto numbers = engine::numbers_of(gradient);
                          REQUIRE(numbers);
                          CHECK(numbers->bad == 0);
                          sum.count += numbers->count;
                        }});
  CHECK(sum.count > 0);
}

TEST_CASE("a run goes on after the search with the bits that it has without") {
  const int n = test_world().size();
  if (n > 2) return;
  const std::string wide =
      "{model_type: llama, vocab_size: 61, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
      "num_attention_heads: 4, num_key_value_heads: 4, head_dim: 16, max_position_embeddings: 64}";
  const Keys delayed{"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_recipe=delayed",
                     "policy.fp8_cfg.fp8_amax_history_len=2", "policy.max_total_sequence_length=16"};
  std::vector<std::pair<Keys, std::string>> setups{
      {{"policy.precision=float16"}, small_llama},
      {{"policy.recompute.granularity=selective"}, small_qwen2_moe},
      {delayed, wide},
      {{"device=cuda", "policy.recompute.granularity=selective"}, small_qwen2_moe}};
  if (n == 2)
    setups = {{{"distributed.grad_reduce_dtype=fp8"}, small_llama},
              {{"distributed.shard_strategy=optim", "distributed.overlap_param_gather=true"}, small_gpt2},
              {{"distributed.shard_strategy=optim_grads"}, small_qwen3},
              {{"distributed.expert_parallel_size=2"}, small_qwen2_moe},
              {{"device=cuda", "distributed.shard_strategy=optim_grads_params"}, small_llama},
              {delayed, wide}};
  for (const auto& [keys, model] : setups) {
    CAPTURE(keys, model);
    std::vector<std::vector<char>> states;
    for (const bool searches : {true, false}) {
      Rank rank(keys, model);
      REQUIRE(!rank.step(1).skipped);
      int written = 0;
      rank.decoder().watch_results([&](const model::StepResults& r) {
        for (const model::SlotValue& v : r.written)
          if (r.mode == memory::training && r.microbatch == 1 && checked(r, v, rank) && ++written % 10 == 5)
            set_first(rank, v.value, false);
      });
      const engine::StepResult bad = rank.step(2);
      REQUIRE(bad.skipped);
      written = 0;
      const std::vector<char> before = rank.state();
      if (searches) {
        CHECK(rank.search().rank >= 0);
        CHECK(rank.state() == before);
      }
      rank.decoder().watch_results({});
      const engine::StepResult good = rank.step(3);
      // The error feedback of the gradients has become NaN.
      const bool poisoned = keys.front() == "distributed.grad_reduce_dtype=fp8";
      CHECK(good.skipped == poisoned);
      CHECK(good.updates == bad.updates + (poisoned ? 0 : 1));
      states.push_back(rank.state());
    }
    CHECK(states[0] == states[1]);
  }
}

TEST_CASE("numbers of tensors of every type, and what is not a finding") {
  std::vector<float> f{1, -3, INFINITY, NAN, 0, 2};
  const Tensor whole = make_tensor(f.data(), DType::f32, {2, 3});
  CHECK(engine::numbers_of(whole)->bad == 2);
  CHECK(engine::numbers_of(whole)->largest == 3);
  CHECK(engine::numbers_of(whole.columns(0, 2))->bad == 1);
  CHECK(engine::numbers_of(whole.columns(1, 1))->count == 2);
  std::vector<uint16_t> b{0x3f80, 0x7f80, 0xc040};  // 1, inf, -3 in bf16
  CHECK(engine::numbers_of(make_tensor(b.data(), DType::bf16, {3}))->bad == 1);
  CHECK(engine::numbers_of(make_tensor(b.data(), DType::bf16, {3}))->largest == 3);
  std::vector<uint16_t> h{0x3c00, 0x7c00, 0xfe00, 0x7bff, 0x0001};  // 1, inf, NaN, 65504, 2^-24 in f16
  CHECK(engine::numbers_of(make_tensor(h.data(), DType::f16, {5}))->bad == 2);
  CHECK(engine::numbers_of(make_tensor(h.data(), DType::f16, {5}))->largest == 65504);
  std::vector<int32_t> i{1};
  CHECK(!engine::numbers_of(make_tensor(i.data(), DType::i32, {1})));
}

TEST_CASE("findings are read as they were written, and nothing else is") {
  const BadTensor bad{.order = {2, 1, 1, -5, 7},
                      .name = "layer_1 act",
                      .operation = "swiglu",
                      .microbatch = 1,
                      .pass = "backward",
                      .bad = 3,
                      .count = 8,
                      .bad_input = "layer_1 gate",
                      .largest_input = 2.5};
  CHECK(engine::bad_tensor_from(parse_json(to_json(bad).dump(), "x")) == bad);
  CHECK(engine::bad_tensor_from(parse_json(to_json(BadTensor{}).dump(), "x")) == BadTensor{});
  JsonValue wrong = to_json(bad);
  wrong.set("order", JsonValue::array({1}));
  CHECK_THROWS_AS(engine::bad_tensor_from(parse_json(wrong.dump(), "x")), Error);
  CHECK_THROWS_AS(engine::bad_tensor_from(parse_json("{}", "x")), Error);
  CHECK_THROWS_AS(engine::bad_tensor_from(parse_json("[]", "x")), Error);
}
