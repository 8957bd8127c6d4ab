#include "crew.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "patience.h"

namespace quire {
namespace {

using Work = std::function<void(int64_t)>;

// How long a thread looks out for the next work: longer than what lies between two operations of a
// step, and shorter than what lies between two steps, when other processes need the core.
constexpr int64_t kLookoutNs = 500'000;

class Crew {
 public:
  void work_together(int64_t num_threads, const Work& work) {
    // Who finds the crew at somebody else's work does without.
    if (busy_.test_and_set()) return work(0);
    hire(num_threads - 1);
    num_threads_ = num_threads;
    work_ = &work;
    ++number_;
    if (num_sleeping_ > 0) wake();
    work(0);
    work_ = nullptr;
    Patience patience;
    while (num_inside_ > 0) patience.look_again();
    busy_.clear();
  }

 private:
  // As many as the system gives.
  void hire(int64_t count) {
    if (num_helpers_ >= count) return;
    // Signals are for threads that somebody knows, but for those that a thread causes itself.
    sigset_t others, before;
    sigfillset(&others);
    for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&others, own);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    try {
      for (; num_helpers_ < count; ++num_helpers_) {
        std::thread([this, thread = num_helpers_ + 1, seen = number_.load()] {
          help(thread, seen);
        }).detach();
      }
    } catch (const std::exception&) {
      // The others do without it.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void wake() {
    // One that is about to sleep looks at the number once more under this lock.
    { const std::lock_guard<std::mutex> lock(sleep_); }
    woken_.notify_all();
  }

  // The life of a thread.
  void help(int64_t thread, int64_t seen) {
    pthread_setname_np(pthread_self(), "quire-crew");
    for (;;) {
      look_out(seen);
      seen = number_;
      if (!work_) continue;
      // Who is inside finds the work there, or finds that it is over; in between it stays.
      ++num_inside_;
      if (const Work* work = work_; work && thread < num_threads_) (*work)(thread);
      --num_inside_;
    }
  }

  // Until there is work of another number than that.
  void look_out(int64_t seen) {
    const int64_t begun_ns = now_ns();
    Patience patience;
    while (number_ == seen) {
      patience.look_again();
      if (patience.is_time_to_look_at_the_clock() && now_ns() - begun_ns > kLookoutNs) {
        std::unique_lock<std::mutex> lock(sleep_);
        ++num_sleeping_;
        woken_.wait(lock, [&] { return number_ != seen; });
        --num_sleeping_;
      }
    }
  }

  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  int64_t num_helpers_ = 0;
  std::atomic<const Work*> work_{nullptr};
  std::atomic<int64_t> num_threads_{0}, number_{0}, num_inside_{0}, num_sleeping_{0};
  std::mutex sleep_;
  std::condition_variable woken_;
};

// That of this process, as its cores are. It is never taken apart: its threads live as long as the
// process. One that is forked has none of them, and gets a crew of its own.
std::atomic<Crew*>& crew() {
  static std::atomic<Crew*> crew{nullptr};
  return crew;
}

}  // namespace

void work_together(int64_t num_threads, const Work& work) {
  Crew* mine = crew();
  if (!mine) {
    auto* fresh = new Crew;
    if (crew().compare_exchange_strong(mine, fresh)) {
      mine = fresh;
      pthread_atfork(nullptr, nullptr, [] { crew() = nullptr; });
    } else {
      delete fresh;
    }
  }
  mine->work_together(num_threads, work);
}

}  // namespace quire
