#pragma once
// Determines the end-of-document token of a run's data.

#include "apps/data/sample.h"
#include "core/config/config.h"

namespace nrl::train {

/// The rules of data.reset_position_ids, reset_attention_mask and eod_mask_loss. The end token is the one
/// that `nrl-train prepare` recorded in PREFIX.dataset.json, else that of policy.tokenizer.name or
/// policy.model_name. Missing files are ignored. Throws Error (`config`) if a rule is on and the data has no
/// end token, or different ones.
data::DocumentRules document_rules(const Config& config);

}  // namespace nrl::train
