#include "apps/data/examples/example_counts.h"

#include <utility>

#include "core/base/error.h"

namespace nrl::data {
namespace {

constexpr std::pair<const char*, int64_t ExampleCounts::*> numbers[] = {
    {"records", &ExampleCounts::records},
    {"examples", &ExampleCounts::examples},
    {"sequences", &ExampleCounts::sequences},
    {"tokens", &ExampleCounts::tokens},
    {"loss_tokens", &ExampleCounts::loss_tokens},
    {"text_bytes", &ExampleCounts::text_bytes},
    {"bytes_without_token", &ExampleCounts::bytes_without_token},
    {"duplicates", &ExampleCounts::duplicates}};
constexpr std::pair<const char*, RecordIncidents ExampleCounts::*> incidents[] = {
    {"truncated", &ExampleCounts::truncated},       {"end_lost", &ExampleCounts::end_lost},
    {"no_end_token", &ExampleCounts::no_end_token}, {"special_text", &ExampleCounts::special_text},
    {"dropped", &ExampleCounts::dropped},           {"special_dropped", &ExampleCounts::special_dropped},
    {"without_loss", &ExampleCounts::without_loss}, {"skipped", &ExampleCounts::skipped}};

}  // namespace

void RecordIncidents::add(Place place) {
  ++count;
  if (places.size() < max_places) places.push_back(std::move(place));
}

void RecordIncidents::add(const RecordIncidents& other) {
  count += other.count;
  for (const Place& place : other.places)
    if (places.size() < max_places) places.push_back(place);
}

void add_counts(ExampleCounts& sum, const ExampleCounts& part) {
  for (const auto& [name, member] : numbers) sum.*member += part.*member;
  for (const auto& [name, member] : incidents) (sum.*member).add(part.*member);
}

JsonValue counts_to_json(const ExampleCounts& counts) {
  JsonValue json = JsonValue::object();
  for (const auto& [name, member] : numbers) json.set(name, counts.*member);
  for (const auto& [name, member] : incidents) {
    JsonValue places = JsonValue::array();
    for (const RecordIncidents::Place& place : (counts.*member).places)
      places.push_back(JsonValue::array({place.file, place.line, place.text}));
    json.set(name, JsonValue::object({{"count", (counts.*member).count}, {"places", std::move(places)}}));
  }
  return json;
}

ExampleCounts counts_from_json(const JsonValue& value) {
  ExampleCounts counts;
  for (const auto& [name, member] : numbers) counts.*member = value.get_int(name);
  for (const auto& [name, member] : incidents) {
    const JsonValue& incident = value.at(name);
    (counts.*member).count = incident.get_int("count");
    for (const JsonValue& place : incident.at("places").items()) {
      if (place.items().size() != 3) fail(Exit::data, "{}a place must have 3 parts", place.where());
      const int64_t file = place.items()[0].as_int();
      if (file < 0 || file > INT32_MAX) fail(Exit::data, "{}file {} is out of range", place.where(), file);
      (counts.*member)
          .places.push_back(
              {static_cast<int32_t>(file), place.items()[1].as_int(), place.items()[2].as_string()});
    }
  }
  return counts;
}

}  // namespace nrl::data
