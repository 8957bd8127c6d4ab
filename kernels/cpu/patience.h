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

class Patience {
 public:
  // Once around a loop that waits. Now and then it leaves the core to others: it may be theirs that
  // it waits for.
  void look_again() {
    if (++looks_ % kLooks == 0) std::this_thread::yield();
#ifdef __x86_64__
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // Of every so many looks, whether this is one at which to look at the clock, too.
  bool is_time_to_look_at_the_clock() const { return looks_ % kLooksPerClock == 0; }

 private:
  static constexpr int64_t kLooks = 4096, kLooksPerClock = 64;

  int64_t looks_ = 0;
};

}  // namespace quire
