#include "apps/reward/external.h"

#include <cmath>
#include <utility>

#include "apps/data/text_source.h"
#include "core/base/error.h"

namespace nrl::reward {
namespace {

constexpr int64_t failures_to_end = 5;  // without any answer

}  // namespace

void ExternalJudge::failed(std::string why, const std::string& fix, int64_t completions) {
  ++failures_;
  lost_ += completions;
  last_failure_ = std::move(why);
  if (!answered_ && failures_ >= failures_to_end)
    fail(Exit::unavailable, "{} failed {} times and never answered: {}. Fix: {}", note(), failures_,
         last_failure_, fix);
}

JsonValue request_of(const Item& item, size_t id) {
  JsonValue line = JsonValue::object({{"id", id},
                                      {"prompt", data::with_replacements(item.prompt)},
                                      {"completion", data::with_replacements(item.completion)},
                                      {"ended", item.ended}});
  line.set("record", *item.record);
  return line;
}

std::string read_answer(const JsonValue& answer, size_t id, std::optional<double>& reward) {
  if (!answer.is_object() || !answer.contains("id") || !answer.at("id").is_integer() ||
      answer.get_int("id") != static_cast<int64_t>(id))
    return "an answer with another id";
  const JsonValue* given = answer.find("reward");
  if (!given || !(given->is_null() || given->is_number())) return "an answer without a reward";
  if (given->is_null()) return {};
  if (!std::isfinite(given->as_double())) return "a reward that is not finite";
  reward = given->as_double();
  return {};
}

}  // namespace nrl::reward
