#include "apps/verify/random_tokens.h"

#include "apps/train/start/document_rules.h"
#include "apps/train/state/model_source.h"
#include "core/base/error.h"
#include "core/base/philox.h"

namespace nrl::verify {

void RandomTokens::read(int64_t i, std::span<int32_t> out) const {
  const PhiloxStream stream(seed_, "random tokens");
  const auto blocks = static_cast<uint64_t>(sequence_length_ + 1);
  for (size_t t = 0; t < out.size(); ++t) {
    const PhiloxBlock draw = stream.block(static_cast<uint64_t>(i) * blocks + t);
    const bool ends = documents().end_token >= 0 && draw[1] % 16 == 0;
    out[t] =
        ends ? documents().end_token : static_cast<int32_t>(draw[0] % static_cast<uint64_t>(vocab_size_));
  }
}

std::string RandomTokens::describe() const {
  return fmt::format("random tokens, seed {}", seed_);
}

std::unique_ptr<data::TokenDataset> random_tokens(const ConfigResult& config, int64_t steps) {
  const Config& c = config.config;
  const int64_t vocabulary = train::load_model_spec(config).vocab_size;
  data::DocumentRules rules = train::document_rules(c);
  if (rules.any()) rules.end_token = static_cast<int32_t>(vocabulary - 1);
  return std::make_unique<RandomTokens>(rules, steps * c.policy.train_global_batch_size,
                                        c.policy.max_total_sequence_length, vocabulary,
                                        static_cast<uint64_t>(resolved_loop(c).seed));
}

}  // namespace nrl::verify
