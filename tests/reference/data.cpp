#include "tests/reference/data.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <stdexcept>

namespace reference {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Little-endian integer of `bytes` bytes at `offset`.
uint64_t integer_at(const std::string& data, size_t offset, size_t bytes) {
  if (offset + bytes > data.size()) throw std::runtime_error("a token file is too short");
  uint64_t value = 0;
  for (size_t i = bytes; i-- > 0;) value = value << 8 | static_cast<unsigned char>(data[offset + i]);
  return value;
}

void append_integer(std::string& data, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) data += static_cast<char>(value >> (8 * i));
}

// numpy.random.RandomState.shuffle: Fisher-Yates from the end; a partner is drawn by masking 32 bits to the
// next power of two and rejecting what is too large.
template <class T>
void shuffle(std::mt19937& random, T begin, T end) {
  for (auto last = static_cast<uint32_t>(end - begin); last-- > 1;) {
    uint32_t mask = last, partner = 0;
    for (int shift : {1, 2, 4, 8, 16}) mask |= mask >> shift;
    do partner = static_cast<uint32_t>(random()) & mask;
    while (partner > last);
    std::swap(begin[last], begin[partner]);
  }
}

int64_t count_tokens(const std::vector<Tokens>& documents) {
  int64_t tokens = 0;
  for (const Tokens& d : documents) tokens += static_cast<int64_t>(d.size());
  return tokens;
}

// [begin, end) of a part of `count` things. Bounds are rounded half to even.
std::pair<int64_t, int64_t> bounds(const std::array<double, 3>& split, int part, int64_t count) {
  const double sum = split[0] + split[1] + split[2];
  double begin = 0, end = 0;
  for (int i = 0; i <= part; ++i) {
    begin = end;
    end += split[i] / sum;
  }
  const auto place = [&](double share) {
    return static_cast<int64_t>(std::nearbyint(share * static_cast<double>(count)));
  };
  return {place(begin), place(end)};
}

// The documents of one part of a split. Where whole documents would leave training or validation without a
// token, the tokens are divided instead.
std::vector<Tokens> part_of(const DataSettings& data, const std::string& path, int part) {
  const std::vector<Tokens> all = read_token_file(path);
  const auto documents = [&](int which) {
    const auto [begin, end] = bounds(data.split, which, static_cast<int64_t>(all.size()));
    return std::vector<Tokens>(all.begin() + begin, all.begin() + end);
  };
  const auto lacks = [&](int which) { return data.split[which] > 0 && count_tokens(documents(which)) == 0; };
  if (!lacks(0) && !lacks(1)) return documents(part);
  const auto [begin, end] = bounds(data.split, part, count_tokens(all));
  std::vector<Tokens> pieces;
  int64_t at = 0;
  for (const Tokens& document : all) {
    pieces.emplace_back();
    for (const int32_t token : document) {
      if (at >= begin && at < end) pieces.back().push_back(token);
      ++at;
    }
    if (pieces.back().empty()) pieces.pop_back();
  }
  return pieces;
}

// GPTDataset: `count` samples of one path. Documents are shuffled over all epochs, laid end to end,
// cut into samples that share a token with their neighbor, and the samples are shuffled. A last epoch of
// which less than 80 % is needed is shuffled by itself, documents and samples.
std::vector<Tokens> gpt_dataset(const DataSettings& data, const std::string& path, int part, int64_t count) {
  const std::vector<Tokens> documents = part_of(data, path, part);
  const int64_t length = data.sequence_length, tokens = count_tokens(documents);
  if (tokens == 0) throw std::runtime_error(path + ": no tokens");
  int64_t epochs = 1;
  while (epochs * tokens < count * length + 1) ++epochs;
  const int64_t before_last = ((epochs - 1) * tokens - 1) / length;
  const bool separate =
      epochs > 1 &&
      count - before_last < static_cast<int64_t>(0.80 * static_cast<double>((tokens - 1) / length));

  std::mt19937 random(data.seed);
  std::vector<size_t> order;
  for (int64_t e = 0; e < epochs; ++e)
    for (size_t d = 0; d < documents.size(); ++d) order.push_back(d);
  const auto apart = order.end() - static_cast<std::ptrdiff_t>(separate ? documents.size() : 0);
  shuffle(random, order.begin(), apart);
  shuffle(random, apart, order.end());
  Tokens stream;
  for (const size_t d : order) stream.insert(stream.end(), documents[d].begin(), documents[d].end());

  std::vector<int64_t> places(static_cast<size_t>((epochs * tokens - 1) / length));
  std::iota(places.begin(), places.end(), int64_t{0});
  const auto middle = separate ? places.begin() + before_last : places.end();
  shuffle(random, places.begin(), middle);
  shuffle(random, middle, places.end());
  std::vector<Tokens> samples;
  for (int64_t i = 0; i < count; ++i) {
    const auto begin = stream.begin() + places.at(static_cast<size_t>(i)) * length;
    samples.emplace_back(begin, begin + length + 1);
  }
  return samples;
}

