// fp8 by search: each number is compared with all of the format.

#include "core/ops/fp8.h"

#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

void encode(Exec&, const Fp8Encode& a) {
  const std::vector<double> all = fp8_numbers(a.format);
  const int64_t width = a.x.dim(1), bytes = a.out.dim(1);
  for (int64_t row = 0; row < a.x.dim(0); ++row)
    for (int64_t at = 0; at < width; at += fp8_block) {
      const int64_t n = std::min(fp8_block, width - at), first = row * width + at;
      uint8_t* out = static_cast<uint8_t*>(a.out.data) + row * bytes;
      // The sum that is encoded is an f32.
      std::vector<double> v;
      double largest = 0;
      bool finite = true;
      for (int64_t i = first; i < first + n; ++i) {
        const auto x = static_cast<float>(load(a.x, i));
        v.push_back(static_cast<double>(a.error ? x + static_cast<float>(load(a.error, i)) : x));
        finite = finite && std::isfinite(v.back());
        largest = std::max(largest, std::fabs(v.back()));
      }
      int scale = 0;
      if (largest > 0 && finite)
        for (scale = 1; largest > std::ldexp(all.back(), scale - 127);) ++scale;
      out[width + at / fp8_block] = static_cast<uint8_t>(finite ? scale : 255);
      for (int64_t i = 0; i < n; ++i) {
        uint8_t& code = out[at + i];
        code = 0;
        if (!finite) continue;
        const double x = v[i], size = std::fabs(std::ldexp(x, 127 - scale));
        for (size_t c = 1; c < all.size(); ++c) {
          const double nearer = std::fabs(all[c] - size) - std::fabs(all[code] - size);
          if (nearer < 0 || (nearer == 0 && c % 2 == 0)) code = static_cast<uint8_t>(c);
        }
        if (std::signbit(x)) code |= 0x80;
        if (a.error) store(a.error, first + i, x - std::ldexp(fp8_number(code, all), scale - 127));
      }
    }
}

void decode(Exec&, const Fp8Decode& a) {
  const std::vector<double> all = fp8_numbers(a.format);
  const int64_t width = a.out.dim(1), bytes = a.x.dim(1), parts = a.x.dim(0) / a.out.dim(0);
  for (int64_t g = 0; g < a.out.dim(0); ++g)
    for (int64_t i = 0; i < width; ++i) {
      double sum = 0;
      for (int64_t p = 0; p < parts; ++p) {
        const auto* row = static_cast<const uint8_t*>(a.x.data) + (g * parts + p) * bytes;
        const uint8_t scale = row[width + i / fp8_block];
        sum += scale == 255 ? NAN : scale == 0 ? 0 : std::ldexp(fp8_number(row[i], all), scale - 127);
      }
      store(a.out, g * width + i, sum);
    }
}

}  // namespace

void fill_fp8(KernelTable& table) {
  table.fp8_encode = encode;
  table.fp8_decode = decode;
}

}  // namespace nrl::ops::reference
