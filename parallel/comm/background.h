#pragma once
// Threads that communicate beside the thread of the steps.

namespace nrl::comm {

/// From now on this thread waits for its operations without running any: the executor's thread does. It looks
/// now and then, so that it takes no time from a core, and what it waits for is not the state of this rank
/// (status::Page), nor exposed communication. It must use communicators of its own.
void wait_in_background();

}  // namespace nrl::comm
