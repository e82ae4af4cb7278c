#pragma once
// Where the pieces of logical tensors lie that manifests of single ranks describe, in a text that does not
// grow with the ranks if they hold equal parts.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/io/checkpoint_manifest.h"

namespace nrl {

/// The place of a piece in its logical tensor (see CheckpointShard), and the rank whose manifest has the
/// rest.
struct PiecePlace {
  int rank = 0;
  int64_t offset = 0, count = 0, run = 0, stride = 0;
  bool operator==(const PiecePlace&) const = default;
};

/// "rank,offset,count" of each piece, then ",run,stride" unless it is a single run, separated by spaces. n
/// pieces of one size whose ranks and offsets grow evenly are one entry that ends in ",n,ranks,elements",
/// with the steps of both. The order of the pieces is not kept.
std::string pack_places(std::vector<PiecePlace> places);
/// At most 4 Mi pieces. Exit::data for any other text.
std::vector<PiecePlace> unpack_places(std::string_view packed);

/// The places of one rank's pieces, without empty ones, for merge_places().
std::string places_to_text(const std::map<std::string, LogicalTensor>& tensors, int rank);
/// The tensors that the texts of all ranks describe: dtype, shape and `elsewhere`. Consumes the texts.
/// Exit::internal on two dtypes or shapes of a tensor.
std::map<std::string, LogicalTensor> merge_places(std::vector<std::string>& by_rank);

/// Elements [begin, begin + count) of a logical tensor are elements [stored, stored + count) of piece
/// `piece`.
struct PieceRun {
  int64_t begin = 0, count = 0;
  uint32_t piece = 0;
  int64_t stored = 0;
};

struct TensorPieces {
  /// In logical order. Pieces are numbered through LogicalTensor::shards and then through `elsewhere`.
  std::vector<PieceRun> runs;
  std::vector<PiecePlace> elsewhere;
};

/// The pieces of a tensor, in at most 4 Mi runs. Exit::data naming the tensor unless they cover every element
/// exactly once.
TensorPieces tensor_pieces(std::string_view name, const LogicalTensor& tensor);

}  // namespace nrl
