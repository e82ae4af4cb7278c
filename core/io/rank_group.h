#pragma once
// The ranks that write a checkpoint together.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/io/json.h"

namespace nrl {

/// How the ranks that write one checkpoint communicate; the default is a single writer. broadcast and gather
/// are collective: every rank calls them in the same order. They must not use a communicator that a
/// concurrent training step uses.
struct RankGroup {
  int rank = 0;
  int size = 1;
  /// The text of rank 0, on every rank.
  std::function<std::string(const std::string&)> broadcast = [](const std::string& text) { return text; };
  /// On rank 0: the texts of all ranks, by rank. Ignored on the other ranks.
  std::function<std::vector<std::string>(const std::string&)> gather = [](const std::string& text) {
    return std::vector<std::string>{text};
  };
  /// Blocking messages of `bytes` bytes between two ranks. Needed only to write tensors from the slices of
  /// several ranks.
  std::function<void(int to, const void* data, size_t bytes)> send;
  std::function<void(int from, void* data, size_t bytes)> receive;
};

/// Collective. Runs `work` on rank 0; returns its result, or throws its error, on every rank.
std::string on_rank_zero(const RankGroup& group, const std::function<std::string()>& work);

/// Collective. Sends every rank its text from rank 0, where `texts` has one for each; ignored elsewhere. A
/// rank receives its own text only.
std::string scatter_texts(const RankGroup& group, const std::vector<std::string>& texts);

/// An error in a message between ranks: null if there is none.
JsonValue error_to_json(const std::optional<Error>& error);
std::optional<Error> error_from_json(const JsonValue& value);

}  // namespace nrl
