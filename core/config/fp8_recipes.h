#pragma once
// The FP8 recipes: one row each, from which formats, checks and help texts follow.

#include <string>
#include <string_view>
#include <vector>

#include "core/base/scaling.h"
#include "core/config/enums.h"

namespace nrl {

struct Fp8RecipeRules {
  Fp8Recipe recipe;
  Scaling input, weight, gradient;
  bool history = false;   ///< scales of tensors follow from earlier steps; else from the numbers themselves
  std::string_view text;  ///< for help: whose scales
  /// Scales give the range, so that gradients need no e5m2.
  constexpr bool blocks() const { return has_scale_blocks(input); }
  /// The scales of a weight also fit the transposed weight, so that the same FP8 numbers give both copies.
  constexpr bool transposes() const { return weight == Scaling::tensor || weight == Scaling::block128; }
};

inline constexpr Fp8RecipeRules fp8_recipes[] = {
    {Fp8Recipe::tensorwise, Scaling::tensor, Scaling::tensor, Scaling::tensor, false,
     "of a tensor, from its largest number"},
    {Fp8Recipe::delayed, Scaling::tensor, Scaling::tensor, Scaling::tensor, true,
     "of a tensor, from earlier steps"},
    {Fp8Recipe::blockwise, Scaling::row128, Scaling::block128, Scaling::row128, false,
     "of 1 x 128 values, and 128 x 128 of weights, powers of two"},
    {Fp8Recipe::mxfp8, Scaling::mx32, Scaling::mx32, Scaling::mx32, false,
     "of 32 values, powers of two (Blackwell GPUs and CPUs)"},
};
static_assert([] {
  for (size_t i = 0; i < std::size(fp8_recipes); ++i)
    if (fp8_recipes[i].recipe != static_cast<Fp8Recipe>(i)) return false;
  return std::size(fp8_recipes) == std::size(EnumNames<Fp8Recipe>::names);
}());
constexpr const Fp8RecipeRules& rules_of(Fp8Recipe recipe) {
  return fp8_recipes[static_cast<int>(recipe)];
}

/// The names of the recipes that a predicate of their rules selects.
template <class Predicate>
std::vector<std::string_view> fp8_recipes_with(Predicate selects) {
  std::vector<std::string_view> names;
  for (const Fp8RecipeRules& r : fp8_recipes)
    if (selects(r)) names.push_back(name_of(r.recipe));
  return names;
}

}  // namespace nrl
