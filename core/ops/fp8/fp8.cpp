#include "core/ops/fp8.h"

#include "core/ops/shared/check.h"
#include "core/ops/traced.h"

namespace nrl::ops {
namespace {

double encoded_bytes(const Tensor& rows, int64_t width) {
  const int64_t blocks = (width + fp8_block - 1) / fp8_block;
  return static_cast<double>(rows.dim(0) * (width + blocks));
}

void check(const char* op, DType format, const Tensor& values, const Tensor& encoded, int64_t rows) {
  NRL_CHECK(format == DType::e4m3 || format == DType::e5m2, "{}: the format is {}", op, name_of(format));
  NRL_CHECK(values.data && values.rank == 2 && values.dtype == DType::f32 && values.contiguous() &&
                values.dim(1) > 0,
            "{}: the values are {}, wanted contiguous f32 (rows, W)", op, describe(values));
  NRL_CHECK(encoded.data && encoded.rank == 2 && encoded.dtype == DType::u8 && encoded.contiguous() &&
                encoded.dim(0) == rows && encoded.dim(1) == fp8_row_bytes(values.dim(1)),
            "{}: the encoded rows are {}, wanted u8[{}, {}]", op, describe(encoded), rows,
            fp8_row_bytes(values.dim(1)));
}

}  // namespace

Cost cost(const Exec&, const Fp8Encode& a) {
  const double error = bytes_of(a.error);
  return {.read = bytes_of(a.x) + error, .written = encoded_bytes(a.out, a.x.dim(1)) + error};
}

Cost cost(const Exec&, const Fp8Decode& a) {
  return {.read = encoded_bytes(a.x, a.out.dim(1)), .written = bytes_of(a.out)};
}

void fp8_encode(Exec& exec, const Fp8Encode& a) {
  if (noted(exec, Kernel::fp8_encode, a)) return;
  check("fp8_encode", a.format, a.x, a.out, a.x.dim(0));
  NRL_CHECK(!a.error || (a.error.rank == 2 && a.error.dtype == DType::f32 && a.error.contiguous() &&
                         a.error.dim(0) == a.x.dim(0) && a.error.dim(1) == a.x.dim(1)),
            "fp8_encode: error is {}, x is {}", describe(a.error), describe(a.x));
  const trace::Range range = traced(exec, Kernel::fp8_encode, a);
  exec.kernels->fp8_encode(exec, a);
}

void fp8_decode(Exec& exec, const Fp8Decode& a) {
  if (noted(exec, Kernel::fp8_decode, a)) return;
  NRL_CHECK(a.x.rank == 2 && a.out.rank == 2 && a.out.dim(0) > 0 && a.x.dim(0) % a.out.dim(0) == 0,
            "fp8_decode: x is {}, out is {}", describe(a.x), describe(a.out));
  check("fp8_decode", a.format, a.out, a.x, a.x.dim(0));
  const trace::Range range = traced(exec, Kernel::fp8_decode, a);
  exec.kernels->fp8_decode(exec, a);
}

}  // namespace nrl::ops
