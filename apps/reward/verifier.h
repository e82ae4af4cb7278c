#pragma once
// Functions that judge completions in this process.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "apps/reward/spec.h"

namespace nrl::reward {

/// A completion to be judged.
struct Item {
  const JsonValue* record = nullptr;  ///< of the prompt, an object
  std::string where;                  ///< "FILE:line" of the record
  std::string prompt, completion;     ///< texts, without the completion's end token
  int64_t tokens = 0;                 ///< of the completion
  bool ended = false;                 ///< not cut off by a limit
};

/// Immutable; any number of threads may use one concurrently.
class Verifier {
 public:
  virtual ~Verifier() = default;
  /// The reward; absent: the completion cannot be judged.
  virtual std::optional<double> judge(const Item& item) const = 0;
  /// Throws Error (`data`) with file and line if the record lacks what judge() reads.
  virtual void check(const JsonValue& /*record*/, const std::string& /*where*/) const {}
};

/// The verifier of an entry; null: it is no verifier (command, http). Throws Error (`config`).
std::unique_ptr<Verifier> make_verifier(const Spec& spec);

/// True if two texts state the same answer of a calculation: numbers, fractions, tuples, sets and intervals
/// of them by value (exactly as fractions where possible, else to 1e-6 of their size), anything else letter
/// by letter without TeX's decorations. Not a computer algebra system.
bool same_answer(const std::string& a, const std::string& b);
/// The argument of the last \boxed{} (braces balanced); absent without one.
std::optional<std::string> last_boxed(const std::string& text);
/// The last number of a text ("-1,234.5"), without separators; absent without one.
std::optional<std::string> last_number(const std::string& text);

}  // namespace nrl::reward
