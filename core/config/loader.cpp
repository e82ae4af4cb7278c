#include "core/config/loader.h"

#include <algorithm>

#include "core/config/convert.h"
#include "core/config/given.h"
#include "core/config/layers.h"
#include "core/config/needs.h"
#include "core/config/references.h"
#include "core/config/report.h"

namespace nrl {
namespace config_detail {
namespace {

class Loader {
 public:
  Loader(const Schema& schema, ConfigResult& result) : schema_(schema), result_(result) {}

  Layers& layers() { return layers_; }

  void finish() {
    given_.read_backends();
    apply_mixed_precision(given_, report_);
    apply_products(given_, report_);
    resolve_references(given_, schema_, report_);
    if (const auto algorithm = given_.values.find("algorithm"); algorithm != given_.values.end())
      set(algorithm->first, algorithm->second);
    else
      infer_algorithm();
    if (result_.sound("algorithm")) {
      move_shared_names();
      refuse_other_algorithms();
    }
    for (auto& [path, given] : given_.values)
      if (path != "algorithm" && !belongs_to_idle_feature(path)) set(path, given);
    collect_models();
  }

 private:
  /// True for a key that is not supported of a feature that the text switches off.
  bool belongs_to_idle_feature(const std::string& path) const {
    const auto feature = given_.values.find(schema_.find(path)->feature);
    return feature != given_.values.end() && parse_boolean(feature->second.node.text) == false;
  }

  void set(const std::string& path, const Given& given) {
    const Key& key = *schema_.find(path);
    Converted converted = convert(key, given.node);
    if (converted.rejection) {
      Rejection& r = *converted.rejection;
      report_.problem(given.source, r.pos, given.parent_line, path, std::move(r.message), std::move(r.label),
                      std::move(r.notes));
      return;
    }
    if (!converted.value) return;
    if (!converted.translated.empty())
      result_.translated.push_back({fmt::format("{}: {}", given.written, given.node.text),
                                    fmt::format("{}: {}", path, converted.translated),
                                    report_.place(given.source, given.node.pos)});
    result_.origins[path] = report_.origin(given.source, given.node.pos, given.parent_line);
    if (key.set) key.set(result_.config, *converted.value);
    if (key.model) model_values_[path] = std::move(*converted.value);
  }

  /// The algorithm whose loop has a section of its own, as in files for NeMo RL, which name none.
  void infer_algorithm() {
    if (result_.sections.contains(std::string(name_of(Algorithm::pretrain)))) return;
    const Choices& algorithms = schema_.find("algorithm")->choices;
    for (const std::string_view name : algorithms.built.empty() ? algorithms.names : algorithms.built)
      if (const auto section = result_.sections.find(std::string(name)); section != result_.sections.end()) {
        const Key& key = *schema_.find("algorithm");
        Node node{Node::Kind::scalar, std::string(name), false, {}, {}, {}};
        key.set(result_.config, *convert(key, node).value);
        result_.translated.push_back({fmt::format("the section '{}'", name),
                                      fmt::format("algorithm: {}", name), section->second.text});
        result_.origins["algorithm"] = section->second;
        return;
      }
  }

  /// A name of another program that keys of several algorithms have, as in their loops, means the key of the
  /// configured one.
  void move_shared_names() {
    const Algorithm algorithm = result_.config.algorithm;
    std::vector<std::pair<std::string, std::string>> moves;
    for (const auto& [path, given] : given_.values)
      if (given.written != path && !schema_.find(path)->belongs_to(algorithm))
        if (const auto own = schema_.find_alias(given.written, algorithm))
          moves.emplace_back(path, own.key->path);
    for (const auto& [from, to] : moves) given_.move(from, to);
  }

