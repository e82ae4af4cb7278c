// The masks of dropout in a whole decoder: rate, scale and independence at every place.
//
// All weights that lead into a residual branch are 0, and so are the embeddings: the residual stream is 0
// whatever is dropped, and the only way back is the residual stream itself. The gradient of a bias that is
// added to it is then the gradient of the stream, dropped and scaled as the bias was. Divided by the gradient
// of the model without dropout it is the mask over (1 - p).

#include <cmath>
#include <map>

#include "tests/catch.h"
#include "tests/model/tiny_model.h"

using namespace nrl;
using test::TinyModel;

namespace {

constexpr int64_t hidden = 64, heads = 4;
constexpr int tokens = TinyModel::tokens;

/// Elements of one place for all tokens.
using Mask = std::vector<double>;

struct Draw {
  int64_t step = 1, first_row = 0;
};

std::string config(double embedding, double residual, double attention) {
  return fmt::format(R"({{"model_type":"gpt2","vocab_size":61,"n_embd":{},"n_layer":2,"n_head":{},
                         "n_positions":32,"tie_word_embeddings":false,
                         "embd_pdrop":{},"resid_pdrop":{},"attn_pdrop":{}}})",
                     hidden, heads, embedding, residual, attention);
}

class Probe : public TinyModel {
 public:
  explicit Probe(const std::string& text) : TinyModel(text, ops::cpu_kernels(cpu::best_isa()), 1) {
    for (size_t i = 0; i < weights_.size(); ++i) {
      const std::string& name = parameters_.all[i].parts.front().name;
      const bool kept = name.find("ln_") != std::string::npos || name.find("lm_head") != std::string::npos ||
                        name.ends_with("attn.c_proj.weight");
      if (!kept) std::fill(weights_[i].begin(), weights_[i].end(), 0.0f);
    }
  }

  /// The gradient of every bias before dropout, token by token, and of the values' bias, by place.
  std::map<std::string, Mask> gradients_at(const Draw& draw) {
    std::map<std::string, Mask> found;
    for (int token = 0; token < tokens; ++token) {
      std::vector<float> weight(tokens, 0.0f);
      weight[token] = -1.0f;
      std::vector<int32_t> target(tokens, 7);
      int64_t step = draw.step;
      model::MicroBatch b = batch();
      b.loss_weight = make_tensor(weight.data(), DType::f32, {tokens});
      b.target = make_tensor(target.data(), DType::i32, {tokens});
      b.step = make_tensor(&step, DType::i64, {1});
      b.first_row = draw.first_row;
      begin_gradients();
      decoder_.train({&b, 1}, {});
      const int64_t position = token < 12 ? token : token - 12;
      for (size_t i = 0; i < gradients_.size(); ++i) {
        const std::string& name = parameters_.all[i].parts.front().name;
        const float* g = gradients_[i].data();
        if (name.ends_with("wpe.weight"))
          add(found["embedding"], g + position * hidden, hidden);
        else if (name.ends_with("c_proj.bias"))
          add(found[name], g, hidden);
        else if (name.ends_with("c_attn.bias"))
          add(found[name], g + 2 * hidden, hidden);
      }
    }
    return found;
  }

 private:
  static void add(Mask& mask, const float* values, int64_t count) {
    mask.insert(mask.end(), values, values + count);
  }
};

/// Every gradient over that without dropout.
std::map<std::string, Mask> ratios(const std::string& dropped, const Draw& draw) {
  Probe plain(config(0, 0, 0)), probe(dropped);
  std::map<std::string, Mask> found = probe.gradients_at(draw);
  REQUIRE(found.size() == 1 + 2 * 3);  // the embedding; values, projection and MLP of two layers
  for (auto& [place, mask] : found) {
    const Mask whole = plain.gradients_at(draw).at(place);
    REQUIRE(whole.size() == mask.size());
    for (size_t i = 0; i < mask.size(); ++i) {
      REQUIRE(std::abs(whole[i]) > 1e-12);
      mask[i] /= whole[i];
    }
  }
  return found;
}

