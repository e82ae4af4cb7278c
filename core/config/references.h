#pragma once
// Values that depend on those of other keys. Internal to core/config.

#include "core/config/given.h"

namespace nrl::config_detail {

/// `mixed_precision: true` of older NeMo documentation: a 16-bit precision, bfloat16 unless one is named.
void apply_mixed_precision(GivenKeys& given, Report& report);

/// Multiplies the values of aliases that count in units of another key (training.batch_size). Refused where
/// the same text gives the key itself with another value than the product.
void apply_products(GivenKeys& given, Report& report);

/// Replaces values that are exactly "${a.b}" by the value of that key.
void resolve_references(GivenKeys& given, const Schema& schema, Report& report);

}  // namespace nrl::config_detail
