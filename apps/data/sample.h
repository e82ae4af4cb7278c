#pragma once
// A training sample as the model reads it, and what keeps the documents in it apart.

#include <cstdint>
#include <span>
#include <vector>

namespace nrl::data {

/// How the documents of a sample are kept apart: Megatron-LM's options of the same names
/// (megatron/core/datasets/gpt_dataset.py). An end token belongs to the document before it.
struct DocumentRules {
  bool reset_position_ids = false;    ///< positions start at 0 behind every end token
  bool reset_attention_mask = false;  ///< a token sees its own document only
  bool eod_mask_loss = false;         ///< no loss where the input is an end token
  int32_t end_token = -1;             ///< the id that ends a document; < 0: there is none
  bool any() const { return reset_position_ids || reset_attention_mask || eod_mask_loss; }
};

/// T inputs with their targets. Row t predicts targets[t] from the rows of its segment up to t.
struct Sample {
  std::vector<int32_t> ids;        ///< (T)
  std::vector<int32_t> targets;    ///< (T): the id one place on; < 0: no loss
  std::vector<int32_t> positions;  ///< (T)
  std::vector<int32_t> segments;   ///< first row of each segment, ascending from 0
};

/// Makes `sample` from T + 1 ids. Its vectors keep their memory from call to call.
void make_sample(std::span<const int32_t> ids, const DocumentRules& rules, Sample& sample);

/// The rows without a target.
std::vector<int32_t> rows_without_loss(const Sample& sample);

}  // namespace nrl::data
