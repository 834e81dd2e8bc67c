// SPDX-License-Identifier: Apache-2.0
// The Python-facing value types that need a C++ home of their own.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "schedule/plan.h"
#include "schedule/scheduler.h"

namespace moorage {

// A step's results, copied out of the arrays they came in: the caller may reuse those at once.
struct StepDone {
  std::int64_t step_id;
  std::int32_t num_columns;
  std::vector<std::int32_t> num_accepted;
  std::vector<std::int32_t> token_ids;
  std::vector<std::uint8_t> finished;
  std::vector<std::uint8_t> failed;

  StepResult view() const {
    return {StepId{step_id}, static_cast<std::int32_t>(num_accepted.size()),
            num_columns,     num_accepted.data(),
            token_ids.data(), finished.data(),
            failed.data()};
  }
};

// A plan on its way to Python. The arrays seen there keep this object, so they never dangle.
struct PlanView {
  std::shared_ptr<Plan> plan;
};

// A share in [0, 1] as thousandths; throws std::invalid_argument naming the field.
std::int32_t as_permille(const char* field, double share);

struct TreeNodeView {
  std::int64_t node_id;
  std::int64_t parent_id;
  std::int32_t num_tokens;
  std::int32_t num_pages;
  std::int32_t num_l2_pages;  // full ones with a copy there
  std::int32_t num_l3_pages;
  std::int32_t num_children;
  std::int32_t num_users;
  std::int64_t last_used_ms;
  std::string page_hash;
  std::vector<TokenId> first_token_ids;
};

// A page that is in a lower tier and not in L1.
struct LowerPageView {
  std::string page_hash;
  std::string parent_hash;
  bool in_l2;
  bool in_l3;
};

const char* name_of(EndStatus status);
const char* name_of(LeaseState state);
const char* name_of(LeaseEventKind kind);
const char* name_of(KvEventKind kind);
const char* name_of(Tier tier);

}  // namespace moorage
