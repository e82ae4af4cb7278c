#include "apps/train/loop/example_numbers.h"

#include <iterator>
#include <utility>

#include "apps/train/loop/policy_numbers.h"
#include "apps/train/loop/teacher_numbers.h"
#include "core/base/error.h"
#include "core/ops/pair_loss.h"

namespace nrl::train {
namespace {

/// ops::PairValue of the sequences of pairs.
class PairNumbers final : public data::StepNumbers {
 public:
  PairNumbers(std::shared_ptr<const data::Examples> examples,
              std::shared_ptr<const data::SequenceNumbers> reference, bool margins)
      : examples_(std::move(examples)), reference_(std::move(reference)), margins_(margins) {}

  std::vector<int64_t> widths() const override { return {}; }
  void begin_step(std::span<const int64_t> examples, const data::ExampleStep&) override {
    normalizer_ = 1 / static_cast<double>(examples.size());
  }
  void append(int64_t example, int sequence, int64_t /*rows*/, data::HostMicroBatch& batch) override {
    using V = ops::PairValue;
    double values[V::count];
    values[V::normalizer] = normalizer_;
    values[V::tokens] = static_cast<double>(examples_->length(example, sequence).loss_tokens);
    values[V::reference] = reference_ ? reference_->of(example, sequence).front() : 0;
    values[V::margin] = margins_ ? examples_->value(example, data::ExampleValue::margin) : 0;
    batch.sequence_values.insert(batch.sequence_values.end(), std::begin(values), std::end(values));
  }

 private:
  const std::shared_ptr<const data::Examples> examples_;
  const std::shared_ptr<const data::SequenceNumbers> reference_;
  const bool margins_;
  double normalizer_ = 0;
};

}  // namespace

std::shared_ptr<data::StepNumbers> example_numbers(const Config& config,
                                                   std::shared_ptr<const data::Examples> examples,
                                                   std::shared_ptr<const data::SequenceNumbers> reference,
                                                   std::shared_ptr<const data::SequenceNumbers> old) {
  switch (config.algorithm) {
    case Algorithm::pretrain:
    case Algorithm::sft:
      return nullptr;
    case Algorithm::dpo:
    case Algorithm::rm:
      return std::make_shared<PairNumbers>(std::move(examples), std::move(reference),
                                           config.algorithm == Algorithm::rm);
    case Algorithm::grpo:
      return policy_numbers(config, std::move(examples), std::move(reference), std::move(old));
    case Algorithm::distill:
      return teacher_numbers(std::move(examples), config.distillation.topk);
  }
  NRL_CHECK(false);
}

}  // namespace nrl::train
