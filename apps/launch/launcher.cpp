#include "apps/launch/launcher.h"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::launch {
namespace {

constexpr std::string_view blanks = " \t\r";

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> words;
  for (size_t begin = text.find_first_not_of(blanks); begin != text.npos;) {
    const size_t end = std::min(text.find_first_of(blanks, begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = text.find_first_not_of(blanks, end);
  }
  return words;
}

std::string joined(const std::vector<std::string>& hosts, const std::string& after) {
  std::string text;
  for (const std::string& host : hosts) text += (text.empty() ? "" : ",") + host + after;
  return text;
}

// A name that no launcher takes for an option or a list.
bool is_host(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name.front() != '-' &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' ||
                  c == '.' || c == '_';
         });
}

}  // namespace

void Launcher::check() const {
  const std::vector<std::string_view> all = split(text);
  if (all.empty() && !text.empty()) fail(Exit::usage, "--launcher: no words");
  for (std::string_view word : all)
    for (size_t open = word.find('{'); open != word.npos; open = word.find('{', open + 1)) {
      const std::string_view name = word.substr(open, word.find('}', open) - open + 1);
      if (name != "{ranks}" && name != "{hosts}" && name != "{hostfile}")
        fail(Exit::usage, "--launcher: '{}' is not known. Fix: use {{ranks}}, {{hosts}} and {{hostfile}}",
             clipped(word));
    }
}

std::vector<std::string> Launcher::words(int ranks, const std::vector<std::string>& hosts,
                                         const std::string& hostfile) const {
  const std::string count = std::to_string(ranks);
  if (text == "mpirun") {
    if (hosts.empty()) return {"mpirun", "--oversubscribe", "-n", count};
    return {"mpirun", "-n", count, "--host", joined(hosts, fmt::format(":{}", ranks_per_node))};
  }
  if (text == "srun") {
    // --wait ends a step of which a rank died silently, where no control plane does; --overlap does not wait
    // for a step that is still ending.
    std::vector<std::string> out{"srun", "--mpi=pmix", "--kill-on-bad-exit=0", "--wait=60", "--overlap"};
    if (ranks > 0) out.push_back("--ntasks=" + count);
    if (hosts.empty()) return out;
    out.push_back(fmt::format("--nodes={}", hosts.size()));
    out.push_back(fmt::format("--ntasks-per-node={}", std::min(ranks, ranks_per_node)));
    out.push_back("--nodelist=" + joined(hosts, ""));
    return out;
  }
  std::vector<std::string> out;
  for (std::string_view word : split(text)) {
    std::string filled(word);
    for (const auto& [name, value] : {std::pair<std::string_view, std::string>("{ranks}", count),
                                      {"{hosts}", joined(hosts, "")},
                                      {"{hostfile}", hostfile}})
      for (size_t at = filled.find(name); at != filled.npos; at = filled.find(name, at + value.size()))
        filled.replace(at, name.size(), value);
    out.push_back(std::move(filled));
  }
  return out;
}

std::string host_file_text(const std::vector<std::string>& hosts, int ranks_per_node) {
  std::string text;
  for (const std::string& host : hosts) text += fmt::format("{} slots={}\n", host, ranks_per_node);
  return text;
}

std::vector<std::string> hosts_from(std::string_view text, const std::string& source, int* slots) {
  std::vector<std::string> hosts;
  *slots = 0;
  for (int line = 1; !text.empty(); ++line) {
    std::string_view rest = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), rest.size() + 1));
    const std::vector<std::string_view> words = split(rest.substr(0, rest.find('#')));
    if (words.empty()) continue;
    int n = 0;
    if (words.size() == 2 && words[1].starts_with("slots=")) {
      const std::string_view digits = words[1].substr(6);
      const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), n);
      if (error != std::errc() || end != digits.data() + digits.size() || n > 4096) n = 0;
    }
    if (!is_host(words[0]) || (words.size() > 1 && n < 1))
      fail(Exit::usage, "{}:{}: '{}' is not a host. Fix: a line is HOST or HOST slots=N", source, line,
           clipped(rest));
    if (std::find(hosts.begin(), hosts.end(), words[0]) != hosts.end())
      fail(Exit::usage, "{}:{}: {} is there twice", source, line, words[0]);
    if (!hosts.empty() && n != *slots)
      fail(Exit::usage, "{}:{}: all hosts must have the same number of slots", source, line);
    *slots = n;
    hosts.emplace_back(words[0]);
  }
  if (hosts.empty()) fail(Exit::usage, "{}: no hosts", source);
  return hosts;
}

}  // namespace nrl::launch
