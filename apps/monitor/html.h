#pragma once
// Parts of HTML pages. Pages are self-contained, without scripts or external files, and follow the browser's
// light or dark scheme.

#include <string>
#include <string_view>

namespace nrl::monitor {

/// Text as the content of an element or an attribute; control characters become blanks.
std::string html_escaped(std::string_view text);

/// A page up to its heading, with the common style, then `more_style`. Escapes title and heading.
std::string page_begin(std::string_view title, std::string_view heading, std::string_view more_style = "");
inline constexpr std::string_view page_end = "</body></html>\n";

}  // namespace nrl::monitor
