// The comparison of verify: layouts divided by hand over ranks, with values spoiled one at a time.
#include "apps/verify/compare.h"

#include <cmath>

#include "apps/model/families/hf_config.h"
#include "apps/verify/limits.h"
#include "core/base/philox.h"
#include "tests/catch.h"
#include "tests/comm/world_fixture.h"
#include "tests/model/tiny_model.h"

using namespace nrl;
using namespace nrl::test;
using namespace nrl::verify;

namespace {

// The values of a rank's parameters: element e of logical tensor t is a function of both.
class Rank {
 public:
  Rank(const model::ModelSpec& spec, const model::ModelLayout& layout)
      : parameters_(model::make_parameters(spec, layout)) {
    held_.parameters = &parameters_;
    held_.exec = &exec_;
    memory_.reserve(parameters_.all.size());
    for (size_t p = 0; p < parameters_.all.size(); ++p) {
      const model::Parameter& parameter = parameters_.all[p];
      std::vector<float>& values = memory_.emplace_back(static_cast<size_t>(parameter.numel()));
      for (const model::Part& part : parameter.parts)
        for (int64_t i = 0; i < part.numel(); ++i)
          values[part.offset + i] = value(part.name, part.element(i));
      // In two pieces, as shards are; a copy of tensor-parallel ranks is counted on the first.
      const int64_t half = parameter.numel() / 3;
      const bool counted = parameter.copies == model::Copies::none || layout.tensor_rank == 0;
      const bool partial = parameter.group == model::group_name::tensor_partial;
      for (const auto& [begin, end] : {std::pair(int64_t{0}, half), std::pair(half, parameter.numel())})
        held_.all.push_back({.parameter = static_cast<int>(p),
                             .offset = begin,
                             .values = make_tensor(values.data() + begin, DType::f32, {end - begin}),
                             .counted = counted && (!partial || layout.tensor_rank == 0)});
    }
  }
  Rank(const Rank&) = delete;

  static float value(const std::string& name, int64_t element) {
    return 0.01f * static_cast<float>((name_hash(name) + static_cast<uint64_t>(element) * 7) % 97 + 1);
  }
  // The place of an element of a logical tensor; null if this rank does not hold it.
  float* find(const std::string& name, int64_t element) {
    for (size_t p = 0; p < parameters_.all.size(); ++p)
      for (const model::Part& part : parameters_.all[p].parts)
        for (int64_t i = 0; part.name == name && i < part.numel(); ++i)
          if (part.element(i) == element) return &memory_[p][part.offset + i];
    return nullptr;
  }
  HeldTensors& held() { return held_; }
  const model::ParameterList& parameters() const { return parameters_; }

 private:
  model::ParameterList parameters_;
  ops::Exec exec_;
  std::vector<std::vector<float>> memory_;
  HeldTensors held_;
};

// Every rank's layout: tensor-parallel, pipeline stages, or copies.
std::vector<model::ModelLayout> layouts(int rank, int ranks) {
  std::vector<model::ModelLayout> out;
  for (const bool sequence : {false, true})
    out.push_back({.tensor = ranks, .tensor_rank = rank, .sequence_parallel = sequence});
  out.push_back({.stages = ranks, .stage = rank});
  return out;
}

}  // namespace

