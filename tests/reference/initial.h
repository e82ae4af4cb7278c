#pragma once
// Initial weights as random numbers, and weights that make float arithmetic overflow.

#include <cstdint>
#include <string>

namespace reference {

/// Checks the weights of `model` by statistics: the normal distributions, ones and zeros that its family
/// prescribes, and that every tensor is independent of every other and of those of `other`, the same model
/// from another seed. Returns the exit code.
int compare_initial_weights(const std::string& model, const std::string& other);

/// Sets the embedding of a token in `model`/model.safetensors (f32) to 3e38: finite, but any sum of its
/// elements is infinite. Returns the exit code.
int poison_embedding(const std::string& model, int32_t token);

}  // namespace reference
