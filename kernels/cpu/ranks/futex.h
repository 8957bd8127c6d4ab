// Sleeping until a number in shared memory changes, by Linux's futex. Elsewhere, short sleeps.
#pragma once

#include <atomic>
#include <cstdint>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#else
#include <algorithm>
#include <chrono>
#include <thread>
#endif

namespace quire::ranks {

#ifdef __linux__

inline void futex(std::atomic<uint32_t>& number, int operation, uint32_t value,
                  const timespec* timeout) {
  syscall(SYS_futex, &number, operation, value, timeout, nullptr, 0);
}

// Sleeps while the number is `seen`, for at most so long. May return early.
inline void sleep_while_equal(std::atomic<uint32_t>& number, uint32_t seen, int64_t most_ns) {
  const timespec timeout{static_cast<time_t>(most_ns / 1'000'000'000),
                         static_cast<long>(most_ns % 1'000'000'000)};
  futex(number, FUTEX_WAIT, seen, &timeout);
}

inline void wake_all(std::atomic<uint32_t>& number) {
  futex(number, FUTEX_WAKE, INT_MAX, nullptr);
}

#else

inline void sleep_while_equal(std::atomic<uint32_t>& number, uint32_t seen, int64_t most_ns) {
  if (number == seen) std::this_thread::sleep_for(std::chrono::nanoseconds(std::min<int64_t>(most_ns, 50'000)));
}

inline void wake_all(std::atomic<uint32_t>&) {}

#endif

}  // namespace quire::ranks
