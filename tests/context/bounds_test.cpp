// The boundaries of all attention calls of all ranks let each query see the keys of its document up to
// itself, each once, whatever the documents are.
#include "parallel/context/bounds.h"

#include <random>

#include "core/ops/attention.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::parallel;

namespace {

/// seen[query * tokens + key]: how often a call lets the query see the key.
class Seen {
 public:
  explicit Seen(int64_t tokens) : tokens_(tokens), counts_(static_cast<size_t>(tokens * tokens)) {}

  /// One call on these rows, given as tokens, in order.
  void call(const CallBounds& b, const std::vector<int64_t>& queries, const std::vector<int64_t>& keys,
            bool causal) {
    const auto* cu_q = static_cast<const int32_t*>(b.cu_q.data);
    const auto* cu_k = static_cast<const int32_t*>(b.cu_k.data);
    const int64_t sequences = b.cu_q.dim(0) - 1;
    REQUIRE(b.cu_k.dim(0) == b.cu_q.dim(0));
    REQUIRE(cu_q[sequences] == static_cast<int32_t>(queries.size()));
    REQUIRE(cu_k[sequences] == static_cast<int32_t>(keys.size()));
    for (int64_t s = 0; s < sequences; ++s)
      for (int32_t q = cu_q[s]; q < cu_q[s + 1]; ++q) {
        const int32_t end = causal ? cu_k[s + 1] - (cu_q[s + 1] - q) + 1 : cu_k[s + 1];
        for (int32_t k = cu_k[s]; k < end; ++k) ++counts_[queries[q] * tokens_ + keys[k]];
      }
  }
  int count(int64_t query, int64_t key) const { return counts_[query * tokens_ + key]; }

 private:
  int64_t tokens_;
  std::vector<int> counts_;
};

std::vector<int64_t> tokens_of(const ZigZag& z, int64_t begin, int64_t count) {
  std::vector<int64_t> tokens;
  for (int64_t row = begin; row < begin + count; ++row) tokens.push_back(z.global_row(row));
  return tokens;
}

void ring_calls(const std::vector<CallBounds>& views, int64_t samples, int64_t length, int size, int rank,
                Seen& seen) {
  const ZigZag z(samples, length, size, rank);
  for (int step = 0; step < size; ++step) {
    const ZigZag from(samples, length, size, (rank - step + size) % size);
    // The rows that take part: all of them, or with one sample the chunks that can see each other.
    int64_t query = 0, queries = z.rows(), keys = z.rows();
    if (step > 0 && samples == 1 && step <= rank) keys = z.chunk();
    if (step > 0 && samples == 1 && step > rank) query = queries = z.chunk();
    seen.call(views[step], tokens_of(z, query, queries), tokens_of(from, 0, keys), step == 0);
  }
}

void gather_calls(const std::vector<CallBounds>& views, const ZigZag& z, int64_t window, Seen& seen) {
  size_t call = 0;
  for (int64_t s = 0; s < z.samples(); ++s)
    for (int half = 0; half < 2; ++half) {
      std::vector<int64_t> keys;
      for (int64_t t = first_key(z.first_token(half), window); t < z.first_token(half) + z.chunk(); ++t)
        keys.push_back(s * z.length() + t);
      seen.call(views[call++], tokens_of(z, s * z.sample_rows() + half * z.chunk(), z.chunk()), keys, true);
    }
}

std::vector<int32_t> random_documents(std::mt19937& random, int64_t samples, int64_t length, double rate) {
  std::vector<int32_t> documents;
  std::bernoulli_distribution begins(rate);
  for (int64_t s = 0; s < samples; ++s)
    for (int64_t t = 0; t < length; ++t)
      if (t == 0 || begins(random)) documents.push_back(static_cast<int32_t>(s * length + t));
  documents.push_back(static_cast<int32_t>(samples * length));
  return documents;
}

void check(const ContextExchange& exchange, int64_t samples, int64_t length, int size,
           const std::vector<int32_t>& documents, int64_t window, bool padded) {
  Seen seen(samples * length);
  for (int rank = 0; rank < size; rank += exchange.a2a) {  // ranks of an all-to-all make the same calls
    const ZigZag z(samples, length, size, rank);
    const ContextBounds bounds(exchange, z, window);
    std::vector<int32_t> memory(static_cast<size_t>(bounds.capacity()));
    std::vector<CallBounds> views(static_cast<size_t>(bounds.calls()));
    bounds.write(documents, padded, memory.data(), memory.data(), views);
    if (exchange.gather)
      gather_calls(views, z, window, seen);
    else
      ring_calls(views, samples, length, size / exchange.a2a, rank / exchange.a2a, seen);
  }
  size_t document = 0;
  for (int64_t q = 0; q < samples * length; ++q) {
    while (documents[document + 1] <= q) ++document;
    for (int64_t k = 0; k < samples * length; ++k) {
      const bool visible = k >= documents[document] && k <= q;
      // Keys before the window may be left out of a call; the op masks the others.
      const bool in_window = window == 0 || k > q - window;
      if (visible && !in_window) continue;
      if (seen.count(q, k) != (visible ? 1 : 0))
        FAIL("query " << q << ", key " << k << ": " << seen.count(q, k));
    }
  }
}

}  // namespace

