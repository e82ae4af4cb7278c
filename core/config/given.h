#pragma once
// From a parsed text to the values of keys: sections, aliases, unknown keys. Internal to core/config.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/config/report.h"
#include "core/config/schema.h"
#include "core/config/yaml.h"

namespace nrl::config_detail {

/// A value given for a key, and its position.
struct Given {
  Node node;
  int source = 0;
  int parent_line = 0;
  Pos key_pos;
  std::string written;  ///< the path as written
  int layer = 0;        ///< of the text; higher ones override lower ones
};

/// A value that is to be multiplied by that of the key `factor`.
struct Product {
  Given given;
  std::string factor;
};

class GivenKeys {
 public:
  GivenKeys(const Schema& schema, Report& report) : schema_(schema), report_(report) {}

  /// Adds the values of a text; they override those of earlier texts. All overrides of the command line count
  /// as one text, in which a key that is given again under the same name takes the later value.
  void lay_over(int source, const Node& root);
  /// Reads the sections of NeMo RL's backends, policy.dtensor_cfg and policy.megatron_cfg, but for those that
  /// are switched off (enabled: false), which have no effect in NeMo RL. Called once, after all texts.
  void read_backends();
  /// Gives the value of one key to another one, which must not have another value in the same text.
  void move(const std::string& from, const std::string& to);

  std::map<std::string, Given> values;      ///< canonical key -> its value
  std::vector<std::string> model_order;     ///< keys of models in the order given
  std::optional<Given> mixed_precision;     ///< a 16-bit switch that names no type
  std::map<std::string, Product> products;  ///< canonical key -> its value by an alias with a factor

 private:
  void walk(int where, const Node& map, const std::string& section, int parent_line);
  bool defer(int where, const Entry& entry, const std::string& section, const std::string& path,
             int parent_line);
  void enter(int where, const Entry& entry, const std::string& path, int parent_line);
  void not_a_mapping(int where, const Entry& entry, const std::string& path, int parent_line);
  void unknown(int where, const Entry& entry, const std::string& path, int parent_line);
  void by_alias(int where, const Schema::Aliased& found, const std::string& written, const Entry& entry,
                int parent_line);
  /// Removes what a switch has set before, since it is given again.
  void take_back(const std::string& path, const std::string& written);
  void give(int where, const std::string& path, const std::string& written, const Entry& entry, Node value,
            int parent_line);
  void given_twice(const Given& given, const std::string& path, const Given& before);
  std::string keys_of(const std::string& section) const;
  /// Guesses the key that an unknown one means: the same without spaces, or one of similar letters.
  std::string nearest_key(std::string path) const;

  const Schema& schema_;
  Report& report_;
  /// A section of a backend, or keys of it.
  struct Deferred {
    int where;
    Entry entry;
    std::string section, path;
    int parent_line;
    int layer;
    bool on_command_line;
  };
  std::vector<Deferred> deferred_;
  bool defers_ = true;
  bool on_command_line_ = false;  // the current text
  int layer_ = 0;
};

/// The key that a key of a model belongs to: policy.model.rope_scaling.factor -> policy.model.rope_scaling.
std::string model_head(const std::string& path);

}  // namespace nrl::config_detail
