#pragma once
// The tables of rotary angles of a model, one after the other in a buffer.

#include <vector>

#include "apps/model/spec/spec.h"
#include "core/ops/exec.h"

namespace nrl::model {

/// The bytes of the tables for `positions` positions; 0 without RoPE.
int64_t rope_table_bytes(const ModelSpec& spec, int64_t positions);
/// The tables at `memory`, in the order of ModelSpec::ropes, each (positions, rotary_dim) f32.
std::vector<Tensor> rope_tables_at(const ModelSpec& spec, int64_t positions, void* memory);
/// Fills them, for sequences of their length.
void fill_rope_tables(ops::Exec& exec, const ModelSpec& spec, const std::vector<Tensor>& tables);

}  // namespace nrl::model