TEST_CASE("verify names the tensor and the rank of a spoiled element in every layout") {
  comm::Communicator& world = test_world().comm();
  const int rank = world.rank(), ranks = world.size();
  for (const auto& [family, config] : tiny_configs()) {
    const model::ModelSpec spec = model::parse_model_config(config, "test");
    if (ranks > 1 &&
        (spec.heads % ranks || spec.kv_heads % ranks || spec.ffn % ranks || spec.layers < ranks || spec.tied))
      continue;
    if (spec.expert_layers() > 0) continue;  // not divided over tensor-parallel ranks
    CAPTURE(family);
    Rank whole(spec, {});
    HeldTensors* reference = rank == 0 ? &whole.held() : nullptr;
    for (const model::ModelLayout& layout : layouts(rank, ranks)) {
      Rank own(spec, layout);
      for (const Difference& d : compare(world, whole.parameters(), reference, own.held())) {
        CAPTURE(d.name);
        REQUIRE(d.unequal == 0);
        REQUIRE(d.norm == 0);
        REQUIRE(d.rank == -1);
        REQUIRE(d.counted == d.numel);
        double squares = 0;
        for (int64_t e = 0; e < d.numel; ++e) squares += std::pow(Rank::value(d.name, e), 2);
        REQUIRE(d.reference_norm == Approx(std::sqrt(squares)));
      }
      // The last element that any rank holds of each tensor, on its last holder.
      for (const model::Parameter& parameter : whole.parameters().all)
        for (const model::Part& part : parameter.parts) {
          const int64_t element = part.element(part.numel() - 1);
          float* place = own.find(part.name, element);
          double holder = place ? rank : -1;
          world.all_reduce(std::span(&holder, 1), comm::Reduce::max);
          REQUIRE(holder >= 0);
          const bool mine = static_cast<int>(holder) == rank;
          const float before = mine ? *place : 0;
          if (mine) *place += 0.5f;
          CAPTURE(part.name);
          for (const Difference& d : compare(world, whole.parameters(), reference, own.held())) {
            CAPTURE(d.name);
            REQUIRE(d.unequal == (d.name == part.name ? 1 : 0));
            REQUIRE(d.norm == Approx(d.name == part.name ? 0.5 : 0).margin(1e-6));
            REQUIRE(d.rank == (d.name == part.name ? static_cast<int>(holder) : -1));
          }
          if (mine) *place = NAN;
          for (const Difference& d : compare(world, whole.parameters(), reference, own.held()))
            REQUIRE(std::isnan(d.norm) == (d.name == part.name));
          if (mine) *place = before;
        }
      // Elements that no rank counts, or two.
      if (rank == 0) own.held().all.back().counted ^= true;
      int wrong = 0;
      for (const Difference& d : compare(world, whole.parameters(), reference, own.held()))
        wrong += d.counted != d.numel;
      REQUIRE(wrong == 1);
    }
  }
}

TEST_CASE("a tensor whose gradient is zero does not fail on rounding errors, others do on 1e-5") {
  std::vector<Difference> all(2);
  all[0].numel = all[1].numel = 100;
  all[0].reference_norm = 10;
  all[0].norm = 2e-4;
  all[1].reference_norm = 1e-7;  // such as the bias of keys
  all[1].norm = 1e-7;
  const std::vector<double> errors = gradient_errors(all);
  const Limits limits = limits_for(precision::float32, false, DType::f32);
  REQUIRE(errors[0] == Approx(2e-5));
  REQUIRE(errors[0] > limits.gradient);
  REQUIRE(errors[1] < limits.gradient);
  all[1].norm = 1e-4;  // of a typical gradient of 0.7
  REQUIRE(gradient_errors(all)[1] > limits.gradient);
  // An update that is missing: a norm's weight, and a bias.
  all[0] = {.name = "norm", .numel = 100, .norm = learning_rate * 10 * 0.01, .reference_norm = 10};
  all[1] = {.name = "bias", .numel = 100, .norm = learning_rate * 10 * 0.01, .reference_norm = 0};
  for (const double error : weight_errors(all)) REQUIRE(error > limits.weight);
}

TEST_CASE("tokens may choose other experts from the third step on if gradients are rounded, not before") {
  const auto limits = [](DType wire, bool experts, int64_t updates) {
    return limits_for(precision::float32, false, wire, experts, updates);
  };
  const Limits strict = limits(DType::bf16, false, 8);
  REQUIRE(limits(DType::bf16, true, 1).loss == strict.loss);
  REQUIRE(limits(DType::bf16, true, 2).loss > strict.loss);
  REQUIRE(limits(DType::bf16, true, 2).gradient > strict.gradient);
  REQUIRE(limits(DType::f32, true, 8).loss == limits(DType::f32, false, 1).loss);
  // Gradients that are rounded in each microbatch make other weights at once, and differ by more of them.
  const auto kept = [](bool experts, int64_t updates, int64_t microbatches) {
    return limits_for(precision::float32.with_optimizer({.main_gradients = DType::bf16}), false, DType::f32,
                      experts, updates, microbatches);
  };
  REQUIRE(kept(true, 0, 1).loss == kept(false, 8, 1).loss);
  REQUIRE(kept(true, 1, 1).loss > kept(false, 8, 1).loss);
  REQUIRE(kept(false, 1, 8).gradient == strict.gradient);
  REQUIRE(kept(false, 1, 32).gradient == 2 * strict.gradient);
}

TEST_CASE("weights without master weights differ by more, and by more after more updates") {
  const auto limits = [](bool master, int64_t updates) {
    return limits_for(precision::bfloat16.with_optimizer({.master = master}), false, DType::f32, false,
                      updates);
  };
  REQUIRE(limits(true, 8).weight == limits(true, 1).weight);
  REQUIRE(limits(false, 1).weight > limits(true, 1).weight);
  REQUIRE(limits(false, 4).weight == 2 * limits(false, 1).weight);
  REQUIRE(limits(false, 0).weight == limits(false, 1).weight);
}
