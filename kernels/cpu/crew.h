// Threads that stay, for work that several of them do together.
#pragma once

#include <cstdint>
#include <functional>

namespace quire {

// Calls `work(0)` here, and on other threads `work(1)` up to `work(num_threads - 1)` of those that
// get a core in time: work must not count on them, and they may come twice. Returns when `work(0)`
// has returned and nobody else is at it. Work must not throw, nor call this function.
//
// They look out for the next work for a moment and then sleep. OpenMP's threads, which ATen would
// take, are waited for at the end of each parallel region, also those that have not begun; here a
// thread whose core another process has is not missed.
void work_together(int64_t num_threads, const std::function<void(int64_t thread)>& work);

}  // namespace quire