  /// Keys of other algorithms would have no effect: errors, reported once per section.
  void refuse_other_algorithms() {
    const Algorithm algorithm = result_.config.algorithm;
    const std::string note =
        fmt::format("the algorithm is {} ({}); remove it", name_of(algorithm), result_.where("algorithm"));
    std::set<std::string> refused;
    std::erase_if(given_.values, [&](const auto& entry) {
      const auto& [path, given] = entry;
      const Key& key = *schema_.find(path);
      if (key.belongs_to(algorithm)) return false;
      std::string owners;
      for (const Algorithm a : key.algorithms)
        owners += (owners.empty() ? "" : ", ") + std::string(name_of(a));
      const auto section = result_.sections.find(key.algorithm_section);
      if (section == result_.sections.end())
        report_.problem(given.source, given.key_pos, given.parent_line, path,
                        fmt::format("{} belongs to algorithm {}", path, owners), "", {note});
      else if (refused.insert(section->first).second)
        report_.problem(
            section->second.source, {section->second.line, section->second.column, section->second.length},
            section->second.parent_line, section->first,
            fmt::format("the section '{}' belongs to algorithm {}", section->first, owners), "", {note});
      return true;
    });
  }

  /// The model of every policy as one JSON object, and the list of their values.
  void collect_models() {
    // Members of one mapping together, in the place of its first member.
    std::vector<std::string> heads;
    for (const std::string& path : given_.model_order)
      if (const std::string head = model_head(path);
          std::find(heads.begin(), heads.end(), head) == heads.end())
        heads.push_back(head);
    std::map<std::string, std::string> models;  // section -> members of its JSON object
    for (const std::string& head : heads) {
      std::string members;
      std::string own;
      for (const std::string& path : given_.model_order) {
        const auto value = model_values_.find(path);
        if (model_head(path) != head || value == model_values_.end()) continue;
        result_.model_values.emplace_back(path, yaml_text(value->second));
        if (path == head)
          own = json_text(value->second);
        else
          members += (members.empty() ? "" : ", ") + json_string(path.substr(head.size() + 1)) + ": " +
                     json_text(value->second);
      }
      if (!members.empty()) own = "{" + members + "}";
      if (own.empty()) continue;
      const size_t name = head.rfind('.') + 1;
      std::string& json = models[head.substr(0, name)];
      json += (json.empty() ? "" : ", ") + json_string(head.substr(name)) + ": " + own;
    }
    for (const auto& [section, json] : models) {
      const auto& keys = schema_.keys();
      const auto key =
          std::find_if(keys.begin(), keys.end(), [&](const Key& k) { return k.section() + "." == section; });
      (result_.config.*key->model).model_json = "{" + json + "}";
    }
  }

  const Schema& schema_;
  ConfigResult& result_;
  Report report_{result_};
  GivenKeys given_{schema_, report_};
  Layers layers_{report_, [this](int source, const Node& root) { given_.lay_over(source, root); }};
  std::map<std::string, Value> model_values_;
};

template <class Start>
ConfigResult load(const Schema& schema, std::span<const std::string> overrides, Start start) {
  ConfigResult result;
  Loader loader(schema, result);
  start(loader.layers());
  // Without its file, complaints about overrides would only hide the cause.
  const bool missing = exit_code(result.diagnostics) == Exit::no_input;
  if (!missing)
    for (const std::string& text : overrides) loader.layers().add_override(text);
  loader.finish();
  return result;
}

ConfigResult validated(ConfigResult result) {
  const IdleKeys idle = idle_keys(result);
  result.add(idle.problems);
  for (const Key* key : idle.parked) {  // as if they were not given
    key->set(result.config, key->get(Config{}));
    result.origins.erase(key->path);
  }
  result.add(validate(result));
  return result;
}

}  // namespace

ConfigResult load_text(const Schema& schema, std::string_view text, const std::string& name,
                       std::span<const std::string> overrides) {
  return load(schema, overrides, [&](Layers& layers) { layers.add_text(name, std::string(text)); });
}

}  // namespace config_detail

ConfigResult load_config(const std::string& path, std::span<const std::string> overrides) {
  using namespace config_detail;
  return validated(load(Schema::get(), overrides, [&](Layers& layers) { layers.add_file(path); }));
}

ConfigResult load_config_text(std::string_view text, const std::string& name,
                              std::span<const std::string> overrides) {
  using namespace config_detail;
  return validated(config_detail::load_text(Schema::get(), text, name, overrides));
}

}  // namespace nrl
