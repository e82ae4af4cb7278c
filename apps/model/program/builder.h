#pragma once
// The arguments of constructors of layers' parts.

#include <functional>

#include "apps/model/spec/row_domains.h"
#include "memory/layer_table.h"
#include "precision/recipe.h"

namespace nrl::model {

/// Adds a slot to the layer's table.
using AddSlot = std::function<memory::Slot(const memory::SlotSpec&)>;

/// The model, its division and its precision, and the table of slots of one layer. Parts of layers use it in
/// their constructors and do not keep it.
struct LayerBuilder {
  const ModelSpec& spec;  ///< of the rank's part of the model (tensor_part())
  const ModelLayout& layout;
  const precision::Recipe& recipe;
  int layer = 0;  ///< index of the block
  AddSlot add = {};
  std::function<bool(int parameter)> trains = {};  ///< LayerContext::trains()

  /// Slots in the recipe's type of activations, and of gradients.
  memory::Slot activation(std::string_view name, int64_t width, RowDomain rows,
                          std::string_view rules = "") const {
    return add({.name = name, .width = width, .dtype = recipe.activations(), .rows = rows, .rules = rules});
  }
  /// A slot of the residual stream, or of its gradient, that the neighboring layer owns.
  memory::Slot port(std::string_view name, DType dtype) const {
    return add({.name = name, .width = spec.hidden, .dtype = dtype, .rows = sequence_rows, .port = true});
  }
  memory::Slot gradient(std::string_view name, int64_t width, RowDomain rows) const {
    return add({.name = name, .width = width, .dtype = recipe.gradients(), .rows = rows});
  }
  /// (1) f32. `port`: another layer writes it.
  memory::Slot number(std::string_view name, bool port = false) const {
    return add({.name = name, .width = 1, .rows = one_row, .port = port});
  }
};

}  // namespace nrl::model
