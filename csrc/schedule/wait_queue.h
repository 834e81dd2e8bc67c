// SPDX-License-Identifier: Apache-2.0
// Who is tried next: tenants share by deficit round robin, each orders its own requests.
//
// A tenant with credit is served; serving costs it tokens, afterwards, so it may fall into debt.
// Once nobody who waits has credit, everybody who waits gets as many quanta as the first needs.
// Invariants:
//   a tenant exists while one of its requests does; an idle tenant saves up no credit
//   the order depends on arrival and charges only, never on a name or a pointer
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "requests/request.h"

namespace moorage {

struct RunsBefore {
  bool operator()(const Request* a, const Request* b) const { return a->runs_before(*b); }
};

struct Tenant {
  std::string name;
  std::set<Request*, RunsBefore> waiting;
  std::set<Request*, RunsBefore>::iterator next;  // the one to try in this round
  std::int64_t credit = 0;                        // tokens
  std::int64_t num_requests = 0;                  // in any state
};

class WaitQueue {
 public:
  explicit WaitQueue(std::int64_t quantum) : quantum_(quantum) {}

  // Every request belongs to its tenant from join to leave; in between it waits or runs.
  void join(Request& request);
  void leave(Request& request);

  void insert(Request& request);
  void erase(Request& request);  // nothing happens if it does not wait
  std::size_t size() const { return size_; }

  template <typename Predicate>
  bool any(Predicate is_meant) const {
    return std::ranges::any_of(tenants_, [&](const auto& tenant) {
      return std::ranges::any_of(tenant->waiting, [&](Request* each) { return is_meant(*each); });
    });
  }

  void rewind();    // everybody may be tried again
  Request* next();  // null: everybody was tried
  static void charge(Request& request, std::int64_t num_tokens);

 private:
  Tenant* choose();

  const std::int64_t quantum_;
  std::vector<std::unique_ptr<Tenant>> tenants_;  // in order of arrival
  std::size_t served_ = 0;                        // whose turn it is
  std::size_t size_ = 0;
};

}  // namespace moorage
