// Token dispatch on the CPU; contracts in core/ops/dispatch.h.

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr int64_t grain_elements = 8192;

int64_t row_grain(int64_t width) {
  return std::max<int64_t>(1, grain_elements / std::max<int64_t>(width, 1));
}

/// Whether the entry is among the `capacity` most probable of its expert; of equals the first are.
bool is_kept(const int32_t* expert, const float* prob, int64_t entries, int64_t entry, int64_t capacity) {
  int64_t better = 0;
  for (int64_t i = 0; i < entries && better < capacity; ++i)
    better += expert[i] == expert[entry] && (prob[i] > prob[entry] || (prob[i] == prob[entry] && i < entry));
  return better < capacity;
}

// One thread: a few operations per entry.
void sort_kernel(Exec& exec, const DispatchSort& a) {
  const int64_t entries = a.expert.numel(), experts = a.offsets.dim(0) - 1;
  const int32_t* expert = data_of<const int32_t>(a.expert);
  const float* prob = data_of<const float>(a.prob);
  int32_t* offsets = data_of<int32_t>(a.offsets);
  int32_t* row = data_of<int32_t>(a.row);
  int32_t* source = data_of<int32_t>(a.source);
  const auto of = [&](int64_t i) { return expert[i] - a.first; };
  const auto valid = [&](int64_t i) { return of(i) >= 0 && of(i) < experts; };
  int32_t next[1024 + 1] = {}, count[1024] = {};
  for (int64_t i = 0; i < entries; ++i)
    if (valid(i)) ++count[of(i)];
  const bool limited = a.capacity > 0;
  const auto capacity = static_cast<int32_t>(a.capacity);
  offsets[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int32_t kept = limited ? std::min(count[e], capacity) : count[e];
    next[e] = offsets[e];
    offsets[e + 1] = offsets[e] + (a.pad ? capacity : kept);
  }
  std::fill_n(source, a.source.dim(0), -1);
  if (limited && prob) {
    cpu::parallel_for(exec.threads, entries, 64, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        row[i] =
            valid(i) && (count[of(i)] <= capacity || is_kept(expert, prob, entries, i, capacity)) ? 0 : -1;
    });
  } else {
    std::fill_n(row, entries, 0);
  }
  int32_t used[1024] = {};
  for (int64_t i = 0; i < entries; ++i) {
    const int64_t e = of(i);
    if (row[i] < 0 || !valid(i) || (limited && used[e] == capacity)) {
      row[i] = -1;
      continue;
    }
    ++used[e];
    row[i] = next[e]++;
    source[row[i]] = static_cast<int32_t>(i);
  }
}

template <class T>
void permute_rows(Exec& exec, const Permute& a) {
  const int64_t h = a.x.dim(1);
  const int32_t* source = data_of<const int32_t>(a.source);
  cpu::parallel_for(exec.threads, a.source.dim(0), row_grain(h), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      T* out = data_of<T>(a.out) + r * a.out.stride[0];
      const auto bytes = static_cast<size_t>(h) * sizeof(T);
      if (source[r] < 0)
        std::memset(static_cast<void*>(out), 0, bytes);
      else
        std::memcpy(static_cast<void*>(out), data_of<const T>(a.x) + source[r] / a.top_k * a.x.stride[0],
                    bytes);
    }
  });
}

template <class T>
void regroup(Exec& exec, const RegroupRows& a) {
  const int64_t h = a.x.dim(1), groups = a.place.dim(0);
  const int32_t *begin = data_of<const int32_t>(a.begin), *place = data_of<const int32_t>(a.place);
  // By rows, as groups differ in size.
  cpu::parallel_for(exec.threads, a.out.dim(0), row_grain(h), [&](int64_t first, int64_t end) {
    int64_t g = std::upper_bound(begin, begin + groups + 1, first) - begin - 1;
    for (int64_t r = first; r < end; ++r) {
      while (r >= begin[g + 1]) ++g;
      const int64_t placed = place[g] + r - begin[g];
      std::memcpy(static_cast<void*>(data_of<T>(a.out) + (a.placed_in ? r : placed) * a.out.stride[0]),
                  data_of<const T>(a.x) + (a.placed_in ? placed : r) * a.x.stride[0],
                  static_cast<size_t>(h) * sizeof(T));
    }
  });
}