/// Share of the elements in which two masks agree.
double agreement(const Mask& a, const Mask& b) {
  double same = 0;
  for (size_t i = 0; i < a.size(); ++i) same += (a[i] == 0) == (b[i] == 0);
  return same / static_cast<double>(a.size());
}

bool is_attention(const std::string& place) {
  return place.ends_with("c_attn.bias");
}

/// That a mask drops the share p and scales what it keeps.
void check_mask(const Mask& mask, double p) {
  double dropped = 0;
  for (double ratio : mask) {
    if (ratio == 0)
      ++dropped;
    else
      CHECK(ratio == Approx(1 / (1 - p)).epsilon(1e-4));
  }
  CHECK(dropped / static_cast<double>(mask.size()) == Approx(p).margin(0.05));  // of 1216 draws
}

/// The same for attention. A token attends alike to all tokens up to its own, and each of them is dropped on
/// its own: the ratio is the share of those kept over (1 - p), the same for all elements of a head.
void check_attention(const Mask& mask, double p) {
  double kept = 0, all = 0;
  for (int token = 0; token < tokens; ++token) {
    const double seen = token < 12 ? token + 1 : token - 11;
    for (int64_t head = 0; head < heads; ++head) {
      const auto d = static_cast<size_t>(hidden / heads);
      const size_t first = static_cast<size_t>(token * heads + head) * d;
      const double count = mask[first] * (1 - p) * seen;
      CHECK(count == Approx(std::round(count)).margin(1e-3));
      for (size_t e = first; e < first + d; ++e) CHECK(mask[e] == Approx(mask[first]).margin(1e-4));
      kept += count;
      all += seen;
    }
  }
  CHECK(1 - kept / all == Approx(p).margin(0.1));  // of 424 draws
}

}  // namespace

TEST_CASE("every place drops with its own rate and scales by 1 / (1 - p)", "[model][dropout]") {
  const double embedding = 0.1, residual = 0.25, attention = 0.4;
  for (const auto& [place, mask] : ratios(config(embedding, 0, 0), {})) {
    CAPTURE(place);
    check_mask(mask, place == "embedding" ? embedding : 0);
  }
  for (const auto& [place, mask] : ratios(config(0, residual, 0), {})) {
    CAPTURE(place);
    // What flows into the values is dropped after them.
    if (!is_attention(place)) check_mask(mask, place == "embedding" ? 0 : residual);
  }
  for (const auto& [place, mask] : ratios(config(0, 0, attention), {})) {
    CAPTURE(place);
    if (is_attention(place))
      check_attention(mask, attention);
    else
      check_mask(mask, 0);
  }
}

TEST_CASE("no two places share a mask", "[model][dropout]") {
  const auto masks = ratios(config(0.5, 0.5, 0.5), {});
  for (const auto& [place, mask] : masks)
    for (const auto& [other, other_mask] : masks) {
      if (other <= place) continue;
      CAPTURE(place, other);
      // Independent masks agree in half of the elements.
      if (is_attention(place) || is_attention(other))
        CHECK(mask != other_mask);
      else
        CHECK(agreement(mask, other_mask) == Approx(0.5).margin(0.06));
    }
}

TEST_CASE("masks depend on the step and on the row in the global batch alone", "[model][dropout]") {
  const std::string dropped = config(0.5, 0.5, 0.5);
  const auto masks = ratios(dropped, {.step = 1}), next = ratios(dropped, {.step = 2}),
             again = ratios(dropped, {.step = 1}), later = ratios(dropped, {.step = 1, .first_row = 12});
  for (const auto& [place, mask] : masks) {
    CAPTURE(place);
    CHECK(again.at(place) == mask);
    CHECK(next.at(place) != mask);
    CHECK(later.at(place) != mask);
    if (!is_attention(place)) CHECK(agreement(mask, next.at(place)) == Approx(0.5).margin(0.06));
    // Rows 12 to 18 are the second sequence here, and the first one where the microbatch begins at row 12.
    for (int64_t e = 0; e < 7 * hidden; ++e)
      CHECK(later.at(place)[e] == Approx(mask[12 * hidden + e]).margin(1e-4));
  }
}
