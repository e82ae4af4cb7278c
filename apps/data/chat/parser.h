#pragma once
// Parses the tokens of a template.

#include <memory>
#include <string>

#include "apps/data/chat/ast.h"
#include "apps/data/chat/chat_template.h"

namespace nrl::data::chat {

/// Parses a template. Error (Exit::data) "NAME:line:column: ...".
std::shared_ptr<const ChatTemplate::Program> parse_template(std::string source, std::string name);

}  // namespace nrl::data::chat
