#pragma once
// Hashes of memory that do not depend on the order in which it is read, to compare the bits of replicas.

#include "core/ops/exec.h"

namespace nrl::ops {

/// out[0] += sum over i of word[i] * (2 (first + i) + 1), modulo 2^64, where the words are the bits of the
/// elements as unsigned numbers. Any number of threads or blocks and every device give the same sum. Since
/// the factors are odd, it changes with every single bit; since they differ by less than 2^32 up to 2^31
/// elements, also with every exchange of two different elements.
struct AddHash {
  Tensor x;           ///< (n) contiguous, of at most 4 bytes per element
  Tensor out;         ///< (1) i64: the bits of the sum; not among x
  int64_t first = 0;  ///< the place of x in a tensor that is hashed in parts
};
void add_hash(Exec& exec, const AddHash& a);
Cost cost(const Exec& exec, const AddHash& a);

}  // namespace nrl::ops
