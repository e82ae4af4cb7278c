#include "core/config/suite.h"

#include <algorithm>
#include <deque>
#include <filesystem>
#include <functional>

#include "core/base/text.h"
#include "core/config/convert.h"
#include "core/config/given.h"
#include "core/config/load.h"
#include "core/config/references.h"
#include "core/config/report.h"
#include "core/config/yaml.h"

namespace nrl {
namespace config_detail {
namespace {

/// Reports the problems of the one source of a suite.
class SuiteReport {
 public:
  SuiteReport(const std::string& name, std::string text) { report_.add(name, std::move(text)); }

  Report& report() { return report_; }
  const Source& source() const { return report_.source(0); }
  Diagnostics& problems() { return report_.problems(); }
  void problem(Pos pos, std::string message, std::string label = "", std::vector<std::string> notes = {}) {
    report_.problem(0, pos, 0, "", std::move(message), std::move(label), std::move(notes));
  }
  /// The value of `node` for `key`, unless it is rejected.
  std::optional<Value> converted(const Key& key, const Node& node) {
    Converted out = convert(key, node);
    if (out.rejection) {
      Rejection& r = *out.rejection;
      problem(r.pos, std::move(r.message), std::move(r.label), std::move(r.notes));
    }
    return std::move(out.value);
  }

 private:
  ConfigResult result_;
  Report report_{result_};
};

/// The keys of one mapping of a suite. read() assigns the members that were given to field() and calls the
/// functions that were given to part().
class Record {
 public:
  Record(SuiteReport& out, std::string what) : out_(out), what_(std::move(what)) {}

  /// `pos`: receives the position of the value.
  template <class T>
  KeyBuilder field(std::string name, T& member, bool required = false, Pos* pos = nullptr) {
    Key key;
    key.path = std::move(name);
    binding::Traits<T>::describe(key);
    keys_.push_back({std::move(key), required, [&member, pos](const Value& value, const Node& node) {
                       member = binding::Traits<T>::from(value);
                       if (pos) *pos = node.pos;
                     }});
    return KeyBuilder(keys_.back().key);
  }
  void part(std::string name, std::function<void(const Node&)> read, bool required = false) {
    Key key;
    key.path = std::move(name);
    keys_.push_back({std::move(key), required, {}, std::move(read)});
  }

  void read(const Node& node) {
    if (node.kind != Node::Kind::map) {
      out_.problem(node.pos, what_ + ": expected a mapping", "",
                   {fmt::format("keys here: {}", fmt::join(names(), ", "))});
      return;
    }
    for (const Entry& entry : node.entries) {
      const auto found =
          std::find_if(keys_.begin(), keys_.end(), [&](const Item& i) { return i.key.path == entry.key; });
      if (found == keys_.end()) {
        out_.problem(entry.key_pos, fmt::format("unknown key '{}'", clipped(entry.key, 80)),
                     did_you_mean(nearest(entry.key, names())),
                     {fmt::format("keys here: {}", fmt::join(names(), ", "))});
        continue;
      }
      found->given = true;
      if (found->read)
        found->read(entry.value);
      else if (const auto value = out_.converted(found->key, entry.value))
        found->set(*value, entry.value);
    }
    for (const Item& item : keys_)
      if (item.required && !item.given)
        out_.problem(node.pos, fmt::format("{} has no {}", what_, item.key.path));
  }

 private:
  struct Item {
    Key key;
    bool required;
    std::function<void(const Value&, const Node&)> set;
    std::function<void(const Node&)> read = {};
    bool given = false;
  };
  std::vector<std::string_view> names() const {
    std::vector<std::string_view> out;
    for (const Item& item : keys_) out.push_back(item.key.path);
    return out;
  }

  SuiteReport& out_;
  const std::string what_;
  std::deque<Item> keys_;  // KeyBuilder refers to them
};

class SuiteReader {
 public:
  SuiteReader(Suite& suite, const std::string& name) : suite_(suite), out_(name, suite.text) {}

  void read() {
    const Node root = parse_yaml(out_.source(), out_.problems());
    if (out_.problems().empty()) {
      Record record(out_, "a suite");
      record.field("config", suite_.config);
      record.part(
          "comparisons", [&](const Node& node) { read_comparisons(node); }, true);
      record.read(root);
    }
    resolve(suite_.config);
    for (SuiteComparison& c : suite_.comparisons) resolve(c.config);
    suite_.diagnostics = std::move(out_.problems());
  }

 private:
  /// Makes a path relative to the suite's directory one of the working directory.
  void resolve(std::string& config) const {
    if (const std::filesystem::path path(config); !path.empty() && path.is_relative())
      config = (std::filesystem::path(out_.source().name).parent_path() / path).lexically_normal().string();
  }

  /// Calls `item` for the members of a list that must not be empty.
  void each(const Node& node, const std::string& name, const std::function<void(const Node&)>& item) {
    if (node.kind != Node::Kind::list || node.items.empty())
      out_.problem(node.pos, fmt::format("{}: expected a list of mappings", name));
    for (const Node& n : node.items) item(n);
  }
  /// Refuses the name of `all.back()` if an earlier one has it.
  template <class T>
  void require_unique(const std::vector<T>& all, Pos pos) {
    const std::string& name = all.back().name;
    if (!name.empty() && std::any_of(all.begin(), all.end() - 1, [&](const T& t) { return t.name == name; }))
      out_.problem(pos, fmt::format("the name '{}' is given twice", name));
  }