TEST_CASE("zig-zag shares partition the tokens, with equal causal work") {
  for (const int size : {1, 2, 3, 8}) {
    const int64_t samples = 3, length = 48;
    std::vector<int> held(static_cast<size_t>(samples * length));
    std::vector<int64_t> work;
    for (int rank = 0; rank < size; ++rank) {
      const ZigZag z(samples, length, size, rank);
      CHECK(z.rows() == samples * length / size);
      work.push_back(0);
      int64_t next = 0;
      for (int64_t row = 0; row < z.rows(); ++row) {
        ++held[z.global_row(row)];
        work.back() += z.global_row(row) % length + 1;
      }
      z.for_each_chunk([&](int64_t local, int64_t global, int64_t n) {
        CHECK(local == next);
        next = local + n;
        for (int64_t i = 0; i < n; ++i) CHECK(z.global_row(local + i) == global + i);
      });
      CHECK(next == z.rows());
    }
    CHECK(held == std::vector<int>(held.size(), 1));
    CHECK(work == std::vector<int64_t>(work.size(), work.front()));
  }
  CHECK_THROWS(ZigZag(1, 12, 4, 0));
}

TEST_CASE("every query sees the keys of its document up to itself once") {
  std::mt19937 random(5);
  for (const int size : {1, 2, 3, 4, 6})
    for (const int64_t samples : {1, 3})
      for (const int64_t chunk : {1, 2, 5})
        for (const double rate : {0.0, 0.05, 0.3, 1.0}) {
          const int64_t length = 2 * size * chunk;
          const std::vector<int32_t> documents = random_documents(random, samples, length, rate);
          CAPTURE(size, samples, chunk, documents);
          for (const bool padded : {false, true}) {
            for (int a2a = 1; a2a <= size; ++a2a)
              if (size % a2a == 0) check({.a2a = a2a}, samples, length, size, documents, 0, padded);
            for (const int64_t window : {0, 1, 4})
              check({.gather = true}, samples, length, size, documents, window, padded);
          }
        }
}

TEST_CASE("without packing the boundaries say that sequences have one length") {
  const std::vector<int32_t> documents = {0, 24, 48};
  const ContextBounds bounds({}, ZigZag(2, 24, 2, 0), 0);
  std::vector<int32_t> memory(static_cast<size_t>(bounds.capacity()));
  std::vector<CallBounds> views(static_cast<size_t>(bounds.calls()));
  bounds.write(documents, false, memory.data(), memory.data(), views);
  CHECK(views[0].cu_q.dim(0) == 3);
}

TEST_CASE("exchanges by name") {
  CHECK(context_exchange(CpCommType::p2p, 4, 1) == ContextExchange{});
  CHECK(context_exchange(CpCommType::a2a, 4, 1) == ContextExchange{.a2a = 4});
  CHECK(context_exchange(CpCommType::a2a_p2p, 4, 2) == ContextExchange{.a2a = 2});
  CHECK(context_exchange(CpCommType::all_gather, 4, 1) == ContextExchange{.gather = true});
}

TEST_CASE("the lengths of the calls are known where every sample is one document") {
  const auto whole = [](const std::vector<int32_t>& documents, bool padded, bool gather) {
    const ZigZag z(2, 16, 2, 1);
    const ContextBounds bounds({.gather = gather}, z, 0);
    std::vector<int32_t> memory(static_cast<size_t>(bounds.capacity()));
    std::vector<CallBounds> views(static_cast<size_t>(bounds.calls()));
    bounds.write(documents, padded, memory.data(), memory.data(), views);
    for (const CallBounds& view : views) CHECK(view.whole == views.front().whole);
    return views.front().whole;
  };
  for (const bool gather : {false, true}) {
    CHECK(whole({0, 16, 32}, false, gather));
    CHECK_FALSE(whole({0, 16, 32}, true, gather));  // another microbatch may have documents
    CHECK_FALSE(whole({0, 3, 16, 32}, false, gather));
  }
}
