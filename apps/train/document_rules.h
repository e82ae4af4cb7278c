#pragma once
// Which token ends the documents of a run's data.

#include "apps/data/sample.h"
#include "core/config/config.h"

namespace nrl::train {

/// The rules of data.reset_position_ids, reset_attention_mask and eod_mask_loss. The end token is the one
/// that `nrl-train prepare` recorded beside the token files; files of other programs end documents with that
/// of policy.tokenizer.name or of policy.model_name. Files that are not there are passed over. Throws Error
/// (`config`) where a rule is on and the data has no end token, or several.
data::DocumentRules document_rules(const Config& config);

}  // namespace nrl::train
