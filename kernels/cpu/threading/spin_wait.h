// Waiting for other threads without sleeping.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

namespace quire {

inline int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

class SpinWait {
 public:
  // One iteration of a waiting loop. Yields the core now and then: the awaited thread may need it.
  void spin_once() {
    if (++spins_ % kSpinsPerYield == 0) std::this_thread::yield();
#ifdef __x86_64__
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // Whether the loop should read the clock in this iteration.
  bool is_clock_due() const { return spins_ % kSpinsPerClock == 0; }

 private:
  static constexpr int64_t kSpinsPerYield = 4096, kSpinsPerClock = 64;

  int64_t spins_ = 0;
};

}  // namespace quire
