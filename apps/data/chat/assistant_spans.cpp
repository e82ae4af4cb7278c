#include "apps/data/chat/assistant_spans.h"
namespace nrl::data {}
