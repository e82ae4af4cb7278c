#pragma once
// Progress inside a long text while a tokenizer encodes it.

#include <atomic>
#include <cstdint>

namespace nrl::data {

/// Where Tokenizer::encode on this thread adds up the bytes it has encoded; null: nowhere. Tokenizers that
/// encode a text in one piece add nothing.
inline thread_local std::atomic<int64_t>* encode_progress = nullptr;

}  // namespace nrl::data