// BlendedDataset: each sample comes from the path that lags its share most.
std::vector<Tokens> blended_dataset(const DataSettings& data, int part, int64_t count) {
  const size_t paths = data.paths.size();
  std::vector<double> shares = data.weights;
  std::vector<int64_t> available;  // without weights: one epoch of each path
  for (size_t d = 0; d < paths; ++d)
    available.push_back(
        std::max<int64_t>((count_tokens(part_of(data, data.paths[d], part)) - 1) / data.sequence_length, 0));
  if (shares.empty()) shares.assign(available.begin(), available.end());
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  for (double& share : shares) share /= sum;
  // Half a percent more than the share, so that rounding never asks for a sample that is not there.
  if (!data.weights.empty() || count > std::accumulate(available.begin(), available.end(), int64_t{0}))
    for (size_t d = 0; d < paths; ++d)
      available[d] =
          static_cast<int64_t>(std::ceil(std::ceil(static_cast<double>(count) * shares[d]) * 1.005));

  std::vector<std::vector<Tokens>> sources;
  for (size_t d = 0; d < paths; ++d) sources.push_back(gpt_dataset(data, data.paths[d], part, available[d]));
  std::vector<size_t> taken(paths, 0);
  std::vector<Tokens> samples;
  for (int64_t i = 0; i < count; ++i) {
    size_t best = paths;
    double most = 0;
    for (size_t d = 0; d < paths; ++d) {
      const double lag =
          shares[d] * static_cast<double>(std::max<int64_t>(i, 1)) - static_cast<double>(taken[d]);
      if ((best == paths || lag > most) && taken[d] < sources[d].size()) most = lag, best = d;
    }
    samples.push_back(sources.at(best)[taken[best]++]);
  }
  return samples;
}

}  // namespace

std::vector<Tokens> read_token_file(const std::string& prefix) {
  const std::string index = read_file(prefix + ".idx"), tokens = read_file(prefix + ".bin");
  // "MMIDIDX\0\0", version, type, number of sequences, of documents; lengths; offsets in bytes.
  if (index.substr(0, 9) != std::string("MMIDIDX\0\0", 9) || integer_at(index, 9, 8) != 1)
    throw std::runtime_error(prefix + ".idx is not an index");
  const uint64_t type = integer_at(index, 17, 1), sequences = integer_at(index, 18, 8);
  if (type != 4 && type != 8) throw std::runtime_error(prefix + ".idx: tokens are neither int32 nor uint16");
  const size_t bytes = type == 4 ? 4 : 2;
  std::vector<Tokens> all(sequences);
  for (uint64_t s = 0; s < sequences; ++s) {
    const uint64_t length = integer_at(index, 34 + 4 * s, 4),
                   at = integer_at(index, 34 + 4 * sequences + 8 * s, 8);
    for (uint64_t i = 0; i < length; ++i)
      all[s].push_back(static_cast<int32_t>(integer_at(tokens, at + bytes * i, bytes)));
  }
  return all;
}

// Every token's distance from every end token before it decides, as in a mask of T x T.
Inputs make_inputs(const DataSettings& data, const Tokens& sample) {
  Inputs in{Tokens(sample.begin(), sample.end() - 1), Tokens(sample.begin() + 1, sample.end()), {}};
  const auto ends = [&](size_t t) { return in.tokens[t] == data.end_token; };
  for (size_t t = 0; t < in.tokens.size(); ++t) {
    size_t begin = 0;  // of the document of token t
    for (size_t s = 0; s < t; ++s)
      if (ends(s)) begin = s + 1;
    in.layout.positions.push_back(data.reset_position_ids ? t - begin : t);
    in.layout.first.push_back(data.reset_attention_mask ? begin : 0);
    if (data.eod_mask_loss && ends(t)) in.targets[t] = -1;
  }
  return in;
}

void write_token_file(const std::string& prefix, int32_t vocab_size, int documents, uint32_t seed,
                      int32_t end_token) {
  std::mt19937 random(seed);
  std::string lengths, offsets, tokens, ends;
  append_integer(ends, 0, 8);
  for (int d = 1; d <= documents; ++d) {
    uint32_t length = 3 + static_cast<uint32_t>(random()) % 40;
    if (end_token >= 0 && d % 7 == 0) length = 0;
    append_integer(lengths, length + (end_token >= 0 ? 1 : 0), 4);
    append_integer(offsets, tokens.size(), 8);
    append_integer(ends, static_cast<uint64_t>(d), 8);
    auto token = static_cast<uint32_t>(random());
    for (uint32_t i = 0; i < length; ++i) {
      token = (5 * token + 3 + static_cast<uint32_t>(random()) % 4) % static_cast<uint32_t>(vocab_size);
      append_integer(tokens, token, 2);
    }
    if (end_token >= 0) append_integer(tokens, static_cast<uint64_t>(end_token), 2);
  }
  std::string index("MMIDIDX\0\0", 9);
  append_integer(index, 1, 8);
  append_integer(index, 8, 1);
  append_integer(index, static_cast<uint64_t>(documents), 8);
  append_integer(index, static_cast<uint64_t>(documents) + 1, 8);
  std::ofstream(prefix + ".idx", std::ios::binary) << index << lengths << offsets << ends;
  std::ofstream(prefix + ".bin", std::ios::binary) << tokens;
}

int64_t epoch_samples(const DataSettings& data, int part) {
  int64_t samples = 0;
  for (const std::string& path : data.paths)
    samples += std::max<int64_t>((count_tokens(part_of(data, path, part)) - 1) / data.sequence_length, 0);
  return samples;
}

std::vector<Tokens> make_samples(const DataSettings& data, int part, int64_t count) {
  return data.paths.size() == 1 ? gpt_dataset(data, data.paths[0], part, count)
                                : blended_dataset(data, part, count);
}

}  // namespace reference
