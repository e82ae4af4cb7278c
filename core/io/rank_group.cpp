#include "core/io/rank_group.h"

#include <cstdint>

namespace nrl {

JsonValue error_to_json(const std::optional<Error>& error) {
  if (!error) return JsonValue();
  return JsonValue::object({{"code", static_cast<int>(error->code())}, {"text", error->what()}});
}

std::optional<Error> error_from_json(const JsonValue& value) {
  if (value.is_null()) return {};
  return Error(static_cast<Exit>(value.get_int("code")), value.get_string("text"));
}

std::string on_rank_zero(const RankGroup& group, const std::function<std::string()>& work) {
  JsonValue outcome = JsonValue::object({{"error", nullptr}, {"result", ""}});
  if (group.rank == 0) {
    try {
      outcome.set("result", work());
    } catch (const Error& e) {
      outcome.set("error", error_to_json(e));
    } catch (const std::exception& e) {
      outcome.set("error", error_to_json(Error(Exit::internal, e.what())));
    }
  }
  const JsonValue shared = parse_json(group.broadcast(outcome.dump()), "the result of rank 0");
  if (const auto error = error_from_json(shared.at("error"))) throw *error;
  return shared.get_string("result");
}

std::string scatter_texts(const RankGroup& group, const std::vector<std::string>& texts) {
  if (group.rank == 0) {
    for (int to = 1; to < group.size; ++to) {
      const std::string& text = texts.at(static_cast<size_t>(to));
      const uint64_t bytes = text.size();
      group.send(to, &bytes, sizeof bytes);
      if (bytes > 0) group.send(to, text.data(), bytes);
    }
    return texts.at(0);
  }
  uint64_t bytes = 0;
  group.receive(0, &bytes, sizeof bytes);
  std::string text(bytes, '\0');
  if (bytes > 0) group.receive(0, text.data(), bytes);
  return text;
}

}  // namespace nrl
