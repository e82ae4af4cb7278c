// nrl-train recipes: configurations for common cases, which are part of the program.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include "apps/nrl-train/commands.h"
#include "core/base/error.h"
#include "core/base/output.h"
#include "core/base/text.h"

namespace nrl::app {
namespace {

/// A file of configs/recipes: its name without .yaml, and its text.
struct Recipe {
  std::string_view name, text;
};

constexpr Recipe recipes[] = {
#include "apps/nrl-train/recipes.inc"
};

/// The rest of the first line that begins with `label`; every recipe has such lines.
std::string_view line_of(const Recipe& recipe, std::string_view label) {
  size_t at = recipe.text.find(label);
  NRL_CHECK(at != std::string_view::npos, "the recipe {} has no line '{}'", recipe.name, label);
  at += label.size();
  return recipe.text.substr(at, recipe.text.find('\n', at) - at);
}

std::string list() {
  std::string out;
  for (const Recipe& r : recipes)
    out += fmt::format("{:<14} {}\n{:<14} assumes: {}\n{:<14} plan:    nrl-train plan {}.yaml {}\n", r.name,
                       line_of(r, "# "), "", line_of(r, "# Assumes: "), "", r.name, line_of(r, "# Plan: "));
  return out +
         "\nnrl-train recipes NAME > NAME.yaml writes one to change; nrl-train plan shows what it needs.\n";
}

int run_recipes(const std::string& name) {
  if (name.empty()) {
    output::write(output::Stream::out, list());
    return 0;
  }
  std::vector<std::string_view> names;
  for (const Recipe& r : recipes) {
    names.push_back(r.name);
    if (r.name != name) continue;
    output::write(output::Stream::out, std::string(r.text));
    return 0;
  }
  fail(Exit::usage, "there is no recipe '{}'{}. Fix: one of {}", name,
       did_you_mean(nearest(name, names), "; "), fmt::join(names, ", "));
}

}  // namespace

void add_recipes(CommandLine& line) {
  const auto name = std::make_shared<std::string>();
  CLI::App* c = line.add("recipes", "Print configurations for common cases",
                         "  nrl-train recipes\n"
                         "  nrl-train recipes one-node > run.yaml");
  c->add_option("name", *name, "Recipe to print (default: a list with what each assumes)");
  line.on(c, [name] { return run_recipes(*name); });
}

}  // namespace nrl::app
