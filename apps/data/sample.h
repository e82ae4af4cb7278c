#pragma once
// A training sample as the model reads it, with separation of its documents.

#include <cstdint>
#include <span>
#include <vector>

namespace nrl::data {

/// Separation of the documents of a sample: Megatron-LM's options of the same names
/// (megatron/core/datasets/gpt_dataset.py). An end token belongs to the document before it.
struct DocumentRules {
  bool reset_position_ids = false;    ///< positions restart at 0 after every end token
  bool reset_attention_mask = false;  ///< tokens attend only to their own document
  bool eod_mask_loss = false;         ///< no loss for rows whose input is an end token
  int32_t end_token = -1;             ///< id of the end-of-document token; < 0: none
  bool any() const { return reset_position_ids || reset_attention_mask || eod_mask_loss; }
};

/// T inputs with their targets. Row t predicts targets[t] from the rows of its segment up to t.
struct Sample {
  std::vector<int32_t> ids;        ///< (T)
  std::vector<int32_t> targets;    ///< (T): the next id; < 0: no loss
  std::vector<int32_t> positions;  ///< (T)
  std::vector<int32_t> segments;   ///< first row of each segment, ascending from 0
};

/// Sets `sample` from T + 1 ids. Reuses the memory of its vectors.
void make_sample(std::span<const int32_t> ids, const DocumentRules& rules, Sample& sample);

/// The rows without a target.
std::vector<int32_t> rows_without_loss(const Sample& sample);

}  // namespace nrl::data
