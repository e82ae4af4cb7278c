#pragma once
// Finds the text of the assistant's turns in a rendered conversation, for loss masks.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "apps/data/chat/chat_template.h"

namespace nrl::data {

/// The turn of one assistant message: `region` begins after the role header and ends after the end-of-turn
/// token. `ended` is false if the text has no such token after the content: then the region ends with the
/// content, and the model would not learn to stop.
struct AssistantSpan {
  size_t message = 0;  ///< index of the message
  Region region;       ///< bytes of Rendered::text
  bool ended = false;
};

/// The spans of the assistant messages of `rendered`, which `chat` made of `conversation` with `options`, in
/// order; a message that the template leaves out has none. `end_tokens` are the texts of the tokens that may
/// end a turn. Error (Exit::data) naming the template and the message if the beginning of a turn cannot be
/// found.
std::vector<AssistantSpan> assistant_spans(const ChatTemplate& chat, const Conversation& conversation,
                                           const RenderOptions& options, const Rendered& rendered,
                                           std::span<const std::string> end_tokens);

}  // namespace nrl::data
