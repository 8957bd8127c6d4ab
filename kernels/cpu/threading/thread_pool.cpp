#include "threading/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "threading/spin_wait.h"

namespace quire {
namespace {

using Work = std::function<void(int64_t)>;

// How long an idle thread spins: longer than the gap between two operations of a step, and shorter
// than the gap between two steps, when other processes need the core.
constexpr int64_t kSpinNs = 500'000;

class ThreadPool {
 public:
  void run(int64_t num_threads, const Work& work) {
    // Another caller uses the pool.
    if (busy_.test_and_set()) return work(0);
    start_threads(num_threads - 1);
    num_threads_ = num_threads;
    work_ = &work;
    ++number_;
    wake_sleeping();
    work(0);
    work_ = nullptr;
    SpinWait wait;
    while (num_active_ > 0) wait.spin_once();
    busy_.clear();
  }

  void call() {
    ++num_calls_;
    wake_sleeping();
  }

 private:
  // Starts as many threads as the system allows, up to `count` in all.
  void start_threads(int64_t count) {
    if (num_started_ >= count) return;
    // Pool threads receive no signals but those that they cause themselves.
    sigset_t others, before;
    sigfillset(&others);
    for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&others, own);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    try {
      for (; num_started_ < count; ++num_started_) {
        std::thread([this, thread = num_started_ + 1, seen = number_.load()] {
          run_thread(thread, seen);
        }).detach();
      }
    } catch (const std::exception&) {
      // The work is done by fewer threads.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void wake_sleeping() {
    if (num_sleeping_ == 0) return;
    // A thread that is about to sleep reads the numbers once more under this lock.
    { const std::lock_guard<std::mutex> lock(sleep_); }
    woken_.notify_all();
  }

  void run_thread(int64_t thread, int64_t seen) {
    pthread_setname_np(pthread_self(), "quire-pool");
    for (;;) {
      wait_for_work(seen);
      seen = number_;
      if (!work_) continue;
      // `run` withdraws the work before it waits for active threads, so an active thread reads either
      // null or work that outlives its activity.
      ++num_active_;
      if (const Work* work = work_; work && thread < num_threads_) (*work)(thread);
      --num_active_;
    }
  }

  // Returns when the number of the current work differs from `seen`.
  void wait_for_work(int64_t seen) {
    int64_t begun_ns = now_ns();
    SpinWait wait;
    while (number_ == seen) {
      wait.spin_once();
      if (wait.is_clock_due() && now_ns() - begun_ns > kSpinNs) {
        std::unique_lock<std::mutex> lock(sleep_);
        ++num_sleeping_;
        woken_.wait(lock, [&, calls = num_calls_.load()] {
          return number_ != seen || num_calls_ != calls;
        });
        --num_sleeping_;
        begun_ns = now_ns();
      }
    }
  }

  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  int64_t num_started_ = 0;
  std::atomic<const Work*> work_{nullptr};
  std::atomic<int64_t> num_threads_{0}, number_{0}, num_active_{0}, num_sleeping_{0}, num_calls_{0};
  std::mutex sleep_;
  std::condition_variable woken_;
};

// The pool of this process. It is never destroyed. A forked process has none of its threads, and
// creates another pool.
std::atomic<ThreadPool*>& process_pool() {
  static std::atomic<ThreadPool*> pool{nullptr};
  return pool;
}

ThreadPool& pool() {
  ThreadPool* pool = process_pool();
  if (pool) return *pool;
  auto* created = new ThreadPool;
  if (process_pool().compare_exchange_strong(pool, created)) {
    pthread_atfork(nullptr, nullptr, [] { process_pool() = nullptr; });
    return *created;
  }
  delete created;
  return *pool;
}

}  // namespace

void run_on_pool(int64_t num_threads, const Work& work) { pool().run(num_threads, work); }

void call_pool() { pool().call(); }

}  // namespace quire
