// SPDX-License-Identifier: Apache-2.0
#include "thread_pool.h"

#include <emmintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <stdexcept>

namespace moorage::cpu {
namespace {

// A pause takes ~140 cycles on the machines that have AMX: 256 of them are some 15 us.
constexpr int kSpinsInPhase = 2000;
constexpr int kSpinsIdle = 256;
constexpr int kMaxThreads = 64;

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr,
          0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
          nullptr, 0);
}

// Waits until `word` differs from `seen`.
void wait_change(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<int>& sleepers,
                 int spins) {
  for (int spin = 0; spin < spins; ++spin) {
    if (word.load(std::memory_order_acquire) != seen) return;
    _mm_pause();
  }
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (word.load(std::memory_order_seq_cst) == seen) futex_wait(word, seen);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void change(std::atomic<uint32_t>& word, std::atomic<int>& sleepers) {
  word.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(word);
}

int usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::clamp(CPU_COUNT(&set), 1, kMaxThreads);
}

std::mutex g_pool_mutex;
std::shared_ptr<ThreadPool> g_pool;

}  // namespace

Team::Team(int size) : size_(size), ranges_(static_cast<size_t>(size)) {}

void Team::deal(int num_items) {
  for (int member = 0; member < size_; ++member) {
    ranges_[member].next.store(num_items * member / size_, std::memory_order_relaxed);
    ranges_[member].end = num_items * (member + 1) / size_;
  }
}

void Team::meet(int member, int next_items) {
  (void)member;
  const uint32_t seen = epoch_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    deal(next_items);
    change(epoch_, sleepers_);
    return;
  }
  wait_change(epoch_, seen, sleepers_, kSpinsInPhase);
}

int Team::claim(int member) {
  for (int offset = 0; offset < size_; ++offset) {
    Range& range = ranges_[(member + offset) % size_];
    if (range.next.load(std::memory_order_relaxed) >= range.end) continue;
    const int item = range.next.fetch_add(1, std::memory_order_relaxed);
    if (item < range.end) return item;
  }
  return -1;
}

ThreadPool::ThreadPool(int size) : team_(size) {
  for (int member = 1; member < size; ++member) {
    workers_.emplace_back([this, member] { serve(member); });
  }
}

ThreadPool::~ThreadPool() {
  stops_.store(true, std::memory_order_release);
  change(generation_, sleepers_);
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::serve(int member) {
  uint32_t seen = 0;
  while (true) {
    wait_change(generation_, seen, sleepers_, kSpinsIdle);
    seen = generation_.load(std::memory_order_acquire);
    if (stops_.load(std::memory_order_acquire)) return;
    team_.meet(member, first_items_);
    (*fn_)(team_, member);
    team_.meet(member, 0);
  }
}

void ThreadPool::run(int first_items, const std::function<void(Team&, int)>& fn) {
  std::lock_guard lock(callers_);
  fn_ = &fn;
  first_items_ = first_items;
  change(generation_, sleepers_);
  // Members begin by meeting, which deals the first phase.
  team_.meet(0, first_items);
  fn(team_, 0);
  team_.meet(0, 0);
}

std::shared_ptr<ThreadPool> global_pool() {
  std::lock_guard lock(g_pool_mutex);
  if (!g_pool) g_pool = std::make_shared<ThreadPool>(usable_cpus());
  return g_pool;
}

void set_num_threads(int num_threads) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw std::invalid_argument("num_threads: got " + std::to_string(num_threads) +
                                "; allowed: 1 to " + std::to_string(kMaxThreads));
  }
  std::shared_ptr<ThreadPool> old;
  std::lock_guard lock(g_pool_mutex);
  if (g_pool && g_pool->size() == num_threads) return;
  old = std::move(g_pool);
  g_pool = std::make_shared<ThreadPool>(num_threads);
}

int num_threads() { return global_pool()->size(); }

}  // namespace moorage::cpu
