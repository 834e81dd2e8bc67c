// SPDX-License-Identifier: Apache-2.0
// A persistent team of threads that runs one function at a time, in phases. Does not know: kernels.
//
// Thread rule: run() serialises its callers. Inside it the function runs once per member, member 0
// on the caller's thread. Waiting members spin shortly, then sleep in a futex, so that an idle
// server burns no CPU and a descheduled member does not keep the other spinning.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace moorage::cpu {

// Hands out the items of a phase: each member walks its own contiguous range (so that it streams
// through memory), then takes over what is left of the others'.
class Team {
 public:
  explicit Team(int size);

  int size() const { return size_; }

  // All members meet; then the next phase has `next_items` items to claim.
  void meet(int member, int next_items);

  // Returns an item of the current phase that nobody else has, or -1.
  int claim(int member);

 private:
  struct alignas(64) Range {
    std::atomic<int> next{0};
    int end = 0;
  };

  void deal(int num_items);

  const int size_;
  std::vector<Range> ranges_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleepers_{0};
};

class ThreadPool {
 public:
  explicit ThreadPool(int size);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return team_.size(); }

  // Runs fn(team, member) on every member and returns when all are done. `first_items` is the
  // number of items of the first phase. Requires: fn does not throw.
  void run(int first_items, const std::function<void(Team&, int)>& fn);

 private:
  void serve(int member);

  Team team_;
  std::mutex callers_;
  // Written by the caller before the generation grows, read by members after it.
  const std::function<void(Team&, int)>* fn_ = nullptr;
  int first_items_ = 0;
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stops_{false};
  std::vector<std::thread> workers_;
};

// The process's pool; resized by set_num_threads. The returned handle keeps it alive.
std::shared_ptr<ThreadPool> global_pool();
void set_num_threads(int num_threads);
int num_threads();

}  // namespace moorage::cpu
