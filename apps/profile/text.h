#pragma once
// A profile as text of at most 100 columns. Lines end with newlines.

#include <string>
#include <string_view>
#include <vector>

#include "apps/profile/profile.h"

namespace nrl::profile {

/// The choice of rows for the tables of operations.
struct OperationView {
  enum class By { name, part, layer } by = By::name;
  size_t top = 10;          ///< rows; 0: all
  double threshold_ms = 0;  ///< least mean time of a call
};

/// The step by cause, of the rank with most own work, and a warning for time without a cause.
std::string split_text(const Profile& profile);
/// Operations by the time lost; times are means over the ranks.
std::string operations_text(const Profile& profile, const OperationView& view = {});
/// The peak of the rank with most memory, and the largest buffers at it.
std::string memory_text(const Profile& profile, size_t top = 10);
/// Communication of the rank with most own work; empty if there was none.
std::string groups_text(const Profile& profile);
/// Ranks beside each other.
std::string ranks_text(const Profile& profile);
/// Findings with what would mend them.
std::string findings_text(const Profile& profile);
/// All of these.
std::string text(const Profile& profile, const OperationView& view = {});

/// Rows of cells with aligned columns, two blanks apart; the first `left` columns and the last one, if
/// `last_left`, are aligned to the left.
std::string aligned(const std::vector<std::vector<std::string>>& rows, size_t left, bool last_left = false);

}  // namespace nrl::profile
