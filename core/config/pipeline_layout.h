#pragma once
// Megatron-LM's text for the layers of pipeline chunks: "Et*3|(tt|)*2,L". Internal to core/config.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nrl::config_detail {

/// Sets `layers` to the decoder layers of every chunk of the model, in order. Chunks are separated by '|' and
/// list their parts: E the embedding, which begins the first chunk, t a decoder layer, L the loss, which ends
/// the last one. "x*3" repeats a part or a group in parentheses; commas and blanks are ignored. Returns what
/// is wrong; empty: nothing.
std::string parse_pipeline_layout(std::string_view text, std::vector<int64_t>& layers);

}  // namespace nrl::config_detail
