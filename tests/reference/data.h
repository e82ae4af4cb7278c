#pragma once
// Which tokens a run sees: token files, splits, epochs, shuffles and blends as Megatron-LM defines them
// (megatron/core/datasets), each list made as a whole.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/reference/decoder.h"

namespace reference {

/// The documents of PREFIX.bin and PREFIX.idx.
std::vector<Tokens> read_token_file(const std::string& prefix);

/// Writes a token file of documents that are partly predictable and of many lengths. With `end_token` that
/// token ends every document, and every seventh one has no other.
void write_token_file(const std::string& prefix, int32_t vocab_size, int documents, uint32_t seed,
                      int32_t end_token = -1);

struct DataSettings {
  std::vector<std::string> paths;
  std::vector<double> weights;              ///< of a blend; empty: in proportion to the samples of each path
  std::array<double, 3> split = {1, 0, 0};  ///< shares for training, validation and test
  int64_t sequence_length = 0;
  uint32_t seed = 0;
  bool reset_position_ids = false, reset_attention_mask = false, eod_mask_loss = false;
  int32_t end_token = -1;  ///< ends a document
};

/// Inputs, targets (negative: no loss) and layout of a sample of sequence_length + 1 tokens, as Megatron-LM's
/// get_ltor_masks_and_position_ids makes them.
struct Inputs {
  Tokens tokens, targets;
  Layout layout;
};
Inputs make_inputs(const DataSettings& data, const Tokens& sample);

/// Samples of one pass over a part of the data (0 training, 1 validation).
int64_t epoch_samples(const DataSettings& data, int part);

/// The first `count` samples of a part in the order of a run, sequence_length + 1 tokens each.
std::vector<Tokens> make_samples(const DataSettings& data, int part, int64_t count);

}  // namespace reference
