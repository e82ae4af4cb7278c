#pragma once
// Writes a tokenizer's files into a model directory.

#include <string>

#include "apps/data/tokenizer.h"
#include "core/io/atomic_file.h"

namespace nrl::test {

inline void write_files(const data::Tokenizer& tokenizer, const std::string& directory) {
  for (const data::Tokenizer::File& file : tokenizer.files())
    write_file_atomic(join_path(directory, file.name), file.content);
}

}  // namespace nrl::test
