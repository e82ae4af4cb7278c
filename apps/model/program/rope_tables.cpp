#include "apps/model/program/rope_tables.h"

#include <utility>

#include "core/ops/rope.h"
#include "core/ops/transfer.h"

namespace nrl::model {

int64_t rope_table_bytes(const ModelSpec& spec, int64_t positions) {
  int64_t bytes = 0;
  for (const ops::RopeSpec& rope : spec.ropes) bytes += positions * rope.rotary_dim * 4;
  return spec.use_rope ? bytes : 0;
}

std::vector<Tensor> rope_tables_at(const ModelSpec& spec, int64_t positions, void* memory) {
  std::vector<Tensor> tables;
  if (!spec.use_rope) return tables;
  auto* next = static_cast<float*>(memory);
  for (const ops::RopeSpec& rope : spec.ropes)
    tables.push_back(
        make_tensor(next == nullptr ? nullptr : std::exchange(next, next + positions * rope.rotary_dim),
                    DType::f32, {positions, rope.rotary_dim}));
  return tables;
}

void fill_rope_tables(ops::Exec& exec, const ModelSpec& spec, const std::vector<Tensor>& tables) {
  for (size_t i = 0; i < tables.size(); ++i) {
    const int64_t positions = tables[i].dim(0);
    ops::upload(exec, tables[i], ops::rope_table(spec.ropes[i], positions, positions).data());
  }
}

}  // namespace nrl::model
