#pragma once
// Merging of adapters into the weights of their base model.

#include <string>

namespace nrl::train {

/// Writes the base model of the adapter in `directory` as a model directory `output`, which must not exist:
/// its files, with W + s B A in place of every W that has an adapter, computed in f32 and rounded once to the
/// type of W, and the tokenizer of the adapter where it has one. Nothing remains of an attempt that fails.
void merge_adapter(const std::string& directory, const std::string& output);

}  // namespace nrl::train
