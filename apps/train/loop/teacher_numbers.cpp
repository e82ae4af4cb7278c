#include "apps/train/loop/teacher_numbers.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "apps/model/spec/loss_rule.h"
#include "core/base/error.h"

namespace nrl::train {
namespace {

class TeacherNumbers final : public data::StepNumbers {
 public:
  TeacherNumbers(std::shared_ptr<const data::Examples> examples, int64_t topk)
      : examples_(std::move(examples)), topk_(topk), given_(examples_->columns().top_k) {
    NRL_CHECK(topk_ > 0 && given_ >= topk_, "{} ids per token, wanted {}", given_, topk_);
  }

  std::vector<int64_t> widths() const override { return {topk_, topk_}; }
  void begin_step(std::span<const int64_t>, const data::ExampleStep&) override {}
  void append(int64_t example, int /*sequence*/, int64_t rows, data::HostMicroBatch& batch) override {
    std::span<const int32_t> ids = examples_->top_ids(example);
    std::span<const float> log_probs = examples_->top_log_probs(example);
    const auto targets = std::span(batch.targets).last(static_cast<size_t>(rows));
    NRL_CHECK(ids.size() == log_probs.size() &&
              std::ssize(ids) == given_ * std::count_if(targets.begin(), targets.end(),
                                                        [](int32_t target) { return target >= 0; }));
    auto &of_ids = batch.columns[model::TeacherColumn::ids],
         &of_log_probs = batch.columns[model::TeacherColumn::log_probs];
    for (const int32_t target : targets) {
      if (target < 0) {
        of_ids.resize(of_ids.size() + static_cast<size_t>(topk_));
        of_log_probs.resize(of_ids.size());
        continue;
      }
      const auto token_ids = ids.first(static_cast<size_t>(given_));
      const auto token_log_probs = log_probs.first(static_cast<size_t>(given_));
      for (const size_t i : most_probable(token_log_probs)) {
        of_ids.push_back(token_ids[i]);
        of_log_probs.push_back(std::bit_cast<int32_t>(token_log_probs[i]));
      }
      ids = ids.subspan(token_ids.size());
      log_probs = log_probs.subspan(token_log_probs.size());
    }
  }

 private:
  /// The indices of the largest `topk_`, ascending; of equal numbers the first.
  std::span<const size_t> most_probable(std::span<const float> log_probs) {
    chosen_.resize(log_probs.size());
    std::iota(chosen_.begin(), chosen_.end(), size_t{0});
    const auto count = static_cast<size_t>(topk_);
    if (count < chosen_.size()) {
      std::nth_element(chosen_.begin(), chosen_.begin() + topk_, chosen_.end(), [&](size_t a, size_t b) {
        return log_probs[a] != log_probs[b] ? log_probs[a] > log_probs[b] : a < b;
      });
      std::sort(chosen_.begin(), chosen_.begin() + topk_);
    }
    return std::span(chosen_).first(count);
  }

  const std::shared_ptr<const data::Examples> examples_;
  const int64_t topk_, given_;  ///< ids per token: used, in the examples
  std::vector<size_t> chosen_;
};

}  // namespace

std::shared_ptr<data::StepNumbers> teacher_numbers(std::shared_ptr<const data::Examples> examples,
                                                   int64_t topk) {
  return std::make_shared<TeacherNumbers>(std::move(examples), topk);
}

}  // namespace nrl::train
