#include "core/config/layers.h"

#include <algorithm>
#include <filesystem>

#include "core/base/text.h"

namespace nrl::config_detail {
namespace {

std::string canonical(const std::string& name) {
  std::error_code error;
  const auto path = std::filesystem::weakly_canonical(name, error);
  return error ? name : path.string();
}

}  // namespace

void Layers::add_file(const std::string& path) {
  std::string text;
  try {
    text = read_config_file(path);
  } catch (const Error& e) {
    Diagnostic d;
    d.file = path;
    d.exit = e.code();
    d.message = e.what();
    report_.problems().push_back(std::move(d));
    report_.result.unsound.insert("");
    return;
  }
  add_text(path, std::move(text));
}

void Layers::add_text(const std::string& name, std::string text) {
  const int source = report_.add(name, std::move(text));
  const size_t before = report_.problems().size();
  Node root = parse_yaml(report_.source(source), report_.problems());
  if (report_.problems().size() > before) report_.result.unsound.insert("");
  chain_.push_back(canonical(name));
  for (const Entry& entry : root.entries)
    if (entry.key == "defaults") inherit(source, entry);
  chain_.pop_back();
  std::erase_if(root.entries, [](const Entry& e) { return e.key == "defaults"; });
  report_.result.files.push_back(name);
  lay_over_(source, root);
}

void Layers::add_override(const std::string& text) {
  const int source = report_.add("command line: " + text, text, true);
  const size_t before = report_.problems().size();
  Node root = parse_override(report_.source(source), report_.problems());
  if (report_.problems().size() > before)
    report_.result.unsound.insert(root.entries.empty() ? "" : root.entries[0].key);
  lay_over_(source, root);
}

void Layers::inherit(int from, const Entry& entry) {
  std::vector<Node> items =
      entry.value.kind == Node::Kind::list ? entry.value.items : std::vector{entry.value};
  for (const Node& item : items) {
    auto refuse = [&](std::string message, std::vector<std::string> notes = {}) {
      report_.problem(from, item.pos, 0, "defaults", std::move(message), "", std::move(notes));
      report_.result.unsound.insert("");
    };
    if (item.kind != Node::Kind::scalar || item.text.empty()) {
      refuse("defaults: expected a file name or a list of file names");
      continue;
    }
    std::filesystem::path path(item.text);
    if (path.is_relative()) path = std::filesystem::path(report_.source(from).name).parent_path() / path;
    const std::string name = path.lexically_normal().string();
    const std::string real = canonical(name);
    if (std::find(chain_.begin(), chain_.end(), real) != chain_.end()) {
      refuse(fmt::format("'{}' inherits from itself", clipped(item.text)),
             {"the chain is " + chain_text(real)});
    } else if (report_.count() >= static_cast<int>(max_files)) {
      refuse(fmt::format("more than {} files inherited", max_files));
      return;
    } else {
      std::string text;
      try {
        text = read_config_file(name);
      } catch (const Error& e) {
        refuse(e.what(), {"names are relative to the directory of the file that holds 'defaults:'"});
        report_.problems().back().exit = e.code();
        continue;
      }
      add_text(name, std::move(text));
    }
  }
}

std::string Layers::chain_text(const std::string& again) const {
  std::string out;
  for (const std::string& file : chain_) out += std::filesystem::path(file).filename().string() + " -> ";
  return out + std::filesystem::path(again).filename().string();
}

}  // namespace nrl::config_detail
