#pragma once
// Progress of a tokenizer within a long text.

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace nrl::data {

/// If not null, Tokenizer::encode on this thread adds the bytes it has encoded. Tokenizers that encode a text
/// in one piece add nothing.
inline thread_local std::atomic<int64_t>* encode_progress = nullptr;

/// Adds to encode_progress. No other thread writes it, so that a plain store suffices.
inline void add_encode_progress(size_t bytes) {
  if (encode_progress)
    encode_progress->store(encode_progress->load(std::memory_order_relaxed) + static_cast<int64_t>(bytes),
                           std::memory_order_relaxed);
}

}  // namespace nrl::data