template <class T>
void unpermute_rows(Exec& exec, const Unpermute& a) {
  const int64_t n = a.out.dim(0), k = (a.row ? a.row : a.prob).dim(1), h = a.x.dim(1);
  const int32_t* row = data_of<const int32_t>(a.row);
  const float* prob = data_of<const float>(a.prob);
  cpu::parallel_for(exec.threads, n, row_grain(h * k), [&](int64_t begin, int64_t end) {
    constexpr int64_t block = 512;
    float sum[block];
    for (int64_t t = begin; t < end; ++t) {
      T* out = data_of<T>(a.out) + t * a.out.stride[0];
      for (int64_t i = 0; i < h; i += block) {
        const int64_t count = std::min(block, h - i);
        const T* first = a.addend ? data_of<const T>(a.addend) + t * a.addend.stride[0] + i : nullptr;
        for (int64_t j = 0; j < count; ++j) sum[j] = first ? static_cast<float>(first[j]) : 0.0f;
        for (int64_t c = 0; c < k; ++c) {
          const int64_t r = row ? row[t * k + c] : t * k + c;
          if (r < 0) continue;
          const float p = prob ? prob[t * k + c] : 1.0f;
          const T* x = data_of<const T>(a.x) + r * a.x.stride[0] + i;
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) sum[j] += p * static_cast<float>(x[j]);
        }
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) store(out[i + j], sum[j]);
      }
    }
  });
}

template <class T>
void gate_rows(Exec& exec, const GateBackward& a) {
  const int64_t entries = a.prob.numel(), f = a.dact.dim(1);
  const int32_t* row = data_of<const int32_t>(a.row);
  cpu::parallel_for(exec.threads, entries, row_grain(f), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = row ? row[i] : i;
      float dot = 0;
      if (r >= 0) {
        const float p = data_of<const float>(a.prob)[i];
        const T* dact = data_of<const T>(a.dact) + r * a.dact.stride[0];
        const T* act = data_of<const T>(a.act) + r * a.act.stride[0];
        T* dact_out = data_of<T>(a.dact_out) + r * a.dact_out.stride[0];
        T* act_out = data_of<T>(a.act_out) + r * a.act_out.stride[0];
#pragma omp simd reduction(+ : dot)
        for (int64_t j = 0; j < f; ++j) dot += static_cast<float>(dact[j]) * static_cast<float>(act[j]);
#pragma omp simd
        for (int64_t j = 0; j < f; ++j) {
          store(dact_out[j], p * static_cast<float>(dact[j]));
          store(act_out[j], p * static_cast<float>(act[j]));
        }
      }
      data_of<float>(a.dprob)[i] = dot;
    }
  });
}

void permute_kernel(Exec& exec, const Permute& a) {
  for_float_type(a.x.dtype, [&]<class T>() { permute_rows<T>(exec, a); });
}
void regroup_kernel(Exec& exec, const RegroupRows& a) {
  for_float_type(a.x.dtype, [&]<class T>() { regroup<T>(exec, a); });
}
void unpermute_kernel(Exec& exec, const Unpermute& a) {
  for_float_type(a.x.dtype, [&]<class T>() { unpermute_rows<T>(exec, a); });
}
void gate_kernel(Exec& exec, const GateBackward& a) {
  for_float_type(a.dact.dtype, [&]<class T>() { gate_rows<T>(exec, a); });
}

}  // namespace

void fill_dispatch(KernelTable& table) {
  table.dispatch_sort = sort_kernel;
  table.permute = permute_kernel;
  table.regroup_rows = regroup_kernel;
  table.unpermute = unpermute_kernel;
  table.gate_backward = gate_kernel;
}

}  // namespace nrl::ops::NRL_ISA
