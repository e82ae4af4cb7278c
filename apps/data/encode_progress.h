#pragma once
// Progress of a tokenizer within a long text.

#include <atomic>
#include <cstdint>

namespace nrl::data {

/// If not null, Tokenizer::encode on this thread adds the bytes it has encoded. Tokenizers that encode a text
/// in one piece add nothing.
inline thread_local std::atomic<int64_t>* encode_progress = nullptr;

}  // namespace nrl::data
