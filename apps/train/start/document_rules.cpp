#include "apps/train/start/document_rules.h"

#include <optional>
#include <string>

#include "apps/data/manifest.h"
#include "apps/state/hf_files.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"

namespace nrl::train {
namespace {

// The end token of a token file.
int32_t end_token_of(const Config& c, const std::string& prefix) {
  if (const auto manifest = data::read_manifest(prefix)) {
    if (manifest->eod) return *manifest->eod;
    fail(Exit::config,
         "the documents of {} have no end token: it was prepared with --no-append-eod. Fix: prepare it "
         "without this option, or set data.reset_position_ids, data.reset_attention_mask and "
         "data.eod_mask_loss to false",
         clipped(prefix));
  }
  const auto tokenizer = tokenizer_of_run(c);
  const auto end = tokenizer ? tokenizer->eos() : std::nullopt;
  if (!end)
    fail(Exit::config,
         "the end-of-document token of {0} is unknown: {1}. Fix: set policy.tokenizer.name to its tokenizer",
         clipped(prefix),
         tokenizer
             ? "the run's tokenizer has no end token"
             : fmt::format("there is no {}.dataset.json, and no tokenizer is configured", clipped(prefix)));
  return *end;
}

}  // namespace

data::DocumentRules document_rules(const Config& c) {
  data::DocumentRules rules{.reset_position_ids = c.data.reset_position_ids,
                            .reset_attention_mask = c.data.reset_attention_mask,
                            .eod_mask_loss = c.data.eod_mask_loss};
  if (!rules.any()) return rules;
  std::string first;
  for (const DatasetConfig* set : {&c.data.train, &c.data.validation})
    for (const std::string& prefix : set->data_path) {
      if (!path_exists(prefix + ".idx")) continue;
      const int32_t end = end_token_of(c, prefix);
      if (first.empty()) {
        first = prefix;
        rules.end_token = end;
      } else if (end != rules.end_token) {
        fail(Exit::config,
             "documents end with token {} in {}, but with token {} in {}. Fix: use data from one tokenizer",
             rules.end_token, clipped(first), end, clipped(prefix));
      }
    }
  return rules;
}

}  // namespace nrl::train