  void read_comparisons(const Node& list) {
    each(list, "comparisons", [&](const Node& node) {
      SuiteComparison& c = suite_.comparisons.emplace_back();
      Pos name;
      const Node* promises = nullptr;
      Record record(out_, "a comparison");
      record.field("name", c.name, true, &name);
      record.field("note", c.note);
      record.field("config", c.config);
      record.field("ranks", c.ranks).at_least(1);
      record.part("reset", [&](const Node& keys) { read_reset(keys, c); });
      record.part(
          "variants", [&](const Node& variants) { read_variants(variants, c); }, true);
      record.part("promises", [&](const Node& given) { promises = &given; });
      record.read(node);
      require_unique(suite_.comparisons, name);
      if (promises)  // they name variants, which may follow
        each(*promises, "promises", [&](const Node& promise) { read_promise(promise, c); });
    });
  }

  /// Keys and sections that have their default.
  void read_reset(const Node& node, SuiteComparison& c) {
    const Schema& schema = Schema::get();
    each_text(node, "reset", [&](const Node& item) {
      const std::string_view name = item.text;
      const std::vector<std::string> defaults = default_overrides({&name, 1});
      c.reset.insert(c.reset.end(), defaults.begin(), defaults.end());
      if (!defaults.empty()) return;
      out_.problem(item.pos, fmt::format("unknown key '{}'", clipped(item.text, 80)),
                   did_you_mean(schema.suggest(item.text)));
    });
  }
  void each_text(const Node& node, const std::string& name, const std::function<void(const Node&)>& item) {
    Key texts;
    texts.path = name;
    texts.is_list = true;
    if (!out_.converted(texts, node)) return;
    if (node.kind == Node::Kind::scalar) item(node);
    for (const Node& n : node.items) item(n);
  }

  void read_variants(const Node& list, SuiteComparison& c) {
    each(list, "variants", [&](const Node& node) {
      SuiteVariant& v = c.variants.emplace_back();
      Pos name;
      Record record(out_, "a variant");
      record.field("name", v.name, true, &name);
      record.part("set", [&](const Node& keys) { read_keys(keys, v); });
      record.read(node);
      require_unique(c.variants, name);
    });
  }

  /// The keys that a variant sets, spelled as in any configuration.
  void read_keys(const Node& node, SuiteVariant& v) {
    if (node.kind != Node::Kind::map) {
      out_.problem(node.pos, "set: expected a mapping", "", {"write section.key: value"});
      return;
    }
    const Schema& schema = Schema::get();
    GivenKeys given(schema, out_.report());
    given.lay_over(0, node);
    given.read_backends();
    apply_mixed_precision(given, out_.report());
    apply_products(given, out_.report());
    for (const auto& [path, value] : given.values)
      if (const auto converted = out_.converted(*schema.find(path), value.node))
        v.overrides.push_back(path + "=" + yaml_text(*converted));
  }

  void read_promise(const Node& node, SuiteComparison& c) {
    SuitePromise p;
    std::string variant, than;
    Pos variant_at, than_at, most_at, high_at, device_at;
    Record record(out_, "a promise");
    record.field("claim", p.claim, true);
    record.field("source", p.source, true);
    record.field("promised", p.promised, true);
    record.field("measure", p.quantity, true);
    record.field("variant", variant, true, &variant_at);
    record.field("than", than, false, &than_at);
    record.field("at_least", p.at_least).at_least(0);
    record.field("at_most", p.at_most, false, &most_at).at_least(0);
    record.field("low", p.low).at_least(0);
    record.field("high", p.high, false, &high_at).at_least(0);
    record.field("device", p.device, false, &device_at);
    record.read(node);
    if (!variant.empty()) p.variant = index_of(variant, variant_at, c);
    if (!than.empty()) p.than = index_of(than, than_at, c);
    if (p.at_least && p.at_most && *p.at_least > *p.at_most)
      out_.problem(most_at, fmt::format("at_most: {} is less than at_least", number_text(*p.at_most)));
    if (p.low && p.high && *p.low > *p.high)
      out_.problem(high_at, fmt::format("high: {} is less than low", number_text(*p.high)));
    if (p.device != DeviceKind::automatic && !p.at_least && !p.at_most && !p.low && !p.high)
      out_.problem(device_at, "device has no effect without at_least, at_most, low or high");
    c.promises.push_back(std::move(p));
  }
  size_t index_of(const std::string& name, Pos pos, const SuiteComparison& c) {
    std::vector<std::string_view> names;
    for (const SuiteVariant& v : c.variants) names.push_back(v.name);
    const auto found = std::find(names.begin(), names.end(), name);
    if (found != names.end()) return static_cast<size_t>(found - names.begin());
    out_.problem(pos, fmt::format("there is no variant '{}'", clipped(name, 80)),
                 did_you_mean(nearest(name, names)),
                 {fmt::format("variants here: {}", fmt::join(names, ", "))});
    return 0;
  }

  Suite& suite_;
  SuiteReport out_;
};

}  // namespace
}  // namespace config_detail

Suite load_suite(const std::string& path) {
  try {
    return load_suite_text(config_detail::read_config_file(path), path);
  } catch (const Error& e) {
    Suite suite;
    Diagnostic& d = suite.diagnostics.emplace_back();
    d.file = path;
    d.exit = e.code();
    d.message = e.what();
    return suite;
  }
}

Suite load_suite_text(std::string_view text, const std::string& name) {
  Suite suite;
  suite.text = text;
  config_detail::SuiteReader(suite, name).read();
  return suite;
}

}  // namespace nrl
