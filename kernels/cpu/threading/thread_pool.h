// A pool of threads that live as long as the process.
#pragma once

#include <cstdint>
#include <functional>

namespace quire {

// Calls `work(0)` on this thread, and `work(i)` for i from 1 to `num_threads - 1` on threads of the
// pool. A pool thread without a core until `work(0)` returns does not call it; one that starts late may
// call it twice. Returns when `work(0)` has returned and no pool thread executes work. Work must neither
// throw nor call this function. While another caller uses the pool, only `work(0)` is called.
//
// Idle threads spin for a moment and then sleep. At the end of a parallel region OpenMP, which ATen
// would use, waits for all its threads, even for those that have not begun. This pool waits only for
// threads that have.
void run_on_pool(int64_t num_threads, const std::function<void(int64_t thread)>& work);

// Wakes the threads that sleep: to wake up takes them as long as it takes to prepare work. They spin for
// the next moment.
void call_pool();

}  // namespace quire
